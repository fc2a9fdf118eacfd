from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import Step, find_kernel_tests, make_exclusive_steps, run_step, run_steps

ROOT = Path(__file__).parents[2]


def python(code: str, name: str = "step", limit_s: float = 60) -> Step:
    return Step(name=name, command=(sys.executable, "-c", code), limit_s=limit_s)


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def test_without_a_gpu_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert "nothing was checked" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("status", "outcome"), [(0, "passed"), (3, "failed")])
def test_exit_status_decides(tmp_path: Path, status: int, outcome: str) -> None:
    result = run_step(python(f"print('said'); raise SystemExit({status})"), soon(), tmp_path)
    assert result.outcome == outcome
    assert Path(result.log).read_text() == "said\n"


def test_kernels_are_compiled_not_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import os; raise SystemExit('TRITON_INTERPRET' in os.environ)"
    assert run_step(python(code), soon(), tmp_path).outcome == "passed"


def test_hanging_step_ends_with_all_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    result = run_step(python(code, limit_s=2), soon(), tmp_path)
    assert result.outcome == "timeout"
    assert result.duration_s < 30
    for _ in range(100):  # an orphan is reaped a moment after it was killed
        if not is_running(int(child.read_text())):
            return
        time.sleep(0.05)
    pytest.fail("the child of a hanging step still runs")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_spent_budget_fails_the_rest(tmp_path: Path) -> None:
    first, second = python("import time; time.sleep(60)", "first"), python("", "second")
    results = run_steps([first], [second], 1, tmp_path)
    assert [result.outcome for result in results] == ["timeout", "timeout"]
    assert results[1].note == "the budget was spent"


def test_missing_tool_is_said_and_is_no_failure(tmp_path: Path) -> None:
    result = run_step(Step(name="memcheck", missing="no such tool"), soon(), tmp_path)
    assert (result.outcome, result.note) == ("not run", "no such tool")


def test_every_benchmark_writes_its_own_json(tmp_path: Path) -> None:
    steps = {step.name: step for step in make_exclusive_steps(tmp_path)}
    assert set(steps) == {"memcheck", "bench_gemm", "bench_partition", "bench_migration"}
    assert "cuda" in steps["bench_migration"].command
    assert steps["bench_partition"].command[-1] == str(tmp_path / "bench_partition.json")
    assert not steps["bench_partition"].missing


def test_kernel_tests_are_found_by_their_marks() -> None:
    files = find_kernel_tests(ROOT)
    assert {"tests/gemm/test_gemm_kernels.py", "tests/gemm/test_graph_capture.py"} <= set(files)
    assert "tests/gemm/test_quant.py" not in files
    assert gpu_check.SANITIZED_TESTS[0] in files


def test_limits_leave_time_under_8_minutes(tmp_path: Path) -> None:
    exclusive = sum(step.limit_s for step in make_exclusive_steps(tmp_path))
    assert gpu_check.BUDGET_S < 8 * 60
    assert exclusive < gpu_check.BUDGET_S - 100


def test_summary_names_device_steps_and_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "describe_device", lambda: {"device": "a GPU"})
    monkeypatch.setattr(gpu_check, "make_test_steps", lambda root: [python("", "good")])
    monkeypatch.setattr(
        gpu_check, "make_exclusive_steps", lambda out: [python("raise SystemExit(1)", "bad")]
    )
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    summary = json.loads((tmp_path / "gpu_check.json").read_text())
    assert summary["device"] == "a GPU"
    assert summary["passed"] is False
    assert [(s["name"], s["outcome"]) for s in summary["steps"]] == [
        ("good", "passed"),
        ("bad", "failed"),
    ]
    assert all(os.path.exists(step["log"]) for step in summary["steps"])
