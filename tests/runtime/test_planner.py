"""The planner against its oracle, adversarial demand, and examples worked by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import ShapeError
from afore_kernels.plan import Int32Array, Plan, PrimaryPlacement, Target
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import (
    Candidate,
    LayerState,
    layer_state,
)
from afore_kernels.runtime.planner import Limits, PlannedTarget, plan_core, plan_microbatch
from afore_kernels.runtime.planner_oracle import plan_microbatch_oracle
from afore_kernels.runtime.rebalance import find_safe_slot

INT32_MAX = 2**31 - 1
FREE_COPIES = CostModel(tile_time_us=10.0, slot_time_us=0.0, copy_time_us=0.0, window_us=0.0)


def make_limits(tile_m: int = 1, copy_budget: int = 16, threshold: int = 0) -> Limits:
    return Limits(tile_m, copy_budget, threshold)


UNIT_TILES = make_limits()


def as_demand(*counts: int) -> Int32Array:
    return np.array(counts, np.int32)


def to_plan(planned: PlannedTarget, demand: Int32Array, tile_m: int) -> Plan:
    return Plan(
        Target(0, 0, 0),
        0,
        tile_m,
        demand,
        np.zeros(1, np.int32),
        planned.slot_expert,
        planned.slot_pairs,
        planned.slot_copy,
    )


def assert_same(left: PlannedTarget, right: PlannedTarget) -> None:
    for field in ("slot_expert", "slot_pairs", "slot_copy"):
        np.testing.assert_array_equal(getattr(left, field), getattr(right, field), field)
    for field, a, b in zip(LayerState._fields, left.state, right.state):
        np.testing.assert_array_equal(a, b, field)
        assert a.dtype == b.dtype


@dataclass(frozen=True)
class Scenario:
    """One layer's problem; `replicas` maps (worker, slot) to (expert, tiles, last use)."""

    placement: PrimaryPlacement
    primary_tiles: tuple[int, ...]
    replicas: dict[tuple[int, int], tuple[int, int, int]]
    limits: Limits = UNIT_TILES
    cost: CostModel = FREE_COPIES
    protected: frozenset[tuple[int, int]] = frozenset()

    def state(self) -> LayerState:
        state = LayerState.initial(self.placement)
        state.primary_tiles[:] = self.primary_tiles
        for slot, (expert, tiles, last_use) in self.replicas.items():
            state.slot_expert[slot] = expert
            state.slot_tiles[slot] = tiles
            state.slot_last_use[slot] = last_use
        return state

    def plan(self, *demand: int) -> PlannedTarget:
        """Plan with both implementations, which must agree."""
        is_protected = np.zeros(
            (self.placement.num_workers, self.placement.redundant_slots), np.uint8
        )
        for slot in self.protected:
            is_protected[slot] = 1
        arguments = (as_demand(*demand), self.state(), self.placement, self.limits, self.cost)
        planned = plan_microbatch(*arguments, sequence=100, is_protected=is_protected)
        oracle = plan_microbatch_oracle(
            *arguments,
            sequence=100,
            is_protected=is_protected,
            planning_demand=as_demand(*demand),
        )
        assert_same(planned, oracle)
        return planned


