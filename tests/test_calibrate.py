"""The fit of the cost estimates, with a clock that is worked by hand, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from afore_kernels import calibrate as module
from afore_kernels.calibrate import calibrate
from afore_kernels.cli import main
from afore_kernels.errors import ConfigError


def test_fits_tile_and_slot_time_of_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only in the calls: 7 us per tile, 3 us per slot, and 40 us in a copy."""
    now = 0.0

    def spend(us: float) -> None:
        nonlocal now
        now += us * 1e-6

    def fake_ffn(hidden, routing_weights, gate_up, down, tiles, *, activation):
        active = int((tiles.schedule.pairs_per_slot > 0).sum())
        spend(7 * tiles.schedule.num_tiles + 3 * active)

    monkeypatch.setattr(module, "run_expert_ffn", fake_ffn)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: spend(20.0))  # gate_up and down
    found = calibrate(8, 8, torch.float32, 4, num_slots=8, rounds=2, clock=lambda: now)
    assert found.tile_time_us == pytest.approx(7, rel=1e-4)
    assert found.slot_time_us == pytest.approx(3, rel=1e-3)
    assert found.copy_time_us == pytest.approx(40, rel=1e-6)
    assert found.worst_error < 1e-3


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 0},
        {"intermediate_size": 0},
        {"tile_m": 0},
        {"num_slots": 1},
        {"rounds": 0},
    ],
)
def test_bad_sizes_are_named(sizes: dict[str, int]) -> None:
    arguments = {"hidden_size": 8, "intermediate_size": 8, "tile_m": 4} | sizes
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        calibrate(dtype=torch.float32, **arguments)


def test_command_prints_a_tier_config_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    sizes = ["--hidden-size", "64", "--intermediate-size", "32", "--slots", "4"]
    assert main(["calibrate", *sizes, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert f"copy_time_us={found['copy_time_us']}" in capsys.readouterr().out
    assert min(found["copy_time_us"], found["tile_time_us"] + found["slot_time_us"]) > 0


def test_command_rejects_threads_below_1() -> None:
    sizes = ["--hidden-size", "8", "--intermediate-size", "8"]
    assert main(["calibrate", *sizes, "--threads", "0"]) == 2
