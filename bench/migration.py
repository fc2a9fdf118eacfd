"""How well expert copies are hidden: the paper's Figure 11, on a running tier.

A tier for each alternative serves the same steps of a decode workload, in turns: copies overlapped
or on the critical path, with 1, 2 or 4 microbatches in flight. Where the copies are changes no
plan, so every copy and GEMM is compared with the same one of the other tier. All but the step time
is read off the timeline, see `bench.migration_events`.

Run: python -m bench.migration [--trace FILE.npz] [--workers 2] [--device cpu]
    [--rounds 60] [--json FILE] [--plot FILE.png] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.replay.workload import Workload, drive_tier
from afore_kernels.runtime.client import AttentionClient
from afore_kernels.runtime.launch import Tier
from afore_kernels.runtime.timeline import Event
from afore_kernels.runtime.weights import RandomWeights
from afore_kernels.traces import ContinuousBatching, RoutingTrace, split_tokens
from bench.harness import hardware_line, paired_ratio, time_paired, write_json
from bench.migration_events import (
    compare,
    copy_samples,
    exposed_when_fitting,
    gemm_samples,
    idle_waits_us,
    overlap_by_stage,
    overlap_share,
    target_copies,
)
from bench.synthetic_routing import make_workload

PAPER: dict[str, Any] = {  # section 7.5; [least, most] of its four workloads
    "hardware": "two nodes of eight A100 with NVLink, GLM-4.5-Air",
    "targets_with_copies": 324,
    "share_fitting": 1.0,
    "raw_copy_us": {"mean": [453, 495]},
    "lookahead_us": {"mean": [2008, 2119]},
    "remaining_us": {"p50": [1459, 1668], "min": [447, 447]},
    "exposed_us": {"max": [0, 0]},
}
SYNTHETIC = "synthetic-128x8-even"
TOKENS_PER_STEP, STEPS_PER_ROUND, WARMUP_ROUNDS, QUICK_ROUNDS = 64, 4, 1, 8
# Small tiles and one redundant slot, so that replicas are replaced often; copies of 3 MB, so that
# some outlast the all-gather and run beside a GEMM.
MODELS: dict[str, dict[str, Any]] = {
    "cpu": {"num_layers": 2, "hidden_size": 512, "intermediate_size": 512, "tile_m": 4},
    # GLM-4.5-Air, as in the paper.
    "cuda": {
        "num_layers": 2,
        "hidden_size": 4096,
        "intermediate_size": 1408,
        "tile_m": 16,
        "dtype": "bfloat16",
    },
}
REDUNDANT_SLOTS = 1
EVENTS_PER_TARGET = 12


@dataclass(frozen=True, slots=True)
class Setting:
    """One of the alternatives."""

    overlap_copies: bool
    num_microbatches: int

    def __str__(self) -> str:
        where = "overlapped" if self.overlap_copies else "critical path"
        return f"{where}, {self.num_microbatches} in flight"


class Run(NamedTuple):
    """What one tier did after the warm-up: its events, and the mean step time of each round."""

    events: list[Event]
    step_us: list[float]


def load_workload(trace: Path | None, num_rounds: int, device: str) -> Workload:
    """Take the steps of a warm-up and `num_rounds` rounds from a trace, or else draw them."""
    model = MODELS[device]
    num_layers = model["num_layers"]
    if trace is None:
        batches = make_workload(SYNTHETIC, concurrency=TOKENS_PER_STEP, num_layers=num_layers)
    else:
        batches = ContinuousBatching(RoutingTrace.load(trace), concurrency=TOKENS_PER_STEP)
    num_steps = (WARMUP_ROUNDS + num_rounds) * STEPS_PER_ROUND
    ids = np.stack([step[:, :num_layers] for step in itertools.islice(batches, num_steps)])
    moe = MoEConfig(num_experts=batches.trace.num_experts, top_k=batches.trace.top_k, **model)
    return Workload(moe, ids, split_tokens(TOKENS_PER_STEP, 1, 1))


def run_settings(
    workload: Workload, settings: Sequence[Setting], num_workers: int, device: str
) -> dict[Setting, Run]:
    """Start a tier per setting and let them take turns, round by round, in random order."""
    weights = RandomWeights(workload.moe)
    num_rounds = len(workload.ids) // STEPS_PER_ROUND
    tiers: dict[Setting, Tier] = {}
    drivers: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for setting in settings:
            parts = split_tokens(TOKENS_PER_STEP, setting.num_microbatches, 1)
            rounds = [
                replace(workload, ids=i, parts=parts) for i in np.split(workload.ids, num_rounds)
            ]
            config = TierConfig(
                num_workers=num_workers,
                device=device,
                max_tokens_per_rank=rounds[0].max_tokens_per_rank,
                redundant_slots=REDUNDANT_SLOTS,
                overlap_copies=setting.overlap_copies,
                targets_in_flight=setting.num_microbatches,
                timeline_events=EVENTS_PER_TARGET * num_rounds * rounds[0].num_targets,
            )
            tiers[setting] = stack.enter_context(Tier.start(workload.moe, config, weights))
            client = stack.enter_context(tiers[setting].client())
            drivers[str(setting)] = _driver(client, rounds)
        samples = time_paired(drivers, rounds=num_rounds - WARMUP_ROUNDS, warmup=WARMUP_ROUNDS)
        recorded = {setting: tier.timeline().events for setting, tier in tiers.items()}
    runs = {}
    for setting, events in recorded.items():
        targets_per_step = workload.moe.num_layers * setting.num_microbatches
        first = WARMUP_ROUNDS * STEPS_PER_ROUND * targets_per_step
        runs[setting] = Run(
            [event for event in events if event.sequence >= first],
            [round_us / STEPS_PER_ROUND for round_us in samples[str(setting)]],
        )
    return runs


def _driver(client: AttentionClient, rounds: Sequence[Workload]) -> Callable[[], None]:
    """Return a call that drives the next one of the rounds."""
    remaining = iter(rounds)

    def drive() -> None:
        workload = next(remaining)
        for _ in drive_tier([client], workload, len(workload.parts)):
            pass

    return drive


def describe(values: Sequence[float]) -> dict[str, float]:
    """Return mean, least, percentiles and largest of at least one value."""
    levels = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "p99": 99, "max": 100}
    described = {name: float(np.percentile(values, level)) for name, level in levels.items()}
    return {"mean": float(np.mean(values)), **described}


def summarise(setting: Setting, run: Run) -> dict[str, Any]:
    """Summarise the targets with copies of one run, times in us.

    Raises:
        SystemExit: if there are none.
    """
    rows = target_copies(run.events)
    if not rows:
        raise SystemExit(f"{setting}: no target needed a copy, take more rounds")
    fitting = exposed_when_fitting(rows)
    by_stage = overlap_by_stage(run.events)
    return {
        **asdict(setting),
        "targets": len({event.sequence for event in run.events}),
        "targets_with_copies": fitting.num_targets,
        "share_fitting": fitting.num_fitting / fitting.num_targets,
        "exposed_when_fitting": fitting._asdict(),
        "idle_wait_us": describe(idle_waits_us(run.events)),
        **{
            name: describe([getattr(row, name) for row in rows])
            for name in ("raw_copy_us", "lookahead_us", "remaining_us", "exposed_us")
        },
        "overlap_share": overlap_share(run.events),
        "overlap_by_stage": {stage.name: share for stage, share in by_stage.items()},
        "step_us": statistics.median(run.step_us),
    }


def compare_runs(runs: dict[Setting, Run], expert_bytes: int) -> list[dict[str, Any]]:
    """Compare both places of the copies and the fewest microbatches, by paired rounds.

    `gemm` and `copy` are `migration_events.Interference`, of copies with their bandwidths in GB/s.
    """
    counts = sorted({setting.num_microbatches for setting in runs})
    fewest = runs[Setting(True, counts[0])]
    rows = []
    for count in counts:
        overlapped, critical = runs[Setting(True, count)], runs[Setting(False, count)]
        gemm = compare(gemm_samples(overlapped.events), gemm_samples(critical.events))
        copy = compare(copy_samples(overlapped.events), copy_samples(critical.events))
        rows.append(
            {
                "num_microbatches": count,
                "step_ratio_to_overlapped": paired_ratio(critical.step_us, overlapped.step_us),
                "step_ratio_to_fewest": paired_ratio(overlapped.step_us, fewest.step_us),
                "gemm": gemm._asdict(),
                "copy": {
                    **copy._asdict(),
                    "beside_gb_per_s": _bandwidth(expert_bytes, copy.beside_us),
                    "reference_gb_per_s": _bandwidth(expert_bytes, copy.reference_us),
                },
            }
        )
    return rows


def _bandwidth(num_bytes: int, time_us: float | None) -> float | None:
    return None if time_us is None else num_bytes / time_us / 1e3


def report(rows: Sequence[dict[str, Any]], comparisons: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    titles = {
        "copies": 26, "fit": 9, "D": 7, "W": 8, "W - D, least": 15,
        "exposed, most": 15, "if fit": 8, "idle wait, most": 16, "overlap": 8, "step ms": 8,
    }  # fmt: skip
    print("".join(f"{title:>{width}}" for title, width in titles.items()))
    for row in rows:
        setting = Setting(row["overlap_copies"], row["num_microbatches"])
        remaining, exposed, idle = row["remaining_us"], row["exposed_us"], row["idle_wait_us"]
        fitting = row["exposed_when_fitting"]
        fit = f"{fitting['num_fitting']}/{fitting['num_targets']}"
        print(
            f"{setting!s:>26}{fit:>9}"
            f"{row['raw_copy_us']['p50']:7.0f}{row['lookahead_us']['p50']:8.0f}"
            f"{remaining['p50']:8.0f}{remaining['min']:7.0f}"
            f"{exposed['p50']:8.0f}{exposed['max']:7.0f}"
            f"{_number(fitting['largest_us']):>8}"
            f"{idle['p50']:9.0f}{idle['max']:7.0f}"
            f"{row['overlap_share']:8.0%}{row['step_us'] / 1e3:8.1f}"
        )
    print("us, medians of the targets with copies; fit: how many had them in time;")
    print("if fit: longest wait of these; idle wait: of a worker with no copies in flight;")
    print("overlap: share of the copy time in partition, GEMM or reduce of earlier targets")
    for row in comparisons:
        gemm, copy = row["gemm"], row["copy"]
        print(
            f"{row['num_microbatches']} in flight: step on the critical path / overlapped "
            f"{row['step_ratio_to_overlapped']:.3f}, / fewest in flight "
            f"{row['step_ratio_to_fewest']:.3f}"
        )
        print(
            f"  GEMM beside a copy {_number(gemm['beside_us'])} us, without "
            f"{_number(gemm['reference_us'])} us: {_paired(gemm)}"
        )
        print(
            f"  copy beside a GEMM {_number(copy['beside_gb_per_s'], 2)} GB/s, without "
            f"{_number(copy['reference_gb_per_s'], 2)} GB/s: {_paired(copy)}"
        )
    print(f"{'Figure 11':28}{'here':>10}   paper: {PAPER['hardware']}")
    ours = rows[-1]
    for name in ("targets_with_copies", "share_fitting"):
        print(f"{name:28}{ours[name]:10.4g}   {PAPER[name]}")
    for name in ("raw_copy_us", "lookahead_us", "remaining_us", "exposed_us"):
        for statistic, (least, most) in PAPER[name].items():
            print(f"{name + ', ' + statistic:28}{ours[name][statistic]:10.0f}   {least} to {most}")


def _paired(found: dict[str, Any]) -> str:
    return (
        f"time ratio {_number(found['ratio'], 2)} of {found['num_beside']} pairs, "
        f"{_number(found['alone_ratio'], 2)} of {found['num_alone']} not beside it in either tier"
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def plot(run: Run, title: str, path: Path) -> None:
    """Draw the distributions of D, W and the exposed wait, and of what is left of W."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("a plot needs matplotlib: pip install 'afore-kernels[bench]'") from None

    rows = target_copies(run.events)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, name, label, color in (
        (left, "exposed_us", "exposed wait, call included", "C0"),
        (left, "raw_copy_us", "raw copy time D", "C1"),
        (left, "lookahead_us", "lookahead window W", "C2"),
        (right, "remaining_us", "time remaining before use", "C3"),
    ):
        axis.ecdf([getattr(row, name) / 1e3 for row in rows], label=label, color=color)
    left.set(xscale="log", xlabel="ms", ylabel=f"share of {len(rows)} targets")
    right.set(xlabel="ms, worst worker")
    right.axvline(0, color="black", linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, help="recorded routing, else synthetic")
    parser.add_argument("--workers", type=int, default=2, help="FFN workers (default: 2)")
    parser.add_argument("--device", choices=MODELS, default="cpu", help="of the workers")
    parser.add_argument("--rounds", type=int, default=60, help="of 4 steps each (default: 60)")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="PNG of Figure 11")
    parser.add_argument("--quick", action="store_true", help="8 rounds, 2 in flight")
    options = parser.parse_args()
    if options.quick:
        options.rounds = QUICK_ROUNDS
    if options.rounds < 1:
        parser.error("too few rounds")
    counts = (2,) if options.quick else (1, 2, 4)

    torch.set_num_threads(1)
    command = shlex.join(["python", "-m", "bench.migration", *sys.argv[1:]])
    load = [os.getloadavg()[0]]
    workload = load_workload(options.trace, options.rounds, options.device)
    settings = [Setting(overlap, n) for overlap in (False, True) for n in counts]
    runs = run_settings(workload, settings, options.workers, options.device)
    load.append(os.getloadavg()[0])
    name = SYNTHETIC if options.trace is None else options.trace.stem
    title = f"{name}, {options.workers} workers, copies {settings[-1]}"
    rows = [summarise(setting, run) for setting, run in runs.items()]
    moe = workload.moe
    expert_bytes = 3 * moe.hidden_size * moe.intermediate_size * getattr(torch, moe.dtype).itemsize
    comparisons = compare_runs(runs, expert_bytes)
    print(hardware_line())
    print(f"{os.cpu_count()} CPUs, load average {load[0]:.1f} before, {load[1]:.1f} after")
    print(title)
    report(rows, comparisons)
    if options.plot:
        plot(runs[settings[-1]], title, options.plot)
    if options.json:
        about = {
            "command": command,
            "load_average": load,
            "workload": name,
            "workers": options.workers,
            "device": options.device,
            "tokens_per_step": TOKENS_PER_STEP,
            "redundant_slots": REDUNDANT_SLOTS,
            "moe": asdict(moe),
            "expert_bytes": expert_bytes,
            "unit": "us",
        }
        write_json(
            options.json, {**about, "rows": rows, "comparisons": comparisons, "paper": PAPER}
        )


if __name__ == "__main__":
    main()
