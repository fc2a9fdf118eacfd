"""LLEP: spilling over capacity to the least loaded worker, by hand and in general."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.plan import Int32Array, PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget
from afore_kernels.runtime.policies.llep import Llep
from tests.runtime.policies.test_eplb import as_demand, assert_keeps_constraints
from tests.runtime.policies.test_ultraep import pair_load
from tests.runtime.test_planner_properties import Problem, problems

COST = CostModel(10.0, 0.0, 0.0, 0.0)
TRIO = PrimaryPlacement(6, 3, 1)  # experts 0 and 1 on worker 0, 2 and 3 on 1, 4 and 5 on 2


def plan(
    demand: Int32Array,
    min_chunk: int = 1,
    slot_expert: tuple[int, ...] = (-1, -1, -1),
    is_protected: tuple[int, ...] = (0, 0, 0),
    copy_budget: int = 8,
    **knobs: Any,
) -> PlannedTarget:
    """Plan on `TRIO`; slots are those of workers 0, 1 and 2."""
    return Llep(min_chunk=min_chunk, **knobs).plan(
        demand,
        LayerState.initial(TRIO)._replace(slot_expert=np.array(slot_expert, np.int32)[:, None]),
        TRIO,
        Limits(4, copy_budget, 0),
        COST,
        sequence=7,
        is_protected=np.array(is_protected, np.uint8)[:, None],
    )


SKEWED = as_demand(50, 10, 20, 5, 10, 1)  # loads 60, 25, 11; capacity 36 (35.2)
HOT = as_demand(70, 10, 20, 5, 10, 1)  # loads 80, 25, 11; capacity 43 (42.53)


def test_the_rest_over_capacity_goes_to_the_least_loaded_worker() -> None:
    # Expert 1 still needs 10 of worker 0, so expert 0 keeps 26; the other 24 go to worker 2.
    planned = plan(SKEWED)
    assert planned.slot_expert.ravel().tolist() == [-1, -1, 0]
    assert planned.slot_pairs.ravel().tolist() == [0, 0, 24]
    assert planned.slot_copy.ravel().tolist() == [0, 0, 1]
    assert pair_load(SKEWED, TRIO, planned).tolist() == [36, 25, 35]
    assert planned.state.slot_tiles.ravel().tolist() == [0, 0, 6]
    assert planned.state.primary_tiles.tolist() == [7, 3, 5, 2, 3, 1]
    assert planned.state.slot_last_use.ravel().tolist() == [-1, -1, 7]


def test_a_full_worker_leaves_the_rest_to_the_next() -> None:
    # 37 spill: worker 2 has room for 32 of them, worker 1 takes 5
    planned = plan(HOT, min_chunk=4)
    assert planned.slot_pairs.ravel().tolist() == [0, 5, 32]
    assert pair_load(HOT, TRIO, planned).tolist() == [43, 30, 43]
    # the last chunk may be smaller than the minimum
    assert plan(HOT, min_chunk=32).slot_pairs.ravel().tolist() == [0, 5, 32]


def test_where_no_chunk_is_large_enough_the_least_loaded_takes_all() -> None:
    # All 37 to worker 2, which then has no room for 5 of its own expert 4: they go to worker 1.
    planned = plan(HOT, min_chunk=33)
    assert planned.slot_expert.ravel().tolist() == [-1, 4, 0]
    assert planned.slot_pairs.ravel().tolist() == [0, 5, 37]
    assert pair_load(HOT, TRIO, planned).tolist() == [43, 30, 43]


@pytest.mark.parametrize(("redundant_slots", "spilled"), [(1, [30]), (2, [30, 1])])
def test_an_expert_without_capacity_leaves_its_primary(
    redundant_slots: int, spilled: list[int]
) -> None:
    # Loads 70 and 0, capacity 39 (38.5). Experts 1 and 2 need 40 of worker 0: expert 0 goes
    # entirely. Expert 1 keeps 29, and its last pair goes if there is a slot for it.
    placement = PrimaryPlacement(6, 2, redundant_slots)
    planned = Llep(min_chunk=4).plan(
        as_demand(30, 30, 10, 0, 0, 0),
        LayerState.initial(placement),
        placement,
        Limits(4, 8, 0),
        COST,
        sequence=0,
    )
    assert planned.slot_pairs[1].tolist() == spilled
    assert planned.state.primary_tiles.tolist() == [0, 8, 3, 0, 0, 0]


def test_the_budget_leaves_the_rest_on_the_primary() -> None:
    one = plan(HOT, copy_budget=1)
    assert one.slot_pairs.ravel().tolist() == [0, 0, 32]
    assert pair_load(HOT, TRIO, one).tolist() == [48, 25, 43]
    assert not plan(HOT, copy_budget=0).slot_pairs.any()


def test_a_resident_replica_costs_no_copy() -> None:
    planned = plan(HOT, slot_expert=(-1, 0, 3), copy_budget=1)
    assert planned.slot_expert.ravel().tolist() == [-1, 0, 0]
    assert planned.slot_pairs.ravel().tolist() == [0, 5, 32]
    assert planned.slot_copy.ravel().tolist() == [0, 0, 1]


def test_a_protected_slot_serves_only_the_expert_it_holds() -> None:
    blocked = plan(HOT, slot_expert=(-1, -1, 3), is_protected=(0, 0, 1))
    # worker 1 has room for 18; the other 19 stay
    assert blocked.slot_expert.ravel().tolist() == [-1, 0, 3]
    assert blocked.slot_pairs.ravel().tolist() == [0, 18, 0]
    assert pair_load(HOT, TRIO, blocked).tolist() == [62, 43, 11]
    held = plan(HOT, slot_expert=(-1, -1, 0), is_protected=(0, 0, 1))
    assert held.slot_pairs.ravel().tolist() == [0, 5, 32]


def test_ties_go_to_the_lower_worker() -> None:
    # capacity 4 (3.3): expert 0 keeps 4, worker 1 takes 4 and worker 2 the last
    assert plan(as_demand(9, 0, 0, 0, 0, 0)).slot_pairs.ravel().tolist() == [0, 4, 1]


def test_nothing_is_spilled_to_a_worker_as_loaded_as_the_primary() -> None:
    # Capacity 8 (7.7). Expert 0 keeps 8; worker 2 has no slot for the rest, and worker 1 has 10.
    demand = as_demand(10, 0, 10, 0, 1, 0)
    assert plan(demand).slot_pairs.ravel().tolist() == [0, 0, 2]
    assert not plan(demand, is_protected=(0, 0, 1)).slot_pairs.any()


def test_a_tolerated_imbalance_is_left_alone() -> None:
    # largest over mean load: 60 / 32 = 1.875
    assert plan(SKEWED, imbalance_threshold=1.8).slot_pairs.any()
    left = plan(SKEWED, slot_expert=(-1, -1, 0), imbalance_threshold=1.9)
    assert left.slot_expert.ravel().tolist() == [-1, -1, 0]
    assert not left.slot_pairs.any()


def test_a_larger_capacity_spills_less() -> None:
    assert plan(SKEWED, capacity_factor=1.5).slot_pairs.ravel().tolist() == [0, 0, 12]  # 48


@given(problems(), st.sampled_from([1, 3, 16, 1024]))
def test_every_plan_keeps_the_constraints(problem: Problem, min_chunk: int) -> None:
    demand, state, placement, limits, cost, is_protected = problem
    arrays = (demand, is_protected, *state)
    before = [array.copy() for array in arrays]
    planned = Llep(min_chunk=min_chunk).plan(
        demand, state, placement, limits, cost, sequence=1000, is_protected=is_protected
    )
    for array, copy in zip(arrays, before):
        np.testing.assert_array_equal(array, copy)
    assert_keeps_constraints(planned, state, demand, placement, limits, is_protected, 1000)


@given(problems())
def test_with_slots_for_every_expert_no_worker_exceeds_the_capacity(problem: Problem) -> None:
    placement = PrimaryPlacement(
        problem.placement.num_experts, problem.placement.num_workers, problem.placement.num_experts
    )
    limits = problem.limits._replace(copy_budget=10**6)
    planned = Llep(min_chunk=1).plan(
        problem.demand, LayerState.initial(placement), placement, limits, COST, sequence=0
    )
    capacity = np.ceil(1.1 * (problem.demand.sum(dtype=np.int64) / placement.num_workers))
    assert pair_load(problem.demand, placement, planned).max() <= capacity


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_chunk": 0}, "min_chunk must be finite and at least 1, got 0"),
        ({"min_chunk": 1, "capacity_factor": 0.9}, "capacity_factor must be .* got 0.9"),
        ({"min_chunk": 1, "imbalance_threshold": float("nan")}, "imbalance_threshold .* got nan"),
    ],
)
def test_bad_knobs(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Llep(**knobs)


def test_bad_demand() -> None:
    with pytest.raises(ShapeError, match="demand of expert 2 is -1"):
        plan(as_demand(0, 0, -1, 0, 0, 0))
