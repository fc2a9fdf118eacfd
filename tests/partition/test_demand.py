"""Demand vectors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from afore_kernels.errors import ShapeError
from afore_kernels.partition.demand import count_demand
from afore_kernels.testing import make_routing


@pytest.mark.parametrize("num_experts", [5, 96, 160, 384, 1024])
def test_counts_valid_ids(num_experts: int) -> None:
    ids = make_routing(50, num_experts, 4, invalid_fraction=0.2, seed=num_experts)[0].numpy()
    counter = Counter(ids.ravel().tolist())
    demand = count_demand(ids, num_experts)
    assert demand.dtype == np.int32
    assert demand.tolist() == [counter[e] for e in range(num_experts)]


def test_ranks_add_up() -> None:
    ids = make_routing(20, 8, 2)[0].numpy()
    total = count_demand(ids[:7], 8) + count_demand(ids[7:7], 8) + count_demand(ids[7:], 8)
    assert (total == count_demand(ids, 8)).all()


@pytest.mark.parametrize("ids", [np.zeros((2, 2)), np.zeros(4, np.int32)])
def test_rejects(ids: np.ndarray) -> None:
    with pytest.raises(ShapeError):
        count_demand(ids, 4)
