"""Properties of every plan, whatever the state and the demand (hypothesis)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from afore_kernels.plan import Int32Array, Plan, PrimaryPlacement, Target, UInt8Array
from afore_kernels.runtime.cost import (
    CostModel,
    copy_time_us,
    exposed_time_us,
    ffn_time_us,
    net_gain_us,
)
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget, plan_microbatch
from afore_kernels.runtime.planner_oracle import Move, plan_microbatch_oracle

planner_property = settings(max_examples=150, deadline=None, derandomize=True)


class Problem(NamedTuple):
    """One target of a layer whose state has evolved over earlier targets."""

    demand: Int32Array
    state: LayerState
    placement: PrimaryPlacement
    limits: Limits
    cost: CostModel
    is_protected: UInt8Array

    def plan(self, **changes: Any) -> PlannedTarget:
        problem = self._replace(**changes)
        return plan_microbatch(*problem[:5], sequence=1000, is_protected=problem.is_protected)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_experts, num_workers = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    placement = PrimaryPlacement(num_experts, num_workers, draw(st.integers(0, 3)))
    limits = Limits(
        tile_m=2 ** draw(st.integers(0, 6)),
        copy_budget=draw(st.integers(0, 8)),
        compactness_threshold=draw(st.integers(0, 3)),
        is_refined=draw(st.booleans()),
    )
    times = st.sampled_from([0.0, 3.5, 50.0])
    cost = CostModel(draw(st.sampled_from([1.0, 7.3])), draw(times), draw(times), draw(times))
    counts = st.one_of(
        st.just(0), st.integers(0, 20 * limits.tile_m), st.sampled_from([1, 2**31 - 1])
    )
    demands = st.lists(counts, min_size=num_experts, max_size=num_experts)
    *earlier, demand = (
        np.array(values, np.int32) for values in draw(st.lists(demands, min_size=1, max_size=4))
    )
    state = LayerState.initial(placement)
    free_copies = cost._replace(copy_time_us=0.0, slot_time_us=0.0)
    for sequence, counts_before in enumerate(earlier):
        state = plan_microbatch(
            counts_before, state, placement, limits, free_copies, sequence=sequence
        ).state
    is_protected = (state.slot_tiles > 0).astype(np.uint8)
    return Problem(demand, state, placement, limits, cost, is_protected)


def replica_pairs_by_expert(problem: Problem, planned: PlannedTarget) -> np.ndarray:
    pairs = np.zeros(problem.placement.num_experts, np.int64)
    bound = planned.slot_expert >= 0
    np.add.at(pairs, planned.slot_expert[bound], planned.slot_pairs[bound])
    return pairs


def loads(problem: Problem, planned: PlannedTarget) -> tuple[np.ndarray, np.ndarray]:
    """Tiles and active slots per worker."""
    tile_load = planned.state.slot_tiles.sum(axis=1, dtype=np.int64)
    active = (planned.state.slot_tiles > 0).sum(axis=1).astype(np.int64)
    np.add.at(tile_load, problem.placement.primary_worker, planned.state.primary_tiles)
    np.add.at(active, problem.placement.primary_worker, planned.state.primary_tiles > 0)
    return tile_load, active


def exposed_us(problem: Problem, planned: PlannedTarget) -> float:
    """O_t of the planned copies."""
    workers = np.arange(problem.placement.num_workers)
    into = planned.slot_copy.sum(axis=1).astype(np.int64)
    sources = problem.placement.primary_worker[planned.slot_expert[planned.slot_copy == 1]]
    out_of = (sources[:, None] == workers).sum(axis=0)
    raw_us = copy_time_us(into, out_of, problem.cost)
    return float(exposed_time_us(raw_us, problem.cost.window_us))


@given(problems())
@planner_property
def test_plan_is_valid_and_agrees_with_the_oracle(problem: Problem) -> None:
    planned = problem.plan()
    Plan(
        Target(0, 0, 0),
        0,
        problem.limits.tile_m,
        problem.demand,
        np.zeros(1, np.int32),
        planned.slot_expert,
        planned.slot_pairs,
        planned.slot_copy,
    ).validate(problem.placement)  # no replica beside its primary, one slot per (expert, worker)
    unrefined = problem._replace(limits=problem.limits._replace(is_refined=False))
    planned = unrefined.plan()
    oracle = plan_microbatch_oracle(
        *unrefined[:5],
        sequence=1000,
        is_protected=problem.is_protected,
        planning_demand=problem.demand,
    )
    np.testing.assert_array_equal(planned.slot_pairs, oracle.slot_pairs)
    np.testing.assert_array_equal(planned.slot_copy, oracle.slot_copy)
    for ours, theirs in zip(planned.state, oracle.state):
        np.testing.assert_array_equal(ours, theirs)


@given(problems())
@planner_property
def test_pairs_are_conserved_and_fill_their_tiles(problem: Problem) -> None:
    planned = problem.plan()
    tile_m = problem.limits.tile_m
    on_primary = problem.demand - replica_pairs_by_expert(problem, planned)
    np.testing.assert_array_equal(-(-on_primary // tile_m), planned.state.primary_tiles)
    pairs = planned.slot_pairs.astype(np.int64)
    np.testing.assert_array_equal(-(-pairs // tile_m), planned.state.slot_tiles)
    partial = (on_primary % tile_m > 0).astype(np.int64)
    bound = planned.slot_expert >= 0
    np.add.at(partial, planned.slot_expert[bound], pairs[bound] % tile_m > 0)
    assert partial.max() <= 1, "more than one partially filled tile of an expert"


@given(problems())
@planner_property
def test_copies_respect_the_budget_and_the_slots_in_use(problem: Problem) -> None:
    planned = problem.plan()
    is_copy = planned.slot_copy == 1
    assert is_copy.sum() <= problem.limits.copy_budget
    assert not (is_copy & (problem.is_protected == 1)).any()
    rebound = planned.slot_expert != problem.state.slot_expert
    np.testing.assert_array_equal(rebound, is_copy)
    assert (planned.state.slot_tiles[is_copy] > 0).all()


@given(problems())
@planner_property
def test_a_copy_never_makes_the_target_slower(problem: Problem) -> None:
    planned, baseline = problem.plan(), problem.plan(limits=problem.limits._replace(copy_budget=0))
    gain = net_gain_us(
        ffn_time_us(*loads(problem, baseline), problem.cost),
        ffn_time_us(*loads(problem, planned), problem.cost),
        exposed_us(problem, planned),
    )
    if planned.slot_copy.any():
        assert gain > 0
        if problem.cost.slot_time_us == 0:
            assert loads(problem, planned)[0].max() < loads(problem, baseline)[0].max()
    elif gain > 0:
        assert problem.limits.is_refined, "tiles moved without a copy after stage 2"
        np.testing.assert_array_equal(planned.slot_expert, problem.state.slot_expert)
    else:  # nothing pays: the placement and stage 2's assignment are retained
        np.testing.assert_array_equal(planned.slot_expert, problem.state.slot_expert)
        for ours, theirs in zip(planned.state, baseline.state):
            np.testing.assert_array_equal(ours, theirs)


@given(problems())
@planner_property
def test_refinement_never_loses_to_algorithm_1(problem: Problem) -> None:
    def gain_us(is_refined: bool) -> float:
        planned = problem.plan(limits=problem.limits._replace(is_refined=is_refined))
        return -ffn_time_us(*loads(problem, planned), problem.cost) - exposed_us(problem, planned)

    assert gain_us(True) >= gain_us(False) - 1e-6 * abs(gain_us(False))


@given(problems())
@planner_property
def test_replicas_carry_more_than_the_threshold_after_refinement(problem: Problem) -> None:
    """Small shares are left by stage 1's rescaling alone: refinement gathers them first."""
    refined = problem._replace(limits=problem.limits._replace(is_refined=True))
    planned = refined.plan()
    unrefined = problem.plan(limits=problem.limits._replace(is_refined=False))
    if np.array_equal(planned.slot_pairs, unrefined.slot_pairs):
        return
    tiles = planned.state.slot_tiles
    assert (tiles[tiles > 0] > problem.limits.compactness_threshold).all()


