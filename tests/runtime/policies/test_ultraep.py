"""UltraEP: quotas under the least target load, by hand and in general."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget
from afore_kernels.runtime.policies.ultraep import UltraEp
from tests.runtime.policies.test_eplb import as_demand, assert_keeps_constraints
from tests.runtime.test_planner_properties import Problem, problems

COST = CostModel(10.0, 0.0, 0.0, 0.0)
TRIO = PrimaryPlacement(6, 3, 1)  # experts 0 and 1 on worker 0, 2 and 3 on 1, 4 and 5 on 2
DEMAND = as_demand(50, 10, 20, 5, 10, 1)  # loads 60, 25, 11; mean 32, smallest T 33


def plan(
    min_quota: int = 1,
    slot_expert: tuple[int, ...] = (-1, -1, -1),
    is_protected: tuple[int, ...] = (0, 0, 0),
    copy_budget: int = 8,
    **knobs: Any,
) -> PlannedTarget:
    """Plan `DEMAND` on `TRIO`; slots are those of workers 0, 1 and 2."""
    return UltraEp(min_quota=min_quota, **knobs).plan(
        DEMAND,
        LayerState.initial(TRIO)._replace(slot_expert=np.array(slot_expert, np.int32)[:, None]),
        TRIO,
        Limits(4, copy_budget, 0),
        COST,
        sequence=7,
        is_protected=np.array(is_protected, np.uint8)[:, None],
    )


def pair_load(
    demand: np.ndarray, placement: PrimaryPlacement, planned: PlannedTarget
) -> np.ndarray:
    """Pairs per worker of a plan."""
    is_bound = planned.slot_expert >= 0
    primary_pairs = demand.astype(np.int64)
    np.subtract.at(primary_pairs, planned.slot_expert[is_bound], planned.slot_pairs[is_bound])
    load = planned.slot_pairs.sum(axis=1, dtype=np.int64)
    np.add.at(load, placement.primary_worker, primary_pairs)
    return load


def test_the_most_loaded_worker_fills_the_others() -> None:
    # T = 33: 27 away from worker 0, of expert 0: 22 to worker 2 (most room), 5 to worker 1
    planned = plan()
    assert planned.slot_expert.ravel().tolist() == [-1, 0, 0]
    assert planned.slot_pairs.ravel().tolist() == [0, 5, 22]
    assert planned.slot_copy.ravel().tolist() == [0, 1, 1]
    assert pair_load(DEMAND, TRIO, planned).tolist() == [33, 30, 33]
    # tiles of 4: 23 pairs of expert 0 stay on its primary
    assert planned.state.slot_tiles.ravel().tolist() == [0, 2, 6]
    assert planned.state.primary_tiles.tolist() == [6, 3, 5, 2, 3, 1]
    assert planned.state.slot_last_use.ravel().tolist() == [-1, 7, 7]


def test_a_quota_below_the_minimum_raises_the_target_load() -> None:
    # T = 33 leaves 5, 34 leaves 3 and 35 leaves 1 for worker 1; at 36 worker 2 takes all 24
    planned = plan(min_quota=6)
    assert planned.slot_pairs.ravel().tolist() == [0, 0, 24]
    assert pair_load(DEMAND, TRIO, planned).tolist() == [36, 25, 35]


def test_the_threshold_bounds_the_target_load_from_below() -> None:
    planned = plan(balance_threshold=1.2)  # T = 39 (38.4)
    assert planned.slot_pairs.ravel().tolist() == [0, 0, 21]


def test_the_budget_raises_the_target_load() -> None:
    assert plan(copy_budget=1).slot_pairs.ravel().tolist() == [0, 0, 24]
    nothing = plan(copy_budget=0)
    assert nothing.slot_expert.ravel().tolist() == [-1, -1, -1]
    assert nothing.state.primary_tiles.tolist() == [13, 3, 5, 2, 3, 1]


def test_a_resident_replica_costs_no_copy() -> None:
    planned = plan(slot_expert=(-1, 0, 3), copy_budget=1)
    assert planned.slot_expert.ravel().tolist() == [-1, 0, 0]
    assert planned.slot_pairs.ravel().tolist() == [0, 5, 22]
    assert planned.slot_copy.ravel().tolist() == [0, 0, 1]


def test_a_protected_slot_serves_only_the_expert_it_holds() -> None:
    # Only worker 1 is left: 60 - T <= T - 25 from T = 43
    blocked = plan(slot_expert=(-1, -1, 3), is_protected=(0, 0, 1))
    assert blocked.slot_expert.ravel().tolist() == [-1, 0, 3]
    assert blocked.slot_pairs.ravel().tolist() == [0, 17, 0]
    held = plan(slot_expert=(-1, -1, 0), is_protected=(0, 0, 1))
    assert held.slot_pairs.ravel().tolist() == [0, 5, 22]


def test_the_least_recently_used_slot_is_rebound() -> None:
    placement = PrimaryPlacement(4, 2, 3)
    state = LayerState.initial(placement)._replace(
        slot_expert=np.array([[-1] * 3, [1, 1, 1]], np.int32),
        slot_last_use=np.array([[-1] * 3, [5, 3, 4]], np.int64),
    )
    demand = as_demand(10, 0, 0, 0)
    policy, limits = UltraEp(min_quota=1), Limits(4, 8, 0)
    nothing_protected = np.zeros((2, 3), np.uint8)

    def slots(slot_expert: list[int], is_protected: np.ndarray) -> list[int]:
        table = np.array([[-1] * 3, slot_expert], np.int32)
        planned = policy.plan(
            demand,
            state._replace(slot_expert=table),
            placement,
            limits,
            COST,
            sequence=9,
            is_protected=is_protected,
        )
        assert planned.slot_pairs[1].sum() == 4  # T = 6, of a mean of 5
        return planned.slot_expert[1].tolist()

    assert slots([1, -1, 0], nothing_protected) == [1, -1, 0]  # held already
    assert slots([1, -1, -1], nothing_protected) == [1, 0, -1]  # empty
    assert slots([1, 2, 3], nothing_protected)[1] == 0  # used at 3
    assert slots([1, 2, 3], np.array([[0] * 3, [0, 1, 0]], np.uint8))[2] == 0  # used at 4


def test_a_primary_keeps_a_pair() -> None:
    placement = PrimaryPlacement(8, 4, 2)
    state, limits = LayerState.initial(placement), Limits(4, 8, 0)
    policy = UltraEp(min_quota=1)
    single = policy.plan(as_demand(1, 1, *[0] * 6), state, placement, limits, COST, sequence=0)
    assert not single.slot_pairs.any()
    # mean 4, T = 5: 8 pairs of expert 1 leave, 5 to worker 2 (before 3, a tie) and 3 to worker 3
    three = policy.plan(as_demand(4, 9, 3, *[0] * 5), state, placement, limits, COST, sequence=0)
    assert three.slot_expert.tolist() == [[-1, -1], [-1, -1], [1, -1], [1, -1]]
    assert three.slot_pairs.tolist() == [[0, 0], [0, 0], [5, 0], [3, 0]]


def test_a_layer_without_demand() -> None:
    state = LayerState.initial(TRIO)
    planned = UltraEp(min_quota=1).plan(
        np.zeros(6, np.int32), state, TRIO, Limits(4, 8, 0), COST, sequence=0
    )
    assert not planned.slot_pairs.any()
    assert not planned.slot_copy.any()


@given(problems(), st.sampled_from([1, 3, 16, 1024]))
def test_every_plan_keeps_the_constraints(problem: Problem, min_quota: int) -> None:
    demand, state, placement, limits, cost, is_protected = problem
    arrays = (demand, is_protected, *state)
    before = [array.copy() for array in arrays]
    planned = UltraEp(min_quota=min_quota).plan(
        demand, state, placement, limits, cost, sequence=1000, is_protected=is_protected
    )
    for array, copy in zip(arrays, before):
        np.testing.assert_array_equal(array, copy)
    assert_keeps_constraints(planned, state, demand, placement, limits, is_protected, 1000)
    assert (planned.slot_pairs[planned.slot_pairs > 0] >= min_quota).all()
    replicated = np.unique(planned.slot_expert[planned.slot_pairs > 0])
    assert (planned.state.primary_tiles[replicated] > 0).all()
    on_primaries = np.zeros(placement.num_workers, np.int64)
    np.add.at(on_primaries, placement.primary_worker, demand)
    assert pair_load(demand, placement, planned).max() <= on_primaries.max()


@given(problems())
def test_with_slots_for_every_expert_the_smallest_target_load_is_reached(problem: Problem) -> None:
    placement = PrimaryPlacement(
        problem.placement.num_experts, problem.placement.num_workers, problem.placement.num_experts
    )
    limits = problem.limits._replace(copy_budget=10**6)
    planned = UltraEp(min_quota=1).plan(
        problem.demand, LayerState.initial(placement), placement, limits, COST, sequence=0
    )
    smallest = int(np.ceil(1.01 * problem.demand.sum(dtype=np.int64) / placement.num_workers))
    most_kept = int(np.diff(placement.primary_starts).max())  # a pair of every primary
    assert pair_load(problem.demand, placement, planned).max() <= max(smallest, most_kept)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_quota": 0}, "min_quota must be at least 1, got 0"),
        ({"min_quota": 1, "balance_threshold": 0.99}, "balance_threshold must be .* got 0.99"),
        ({"min_quota": 1, "balance_threshold": float("nan")}, "balance_threshold must be .* nan"),
    ],
)
def test_bad_knobs(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UltraEp(**knobs)


def test_bad_demand() -> None:
    state = UltraEp(min_quota=1).initial_state(TRIO)
    with pytest.raises(ShapeError, match="demand of expert 2 is -1"):
        UltraEp(min_quota=1).plan(
            as_demand(0, 0, -1, 0, 0, 0), state, TRIO, Limits(4, 8, 0), COST, sequence=0
        )
