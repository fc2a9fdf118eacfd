"""Tile counts, schedules and the rows of pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.tiles import PairTiles, TileSchedule, count_pairs, count_tiles

EXPERT_COUNTS = [1, 5, 96, 160, 384, 1023, 1024, 1025]


@pytest.mark.parametrize(
    ("num_pairs", "tile_m", "expected"),
    [
        (0, 16, 0),
        (1, 16, 1),
        (15, 16, 1),
        (16, 16, 1),
        (17, 16, 2),
        (7, 1, 7),
        (2**31 - 1, 1, 2**31 - 1),
    ],
)
def test_count_tiles(num_pairs: int, tile_m: int, expected: int) -> None:
    assert count_tiles(num_pairs, tile_m) == expected
    counted = count_tiles(np.array([num_pairs, 0], np.int32), tile_m)
    assert counted.dtype == np.int32
    assert counted.tolist() == [expected, 0]


def test_schedule_by_hand() -> None:
    schedule = TileSchedule.from_pair_counts(np.array([3, 0, 4, 9], np.int32), 4)
    assert schedule.tiles_per_slot.tolist() == [1, 0, 1, 3]
    assert schedule.row_starts.tolist() == [0, 4, 4, 8, 20]
    assert schedule.tile_slot.tolist() == [0, 2, 3, 3, 3]
    assert schedule.tile_m_index.tolist() == [0, 0, 0, 1, 2]
    assert (schedule.num_slots, schedule.num_tiles, schedule.num_rows) == (4, 5, 20)


@given(counts=st.lists(st.integers(0, 70), max_size=40), tile_m=st.sampled_from([1, 2, 16, 64]))
def test_schedule_invariants(counts: list[int], tile_m: int) -> None:
    schedule = TileSchedule.from_pair_counts(np.array(counts, np.int32), tile_m)
    rows_per_slot = np.diff(schedule.row_starts)
    assert (schedule.row_starts % tile_m == 0).all()
    assert (rows_per_slot >= counts).all()
    assert (rows_per_slot - counts < tile_m).all()
    assert schedule.num_tiles == schedule.tiles_per_slot.sum()
    first_row = schedule.row_starts[schedule.tile_slot] + schedule.tile_m_index * tile_m
    assert first_row.tolist() == [i * tile_m for i in range(schedule.num_tiles)]
    for name in ("pairs_per_slot", "row_starts", "tile_slot", "tile_m_index"):
        assert getattr(schedule, name).dtype == np.int32


@pytest.mark.parametrize(
    ("counts", "tile_m", "message"),
    [
        ([1, -2], 16, "negative pair count"),
        ([1], 0, "tile_m must be positive"),
        ([2**30, 2**30], 16, "exceed int32"),
    ],
)
def test_schedule_rejects(counts: list[int], tile_m: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        TileSchedule.from_pair_counts(np.array(counts, np.int32), tile_m)


@given(
    ids=st.lists(st.integers(-2, 7), max_size=60),
    dtype=st.sampled_from([np.int16, np.int32, np.int64]),
    tile_m=st.sampled_from([1, 4, 16]),
)
def test_pair_tiles_hold_every_valid_pair(ids: list[int], dtype: type, tile_m: int) -> None:
    tiles = PairTiles.from_expert_ids(np.array(ids, dtype), 5, tile_m)
    sentinel = len(ids)
    assert tiles.num_pairs == sentinel
    for expert in range(5):
        start, end = tiles.schedule.row_starts[expert : expert + 2]
        pairs = [p for p, e in enumerate(ids) if e == expert]
        padding = [sentinel] * (end - start - len(pairs))
        assert tiles.sorted_pair[start:end].tolist() == pairs + padding
    for pair, expert in enumerate(ids):
        if 0 <= expert < 5:
            assert tiles.sorted_pair[tiles.pair_row[pair]] == pair
        else:
            assert tiles.pair_row[pair] == -1


@pytest.mark.parametrize("num_experts", EXPERT_COUNTS)
@pytest.mark.parametrize("num_pairs", [0, 1, 15, 16, 17])
def test_one_hot(num_experts: int, num_pairs: int) -> None:
    ids = np.full(num_pairs, num_experts - 1, np.int32)
    tiles = PairTiles.from_expert_ids(ids, num_experts, 16)
    assert tiles.schedule.num_tiles == count_tiles(num_pairs, 16)
    assert tiles.pair_row.tolist() == list(range(num_pairs))


def test_first_pairs_of_one_expert() -> None:
    tiles = PairTiles.from_expert_ids(np.zeros((4, 1), np.int32), 1, 16)
    assert tiles.sorted_pair.tolist() == [0, 1, 2, 3] + [4] * 12


def test_64_bit_ids_do_not_wrap() -> None:
    ids = np.array([2**32 + 1, 1, -(2**32)], np.int64)
    assert PairTiles.from_expert_ids(ids, 3, 4).pair_row.tolist() == [-1, 0, -1]
    assert count_pairs(ids, 3).tolist() == [0, 1, 0]


def test_strided_ids() -> None:
    ids = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::3]
    expected = PairTiles.from_expert_ids(ids.copy(), 24, 4)
    assert (PairTiles.from_expert_ids(ids, 24, 4).pair_row == expected.pair_row).all()


def test_float_ids_are_rejected() -> None:
    with pytest.raises(ShapeError, match="integers"):
        PairTiles.from_expert_ids(np.zeros(3), 4, 16)  # type: ignore[arg-type]