def random_demand(rng: np.random.Generator, num_experts: int, tile_m: int) -> Int32Array:
    """Skewed demand with the special cases that a decode stream has."""
    kind = rng.integers(8)
    if kind == 0:
        return np.zeros(num_experts, np.int32)
    if kind == 1:
        one_hot = np.zeros(num_experts, np.int32)
        one_hot[rng.integers(num_experts)] = rng.integers(1, 40 * tile_m)
        return one_hot
    popularity = rng.dirichlet(np.full(num_experts, 0.3))
    return rng.multinomial(rng.integers(1, 30 * tile_m + 30), popularity).astype(np.int32)


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_the_oracle_on_random_states(seed: int) -> None:
    """10 x 50 x 20 = 10,000 states, each evolved from the plan before it."""
    rng = np.random.default_rng(seed)
    num_copies, num_busy = 0, 0
    for _ in range(50):
        num_experts, num_workers = int(rng.integers(1, 14)), int(rng.integers(1, 7))
        placement = PrimaryPlacement(num_experts, num_workers, int(rng.choice([0, 1, 2, 2, 3])))
        limits = Limits(
            tile_m=int(2 ** rng.integers(0, 7)),
            copy_budget=int(rng.choice([0, 1, 3, 100, 100])),
            compactness_threshold=int(rng.choice([0, 0, 1, 2, 3])),
        )
        cost = CostModel(
            tile_time_us=float(rng.choice([1.0, 7.3, 50.0])),
            slot_time_us=float(rng.choice([0.0, 0.0, 3.1, 80.0])),
            copy_time_us=float(rng.choice([0.0, 5.7, 60.0])),
            window_us=float(rng.choice([0.0, 6.0, 100.0, np.inf])),
        )
        plans_ahead = rng.random() < 0.25
        state = LayerState.initial(placement)
        demand = random_demand(rng, num_experts, limits.tile_m)
        for sequence in range(20):
            previous_demand, demand = demand, random_demand(rng, num_experts, limits.tile_m)
            is_protected = (state.slot_tiles > 0) & (rng.random() < 0.7)
            is_protected |= (state.slot_expert >= 0) & (
                rng.random(is_protected.shape) < rng.choice([0.0, 0.3])
            )
            keywords = {
                "sequence": sequence,
                "is_protected": is_protected.astype(np.uint8),
                "planning_demand": previous_demand if plans_ahead else demand,
            }
            arguments = (demand, state, placement, limits, cost)
            planned = plan_microbatch(*arguments, **keywords)
            assert_same(planned, plan_microbatch_oracle(*arguments, **keywords))
            to_plan(planned, demand, limits.tile_m).validate(placement)
            num_copies += int(planned.slot_copy.sum())
            num_busy += int((planned.slot_pairs > 0).sum())
            state = planned.state
    assert num_copies > 100, "the scenarios must exercise stage 3"
    assert num_busy > num_copies, "the scenarios must exercise reuse of replicas"


# Adversarial demand


def busiest_load(planned: PlannedTarget, placement: PrimaryPlacement) -> int:
    load = planned.state.slot_tiles.sum(axis=1, dtype=np.int64)
    np.add.at(load, placement.primary_worker, planned.state.primary_tiles)
    return int(load.max())


def check_many(placement: PrimaryPlacement, *demands: Int32Array) -> list[PlannedTarget]:
    """Plan a stream from an empty state with both implementations, and refined beside them."""
    state = LayerState.initial(placement)
    plans = []
    for sequence, demand in enumerate(demands):
        arguments = (demand, state, placement, make_limits(), FREE_COPIES)
        planned = plan_microbatch(*arguments, sequence=sequence)
        oracle = plan_microbatch_oracle(
            *arguments,
            sequence=sequence,
            is_protected=(state.slot_tiles > 0).astype(np.uint8),
            planning_demand=demand,
        )
        assert_same(planned, oracle)
        to_plan(planned, demand, 1).validate(placement)
        refining = (*arguments[:3], arguments[3]._replace(is_refined=True), FREE_COPIES)
        refined = plan_microbatch(*refining, sequence=sequence)
        to_plan(refined, demand, 1).validate(placement)
        assert busiest_load(refined, placement) <= busiest_load(planned, placement)
        plans.append(planned)
        state = planned.state
    return plans


def test_zero_demand_runs_nothing_and_copies_nothing() -> None:
    (planned,) = check_many(PrimaryPlacement(8, 4, 2), as_demand(*[0] * 8))
    assert not planned.slot_pairs.any()
    assert not planned.slot_copy.any()
    assert not planned.state.primary_tiles.any()


def test_one_hot_demand_spreads_over_every_worker() -> None:
    (planned,) = check_many(PrimaryPlacement(8, 4, 2), as_demand(0, 0, 0, 1000, 0, 0, 0, 0))
    load = planned.slot_pairs.sum(axis=1)
    load[1] += 1000 - load.sum()
    np.testing.assert_array_equal(load, [250, 250, 250, 250])
    assert planned.slot_copy.sum() == 3


def test_equal_demand_stays_on_the_primaries() -> None:
    (planned,) = check_many(PrimaryPlacement(8, 4, 2), as_demand(*[5] * 8))
    assert not planned.slot_copy.any()


def test_one_expert_per_worker_is_balanced_by_replicas() -> None:
    (planned,) = check_many(PrimaryPlacement(4, 4, 1), as_demand(9, 1, 1, 1))
    load = planned.slot_pairs.sum(axis=1) + planned.state.primary_tiles
    np.testing.assert_array_equal(load, [3, 3, 3, 3])


