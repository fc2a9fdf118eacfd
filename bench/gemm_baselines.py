"""The expert FFN of one worker in plain torch: what the kernels are compared with.

All take the slot of each pair, so pairs that other workers run are filtered out alike. They run on
any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from afore_kernels.config import Activation
from afore_kernels.gemm.activation import gated_activation
from afore_kernels.gemm.tiles import PairTiles


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchExperts:
    """The unquantised weights of a worker's slots.

    Attributes:
        gate_up: [num_slots, 2 * I, H], layout per `activation.interleaved`.
        down: [num_slots, H, I].
        gate_up_bias: [num_slots, 2 * I], or None.
        down_bias: [num_slots, H], or None.
        activation: between the GEMMs, evaluated in fp32.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: Activation


def local_slots(tiles: PairTiles, top_k: int) -> torch.Tensor:
    """Return the slot of each pair, or -1 for a pair of another worker.

    Args:
        tiles: the worker's, of the flat routing [num_tokens * top_k].
        top_k: experts per token.

    Returns:
        int64 [num_tokens, top_k].
    """
    schedule = tiles.schedule
    slots = np.full(tiles.num_pairs, -1, np.int64)
    is_local = tiles.pair_row >= 0
    slots[is_local] = schedule.tile_slot[tiles.pair_row[is_local] // schedule.tile_m]
    return torch.from_numpy(slots.reshape(-1, top_k))


def run_expert_loop(
    experts: TorchExperts,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    routing_weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Run one slot after another with dense products in `dtype`; in fp32 this is the reference.

    Args:
        experts: the worker's.
        hidden: [num_tokens, H].
        slots: int64 [num_tokens, top_k], from `local_slots`.
        routing_weights: float32 [num_tokens, top_k].
        dtype: of the products.

    Returns:
        float32 [num_tokens, H].
    """
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for slot in torch.unique(slots[slots >= 0]).tolist():
        token, k = torch.nonzero(slots == slot, as_tuple=True)
        up = (hidden[token].to(dtype) @ experts.gate_up[slot].to(dtype).t()).float()
        if experts.gate_up_bias is not None:
            up += experts.gate_up_bias[slot]
        activated = gated_activation(up, experts.activation).to(dtype)
        product = (activated @ experts.down[slot].to(dtype).t()).float()
        if experts.down_bias is not None:
            product += experts.down_bias[slot]
        out.index_add_(0, token, product * routing_weights[token, k, None])
    return out


def run_grouped_mm(
    experts: TorchExperts,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """Permute the pairs by slot, multiply with `grouped_mm`, activate, and add them per token.

    Arguments and result are those of `run_expert_loop`; products are in the weights' dtype. The
    number of local pairs is read on the host.
    """
    top_k = slots.shape[1]
    flat = slots.flatten()
    local = torch.nonzero(flat >= 0).squeeze(1)
    pair = local[torch.argsort(flat[local], stable=True)]
    slot, token = flat[pair], pair // top_k
    counts = torch.bincount(slot, minlength=experts.down.shape[0])
    ends = counts.cumsum(0, dtype=torch.int32)
    up = F.grouped_mm(hidden[token], experts.gate_up.transpose(1, 2), offs=ends).float()
    if experts.gate_up_bias is not None:
        up += experts.gate_up_bias[slot]
    activated = gated_activation(up, experts.activation).to(hidden.dtype)
    product = F.grouped_mm(activated, experts.down.transpose(1, 2), offs=ends).float()
    if experts.down_bias is not None:
        product += experts.down_bias[slot]
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return out.index_add_(0, token, product * routing_weights.flatten()[pair, None])
