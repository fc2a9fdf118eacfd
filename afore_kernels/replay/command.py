"""The `afore replay TRACE` command: arguments, progress, table and JSON.

The same microbatches run under several configurations, by default the paper's static placement, its
ablation without prefetching, and full Afore. Every output is compared with the dense reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import ConfigError
from afore_kernels.replay.configurations import (
    CONFIGURATIONS,
    DEFAULT_CONFIGURATIONS,
    Advance,
    ReplayResult,
    dense_outputs,
    replay_plans,
    replay_tier,
)
from afore_kernels.replay.workload import Workload
from afore_kernels.runtime.weights import RandomWeights
from afore_kernels.traces import ContinuousBatching, RoutingTrace, split_tokens

# Events one process records per target, with room to spare: a worker's model stream records 8.
_EVENTS_PER_TARGET = 12
_WORKLOAD_OPTIONS = (
    "steps",
    "concurrency",
    "microbatches",
    "ranks",
    "layers",
    "domain",
    "drift_steps",
    "seed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="recorded routing, an .npz of ids, offsets, domain, ...")
    add(
        "--configurations",
        nargs="+",
        choices=list(CONFIGURATIONS),
        default=list(DEFAULT_CONFIGURATIONS),
        help="what to compare (default: %(default)s)",
    )
    add("--plan-only", action="store_true", help="run the planner alone, start no processes")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="check every output")
    add("--json", metavar="FILE", help="write the results as JSON")
    add("--timeline", metavar="FILE", help="write a Perfetto timeline per configuration")
    batching = parser.add_argument_group("workload").add_argument
    batching("--steps", type=int, default=16, help="decode steps (default: %(default)s)")
    batching("--concurrency", type=int, default=64, help="tokens per step (default: %(default)s)")
    batching("--microbatches", type=int, default=2, help="per step (default: %(default)s)")
    batching("--ranks", type=int, default=1, help="attention ranks (default: %(default)s)")
    batching("--layers", metavar="N|I,J,...", help="the first N layers, or a list (default: all)")
    batching("--domain", help="only requests of this domain")
    batching("--drift-steps", type=int, help="steps in which the mix moves through all domains")
    batching("--seed", type=int, default=0, help="of order, inputs, weights (default: %(default)s)")
    tier = parser.add_argument_group("tier").add_argument
    tier("--workers", type=int, default=8, help="FFN workers N (default: %(default)s)")
    tier("--redundant", type=int, default=2, help="redundant slots R (default: %(default)s)")
    tier("--copy-budget", type=int, help="copies per target B (default: 2 N)")
    tier("--tile-m", type=int, default=4, help="pairs per tile (default: %(default)s)")
    tier("--hidden-size", type=int, default=32, help="default: %(default)s")
    tier("--intermediate-size", type=int, default=32, help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        0, or 1 if an output differs from the dense reference.

    Raises:
        AforeError: if an argument or the trace is not valid, or the tier failed.
    """
    workload = build_workload(args)
    configurations = {name: _tier_config(args, workload, name) for name in args.configurations}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console()
    with Progress(*columns, console=console, transient=True) as progress:

        def track(what: str) -> Advance:
            task = progress.add_task(what, total=workload.num_targets)
            return lambda: progress.advance(task)

        if args.plan_only:
            results = [
                replay_plans(name, workload, tier, track(name))
                for name, tier in configurations.items()
            ]
        else:
            weights = RandomWeights(workload.moe, args.seed)
            reference = (
                dense_outputs(workload, weights, track("dense reference")) if args.check else None
            )
            results = [
                replay_tier(
                    name,
                    workload,
                    tier,
                    weights,
                    track(name),
                    reference=reference,
                    timeline=_timeline_path(args, name),
                )
                for name, tier in configurations.items()
            ]
    console.print(_table(workload, results))
    if args.json:
        document = {
            "trace": Path(args.trace).name,
            "workload": {name: getattr(args, name) for name in _WORKLOAD_OPTIONS},
            "moe": asdict(workload.moe),
            "results": [asdict(result) for result in results],
        }
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    return int(any(result.num_mismatched for result in results))


