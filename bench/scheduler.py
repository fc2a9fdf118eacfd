"""Core latency of the scheduler by EP degree: the paper's Figure 9, beside other planners.

Every planner runs the same steady-state targets, one after another on one pinned core, from demand
in memory to slot counts in memory; ours and the plain transcription of Algorithm 1 in a compiled
loop, as the scheduler process calls its planner, the literal oracle and the peer policies from
Python. The planners take turns in rounds, so that they meet the same noise.

Run: python -m bench.scheduler [--trace FILE.npz] [--ep 2 4 8 16 32 64 128] [--targets 200]
    [--json FILE] [--plot FILE.png] [--quick]
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import Candidate, LayerState, layer_state
from afore_kernels.runtime.planner import Limits, plan_core
from afore_kernels.runtime.planner_oracle import plan_microbatch_oracle
from afore_kernels.runtime.policies import Policy
from afore_kernels.runtime.policies.eplb import Eplb
from afore_kernels.runtime.policies.llep import Llep
from afore_kernels.runtime.policies.ultraep import UltraEp
from afore_kernels.runtime.shared import monotonic_ns
from bench.harness import hardware_line, write_json
from bench.plain_planner import PlainState, plain_plan
from bench.planner_targets import TargetSequence, load_sequences

PAPER_US = {2: 8.23, 128: 245.81}
OURS, REFINED, PLAIN, ORACLE = "afore", "afore refined", "plain numba", "oracle"
NUM_ROUNDS = 3
# The oracle sorts and scans dictionaries: a few targets tell.
ORACLE_TARGETS = 20
COST = CostModel(50.0, 0.0, 50.0, 2000.0)
TILE_M, REDUNDANT_SLOTS = 16, 2

Times = npt.NDArray[np.int64]


@numba.njit(nogil=True)
def _time_core(
    times, slot_pairs, slot_copy, is_protected, states, candidate, demand, layer, limits, cost
):
    for sequence in range(demand.shape[0]):
        state = layer_state(states, layer[sequence])
        for worker in range(is_protected.shape[0]):
            for slot in range(is_protected.shape[1]):
                last_use = state.slot_last_use[worker, slot]
                is_protected[worker, slot] = last_use >= 0 and last_use == sequence - 1
        target = demand[sequence]
        start = monotonic_ns()
        plan_core(
            slot_pairs,
            slot_copy,
            state,
            candidate,
            target,
            target,
            is_protected,
            limits,
            cost,
            sequence,
        )
        times[sequence] = monotonic_ns() - start


def time_core(targets: TargetSequence, placement: PrimaryPlacement, limits: Limits) -> Times:
    """Time `plan_core` per target, in nanoseconds, int64 [num_targets]."""
    slots = (placement.num_workers, placement.redundant_slots)
    times = np.zeros(len(targets.demand), np.int64)
    _time_core(
        times,
        np.empty(slots, np.int32),
        np.empty(slots, np.uint8),
        np.empty(slots, np.uint8),
        LayerState.initial(placement, targets.num_layers),
        Candidate.allocate(placement),
        targets.demand,
        targets.layer,
        limits,
        COST,
    )
    return times


@numba.njit(nogil=True)
def _time_plain(times, slot_pairs, slot_copy, is_protected, states, demand, layer, limits, cost):
    for sequence in range(demand.shape[0]):
        state = states[layer[sequence]]
        is_protected[:] = (state.slot_last_use >= 0) & (state.slot_last_use == sequence - 1)
        start = monotonic_ns()
        plain_plan(
            slot_pairs, slot_copy, state, demand[sequence], is_protected, limits, cost, sequence
        )
        times[sequence] = monotonic_ns() - start


def time_plain(targets: TargetSequence, placement: PrimaryPlacement, limits: Limits) -> Times:
    """Time the plain transcription per target, in nanoseconds, int64 [num_targets]."""
    slots = (placement.num_workers, placement.redundant_slots)
    times = np.zeros(len(targets.demand), np.int64)
    _time_plain(
        times,
        np.empty(slots, np.int32),
        np.empty(slots, np.uint8),
        np.empty(slots, np.uint8),
        tuple(PlainState.initial(placement) for _ in range(targets.num_layers)),
        targets.demand,
        targets.layer,
        limits,
        COST,
    )
    return times


def time_policy(
    targets: TargetSequence, placement: PrimaryPlacement, limits: Limits, policy: Policy[Any]
) -> Times:
    """Time a policy's `plan`, called from Python, in nanoseconds, int64 [num_targets]."""
    states = [policy.initial_state(placement) for _ in range(targets.num_layers)]
    times = np.zeros(len(targets.demand), np.int64)
    for sequence, (demand, layer) in enumerate(zip(targets.demand, targets.layer)):
        state = states[layer]
        is_protected = (state.slot_last_use >= 0) & (state.slot_last_use == sequence - 1)
        start = time.perf_counter_ns()
        planned = policy.plan(
            demand,
            state,
            placement,
            limits,
            COST,
            sequence=sequence,
            is_protected=is_protected.astype(np.uint8),
        )
        times[sequence] = time.perf_counter_ns() - start
        states[layer] = planned.state
    return times