@pytest.mark.parametrize("placement", [PrimaryPlacement(6, 1, 2), PrimaryPlacement(6, 3, 0)])
def test_one_worker_or_no_redundant_slot_has_no_replica(placement: PrimaryPlacement) -> None:
    demands = [as_demand(50, 0, 3, 0, 0, 1), as_demand(0, 0, 0, 0, 0, 90)]
    for planned, demand in zip(check_many(placement, *demands), demands):
        assert (planned.slot_expert == -1).all()
        np.testing.assert_array_equal(planned.state.primary_tiles, demand)


def test_int32_max_pairs_of_one_expert_do_not_overflow() -> None:
    full = as_demand(0, INT32_MAX, 0, 0)
    first, second, third = check_many(
        PrimaryPlacement(4, 2, 1), full, as_demand(0, INT32_MAX - 1, 0, 0), full
    )
    for planned, pairs in ((first, INT32_MAX), (second, INT32_MAX - 1), (third, INT32_MAX)):
        assert planned.slot_pairs[1, 0] == pairs // 2
        assert planned.state.primary_tiles[1] == pairs - pairs // 2


def test_every_expert_at_int32_max_does_not_overflow_the_load() -> None:
    demand = np.full(6, INT32_MAX, np.int32)
    (planned,) = check_many(PrimaryPlacement(6, 4, 1), demand)
    load = planned.slot_pairs.sum(axis=1, dtype=np.int64)
    np.add.at(load, [0, 0, 1, 1, 2, 3], planned.state.primary_tiles.astype(np.int64))
    assert load.sum() == 6 * INT32_MAX
    assert load.max() < 2 * INT32_MAX


def test_experts_that_the_workers_do_not_divide() -> None:
    placement = PrimaryPlacement(7, 3, 1)  # 3, 2 and 2 primaries
    (planned,) = check_many(placement, as_demand(4, 4, 4, 0, 0, 0, 0))
    assert busiest_load(planned, placement) == 4
    (planned,) = check_many(placement, as_demand(0, 0, 0, 0, 0, 0, 9))
    assert busiest_load(planned, placement) == 4


def test_thousand_experts() -> None:
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(1024, 0.1))
    placement = PrimaryPlacement(1024, 8, 2)
    demands = [rng.multinomial(4096, popularity).astype(np.int32) for _ in range(2)]
    for planned, demand in zip(check_many(placement, *demands), demands):
        static = np.add.reduceat(demand, placement.primary_starts[:-1])
        primaries = np.add.reduceat(planned.state.primary_tiles, placement.primary_starts[:-1])
        assert (primaries + planned.slot_pairs.sum(axis=1)).max() < static.max()


# Stage 1, worked by hand

THREE_WORKERS = PrimaryPlacement(num_experts=3, num_workers=3, redundant_slots=1)
TWO_WORKERS = PrimaryPlacement(num_experts=8, num_workers=2, redundant_slots=3)


def test_stage_1_gives_leftover_tiles_to_the_largest_remainders() -> None:
    # k = 10 over (3, 2, 2) of 7: 30/7 = 4 rest 2, 20/7 = 2 rest 6, 20/7 = 2 rest 6.
    scenario = Scenario(THREE_WORKERS, (3, 0, 0), {(1, 0): (0, 2, 9), (2, 0): (0, 2, 9)})
    planned = scenario.plan(10, 0, 0)
    assert planned.state.primary_tiles[0] == 4
    np.testing.assert_array_equal(planned.slot_pairs, [[0], [3], [3]])


def test_stage_1_breaks_equal_remainders_by_worker() -> None:
    # The primary of expert 2 is on worker 2; of 5 tiles over (1, 1, 1), the last two go to 0 and 1.
    scenario = Scenario(THREE_WORKERS, (0, 0, 1), {(0, 0): (2, 1, 9), (1, 0): (2, 1, 9)})
    planned = scenario.plan(0, 0, 5)
    np.testing.assert_array_equal(planned.slot_pairs, [[2], [2], [0]])
    assert planned.state.primary_tiles[2] == 1


