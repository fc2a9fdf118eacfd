"""EPLB: the published mapping, the form with fixed primaries, and the periodic policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.plan import Int32Array, Plan, PrimaryPlacement, Target, UInt8Array
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.planner import Limits
from afore_kernels.runtime.policies import Planned, SlotState
from afore_kernels.runtime.policies.eplb import Eplb, EplbState, EplbTarget
from afore_kernels.runtime.policies.eplb_placement import (
    balanced_packing,
    fixed_primary_slots,
    rebalance_experts,
    replicate_experts,
)
from tests.runtime.test_planner_properties import Problem, problems

COST = CostModel(10.0, 0.0, 0.0, 0.0)


def as_demand(*counts: int) -> Int32Array:
    return np.array(counts, np.int32)


def assert_keeps_constraints(
    planned: Planned[SlotState],
    before: SlotState,
    demand: Int32Array,
    placement: PrimaryPlacement,
    limits: Limits,
    is_protected: UInt8Array,
    sequence: int,
) -> None:
    """Check what every policy's plan keeps."""
    slot_expert, slot_pairs, after = planned.slot_expert, planned.slot_pairs, planned.state
    plan = Plan(
        Target(0, 0, 0),
        sequence,
        limits.tile_m,
        demand,
        np.zeros(1, np.int32),
        slot_expert,
        slot_pairs,
        planned.slot_copy,
    )
    plan.validate(placement)  # one slot per (expert, worker), primaries elsewhere, pairs <= demand
    assert (slot_expert.dtype, slot_pairs.dtype) == (np.int32, np.int32)
    assert planned.slot_copy.dtype == np.uint8

    is_rebound = slot_expert != before.slot_expert
    np.testing.assert_array_equal(planned.slot_copy, is_rebound)
    assert is_rebound.sum() <= limits.copy_budget
    assert not (is_rebound & (is_protected == 1)).any()

    primary_pairs = demand.astype(np.int64)
    np.subtract.at(primary_pairs, slot_expert[slot_expert >= 0], slot_pairs[slot_expert >= 0])
    np.testing.assert_array_equal(after.primary_tiles, -(-primary_pairs // limits.tile_m))
    np.testing.assert_array_equal(
        after.slot_tiles, -(-slot_pairs.astype(np.int64) // limits.tile_m)
    )
    assert (after.slot_tiles.dtype, after.primary_tiles.dtype) == (np.int32, np.int32)
    np.testing.assert_array_equal(after.slot_expert, slot_expert)
    np.testing.assert_array_equal(
        after.slot_last_use, np.where(slot_pairs > 0, sequence, before.slot_last_use)
    )
    assert not np.shares_memory(after.slot_expert, slot_expert)


# --- the published mapping ---------------------------------------------------------------------


def test_the_example_of_the_public_readme() -> None:
    weight = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    replica_expert, expert_replicas, count = rebalance_experts(weight, 16, 4, 2, 8)
    np.testing.assert_array_equal(
        replica_expert,
        [
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ],
    )
    np.testing.assert_array_equal(count[0], [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1])
    assert sorted(expert_replicas[0, 1]) == [13, 15]
    assert expert_replicas[0, 0].tolist() == [12, -1]


def test_packing_breaks_ties_to_the_lower_item_and_pack() -> None:
    # 7 -> pack 0; 3 -> 1; 3 -> 1, which is full; 2 -> 0
    pack, rank = balanced_packing(np.array([3, 2, 7, 3]), 2)
    assert (pack.tolist(), rank.tolist()) == ([1, 0, 0, 1], [0, 1, 0, 1])
    assert balanced_packing(np.ones(4), 2)[0].tolist() == [0, 1, 0, 1]
    assert balanced_packing(np.array([1, 5, 3]), 3)[0].tolist() == [0, 1, 2]


def test_replication_breaks_ties_to_the_lower_expert() -> None:
    # 6 and 6 tie: expert 0, then 1; then all have 3: expert 0 again
    expert, rank, count = replicate_experts(np.array([6, 6, 3]), 6)
    assert (expert.tolist(), rank.tolist()) == ([0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2])
    assert count.tolist() == [3, 2, 1]


def test_groups_that_do_not_divide_among_the_nodes_make_it_global() -> None:
    weight = np.random.default_rng(0).integers(1, 100, (2, 12))
    for ours, global_form in zip(
        rebalance_experts(weight, 16, 3, 2, 4), rebalance_experts(weight, 16, 1, 1, 4)
    ):
        np.testing.assert_array_equal(ours, global_form)


def test_the_free_form_can_place_an_expert_twice_on_one_gpu() -> None:
    # shares 100/3, 1, 100/3, 100/3: two of expert 0 fill GPU 0
    assert rebalance_experts(np.array([[100, 1]]), 4, 1, 1, 2)[0].tolist() == [[0, 0, 0, 1]]


@given(st.data())
def test_the_mapping_and_its_inverse_agree(data: st.DataObject) -> None:
    num_nodes, gpus_per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    num_gpus = num_nodes * gpus_per_node
    num_groups = num_nodes * data.draw(st.integers(1, 2))
    num_experts = num_groups * data.draw(st.integers(1, 3))
    num_replicas = num_gpus * (-(-num_experts // num_gpus) + data.draw(st.integers(0, 2)))
    counts = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    weight = np.array(data.draw(st.lists(counts, min_size=1, max_size=2)))
    replica_expert, expert_replicas, count = rebalance_experts(
        weight, num_replicas, num_groups, num_nodes, num_gpus
    )
    assert (count >= 1).all()
    assert (count.sum(axis=1) == num_replicas).all()
    for experts, replicas, counts_of_layer in zip(replica_expert, expert_replicas, count):
        for expert, count_of_expert in enumerate(counts_of_layer):
            of_expert = replicas[expert]
            np.testing.assert_array_equal(
                np.sort(of_expert[of_expert >= 0]), np.flatnonzero(experts == expert)
            )
            assert (of_expert >= 0).sum() == count_of_expert


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((11, 4, 2, 8), "num_replicas 11 is below num_experts 12"),
        ((16, 8, 2, 8), "num_experts 12 is no multiple of num_groups 8"),
        ((16, 4, 2, 3), "num_gpus 3 is no multiple of num_nodes 2"),
        ((17, 4, 2, 8), "num_replicas 17 is no multiple of num_gpus 8"),
    ],
)
def test_numbers_that_do_not_divide(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebalance_experts(np.ones((1, 12)), *arguments)


def test_weight_without_a_layer_axis() -> None:
    with pytest.raises(ShapeError, match=r"got shape \(12,\)"):
        rebalance_experts(np.ones(12), 16, 4, 2, 8)


# --- fixed primaries ---------------------------------------------------------------------------


def test_replicas_are_packed_beside_fixed_primaries() -> None:
    # Replicas of expert 0, 0 (tie with 1, at 6) and 1; shares 4, 3, 0 on the primaries.
    # The two of expert 0 go to worker 2 (load 0) and 1 (load 3), that of 1 to worker 0.
    slots = fixed_primary_slots(np.array([12, 6, 0]), PrimaryPlacement(3, 3, 1))
    assert slots.tolist() == [[1], [0], [0]]


def test_a_replica_that_fits_nowhere_gives_its_slot_to_another_expert() -> None:
    # Replicas of 2, 1, 2, shares all 1: expert 1 to worker 0, 2 to worker 1, and the last slot is
    # beside the primary of 2: expert 1 takes it.
    slots = fixed_primary_slots(np.array([0, 2, 3]), PrimaryPlacement(3, 3, 1))
    assert slots.tolist() == [[1], [2], [1]]


def test_an_expert_without_load_gets_no_replica() -> None:
    placement = PrimaryPlacement(4, 2, 1)
    assert fixed_primary_slots(np.array([0, 0, 1, 1]), placement).tolist() == [[2], [-1]]
    assert fixed_primary_slots(np.zeros(4), placement).tolist() == [[-1], [-1]]


# --- the periodic policy -----------------------------------------------------------------------

PAIR = PrimaryPlacement(2, 2, 1)  # expert 0 on worker 0, expert 1 on worker 1
TRIO = PrimaryPlacement(3, 3, 1)


def run(
    policy: Eplb,
    demands: list[Int32Array],
    placement: PrimaryPlacement,
    copy_budget: int = 8,
) -> list[EplbTarget]:
    state, plans = policy.initial_state(placement), []
    for sequence, demand in enumerate(demands):
        planned = policy.plan(
            demand, state, placement, Limits(4, copy_budget, 0), COST, sequence=sequence
        )
        state = planned.state
        plans.append(planned)
    return plans


def test_the_first_rebalancing_comes_after_a_quarter_of_the_interval() -> None:
    assert Eplb().first_counter == 2250
    assert Eplb(interval=1000, initial_counter=0).first_counter == 0
    policy = Eplb(window=2, interval=4)
    hot_0, hot_1 = as_demand(8, 0), as_demand(0, 8)
    # Rebalancings before targets 1, from the first, and 5, from targets 3 and 4 alone.
    plans = run(policy, [hot_0, hot_0, hot_0, hot_1, hot_1, hot_1], PAIR)
    assert [planned.slot_copy.sum() for planned in plans] == [0, 1, 0, 0, 0, 1]
    assert plans[1].slot_expert.tolist() == [[-1], [0]]
    assert plans[5].slot_expert.tolist() == [[1], [0]]
    assert len(plans[5].state.loads) == 2


def test_a_replica_serves_from_the_target_after_its_copy() -> None:
    demands = [as_demand(9, 0)] * 3
    plans = run(Eplb(interval=1, initial_counter=1), demands, PAIR)
    assert [planned.slot_pairs.tolist() for planned in plans] == [
        [[0], [0]],
        [[0], [0]],
        [[0], [4]],
    ]
    at_once = run(Eplb(interval=1, initial_counter=1, is_asynchronous=False), demands, PAIR)
    assert at_once[1].slot_pairs.tolist() == [[0], [4]]
    assert at_once[1].slot_copy.tolist() == [[0], [1]]
    assert at_once[1].state.primary_tiles.tolist() == [2, 0]  # 5 pairs in tiles of 4


def test_pairs_left_over_go_to_the_primary_first() -> None:
    # Expert 0 on all three workers: 8 pairs are 3, 3, 2; expert 1 on worker 0 too: 5 are 3, 2.
    plans = run(
        Eplb(interval=9, initial_counter=8), [as_demand(12, 6, 0)] * 2 + [as_demand(8, 5, 0)], TRIO
    )
    assert plans[2].slot_expert.tolist() == [[1], [0], [0]]
    assert plans[2].slot_pairs.tolist() == [[2], [3], [2]]


def test_an_expert_that_stays_on_its_worker_keeps_its_slot() -> None:
    placement = PrimaryPlacement(3, 3, 2)
    policy = Eplb(interval=1, window=1)
    state = policy.initial_state(placement)._replace(
        slot_expert=np.array([[-1, 1], [-1, -1], [0, -1]], np.int32),
        loads=(as_demand(12, 6, 0),),
        counter=1,
    )
    # Replicas of 0, 0 and then 1, 1: [1], [0] and [0, 1] are wanted.
    planned = policy.plan(as_demand(0, 0, 0), state, placement, Limits(4, 8, 0), COST, sequence=0)
    assert planned.slot_expert.tolist() == [[-1, 1], [0, -1], [0, 1]]
    assert planned.slot_copy.tolist() == [[0, 0], [1, 0], [0, 1]]


def test_the_budget_spreads_the_copies_over_targets() -> None:
    demands = [as_demand(12, 6, 0)] * 5
    policy = Eplb(interval=8, initial_counter=7)
    plans = run(policy, demands, TRIO, copy_budget=1)
    assert [planned.slot_copy.ravel().tolist() for planned in plans] == [
        [0, 0, 0],
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
        [0, 0, 0],
    ]
    assert not any(planned.slot_copy.any() for planned in run(policy, demands, TRIO, copy_budget=0))
    # The hottest replica of every worker comes before the second of any.
    two_slots = run(policy, [as_demand(12, 6, 3)] * 2, PrimaryPlacement(3, 3, 2), copy_budget=3)
    assert two_slots[1].slot_copy.tolist() == [[1, 0]] * 3


def test_a_protected_slot_is_drained_and_then_rebound() -> None:
    policy, demand = Eplb(), as_demand(12, 0, 12)
    state = policy.initial_state(TRIO)._replace(
        slot_expert=np.array([[-1], [0], [0]], np.int32),
        slot_tiles=np.array([[0], [1], [1]], np.int32),  # in use, so protected
        wanted=np.array([[2], [2], [0]], np.int32),
    )

    def plan(state: EplbState, sequence: int, copy_budget: int = 8) -> EplbTarget:
        return policy.plan(demand, state, TRIO, Limits(4, copy_budget, 0), COST, sequence=sequence)

    first = plan(state, 0)
    assert first.slot_copy.tolist() == [[1], [0], [0]]
    assert first.slot_pairs.tolist() == [[0], [0], [6]]
    second = plan(first.state, 1)
    assert second.slot_copy.tolist() == [[0], [1], [0]]
    assert second.slot_pairs.tolist() == [[6], [0], [6]]
    assert plan(second.state, 2).slot_pairs.tolist() == [[4], [4], [6]]
    at_once = Eplb(is_asynchronous=False).plan(
        demand, state, TRIO, Limits(4, 8, 0), COST, sequence=0
    )
    assert at_once.slot_pairs.tolist() == [[6], [0], [6]]
    # Without a budget for its copy it goes on serving.
    assert plan(state, 0, copy_budget=1).slot_pairs.tolist() == [[0], [4], [4]]


@given(problems(), st.booleans(), st.booleans())
def test_every_plan_keeps_the_constraints(
    problem: Problem, is_asynchronous: bool, is_free: bool
) -> None:
    policy = Eplb(window=2, interval=2, is_asynchronous=is_asynchronous)
    placement, limits = problem.placement, problem.limits
    state = EplbState(*problem.state, (problem.demand,), 2, problem.state.slot_expert)
    demands = [problem.demand, problem.demand[::-1].copy(), problem.demand, problem.demand]
    for sequence, demand in enumerate(demands, start=1000):
        is_protected = (state.slot_tiles > 0).astype(np.uint8)
        if sequence == 1000:
            is_protected = problem.is_protected
        elif is_free:
            is_protected[:] = 0
        before = [array.copy() for array in (*state[:4], demand, is_protected)]
        planned = policy.plan(
            demand, state, placement, limits, COST, sequence=sequence, is_protected=is_protected
        )
        for array, copy in zip((*state[:4], demand, is_protected), before):
            np.testing.assert_array_equal(array, copy)
        assert_keeps_constraints(planned, state, demand, placement, limits, is_protected, sequence)
        state = planned.state


@given(problems())
def test_an_unlimited_budget_reaches_what_is_wanted_in_two_targets(problem: Problem) -> None:
    """One target drains the slots in use, the next rebinds them."""
    policy = Eplb(window=1, interval=10)
    placement, limits = problem.placement, problem.limits._replace(copy_budget=1000)
    state = EplbState(*problem.state, (problem.demand,), 10, problem.state.slot_expert)
    for sequence in range(2):
        state = policy.plan(problem.demand, state, placement, limits, COST, sequence=sequence).state
    np.testing.assert_array_equal(state.slot_expert, state.wanted)
    for wanted, slots in zip(fixed_primary_slots(problem.demand, placement), state.slot_expert):
        assert set(wanted[wanted >= 0]) <= set(slots)


@given(problems())
def test_the_split_is_even_to_within_one_pair(problem: Problem) -> None:
    policy = Eplb()
    state = policy.initial_state(problem.placement)._replace(slot_expert=problem.state.slot_expert)
    planned = policy.plan(
        problem.demand, state, problem.placement, problem.limits, COST, sequence=0
    )
    for expert, pairs in enumerate(problem.demand):
        replicas = planned.slot_pairs[planned.slot_expert == expert].astype(np.int64)
        shares = np.append(replicas, pairs - replicas.sum())
        assert shares.max() - shares.min() <= 1
        assert shares[-1] == shares.max()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"initial_counter": -1}, "initial_counter must be at least 0, got -1"),
    ],
)
def test_bad_knobs(knobs: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eplb(**knobs)


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (np.zeros(2, np.int64), "demand is int64"),
        (np.zeros(3, np.int32), r"expected int32 \(2,\)"),
        (as_demand(1, -3), "demand of expert 1 is -3"),
    ],
)
def test_bad_demand(demand: Int32Array, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        run(Eplb(), [demand], PAIR)
