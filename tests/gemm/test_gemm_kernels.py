"""gate_up, down and combine against the dense oracle, with every public fault as an input."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from afore_kernels.config import Activation
from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.gemm.combine import run_combine
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import GemmConfig, LaunchConfig
from afore_kernels.gemm.quant import ExpertWeight
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.gemm.tiles import PairTiles
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn
from afore_kernels.testing import assert_close, make_routing, make_weights
from tests.guarded import Guarded

pytestmark = pytest.mark.interpreter

SILU = Activation()
IDENTITY = Activation(kind="none")
GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0, interleaved=True)
BLOCKS = GemmConfig(block_n=32, block_k=64, num_stages=2)
SWAPPED = replace(BLOCKS, swap_ab=True, use_descriptors=True)


class Run(NamedTuple):
    """One run with poisoned buffers: what came out and what should have."""

    out: torch.Tensor
    expected: torch.Tensor
    workspace: Workspace
    tiles: PairTiles


def draw_hidden(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)


def run(
    device: str,
    expert_ids: torch.Tensor,
    *,
    num_experts: int = 5,
    hidden_size: int = 64,
    intermediate_size: int = 48,
    dtype: torch.dtype = torch.float32,
    activation: Activation = SILU,
    config: GemmConfig = BLOCKS,
    tile_m: int = 16,
    is_exact_grid: bool = True,
    scale_of_inputs: float = 1.0,
) -> Run:
    """Run the kernels on a routing and the oracle beside them; guards are checked."""
    num_tokens = expert_ids.shape[0]
    generator = torch.Generator().manual_seed(7)
    routing_weights = torch.rand(expert_ids.shape, generator=generator) + 0.1
    weights = make_weights(num_experts, hidden_size, intermediate_size, dtype=dtype, seed=3)
    hidden = scale_of_inputs * draw_hidden(num_tokens, hidden_size, dtype)
    host_tiles = PairTiles.from_expert_ids(expert_ids.numpy(), num_experts, tile_m)
    tiles = DeviceTiles.from_host(host_tiles, device)
    rows = tiles.schedule.max_rows
    guarded = (
        Guarded(rows, intermediate_size, dtype=dtype, device=device),
        Guarded(rows, hidden_size, dtype=torch.float32, device=device),
        Guarded(num_tokens, hidden_size, dtype=torch.float32, device=device),
    )
    workspace = Workspace(guarded[0].tensor, guarded[1].tensor)
    run_expert_ffn(
        guarded[2].tensor,
        hidden.to(device),
        routing_weights.to(device),
        ExpertWeight.gate_up(weights.gate_up.to(device), interleaved=activation.interleaved),
        ExpertWeight.down(weights.down.to(device)),
        tiles,
        workspace,
        activation=activation,
        config=LaunchConfig(gate_up=config, down=config),
        gate_up_bias=weights.gate_up_bias.to(device),
        down_bias=weights.down_bias.to(device),
        num_tiles=host_tiles.schedule.num_tiles if is_exact_grid else None,
    )
    for buffer in guarded:
        buffer.check_guards()
    expected = reference_moe_ffn(
        hidden,
        expert_ids,
        routing_weights,
        weights.gate_up,
        weights.down,
        activation=activation,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
    )
    return Run(guarded[2].tensor.cpu(), expected, workspace, host_tiles)


def check(device: str, expert_ids: torch.Tensor, dtype: torch.dtype = torch.float32, **kw: object):
    result = run(device, expert_ids, dtype=dtype, **kw)  # type: ignore[arg-type]
    assert_close(result.out, result.expected, dtype)
    return result


def route(num_tokens: int, top_k: int, num_experts: int = 5, **kw: float) -> torch.Tensor:
    return make_routing(num_tokens, num_experts, top_k, seed=2, **kw)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [BLOCKS, SWAPPED], ids=["pointers", "swapped-descriptors"])
@pytest.mark.parametrize("activation", [SILU, GPT_OSS], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("is_exact_grid", [True, False], ids=["eager", "resident"])
def test_matches_the_oracle(
    kernel_device: str,
    dtype: torch.dtype,
    config: GemmConfig,
    activation: Activation,
    is_exact_grid: bool,
) -> None:
    check(
        kernel_device,
        route(11, 3, invalid_fraction=0.1),
        dtype,
        config=config,
        activation=activation,
        is_exact_grid=is_exact_grid,
    )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2", "none"])
def test_activation_kinds(kernel_device: str, kind: str) -> None:
    check(kernel_device, route(9, 2), activation=Activation(kind=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fields", [{"alpha": 1.702}, {"limit": 0.5}, {"linear_offset": 1.0}])
def test_activation_fields_apply_in_both_layouts(
    kernel_device: str, interleaved: bool, fields: dict[str, float]
) -> None:
    """onnxruntime #28738: one model's constants must not be built into the layout."""
    activation = Activation(interleaved=interleaved, **fields)  # type: ignore[arg-type]
    result = check(kernel_device, route(9, 2), activation=activation)
    plain = run(kernel_device, route(9, 2), activation=Activation(interleaved=interleaved))
    assert not torch.allclose(result.out, plain.out)


