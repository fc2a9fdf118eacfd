"""Table 2's bookkeeping: what counts as optimal, what a gap is, what the sweep changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.planner import Limits
from bench import quality
from bench.certify import Certificate
from bench.planner_targets import TargetSequence

PLACEMENT = PrimaryPlacement(4, 2, 1)
HOT = np.array([64, 16, 0, 0], np.int32)  # 5 tiles on worker 0, none on worker 1


def as_targets(*demands: np.ndarray, num_warmup: int = 0) -> TargetSequence:
    return TargetSequence("by hand", np.stack(demands), np.zeros(len(demands), int), num_warmup)


def test_loads_count_primaries_and_replicas() -> None:
    (step,) = quality.run_policy(quality.Planner(), as_targets(HOT), PLACEMENT, Limits(16, 4, 0))
    assert step.tile_load.tolist() == [3, 2]
    assert step.most_tiles == 3
    # Without a budget the plan stays where the primaries are.
    (step,) = quality.run_policy(quality.Planner(), as_targets(HOT), PLACEMENT, Limits(16, 0, 0))
    assert step.tile_load.tolist() == [5, 0]


def test_the_warmup_is_planned_but_not_counted() -> None:
    targets = as_targets(HOT, HOT, HOT, num_warmup=2)
    steps = list(quality.run_policy(quality.Planner(), targets, PLACEMENT, Limits(16, 4, 0)))
    assert len(steps) == 1
    assert steps[0].planned.slot_copy.sum() == 0, "the replica came with the first target"
    assert steps[0].tile_load.tolist() == [3, 2]


def test_the_preceding_target_protects_its_slots() -> None:
    targets = as_targets(HOT, HOT)
    first, second = quality.run_policy(quality.Planner(), targets, PLACEMENT, Limits(16, 4, 0))
    assert not first.problem.is_protected.any()
    np.testing.assert_array_equal(second.problem.is_protected, [[0], [1]])


def test_unproved_is_not_optimal_and_gaps_are_against_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([(3, 3), (3, 2)])  # the best known plan and the lower bound

    def certify(problem, value, *, hint, time_limit_s):
        best, bound = next(answers)
        method = "rounded mean" if best == bound else "unproved"
        return Certificate(value, bound, best, method, 0.0)

    monkeypatch.setattr(quality, "certify", certify)
    targets = as_targets(HOT, HOT)
    steps = list(quality.run_policy(quality.Planner(), targets, PLACEMENT, Limits(16, 4, 0)))
    judged = quality.judge(steps, 1.0)
    assert (judged.optimal, judged.unproved) == (1, 1)
    assert (judged.mean_gap, judged.max_gap) == (25.0, 50.0)
    assert judged.mean_gap_to_best == 0.0
    assert (judged.copies, judged.most_tiles) == (0.5, 3.0)


def test_peers_are_judged_by_the_mean_of_undivided_demand() -> None:
    steps = [
        SimpleNamespace(
            problem=SimpleNamespace(expert_tiles=np.array([4, 1])),
            tile_load=np.array([4, 2]),  # one tile more than the demand: a split tile
            most_tiles=4,
            planned=SimpleNamespace(slot_copy=np.array([[1], [1]])),
        )
    ]
    assert quality.judge_by_mean(steps) == {
        "gap_to_mean": 33.33,
        "max_gap_to_mean": 33.33,
        "copies": 2.0,
    }


def test_the_sweep_changes_one_thing_at_a_time() -> None:
    rows = quality.sweep(as_targets(HOT, HOT), 2)
    by_setting = {(row["changed"], row["value"]): row for row in rows}
    assert {changed for changed, _ in by_setting} == {
        "theta",
        "redundant_slots",
        "copy_budget",
        "window_us",
    }
    for nothing_to_move in (("redundant_slots", 0), ("copy_budget", 0)):
        assert by_setting[nothing_to_move]["copies"] == 0
        assert by_setting[nothing_to_move]["tile_imbalance"] == 2.0
    assert by_setting["theta", 0]["tile_imbalance"] == 1.2
    # A first move may carry two tiles at most: not more than theta = 2.
    assert by_setting["theta", 2]["tile_imbalance"] == 2.0


def test_the_command_writes_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ortools.sat.python.cp_model")
    path, figure = tmp_path / "quality.json", tmp_path / "quality.png"
    arguments = ["--quick", "--json", str(path), "--plot", str(figure)]
    monkeypatch.setattr(sys, "argv", ["quality.py", *arguments])
    quality.main()
    result = json.loads(path.read_text())
    assert [(row["ep"], row["copy_budget"]) for row in result["rows"]] == [
        (2, 4),
        (2, 8),
        (8, 16),
        (8, 8),
    ]
    for row in result["rows"]:
        assert row["refined"]["optimal"] == 16
        assert row["refined"]["most_tiles"] <= row["algorithm 1"]["most_tiles"]
        assert set(row["by the mean"]) == {"algorithm 1", "refined", "eplb", "ultraep", "llep"}
    assert "196/200" in capsys.readouterr().out, "the paper's own column"
    assert figure.stat().st_size > 1000