def test_stage_1_keeps_uneven_proportions() -> None:
    # 6 over (3, 1): 18/4 = 4 rest 2, 6/4 = 1 rest 2, the tie to worker 0; both loads are then 5.
    placement = PrimaryPlacement(2, 2, 1)
    planned = Scenario(placement, (3, 0), {(1, 0): (0, 1, 9)}).plan(6, 4)
    np.testing.assert_array_equal(planned.state.primary_tiles, [5, 4])
    np.testing.assert_array_equal(planned.slot_pairs, [[0], [1]])


def test_stage_1_puts_small_experts_on_their_primary_and_keeps_the_binding() -> None:
    # Expert 0 ran on its replica alone; its 2 tiles do not exceed theta = 2, 3 tiles do.
    scenario = Scenario(THREE_WORKERS, (0, 0, 0), {(1, 0): (0, 4, 9)}, make_limits(threshold=2))
    small, large = scenario.plan(2, 0, 0), scenario.plan(3, 0, 0)
    assert small.state.primary_tiles[0] == 2
    assert small.slot_expert[1, 0] == 0
    assert small.state.slot_last_use[1, 0] == 9, "a slot without tiles was not used"
    assert large.slot_pairs[1, 0] == 3
    assert large.state.slot_last_use[1, 0] == 100


# Stage 2, worked by hand


@pytest.mark.parametrize(("threshold", "moved"), [(0, 3), (2, 3), (3, 0)])
def test_stage_2_moves_half_the_difference_if_above_the_threshold(
    threshold: int, moved: int
) -> None:
    # T = (10, 3): q = min(10, floor(7 / 2)) = 3.
    limits = make_limits(copy_budget=0, threshold=threshold)
    scenario = Scenario(PrimaryPlacement(2, 2, 1), (1, 0), {(1, 0): (0, 0, 9)}, limits)
    planned = scenario.plan(10, 3)
    assert planned.slot_pairs[1, 0] == moved
    assert planned.state.primary_tiles[0] == 10 - moved


def test_stage_2_moves_no_more_than_the_expert_has() -> None:
    # T = (10, 0), only expert 0 with its 2 tiles is on both: q = min(2, 5).
    limits = make_limits(copy_budget=0)
    scenario = Scenario(TWO_WORKERS, (0,) * 8, {(1, 1): (0, 0, 9)}, limits)
    assert scenario.plan(2, 8, 0, 0, 0, 0, 0, 0).slot_pairs[1, 1] == 2


@pytest.mark.parametrize(
    ("demand", "moved"),
    [
        ((5, 5), (0, 5)),  # q = 5 for both: the lower expert, held by the higher slot
        ((3, 9), (6, 0)),  # q = 3 and 6
    ],
)
def test_stage_2_takes_the_largest_move_then_the_lower_expert(
    demand: tuple[int, int], moved: tuple[int, int]
) -> None:
    replicas = {(1, 0): (1, 0, 9), (1, 1): (0, 0, 9)}
    scenario = Scenario(TWO_WORKERS, (0,) * 8, replicas, make_limits(copy_budget=0))
    planned = scenario.plan(*demand, 0, 0, 0, 0, 0, 0)
    assert tuple(planned.slot_pairs[1, :2]) == moved


def test_stage_2_returns_tiles_to_a_primary() -> None:
    # Expert 0 ran on its replica alone; T = (0, 10) moves 5 back.
    scenario = Scenario(PrimaryPlacement(2, 2, 1), (0, 0), {(1, 0): (0, 4, 9)})
    assert scenario.plan(10, 0).state.primary_tiles[0] == 5


def test_stage_2_scans_equally_loaded_workers_by_index() -> None:
    # T = (6, 6, 0), worker 2 holds both experts. h = 0 moves 3 of expert 0; T = (3, 6, 3);
    # h = 1 shares nothing with c = 0 and moves floor(3 / 2) = 1 of expert 1 to c = 2.
    placement = PrimaryPlacement(3, 3, 2)
    replicas = {(2, 0): (0, 0, 9), (2, 1): (1, 0, 9)}
    planned = Scenario(placement, (0, 0, 0), replicas, make_limits(copy_budget=0)).plan(6, 6, 0)
    np.testing.assert_array_equal(planned.slot_pairs[2], [3, 1])


# Stage 3, worked by hand

