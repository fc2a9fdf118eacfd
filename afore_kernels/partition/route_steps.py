"""The steps of the routing kernel.

Logits are [BLOCK_T, COLUMNS]. Column c is member c % BLOCK_MEMBERS of group c // BLOCK_MEMBERS, so
that groups of any number and size can be reshaped; padding columns hold no expert. Columns ascend
with the expert id: the first column among equals is the lowest id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afore_kernels.gemm.main_loop import wide_offset


@triton.jit
def arrive_last(arrivals_ptr, num_programs):
    """Return whether this program is the last of `num_programs` here, and reset the count if so.

    What the other programs wrote before they arrived is then visible.
    """
    # One thread arrives for all, after the writes of all.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == num_programs - 1
    if is_last:
        tl.store(arrivals_ptr, 0)
    return is_last


@triton.jit
def multiply_chunk(
    hidden_ptr,
    weight_ptr,
    stride_hidden_t,
    stride_hidden_h,
    stride_weight_e,
    stride_weight_h,
    offs_t,
    mask_t,
    expert,
    mask_e,
    chunk,
    hidden_size,
    CHUNK_H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EVEN_H: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return what columns [chunk * CHUNK_H, +CHUNK_H) of the hidden size add to the logits."""
    hidden_rows = hidden_ptr + wide_offset(offs_t, stride_hidden_t)
    weight_rows = weight_ptr + wide_offset(expert, stride_weight_e)
    partial = tl.zeros((offs_t.shape[0], expert.shape[0]), tl.float32)
    for h_start in range(0, CHUNK_H, BLOCK_H):
        offs_h = chunk * CHUNK_H + h_start + tl.arange(0, BLOCK_H)
        mask_h = EVEN_H or (offs_h < hidden_size)[None, :]
        hidden = tl.load(  # [BLOCK_T, BLOCK_H]
            hidden_rows[:, None] + wide_offset(offs_h, stride_hidden_h)[None, :],
            mask=mask_t[:, None] & mask_h,
            other=0.0,
        )
        weight = tl.load(  # [COLUMNS, BLOCK_H]
            weight_rows[:, None] + wide_offset(offs_h, stride_weight_h)[None, :],
            mask=mask_e[:, None] & mask_h,
            other=0.0,
        )
        if UPCAST:
            hidden = hidden.to(tl.float32)
            weight = weight.to(tl.float32)
        partial = tl.dot(hidden, tl.trans(weight), partial, input_precision="ieee")
    return partial


@triton.jit
def add_bias(values, bias_ptr, stride_bias_e, expert, mask_e):
    """Add a bias per expert to `values` [BLOCK_T, COLUMNS]."""
    offsets = wide_offset(expert, stride_bias_e)
    bias = tl.load(bias_ptr + offsets, mask=mask_e, other=0.0)  # [COLUMNS]
    return values + bias[None, :].to(tl.float32)


@triton.jit
def limit_groups(
    choice, TOPK_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr
):
    """Set `choice` to -inf outside the TOPK_GROUPS groups with the largest sum of two members."""
    BLOCK_T: tl.constexpr = choice.shape[0]
    grouped = tl.reshape(choice, (BLOCK_T, BLOCK_GROUPS, BLOCK_MEMBERS))
    best, best_member = tl.max(grouped, axis=2, return_indices=True)
    is_best = tl.arange(0, BLOCK_MEMBERS)[None, None, :] == best_member[:, :, None]
    # Padding groups score -inf.
    group_score = best + tl.max(tl.where(is_best, -float("inf"), grouped), axis=2)
    is_kept = tl.zeros((BLOCK_T, BLOCK_GROUPS), tl.int1)
    for _ in range(TOPK_GROUPS):
        group = tl.argmax(tl.where(is_kept, -float("inf"), group_score), axis=1)
        is_kept = is_kept | (tl.arange(0, BLOCK_GROUPS)[None, :] == group[:, None])
    grouped = tl.where(is_kept[:, :, None], grouped, -float("inf"))
    return tl.reshape(grouped, (BLOCK_T, BLOCK_GROUPS * BLOCK_MEMBERS))


@triton.jit
def choose_columns(choice, logits, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Choose the TOP_K largest of `choice` in each row, the first column among equals.

    Returns:
        is_chosen: bool [BLOCK_T, COLUMNS].
        chosen_columns: int32 [BLOCK_T, BLOCK_K], largest choice first.
        chosen_logits: fp32 [BLOCK_T, BLOCK_K], -inf from TOP_K on, where every score is 0.
    """
    BLOCK_T: tl.constexpr = choice.shape[0]
    columns = tl.arange(0, choice.shape[1])[None, :]
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    is_chosen = tl.zeros(choice.shape, tl.int1)
    chosen_columns = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    chosen_logits = tl.full((BLOCK_T, BLOCK_K), -float("inf"), tl.float32)
    for k in range(TOP_K):
        column = tl.argmax(tl.where(is_chosen, -float("inf"), choice), axis=1)[:, None]
        is_column = columns == column
        logit = tl.sum(tl.where(is_column, logits, 0.0), axis=1)[:, None]
        is_chosen = is_chosen | is_column
        chosen_columns = tl.where(offs_k == k, column, chosen_columns)
        chosen_logits = tl.where(offs_k == k, logit, chosen_logits)
    return is_chosen, chosen_columns, chosen_logits


@triton.jit
def weigh_experts(
    chosen_logits,
    logits,
    mask_e,
    IS_SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Return the chosen experts' weights before scaling, fp32 [BLOCK_T, BLOCK_K]."""
    if IS_SIGMOID:
        scores = tl.sigmoid(chosen_logits)
        return scores / (tl.sum(scores, axis=1)[:, None] + EPSILON) if NORMALISE else scores
    # The largest logit of all is among the chosen.
    top_logit = tl.max(chosen_logits, axis=1)[:, None]
    scores = tl.exp(chosen_logits - top_logit)
    if NORMALISE:
        return scores / tl.sum(scores, axis=1)[:, None]
    all_scores = tl.where(mask_e[None, :], tl.exp(logits - top_logit), 0.0)
    return scores / tl.sum(all_scores, axis=1)[:, None]
