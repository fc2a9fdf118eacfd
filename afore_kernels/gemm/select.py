"""Select: which pair fills which row, on the device; the twin of `PairTiles.select`.

Two paths with bit-equal results. `slot_major` runs one program per expert, which scans all ids.
`chunked` counts every chunk's experts first, then each chunk knows where its ordinals start; it is
for routings too long to be scanned once per expert. Both treat the invalid ids as one more expert,
`num_experts`, which has no slot. A pair's place follows from prefix sums, never from the order in
which programs run.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.count import (
    CHUNK_PAIRS,
    MAX_BINS,
    count_chunks,
    flatten_ids,
    load_experts,
    require_vector,
)
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import LAUNCH_OPTIONS
from afore_kernels.gemm.rows import close_expert, load_interval, place_pairs

SelectPath = Literal["slot_major", "chunked"]
MAX_SLOT_MAJOR_PAIRS = 32768
# A step of the chunked path compares each of its pairs with all others; 128 spill registers.
STEP_PAIRS = 64
# With 4 warps, gfx942 spills scalar registers.
BY_EXPERT_OPTIONS = {"BLOCK": 2048, "num_warps": 8, **LAUNCH_OPTIONS}


# A count of 1 or a multiple of 16 must not compile another kernel while serving.
@triton.jit(do_not_specialize=["num_pairs"])
def _select_by_expert_kernel(
    sorted_pair_ptr,  # int32 [max_rows]
    pair_row_ptr,  # int32 [num_pairs]
    status_ptr,  # int32 [2 or more], or None
    ids_ptr,  # int32 or int64 [num_pairs]
    slot_of_expert_ptr,  # int32 [num_experts]
    first_ordinal_ptr,  # int32 [num_slots]
    pairs_per_slot_ptr,  # int32 [num_slots]
    row_starts_ptr,  # int32 [num_slots + 1]
    demand_ptr,  # int32 [num_experts], or None
    num_pairs,
    num_experts,
    num_slots,
    max_rows,
    BLOCK: tl.constexpr,
):
    """Number and place all pairs of one expert."""
    expert = tl.program_id(0)
    lo, num_local, row, _ = load_interval(
        slot_of_expert_ptr,
        first_ordinal_ptr,
        pairs_per_slot_ptr,
        row_starts_ptr,
        expert,
        num_experts,
        num_slots,
    )
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mask = load_experts(ids_ptr, pair, num_pairs, num_experts) == expert  # [BLOCK]
        # int32: the compiled cumsum of a mask is an exclusive or.
        hits = mask.to(tl.int32)
        ordinal = count + tl.cumsum(hits, 0) - hits
        place_pairs(sorted_pair_ptr, pair_row_ptr, pair, ordinal, lo, num_local, row, mask)
        count += tl.sum(hits, 0)
    close_expert(
        sorted_pair_ptr,
        status_ptr,
        slot_of_expert_ptr,
        first_ordinal_ptr,
        pairs_per_slot_ptr,
        row_starts_ptr,
        demand_ptr,
        expert,
        count,
        num_pairs,
        num_experts,
        num_slots,
        max_rows,
        BLOCK,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _select_by_chunk_kernel(
    sorted_pair_ptr,  # int32 [max_rows]
    pair_row_ptr,  # int32 [num_pairs]
    status_ptr,  # int32 [2 or more], or None
    ids_ptr,  # int32 or int64 [num_pairs]
    chunk_counts_ptr,  # int32 [num_chunks, num_experts + 1]
    slot_of_expert_ptr,  # int32 [num_experts]
    first_ordinal_ptr,  # int32 [num_slots]
    pairs_per_slot_ptr,  # int32 [num_slots]
    row_starts_ptr,  # int32 [num_slots + 1]
    demand_ptr,  # int32 [num_experts], or None
    stride_counts_c,
    num_pairs,
    num_experts,
    num_slots,
    max_rows,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Close one expert, or number and place the pairs of one chunk and one block of experts."""
    expert = tl.program_id(0)
    if expert <= num_experts:
        counts = tl.zeros([BLOCK_P], tl.int32)
        for start in range(0, num_chunks, BLOCK_P):
            offs_c = start + tl.arange(0, BLOCK_P)
            counts += tl.load(
                chunk_counts_ptr + offs_c.to(tl.int64) * stride_counts_c + expert,
                mask=offs_c < num_chunks,
                other=0,
            )  # [BLOCK_P]
        close_expert(
            sorted_pair_ptr,
            status_ptr,
            slot_of_expert_ptr,
            first_ordinal_ptr,
            pairs_per_slot_ptr,
            row_starts_ptr,
            demand_ptr,
            expert,
            tl.sum(counts, 0),
            num_pairs,
            num_experts,
            num_slots,
            max_rows,
            BLOCK_P,
        )
        return

    tl.static_assert(CHUNK % BLOCK_P == 0)
    program = expert - num_experts - 1
    chunk = program % num_chunks
    first_expert = program // num_chunks * BLOCK_E
    offs_e = first_expert + tl.arange(0, BLOCK_E)
    counts_so_far = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, chunk, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        counts = tl.load(
            chunk_counts_ptr + offs_c.to(tl.int64)[:, None] * stride_counts_c + offs_e[None, :],
            mask=(offs_c < chunk)[:, None] & (offs_e <= num_experts)[None, :],
            other=0,
        )  # [BLOCK_C, BLOCK_E]
        counts_so_far += tl.sum(counts, 0)
    for start in range(0, tl.minimum(CHUNK, num_pairs - chunk * CHUNK), BLOCK_P):
        pair = chunk * CHUNK + start + tl.arange(0, BLOCK_P)
        experts = load_experts(ids_ptr, pair, num_pairs, num_experts)  # [BLOCK_P]
        index = experts - first_expert
        mask = (index >= 0) & (index < BLOCK_E) & (experts <= num_experts)
        is_earlier = (experts[:, None] == experts[None, :]) & (pair[:, None] > pair[None, :])
        ordinal = tl.gather(counts_so_far, tl.where(mask, index, 0), 0)
        ordinal += tl.sum(is_earlier.to(tl.int32), 1)
        lo, num_local, row, _ = load_interval(
            slot_of_expert_ptr,
            first_ordinal_ptr,
            pairs_per_slot_ptr,
            row_starts_ptr,
            experts,
            num_experts,
            num_slots,
        )
        place_pairs(sorted_pair_ptr, pair_row_ptr, pair, ordinal, lo, num_local, row, mask)
        counts_so_far += tl.histogram(index, BLOCK_E, mask=mask)


