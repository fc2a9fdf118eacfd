"""The buffer that carries an attention rank's demand."""

from __future__ import annotations

import pytest
import torch

from afore_kernels.errors import ShapeError
from afore_kernels.partition.demand_buffer import TOKENS_PER_BLOCK, DemandBuffer

CPU = torch.device("cpu")


def test_buffer_starts_empty_and_untagged() -> None:
    buffer = DemandBuffer.allocate(5, 33, CPU)
    assert buffer.record.tolist() == [0] * 6
    assert buffer.demand.tolist() == [0] * 5
    assert buffer.demand.data_ptr() == buffer.record.data_ptr()


@pytest.mark.parametrize("num_tokens", [0, 1, TOKENS_PER_BLOCK])
def test_launch_within_the_capacity_is_accepted(num_tokens: int) -> None:
    DemandBuffer.allocate(5, TOKENS_PER_BLOCK, CPU).check(5, num_tokens, CPU)


@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "device", "message"),
    [
        (6, 1, "cpu", "demand is for 5 experts"),
        (5, 1, "meta", "on meta"),
        (5, TOKENS_PER_BLOCK + 1, "cpu", "too small for 17 tokens"),
    ],
)
def test_launch_that_does_not_fit_is_rejected(
    num_experts: int, num_tokens: int, device: str, message: str
) -> None:
    buffer = DemandBuffer.allocate(5, TOKENS_PER_BLOCK, CPU)
    with pytest.raises(ShapeError, match=message):
        buffer.check(num_experts, num_tokens, torch.device(device))