def test_clamp_acts_beyond_the_limit(kernel_device: str) -> None:
    """SGLang #39939: inputs large enough that both clamps bind on either side."""
    result = check(kernel_device, route(9, 2), activation=GPT_OSS, scale_of_inputs=20.0)
    no_limit = run(
        kernel_device, route(9, 2), activation=replace(GPT_OSS, limit=None), scale_of_inputs=20.0
    )
    assert not torch.allclose(result.out, no_limit.out)


def test_nan_passes_the_clamp(kernel_device: str) -> None:
    weights = make_weights(1, 32, 16)
    weights.gate_up[0, 0, 0] = torch.nan
    tiles = DeviceTiles.from_host(
        PairTiles.from_expert_ids(np.zeros((2, 1), np.int32), 1, 16), kernel_device
    )
    out = torch.empty(2, 32, device=kernel_device)
    run_expert_ffn(
        out,
        torch.ones(2, 32, device=kernel_device),
        torch.ones(2, 1, device=kernel_device),
        ExpertWeight.gate_up(weights.gate_up.to(kernel_device), interleaved=True),
        ExpertWeight.down(weights.down.to(kernel_device)),
        tiles,
        Workspace.allocate(16, 32, 16, torch.float32, kernel_device),
        activation=GPT_OSS,
        config=LaunchConfig(gate_up=BLOCKS, down=BLOCKS),
    )
    assert out.isnan().all()


@pytest.mark.parametrize("size", [8, 48, 96, 100, 577, 859])
@pytest.mark.parametrize("config", [BLOCKS, SWAPPED], ids=["pointers", "swapped-descriptors"])
def test_sizes_that_no_block_divides(kernel_device: str, size: int, config: GemmConfig) -> None:
    """kernels-community #1158, stk #12, maxtext #1183: the tails of N and K."""
    wide = replace(config, block_n=64, block_k=128)
    check(
        kernel_device, route(3, 2), hidden_size=size, intermediate_size=size // 2 + 1, config=wide
    )


def test_large_intermediate_size(kernel_device: str) -> None:
    """megablocks #46: more than 4096 intermediate columns."""
    wide = replace(BLOCKS, block_n=128, block_k=128)
    check(kernel_device, route(2, 1), hidden_size=32, intermediate_size=4224, config=wide)


@pytest.mark.parametrize("top_k", range(1, 17))
def test_top_k(kernel_device: str, top_k: int) -> None:
    """vLLM #46643, vllm-xpu #66: every top_k takes the same path and precision."""
    check(kernel_device, route(3, top_k, 16), num_experts=16, hidden_size=32, intermediate_size=16)


