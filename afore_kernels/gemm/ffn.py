"""`moe_ffn`: the expert FFN of one device, without plans or processes."""

from __future__ import annotations

import numpy as np
import torch

from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.tiles import PairTiles
from afore_kernels.gemm.torch_executor import run_expert_ffn

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    _require(
        tuple(tensor.shape) == shape, f"{name} must be {list(shape)}, got {list(tensor.shape)}"
    )


def _check_arguments(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    weights: dict[str, torch.Tensor],
) -> None:
    """Check every tensor of `moe_ffn`; `weights` holds the ones in the weight dtype by name."""
    gate_up = weights["gate_up"]
    for name, tensor, num_dims in (
        ("hidden", hidden, 2),
        ("expert_ids", expert_ids, 2),
        ("gate_up", gate_up, 3),
    ):
        _require(tensor.dim() == num_dims, f"{name} must have {num_dims} dimensions")
    num_tokens, hidden_size = hidden.shape
    top_k = expert_ids.shape[1]
    num_experts, gate_up_rows = gate_up.shape[:2]
    _require(top_k >= 1, "expert_ids must have at least one column")
    _require(num_experts >= 1, "gate_up must hold at least one expert")
    _require(gate_up_rows % 2 == 0 and gate_up_rows > 0, "gate_up must have 2 * I rows per expert")

    expected = {
        "gate_up": (num_experts, gate_up_rows, hidden_size),
        "down": (num_experts, hidden_size, gate_up_rows // 2),
        "gate_up_bias": (num_experts, gate_up_rows),
        "down_bias": (num_experts, hidden_size),
    }
    _require(
        gate_up.dtype in WEIGHT_DTYPES,
        f"weights must be float32, float16 or bfloat16, got {gate_up.dtype}",
    )
    for name, tensor in weights.items():
        _require_shape(name, tensor, expected[name])
    for name, tensor in {"hidden": hidden, **weights}.items():
        _require(
            tensor.dtype == gate_up.dtype, f"{name} is {tensor.dtype}, gate_up {gate_up.dtype}"
        )
    _require_shape("expert_ids", expert_ids, (num_tokens, top_k))
    _require_shape("routing_weights", routing_weights, (num_tokens, top_k))
    _require(
        expert_ids.dtype in (torch.int32, torch.int64),
        f"expert_ids must be int32 or int64, got {expert_ids.dtype}",
    )
    _require(
        routing_weights.is_floating_point(),
        f"routing_weights must be floating point, got {routing_weights.dtype}",
    )
    finite = np.isfinite(routing_weights.detach().float().numpy()).all()
    _require(bool(finite), "routing_weights must be finite")


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
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    weights = {"gate_up": gate_up, "down": down}
    weights |= {name: bias for name, bias in biases.items() if bias is not None}
    _check_arguments(hidden, expert_ids, routing_weights, weights)
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
