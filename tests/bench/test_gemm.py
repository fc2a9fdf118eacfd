"""The benchmark's own arithmetic, its baselines on the CPU, and one setting of its sweep."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from afore_kernels.config import Activation
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.gemm.tiles import PairTiles, TileSchedule
from afore_kernels.testing import assert_close, make_routing, make_weights
from bench.gemm import plot_sweep
from bench.gemm_baselines import TorchExperts, local_slots, run_expert_loop, run_grouped_mm
from bench.roofline import make_roofline
from bench.shapes import GLM_4_5_AIR, GPT_OSS_20B, H200
from bench.tile_sweep import draw_ids, make_routings, predict_us, summarise, sweep

SMALL = replace(
    GPT_OSS_20B, config=replace(GPT_OSS_20B.config, hidden_size=64, intermediate_size=32)
)


@pytest.mark.parametrize("activation", [Activation(), GPT_OSS_20B.config.activation])
@pytest.mark.parametrize("is_local", [True, False], ids=["one-worker", "some-pairs"])
def test_baselines_compute_the_local_pairs(activation: Activation, is_local: bool) -> None:
    ids, weights = make_routing(9, 6, 3, seed=4)
    experts = make_weights(6, 32, 16)
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    kept = ids if is_local else torch.where(ids % 2 == 0, ids, -1)
    expected = reference_moe_ffn(
        hidden,
        kept,
        weights,
        experts.gate_up,
        experts.down,
        activation=activation,
        gate_up_bias=experts.gate_up_bias,
        down_bias=experts.down_bias,
    )
    slots = local_slots(PairTiles.from_expert_ids(kept.numpy(), 6, 16), 3)
    assert torch.equal(slots, kept.long())
    ours = TorchExperts(**experts._asdict(), activation=activation)
    for run in (
        run_expert_loop(ours, hidden, slots, weights, torch.float32),
        run_grouped_mm(ours, hidden, slots, weights),
    ):
        assert_close(run, expected, torch.float32)


def test_slots_follow_the_worker_not_the_expert() -> None:
    schedule = TileSchedule.from_pair_counts(np.array([1, 17], np.int32), 16)
    ids = np.full((20, 1), 3, np.int32)
    ids[4] = 0
    slot_of_expert = np.array([0, -1, -1, 1], np.int32)
    tiles, _ = PairTiles.select(schedule, ids, slot_of_expert, np.array([0, 2], np.int32))
    slots = local_slots(tiles, 1).flatten().tolist()
    assert slots == [-1, -1, 1, 1, 0] + [1] * 15


def test_summary_of_hand_made_targets() -> None:
    # Worker 0: 2 + 1 tiles of 16; worker 1: 1 tile. 40 pairs in 64 rows, 3 active slots.
    target = [np.array([20, 4], np.int32), np.array([16, 0], np.int32)]
    summary = summarise(GLM_4_5_AIR, [target], 16, H200)
    assert summary["tile_balance"] == pytest.approx(3 / 2)
    assert summary["tile_efficiency"] == pytest.approx(40 / 64)
    assert summary["pairs_per_slot"] == pytest.approx(40 / 3)
    assert summary["predicted_us"] == pytest.approx(predict_us(GLM_4_5_AIR, [20, 4], 16, H200))


def test_prediction_never_beats_the_roofline_and_pays_for_padding() -> None:
    for tile_m in (16, 128):
        floor = make_roofline(GLM_4_5_AIR, [1] * 16, tile_m, H200).floor_us
        assert predict_us(GLM_4_5_AIR, [1] * 16, tile_m, H200) >= floor
    many = [2048 + 1] * 16
    assert predict_us(GLM_4_5_AIR, many, 128, H200) > predict_us(
        GLM_4_5_AIR, [2048] * 16, 128, H200
    )


def test_drawn_routing_is_as_skewed_as_asked() -> None:
    counts = [
        np.bincount(draw_ids(SMALL, 64, 8, skew).ravel(), minlength=32) for skew in (0.0, 1.0)
    ]
    assert counts[0].max() < 1.5 * counts[0].mean()
    assert counts[1].max() > 2.0 * counts[1].mean()
    assert set(make_routings(SMALL, 8, 2)) == {"uniform", "zipf"}


def test_replicas_balance_what_static_does_not() -> None:
    points = list(sweep(SMALL, H200, tile_sizes=[4], tokens=[64], workers=[8], num_targets=4))
    balance = {(p.routing, p.policy): p.tile_balance for p in points}
    assert balance["zipf", "afore"] < balance["zipf", "static"]
    assert {p.tile_m for p in points} == {4}


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = list(sweep(SMALL, H200, tile_sizes=[16, 32], tokens=[8], workers=[2], num_targets=1))
    plot_sweep(points, SMALL, H200, tmp_path / "tiles.png")
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="bench"):
        plot_sweep([], SMALL, H200, tmp_path / "tiles.png")
