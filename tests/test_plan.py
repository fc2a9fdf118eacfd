"""Plans and their record: round trip, every constraint trips, every corrupt word is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore_kernels.errors import InfeasiblePlanError, PlanError, ShapeError
from afore_kernels.plan import (
    CHECKSUM_WORD,
    PLAN_HEADER,
    Plan,
    PlanLayout,
    PrimaryPlacement,
    Rejection,
    ReplicaCopy,
    Target,
    record_checksum,
)
from afore_kernels.testing import random_plan

PLACEMENT = PrimaryPlacement(num_experts=7, num_workers=3, redundant_slots=2)
LAYOUT = PlanLayout(PLACEMENT, num_ranks=2)


def make_plan(**changes: Any) -> Plan:
    """Worker 0 (experts 0-2) replicates expert 4, worker 2 (experts 5-6) experts 4 and 0."""
    plan = Plan(
        target=Target(3, 1, 0),
        sequence=9,
        tile_m=16,
        demand=np.array([5, 0, 1, 2, 40, 3, 1], np.int32),
        rank_tokens=np.array([20, 6], np.int32),
        slot_expert=np.array([[4, -1], [-1, -1], [4, 0]], np.int32),
        slot_pairs=np.array([[16, 0], [0, 0], [8, 5]], np.int32),
        slot_copy=np.array([[1, 0], [0, 0], [0, 1]], np.uint8),
    )
    return replace(plan, **changes)


def assert_same_plan(actual: Plan, expected: Plan) -> None:
    for name in Plan.__slots__:
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))


def test_placement_covers_every_expert_once() -> None:
    for num_experts, num_workers in ((5, 8), (7, 3), (128, 6), (1, 1)):
        placement = PrimaryPlacement(num_experts, num_workers, redundant_slots=2)
        owned = [e for w in range(num_workers) for e in placement.primaries(w)]
        assert owned == list(range(num_experts))
        assert all(e in placement.primaries(placement.primary_worker[e]) for e in owned)
        sizes = [placement.num_slots(w) - 2 for w in range(num_workers)]
        assert max(sizes) - min(sizes) <= 1


def test_plan_properties() -> None:
    assert make_plan().num_tokens == 26
    assert make_plan().copies == [ReplicaCopy(4, 0, 0), ReplicaCopy(0, 2, 1)]


@given(seed=st.integers(0, 2**32 - 1), rejection=st.sampled_from(Rejection))
def test_record_round_trip(seed: int, rejection: Rejection) -> None:
    demand = np.random.default_rng(seed).integers(0, 50, 7).astype(np.int32)
    plan = random_plan(demand, PLACEMENT, 16, seed, rank_tokens=(3, 0), sequence=2**40)
    plan = replace(plan, target=Target(2**40, 5, 1), rejection=rejection, rejected_rank=-1)
    record = LAYOUT.pack(plan)
    assert record.size == LAYOUT.record_bytes
    assert record.size % 64 == 0
    assert_same_plan(LAYOUT.unpack(record), plan)


def test_unpacked_plan_owns_its_arrays() -> None:
    record = LAYOUT.pack(make_plan())
    plan = LAYOUT.unpack(record)
    record[:] = 0xFF
    assert_same_plan(plan, make_plan())


def test_every_corrupt_word_is_refused() -> None:
    record = LAYOUT.pack(make_plan())
    for word in range(record.size // 4):
        for bit in (0, 13, 31):
            corrupt = record.copy()
            corrupt.view(np.uint32)[word] ^= np.uint32(1 << bit)
            with pytest.raises(PlanError):
                LAYOUT.unpack(corrupt)


@pytest.mark.parametrize("num_bytes", [0, 4, 64])
def test_truncated_record_is_refused(num_bytes: int) -> None:
    with pytest.raises(PlanError, match="bytes, expected"):
        LAYOUT.unpack(LAYOUT.pack(make_plan())[:num_bytes])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("magic", 0, "magic"),
        ("version", 2, "version"),
        ("record_bytes", 64, "record_bytes"),
        ("rejection", 99, "unknown rejection"),
        ("num_copies", 1, "announces 1 copies, flags 2"),
        ("tile_m", 24, "tile_m"),
    ],
)
def test_bad_header_with_a_valid_checksum_is_refused(field: str, value: int, message: str) -> None:
    record = LAYOUT.pack(make_plan())
    header = record[: PLAN_HEADER.itemsize].view(PLAN_HEADER)
    header[field] = value
    header["checksum"] = record_checksum(record.view(np.int32), CHECKSUM_WORD)
    with pytest.raises(PlanError, match=message):
        LAYOUT.unpack(record)


@pytest.mark.parametrize(
    "changes",
    [
        {"demand": np.zeros(8, np.int32)},
        {"demand": np.zeros(7, np.int64)},
        {"rank_tokens": np.zeros(3, np.int32)},
        {"slot_expert": np.full((2, 3), -1, np.int32)},
    ],
)
def test_pack_refuses_other_shapes(changes: dict[str, Any]) -> None:
    with pytest.raises(ShapeError, match="plan field"):
        LAYOUT.pack(make_plan(**changes))


def put(name: str, worker: int, slot: int, value: int) -> Callable[[], Plan]:
    def build() -> Plan:
        array = getattr(make_plan(), name)
        array[worker, slot] = value
        return make_plan(**{name: array})

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_plan(tile_m=0), "tile_m"),
        (lambda: make_plan(tile_m=24), "tile_m"),
        (lambda: make_plan(demand=np.array([5, 0, 1, 2, 40, 3, -1], np.int32)), "expert 6"),
        (lambda: make_plan(rank_tokens=np.array([1, -1], np.int32)), "rank 1"),
        (put("slot_expert", 1, 0, 7), "out of range at worker 1, redundant slot 0"),
        (put("slot_expert", 1, 1, -2), "out of range at worker 1, redundant slot 1"),
        (put("slot_pairs", 0, 0, -1), "negative pair count"),
        (put("slot_pairs", 1, 0, 1), "pairs in an empty slot"),
        (put("slot_copy", 0, 0, 2), "copy flag"),
        (put("slot_copy", 1, 0, 1), "copy into a slot without an expert"),
        (put("slot_expert", 0, 1, 2), "beside its primary at worker 0, redundant slot 1"),
        (put("slot_expert", 0, 1, 4), "two slots of worker 0"),
        (put("slot_pairs", 2, 0, 25), "replicas of expert 4 run more pairs"),
    ],
)
def test_validate_trips(build: Callable[[], Plan], message: str) -> None:
    make_plan().validate(PLACEMENT)
    with pytest.raises(InfeasiblePlanError, match=message):
        build().validate(PLACEMENT)


def test_no_copy_into_a_slot_in_use() -> None:
    previous = make_plan(slot_copy=np.zeros((3, 2), np.uint8))
    with pytest.raises(InfeasiblePlanError, match="worker 0, redundant slot 0"):
        make_plan().validate_after(previous)
    idle = replace(previous, slot_pairs=np.zeros((3, 2), np.int32))
    make_plan().validate_after(idle)
    other_layer = replace(previous, target=Target(3, 0, 0))
    make_plan().validate_after(other_layer)
