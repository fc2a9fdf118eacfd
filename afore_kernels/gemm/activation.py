"""The gated activation between the two GEMMs, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from afore_kernels.config import Activation


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute `act(gate) * (up + linear_offset)` with the clamps of `Activation`.

    Args:
        gate_up: [..., 2 * I], gate then up, or alternating if `activation.interleaved`; the result
            has the precision of this tensor, so callers pass float32.
        activation: kind, clamps and layout.

    Returns:
        [..., I], same dtype.
    """
    if activation.interleaved:
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.linear_offset:
        up = up + activation.linear_offset
    match activation.kind:
        case "silu" if activation.alpha == 1.0:
            return F.silu(gate) * up
        case "silu":
            return gate * torch.sigmoid(activation.alpha * gate) * up
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        case "relu2":
            return F.relu(gate).square() * up
        case "none":
            return gate * up
