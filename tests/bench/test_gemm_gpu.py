"""The GPU part of the benchmark, on a tiny layer: everything but the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from afore_kernels.config import MoEConfig
from afore_kernels.testing import TOLERANCES
from bench.gemm_gpu import Launch, measure_worker
from bench.shapes import GPT_OSS_ACTIVATION, H200, Model
from bench.tile_sweep import draw_ids

pytestmark = pytest.mark.interpreter

PLAIN = Model(
    name="tiny",
    config=MoEConfig(
        num_layers=1,
        num_experts=8,
        top_k=2,
        hidden_size=128,
        intermediate_size=128,
        dtype="float16",
    ),
)
MODELS = {
    "plain": PLAIN,
    "fp8_block": replace(PLAIN, weight_format="fp8_block"),
    "mxfp4": replace(
        PLAIN,
        weight_format="mxfp4",
        config=replace(PLAIN.config, activation=GPT_OSS_ACTIVATION, has_bias=True),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_worker_is_measured_and_checked(name: str, kernel_device: str) -> None:
    launches: list[Launch] = []

    def count(launch: Launch) -> float:
        launch(len(launches))
        launches.append(launch)
        return float(len(launches))

    model = MODELS[name]
    ids = draw_ids(model, num_tokens=8, num_targets=2, skew=1.0)
    result = measure_worker(model, ids, 2, 16, H200, count, torch.device(kernel_device))
    timed = ["partition", "gemm", "fp32_loop", "expert_loop", "grouped_mm"]
    assert [result[f"{what}_us"] for what in timed] == [1.0, 2.0, 3.0, 4.0, 5.0]
    # The busier of two workers, and not all pairs: those of the other are filtered out.
    assert 8 <= result["pairs"] < 16
    assert result["max_error"] <= TOLERANCES[torch.float16] * result["expected_rms"]
    assert result["repeats_bitwise"]
    assert result["bound"] == "copy bandwidth"
    assert result["percent_of_bound"] > 0
