"""Everything that needs a GPU, in one command of under 8 minutes, with one JSON at the end.

The kernels' tests, graph capture among them, run side by side, a process per file: compiling takes
most of their time. The memory checker and the benchmarks then have the device to themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import triton

from bench.harness import write_json

Outcome = Literal["passed", "failed", "timeout", "not run"]

BUDGET_S = 450
BENCHMARKS = {
    "bench.gemm": (),
    "bench.partition": (),
    "bench.migration": ("--device", "cuda"),
}
SANITIZED_TESTS = ("tests/gemm/test_gemm_kernels.py", "-k", "sizes_that_no_block_divides")
MARKS = ("pytest.mark.interpreter", "pytest.mark.gpu")
MAX_PROCESSES = 8
NO_DEVICE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command.

    Attributes:
        name: of the step and its log.
        command: to run; empty if something it needs is not there.
        limit_s: after which it counts as failed.
        environment: added to ours.
        missing: what it needs and is not there.
    """

    name: str
    command: tuple[str, ...] = ()
    limit_s: float = 60
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of a step; `log` holds its output."""

    name: str
    outcome: Outcome
    duration_s: float
    command: str
    log: str
    note: str = ""


def run_step(step: Step, deadline: float, directory: Path) -> StepResult:
    """Run a step until its limit or the deadline, whichever is first, and end all it started.

    Args:
        step: to run.
        deadline: of `time.monotonic`.
        directory: receives NAME.log.
    """
    log = directory / f"{step.name}.log"
    command = " ".join(step.command)
    limit_s = min(step.limit_s, deadline - time.monotonic())
    if step.missing or limit_s <= 0:
        # A tool that is not installed is no fault; a step that the budget cut off is.
        outcome: Outcome = "not run" if step.missing else "timeout"
        note = step.missing or "the budget was spent"
        return StepResult(
            name=step.name, outcome=outcome, duration_s=0, command=command, log="", note=note
        )
    environment = {**os.environ, **step.environment}
    environment.pop("TRITON_INTERPRET", None)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            outcome = "failed" if process.wait(limit_s) else "passed"
        except subprocess.TimeoutExpired:
            outcome = "timeout"
        finally:
            _end_session(process)
    return StepResult(
        name=step.name,
        outcome=outcome,
        duration_s=round(time.monotonic() - start, 1),
        command=command,
        log=str(log),
    )


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a step's processes: one that hangs would hold the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_kernel_tests(root: Path) -> list[str]:
    """Return the test files with a test that runs on a GPU."""
    files = sorted(root.glob("tests/**/test_*.py"))
    return [
        str(file.relative_to(root))
        for file in files
        if any(mark in file.read_text() for mark in MARKS)
    ]


def make_test_steps(root: Path) -> list[Step]:
    """Return a step per file of kernel tests."""
    pytest = sys.executable, "-m", "pytest", "-q", "-m", "interpreter or gpu"
    return [
        Step(name=Path(file).stem, command=(*pytest, file), limit_s=240)
        for file in find_kernel_tests(root)
    ]


def make_exclusive_steps(directory: Path) -> list[Step]:
    """Return the steps that need the device for themselves."""
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    steps = [
        Step(
            name="memcheck",
            command=(
                *(sanitizer or "compute-sanitizer", "--error-exitcode=1"),
                *(sys.executable, "-m", "pytest", "-q", "-m", "interpreter", *SANITIZED_TESTS),
            ),
            limit_s=90,
            # Else every tensor lies in one large block, in which no access is out of bounds.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            missing="" if sanitizer else "compute-sanitizer is not installed",
        )
    ]
    for module, arguments in BENCHMARKS.items():
        name = module.replace(".", "_")
        json = str(directory / f"{name}.json")
        steps.append(
            Step(
                name=name,
                command=(sys.executable, "-m", module, *arguments, "--quick", "--json", json),
                limit_s=80,
                missing="" if importlib.util.find_spec(module) else f"there is no {module}",
            )
        )
    return steps


def run_steps(
    concurrent: Sequence[Step], exclusive: Sequence[Step], budget_s: float, directory: Path
) -> list[StepResult]:
    """Run the first steps side by side, then the others one by one, and print each result."""
    deadline = time.monotonic() + budget_s
    results = []

    def run(step: Step) -> StepResult:
        return run_step(step, deadline, directory)

    with ThreadPoolExecutor(min(MAX_PROCESSES, os.cpu_count() or 1)) as pool:
        for result in (*pool.map(run, concurrent), *map(run, exclusive)):
            print(f"{result.outcome:8} {result.duration_s:6.1f} s  {result.name}  {result.note}")
            results.append(result)
    return results


def describe_device() -> dict[str, object]:
    """Return the GPU and the versions that decide what ran."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": triton.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; return 0, 1 if a step failed, or 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/gpu_check"), help="results, logs")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device, so nothing was checked", file=sys.stderr)
        return NO_DEVICE
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    steps = run_steps(
        make_test_steps(Path.cwd()), make_exclusive_steps(options.out), BUDGET_S, options.out
    )
    has_passed = all(step.outcome in ("passed", "not run") for step in steps)
    path = options.out / "gpu_check.json"
    write_json(
        str(path),
        {
            **describe_device(),
            "passed": has_passed,
            "duration_s": round(time.monotonic() - start, 1),
            "steps": [asdict(step) for step in steps],
        },
    )
    print(path)
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