class OraclePolicy:
    """The literal oracle as a policy."""

    def initial_state(self, placement: PrimaryPlacement) -> LayerState:
        """Return the empty state."""
        return LayerState.initial(placement)

    def plan(self, demand, state, placement, limits, cost, *, sequence, is_protected):
        """Plan one target by Algorithm 1, line by line."""
        return plan_microbatch_oracle(
            demand,
            state,
            placement,
            limits,
            cost,
            sequence=sequence,
            is_protected=is_protected,
            planning_demand=demand,
        )


def measure(targets: TargetSequence, num_workers: int) -> dict[str, dict[str, float]]:
    """Time every planner on one sequence at one EP degree.

    Returns:
        Planner -> median and 95th percentile in microseconds over the targets that count.
    """
    placement = PrimaryPlacement(targets.num_experts, num_workers, REDUNDANT_SLOTS)
    limits = Limits(TILE_M, 2 * num_workers, 0)
    refined = limits._replace(is_refined=True)
    few = targets.first(ORACLE_TARGETS)
    planners: dict[str, Callable[[], Times]] = {
        OURS: lambda: time_core(targets, placement, limits),
        REFINED: lambda: time_core(targets, placement, refined),
        PLAIN: lambda: time_plain(targets, placement, limits),
        ORACLE: lambda: time_policy(few, placement, limits, OraclePolicy()),
        "eplb": lambda: time_policy(targets, placement, limits, Eplb()),
        "ultraep": lambda: time_policy(targets, placement, limits, UltraEp()),
        "llep": lambda: time_policy(targets, placement, limits, Llep()),
    }
    for name in (OURS, REFINED, PLAIN):
        planners[name]()  # compiles
    samples: dict[str, list[Times]] = {name: [] for name in planners}
    for round_index in range(NUM_ROUNDS):
        names = list(planners)
        for name in names[round_index:] + names[:round_index]:
            if name == ORACLE and round_index > 0:
                continue
            skipped = few.num_warmup if name == ORACLE else targets.num_warmup
            samples[name].append(planners[name]()[skipped:])
    return {
        name: {
            "median_us": float(np.median(np.concatenate(times))) / 1e3,
            "p95_us": float(np.percentile(np.concatenate(times), 95)) / 1e3,
        }
        for name, times in samples.items()
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw median latency over the EP degree, one line per planner, on logarithmic axes."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("a plot needs matplotlib: pip install 'afore-kernels[bench]'") from None

    workloads = sorted({row["workload"] for row in rows})
    figure = Figure(figsize=(4.6 * len(workloads), 3.8), layout="constrained")
    for axis, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads):
        shown = [row for row in rows if row["workload"] == workload]
        degrees = [row["ep"] for row in shown]
        for name in shown[0]["planners"]:
            medians = [row["planners"][name]["median_us"] for row in shown]
            axis.plot(degrees, medians, marker="o", label=name)
        known = [ep for ep in degrees if ep in PAPER_US]
        axis.plot(known, [PAPER_US[ep] for ep in known], "k*", label="paper")
        axis.set(xscale="log", yscale="log", xlabel="EP degree", ylabel="us per target")
        axis.set_xticks(degrees, [str(ep) for ep in degrees])
        axis.set_title(workload)
    axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, help="recorded routing, up to EP 32")
    parser.add_argument("--ep", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--targets", type=int, default=200)
    parser.add_argument("--plot", type=Path, help="PNG of latency over EP degree")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="EP 2 and 8, 40 targets")
    options = parser.parse_args()
    if options.quick:
        options.ep, options.targets = [2, 8], 40

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(hardware_line())
    rows = []
    for targets in load_sequences(options.trace, options.targets):
        for ep in options.ep:
            if ep > targets.num_experts:
                continue
            planners = measure(targets, ep)
            rows.append({"workload": targets.name, "ep": ep, "planners": planners})
            if ep in PAPER_US:
                rows[-1]["paper_us"] = PAPER_US[ep]
            if len(rows) == 1:
                print(
                    f"{'workload':22}{'EP':>4}" + "".join(f"{n:>15}" for n in planners) + "   paper"
                )
            medians = "".join(f"{times['median_us']:15.2f}" for times in planners.values())
            print(
                f"{targets.name:22}{ep:4}{medians}{PAPER_US.get(ep, float('nan')):8.2f}", flush=True
            )
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        command = shlex.join(["python", "-m", "bench.scheduler", *sys.argv[1:]])
        write_json(options.json, {"command": command, "unit": "us per target", "rows": rows})


if __name__ == "__main__":
    main()
