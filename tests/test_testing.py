"""The comparison fails when it must, and the generators draw what they promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.testing import (
    TOLERANCES,
    assert_close,
    make_routing,
    make_weights,
    random_plan,
)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_assert_close_fails_on_wrong_output(dtype: torch.dtype) -> None:
    expected = torch.randn(17, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(expected.to(dtype), expected, dtype)
    one_off = expected.clone()
    one_off[3, 5] += 3 * TOLERANCES[dtype]
    nan = expected.clone()
    nan[0, 0] = torch.nan
    wrong = {
        "rows permuted": expected.roll(1, 0),
        "columns permuted": expected.roll(1, 1),
        "two rows swapped": expected[[1, 0, *range(2, 17)]],
        "scaled": expected * (1 + 2 * TOLERANCES[dtype]),
        "one value": one_off,
        "NaN": nan,
        "zeros": torch.zeros_like(expected),
        "row missing": expected[:-1],
    }
    for actual in wrong.values():
        with pytest.raises(AssertionError):
            assert_close(actual, expected, dtype)


def test_make_routing_draws_distinct_skewed_experts() -> None:
    ids, weights = make_routing(400, 16, 4, skew=1.5, seed=1)
    assert ids.shape == weights.shape == (400, 4)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.allclose(weights.sum(1), torch.ones(400))
    counts = np.bincount(ids.numpy().ravel(), minlength=16)
    flat = np.bincount(make_routing(400, 16, 4, seed=1)[0].numpy().ravel(), minlength=16)
    assert counts.max() > 2 * flat.max()


def test_make_routing_draws_invalid_ids() -> None:
    ids, _ = make_routing(500, 16, 4, invalid_fraction=0.25, seed=2)
    share = ((ids < 0) | (ids >= 16)).float().mean()
    assert 0.2 < share < 0.3
    assert (ids < 0).any()
    assert (ids >= 16).any()


def test_make_weights_draws_integers() -> None:
    for tensor in make_weights(3, 8, 4, is_integer=True):
        assert set(tensor.unique().tolist()) == {-1.0, 0.0, 1.0}


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(5, 8, 2), (16, 4, 3), (7, 1, 2), (9, 3, 0)]),
)
def test_random_plan_is_valid(seed: int, shape: tuple[int, int, int]) -> None:
    demand = np.random.default_rng(seed).integers(0, 40, shape[0]).astype(np.int32)
    before = demand.copy()
    random_plan(demand, PrimaryPlacement(*shape), 16, seed)  # validates itself
    assert (demand == before).all()
