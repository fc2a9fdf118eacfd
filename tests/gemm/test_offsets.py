"""Offsets past 2^31 elements: as numbers, and as tensors laid out that wide in untouched memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from afore_kernels.config import Activation
from afore_kernels.gemm.combine import run_combine
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.gate_up import run_gate_up
from afore_kernels.gemm.launch import GemmConfig, LaunchConfig
from afore_kernels.gemm.main_loop import wide_offset
from afore_kernels.gemm.quant import ExpertWeight, quantize_fp8_channel
from afore_kernels.gemm.reference import reference_gated_ffn, reference_moe_ffn
from afore_kernels.gemm.tiles import PairTiles
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn, tile_all_pairs
from afore_kernels.testing import assert_close, make_weights

pytestmark = pytest.mark.interpreter

BLOCKS = GemmConfig(block_n=16, block_k=32, num_stages=2)
DESCRIPTORS = replace(BLOCKS, use_descriptors=True)
SILU = Activation()
LIMIT = 2**31
NUM_EXPERTS, NUM_TOKENS, HIDDEN, INTERMEDIATE = 4, 9, 48, 32

# Index and stride of what overflowed in public issues; the product is past int32 in all of them.
OVERFLOWS = [
    pytest.param(70_000, 40_960, id="vllm-5938"),
    pytest.param(599_999, 4_096, id="vllm-34507"),
    pytest.param(56_000 * 8 - 1, 7_168, id="sglang-4727"),
    pytest.param(2**20, 2_049, id="sglang-20389"),
    pytest.param(52_429, 40_960, id="vllm-50220"),
    pytest.param(1_079_838, 2_048, id="liger-1246"),
    pytest.param(511, 2 * 1_024 * 4_096, id="liger-1296"),
    pytest.param(63, 4_096 * 14_336, id="deepspeed-8261"),
    pytest.param(511, 5_120 * 2_048, id="axolotl-3865"),
    pytest.param(255, 2 * 2_048 * 7_168, id="aiter-3818"),
    pytest.param(524_288, 4_096, id="megablocks-186"),
]


@triton.jit
def _multiply_kernel(products_ptr, index_ptr, stride):
    index = tl.load(index_ptr)
    tl.store(products_ptr, wide_offset(index, stride))
    tl.store(products_ptr + 1, index * stride)


@pytest.mark.parametrize(("index", "stride"), OVERFLOWS)
def test_loaded_index_times_stride(kernel_device: str, index: int, stride: int) -> None:
    """The plain product shows that the index is int32 and the sizes large enough to matter."""
    products = torch.empty(2, dtype=torch.int64, device=kernel_device)
    loaded = torch.tensor([index], dtype=torch.int32, device=kernel_device)
    _multiply_kernel[(1,)](products, loaded, stride)
    wrapped = (index * stride + LIMIT) % (2 * LIMIT) - LIMIT
    assert products.tolist() == [index * stride, wrapped]
    assert wrapped != index * stride


def reserve(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate gigabytes of which a test touches a few pages: on a CPU the others cost nothing."""
    try:
        return torch.empty(num_elements, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"cannot reserve {num_elements} elements of {dtype}: {error}")


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Move the rows of `tensor` apart, until the last starts past 2^31 elements.

    The stride itself fits int32, and is a multiple of 16 elements as descriptors need it.
    """
    num_rows, row_size = tensor.shape[0], tensor[0].numel()
    stride = LIMIT // (num_rows - 1) // 16 * 16 + 16
    assert stride < LIMIT < (num_rows - 1) * stride
    memory = reserve((num_rows - 1) * stride + row_size, tensor.dtype, tensor.device)
    return memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor)


def check(device: str, far: str, *, format: str = "plain", config: GemmConfig = BLOCKS) -> None:
    """Run the FFN with one tensor spread, or a weight and its scale, against the oracle."""
    dtype = torch.float16
    weights = make_weights(NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    expert_ids = torch.tensor([[0, 3]] * (NUM_TOKENS - 1) + [[3, 3]], dtype=torch.int32)
    routing_weights = torch.linspace(0.1, 1.0, expert_ids.numel()).view(expert_ids.shape)
    tiles = tile_all_pairs(expert_ids.to(device), NUM_EXPERTS, 16)
    rows = tiles.schedule.max_rows

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return spread(tensor.to(device)) if name == far else tensor.to(device)

    def place_weight(name: str) -> ExpertWeight:
        build = ExpertWeight.gate_up if name == "gate_up" else ExpertWeight.down
        if format == "plain":
            return build(place(name, getattr(weights, name)))
        data, scale = quantize_fp8_channel(getattr(weights, name))
        return build(place(name, data), place(name, scale), format="fp8_channel")

    gate_up, down = place_weight("gate_up"), place_weight("down")
    out = place("out", torch.full((NUM_TOKENS, HIDDEN), torch.nan, dtype=dtype))
    run_expert_ffn(
        out,
        place("hidden", hidden),
        routing_weights.to(device),
        gate_up,
        down,
        tiles,
        Workspace(
            place("activated", torch.full((rows, INTERMEDIATE), torch.nan, dtype=dtype)),
            place("weighted", torch.full((rows, HIDDEN), torch.nan)),
        ),
        activation=SILU,
        config=LaunchConfig(gate_up=config, down=config),
        gate_up_bias=place("gate_up_bias", weights.gate_up_bias),
        down_bias=place("down_bias", weights.down_bias),
    )
    expected = reference_moe_ffn(
        hidden,
        expert_ids,
        routing_weights,
        gate_up.as_rows(torch.float32).cpu(),
        down.as_rows(torch.float32).cpu(),
        activation=SILU,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
    )
    assert_close(out.cpu(), expected, dtype)


@pytest.mark.parametrize("config", [BLOCKS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("format", ["plain", "fp8_channel"])
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_last_slot_of_a_pool(
    kernel_device: str, name: str, format: str, config: GemmConfig
) -> None:
    """Liger #1296, DeepSpeed #8261, axolotl #3865, aiter #3818."""
    check(kernel_device, far=name, format=format, config=config)


