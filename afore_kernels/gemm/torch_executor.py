"""The expert FFN on a CPU: the torch executor of `PairTiles`.

It computes valid rows only, packed without padding. GEMMs accumulate in fp32 and round to the
weight dtype; everything between and after them is fp32.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.activation import gated_activation
from afore_kernels.gemm.tiles import PairTiles

# Measured on 2 cores of an AMD EPYC (AVX2, 512 KiB of L2 per core), 1536 x 2048 weights.
# `weight @ x.T` streams a weight once, `x @ weight.T` once per few rows: 1.5x for 2 to 64 rows, and
# nothing to gain for one row or when the weight stays in the cache.
_SKINNY_ROWS = range(2, 128)
_SKINNY_MIN_WEIGHTS = 1 << 17
# A CPU without 16-bit dot products runs 16-bit GEMMs one row at a time: from 8 rows on, widening
# the weight first is faster (2.2x at 16 rows). A block of 2 MiB stays cached between the two steps.
_WIDEN_MIN_ROWS = 8
_WIDEN_BLOCK_WEIGHTS = 1 << 19


def _has_fast_gemm(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` matrices at full speed."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _multiply_widened(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write `x @ weight.T` through fp32 blocks of a 16-bit weight."""
    num_outputs, num_inputs = weight.shape
    block = min(num_outputs, max(1, _WIDEN_BLOCK_WEIGHTS // num_inputs))
    widened = torch.empty(block, num_inputs)
    x_t = x.float().t()
    for start in range(0, num_outputs, block):
        rows = weight[start : start + block]
        product = torch.mm(widened[: rows.shape[0]].copy_(rows), x_t)
        out[:, start : start + block].copy_(product.t())


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, widen: bool) -> None:
    """Write `x @ weight.T`, rounded to the weight dtype, by the fastest way for its shape.

    Args:
        x: [num_rows, K], dtype of the weight.
        weight: [N, K], any strides.
        out: [num_rows, N], same dtype.
        widen: go through fp32 when there are enough rows.
    """
    num_rows = x.shape[0]
    if widen and num_rows >= _WIDEN_MIN_ROWS:
        _multiply_widened(x, weight, out)
    elif not widen and num_rows in _SKINNY_ROWS and weight.numel() >= _SKINNY_MIN_WEIGHTS:
        out.copy_(torch.mm(weight, x.t()).t())
    else:
        torch.mm(x, weight.t(), out=out)


def _multiply_slots(
    x: torch.Tensor, weight: torch.Tensor, slots: list[int], rows_per_slot: list[int]
) -> torch.Tensor:
    """Multiply consecutive rows of `x` [num_rows, K] by the weights [N, K] of their slots."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    widen = not _has_fast_gemm(weight.dtype)
    weights = weight.unbind(0)
    for slot, x_slot, out_slot in zip(
        slots, torch.split(x, rows_per_slot), torch.split(out, rows_per_slot)
    ):
        _multiply(x_slot, weights[slot], out_slot, widen)
    return out


@torch.no_grad()
def run_expert_ffn(
    hidden: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    tiles: PairTiles,
    *,
    activation: Activation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the pairs of `tiles` and combine them per token (section 6.2).

    The routing weight multiplies product and bias, in fp32. The pairs of a token are added in the
    order of k, so the result is the same in every call. Only rows of tokens with a local pair and
    weights of slots with a pair are read.

    Args:
        hidden: [num_tokens, H], dtype of the weights.
        routing_weights: float32 [num_tokens, top_k].
        gate_up: [num_slots, 2 * I, H].
        down: [num_slots, H, I].
        tiles: the local pairs of the flat routing [num_tokens * top_k].
        activation: between the GEMMs, evaluated in fp32.
        gate_up_bias: [num_slots, 2 * I], or None.
        down_bias: [num_slots, H], or None.

    Returns:
        float32 [num_tokens, H]; zeros for a token without a local pair.

    Raises:
        ShapeError: if the tiles were built for another routing or number of slots.
    """
    num_tokens, top_k = routing_weights.shape
    schedule = tiles.schedule
    if tiles.num_pairs != num_tokens * top_k or schedule.num_slots != gate_up.shape[0]:
        raise ShapeError(
            f"tiles hold {tiles.num_pairs} pairs in {schedule.num_slots} slots, the arguments "
            f"{num_tokens * top_k} pairs in {gate_up.shape[0]} slots"
        )
    # Packed rows: the rows of the schedule that hold a pair, in order, without the padding.
    filled_rows = np.flatnonzero(tiles.sorted_pair != tiles.num_pairs)
    token = torch.from_numpy(tiles.sorted_pair[filled_rows] // top_k)
    all_rows_per_slot = np.diff(np.searchsorted(filled_rows, schedule.row_starts))
    active_slots = np.flatnonzero(all_rows_per_slot)
    rows_per_slot = all_rows_per_slot[active_slots].tolist()
    slots = active_slots.tolist()
    row_slot = torch.from_numpy(np.repeat(active_slots, rows_per_slot))

    up = _multiply_slots(hidden.index_select(0, token), gate_up, slots, rows_per_slot).float()
    if gate_up_bias is not None:
        up += gate_up_bias.index_select(0, row_slot)
    activated = gated_activation(up, activation).to(down.dtype)
    product = _multiply_slots(activated, down, slots, rows_per_slot).float()
    if down_bias is not None:
        product += down_bias.index_select(0, row_slot)

    # Combine: one bag of packed rows per token, summed in order; an empty bag is a row of zeros.
    local_pairs = np.flatnonzero(tiles.pair_row >= 0)
    packed_row = np.searchsorted(filled_rows, tiles.pair_row[local_pairs])
    bag_starts = np.searchsorted(local_pairs, np.arange(num_tokens) * top_k)
    return F.embedding_bag(
        torch.from_numpy(packed_row),
        product,
        torch.from_numpy(bag_starts),
        mode="sum",
        per_sample_weights=routing_weights.reshape(-1)[torch.from_numpy(local_pairs)],
    )


@torch.no_grad()
def run_dense_ffn(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, activation: Activation
) -> torch.Tensor:
    """Run one gated FFN on every token: the shared experts of a layer.

    Args:
        hidden: [num_tokens, H], dtype of the weights.
        gate_up: [2 * I, H].
        down: [H, I].
        activation: between the GEMMs, evaluated in fp32.

    Returns:
        float32 [num_tokens, H].
    """
    rows = [hidden.shape[0]]
    up = _multiply_slots(hidden, gate_up[None], [0], rows).float()
    activated = gated_activation(up, activation).to(down.dtype)
    return _multiply_slots(activated, down[None], [0], rows).float()
