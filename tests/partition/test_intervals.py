"""Intervals of Eq. 11: by hand, and as a disjoint cover of every expert's ordinals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given

from afore_kernels.partition.intervals import SlotIntervals, pair_intervals
from afore_kernels.plan import Plan, PrimaryPlacement, Target
from tests.partition.routings import Case, draw_case

PLACEMENT = PrimaryPlacement(num_experts=5, num_workers=3, redundant_slots=2)


def make_plan() -> Plan:
    """Expert 0 (on worker 0) runs 4 pairs on worker 1, 3 on worker 2, 3 at home."""
    return Plan(
        target=Target(0, 0, 0),
        sequence=0,
        tile_m=4,
        demand=np.array([10, 0, 2, 1, 6], np.int32),
        rank_tokens=np.array([19], np.int32),
        slot_expert=np.array([[-1, 4], [0, -1], [3, 0]], np.int32),
        slot_pairs=np.array([[0, 6], [4, 0], [0, 3]], np.int32),
        slot_copy=np.zeros((3, 2), np.uint8),
    )


def all_intervals(plan: Plan, placement: PrimaryPlacement) -> list[SlotIntervals]:
    return [pair_intervals(plan, placement, w) for w in range(placement.num_workers)]


def find_uncovered(plan: Plan, workers: Sequence[SlotIntervals]) -> list[int]:
    """Experts whose ordinals [0, demand) are not each in exactly one interval."""
    times = [np.zeros(d + 2, int) for d in plan.demand]
    for intervals in workers:
        for expert, lo, hi in zip(intervals.expert, intervals.lo, intervals.hi):
            if expert >= 0:
                assert 0 <= lo <= hi
                times[expert][lo:hi] += 1
    return [e for e, d in enumerate(plan.demand) if times[e].tolist() != [1] * d + [0, 0]]


def test_by_hand() -> None:
    first, second, third = all_intervals(make_plan(), PLACEMENT)
    assert first.expert.tolist() == [0, 1, -1, 4]
    assert list(zip(first.lo, first.hi)) == [(7, 10), (0, 0), (0, 0), (0, 6)]
    assert second.expert.tolist() == [2, 3, 0, -1]
    assert list(zip(second.lo, second.hi)) == [(0, 2), (0, 1), (0, 4), (0, 0)]
    assert third.expert.tolist() == [4, 3, 0]
    assert list(zip(third.lo, third.hi)) == [(6, 6), (0, 0), (4, 7)]
    assert first.tile_schedule(4).tiles_per_slot.tolist() == [1, 0, 0, 2]
    for array in (first.expert, first.lo, first.hi, first.demand):
        assert array.dtype == np.int32


@given(case=draw_case())
def test_every_ordinal_is_in_one_interval(case: Case) -> None:
    workers = all_intervals(case.plan, case.placement)
    assert find_uncovered(case.plan, workers) == []
    for worker, intervals in enumerate(workers):
        assert intervals.expert.size == case.placement.num_slots(worker)


@pytest.mark.parametrize(("bound", "shift"), [("lo", -1), ("lo", 1), ("hi", -1), ("hi", 1)])
def test_off_by_one_is_seen(bound: str, shift: int) -> None:
    workers = all_intervals(make_plan(), PLACEMENT)
    getattr(workers[2], bound)[2] += shift
    assert find_uncovered(make_plan(), workers) == [0]


def test_replica_order_other_than_worker_order_is_seen() -> None:
    workers = all_intervals(make_plan(), PLACEMENT)
    # Worker 1 believes that worker 2 comes first.
    workers[1].lo[2], workers[1].hi[2] = 3, 7
    assert find_uncovered(make_plan(), workers) == [0]