def select_pairs(
    tiles: DeviceTiles,
    expert_ids: torch.Tensor,
    slot_of_expert: torch.Tensor,
    first_ordinal: torch.Tensor,
    *,
    path: SelectPath | None = None,
    demand: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Fill the rows of `tiles` from a routing (section 6.2), every row and every pair.

    Slot s runs the ordinals `first_ordinal[s] + [0, pairs_per_slot[s])` of its expert. A pair
    outside, whatever the routing, gets no row. Does not wait for the device.

    Args:
        tiles: to fill; its schedule is laid out already.
        expert_ids: int32 or int64 of `tiles.num_pairs` elements, in gathered order; strided ids are
            copied. Ids outside [0, num_experts) get no ordinal and no row.
        slot_of_expert: int32 [num_experts]; outside [0, num_slots) for an expert without a local
            slot. A slot with pairs is the slot of exactly one expert.
        first_ordinal: int32 [num_slots], not negative.
        path: None chooses by the number of pairs.
        demand: int32 [num_experts], the pairs that each expert should have; needs `status`.
        status: int32 [2] or longer. Element 0 becomes the number of pairs with an invalid id;
            element 1 its minimum with the first expert whose pairs differ from `demand`, so the
            caller sets it to `INT32_MAX` before the first routing.

    Raises:
        ShapeError: if an argument has another dtype, shape or range, or `demand` comes alone.
    """
    schedule = tiles.schedule
    num_experts = slot_of_expert.numel()
    ids = flatten_ids(expert_ids, num_experts)
    if ids.numel() != tiles.num_pairs:
        raise ShapeError(f"expert_ids hold {ids.numel()} pairs, the tiles {tiles.num_pairs}")
    require_vector("slot_of_expert", slot_of_expert, num_experts)
    require_vector("first_ordinal", first_ordinal, schedule.num_slots)
    if demand is not None:
        require_vector("demand", demand, num_experts)
        if status is None:
            raise ShapeError("demand needs a status to report to")
    if status is not None:
        require_vector("status", status, max(2, status.numel()))
    outputs = (tiles.sorted_pair, tiles.pair_row, status)
    slots = (
        slot_of_expert,
        first_ordinal,
        schedule.pairs_per_slot,
        schedule.row_starts,
        demand,
    )
    sizes = (ids.numel(), num_experts, schedule.num_slots, schedule.max_rows)
    if path is None:
        path = "slot_major" if ids.numel() <= MAX_SLOT_MAJOR_PAIRS else "chunked"
    if path == "slot_major":
        _select_by_expert_kernel[(num_experts + 1,)](
            *outputs, ids, *slots, *sizes, **BY_EXPERT_OPTIONS
        )
        return
    counts = count_chunks(ids, num_experts)
    num_chunks = counts.shape[0]
    block_e = min(triton.next_power_of_2(num_experts + 1), MAX_BINS)
    num_placing = num_chunks * triton.cdiv(num_experts + 1, block_e)
    _select_by_chunk_kernel[(num_experts + 1 + num_placing,)](
        *outputs,
        ids,
        counts,
        *slots,
        counts.stride(0),
        *sizes,
        num_chunks,
        CHUNK=CHUNK_PAIRS,
        BLOCK_P=STEP_PAIRS,
        BLOCK_C=16,
        BLOCK_E=block_e,
        **LAUNCH_OPTIONS,
    )
