"""Chunk: the ordinals of a long routing, chunk by chunk.

The first pass counts the experts of every chunk, the second sorts each chunk by expert; no chunk
waits for another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afore_kernels.gemm.count import MAX_BINS, count_pairs_kernel, load_experts

CHUNK_PAIRS = 1024


def count_chunks(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the pairs of each expert in every chunk of `CHUNK_PAIRS` pairs.

    Args:
        ids: of `flatten_ids`.
        num_experts: routed experts E.

    Returns:
        int32 [num_chunks, num_experts + 1]; the last column counts the invalid ids.
    """
    num_chunks = triton.cdiv(ids.numel(), CHUNK_PAIRS)
    num_bins = num_experts + 1
    counts = torch.empty((num_chunks, num_bins), dtype=torch.int32, device=ids.device)
    block_e = min(triton.next_power_of_2(num_bins), MAX_BINS)
    count_pairs_kernel[(num_chunks, triton.cdiv(num_bins, block_e))](
        counts,
        ids,
        counts.stride(0),
        ids.numel(),
        num_experts,
        num_bins,
        IS_SHARED=False,
        CHUNK=CHUNK_PAIRS,
        BLOCK_P=CHUNK_PAIRS,
        BLOCK_E=block_e,
    )
    return counts


@triton.jit
def sort_chunk(
    ids_ptr,
    chunk_counts_ptr,
    stride_counts_c,
    chunk,
    num_pairs,
    num_experts,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return pair, expert and ordinal of one chunk's pairs, sorted by expert, int32 [CHUNK].

    In sorted order an ordinal is the position, less the chunk's pairs of smaller experts, plus the
    expert's pairs in earlier chunks. Invalid pairs come last; their ordinal means nothing.
    """
    position = tl.arange(0, CHUNK)
    expert = load_experts(ids_ptr, chunk * CHUNK + position, num_pairs, num_experts)  # [CHUNK]
    # The position in the low digits keeps equal experts in order.
    key = tl.sort(expert * CHUNK + position)
    expert = key // CHUNK
    ordinal = position
    num_smaller = 0
    for first_expert in range(0, num_experts, BLOCK_E):
        offs_e = first_expert + tl.arange(0, BLOCK_E)
        mask_e = offs_e < num_experts
        earlier = tl.zeros([BLOCK_E], tl.int32)
        for first_chunk in range(0, chunk, BLOCK_C):
            offs_c = first_chunk + tl.arange(0, BLOCK_C)
            counts = tl.load(
                chunk_counts_ptr + offs_c.to(tl.int64)[:, None] * stride_counts_c + offs_e[None, :],
                mask=(offs_c < chunk)[:, None] & mask_e[None, :],
                other=0,
            )  # [BLOCK_C, BLOCK_E]
            earlier += tl.sum(counts, 0)
        own_ptr = chunk_counts_ptr + chunk.to(tl.int64) * stride_counts_c
        own = tl.load(own_ptr + offs_e, mask=mask_e, other=0)  # [BLOCK_E]
        smaller = num_smaller + tl.cumsum(own, 0) - own
        num_smaller += tl.sum(own, 0)
        is_here = (expert >= first_expert) & (expert < first_expert + BLOCK_E)
        index = tl.where(is_here, expert - first_expert, 0)  # [CHUNK]
        ordinal += tl.where(is_here, tl.gather(earlier - smaller, index, 0), 0)
    return chunk * CHUNK + key % CHUNK, expert, ordinal
