"""Counts on the device against `tiles.count_pairs`."""

from __future__ import annotations

import pytest
import torch

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.count import count_pairs_on_device
from afore_kernels.gemm.tiles import count_pairs
from afore_kernels.testing import make_routing
from tests.guarded import Guarded

pytestmark = pytest.mark.interpreter

EXPERT_COUNTS = [1, 5, 96, 160, 384, 1023, 1024, 1025, 4096]


def check_counts(expert_ids: torch.Tensor, num_experts: int, device: str) -> None:
    out = Guarded(num_experts, dtype=torch.int32, device=device)
    result = count_pairs_on_device(expert_ids.to(device), num_experts, out.tensor)
    assert result is out.tensor
    out.check_guards()
    assert result.tolist() == count_pairs(expert_ids.numpy(), num_experts).tolist()


@pytest.mark.parametrize("num_experts", EXPERT_COUNTS)
def test_expert_counts_that_are_no_powers_of_two(num_experts: int, kernel_device: str) -> None:
    ids, _ = make_routing(70, num_experts, 1, invalid_fraction=0.2)
    ids[:2, 0] = torch.tensor([0, num_experts - 1])
    check_counts(ids, num_experts, kernel_device)


@pytest.mark.parametrize("num_pairs", [0, 1, 1023, 1024, 1025, 4096, 4097, 9000])
def test_pair_counts_around_blocks_and_programs(num_pairs: int, kernel_device: str) -> None:
    check_counts(make_routing(num_pairs, 7, 1, invalid_fraction=0.1)[0], 7, kernel_device)


@pytest.mark.parametrize("expert", [0, 4])
def test_all_pairs_on_one_expert(expert: int, kernel_device: str) -> None:
    check_counts(torch.full((5000, 1), expert, dtype=torch.int32), 5, kernel_device)


def test_padded_rows_are_not_counted_in_bin_0(kernel_device: str) -> None:
    check_counts(torch.full((40, 2), -1, dtype=torch.int32), 5, kernel_device)


def test_64_bit_ids_are_compared_before_they_are_narrowed(kernel_device: str) -> None:
    check_counts(torch.tensor([[2**32 + 2, 2], [-(2**32), 2**63 - 1]]), 3, kernel_device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strided_ids(dtype: torch.dtype, kernel_device: str) -> None:
    ids = make_routing(30, 24, 6)[0].to(dtype)
    check_counts(ids[:, ::3], 24, kernel_device)
    check_counts(ids.T, 24, kernel_device)
    check_counts(ids[::2, 1], 24, kernel_device)


def test_allocates_its_output(kernel_device: str) -> None:
    counts = count_pairs_on_device(torch.tensor([1, 1, 3], device=kernel_device), 3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [0, 2, 0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.float32])
def test_16_bit_ids_are_rejected(dtype: torch.dtype, kernel_device: str) -> None:
    with pytest.raises(ShapeError, match="int32 or int64"):
        count_pairs_on_device(torch.zeros(4, dtype=dtype, device=kernel_device), 5)


def test_counts_beyond_int32_are_rejected(kernel_device: str) -> None:
    ids = torch.zeros(1, dtype=torch.int32, device=kernel_device).expand(2**31)
    with pytest.raises(ShapeError, match="at most"):
        count_pairs_on_device(ids, 5)


def test_no_experts_are_rejected(kernel_device: str) -> None:
    with pytest.raises(ShapeError, match="num_experts"):
        count_pairs_on_device(torch.zeros(4, dtype=torch.int32, device=kernel_device), 0)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(4, dtype=torch.int32),
        torch.empty(5, dtype=torch.int64),
        torch.empty(10, dtype=torch.int32)[::2],
    ],
    ids=["size", "dtype", "stride"],
)
def test_outputs_that_do_not_fit_are_rejected(out: torch.Tensor, kernel_device: str) -> None:
    with pytest.raises(ShapeError, match="out must be"):
        count_pairs_on_device(torch.zeros(4, dtype=torch.int32, device=kernel_device), 5, out)