@pytest.mark.parametrize(
    "name", ["hidden", "gate_up_bias", "down_bias", "activated", "weighted", "out"]
)
def test_last_row(kernel_device: str, name: str) -> None:
    """vLLM #34507, SGLang #4727, Liger #1246, megablocks #186: tokens, sorted rows, biases."""
    check(kernel_device, far=name)


def test_token_70_000(kernel_device: str) -> None:
    """vLLM #5938: more than 65,536 tokens; only the last has an expert."""
    num_tokens, stride = 70_001, 40_960
    memory = reserve(num_tokens * stride, torch.float16, torch.device(kernel_device))
    hidden = memory.as_strided((num_tokens, HIDDEN), (stride, 1))
    hidden[-1] = torch.linspace(-1, 1, HIDDEN)
    expert_ids = np.full((num_tokens, 1), -1, np.int32)
    expert_ids[-1] = 0
    weights = make_weights(1, HIDDEN, INTERMEDIATE, dtype=torch.float16)
    activated = torch.full((16, INTERMEDIATE), torch.nan, dtype=torch.float16, device=kernel_device)
    run_gate_up(
        activated,
        hidden,
        ExpertWeight.gate_up(weights.gate_up.to(kernel_device)),
        DeviceTiles.from_host(PairTiles.from_expert_ids(expert_ids, 1, 16), kernel_device),
        top_k=1,
        activation=SILU,
        config=BLOCKS,
    )
    identity = torch.eye(INTERMEDIATE)
    expected = reference_gated_ffn(hidden[-1].cpu(), weights.gate_up[0], identity, activation=SILU)
    assert_close(activated[0].cpu(), expected, torch.float16)


def test_hidden_columns(kernel_device: str) -> None:
    """SGLang #20389: columns so far apart that those of one block span 2^31 elements."""
    hidden = torch.linspace(-1, 1, 2 * 32).view(2, 32).half().to(kernel_device)
    weights = make_weights(1, 32, INTERMEDIATE, dtype=torch.float16)
    activated = torch.empty(16, INTERMEDIATE, dtype=torch.float16, device=kernel_device)
    run_gate_up(
        activated,
        spread(hidden.T.contiguous()).T,
        ExpertWeight.gate_up(weights.gate_up.to(kernel_device)),
        tile_all_pairs(torch.zeros(2, 1, dtype=torch.int32, device=kernel_device), 1, 16),
        top_k=1,
        activation=SILU,
        config=BLOCKS,
    )
    identity = torch.eye(INTERMEDIATE)
    expected = reference_gated_ffn(hidden.cpu(), weights.gate_up[0], identity, activation=SILU)
    assert_close(activated[:2].cpu(), expected, torch.float16)


def test_first_row_of_combine_past_int32(kernel_device: str) -> None:
    """vLLM #50220: rows of 10 * 4096 elements are wrong from row 52,429 on."""
    row, stride = 52_429, 40_960
    memory = reserve((row + 1) * stride, torch.float32, torch.device(kernel_device))
    weighted = memory.as_strided((row + 1, HIDDEN), (stride, 1))
    weighted[row - 1], weighted[row] = 1.0, 2.0
    pair_row = torch.tensor([row, row - 1, row], dtype=torch.int32, device=kernel_device)
    out = torch.full((1, HIDDEN), torch.nan, device=kernel_device)
    run_combine(out, weighted, pair_row, top_k=3)
    assert (out == 5.0).all()