IDLE_SLOTS = {(1, 0): (1, 0, 7), (1, 1): (2, 0, 3), (1, 2): (3, 0, 5)}
HOT_EXPERT_0 = (10, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("replicas", "protected", "slot"),
    [
        (IDLE_SLOTS, [], 1),
        (IDLE_SLOTS, [(1, 1)], 2),
        (IDLE_SLOTS, [(1, 1), (1, 2)], 0),
        (IDLE_SLOTS, [(1, 0), (1, 1), (1, 2)], None),
        ({(1, 0): (1, 0, 7), (1, 1): (2, 0, 3)}, [], 2),  # an empty slot goes first
        ({(1, 0): (1, 0, 7), (1, 1): (2, 0, 3)}, [(1, 2)], 1),
        ({(1, 0): (1, 0, 7), (1, 1): (2, 0, 3), (1, 2): (3, 0, 3)}, [], 1),  # equally old
        ({}, [], 0),
    ],
)
def test_stage_3_rebinds_an_empty_else_the_least_recently_used_safe_slot(
    replicas: dict[tuple[int, int], tuple[int, int, int]],
    protected: list[tuple[int, int]],
    slot: int | None,
) -> None:
    scenario = Scenario(TWO_WORKERS, (0,) * 8, replicas, protected=frozenset(protected))
    planned = scenario.plan(*HOT_EXPERT_0)
    copies = [(int(w), int(r)) for w, r in np.argwhere(planned.slot_copy)]
    assert copies == ([] if slot is None else [(1, slot)])
    if slot is not None:
        assert planned.slot_expert[1, slot] == 0
        assert planned.slot_pairs[1, slot] == 5
        assert planned.state.slot_last_use[1, slot] == 100


def test_stage_3_spares_a_slot_whose_replica_has_tiles() -> None:
    # Expert 2 ran on worker 1 alone and keeps its 2 tiles there, so its older slot is not idle.
    scenario = Scenario(TWO_WORKERS, (0,) * 8, {**IDLE_SLOTS, (1, 1): (2, 1, 3)})
    planned = scenario.plan(10, 0, 2, 0, 0, 0, 0, 0)
    np.testing.assert_array_equal(planned.slot_copy[1], [0, 0, 1])
    np.testing.assert_array_equal(planned.slot_pairs[1], [0, 2, 4])


def test_stage_3_binds_a_slot_once() -> None:
    # T = (12, 0): expert 0 moves all its 4 tiles into the only slot; T = (8, 4) stays.
    planned = Scenario(PrimaryPlacement(6, 2, 1), (0,) * 6, {}).plan(4, 4, 4, 0, 0, 0)
    assert planned.slot_expert[1, 0] == 0
    np.testing.assert_array_equal(planned.slot_pairs, [[0], [4]])


def test_a_slot_reserved_by_an_earlier_move_is_not_safe_even_without_tiles() -> None:
    # Asked of the search itself: no demand was found that empties a replica of the same phase.
    candidate = Candidate.allocate(TWO_WORKERS)
    state = Scenario(TWO_WORKERS, (0,) * 8, IDLE_SLOTS).state()
    num_experts = TWO_WORKERS.num_experts
    candidate.replica_expert[num_experts:] = state.slot_expert.ravel()
    candidate.replica_tiles[num_experts:] = state.slot_tiles.ravel()

    def find() -> int:
        replica: int = find_safe_slot(
            1,
            num_experts,
            np.zeros((2, 3), np.uint8),
            state.slot_last_use,
            candidate.is_reserved,
            candidate.replica_expert,
            candidate.replica_tiles,
        )
        return replica - num_experts - 3

    assert find() == 1
    candidate.is_reserved[num_experts + 3 + 1] = True
    assert find() == 2


@pytest.mark.parametrize(
    ("copy_time_us", "window_us", "is_copied"),
    [
        (49.0, 0.0, True),  # F0 - F = 100 - 50, O = 49
        (50.0, 0.0, False),  # a gain of 0 does not pay
        (60.0, 0.0, False),
        (60.0, 20.0, True),  # O = 40
        (1e9, np.inf, True),
    ],
)
def test_stage_3_copies_only_for_a_positive_net_gain(
    copy_time_us: float, window_us: float, is_copied: bool
) -> None:
    cost = CostModel(10.0, 0.0, copy_time_us, window_us)
    planned = Scenario(PrimaryPlacement(2, 2, 1), (0, 0), {}, cost=cost).plan(10, 0)
    assert planned.slot_copy[1, 0] == is_copied
    assert planned.slot_expert[1, 0] == (0 if is_copied else -1)
    assert planned.state.primary_tiles[0] == (5 if is_copied else 10)


