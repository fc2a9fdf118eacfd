"""The dense oracle of the expert FFN: one token and one pair at a time, no tiles, no plan."""

from __future__ import annotations

import torch

from afore_kernels.config import Activation
from afore_kernels.gemm.activation import gated_activation


def reference_gated_ffn(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: Activation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Compute one gated FFN: an expert, or the shared experts of a layer.

    Args:
        x: [..., H].
        gate_up: [2 * I, H].
        down: [H, I].
        activation: between the GEMMs.
        gate_up_bias: [2 * I], or None.
        down_bias: [H], or None.
        dtype: precision of the whole computation.

    Returns:
        [..., H] in `dtype`.
    """
    up = x.to(dtype) @ gate_up.to(dtype).t()
    if gate_up_bias is not None:
        up = up + gate_up_bias.to(dtype)
    out = gated_activation(up, activation) @ down.to(dtype).t()
    return out if down_bias is None else out + down_bias.to(dtype)


def reference_moe_ffn(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: Activation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Compute the routed experts token by token, adding the pairs of a token in the order of k.

    Arguments are those of `moe_ffn`; ids outside [0, num_experts) contribute nothing.

    Returns:
        [num_tokens, H] in `dtype`.
    """
    num_experts = gate_up.shape[0]
    out = torch.zeros(hidden.shape, dtype=dtype)
    for token, ids in enumerate(expert_ids.tolist()):
        for k, expert in enumerate(ids):
            if not 0 <= expert < num_experts:
                continue
            out[token] += routing_weights[token, k].to(dtype) * reference_gated_ffn(
                hidden[token],
                gate_up[expert],
                down[expert],
                activation=activation,
                gate_up_bias=None if gate_up_bias is None else gate_up_bias[expert],
                down_bias=None if down_bias is None else down_bias[expert],
                dtype=dtype,
            )
    return out