@pytest.mark.parametrize(
    "pairs", [1, 15, 16, 17, 33], ids=["one", "below", "tile", "tile+1", "two+1"]
)
def test_everything_on_one_expert(kernel_device: str, pairs: int) -> None:
    """vLLM #45285, torchtitan #1237: maximum skew; all the other experts have no pair."""
    result = check(kernel_device, torch.full((pairs, 1), 3, dtype=torch.int32))
    assert result.tiles.schedule.num_tiles == -(-pairs // 16)


def test_no_tokens(kernel_device: str) -> None:
    """vLLM #21107."""
    result = run(kernel_device, torch.zeros(0, 3, dtype=torch.int32))
    assert result.out.shape == (0, 64)


@pytest.mark.parametrize("is_exact_grid", [True, False])
def test_only_invalid_ids(kernel_device: str, is_exact_grid: bool) -> None:
    """vllm-xpu #571: a profiling run marks every row as padding; the output is still written."""
    ids = torch.tensor([[-1, 5], [12, -5]], dtype=torch.int32)
    result = run(kernel_device, ids, is_exact_grid=is_exact_grid)
    assert torch.equal(result.out, torch.zeros(2, 64))


def test_tokens_without_a_local_expert_become_zero(kernel_device: str) -> None:
    """vLLM #39645: an output that is only partly written keeps garbage."""
    ids = route(8, 2)
    ids[[1, 4, 7]] = -1
    result = check(kernel_device, ids)
    assert not result.out[[1, 4, 7]].any()


def test_duplicate_expert_in_a_token(kernel_device: str) -> None:
    ids = route(6, 3)
    ids[2] = ids[2, 0]
    check(kernel_device, ids)


def test_rows_with_fewer_experts(kernel_device: str) -> None:
    """Megatron #5231: ragged top_k, as rows ending in -1."""
    ids = route(6, 3)
    ids[1, 1:] = -1
    ids[3, 2] = -1
    check(kernel_device, ids)


def test_padding_rows_are_neither_written_nor_read(kernel_device: str) -> None:
    """pytorch #154557, #193633, DeepGEMM #20: NaN in padding must not reach a valid row."""
    result = check(kernel_device, route(7, 3))
    is_padding = torch.from_numpy(result.tiles.sorted_pair == result.tiles.num_pairs)
    assert is_padding.any()
    for buffer in result.workspace.activated, result.workspace.weighted:
        assert buffer.cpu()[is_padding].isnan().all()
        assert not buffer.cpu()[~is_padding].isnan().any()


def test_second_call_ignores_what_the_first_left(kernel_device: str) -> None:
    """transformers #48205: the fault of a dirty workspace shows in step 2."""
    first = run(kernel_device, route(9, 2))
    assert torch.equal(run(kernel_device, route(9, 2)).out, first.out)


def test_repeated_runs_have_the_same_bits(kernel_device: str) -> None:
    """flashinfer #5221, vLLM #56887, transformers #43362: nothing is added in arrival order."""
    ids = route(33, 4)
    first = run(kernel_device, ids, dtype=torch.float16).out
    for _ in range(2):
        assert torch.equal(run(kernel_device, ids, dtype=torch.float16).out, first)


def test_combine_adds_in_fp32(kernel_device: str) -> None:
    """vLLM #46643: large terms that cancel leave a small one, which 16 bits would lose."""
    top_k = 8
    rows = torch.zeros(top_k, 1, device=kernel_device)
    rows[:, 0] = torch.tensor([4096.0, 0.25, -4096.0, 0.25, 2048.0, 0.25, -2048.0, 0.25])
    out = torch.empty(1, 1, dtype=torch.bfloat16, device=kernel_device)
    pair_row = torch.arange(top_k, dtype=torch.int32, device=kernel_device)
    run_combine(out, rows, pair_row, top_k)
    assert out.item() == 1.0


def test_result_does_not_depend_on_tile_size_or_grid(kernel_device: str) -> None:
    ids = route(40, 2)
    first = run(kernel_device, ids, dtype=torch.float16).out
    for tile_m in (32, 64, 128):
        other = run(kernel_device, ids, dtype=torch.float16, tile_m=tile_m, is_exact_grid=False)
        torch.testing.assert_close(other.out, first, rtol=1e-3, atol=1e-3)


def test_config_that_fp8_blocks_do_not_fit(kernel_device: str) -> None:
    from afore_kernels.gemm.operand import WeightOperand

    weight = ExpertWeight.down(
        torch.zeros(1, 256, 256).to(torch.float8_e4m3fn), torch.ones(1, 2, 2), format="fp8_block"
    )
    with pytest.raises(ConfigError, match="block_n and block_k <= 128"):
        WeightOperand.build(weight, None, torch.zeros(1), 16, replace(BLOCKS, block_n=256))
    mxfp4 = ExpertWeight.down(
        torch.zeros(1, 32, 16, dtype=torch.uint8),
        torch.zeros(1, 32, 1, dtype=torch.uint8),
        format="mxfp4",
    )
    with pytest.raises(ConfigError, match="block_k >= 32"):
        WeightOperand.build(mxfp4, None, torch.zeros(1), 16, replace(BLOCKS, block_k=16))


def _arguments(device: str) -> dict[str, object]:
    ids, routing_weights = make_routing(5, 4, 2)
    weights = make_weights(4, 32, 16)
    tiles = DeviceTiles.from_host(PairTiles.from_expert_ids(ids.numpy(), 4, 16), device)
    return {
        "out": torch.empty(5, 32, device=device),
        "hidden": draw_hidden(5, 32, torch.float32).to(device),
        "routing_weights": routing_weights.to(device),
        "gate_up": ExpertWeight.gate_up(weights.gate_up.to(device)),
        "down": ExpertWeight.down(weights.down.to(device)),
        "tiles": tiles,
        "workspace": Workspace.allocate(tiles.schedule.max_rows, 32, 16, torch.float32, device),
    }


def _call(arguments: dict[str, object]) -> None:
    launch = LaunchConfig(gate_up=BLOCKS, down=BLOCKS)
    run_expert_ffn(**arguments, activation=SILU, config=launch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": torch.empty(32, 5).t()}, "out must have contiguous rows"),
        ({"out": torch.empty(5, 31)}, r"out must be \[5, 32\]"),
        ({"hidden": torch.empty(4, 32)}, r"hidden must be \[5, 32\]"),
        ({"routing_weights": torch.empty(2, 5).t()}, "routing_weights must be contiguous"),
        ({"routing_weights": torch.empty(5, 3)}, "routing_weights must be contiguous with 10"),
        ({"gate_up": ExpertWeight.gate_up(torch.empty(3, 32, 32))}, r"not \[4, 2, 16, 32\]"),
        ({"gate_up": ExpertWeight.down(torch.empty(4, 16, 32))}, r"not \[4, 2, 16, 32\]"),
        ({"down": ExpertWeight.down(torch.empty(4, 32, 17))}, r"not \[4, 1, 32, 16\]"),
        (
            {"workspace": Workspace(torch.empty(16, 16), torch.empty(640, 32))},
            "workspace.activated must be",
        ),
        (
            {"workspace": Workspace(torch.empty(640, 16), torch.empty(32, 640).t())},
            "workspace.weighted must have contiguous rows",
        ),
    ],
)
def test_argument_that_does_not_fit(
    kernel_device: str, changes: dict[str, object], message: str
) -> None:
    """flashinfer #1632, aiter #5292: strides are honoured or rejected, never assumed."""
    with pytest.raises(ShapeError, match=message):
        _call(_arguments(kernel_device) | changes)


def test_output_with_padded_rows(kernel_device: str) -> None:
    arguments = _arguments(kernel_device)
    _call(arguments)
    wide = torch.full((5, 48), torch.nan, device=kernel_device)
    _call(arguments | {"out": wide[:, 8:40]})
    assert torch.equal(wide[:, 8:40], arguments["out"])  # type: ignore[arg-type]
    assert wide[:, :8].isnan().all()
    assert wide[:, 40:].isnan().all()
