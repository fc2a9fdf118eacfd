"""`moe_ffn`: the expert FFN of one device, without plans or processes."""

from __future__ import annotations

import math
import os

import torch

from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.launch import architecture, heuristic_launch
from afore_kernels.gemm.quant import ExpertWeight
from afore_kernels.gemm.tiles import PairTiles
from afore_kernels.gemm.torch_executor import run_expert_ffn

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def _require_shape(name: str, tensor: torch.Tensor, *shape: int) -> None:
    if tensor.shape != shape:
        raise ShapeError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def _require_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ShapeError(f"{name} must be {names}, got {tensor.dtype}")


def _check_routing(expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> None:
    _require(expert_ids.dim() == 2, "expert_ids must have 2 dimensions")
    _require(expert_ids.shape[1] > 0, "expert_ids must have at least one column")
    _require_dtype("expert_ids", expert_ids, torch.int32, torch.int64)
    _require_shape("routing_weights", routing_weights, *expert_ids.shape)
    _require_dtype("routing_weights", routing_weights, *FLOAT_DTYPES)
    if routing_weights.device.type == "cpu":  # elsewhere the host would wait for the device
        # One operator where isfinite().all() takes five; a float64 sum of finite weights is finite.
        weight_sum = float(routing_weights.detach().sum(dtype=torch.float64))
        _require(math.isfinite(weight_sum), "routing_weights must be finite")


def _as_experts(
    gate_up: torch.Tensor | ExpertWeight, down: torch.Tensor | ExpertWeight, interleaved: bool
) -> tuple[ExpertWeight, ExpertWeight]:
    if isinstance(gate_up, torch.Tensor):
        _require(gate_up.dim() == 3, "gate_up must have 3 dimensions")
        rows = gate_up.shape[1]
        _require(rows > 0 and rows % 2 == 0, "gate_up must have 2 * I rows per expert")
        _require_dtype("gate_up", gate_up, *FLOAT_DTYPES)
        gate_up = ExpertWeight.gate_up(gate_up, interleaved=interleaved)
    if isinstance(down, torch.Tensor):
        _require(down.dim() == 3, "down must have 3 dimensions")
        _require_dtype("down", down, *FLOAT_DTYPES)
        down = ExpertWeight.down(down)
    _require(
        gate_up.interleaved == interleaved,
        f"gate_up has interleaved={gate_up.interleaved}, the activation {interleaved}",
    )
    return gate_up, down


def _check_weights(
    hidden: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    num_experts, width, hidden_size = gate_up.num_slots, gate_up.num_outputs, hidden.shape[1]
    _require(num_experts > 0, "gate_up must hold at least one expert")
    for name, weight, shape in (
        ("gate_up", gate_up, (num_experts, 2, width, hidden_size)),
        ("down", down, (num_experts, 1, hidden_size, width)),
    ):
        found = weight.num_slots, weight.num_parts, weight.num_outputs, weight.num_inputs
        if found != shape:
            raise ShapeError(
                f"{name} must be {[shape[0], shape[1] * shape[2], shape[3]]}, "
                f"got {[found[0], found[1] * found[2], found[3]]}"
            )
        if weight.format == "plain":
            _require_dtype(name, weight.data, hidden.dtype)
    if gate_up_bias is not None:
        _require_shape("gate_up_bias", gate_up_bias, num_experts, 2 * width)
        _require_dtype("gate_up_bias", gate_up_bias, hidden.dtype)
    if down_bias is not None:
        _require_shape("down_bias", down_bias, num_experts, hidden_size)
        _require_dtype("down_bias", down_bias, hidden.dtype)


def _runs_triton(device: torch.device) -> bool:
    return device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def moe_ffn(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor | ExpertWeight,
    down: torch.Tensor | ExpertWeight,
    *,
    activation: Activation,
    tile_m: int = 16,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the routed experts of every token: `sum_k weight_k * expert_k(hidden)`.

    On a GPU it runs the Triton kernels without waiting for the device, on a CPU the torch executor.
    Any strides are accepted. No gradient is recorded.

    Args:
        hidden: [num_tokens, H], float32, float16 or bfloat16.
        expert_ids: int32 or int64 [num_tokens, top_k]; ids < 0 or >= num_experts do no work, an
            expert may repeat within a token.
        routing_weights: floating point [num_tokens, top_k], finite (checked on a CPU alone).
        gate_up: [num_experts, 2 * I, H], dtype of `hidden`, layout per `activation.interleaved`; or
            quantised weights.
        down: [num_experts, H, I], same dtype; or quantised weights.
        activation: between the GEMMs.
        tile_m: pairs per tile, on a GPU one of 16, 32, 64, 128; the result depends on it by
            rounding at most.
        gate_up_bias: [num_experts, 2 * I], dtype of `hidden`, or None.
        down_bias: [num_experts, H], same dtype, or None; added once per pair, before the weight.

    Returns:
        [num_tokens, H], dtype of `hidden`.

    Raises:
        ShapeError: naming the tensor, what was expected and what came.
        ConfigError: if the kernels do not take this `tile_m`.
    """
    _require(hidden.dim() == 2, "hidden must have 2 dimensions")
    _require(hidden.shape[1] > 0, "hidden must have at least one column")
    _require_dtype("hidden", hidden, *FLOAT_DTYPES)
    _check_routing(expert_ids, routing_weights)
    experts = _as_experts(gate_up, down, activation.interleaved)
    _check_weights(hidden, *experts, gate_up_bias, down_bias)
    _require_shape("expert_ids", expert_ids, hidden.shape[0], expert_ids.shape[1])
    for tensor in (expert_ids, routing_weights, *(w.data for w in experts)):
        _require(tensor.device == hidden.device, f"tensors on {tensor.device} and {hidden.device}")
    run = _run_triton if _runs_triton(hidden.device) else _run_torch
    return run(
        hidden.detach(),
        expert_ids,
        routing_weights.detach().float(),
        *experts,
        activation,
        tile_m,
        gate_up_bias,
        down_bias,
    )


def _run_torch(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    activation: Activation,
    tile_m: int,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    out = run_expert_ffn(
        hidden,
        routing_weights,
        gate_up.as_rows(hidden.dtype),
        down.as_rows(hidden.dtype),
        PairTiles.from_expert_ids(expert_ids.numpy(), gate_up.num_slots, tile_m),
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    return out.to(hidden.dtype)


def _run_triton(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    activation: Activation,
    tile_m: int,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    # A CPU needs no Triton.
    from afore_kernels.gemm import triton_executor

    config = heuristic_launch(
        architecture(hidden.device),
        tile_m,
        dtype=hidden.dtype,
        weight_format=gate_up.format,
        has_bias=gate_up_bias is not None or down_bias is not None,
    )
    tiles = triton_executor.tile_all_pairs(expert_ids, gate_up.num_slots, tile_m)
    workspace = triton_executor.Workspace.allocate(
        tiles.schedule.max_rows,
        hidden.shape[1],
        gate_up.num_outputs,
        hidden.dtype,
        hidden.device,
    )
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    triton_executor.run_expert_ffn(
        out,
        hidden,
        routing_weights.contiguous(),
        gate_up,
        down,
        tiles,
        workspace,
        activation=activation,
        config=config,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    return out
