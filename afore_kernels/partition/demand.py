"""Demand: the pairs per expert that an attention rank announces before its hidden states arrive."""

from __future__ import annotations

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.tiles import Int32Array, IntegerArray, count_pairs


def count_demand(expert_ids: IntegerArray, num_experts: int) -> Int32Array:
    """Return the demand vector d_{t,a} of one attention rank (section 6.1).

    Args:
        expert_ids: the rank's ids [num_tokens, top_k], any integer dtype; ids outside
            [0, num_experts) are not counted.
        num_experts: routed experts E.

    Returns:
        int32 [num_experts]; zeros for a rank without tokens.

    Raises:
        ShapeError: if the ids are not an integer matrix.
    """
    if expert_ids.ndim != 2:
        raise ShapeError(f"expert_ids must be [num_tokens, top_k], got {list(expert_ids.shape)}")
    return count_pairs(expert_ids, num_experts)
