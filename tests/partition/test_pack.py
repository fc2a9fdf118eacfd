"""Rule 1, exactly once, and rule 2, one numbering: `partition_pairs` against its literal twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from afore_kernels.errors import ShapeError
from afore_kernels.gemm import tiles
from afore_kernels.partition.demand import count_demand
from afore_kernels.partition.intervals import SlotIntervals, pair_intervals
from afore_kernels.partition.pack import Partition, partition_pairs
from afore_kernels.partition.reference import reference_partition
from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.testing import make_routing, random_plan
from tests.partition.routings import Case, draw_case


def partition_all(
    case: Case, partition: Callable[..., Partition] = partition_pairs
) -> list[Partition]:
    """The partitions of all workers, as each worker computes its own."""
    results = []
    for worker in range(case.placement.num_workers):
        intervals = pair_intervals(case.plan, case.placement, worker)
        schedule = intervals.tile_schedule(case.plan.tile_m)
        results.append(partition(case.expert_ids, intervals, schedule))
    return results


def find_not_once(
    expert_ids: npt.NDArray[np.int32], num_experts: int, parts: list[Partition]
) -> list[int]:
    """Pairs that are not executed exactly once (valid) or never (invalid)."""
    times = np.zeros(expert_ids.size, int)
    for part in parts:
        rows = part.tiles.sorted_pair
        np.add.at(times, rows[rows < expert_ids.size], 1)
    flat = expert_ids.ravel()
    expected = ((flat >= 0) & (flat < num_experts)).astype(int)
    return np.flatnonzero(times != expected).tolist()


def assert_same(actual: Partition, expected: Partition) -> None:
    assert (actual.tiles.sorted_pair == expected.tiles.sorted_pair).all()
    assert (actual.tiles.pair_row == expected.tiles.pair_row).all()
    assert actual.num_invalid == expected.num_invalid
    assert actual.mismatched_expert == expected.mismatched_expert
    assert actual.tiles.sorted_pair.dtype == actual.tiles.pair_row.dtype == np.int32


@given(case=draw_case())
def test_every_pair_runs_exactly_once(case: Case) -> None:
    parts = partition_all(case)
    num_experts = case.placement.num_experts
    assert find_not_once(case.expert_ids, num_experts, parts) == []
    demand = count_demand(case.expert_ids, num_experts)
    for part in parts:
        assert part.num_invalid == case.expert_ids.size - demand.sum()
        assert part.mismatched_expert == -1
        assert (part.tiles.sorted_pair >= 0).all()
        is_filled = part.tiles.sorted_pair < case.expert_ids.size
        assert is_filled.sum() == part.tiles.schedule.pairs_per_slot.sum()


@given(case=draw_case())
def test_equals_the_literal_twin(case: Case) -> None:
    for actual, expected in zip(partition_all(case), partition_all(case, reference_partition)):
        assert_same(actual, expected)


@given(case=draw_case(), other=draw_case())
def test_equals_the_literal_twin_on_a_routing_the_plan_is_not_for(case: Case, other: Case) -> None:
    mixed = case._replace(expert_ids=other.expert_ids)
    for actual, expected in zip(partition_all(mixed), partition_all(mixed, reference_partition)):
        assert_same(actual, expected)


@pytest.mark.parametrize("num_experts", [5, 96, 160, 384, 1024])
@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_large_routings(num_experts: int, num_workers: int) -> None:
    placement = PrimaryPlacement(num_experts, num_workers, redundant_slots=4)
    ids = make_routing(300, num_experts, 4, skew=1.0, invalid_fraction=0.05, seed=7)[0].numpy()
    plan = random_plan(count_demand(ids, num_experts), placement, 16, seed=num_workers)
    case = Case(ids, plan, placement)
    parts = partition_all(case)
    assert find_not_once(ids, num_experts, parts) == []
    assert_same(parts[0], partition_all(case, reference_partition)[0])


def test_counts_that_differ_from_the_plan_are_reported() -> None:
    case = make_case()
    expert_ids = case.expert_ids.copy()
    expert_ids[0, 0] = (expert_ids[0, 0] + 1) % 6
    expected = int(min(case.expert_ids[0, 0], expert_ids[0, 0]))
    for part in partition_all(case._replace(expert_ids=expert_ids)):
        assert part.mismatched_expert == expected
    expert_ids[0, 0] = -1
    for part in partition_all(case._replace(expert_ids=expert_ids)):
        assert part.mismatched_expert == case.expert_ids[0, 0]
        assert part.num_invalid == 1


def test_float_ids_are_rejected() -> None:
    case = make_case()
    with pytest.raises(ShapeError, match="integers"):
        partition_all(case._replace(expert_ids=case.expert_ids.astype(float)))


def make_case() -> Case:
    """A fixed case whose replicas run pairs on every worker."""
    placement = PrimaryPlacement(6, 3, redundant_slots=1)
    ids = make_routing(40, 6, 2, seed=4)[0].numpy()
    demand = count_demand(ids, 6)
    plan = replace(
        random_plan(demand, placement, 4, 0),
        slot_expert=np.array([[5], [0], [0]], np.int32),
        slot_pairs=np.array([[3], [4], [2]], np.int32),
        slot_copy=np.zeros((3, 1), np.uint8),
    )
    plan.validate(placement)
    return Case(ids, plan, placement)


class TestPlantedFaults:
    """Each fault breaks a rule; the checks above must see it."""

    def test_interval_off_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        correct = pair_intervals

        def shifted(plan: Plan, placement: PrimaryPlacement, worker: int) -> SlotIntervals:
            intervals = correct(plan, placement, worker)
            return replace(intervals, lo=intervals.lo - (intervals.lo > 0))

        case = make_case()
        assert find_not_once(case.expert_ids, 6, partition_all(case)) == []
        monkeypatch.setattr(f"{__name__}.pair_intervals", shifted)
        assert find_not_once(case.expert_ids, 6, partition_all(case))

    def test_worker_with_another_plan(self) -> None:
        case = make_case()
        parts = partition_all(case)
        fallback = replace(case.plan, slot_pairs=np.zeros((3, 1), np.int32))
        parts[0] = partition_all(case._replace(plan=fallback))[0]
        assert find_not_once(case.expert_ids, 6, parts)

    def test_another_numbering(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One worker numbers pairs from the end: each worker runs its count, but not its pairs."""
        case = make_case()
        fill_rows = tiles._fill_rows

        def fill_backwards(ids, *rest):  # type: ignore[no-untyped-def]
            sorted_pair, pair_row, counts = fill_rows(ids[::-1].copy(), *rest)
            is_filled = sorted_pair < ids.size
            sorted_pair[is_filled] = ids.size - 1 - sorted_pair[is_filled]
            return sorted_pair, pair_row[::-1], counts

        parts = partition_all(case)
        monkeypatch.setattr(tiles, "_fill_rows", fill_backwards)
        parts[1] = partition_all(case)[1]
        assert find_not_once(case.expert_ids, 6, parts)
