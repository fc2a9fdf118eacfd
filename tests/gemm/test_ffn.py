"""`moe_ffn`: the public call, its layouts and its argument checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afore_kernels import moe_ffn
from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.quant import (
    ExpertWeight,
    quantize_fp8_block,
    quantize_fp8_channel,
    quantize_mxfp4,
)
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.testing import assert_close, make_routing, make_weights

SILU = Activation()
GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0, interleaved=True)


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
def device(request: pytest.FixtureRequest) -> str:
    """Where `moe_ffn` runs the torch executor, then the kernels."""
    return "cpu" if request.param == "torch" else request.getfixturevalue("kernel_device")


def make_arguments(
    dtype: torch.dtype = torch.float32, top_k: int = 3, device: str = "cpu"
) -> dict[str, Any]:
    weights = make_weights(6, 32, 16, dtype=dtype)
    ids, routing = make_routing(11, 6, top_k, seed=1)
    hidden = torch.randn(11, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    arguments = {
        "hidden": hidden,
        "expert_ids": ids,
        "routing_weights": routing,
        **weights._asdict(),
    }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def check(arguments: dict[str, Any]) -> None:
    """Run and compare with the oracle, whose arguments are made contiguous."""
    actual = moe_ffn(**arguments, activation=SILU)
    dense = {name: tensor.cpu().contiguous() for name, tensor in arguments.items()}
    assert actual.dtype == arguments["hidden"].dtype
    assert actual.device == arguments["hidden"].device
    assert_close(actual.cpu(), reference_moe_ffn(**dense, activation=SILU), actual.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_matches_oracle(device: str, dtype: torch.dtype, top_k: int) -> None:
    check(make_arguments(dtype, top_k, device))


def test_result_does_not_depend_on_tile_m() -> None:
    arguments = make_arguments()
    runs = [moe_ffn(**arguments, activation=SILU, tile_m=m) for m in (1, 2, 16, 128)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_duplicate_and_invalid_ids(device: str) -> None:
    arguments = make_arguments(device=device)
    arguments["expert_ids"][0] = 2
    arguments["expert_ids"][1] = torch.tensor([-1, 5, 5])
    arguments["expert_ids"][2] = torch.tensor([6, -5, 13])
    check(arguments)
    arguments["expert_ids"] = arguments["expert_ids"].long()
    arguments["expert_ids"][0, 0] = 2**32 + 2
    check(arguments)
    arguments["expert_ids"].fill_(-1)
    assert not moe_ffn(**arguments, activation=SILU).any()


def test_no_tokens(device: str) -> None:
    arguments = make_arguments(device=device)
    for name in ("hidden", "expert_ids", "routing_weights"):
        arguments[name] = arguments[name][:0]
    assert moe_ffn(**arguments, activation=SILU).shape == (0, 32)


@pytest.mark.parametrize("name", list(make_arguments()))
@pytest.mark.parametrize("layout", ["transposed", "sliced", "stepped", "offset"])
def test_strided_argument(device: str, name: str, layout: str) -> None:
    arguments = make_arguments(device=device)
    tensor = arguments[name]
    if layout == "transposed":
        strided = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    else:
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 77)
        width = tensor.shape[-1]
        strided = {
            "sliced": wide[..., :width],
            "stepped": wide[..., : 2 * width : 2],
            "offset": wide[..., 1 : width + 1],
        }[layout]
        strided.copy_(tensor)
    assert not strided.is_contiguous()
    check(arguments | {name: strided})


def test_bias_counts_once_per_pair(device: str) -> None:
    arguments = make_arguments(device=device)
    for name in ("gate_up", "down", "gate_up_bias"):
        arguments[name] = torch.zeros_like(arguments[name])
    arguments["expert_ids"][:] = torch.tensor([1, 1, -1])
    routing = arguments["routing_weights"]
    expected = (routing[:, 0] + routing[:, 1])[:, None] * arguments["down_bias"][1]
    torch.testing.assert_close(moe_ffn(**arguments, activation=SILU), expected)


def test_parameters_that_require_grad(device: str) -> None:
    arguments = make_arguments(device=device)
    expected = moe_ffn(**arguments, activation=SILU)
    for name in ("hidden", "routing_weights", "gate_up", "down"):
        arguments[name] = arguments[name].requires_grad_()
    actual = moe_ffn(**arguments, activation=SILU)
    assert torch.equal(actual, expected)
    assert not actual.requires_grad


def quantize(
    weight: torch.Tensor, format: str, *, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [num_experts, num_parts, N, K] as a checkpoint of `format` stores them."""
    quantizers = {
        "fp8_block": quantize_fp8_block,
        "fp8_channel": quantize_fp8_channel,
        "mxfp4": quantize_mxfp4,
    }
    data, scale = quantizers[format](weight)
    return data.flatten(1, 2).to(device), scale.flatten(1, 2).to(device)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel", "mxfp4"])
