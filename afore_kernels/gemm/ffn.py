"""`moe_ffn`: the expert FFN of one device, without plans or processes."""

from __future__ import annotations

import math

import torch

from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
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
    # One operator where isfinite().all() takes five; a float64 sum of finite weights is finite.
    weight_sum = float(routing_weights.detach().sum(dtype=torch.float64))
    _require(math.isfinite(weight_sum), "routing_weights must be finite")


def _check_weights(
    hidden_size: int,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    _require(gate_up.dim() == 3, "gate_up must have 3 dimensions")
    num_experts, gate_up_rows, _ = gate_up.shape
    _require(num_experts > 0, "gate_up must hold at least one expert")
    _require(gate_up_rows > 0 and gate_up_rows % 2 == 0, "gate_up must have 2 * I rows per expert")
    _require_shape("gate_up", gate_up, num_experts, gate_up_rows, hidden_size)
    _require_dtype("gate_up", gate_up, *FLOAT_DTYPES)
    _require_shape("down", down, num_experts, hidden_size, gate_up_rows // 2)
    _require_dtype("down", down, gate_up.dtype)
    if gate_up_bias is not None:
        _require_shape("gate_up_bias", gate_up_bias, num_experts, gate_up_rows)
        _require_dtype("gate_up_bias", gate_up_bias, gate_up.dtype)
    if down_bias is not None:
        _require_shape("down_bias", down_bias, num_experts, hidden_size)
        _require_dtype("down_bias", down_bias, gate_up.dtype)


def moe_ffn(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: Activation,
    tile_m: int = 16,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the routed experts of every token: `sum_k weight_k * expert_k(hidden)`.

    Any strides are accepted. No gradient is recorded.

    Args:
        hidden: [num_tokens, H], float32, float16 or bfloat16.
        expert_ids: int32 or int64 [num_tokens, top_k]; ids < 0 or >= num_experts do no work, an
            expert may repeat within a token.
        routing_weights: floating point [num_tokens, top_k], finite.
        gate_up: [num_experts, 2 * I, H], dtype of `hidden`; layout per `activation.interleaved`.
        down: [num_experts, H, I], same dtype.
        activation: between the GEMMs.
        tile_m: pairs per tile; the result does not depend on it.
        gate_up_bias: [num_experts, 2 * I], same dtype, or None.
        down_bias: [num_experts, H], same dtype, or None; added once per pair, before the weight.

    Returns:
        [num_tokens, H], dtype of `hidden`.

    Raises:
        ShapeError: naming the tensor, what was expected and what came.
    """
    _require(hidden.dim() == 2, "hidden must have 2 dimensions")
    _check_routing(expert_ids, routing_weights)
    _check_weights(hidden.shape[1], gate_up, down, gate_up_bias, down_bias)
    _require_dtype("hidden", hidden, gate_up.dtype)
    _require_shape("expert_ids", expert_ids, hidden.shape[0], expert_ids.shape[1])
    tiles = PairTiles.from_expert_ids(expert_ids.numpy(), gate_up.shape[0], tile_m)
    out = run_expert_ffn(
        hidden,
        routing_weights.float(),
        gate_up,
        down,
        tiles,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    return out.to(hidden.dtype)
