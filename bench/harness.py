"""What every benchmark shares: paired timing, the hardware line and JSON output."""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def time_paired(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time alternatives in alternation, so that drift of the machine hits all of them alike.

    Args:
        candidates: name -> call. Every round runs each once in a new random order, because what
            ran before a candidate decides what it finds in the caches.
        rounds: samples per candidate.
        warmup: untimed rounds before.

    Returns:
        Name -> durations in microseconds, sample i of every name from the same round.
    """
    order = random.Random(0)
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-warmup, rounds):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter_ns()
            candidates[name]()
            elapsed_us = (time.perf_counter_ns() - start) / 1e3
            if i >= 0:
                samples[name].append(elapsed_us)
    return samples


def paired_ratio(samples_us: list[float], baseline_us: list[float]) -> float:
    """Median over rounds of ours / baseline; below 1 is faster."""
    return statistics.median(ours / base for ours, base in zip(samples_us, baseline_us))


def hardware_line() -> str:
    """Describe the machine in one line: CPU, instruction set, threads, versions."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return (
        f"{model}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, python {platform.python_version()}"
    )


def write_json(path: str, result: Mapping[str, Any]) -> None:
    """Write a result with the hardware it was measured on."""
    document = {"hardware": hardware_line(), **result}
    Path(path).write_text(json.dumps(document, indent=2) + "\n")