@given(problems())
@planner_property
def test_nothing_is_copied_when_no_copy_can_pay(problem: Problem) -> None:
    longest_us = problem.cost.tile_time_us * 12 * 2.0**31 + problem.cost.slot_time_us * 16
    hopeless = problem.cost._replace(copy_time_us=longest_us, window_us=0.0)
    assert not problem.plan(cost=hopeless).slot_copy.any()


@given(problems())
@planner_property
def test_every_move_carries_more_than_the_threshold(problem: Problem) -> None:
    trace: list[Move] = []
    plan_microbatch_oracle(
        *problem[:5],
        sequence=1000,
        is_protected=problem.is_protected,
        planning_demand=problem.demand,
        trace=trace,
    )
    assume(trace)
    assert all(move.tiles > problem.limits.compactness_threshold for move in trace)
    assert all(move.donor != move.receiver for move in trace)
    stages = [move.stage for move in trace]
    assert stages == sorted(stages), "stage 3 starts where stage 2 ended"
    assert stages.count(3) <= problem.limits.copy_budget


@given(problems())
@planner_property
def test_planning_changes_nothing_it_was_given(problem: Problem) -> None:
    arrays = (problem.demand, problem.is_protected, *problem.state)
    before = [array.copy() for array in arrays]
    planned = problem.plan()
    for array, copy in zip(arrays, before):
        np.testing.assert_array_equal(array, copy)
        assert not any(np.shares_memory(array, after) for after in planned.state)


@given(problems())
@planner_property
def test_planning_again_from_the_new_state_with_the_same_demand_is_stable(problem: Problem) -> None:
    """Stage 1 keeps an assignment that already fits: no tile moves unless a copy pays."""
    no_copies = problem.limits._replace(copy_budget=0)
    first = problem.plan(limits=no_copies)
    second = problem._replace(state=first.state).plan(limits=no_copies)
    np.testing.assert_array_equal(first.slot_pairs, second.slot_pairs)
