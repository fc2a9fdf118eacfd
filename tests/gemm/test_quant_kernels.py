"""Quantised weights through the kernels, against the oracle on what their bits stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from afore_kernels.config import Activation
from afore_kernels.gemm import operand
from afore_kernels.gemm.launch import GemmConfig, LaunchConfig
from afore_kernels.gemm.main_loop import decode_e4m3, decode_mxfp4
from afore_kernels.gemm.quant import (
    E2M1,
    ExpertWeight,
    quantize_fp8_block,
    quantize_fp8_channel,
    quantize_mxfp4,
)
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn, tile_all_pairs
from afore_kernels.testing import assert_close, make_routing, make_weights

pytestmark = pytest.mark.interpreter

SILU = Activation()
GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0, interleaved=True)
BLOCKS = GemmConfig(block_n=32, block_k=64, num_stages=2)
SWAPPED = replace(BLOCKS, swap_ab=True, use_descriptors=True)
CONFIGS = [
    pytest.param(BLOCKS, id="pointers"),
    pytest.param(replace(BLOCKS, use_descriptors=True), id="descriptors"),
    pytest.param(SWAPPED, id="swapped-descriptors"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONFIGS_AND_DTYPES = [
    pytest.param(BLOCKS, torch.float32, id="pointers-fp32"),
    pytest.param(replace(BLOCKS, use_descriptors=True), torch.bfloat16, id="descriptors-bf16"),
    pytest.param(SWAPPED, torch.float16, id="swapped-fp16"),
    pytest.param(SWAPPED, torch.float32, id="swapped-fp32"),
]
QUANTIZERS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "fp8_block": quantize_fp8_block,
    "fp8_channel": quantize_fp8_channel,
    "mxfp4": quantize_mxfp4,
}
View = Callable[[torch.Tensor], torch.Tensor]
NUM_EXPERTS = 2


@triton.jit
def _decode_e4m3_kernel(values_ptr, bits_ptr, DTYPE: tl.constexpr):
    offs = tl.arange(0, 256)
    tl.store(values_ptr + offs, decode_e4m3(tl.load(bits_ptr + offs), DTYPE))


@triton.jit
def _decode_mxfp4_kernel(values_ptr, packed_ptr, scale_ptr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, BLOCK_N)[:, None]
    packed = tl.load(packed_ptr + rows * 32 + tl.arange(0, 32)[None, :])
    scale = tl.load(scale_ptr + rows * 2 + tl.arange(0, 2)[None, :])
    values = decode_mxfp4(packed, scale, tl.float32)
    tl.store(values_ptr + rows * 64 + tl.arange(0, 64)[None, :], values)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[expected.itemsize]
    return torch.equal(actual.cpu().view(integer), expected.view(integer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_e4m3_code(kernel_device: str, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    values = torch.empty(256, dtype=dtype, device=kernel_device)
    triton_dtype = getattr(tl, str(dtype).removeprefix("torch."))
    _decode_e4m3_kernel[(1,)](values, bits.to(kernel_device), triton_dtype)
    expected = bits.view(torch.float8_e4m3fn).to(dtype)
    expected[0x7F], expected[0xFF] = 480.0, -480.0  # the two NaN codes
    assert same_bits(values, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
def test_every_mxfp4_code_under_every_scale(kernel_device: str) -> None:
    """From 2^-127, a subnormal, to 2^127, where the largest codes overflow fp32 and no other."""
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4, dtype=torch.uint8)
    scale = torch.arange(256).remainder(255)[:, None] + torch.tensor([0, 100])
    scale = scale.remainder(255).to(torch.uint8)
    values = torch.empty(256, 64, device=kernel_device)
    _decode_mxfp4_kernel[(1,)](
        values, packed.repeat(256, 1).to(kernel_device), scale.to(kernel_device), BLOCK_N=256
    )
    factor = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    assert same_bits(values, torch.tensor(E2M1).repeat(4) * factor)


def quantize_experts(
    format: Any, hidden_size: int, intermediate_size: int, interleaved: bool
) -> tuple[ExpertWeight, ExpertWeight]:
    weights = make_weights(NUM_EXPERTS, hidden_size, intermediate_size, seed=3)
    # Rows and blocks of rows get scales of their own.
    weights.gate_up.mul_(torch.linspace(0.5, 2.0, 2 * intermediate_size)[:, None])
    weights.down.mul_(torch.linspace(2.0, 0.5, hidden_size)[:, None])
    num_parts = 1 if interleaved else 2
    gate_up = QUANTIZERS[format](weights.gate_up.unflatten(1, (num_parts, -1)))
    down = QUANTIZERS[format](weights.down)
    data, scale = (tensor.flatten(1, 2) for tensor in gate_up)
    return (
        ExpertWeight.gate_up(data, scale, format=format, interleaved=interleaved),
        ExpertWeight.down(*down, format=format),
    )


def move(weight: ExpertWeight, device: str, view: View) -> ExpertWeight:
    assert weight.scale is not None
    data, scale = view(weight.data.to(device)), view(weight.scale.to(device))
    return replace(weight, data=data, scale=scale)


def check(
    device: str,
    format: str,
    *,
    sizes: tuple[int, int] = (96, 64),
    dtype: torch.dtype = torch.float32,
    activation: Activation = SILU,
    config: GemmConfig = BLOCKS,
    view: View = torch.clone,
) -> None:
    """Compare with the oracle; `view` lays out weights, scales and biases in memory."""
    hidden_size, intermediate_size = sizes
    gate_up, down = quantize_experts(format, *sizes, activation.interleaved)
    biases = [b.to(dtype) for b in make_weights(NUM_EXPERTS, *sizes, seed=4)[2:]]
    expert_ids, routing_weights = make_routing(3, NUM_EXPERTS, 1, seed=2)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, hidden_size, generator=generator).to(dtype)
    tiles = tile_all_pairs(expert_ids.to(device), NUM_EXPERTS, 16)
    out = torch.empty(3, hidden_size, device=device)
    run_expert_ffn(
        out,
        hidden.to(device),
        routing_weights.to(device),
        move(gate_up, device, view),
        move(down, device, view),
        tiles,
        Workspace.allocate(tiles.schedule.max_rows, hidden_size, intermediate_size, dtype, device),
        activation=activation,
        config=LaunchConfig(gate_up=config, down=config),
        gate_up_bias=view(biases[0].to(device)),
        down_bias=view(biases[1].to(device)),
    )
    expected = reference_moe_ffn(
        hidden,
        expert_ids,
        routing_weights,
        gate_up.as_rows(torch.float32),
        down.as_rows(torch.float32),
        activation=activation,
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )
    assert_close(out.cpu(), expected, dtype)


@pytest.mark.parametrize(("config", "dtype"), CONFIGS_AND_DTYPES)
@pytest.mark.parametrize("format", ["fp8_channel", "mxfp4"])
def test_matches_the_oracle(
    kernel_device: str, format: str, config: GemmConfig, dtype: torch.dtype
) -> None:
    check(kernel_device, format, dtype=dtype, config=config)


@pytest.mark.parametrize(("config", "dtype"), CONFIGS_AND_DTYPES)
def test_fp8_blocks_in_both_directions(
    kernel_device: str, config: GemmConfig, dtype: torch.dtype
) -> None:
    check(kernel_device, "fp8_block", sizes=(144, 160), dtype=dtype, config=config)


@pytest.mark.parametrize("config", CONFIGS)
def test_mxfp4_as_gpt_oss_uses_it(kernel_device: str, config: GemmConfig) -> None:
    check(
        kernel_device,
        "mxfp4",
        dtype=torch.float16,
        activation=GPT_OSS,
        config=config,
    )


def test_interleaved_fp8_channels(kernel_device: str) -> None:
    check(kernel_device, "fp8_channel", activation=GPT_OSS)


@pytest.mark.parametrize("sizes", [(129, 257), (100, 33), (577, 7)])
@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_sizes_that_no_block_divides(
    kernel_device: str, format: str, sizes: tuple[int, int]
) -> None:
    config = replace(SWAPPED, block_n=64, block_k=128)
    check(kernel_device, format, sizes=sizes, config=config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_gpu_without_fp8(
    kernel_device: str, format: str, config: GemmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels decode the bits themselves, as on sm80 and gfx942."""
    devices: list[torch.device] = []
    monkeypatch.setattr(operand, "has_native_e4m3", devices.append)
    check(kernel_device, format, sizes=(144, 48), dtype=torch.float16, config=config)
    assert len(devices) == 2


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor with a gap behind every element, filled with ones."""
    wide = torch.ones(*tensor.shape, 2, device=tensor.device).to(tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor with its last two dimensions exchanged in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor as the first half of longer rows; descriptors can address them."""
    wide = torch.ones(*tensor.shape[:-1], 2 * tensor.shape[-1], device=tensor.device)
    wide = wide.to(tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


@pytest.mark.parametrize("view", [every_second, transposed, sliced])
@pytest.mark.parametrize("format", list(QUANTIZERS))
def test_strided_weights_scales_and_biases(kernel_device: str, format: str, view: View) -> None:
    """aiter #5292, TRT-LLM #17332: every stride of every tensor reaches the kernel."""
    check(kernel_device, format, config=SWAPPED, view=view)
