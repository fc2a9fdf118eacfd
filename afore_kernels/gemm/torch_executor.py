"""The expert FFN on a CPU: the torch executor of `PairTiles`.

It computes valid rows only, packed without padding. GEMMs accumulate in fp32 and round to the
weight dtype; everything between and after them is fp32.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F

from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.activation import gated_activation
from afore_kernels.gemm.tiles import Int32Array, Int64Array, PairTiles

# Measured on 2 cores of an AMD EPYC (AVX2, 512 KiB of L2 per core).
# For a few rows of fp32, `weight @ x.T` takes 0.6x to 0.95x of `x @ weight.T` if the weight, like
# 1536 x 2048, comes from memory; from 9 rows on it gains nothing on one thread. Small weights are
# bound by the overhead per call instead: `grouped_mm`, whose loop over slots is compiled, takes
# 0.75x.
_SKINNY_ROWS = range(2, 9)
_SMALL_WEIGHTS = 1 << 18
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


def _is_small_and_aligned(weight: torch.Tensor) -> bool:
    """Whether `grouped_mm` takes this weight [num_slots, N, K] and is the fastest way."""
    return (
        weight[0].numel() < _SMALL_WEIGHTS
        and weight.stride(2) == 1
        and weight.stride(1) * weight.itemsize % 16 == 0
        and weight.stride(0) * weight.itemsize % 16 == 0
    )


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
    elif not widen and num_rows in _SKINNY_ROWS and weight.numel() >= _SMALL_WEIGHTS:
        out.copy_(torch.mm(weight, x.t()).t())
    else:
        torch.mm(x, weight.t(), out=out)


def _multiply_slots(x: torch.Tensor, weight: torch.Tensor, row_counts: Int64Array) -> torch.Tensor:
    """Multiply the rows of each slot by its weight, in the weight dtype.

    Args:
        x: [num_rows, K], sorted by slot.
        weight: [num_slots, N, K].
        row_counts: rows of each slot, int64 [num_slots].

    Returns:
        [num_rows, N].
    """
    slots = row_counts.nonzero()[0]
    # `grouped_mm` visits every slot, with or without rows.
    if 2 * slots.size > row_counts.size and _is_small_and_aligned(weight):
        row_ends = torch.from_numpy(row_counts.cumsum(dtype=np.int32))
        return F.grouped_mm(x, weight.transpose(1, 2), offs=row_ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    widen = not _has_fast_gemm(weight.dtype)
    rows_per_slot = row_counts[slots].tolist()
    x_of_slot, out_of_slot = x.split_with_sizes(rows_per_slot), out.split_with_sizes(rows_per_slot)
    for slot, x_slot, out_slot in zip(slots.tolist(), x_of_slot, out_of_slot):
        _multiply(x_slot, weight[slot], out_slot, widen)
    return out


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pack_rows(
    sorted_pair: Int32Array,
    pair_row: Int32Array,
    row_starts: Int32Array,
    num_tokens: int,
    top_k: int,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
    """Drop the padding from the rows of `PairTiles` and list each token's rows in the order of k.

    Returns:
        The token of each packed row; of the local pairs in flat order, the packed row and the pair;
        where each token's local pairs start, [num_tokens]; the packed rows of each slot.
    """
    num_pairs = pair_row.size
    num_local = np.count_nonzero(pair_row >= 0)
    token = np.empty(num_local, np.int64)
    row_counts = np.zeros(row_starts.size - 1, np.int64)
    packed_row_of_pair = np.empty(num_pairs, np.int64)
    packed_row = 0
    for slot in range(row_starts.size - 1):
        for row in range(row_starts[slot], row_starts[slot + 1]):
            pair = sorted_pair[row]
            if pair < num_pairs:
                token[packed_row] = pair // top_k
                row_counts[slot] += 1
                packed_row_of_pair[pair] = packed_row
                packed_row += 1
    bag_pairs = np.flatnonzero(pair_row >= 0)
    bag_starts = np.searchsorted(bag_pairs, np.arange(num_tokens) * top_k)
    return token, packed_row_of_pair[bag_pairs], bag_pairs, bag_starts, row_counts


def _repeat_rows(bias: torch.Tensor, row_counts: Int64Array) -> torch.Tensor:
    """Repeat row s of `bias` [num_slots, N] for the rows of slot s."""
    row_slot = np.repeat(np.arange(row_counts.size), row_counts)
    return bias.index_select(0, torch.from_numpy(row_slot))


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
    packed = _pack_rows(tiles.sorted_pair, tiles.pair_row, schedule.row_starts, num_tokens, top_k)
    token, bag_rows, bag_pairs, bag_starts = map(torch.from_numpy, packed[:4])
    row_counts = packed[4]

    up = _multiply_slots(hidden.index_select(0, token), gate_up, row_counts).float()
    if gate_up_bias is not None:
        up += _repeat_rows(gate_up_bias, row_counts)
    activated = gated_activation(up, activation).to(down.dtype)
    product = _multiply_slots(activated, down, row_counts).float()
    if down_bias is not None:
        product += _repeat_rows(down_bias, row_counts)
    # Sums each token's bag of rows in order; an empty bag gives a row of zeros.
    return F.embedding_bag(
        bag_rows,
        product,
        bag_starts,
        mode="sum",
        per_sample_weights=routing_weights.reshape(-1).index_select(0, bag_pairs),
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
    row_counts = np.array([hidden.shape[0]])
    up = _multiply_slots(hidden, gate_up[None], row_counts).float()
    activated = gated_activation(up, activation).to(down.dtype)
    return _multiply_slots(activated, down[None], row_counts).float()
