"""Refined plans, worked by hand: what Algorithm 1 misses and each of its moves is there for."""

from __future__ import annotations

import numpy as np
import pytest

from afore_kernels.plan import Int32Array, PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget, plan_microbatch

FREE_COPIES = CostModel(tile_time_us=1.0, slot_time_us=0.0, copy_time_us=0.0, window_us=0.0)


def as_demand(*tiles: int) -> Int32Array:
    return np.array(tiles, np.int32)


def plan(
    placement: PrimaryPlacement,
    demand: Int32Array,
    *,
    copy_budget: int,
    is_refined: bool,
    before: Int32Array | None = None,
    threshold: int = 0,
    cost: CostModel = FREE_COPIES,
) -> PlannedTarget:
    """Plan `demand` in tiles of one pair, from the slots that `before` left, none protected."""
    state = LayerState.initial(placement)
    limits = Limits(1, copy_budget, threshold, is_refined)
    if before is not None:
        alone = limits._replace(is_refined=False)
        state = plan_microbatch(before, state, placement, alone, FREE_COPIES, sequence=0).state
    return plan_microbatch(
        demand,
        state,
        placement,
        limits,
        cost,
        sequence=9,
        is_protected=np.zeros((placement.num_workers, placement.redundant_slots), np.uint8),
    )


def tile_load(placement: PrimaryPlacement, planned: PlannedTarget) -> list[int]:
    load = planned.state.slot_tiles.sum(axis=1, dtype=np.int64)
    np.add.at(load, placement.primary_worker, planned.state.primary_tiles)
    return [int(tiles) for tiles in load]


def test_one_expert_is_shared_by_three_workers() -> None:
    """Halving 30 gives 15, 15, 0, and one more copy does not lower the maximum at once."""
    placement, demand = PrimaryPlacement(3, 3, 1), as_demand(30, 0, 0)
    greedy = plan(placement, demand, copy_budget=2, is_refined=False)
    assert tile_load(placement, greedy) == [15, 15, 0]
    refined = plan(placement, demand, copy_budget=2, is_refined=True)
    assert tile_load(placement, refined) == [10, 10, 10]


def test_leftover_replicas_are_gathered_and_placed_anew() -> None:
    """Three copies reach the mean; halving differences from where stage 1 left off does not."""
    placement, demand, before = PrimaryPlacement(4, 4, 2), as_demand(1, 10, 6, 11), (1, 0, 2, 0)
    arguments = {"copy_budget": 3, "before": as_demand(*before)}
    greedy = plan(placement, demand, is_refined=False, **arguments)
    assert max(tile_load(placement, greedy)) == 8
    refined = plan(placement, demand, is_refined=True, **arguments)
    assert tile_load(placement, refined) == [7, 7, 7, 7]
    assert refined.slot_copy.sum() <= 3


def test_a_path_passes_tiles_on_where_the_light_worker_has_no_slot_left() -> None:
    """Loads 3, 13, 17 and one slot each.

    Worker 0's slot can serve one of the two heavy workers. It takes 8 from worker 2, which with its
    own slot then takes 2 from worker 1: worker 1 reaches worker 0's room over worker 2.
    """
    placement, demand = PrimaryPlacement(6, 3, 1), as_demand(2, 1, 5, 8, 10, 7)
    greedy = plan(placement, demand, copy_budget=2, is_refined=False)
    assert max(tile_load(placement, greedy)) == 12
    refined = plan(placement, demand, copy_budget=2, is_refined=True)
    assert tile_load(placement, refined) == [11, 11, 11]
    assert refined.slot_expert[0, 0] in (4, 5), "an expert of worker 2"
    assert refined.slot_pairs[:, 0].tolist() == [8, 0, 2]
    assert refined.slot_expert[2, 0] in (2, 3), "an expert of worker 1"


def test_a_scarce_slot_is_filled_with_a_whole_expert() -> None:
    """Loads 1, 15, 24, 22, one slot each, two copies.

    17 needs all 12 tiles of an expert on worker 0, so that worker 2 has room for 5 of worker 3;
    the excess alone, 7, would leave 5 tiles of worker 3 without a place.
    """
    placement, demand = PrimaryPlacement(8, 4, 1), as_demand(0, 1, 4, 11, 12, 12, 11, 11)
    greedy = plan(placement, demand, copy_budget=2, is_refined=False)
    assert max(tile_load(placement, greedy)) == 18
    refined = plan(placement, demand, copy_budget=2, is_refined=True)
    assert tile_load(placement, refined) == [13, 15, 17, 17]
    assert refined.slot_pairs[:, 0].tolist() == [12, 0, 5, 0]


@pytest.mark.parametrize("copy_budget", [0, 1])
def test_without_the_copies_it_needs_the_plan_is_algorithm_1(copy_budget: int) -> None:
    placement, demand = PrimaryPlacement(6, 3, 1), as_demand(2, 1, 5, 8, 10, 7)
    greedy = plan(placement, demand, copy_budget=copy_budget, is_refined=False)
    refined = plan(placement, demand, copy_budget=copy_budget, is_refined=True)
    assert max(tile_load(placement, refined)) == max(tile_load(placement, greedy))
    assert refined.slot_copy.sum() <= copy_budget


def test_a_lower_ceiling_that_does_not_pay_for_its_copies_is_not_taken() -> None:
    """One tile less, 1 us, against a copy that is exposed for 2 us."""
    placement, demand = PrimaryPlacement(6, 3, 1), as_demand(2, 1, 5, 8, 10, 7)
    one_more = FREE_COPIES._replace(copy_time_us=2.0)
    greedy = plan(placement, demand, copy_budget=2, is_refined=False, cost=one_more)
    refined = plan(placement, demand, copy_budget=2, is_refined=True, cost=one_more)
    greedy_us, refined_us = (
        max(tile_load(placement, planned)) + 2 * copies_of_the_busiest_link(placement, planned)
        for planned in (greedy, refined)
    )
    assert refined_us <= greedy_us


def copies_of_the_busiest_link(placement: PrimaryPlacement, planned: PlannedTarget) -> int:
    into = planned.slot_copy.sum(axis=1)
    sources = placement.primary_worker[planned.slot_expert[planned.slot_copy == 1]]
    return int(max(into.max(), np.bincount(sources, minlength=len(into)).max()))


def test_moves_carry_more_than_the_threshold() -> None:
    """The path's second hop of 2 tiles is out of reach with theta = 2."""
    placement, demand = PrimaryPlacement(6, 3, 1), as_demand(2, 1, 5, 8, 10, 7)
    refined = plan(placement, demand, copy_budget=2, is_refined=True, threshold=2)
    carried = refined.slot_pairs[refined.slot_pairs > 0]
    assert (carried > 2).all()
    assert max(tile_load(placement, refined)) > 11
