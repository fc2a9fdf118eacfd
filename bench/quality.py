"""Solution quality of the scheduler: the paper's Table 2, with certificates, and parameter sweeps.

Every planner runs the same steady-state targets from its own slots. For Algorithm 1 and for refined
plans each target is certified (`bench.certify`): the busiest worker's tiles against the optimum
from the same slot table, protected slots and budget. "unproved" targets do not count as optimal;
their gap is the largest possible one. The peers are judged by the mean tiles per worker, a bound
for everybody.

Run: python -m bench.quality [--trace FILE.npz] [--ep 2 4 8 16 32 64 128] [--targets 200]
    [--time-limit 20] [--sweep] [--json FILE] [--plot FILE.png] [--quick]
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget, plan_microbatch
from afore_kernels.runtime.policies import Policy
from afore_kernels.runtime.policies.eplb import Eplb
from afore_kernels.runtime.policies.llep import Llep
from afore_kernels.runtime.policies.ultraep import UltraEp
from bench.certify import Certificate, Problem, certify
from bench.harness import hardware_line, write_json
from bench.planner_targets import NUM_LAYERS, TargetSequence, load_sequences

PAPER = {  # optimal of 200, mean and largest gap in percent
    2: (196, 0.04, 3.60),
    4: (197, 0.03, 1.89),
    8: (200, 0.0, 0.0),
    16: (200, 0.0, 0.0),
    32: (200, 0.0, 0.0),
    64: (200, 0.0, 0.0),
    128: (200, 0.0, 0.0),
}
FIXED_BUDGET = 8
COST = CostModel(50.0, 0.0, 50.0, 2000.0)
TILE_M, REDUNDANT_SLOTS = 16, 2


class Planner:
    """Algorithm 1, or with `Limits.is_refined` more than it, as a policy."""

    def initial_state(self, placement: PrimaryPlacement) -> LayerState:
        """Return the empty state."""
        return LayerState.initial(placement)

    plan = staticmethod(plan_microbatch)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One target as a policy planned it."""

    problem: Problem
    planned: PlannedTarget
    tile_load: np.ndarray

    @property
    def most_tiles(self) -> int:
        """Tiles of the busiest worker."""
        return int(self.tile_load.max())


def run_policy(
    policy: Policy[Any],
    targets: TargetSequence,
    placement: PrimaryPlacement,
    limits: Limits,
    cost: CostModel = COST,
) -> Iterator[Step]:
    """Plan a sequence and yield the targets that count."""
    states = [policy.initial_state(placement) for _ in range(targets.num_layers)]
    for sequence, (demand, layer) in enumerate(zip(targets.demand, targets.layer)):
        state = states[layer]
        is_protected = (state.slot_last_use >= 0) & (state.slot_last_use == sequence - 1)
        problem = Problem(demand, state, placement, limits, is_protected.astype(np.uint8))
        planned = policy.plan(
            demand,
            state,
            placement,
            limits,
            cost,
            sequence=sequence,
            is_protected=problem.is_protected,
        )
        states[layer] = planned.state
        if sequence >= targets.num_warmup:
            tile_load = planned.state.slot_tiles.sum(axis=1, dtype=np.int64)
            np.add.at(tile_load, placement.primary_worker, planned.state.primary_tiles)
            yield Step(problem, planned, tile_load)


@dataclass(frozen=True, slots=True)
class Quality:
    """Table 2 for one planner at one EP degree; gaps in percent of the optimum.

    Attributes:
        optimal: targets proved optimal.
        unproved: targets whose optimum is not known.
        mean_gap, max_gap: against the lower bound, the optimum where it is proved.
        mean_gap_to_best: against the best known, which the planner shares or another plan has.
        copies: mean per target.
        most_tiles: mean over the targets of the busiest worker's tiles.
    """

    optimal: int
    unproved: int
    mean_gap: float
    max_gap: float
    mean_gap_to_best: float
    copies: float
    most_tiles: float