def build_workload(args: argparse.Namespace) -> Workload:
    """Compose the microbatches the arguments ask for.

    Raises:
        ConfigError, ShapeError: if an argument or the trace is not valid.
    """
    if args.steps < 2:
        raise ConfigError(
            f"steps must be at least 2, step 0 has no previous step; got {args.steps}"
        )
    trace = RoutingTrace.load(args.trace)
    layers = _select_layers(args.layers, trace.num_layers)
    batching = ContinuousBatching(
        trace,
        concurrency=args.concurrency,
        seed=args.seed,
        domain=args.domain,
        drift_steps=args.drift_steps,
    )
    moe = MoEConfig(
        num_layers=len(layers),
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        tile_m=args.tile_m,
    )
    steps = [step[:, layers] for step in itertools.islice(batching, args.steps)]
    parts = split_tokens(args.concurrency, args.microbatches, args.ranks)
    return Workload(moe, np.stack(steps), parts, args.seed)


def _select_layers(text: str | None, num_layers: int) -> list[int]:
    try:
        if text is None:
            layers = list(range(num_layers))
        elif "," in text:
            layers = [int(layer) for layer in text.split(",")]
        else:
            layers = list(range(int(text)))
    except ValueError as error:
        raise ConfigError(f"layers must be N or I,J,..., got {text!r}") from error
    if not layers or min(layers) < 0 or max(layers) >= num_layers:
        raise ConfigError(f"layers {text} are not among the trace's {num_layers} layers")
    return layers


def _tier_config(args: argparse.Namespace, workload: Workload, configuration: str) -> TierConfig:
    return TierConfig(
        num_workers=args.workers,
        num_ranks=args.ranks,
        max_tokens_per_rank=workload.max_tokens_per_rank,
        redundant_slots=args.redundant,
        copy_budget=args.copy_budget,
        # A microbatch's next layer needs its last reply: no attention tier has more in flight.
        targets_in_flight=args.microbatches,
        plan_ring_depth=workload.num_targets,
        timeline_events=max(_EVENTS_PER_TARGET * workload.num_targets, 16),
        **CONFIGURATIONS[configuration],
    )


def _timeline_path(args: argparse.Namespace, configuration: str) -> Path | None:
    if args.timeline is None:
        return None
    path = Path(args.timeline)
    if len(args.configurations) == 1:
        return path
    return path.with_name(f"{path.stem}-{configuration}{path.suffix}")


def _table(workload: Workload, results: list[ReplayResult]) -> Table:
    """One column per configuration, one row per quantity."""
    moe, num_targets = workload.moe, workload.num_targets
    table = Table(
        title=(
            f"{len(workload.ids)} steps x {moe.num_layers} layers x {len(workload.parts)} "
            f"microbatches, {workload.ids.shape[1]} tokens per step, tile_m {moe.tile_m}"
        ),
        caption="imbalance: largest over mean load of the workers; floor: what whole tiles permit",
    )
    table.add_column("mean over targets of steps > 0")
    for result in results:
        table.add_column(result.configuration, justify="right")
    summaries = [result.summary for result in results]
    quantities = {
        "pair imbalance": [f"{s.pair_imbalance:.3f}" for s in summaries],
        "tile imbalance": [f"{s.tile_imbalance:.3f}" for s in summaries],
        "tile floor": [f"{result.tile_floor:.3f}" for result in results],
        "copies per target": [f"{s.num_copies / s.num_targets:.2f}" for s in summaries],
    }
    if results[0].targets_per_s is not None:
        quantities |= {
            "raw copy time": [_microseconds(s.raw_copy_us) for s in summaries],
            "lookahead window": [_microseconds(s.lookahead_us) for s in summaries],
            "exposed wait": [_microseconds(s.exposed_us) for s in summaries],
            "targets/s": [f"{result.targets_per_s:.0f}" for result in results],
        }
    if results[0].num_mismatched is not None:
        matched = [num_targets - (result.num_mismatched or 0) for result in results]
        quantities["equal to the reference"] = [f"{count}/{num_targets}" for count in matched]
    for quantity, values in quantities.items():
        table.add_row(quantity, *values)
    return table


def _microseconds(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.0f} us"
