"""Demand: the pairs per expert that an attention rank announces before its hidden states arrive."""

from __future__ import annotations

import numpy as np

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.tiles import Int32Array, IntegerArray


def count_demand(expert_ids: IntegerArray, num_experts: int) -> Int32Array:
    """Count the pairs of each expert (section 6.1, d_{t,a}).

    Args:
        expert_ids: any integer dtype and shape; ids outside [0, num_experts) are not counted.
        num_experts: routed experts E.

    Returns:
        int32 [num_experts].

    Raises:
        ShapeError: if the ids are not integers.

    >>> count_demand(np.array([[2, 0], [2, -1]]), 3)
    array([1, 0, 2], dtype=int32)
    """
    if not np.issubdtype(expert_ids.dtype, np.integer):
        raise ShapeError(f"expert_ids must be integers, got {expert_ids.dtype}")
    ids = expert_ids.reshape(-1)
    valid = ids[(ids >= 0) & (ids < num_experts)]
    return np.bincount(valid, minlength=num_experts).astype(np.int32)