@pytest.mark.parametrize(("copy_budget", "num_copies"), [(1, 0), (2, 2)])
def test_stage_3_searches_through_candidates_that_do_not_pay(
    copy_budget: int, num_copies: int
) -> None:
    # T = (10, 10, 0, 0): relieving one bottleneck gains 0 - 30, relieving both gains 50 - 30.
    scenario = Scenario(
        PrimaryPlacement(4, 4, 1),
        (0, 0, 0, 0),
        {},
        make_limits(copy_budget=copy_budget),
        CostModel(10.0, 0.0, 30.0, 0.0),
    )
    assert scenario.plan(10, 10, 0, 0).slot_copy.sum() == num_copies


def test_stage_3_restores_the_best_candidate_and_the_bindings_after_it() -> None:
    # T = (12, 0, 0). Copy 1: (6, 6, 0) gains 60 - 20. Copy 2, from the same source: (3, 6, 3) gains
    # 60 - 40, so it is undone and worker 2 keeps expert 1.
    scenario = Scenario(
        THREE_WORKERS, (0, 0, 0), {(2, 0): (1, 0, 9)}, cost=CostModel(10.0, 0.0, 20.0, 0.0)
    )
    planned = scenario.plan(12, 0, 0)
    np.testing.assert_array_equal(planned.slot_copy, [[0], [1], [0]])
    np.testing.assert_array_equal(planned.slot_expert, [[-1], [0], [1]])
    np.testing.assert_array_equal(planned.slot_pairs, [[0], [6], [0]])
    assert planned.state.slot_last_use[2, 0] == 9


@pytest.mark.parametrize(("slot_time_us", "is_copied"), [(0.0, True), (100.0, False)])
def test_time_per_active_slot_can_outweigh_the_tiles_saved(
    slot_time_us: float, is_copied: bool
) -> None:
    # (4, 2) -> (3, 3) tiles saves 10 us and makes worker 1 run a second expert.
    cost = FREE_COPIES._replace(slot_time_us=slot_time_us)
    planned = Scenario(PrimaryPlacement(2, 2, 1), (0, 0), {}, cost=cost).plan(4, 2)
    assert planned.slot_copy[1, 0] == is_copied


# From tiles to pairs, worked by hand


def test_the_primary_holds_the_partial_tile() -> None:
    # 10 pairs are 3 tiles of 4; one moves, so the primary runs 4 + 2.
    limits = make_limits(tile_m=4)
    planned = Scenario(PrimaryPlacement(2, 2, 1), (0, 0), {}, limits).plan(10, 0)
    np.testing.assert_array_equal(planned.slot_pairs, [[0], [4]])
    assert planned.state.primary_tiles[0] == 2


def test_the_highest_worker_holds_the_partial_tile_of_an_idle_primary() -> None:
    # 10 pairs are 3 tiles of 4 over (0, 1, 2); theta = 1 forbids the move of one back to worker 0.
    replicas = {(1, 0): (0, 1, 9), (2, 0): (0, 2, 9)}
    limits = make_limits(tile_m=4, threshold=1)
    planned = Scenario(THREE_WORKERS, (0, 0, 0), replicas, limits).plan(10, 0, 0)
    np.testing.assert_array_equal(planned.slot_pairs, [[0], [4], [6]])


