"""Every equation of the paper by hand, with numbers small enough to check in the head."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest

from afore_kernels.errors import InfeasiblePlanError
from afore_kernels.gemm.tiles import count_tiles
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.partition.pack import partition_pairs
from afore_kernels.plan import Int32Array, Plan, PrimaryPlacement, Target
from afore_kernels.runtime.cost import (
    CostModel,
    copy_time_us,
    exposed_time_us,
    ffn_time_us,
    net_gain_us,
)
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget, plan_microbatch
from afore_kernels.runtime.timeline import worker_loads

# Experts 0, 1 have their primaries on worker 0, experts 2, 3 on worker 1, experts 4, 5 on worker 2.
PLACEMENT = PrimaryPlacement(num_experts=6, num_workers=3, redundant_slots=2)
TILE_M = 4
FREE_COPIES = CostModel(tile_time_us=10.0, slot_time_us=0.0, copy_time_us=0.0, window_us=0.0)


def int32(*values: object) -> Int32Array:
    """An int32 array of the arguments."""
    return np.array(values, np.int32)


def int64(*values: int) -> npt.NDArray[np.int64]:
    """An int64 array of the arguments."""
    return np.array(values, np.int64)


def make_plan(
    demand: Int32Array, slot_expert: Int32Array, slot_pairs: Int32Array, tile_m: int = TILE_M
) -> Plan:
    """A plan of PLACEMENT without new copies."""
    slot_copy = np.zeros(slot_expert.shape, np.uint8)
    return Plan(Target(0, 0, 0), 0, tile_m, demand, int32(0), slot_expert, slot_pairs, slot_copy)


# Expert 0 runs 5 of its 21 pairs on worker 1 and 6 on worker 2, so 10 on its primary.
DEMAND = int32(21, 0, 3, 8, 0, 4)
EXAMPLE = make_plan(DEMAND, int32([-1, 3], [0, -1], [-1, 0]), int32([0, 2], [5, 0], [0, 6]))


def plan(
    demand: Int32Array,
    state: LayerState,
    cost: CostModel = FREE_COPIES,
    copy_budget: int = 6,
    placement: PrimaryPlacement = PLACEMENT,
) -> PlannedTarget:
    """Plan `demand` with tiles of TILE_M pairs and theta = 0."""
    limits = Limits(tile_m=TILE_M, copy_budget=copy_budget, compactness_threshold=0)
    unprotected = np.zeros(state.slot_expert.shape, np.uint8)
    return plan_microbatch(
        demand, state, placement, limits, cost, sequence=9, is_protected=unprotected
    )


def test_equation_1_every_expert_has_a_replica_and_no_worker_more_than_its_slots() -> None:
    assert [PLACEMENT.num_slots(worker) for worker in range(3)] == [4, 4, 4]
    assert PLACEMENT.primary_worker.tolist() == [0, 0, 1, 1, 2, 2]
    EXAMPLE.validate(PLACEMENT)
    beside_primary = make_plan(DEMAND, int32([1, -1], [-1, -1], [-1, -1]), int32(*[[0, 0]] * 3))
    with pytest.raises(InfeasiblePlanError, match="beside its primary at worker 0, redundant slot"):
        beside_primary.validate(PLACEMENT)
    twice = make_plan(DEMAND, int32([-1, -1], [0, 0], [-1, -1]), int32(*[[0, 0]] * 3))
    with pytest.raises(InfeasiblePlanError, match="an expert holds two slots of worker 1"):
        twice.validate(PLACEMENT)


def test_equation_2_the_demand_is_distributed_among_the_replicas() -> None:
    too_many = make_plan(DEMAND, EXAMPLE.slot_expert, int32([0, 2], [5, 0], [0, 17]))
    with pytest.raises(
        InfeasiblePlanError, match="replicas of expert 0 run more pairs than its demand"
    ):
        too_many.validate(PLACEMENT)
    no_replica = make_plan(DEMAND, EXAMPLE.slot_expert, int32([1, 2], [5, 0], [0, 6]))
    with pytest.raises(InfeasiblePlanError, match="pairs in an empty slot at worker 0"):
        no_replica.validate(PLACEMENT)
    exactly_all = make_plan(DEMAND, EXAMPLE.slot_expert, int32([0, 2], [5, 0], [0, 16]))
    exactly_all.validate(PLACEMENT)


def test_equation_3_token_load_of_a_worker() -> None:
    pairs, _ = worker_loads(EXAMPLE, PLACEMENT)
    # Worker 0: 10 of expert 0, 2 of expert 3. Worker 1: 3 of 2, 6 of 3, 5 of 0. Worker 2: 4 and 6.
    assert pairs.tolist() == [12, 14, 10]
    assert pairs.sum() == DEMAND.sum()


def test_equation_4_tile_load_of_a_worker() -> None:
    assert [count_tiles(pairs, TILE_M) for pairs in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    _, tiles = worker_loads(EXAMPLE, PLACEMENT)
    # ceil(10/4) + ceil(2/4); ceil(3/4) + ceil(6/4) + ceil(5/4); ceil(4/4) + ceil(6/4)
    assert tiles.tolist() == [4, 5, 3]
    # One tile size: what the planner counts is what the executor runs.
    for tile_m in (4, 8):
        other = make_plan(DEMAND, EXAMPLE.slot_expert, EXAMPLE.slot_pairs, tile_m)
        executed = [
            pair_intervals(other, PLACEMENT, worker).tile_schedule(other.tile_m).num_tiles
            for worker in range(3)
        ]
        assert executed == worker_loads(other, PLACEMENT)[1].tolist()


def test_equation_5_the_largest_tile_load_is_minimised() -> None:
    # 8 tiles on worker 0, 4 on worker 2: no assignment beats 4, and copies cost nothing.
    demand = int32(32, 0, 0, 0, 16, 0)
    planned = plan(demand, LayerState.initial(PLACEMENT))
    result = make_plan(demand, planned.slot_expert, planned.slot_pairs)
    assert worker_loads(result, PLACEMENT)[1].tolist() == [4, 4, 4]


def test_equation_6_only_added_replicas_are_copied() -> None:
    placement = PrimaryPlacement(num_experts=6, num_workers=3, redundant_slots=1)
    demand = int32(32, 0, 0, 0, 16, 0)
    first = plan(demand, LayerState.initial(placement), placement=placement)
    assert first.slot_expert.tolist() == [[-1], [0], [-1]]
    assert first.slot_copy.tolist() == [[0], [1], [0]]
    again = plan(demand, first.state, placement=placement)
    assert again.slot_expert.tolist() == [[-1], [0], [-1]]
    assert again.slot_copy.tolist() == [[0], [0], [0]]
    # Expert 4 takes the load and the slot: its replica is added, that of expert 0 just leaves.
    other = plan(int32(0, 16, 0, 0, 32, 0), again.state, placement=placement)
    assert other.slot_expert.tolist() == [[-1], [4], [-1]]
    assert other.slot_copy.tolist() == [[0], [1], [0]]


def test_equation_7_only_the_time_beyond_the_window_is_exposed() -> None:
    cost = CostModel(tile_time_us=0.0, slot_time_us=0.0, copy_time_us=50.0, window_us=0.0)
    # M: two copies into worker 1 queue up, as do three out of worker 2.
    assert copy_time_us(int64(1, 2, 0), int64(1, 1, 1), cost) == 100.0
    assert copy_time_us(int64(2, 1, 0), int64(0, 0, 3), cost) == 150.0
    assert exposed_time_us(150.0, 100.0) == 50.0
    assert exposed_time_us(100.0, 100.0) == 0.0
    assert exposed_time_us(0.0, 100.0) == 0.0


def test_equation_8_net_gain() -> None:
    cost = CostModel(tile_time_us=10.0, slot_time_us=0.0, copy_time_us=50.0, window_us=70.0)
    baseline_us = ffn_time_us(int64(12, 0, 0), int64(1, 0, 0), cost)
    candidate_us = ffn_time_us(int64(4, 4, 4), int64(1, 1, 1), cost)
    # Both copies leave worker 0: 100 us, of which the window hides 70.
    exposed_us = exposed_time_us(copy_time_us(int64(0, 1, 1), int64(2, 0, 0), cost), cost.window_us)
    assert (baseline_us, candidate_us, exposed_us) == (120.0, 40.0, 30.0)
    assert net_gain_us(baseline_us, candidate_us, exposed_us) == 50.0


@pytest.mark.parametrize(
    ("copy_us", "num_copies"), [(4.0, 3), (5.0, 1), (29.0, 1), (30.0, 0), (31.0, 0)]
)
def test_equation_9_the_largest_positive_net_gain_is_installed(
    copy_us: float, num_copies: int
) -> None:
    # 3 tiles each of experts 0 and 1. The moves make the loads 3 3 0, then 2 3 1, then 2 2 2; all
    # copies leave worker 0. With c per copy the gains are 30 - c, 30 - 2c and 40 - 3c.
    cost = CostModel(tile_time_us=10.0, slot_time_us=0.0, copy_time_us=copy_us, window_us=0.0)
    planned = plan(int32(12, 12, 0, 0, 0, 0), LayerState.initial(PLACEMENT), cost)
    assert planned.slot_copy.sum() == num_copies


@pytest.mark.parametrize(
    ("demand", "moved_tiles"),
    [
        ((40, 0, 0, 0, 0, 0), 5),  # floor((10 - 0) / 2) of its 10 tiles
        ((44, 0, 0, 0, 0, 0), 5),  # floor((11 - 0) / 2)
        ((12, 40, 0, 0, 0, 0), 3),  # floor((13 - 0) / 2) = 6, but expert 0 has only 3
        ((40, 0, 0, 36, 0, 0), 0),  # floor((10 - 9) / 2)
    ],
)
def test_equation_10_tiles_of_one_move(demand: tuple[int, ...], moved_tiles: int) -> None:
    # The one replica is of expert 0 on worker 1, and no copy is allowed: stage 2 alone.
    state = LayerState.initial(PLACEMENT)
    state.slot_expert[1, 0] = 0
    planned = plan(int32(*demand), state, copy_budget=0)
    assert planned.state.slot_tiles[1, 0] == moved_tiles
    assert planned.slot_pairs[1, 0] == moved_tiles * TILE_M


def test_equation_11_replicas_own_consecutive_ordinals_and_the_primary_the_rest() -> None:
    bounds = {}
    for worker in range(3):
        slots = pair_intervals(EXAMPLE, PLACEMENT, worker)
        for expert, lo, hi in zip(slots.expert, slots.lo, slots.hi):
            if lo < hi:
                bounds[int(expert), worker] = (int(lo), int(hi))
    assert bounds == {
        (0, 1): (0, 5),
        (0, 2): (5, 11),
        (0, 0): (11, 21),
        (3, 0): (0, 2),
        (3, 1): (2, 8),
        (2, 1): (0, 3),
        (5, 2): (0, 4),
    }
    # So the union over workers is every valid pair, each once.
    expert_ids = np.random.default_rng(0).permutation(np.repeat(np.arange(6), DEMAND))
    expert_ids = np.insert(expert_ids, [0, 7, 30], [-1, 6, -1])  # ids without an expert
    executed = []
    for worker in range(3):
        intervals = pair_intervals(EXAMPLE, PLACEMENT, worker)
        schedule = intervals.tile_schedule(EXAMPLE.tile_m)
        partition = partition_pairs(expert_ids, intervals, schedule)
        executed += np.flatnonzero(partition.tiles.pair_row >= 0).tolist()
        assert partition.mismatched_expert == -1
    assert sorted(executed) == np.flatnonzero((expert_ids >= 0) & (expert_ids < 6)).tolist()


def test_every_equation_has_its_test() -> None:
    numbers = {
        int(match[1]) for name in globals() if (match := re.match(r"test_equation_(\d+)", name))
    }
    assert numbers == set(range(1, 12))
