"""Tiles: how the pairs of each slot are laid out in rows, `tile_m` rows per tile.

A row is one place of the sorted activation buffer. Every slot starts on a multiple of `tile_m`; the
rows between its last pair and the next slot are padding. `TileSchedule` depends on the pair counts
alone, so a plan yields it before the routing arrives; `PairTiles` adds which pair fills which row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from afore_kernels.config import INT32_MAX
from afore_kernels.errors import ShapeError

Int32Array = npt.NDArray[np.int32]
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


def exclusive_starts(counts: IntegerArray) -> npt.NDArray[np.int64]:
    """Return the exclusive prefix sums of `counts` [n] and their total, int64 [n + 1]."""
    starts = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def number_pairs(expert_ids: IntegerArray, num_experts: int) -> tuple[Int32Array, Int32Array]:
    """Number every pair within its expert, in flat order (section 6.2, exact partitioning).

    The ordinal of a pair is the number of smaller flat indices with the same expert id. All workers
    number the same gathered routing, so their intervals of ordinals are disjoint.

    Args:
        expert_ids: any integer dtype and shape, in gathered order; an id < 0 or >= num_experts is
            invalid.
        num_experts: routed experts E.

    Returns:
        The ordinals, int32 [num_pairs], -1 for an invalid id; and the pairs of each expert, int32
        [num_experts].

    >>> number_pairs(np.array([2, 0, 2, -1, 2]), 3)
    (array([ 0,  0,  1, -1,  2], dtype=int32), array([1, 0, 3], dtype=int32))
    """
    ids = expert_ids.reshape(-1)
    valid = (ids >= 0) & (ids < num_experts)
    # Invalid ids become one expert past the last. numpy sorts 16-bit keys by radix: 3x faster.
    keys = np.where(valid, ids, num_experts)
    keys = keys.astype(np.uint16 if num_experts <= np.iinfo(np.uint16).max else np.int32)
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(keys, minlength=num_experts + 1)
    ordinals = np.empty(ids.size, np.int32)
    ordinals[order] = np.arange(ids.size) - np.repeat(exclusive_starts(counts)[:-1], counts)
    ordinals[~valid] = -1
    return ordinals, counts[:num_experts].astype(np.int32)


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
    def from_pair_counts(cls, pairs_per_slot: IntegerArray, tile_m: int) -> Self:
        """Lay out slots that hold `pairs_per_slot` [num_slots] pairs.

        Raises:
            ShapeError: if a count is negative, `tile_m` is not positive or the rows exceed int32.
        """
        if tile_m < 1:
            raise ShapeError(f"tile_m must be positive, got {tile_m}")
        if (pairs_per_slot < 0).any():
            slot = int(np.argmin(pairs_per_slot))
            raise ShapeError(f"slot {slot} has a negative pair count {pairs_per_slot[slot]}")
        tiles_per_slot = -(-pairs_per_slot.astype(np.int64) // tile_m)
        tile_starts = exclusive_starts(tiles_per_slot)
        if tile_starts[-1] * tile_m > INT32_MAX:
            raise ShapeError(f"{tile_starts[-1]} tiles of {tile_m} rows exceed {INT32_MAX} rows")
        slots = np.arange(pairs_per_slot.size, dtype=np.int32)
        tile_slot = np.repeat(slots, tiles_per_slot)
        tile_m_index = np.arange(tile_slot.size) - tile_starts[tile_slot]
        return cls(
            tile_m,
            pairs_per_slot.astype(np.int32),
            (tile_starts * tile_m).astype(np.int32),
            tile_slot,
            tile_m_index.astype(np.int32),
        )

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
    def from_pair_rows(cls, schedule: TileSchedule, pair_row: Int32Array) -> Self:
        """Fill the rows of `schedule` from the row of each pair, int32 [num_pairs], -1 = none."""
        pairs = np.flatnonzero(pair_row >= 0)
        sorted_pair = np.full(schedule.num_rows, pair_row.size, np.int32)
        sorted_pair[pair_row[pairs]] = pairs
        return cls(schedule, sorted_pair, pair_row)

    @classmethod
    def from_expert_ids(cls, expert_ids: IntegerArray, num_experts: int, tile_m: int) -> Self:
        """Tile every valid pair; expert e is slot e.

        Args:
            expert_ids: any integer dtype and shape; ids outside [0, num_experts) get no row.
            num_experts: routed experts, and slots.
            tile_m: pairs per tile.
        """
        ordinals, demand = number_pairs(expert_ids, num_experts)
        schedule = TileSchedule.from_pair_counts(demand, tile_m)
        pair_row = np.full(ordinals.size, -1, np.int32)
        valid = ordinals >= 0
        pair_row[valid] = schedule.row_starts[expert_ids.reshape(-1)[valid]] + ordinals[valid]
        return cls.from_pair_rows(schedule, pair_row)

    @property
    def num_pairs(self) -> int:
        """Pairs of the whole routing, local or not: the sentinel."""
        return self.pair_row.size
