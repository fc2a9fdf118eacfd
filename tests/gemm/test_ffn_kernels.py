"""`moe_ffn` where it runs the kernels: what differs from the torch executor of `test_ffn`."""

from __future__ import annotations

import pytest
import torch

from afore_kernels import moe_ffn
from afore_kernels.errors import ConfigError
from afore_kernels.gemm import triton_executor
from afore_kernels.gemm.launch import TILE_M_CHOICES
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.testing import assert_close
from tests.gemm.test_ffn import SILU, make_arguments

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("tile_m", TILE_M_CHOICES)
def test_every_tile_size(kernel_device: str, tile_m: int) -> None:
    arguments = make_arguments(device=kernel_device)
    actual = moe_ffn(**arguments, activation=SILU, tile_m=tile_m)
    dense = {name: tensor.cpu() for name, tensor in arguments.items()}
    assert_close(actual.cpu(), reference_moe_ffn(**dense, activation=SILU), torch.float32)


@pytest.mark.parametrize("tile_m", [0, 1, 2, 8, 24, 256])
def test_tile_size_without_a_kernel_is_rejected(kernel_device: str, tile_m: int) -> None:
    with pytest.raises(ConfigError, match=f"take tile_m in .* got {tile_m}"):
        moe_ffn(**make_arguments(device=kernel_device), activation=SILU, tile_m=tile_m)


def test_runs_the_kernels(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a dispatch to the torch executor would pass every other test."""
    calls = []
    monkeypatch.setattr(triton_executor, "run_expert_ffn", lambda *a, **k: calls.append(a))
    moe_ffn(**make_arguments(device=kernel_device), activation=SILU)
    assert len(calls) == 1
