"""Tiles in device memory: the twins of `TileSchedule` and `PairTiles` with fixed addresses.

Buffers are sized once for the most pairs a target can have; how much of them is used is known on
the device (`num_tiles`), so kernels captured in a CUDA graph follow every plan and routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from afore_kernels.config import INT32_MAX
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.tiles import PairTiles, TileSchedule


def max_tiles(max_pairs: int, num_slots: int, tile_m: int) -> int:
    """Return the most tiles that `max_pairs` pairs over `num_slots` slots can need.

    Every slot may end in a partial tile, and no tile is empty.

    >>> max_tiles(100, 4, 16), max_tiles(3, 4, 16)
    (10, 3)
    """
    return min(max_pairs, num_slots + max_pairs // tile_m)


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """Rows and tiles of every slot, in device memory.

    Attributes:
        tile_m: pairs per tile.
        pairs_per_slot: pairs of each slot, int32 [num_slots].
        row_starts: first row of each slot and the row count, int32 [num_slots + 1]; multiples of
            `tile_m`.
        tile_slot: slot of each tile, int32 [max_tiles], ascending; -1 from `num_tiles` on.
        tile_m_index: index of each tile within its slot, int32 [max_tiles]; -1 from `num_tiles` on.
        num_tiles: tiles in use, int32 [1].
    """

    tile_m: int
    pairs_per_slot: torch.Tensor
    row_starts: torch.Tensor
    tile_slot: torch.Tensor
    tile_m_index: torch.Tensor
    num_tiles: torch.Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, max_pairs: int, tile_m: int, device: torch.device | str
    ) -> Self:
        """Allocate a schedule whose content is undefined until a kernel has written it.

        Args:
            num_slots: slots of the worker.
            max_pairs: most pairs the slots can hold together.
            tile_m: pairs per tile.
            device: where.

        Raises:
            ShapeError: if `tile_m` is not positive or the rows exceed int32.
        """
        if tile_m < 1:
            raise ShapeError(f"tile_m must be positive, got {tile_m}")
        capacity = max_tiles(max_pairs, num_slots, tile_m)
        if capacity * tile_m > INT32_MAX:
            raise ShapeError(f"{capacity} tiles of {tile_m} rows exceed int32")

        def empty(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        return cls(
            tile_m,
            empty(num_slots),
            empty(num_slots + 1),
            empty(capacity),
            empty(capacity),
            empty(1),
        )

    @property
    def num_slots(self) -> int:
        """Slots, with or without pairs."""
        return self.pairs_per_slot.numel()

    @property
    def max_tiles(self) -> int:
        """Capacity in tiles."""
        return self.tile_slot.numel()

    @property
    def max_rows(self) -> int:
        """Capacity in rows."""
        return self.max_tiles * self.tile_m

    def to_host(self) -> TileSchedule:
        """Copy the part in use to the host; waits for the device."""
        num_tiles = int(self.num_tiles)
        return TileSchedule(
            self.tile_m,
            self.pairs_per_slot.cpu().numpy(),
            self.row_starts.cpu().numpy(),
            self.tile_slot[:num_tiles].cpu().numpy(),
            self.tile_m_index[:num_tiles].cpu().numpy(),
        )


@dataclass(frozen=True, eq=False)
class DeviceTiles:
    """A schedule whose rows are filled with pairs, in device memory.

    `sorted_pair` and `pair_row` are inverse to each other; the sentinel `num_pairs` marks a row
    without a pair and is never used as an index.

    Attributes:
        schedule: the rows and tiles.
        sorted_pair: flat pair index of each row, or the sentinel, int32 [max_rows].
        pair_row: row of each pair, or -1 if the pair is not in these tiles, int32 [num_pairs].
    """

    schedule: DeviceSchedule
    sorted_pair: torch.Tensor
    pair_row: torch.Tensor

    @classmethod
    def allocate(cls, schedule: DeviceSchedule, num_pairs: int) -> Self:
        """Allocate rows for a routing of `num_pairs`; undefined until a kernel has filled them."""

        def empty(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=schedule.row_starts.device)

        return cls(schedule, empty(schedule.max_rows), empty(num_pairs))

    @classmethod
    def from_host(cls, tiles: PairTiles, device: torch.device | str) -> Self:
        """Copy `tiles` to `device`, at their exact size."""

        def copy(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        host = tiles.schedule
        schedule = DeviceSchedule(
            host.tile_m,
            copy(host.pairs_per_slot),
            copy(host.row_starts),
            copy(host.tile_slot),
            copy(host.tile_m_index),
            torch.tensor([host.num_tiles], dtype=torch.int32, device=device),
        )
        return cls(schedule, copy(tiles.sorted_pair), copy(tiles.pair_row))

    @property
    def num_pairs(self) -> int:
        """Pairs of the whole routing, local or not: the sentinel."""
        return self.pair_row.numel()

    def to_host(self) -> PairTiles:
        """Copy the part in use to the host; waits for the device."""
        schedule = self.schedule.to_host()
        return PairTiles(
            schedule,
            self.sorted_pair[: schedule.num_rows].cpu().numpy(),
            self.pair_row.cpu().numpy(),
        )
