"""What a tier must return, from the weights of a whole layer."""

from __future__ import annotations

import torch

from afore_kernels.config import MoEConfig
from afore_kernels.gemm.reference import reference_gated_ffn, reference_moe_ffn
from afore_kernels.runtime.weights import WeightSource


def reference_layer(
    moe: MoEConfig, weights: WeightSource, layer: int, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Dense reference of one layer, routed and shared experts; inputs: hidden, ids, weights."""
    experts = [weights.expert(layer, expert) for expert in range(moe.num_experts)]
    gate_up, down, gate_up_bias, down_bias = (
        None if tensors[0] is None else torch.stack(list(tensors)) for tensors in zip(*experts)
    )
    output = reference_moe_ffn(
        *inputs,
        gate_up,
        down,
        activation=moe.activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    shared = weights.shared(layer)
    if shared is not None:
        output = output + reference_gated_ffn(inputs[0], *shared, activation=moe.activation)
    return output.float()
