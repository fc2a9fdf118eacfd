"""GEMM 1: gather the pairs' hidden states, multiply by gate and up, activate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afore_kernels.config import Activation
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import GemmConfig
from afore_kernels.gemm.main_loop import (
    accumulate,
    finish_rows,
    wide_offset,
    zero_accumulator,
)
from afore_kernels.gemm.operand import WeightOperand, num_programs
from afore_kernels.gemm.quant import ExpertWeight, split_parts


@triton.jit
def activate(
    gate,
    up,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LINEAR_OFFSET: tl.constexpr,
):
    """`act(gate) * (up + LINEAR_OFFSET)` after the clamps, in fp32; see `config.Activation`."""
    if LIMIT is not None:
        # Like torch's clamp, and unlike Triton's default, these let NaN through.
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = up + LINEAR_OFFSET
    if KIND == "silu":
        gate = gate * tl.sigmoid(ALPHA * gate)
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif KIND == "relu2":
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        gate = gate * gate
    return gate * up


# A count of 1 or a multiple of 16 must not compile another kernel while serving.
@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    activated_ptr,
    hidden_ptr,
    w,
    scale_ptr,
    bias_ptr,
    sorted_pair_ptr,
    tile_slot_ptr,
    num_tiles_ptr,
    stride_activated_m,
    stride_hidden_m,
    stride_hidden_k,
    w_strides,
    scale_strides,
    bias_strides,
    num_pairs,
    N,
    K,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    LINEAR_OFFSET: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Write act(gate) * up of every pair to its row of `activated`; padding rows are left alone.

    Programs stride over the (tile, n block) products, the tile fastest, so that those which read
    one weight tile run together. An eager launch has one program per product.
    """
    num_tiles = tl.load(num_tiles_ptr)
    num_products = num_tiles * tl.cdiv(N, MODE.BLOCK_N)
    offs_n = tl.arange(0, MODE.BLOCK_N)
    offs_k = tl.arange(0, MODE.BLOCK_K)
    weight = w, w_strides, scale_ptr, scale_strides
    epilogue = scale_ptr, scale_strides, bias_ptr, bias_strides
    for product in range(tl.program_id(0), num_products, tl.num_programs(0)):
        tile = product % num_tiles
        n_start = product // num_tiles * MODE.BLOCK_N
        slot = tl.load(tile_slot_ptr + tile)
        offs_m = tile * MODE.TILE_M + tl.arange(0, MODE.TILE_M)
        pair = tl.load(sorted_pair_ptr + offs_m)  # [TILE_M]
        mask_m = pair < num_pairs
        # The sentinel of a padding row forms no address.
        token = tl.where(mask_m, pair, 0) // TOP_K
        hidden_rows = hidden_ptr + wide_offset(token, stride_hidden_m)[:, None]
        if UNIT_COLUMNS:
            hidden_rows += offs_k[None, :]
        else:
            hidden_rows += wide_offset(offs_k, stride_hidden_k)[None, :]

        gate = zero_accumulator(MODE)
        up = zero_accumulator(MODE)
        for k_start in range(0, K, MODE.BLOCK_K):
            mask = mask_m[:, None]
            if not MODE.EVEN_K:
                mask = mask & (k_start + offs_k < K)[None, :]
            pointers = hidden_rows + wide_offset(k_start, stride_hidden_k)
            a = tl.load(pointers, mask=mask, other=0.0)  # [TILE_M, BLOCK_K]
            gate = accumulate(gate, a, *weight, slot, 0, n_start, k_start, N, K, MODE)
            up = accumulate(up, a, *weight, slot, 1, n_start, k_start, N, K, MODE)
        gate = finish_rows(gate, *epilogue, slot, 0, n_start, N, MODE)
        up = finish_rows(up, *epilogue, slot, 1, n_start, N, MODE)
        activated = activate(gate, up, KIND, ALPHA, LIMIT, LINEAR_OFFSET)
        rows = activated_ptr + wide_offset(offs_m, stride_activated_m)[:, None]
        mask = mask_m[:, None] & (n_start + offs_n < N)[None, :]
        tl.store(
            rows + (n_start + offs_n)[None, :],
            activated.to(activated_ptr.dtype.element_ty),
            mask=mask,
        )


def run_gate_up(
    activated: torch.Tensor,
    hidden: torch.Tensor,
    weight: ExpertWeight,
    tiles: DeviceTiles,
    *,
    top_k: int,
    activation: Activation,
    config: GemmConfig,
    bias: torch.Tensor | None = None,
    num_tiles: int | None = None,
    idle_sms: int = 0,
) -> None:
    """Write `act(hidden @ gate.T) * (hidden @ up.T)` of every pair of `tiles` to its row.

    Args:
        activated: [max_rows, I], dtype of `hidden`, contiguous rows; rows without a pair keep
            their content.
        hidden: [num_tokens, H], any strides.
        weight: `ExpertWeight.gate_up` of [num_slots, 2 * I, H].
        tiles: the local pairs of the flat routing [num_tokens * top_k].
        top_k: experts per token.
        activation: between the GEMMs, in fp32.
        config: block sizes.
        bias: [num_slots, 2 * I], rows as in the weight, or None.
        num_tiles: exact tile count, for an eager launch; None launches a resident grid that reads
            the count on the device.
        idle_sms: multiprocessors a resident grid leaves to other streams.
    """
    bias_parts = None if bias is None else split_parts(bias, 2, activation.interleaved)
    operand = WeightOperand.build(weight, bias_parts, hidden, tiles.schedule.tile_m, config)
    num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
    grid = num_programs(tiles, num_outputs, config, hidden.device, num_tiles, idle_sms)
    if grid == 0:
        return
    _gate_up_kernel[(grid,)](
        activated,
        hidden,
        *operand.tensors,
        tiles.sorted_pair,
        tiles.schedule.tile_slot,
        tiles.schedule.num_tiles,
        activated.stride(0),
        hidden.stride(0),
        hidden.stride(1),
        *operand.strides,
        tiles.num_pairs,
        num_outputs,
        num_inputs,
        TOP_K=top_k,
        KIND=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        LINEAR_OFFSET=activation.linear_offset,
        UNIT_COLUMNS=hidden.stride(1) == 1,
        MODE=operand.mode,
        **config.options,
    )
