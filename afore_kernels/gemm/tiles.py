"""Tiles: how the pairs of each slot are laid out in rows, `tile_m` rows per tile.

A row is one place of the sorted activation buffer. Every slot starts on a multiple of `tile_m`; the
rows between its last pair and the next slot are padding. `TileSchedule` depends on the pair counts
alone, so a plan yields it before the routing arrives; `PairTiles` adds which pair fills which row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from afore_kernels.config import INT32_MAX
from afore_kernels.errors import ShapeError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntegerArray = npt.NDArray[np.integer[Any]]
PairCount = TypeVar("PairCount", int, Int32Array)


def count_tiles(num_pairs: PairCount, tile_m: int) -> PairCount:
    """Return the tiles that hold `num_pairs` pairs of one expert (Eq. 4).

    Args:
        num_pairs: pairs, an int or an int32 array of any shape.
        tile_m: pairs per tile.

    >>> [count_tiles(n, 16) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-num_pairs // tile_m)


def count_pairs(expert_ids: IntegerArray, num_experts: int) -> Int32Array:
    """Count the pairs of each expert; ids outside [0, num_experts) are not counted.

    Args:
        expert_ids: any integer dtype and shape.
        num_experts: routed experts E.

    Returns:
        int32 [num_experts].

    Raises:
        ShapeError: if the ids are not integers.

    >>> count_pairs(np.array([[2, 0], [2, -1]]), 3)
    array([1, 0, 2], dtype=int32)
    """
    counts: Int32Array = _count_ids(_flat_ids(expert_ids), num_experts)
    return counts


def _flat_ids(expert_ids: IntegerArray) -> Int64Array:
    if expert_ids.dtype.kind not in "iu":
        raise ShapeError(f"expert_ids must be integers, got {expert_ids.dtype}")
    return np.ascontiguousarray(expert_ids.reshape(-1), dtype=np.int64)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _count_ids(ids: Int64Array, num_experts: int) -> Int32Array:
    counts = np.zeros(num_experts, np.int32)
    for expert in ids:
        if 0 <= expert < num_experts:
            counts[expert] += 1
    return counts


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _lay_out_tiles(
    pairs_per_slot: Int32Array, tile_m: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return row_starts, tile_slot and tile_m_index of `TileSchedule`."""
    num_slots = pairs_per_slot.size
    row_starts = np.zeros(num_slots + 1, np.int32)
    num_rows = np.int64(0)
    for slot in range(num_slots):
        if pairs_per_slot[slot] < 0:
            raise ShapeError("a slot has a negative pair count")
        num_rows += -(-np.int64(pairs_per_slot[slot]) // tile_m) * tile_m
        if num_rows > INT32_MAX:
            raise ShapeError("the rows of all slots exceed int32")
        row_starts[slot + 1] = num_rows
    tile_slot = np.empty(num_rows // tile_m, np.int32)
    tile_m_index = np.empty(num_rows // tile_m, np.int32)
    for slot in range(num_slots):
        first_tile = row_starts[slot] // tile_m
        for tile in range(first_tile, row_starts[slot + 1] // tile_m):
            tile_slot[tile] = slot
            tile_m_index[tile] = tile - first_tile
    return row_starts, tile_slot, tile_m_index


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill_rows(
    ids: Int64Array,
    slot_of_expert: Int32Array,
    first_ordinal: Int32Array,
    pairs_per_slot: Int32Array,
    row_starts: Int32Array,
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Number the pairs of each expert in flat order and place those that a local slot runs.

    Returns:
        sorted_pair and pair_row of `PairTiles`, and the pairs of each expert.
    """
    sorted_pair = np.full(row_starts[-1], ids.size, np.int32)
    pair_row = np.full(ids.size, -1, np.int32)
    counts = np.zeros(slot_of_expert.size, np.int32)
    for pair in range(ids.size):
        expert = ids[pair]
        if expert < 0 or expert >= counts.size:
            continue
        ordinal = counts[expert]
        counts[expert] += 1
        slot = slot_of_expert[expert]
        if slot < 0:
            continue
        index = ordinal - first_ordinal[slot]
        if 0 <= index < pairs_per_slot[slot]:
            row = row_starts[slot] + index
            sorted_pair[row] = pair
            pair_row[pair] = row
    return sorted_pair, pair_row, counts


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Rows and tiles of every slot; built from pair counts alone.

    Attributes:
        tile_m: pairs per tile.
        pairs_per_slot: pairs of each slot, int32 [num_slots].
        row_starts: first row of each slot and the row count, int32 [num_slots + 1]; multiples of
            `tile_m`.
        tile_slot: slot of each tile, int32 [num_tiles], ascending.
        tile_m_index: index of each tile within its slot, int32 [num_tiles].
    """

    tile_m: int
    pairs_per_slot: Int32Array
    row_starts: Int32Array
    tile_slot: Int32Array
    tile_m_index: Int32Array

    @classmethod
    def from_pair_counts(cls, pairs_per_slot: Int32Array, tile_m: int) -> Self:
        """Lay out slots that hold `pairs_per_slot` pairs, int32 [num_slots].

        Raises:
            ShapeError: if a count is negative, `tile_m` is not positive or the rows exceed int32.
        """
        if tile_m < 1:
            raise ShapeError(f"tile_m must be positive, got {tile_m}")
        return cls(tile_m, pairs_per_slot, *_lay_out_tiles(pairs_per_slot, tile_m))

    @property
    def num_slots(self) -> int:
        """Slots, with or without pairs."""
        return self.pairs_per_slot.size

    @property
    def num_tiles(self) -> int:
        """Tiles of all slots: the kernels' exact grid in M."""
        return self.tile_slot.size

    @property
    def num_rows(self) -> int:
        """Rows of all slots, padding included."""
        return int(self.row_starts[-1])

    @cached_property
    def tiles_per_slot(self) -> Int32Array:
        """Tiles of each slot, int32 [num_slots]."""
        return count_tiles(self.pairs_per_slot, self.tile_m)


@dataclass(frozen=True, eq=False)
class PairTiles:
    """A schedule whose rows are filled with pairs.

    `sorted_pair` and `pair_row` are inverse to each other; the sentinel `num_pairs` marks a row
    without a pair and is never used as an index.

    Attributes:
        schedule: the rows and tiles.
        sorted_pair: flat pair index of each row, or the sentinel, int32 [num_rows].
        pair_row: row of each pair, or -1 if the pair is not in these tiles, int32 [num_pairs].
    """

    schedule: TileSchedule
    sorted_pair: Int32Array
    pair_row: Int32Array

    @classmethod
    def select(
        cls,
        schedule: TileSchedule,
        expert_ids: IntegerArray,
        slot_of_expert: Int32Array,
        first_ordinal: Int32Array,
    ) -> tuple[Self, Int32Array]:
        """Fill the rows of `schedule` from a routing (section 6.2, exact partitioning).

        The ordinal of a pair is the number of smaller flat indices with the same expert id. Slot s
        runs the ordinals `first_ordinal[s] + [0, pairs_per_slot[s])` of its expert. An ordinal
        outside, whatever the routing, gets no row.

        Args:
            schedule: rows of the slots.
            expert_ids: any integer dtype and shape, in gathered order; ids outside
                [0, num_experts) get no ordinal and no row.
            slot_of_expert: int32 [num_experts], -1 for an expert without a local slot.
            first_ordinal: int32 [num_slots].

        Returns:
            The tiles, and the pairs of each expert in the routing, int32 [num_experts].

        Raises:
            ShapeError: if the ids are not integers.
        """
        sorted_pair, pair_row, counts = _fill_rows(
            _flat_ids(expert_ids),
            slot_of_expert,
            first_ordinal,
            schedule.pairs_per_slot,
            schedule.row_starts,
        )
        return cls(schedule, sorted_pair, pair_row), counts

    @classmethod
    def from_expert_ids(cls, expert_ids: IntegerArray, num_experts: int, tile_m: int) -> Self:
        """Tile every valid pair; expert e is slot e.

        Args:
            expert_ids: any integer dtype and shape; ids outside [0, num_experts) get no row.
            num_experts: routed experts, and slots.
            tile_m: pairs per tile.

        Raises:
            ShapeError: if the ids are not integers.
        """
        schedule = TileSchedule.from_pair_counts(count_pairs(expert_ids, num_experts), tile_m)
        slots = np.arange(num_experts, dtype=np.int32)
        tiles, _ = cls.select(schedule, expert_ids, slots, np.zeros(num_experts, np.int32))
        return tiles

    @property
    def num_pairs(self) -> int:
        """Pairs of the whole routing, local or not: the sentinel."""
        return self.pair_row.size
