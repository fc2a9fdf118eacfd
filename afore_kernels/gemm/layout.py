"""Layout: rows and tiles of every slot, on the device; the twin of `TileSchedule`."""

from __future__ import annotations

import triton
import triton.language as tl

from afore_kernels.gemm.device_tiles import DeviceSchedule
from afore_kernels.gemm.launch import LAUNCH_OPTIONS


@triton.jit
def _lay_out_tiles_kernel(
    row_starts_ptr,  # int32 [num_slots + 1]
    tile_slot_ptr,  # int32 [max_tiles]
    tile_m_index_ptr,  # int32 [max_tiles]
    num_tiles_ptr,  # int32 [1]
    pairs_per_slot_ptr,  # int32 [num_slots]
    num_slots,
    max_tiles,
    TILE_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Write the tiles of one slot; the program past the last slot writes what is behind them.

    Every program sums all counts itself, in registers: no program reads what another has stored.
    """
    slot = tl.program_id(0)
    # int64: the counts of a bad plan may add up to anything.
    tiles_before = tl.zeros([BLOCK_S], tl.int64)
    tiles_through = tl.zeros([BLOCK_S], tl.int64)
    tiles_in_all = tl.zeros([BLOCK_S], tl.int64)
    for start in range(0, num_slots, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        pairs = tl.load(pairs_per_slot_ptr + offs_s, mask=offs_s < num_slots, other=0)  # [BLOCK_S]
        tiles = (tl.maximum(pairs, 0).to(tl.int64) + TILE_M - 1) // TILE_M
        tiles_before += tl.where(offs_s < slot, tiles, 0)
        tiles_through += tl.where(offs_s <= slot, tiles, 0)
        tiles_in_all += tiles
    fits = tl.sum(tiles_in_all, 0) <= max_tiles
    first_tile = tl.where(fits, tl.sum(tiles_before, 0), 0).to(tl.int32)
    end_tile = tl.where(fits, tl.sum(tiles_through, 0), 0).to(tl.int32)
    tl.store(row_starts_ptr + slot, first_tile * TILE_M)

    is_padding = slot == num_slots
    if is_padding:
        tl.store(num_tiles_ptr, first_tile)
    end_tile = tl.where(is_padding, max_tiles, end_tile)
    for start in range(first_tile, end_tile, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        mask_t = offs_t < end_tile
        tl.store(tile_slot_ptr + offs_t, tl.where(is_padding, -1, slot), mask=mask_t)
        index = tl.where(is_padding, -1, offs_t - first_tile)  # [BLOCK_T]
        tl.store(tile_m_index_ptr + offs_t, index, mask=mask_t)


def lay_out_tiles(schedule: DeviceSchedule) -> None:
    """Lay out the slots of `schedule.pairs_per_slot`, which is on the device already.

    Writes every element of the other arrays; does not wait for the device. Counts that need more
    tiles than were allocated give a schedule without tiles, and a negative count is taken as 0:
    neither can be an error here, where only the device knows the counts.
    """
    _lay_out_tiles_kernel[(schedule.num_slots + 1,)](
        schedule.row_starts,
        schedule.tile_slot,
        schedule.tile_m_index,
        schedule.num_tiles,
        schedule.pairs_per_slot,
        schedule.num_slots,
        schedule.max_tiles,
        TILE_M=schedule.tile_m,
        BLOCK_S=64,
        BLOCK_T=256,
        **LAUNCH_OPTIONS,
    )
