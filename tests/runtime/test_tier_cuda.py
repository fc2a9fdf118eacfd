"""A tier whose workers run on GPUs, several on one where there are fewer: bit-equal results."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from afore_kernels import Target, Tier, TierConfig
from afore_kernels.gemm.operand import is_interpreted
from tests.runtime import test_tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        is_interpreted() or not torch.cuda.is_available(), reason="workers need a CUDA device"
    ),
]

MOE = replace(test_tier.MOE, tile_m=16)


def config(num_workers: int, **options: object) -> TierConfig:
    return test_tier.tier_config(num_workers, device="cuda", num_ranks=2, **options)


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"cuda_graphs": False}),
        (2, {"copy_path": "sm", "idle_sms": 4}),
        (2, {"reduction": "reduce_scatter"}),
        (3, {"overlap_copies": False}),
    ],
)
def test_output_is_bit_equal_on_gpus(num_workers: int, options: dict[str, object]) -> None:
    """Rules 1 and 9, with enough targets of one size for its graphs to be captured and replayed."""
    with Tier.start(MOE, config(num_workers, **options), test_tier.WEIGHTS) as tier:
        clients = [tier.client(rank) for rank in range(2)]
        for step in range(8):
            for layer in range(MOE.num_layers):
                tokens = [40, 24] if step % 4 else [step, 0]
                test_tier.run_target(clients, Target(step, layer, 0), tokens)
        rows = tier.timeline().per_target
    assert (rows["num_copies"].sum() > 0) == (num_workers > 1)


def test_graphs_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    """In this process: the executor's own fallback would hide a capture that fails."""
    from afore_kernels.runtime.executors.graphs import CudaCapture, GraphCache

    x = torch.zeros(4, device="cuda")
    cache, stream = GraphCache(CudaCapture()), torch.cuda.Stream()
    with caplog.at_level(logging.WARNING), torch.cuda.stream(stream):
        for _ in range(5):
            cache.run("add", lambda: x.add_(1))
        stream.synchronize()
    assert x.tolist() == [5.0] * 4
    assert not caplog.records