def judge(steps: Sequence[Step], time_limit_s: float) -> Quality:
    """Certify every target."""
    certificates: list[Certificate] = [
        certify(step.problem, step.most_tiles, hint=step.planned, time_limit_s=time_limit_s)
        for step in steps
    ]
    gaps = np.array([certificate.gap for certificate in certificates]) * 100
    return Quality(
        optimal=sum(certificate.is_optimal for certificate in certificates),
        unproved=sum(not certificate.is_proved for certificate in certificates),
        mean_gap=round(float(gaps[:, 1].mean()), 3),
        max_gap=round(float(gaps[:, 1].max()), 2),
        mean_gap_to_best=round(float(gaps[:, 0].mean()), 3),
        copies=_mean_copies(steps),
        most_tiles=round(float(np.mean([step.most_tiles for step in steps])), 3),
    )


def judge_by_mean(steps: Sequence[Step]) -> dict[str, float]:
    """Compare with the mean load of undivided demand: a policy that splits tiles pays for it."""
    bounds = [-(-int(step.problem.expert_tiles.sum()) // len(step.tile_load)) for step in steps]
    gaps = [100 * (step.most_tiles / bound - 1) for step, bound in zip(steps, bounds)]
    return {
        "gap_to_mean": round(float(np.mean(gaps)), 2),
        "max_gap_to_mean": round(float(np.max(gaps)), 2),
        "copies": _mean_copies(steps),
    }


def _mean_copies(steps: Sequence[Step]) -> float:
    return round(float(np.mean([step.planned.slot_copy.sum() for step in steps])), 3)


def measure(targets: TargetSequence, ep: int, budget: int, time_limit_s: float) -> dict[str, Any]:
    """Judge all planners at one EP degree and budget."""
    placement = PrimaryPlacement(targets.num_experts, ep, REDUNDANT_SLOTS)
    limits = Limits(TILE_M, budget, 0)
    greedy = list(run_policy(Planner(), targets, placement, limits))
    refined = list(run_policy(Planner(), targets, placement, limits._replace(is_refined=True)))
    peers: dict[str, Policy[Any]] = {"eplb": Eplb(), "ultraep": UltraEp(), "llep": Llep()}
    return {
        "workload": targets.name,
        "ep": ep,
        "copy_budget": budget,
        "algorithm 1": asdict(judge(greedy, time_limit_s)),
        "refined": asdict(judge(refined, time_limit_s)),
        "by the mean": {
            "algorithm 1": judge_by_mean(greedy),
            "refined": judge_by_mean(refined),
            **{
                name: judge_by_mean(list(run_policy(policy, targets, placement, limits)))
                for name, policy in peers.items()
            },
        },
    }


def sweep(targets: TargetSequence, ep: int) -> list[dict[str, Any]]:
    """Vary theta, R, B and the window, one at a time, with refined plans.

    Returns:
        Per setting: max/mean tiles averaged over the targets, copies per target, and microseconds
        per plan, called from Python.
    """
    base = {"theta": 0, "redundant_slots": REDUNDANT_SLOTS, "copy_budget": 2 * ep, "window_us": 2e3}
    settings = [
        *({"theta": value} for value in (0, 1, 2, 4)),
        *({"redundant_slots": value} for value in (0, 1, 2, 3, 4)),
        *({"copy_budget": value} for value in (0, 1, 2, 4, ep, 2 * ep, 4 * ep)),
        *({"window_us": value} for value in (0.0, 50.0, 100.0, 200.0, 2000.0)),
    ]
    rows = []
    for changed in settings:
        setting = base | changed
        placement = PrimaryPlacement(targets.num_experts, ep, int(setting["redundant_slots"]))
        limits = Limits(TILE_M, int(setting["copy_budget"]), int(setting["theta"]), is_refined=True)
        start = time.perf_counter()
        cost = COST._replace(window_us=float(setting["window_us"]))
        steps = list(run_policy(Planner(), targets, placement, limits, cost))
        elapsed_us = (time.perf_counter() - start) * 1e6 / len(targets.demand)
        imbalance = [step.most_tiles / step.tile_load.mean() for step in steps]
        rows.append(
            {
                "ep": ep,
                "changed": next(iter(changed)),
                "value": next(iter(changed.values())),
                "tile_imbalance": round(float(np.mean(imbalance)), 4),
                "copies": _mean_copies(steps),
                "us_from_python": round(elapsed_us, 1),
            }
        )
    return rows


def report(row: dict[str, Any]) -> None:
    """Print one row."""
    paper = "{}/200 {:.2f} {:.2f}".format(*PAPER[row["ep"]]) if row["ep"] in PAPER else "-"
    cells = [
        f"{q['optimal']:4}  {q['unproved']:3}  {q['mean_gap']:6.3f} {q['max_gap']:6.2f}"
        f" {q['copies']:6.2f}"
        for q in (row["algorithm 1"], row["refined"])
    ]
    peers = " ".join(f"{judged['gap_to_mean']:7.2f}" for judged in row["by the mean"].values())
    print(
        f"{row['workload']:22}{row['ep']:4}{row['copy_budget']:5} | {cells[0]} | {cells[1]} |"
        f" {peers} | {paper}",
        flush=True,
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the mean gap to the mean load over the EP degree, a line per planner."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("a plot needs matplotlib: pip install 'afore-kernels[bench]'") from None

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    panels = [(workload, is_fixed) for workload in workloads for is_fixed in (False, True)]
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    for axis, (workload, is_fixed) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels
    ):
        shown = [
            row
            for row in rows
            if row["workload"] == workload
            and row["copy_budget"] == (FIXED_BUDGET if is_fixed else 2 * row["ep"])
        ]
        for name in shown[0]["by the mean"]:
            gaps = [row["by the mean"][name]["gap_to_mean"] for row in shown]
            axis.plot([row["ep"] for row in shown], gaps, marker="o", label=name)
        axis.set(xscale="log", xlabel="EP degree", ylabel="busiest worker above the mean, %")
        axis.set_xticks([row["ep"] for row in shown], [str(row["ep"]) for row in shown])
        axis.set_title(f"{workload}, B = {'8' if is_fixed else '2N'}", fontsize="medium")
    axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, help="recorded routing, up to EP 32")
    parser.add_argument("--ep", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--targets", type=int, default=200)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds per certificate")
    parser.add_argument("--sweep", action="store_true", help="theta, R, B and window instead")
    parser.add_argument("--plot", type=Path, help="PNG of the gaps over EP degree")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="EP 2 and 8, 16 targets")
    options = parser.parse_args()
    if options.quick:
        options.ep, options.targets = [2, 8], 2 * NUM_LAYERS

    print(hardware_line())
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.quality", *sys.argv[1:]]),
        "tile_m": TILE_M,
        "redundant_slots": REDUNDANT_SLOTS,
    }
    rows: list[dict[str, Any]] = []
    if not options.sweep:
        print("workload, EP, B | algorithm 1: optimal, unproved, mean and max gap in %, copies")
        print(
            "  | refined: the same | above the mean, %: algorithm 1, refined, eplb, ultraep, llep"
        )
        print("  | paper: optimal, mean and max gap in %")
    for targets in load_sequences(options.trace, options.targets):
        for ep in options.ep:
            if ep > targets.num_experts:
                continue
            if options.sweep:
                found = sweep(targets, ep)
                for row in found:
                    row["workload"] = targets.name
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                rows += found
                continue
            for budget in dict.fromkeys((2 * ep, FIXED_BUDGET)):
                rows.append(measure(targets, ep, budget, options.time_limit))
                report(rows[-1])
    if options.plot and not options.sweep:
        plot(rows, options.plot)
    if options.json:
        write_json(options.json, {**result, "rows": rows})


if __name__ == "__main__":
    main()