def test_a_replica_may_run_int32_max_pairs_of_an_idle_primary() -> None:
    limits = make_limits(tile_m=64, threshold=INT32_MAX // 128 + 1, copy_budget=0)
    scenario = Scenario(PrimaryPlacement(2, 2, 1), (0, 0), {(1, 0): (0, 1, 9)}, limits)
    assert scenario.plan(INT32_MAX, 0).slot_pairs[1, 0] == INT32_MAX


# Policies that reuse the planner


def test_previous_step_demand_chooses_the_placement_and_the_target_is_apportioned_to_it() -> None:
    placement = PrimaryPlacement(4, 2, 1)
    planned = plan_microbatch(
        as_demand(4, 0, 3, 0),
        LayerState.initial(placement),
        placement,
        make_limits(),
        FREE_COPIES,
        sequence=1,
        planning_demand=as_demand(10, 0, 0, 0),
    )
    # 10 tiles were split 5 and 5, so 4 are split 2 and 2; expert 2 was not expected.
    np.testing.assert_array_equal(planned.slot_pairs, [[0], [2]])
    np.testing.assert_array_equal(planned.state.primary_tiles, [2, 0, 3, 0])


def test_the_static_policy_is_a_copy_budget_of_0() -> None:
    moe = MoEConfig(num_layers=1, num_experts=4, top_k=1, hidden_size=8, intermediate_size=8)
    tier = TierConfig(num_workers=2, compactness_threshold=3)
    assert Limits.from_config(moe, tier) == Limits(moe.tile_m, 4, 3, is_refined=True)
    limits = Limits.from_config(moe, replace(tier, policy="static"))
    placement = PrimaryPlacement(4, 2, 2)
    state = LayerState.initial(placement)
    for demand in (as_demand(900, 0, 0, 0), as_demand(0, 900, 1, 0)):
        planned = plan_microbatch(demand, state, placement, limits, FREE_COPIES, sequence=0)
        assert (planned.slot_expert == -1).all()
        assert not planned.slot_pairs.any()
        state = planned.state


# The compiled form


@numba.njit(nogil=True)
def _plan_all(
    pairs, copies, states, candidate, demands, is_protected, limits, cost
):  # a scheduler loop in miniature
    for i in range(demands.shape[0]):
        layer = i % states.slot_expert.shape[0]
        state = layer_state(states, layer)
        plan_core(
            pairs[i],
            copies[i],
            state,
            candidate,
            demands[i],
            demands[i],
            is_protected,
            limits,
            cost,
            i,
        )


def test_a_compiled_loop_over_layers_equals_the_pure_function_and_allocates_nothing() -> None:
    rng = np.random.default_rng(3)
    placement, num_layers, num_targets = PrimaryPlacement(13, 4, 2), 3, 60
    demands = np.stack([random_demand(rng, 13, 1) for _ in range(num_targets)])
    is_protected = np.zeros((4, 2), np.uint8)
    pairs = np.zeros((num_targets, 4, 2), np.int32)
    copies = np.zeros((num_targets, 4, 2), np.uint8)
    states = LayerState.initial(placement, num_layers)
    arguments = (Candidate.allocate(placement), demands, is_protected, make_limits(), FREE_COPIES)

    _nrt_python.memsys_enable_stats()
    allocations = []
    for count in (1, num_targets):  # the first call compiles; each adopts its argument arrays
        states = LayerState.initial(placement, num_layers)
        before = rtsys.get_allocation_stats().alloc
        _plan_all(pairs, copies, states, arguments[0], demands[:count], *arguments[2:])
        allocations.append(rtsys.get_allocation_stats().alloc - before)
    _nrt_python.memsys_disable_stats()
    assert allocations[0] == allocations[1]

    expected = [LayerState.initial(placement) for _ in range(num_layers)]
    for i, demand in enumerate(demands):
        layer = i % num_layers
        planned = plan_microbatch(
            demand,
            expected[layer],
            placement,
            make_limits(),
            FREE_COPIES,
            sequence=i,
            is_protected=is_protected,
        )
        np.testing.assert_array_equal(pairs[i], planned.slot_pairs)
        np.testing.assert_array_equal(copies[i], planned.slot_copy)
        expected[layer] = planned.state
    for layer in range(num_layers):
        for recorded, pure in zip(layer_state(states, layer), expected[layer]):
            np.testing.assert_array_equal(recorded, pure)


# Bad input


@pytest.mark.parametrize("name", ["demand", "planning_demand"])
@pytest.mark.parametrize(
    "counts",
    [
        np.zeros(3, np.int32),
        np.zeros((2, 2), np.int32),
        np.zeros(4, np.int64),
        as_demand(0, -1, 0, 0),
    ],
    ids=["short", "2-d", "int64", "negative"],
)
def test_bad_demand_is_refused(name: str, counts: Int32Array) -> None:
    placement = PrimaryPlacement(4, 2, 1)
    demands = {"demand": as_demand(1, 1, 1, 1), name: counts}
    with pytest.raises(ShapeError, match=f"^{name} "):
        plan_microbatch(
            state=LayerState.initial(placement),
            placement=placement,
            limits=make_limits(),
            cost=FREE_COPIES,
            sequence=0,
            **demands,
        )