def test_quantised_weights(device: str, format: Any) -> None:
    """The oracle gets the exact values that the stored bits stand for."""
    arguments = make_arguments(device=device)
    weights = make_weights(6, 32, 32)
    activation = GPT_OSS if format == "mxfp4" else SILU
    interleaved = activation.interleaved
    # Interleaved rows are one part to a quantiser: it looks at no more than a row.
    parts = weights.gate_up.unflatten(1, (1 if interleaved else 2, -1))
    gate_up = ExpertWeight.gate_up(
        *quantize(parts, format, device=device), format=format, interleaved=interleaved
    )
    down = ExpertWeight.down(*quantize(weights.down[:, None], format, device=device), format=format)
    arguments |= {
        "gate_up_bias": weights.gate_up_bias.to(device),
        "down_bias": weights.down_bias.to(device),
    }
    actual = moe_ffn(**arguments | {"gate_up": gate_up, "down": down}, activation=activation)
    values = {"gate_up": gate_up.as_rows(torch.float32), "down": down.as_rows(torch.float32)}
    dense = {name: tensor.cpu() for name, tensor in (arguments | values).items()}
    assert_close(actual.cpu(), reference_moe_ffn(**dense, activation=activation), torch.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_layout_of_weights_and_activation_must_agree(interleaved: bool) -> None:
    arguments = make_arguments()
    gate_up = ExpertWeight.gate_up(arguments["gate_up"], interleaved=interleaved)
    with pytest.raises(ShapeError, match=f"gate_up has interleaved={interleaved}"):
        moe_ffn(
            **arguments | {"gate_up": gate_up},
            activation=Activation(interleaved=not interleaved),
        )


NAN_WEIGHTS = torch.full((11, 3), torch.nan)
INF_WEIGHTS = torch.full((11, 3), torch.inf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(11, 2, 32)}, "hidden must have 2 dimensions"),
        ({"hidden": torch.zeros(11, 0)}, "hidden must have at least one column"),
        ({"expert_ids": torch.zeros(33, dtype=torch.int32)}, "expert_ids must have 2"),
        ({"gate_up": torch.zeros(32, 32)}, "gate_up must have 3"),
        ({"expert_ids": torch.zeros(11, 0, dtype=torch.int32)}, "at least one column"),
        ({"gate_up": torch.zeros(0, 32, 32)}, "at least one expert"),
        ({"gate_up": torch.zeros(6, 31, 32)}, "2 \\* I rows"),
        ({"gate_up": torch.zeros(6, 0, 32)}, "2 \\* I rows"),
        ({"gate_up": torch.zeros(6, 32, 33)}, "gate_up must be"),
        (
            {"gate_up": torch.zeros(6, 32, 32, dtype=torch.float64)},
            "gate_up must be torch",
        ),
        ({"down": torch.zeros(6, 32, 17)}, "down must be"),
        ({"down": torch.zeros(5, 32, 16)}, "down must be"),
        ({"gate_up_bias": torch.zeros(6, 31)}, "gate_up_bias must be"),
        ({"down_bias": torch.zeros(6, 31)}, "down_bias must be"),
        (
            {"down": torch.zeros(6, 32, 16, dtype=torch.float16)},
            "down must be torch.float32",
        ),
        (
            {"hidden": torch.zeros(11, 32, dtype=torch.bfloat16)},
            "gate_up must be torch.bfloat16",
        ),
        ({"down_bias": torch.zeros(6, 32, dtype=torch.float16)}, "down_bias must be torch.float32"),
        ({"hidden": torch.zeros(11, 32, dtype=torch.float64)}, "hidden must be torch.float32"),
        ({"hidden": torch.zeros(10, 32)}, "expert_ids must be"),
        ({"expert_ids": torch.zeros(10, 3, dtype=torch.int32)}, "routing_weights must be"),
        ({"routing_weights": torch.zeros(11, 2)}, "routing_weights must be"),
        ({"expert_ids": torch.zeros(11, 3)}, "torch.int32 or torch.int64"),
        (
            {"routing_weights": torch.zeros(11, 3, dtype=torch.int32)},
            "routing_weights must be torch",
        ),
        ({"expert_ids": torch.zeros(11, 3, dtype=torch.int32, device="meta")}, "meta and cpu"),
        ({"down": torch.zeros(6, 32, 16, device="meta")}, "meta and cpu"),
        ({"routing_weights": NAN_WEIGHTS}, "finite"),
        ({"routing_weights": INF_WEIGHTS}, "finite"),
    ],
)
def test_bad_argument_is_named(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = make_arguments() | changes
    with pytest.raises(ShapeError, match=message):
        moe_ffn(**arguments, activation=SILU)
