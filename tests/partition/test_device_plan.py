"""Plans expanded and routings partitioned on the device, bit-equal to the host twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.select import SelectPath
from afore_kernels.partition.demand import count_demand
from afore_kernels.partition.device_plan import DevicePlan, PlanStatus
from afore_kernels.partition.expand import PlanDefect
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.partition.pack import Partition, partition_pairs
from afore_kernels.partition.reference import reference_partition
from afore_kernels.plan import Plan, PlanLayout, PrimaryPlacement, Rejection
from afore_kernels.testing import make_routing, random_plan
from tests.partition.routings import Case, draw_case

pytestmark = pytest.mark.interpreter

PATHS: tuple[SelectPath, ...] = ("slot_major", "chunked")


def expand(
    plan: Plan,
    placement: PrimaryPlacement,
    worker: int,
    device: str,
    *,
    tile_m: int | None = None,
    max_pairs: int = 4096,
) -> DevicePlan:
    layout = PlanLayout(placement, plan.rank_tokens.size)
    device_plan = DevicePlan.allocate(layout, worker, tile_m or plan.tile_m, max_pairs, device)
    expand_into(device_plan, plan)
    return device_plan


def expand_into(device_plan: DevicePlan, plan: Plan) -> None:
    words = torch.from_numpy(device_plan.layout.pack(plan).view(np.int32))
    device_plan.expand(words.to(device_plan.status.device))


def partition_on_device(
    device_plan: DevicePlan, expert_ids: np.ndarray, path: SelectPath
) -> Partition:
    tiles = DeviceTiles.allocate(device_plan.schedule, expert_ids.size)
    ids = torch.from_numpy(expert_ids).to(device_plan.status.device)
    device_plan.partition(ids, tiles, path)
    num_rows = int(device_plan.schedule.row_starts[-1])
    assert (tiles.sorted_pair[num_rows:] == expert_ids.size).all()
    status = device_plan.read_status()
    assert status.defect is PlanDefect.NONE
    return Partition(tiles.to_host(), status.num_invalid, status.mismatched_expert)


def check_intervals(device_plan: DevicePlan, plan: Plan, placement: PrimaryPlacement) -> None:
    expected = pair_intervals(plan, placement, device_plan.worker)
    for name in ("expert", "lo", "hi", "demand"):
        assert getattr(device_plan, name).tolist() == getattr(expected, name).tolist(), name
    slot_of_expert = [-1] * placement.num_experts
    for slot, expert in enumerate(expected.expert):
        if expert >= 0:
            slot_of_expert[expert] = slot
    assert device_plan.slot_of_expert.tolist() == slot_of_expert
    assert device_plan.sequence.tolist() == [plan.sequence]
    schedule, actual = expected.tile_schedule(plan.tile_m), device_plan.schedule.to_host()
    for name in ("pairs_per_slot", "row_starts", "tile_slot", "tile_m_index"):
        assert getattr(actual, name).tolist() == getattr(schedule, name).tolist(), name
    assert (device_plan.schedule.tile_slot[schedule.num_tiles :] == -1).all()


def check_same(actual: Partition, expected: Partition) -> None:
    assert actual.tiles.sorted_pair.tolist() == expected.tiles.sorted_pair.tolist()
    assert actual.tiles.pair_row.tolist() == expected.tiles.pair_row.tolist()
    assert actual.num_invalid == expected.num_invalid
    assert actual.mismatched_expert == expected.mismatched_expert


def check_case(case: Case, device: str) -> None:
    """Every worker equals its host twins by both paths; together they run each pair once."""
    times = np.zeros(case.expert_ids.size, int)
    for worker in range(case.placement.num_workers):
        device_plan = expand(case.plan, case.placement, worker, device)
        check_intervals(device_plan, case.plan, case.placement)
        intervals = pair_intervals(case.plan, case.placement, worker)
        schedule = intervals.tile_schedule(case.plan.tile_m)
        expected = partition_pairs(case.expert_ids, intervals, schedule)
        check_same(expected, reference_partition(case.expert_ids, intervals, schedule))
        for path in PATHS:
            actual = partition_on_device(device_plan, case.expert_ids, path)
            check_same(actual, expected)
        times += actual.tiles.pair_row >= 0
    flat = case.expert_ids.ravel()
    is_valid = (flat >= 0) & (flat < case.placement.num_experts)
    if (count_demand(case.expert_ids, case.placement.num_experts) == case.plan.demand).all():
        assert (times == is_valid).all()


@settings(max_examples=25)
@given(case=draw_case())
def test_every_worker_equals_its_host_twins(kernel_device: str, case: Case) -> None:
    check_case(case, kernel_device)


@settings(max_examples=8)
@given(case=draw_case(), other=draw_case())
def test_routing_the_plan_is_not_for(kernel_device: str, case: Case, other: Case) -> None:
    check_case(case._replace(expert_ids=other.expert_ids), kernel_device)


@pytest.mark.parametrize(("num_experts", "num_workers"), [(64, 3), (32, 6), (5, 8)])
def test_experts_that_do_not_divide_by_workers(
    num_experts: int, num_workers: int, kernel_device: str
) -> None:
    placement = PrimaryPlacement(num_experts, num_workers, redundant_slots=1)
    ids = make_routing(60, num_experts, 2, skew=1.0, invalid_fraction=0.05)[0].numpy()
    plan = random_plan(count_demand(ids, num_experts), placement, 4, seed=1)
    last = num_workers - 1
    device_plan = expand(plan, placement, last, kernel_device)
    check_intervals(device_plan, plan, placement)
    assert int(device_plan.slot_of_expert.max()) < placement.num_slots(last)
    intervals = pair_intervals(plan, placement, last)
    expected = partition_pairs(ids, intervals, intervals.tile_schedule(4))
    check_same(partition_on_device(device_plan, ids, "chunked"), expected)


def test_more_replica_slots_than_a_block_holds(kernel_device: str) -> None:
    placement = PrimaryPlacement(300, 7, redundant_slots=40)
    ids = make_routing(200, 300, 4, skew=1.0)[0].numpy()
    plan = random_plan(count_demand(ids, 300), placement, 16, seed=2)
    check_intervals(expand(plan, placement, 6, kernel_device), plan, placement)


def make_case() -> Case:
    placement = PrimaryPlacement(6, 3, redundant_slots=1)
    ids = make_routing(40, 6, 2, seed=4)[0].numpy()
    return Case(ids, random_plan(count_demand(ids, 6), placement, 4, seed=0), placement)


@pytest.mark.parametrize("sequence", [0, 2**31 + 5, 2**62 + 7])
def test_next_record_in_the_same_place(sequence: int, kernel_device: str) -> None:
    case = make_case()
    device_plan = expand(case.plan, case.placement, 1, kernel_device)
    wrong_ids = np.full_like(case.expert_ids, -1)
    assert partition_on_device(device_plan, wrong_ids, "slot_major").mismatched_expert == 0
    following = replace(case.plan.without_replicas(), sequence=sequence)
    expand_into(device_plan, following)
    check_intervals(device_plan, following, case.placement)
    assert device_plan.read_status() == PlanStatus(0, -1, PlanDefect.NONE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("changes", "tile_m", "max_pairs", "defect"),
    [
        ({"rejection": Rejection.DEMAND_TIMEOUT}, 4, 80, PlanDefect.REJECTED),
        ({}, 8, 80, PlanDefect.OTHER_TILE_M),
        ({}, 4, 79, PlanDefect.TOO_MANY_PAIRS),
        ({"demand": np.full(6, 2**31 - 1, np.int32)}, 4, 80, PlanDefect.TOO_MANY_PAIRS),
    ],
    ids=["rejected", "tile_m", "capacity", "demand that wraps int32"],
)
def test_plan_that_must_not_run_leaves_every_slot_empty(
    changes: dict[str, object],
    tile_m: int,
    max_pairs: int,
    defect: PlanDefect,
    path: SelectPath,
    kernel_device: str,
) -> None:
    case = make_case()
    plan = replace(case.plan, **changes)  # type: ignore[arg-type]
    for worker in range(3):
        device_plan = expand(
            plan, case.placement, worker, kernel_device, tile_m=tile_m, max_pairs=max_pairs
        )
        tiles = DeviceTiles.allocate(device_plan.schedule, case.expert_ids.size)
        device_plan.partition(torch.from_numpy(case.expert_ids).to(kernel_device), tiles, path)
        assert device_plan.read_status().defect is defect
        assert torch.equal(device_plan.lo, device_plan.hi)
        assert device_plan.schedule.num_tiles.tolist() == [0]
        assert (tiles.sorted_pair == case.expert_ids.size).all()
        assert (tiles.pair_row == -1).all()


def test_capacity_is_that_of_the_whole_target(kernel_device: str) -> None:
    case = make_case()
    device_plan = expand(case.plan, case.placement, 0, kernel_device, max_pairs=80)
    check_intervals(device_plan, case.plan, case.placement)


def test_tiles_of_another_schedule_are_rejected(kernel_device: str) -> None:
    case = make_case()
    first, second = (expand(case.plan, case.placement, w, kernel_device) for w in (0, 1))
    tiles = DeviceTiles.allocate(first.schedule, case.expert_ids.size)
    with pytest.raises(ShapeError, match="this plan's schedule"):
        second.partition(torch.from_numpy(case.expert_ids).to(kernel_device), tiles)


def test_record_of_another_tier_is_rejected(kernel_device: str) -> None:
    case = make_case()
    device_plan = expand(case.plan, case.placement, 0, kernel_device)
    with pytest.raises(ShapeError, match="record must be"):
        device_plan.expand(torch.zeros(16, dtype=torch.int32, device=kernel_device))


def test_rows_beyond_int32_are_rejected() -> None:
    layout = PlanLayout(PrimaryPlacement(6, 3, 1), 1)
    with pytest.raises(ShapeError, match="exceed int32"):
        DevicePlan.allocate(layout, 0, 16, 2**31 - 16, "meta")
