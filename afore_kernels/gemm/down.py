"""GEMM 2: multiply the activated rows by down and by the routing weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import GemmConfig
from afore_kernels.gemm.main_loop import accumulate, finish_rows, wide_offset, zero_accumulator
from afore_kernels.gemm.operand import WeightOperand, num_programs
from afore_kernels.gemm.quant import ExpertWeight, split_parts


# A count of 1 or a multiple of 16 must not compile another kernel while serving.
@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    weighted_ptr,
    activated_ptr,
    w,
    scale_ptr,
    bias_ptr,
    routing_weights_ptr,
    sorted_pair_ptr,
    tile_slot_ptr,
    num_tiles_ptr,
    stride_weighted_m,
    stride_activated_m,
    w_strides,
    scale_strides,
    bias_strides,
    num_pairs,
    N,
    K,
    MODE: tl.constexpr,
):
    """Write routing_weight * (activated @ down.T + bias) of every pair to its row.

    Padding rows are neither read nor written. Programs stride over the products as in
    `_gate_up_kernel`.
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
        activated_rows = activated_ptr + wide_offset(offs_m, stride_activated_m)[:, None]
        activated_rows += offs_k[None, :]

        accumulator = zero_accumulator(MODE)
        for k_start in range(0, K, MODE.BLOCK_K):
            mask = mask_m[:, None]
            if not MODE.EVEN_K:
                mask = mask & (k_start + offs_k < K)[None, :]
            a = tl.load(activated_rows + k_start, mask=mask, other=0.0)  # [TILE_M, BLOCK_K]
            accumulator = accumulate(accumulator, a, *weight, slot, 0, n_start, k_start, N, K, MODE)
        rows = finish_rows(accumulator, *epilogue, slot, 0, n_start, N, MODE)
        routing_weight = tl.load(routing_weights_ptr + pair, mask=mask_m, other=0.0)  # [TILE_M]
        rows *= routing_weight[:, None]
        pointers = weighted_ptr + wide_offset(offs_m, stride_weighted_m)[:, None]
        mask = mask_m[:, None] & (n_start + offs_n < N)[None, :]
        tl.store(pointers + (n_start + offs_n)[None, :], rows, mask=mask)


def run_down(
    weighted: torch.Tensor,
    activated: torch.Tensor,
    weight: ExpertWeight,
    routing_weights: torch.Tensor,
    tiles: DeviceTiles,
    *,
    config: GemmConfig,
    bias: torch.Tensor | None = None,
    num_tiles: int | None = None,
    idle_sms: int = 0,
) -> None:
    """Write `routing_weight * (activated @ down.T + bias)` of every pair of `tiles` to its row.

    Args:
        weighted: float32 [max_rows, H], contiguous rows; rows without a pair keep their content.
        activated: [max_rows, I], contiguous rows, written by `run_gate_up`.
        weight: `ExpertWeight.down` of [num_slots, H, I].
        routing_weights: float32 [num_tokens * top_k], contiguous.
        tiles: the local pairs of the flat routing.
        config: block sizes.
        bias: [num_slots, H], or None.
        num_tiles: exact tile count for an eager launch, or None; see `run_gate_up`.
        idle_sms: multiprocessors a resident grid leaves to other streams.
    """
    bias_parts = None if bias is None else split_parts(bias, 1, False)
    operand = WeightOperand.build(weight, bias_parts, activated, tiles.schedule.tile_m, config)
    num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
    grid = num_programs(tiles, num_outputs, config, activated.device, num_tiles, idle_sms)
    if grid == 0:
        return
    _down_kernel[(grid,)](
        weighted,
        activated,
        *operand.tensors,
        routing_weights,
        tiles.sorted_pair,
        tiles.schedule.tile_slot,
        tiles.schedule.num_tiles,
        weighted.stride(0),
        activated.stride(0),
        *operand.strides,
        tiles.num_pairs,
        num_outputs,
        num_inputs,
        MODE=operand.mode,
        **config.options,
    )
