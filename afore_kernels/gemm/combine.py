"""Combine: add the weighted rows of each token's pairs in the order of k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afore_kernels.gemm.launch import LAUNCH_OPTIONS
from afore_kernels.gemm.main_loop import wide_offset

BLOCK_T = 4
BLOCK_H = 512


# A count of 1 or a multiple of 16 must not compile another kernel while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    out_ptr,
    weighted_ptr,
    pair_row_ptr,
    stride_out_t,
    stride_weighted_m,
    num_tokens,
    H,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write one [BLOCK_T, BLOCK_H] block of `out`; zeros for a token without a local pair."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_t = offs_t < num_tokens
    mask_h = offs_h < H
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(pair_row_ptr + wide_offset(offs_t, TOP_K) + k, mask=mask_t, other=-1)
        is_local = row >= 0  # [BLOCK_T]
        rows = weighted_ptr + wide_offset(tl.where(is_local, row, 0), stride_weighted_m)[:, None]
        mask = is_local[:, None] & mask_h[None, :]
        total += tl.load(rows + offs_h[None, :], mask=mask, other=0.0)  # [BLOCK_T, BLOCK_H]
    out = out_ptr + wide_offset(offs_t, stride_out_t)[:, None] + offs_h[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_h[None, :])


def run_combine(
    out: torch.Tensor, weighted: torch.Tensor, pair_row: torch.Tensor, top_k: int
) -> None:
    """Write every token's sum over its local pairs.

    Each element of `out` is written once, without atomics, in fp32 and in the order of k: the
    result has the same bits in every call.

    Args:
        out: [num_tokens, H], any floating point dtype, contiguous rows.
        weighted: float32 [max_rows, H], contiguous rows.
        pair_row: int32 [num_tokens * top_k], the pair's row or -1.
        top_k: experts per token.
    """
    num_tokens, hidden_size = out.shape
    if num_tokens == 0:
        return
    grid = triton.cdiv(num_tokens, BLOCK_T), triton.cdiv(hidden_size, BLOCK_H)
    _combine_kernel[grid](
        out,
        weighted,
        pair_row,
        out.stride(0),
        weighted.stride(0),
        num_tokens,
        hidden_size,
        TOP_K=top_k,
        BLOCK_T=BLOCK_T,
        BLOCK_H=BLOCK_H,
        **LAUNCH_OPTIONS,
    )
