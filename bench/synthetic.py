"""Fit of the synthetic routing to a recorded trace, and how close its statistics come.

The scales of `bench.synthetic_routing` are fitted on 32 experts and top-4 to the recorded decode of
gpt-oss-20b, and used unchanged for 128 experts and top-8: how those behave is an extrapolation,
which `results/synthetic_128x8_fit.json` reports and nothing was tuned for.

Run: python -m bench.synthetic --trace FILE.npz [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from afore_kernels.traces import RoutingTrace
from bench.harness import hardware_line, write_json
from bench.routing_statistics import LAGS, measure_statistics
from bench.synthetic_routing import FITTED, ScoreScales, SyntheticRouting

FloatArray = npt.NDArray[np.floating]

# What was known of the recorded trace when this workload was specified: rounded, and measured on
# all of its source. The fit takes the trace's own values.
STATED = {
    "cv": 0.71,
    "gini": 0.40,
    "consecutive_overlap": 1.72,
    "independent_overlap": 0.76,
    "lag_correlation_1": 0.31,
    "lag_correlation_10": 0.19,
    "lag_correlation_50": 0.09,
    "lag_correlation_100": 0.0,
    "domain_tv_min": 0.03,
    "domain_tv_max": 0.48,
    "adjacent_layer_bits": 0.51,
}
FITTED_STATISTICS = (
    "cv",
    "consecutive_overlap",
    *(f"lag_correlation_{lag}" for lag in LAGS),
    "domain_tv_mean",
    "adjacent_layer_bits",
)
FIT_SEED, REPORT_SEEDS = 0, (1, 2, 3)
# The fit starts here, in the order of its variables.
START = {"popularity": 1.0, "domain": 1.0, "request": 2.0, "hidden": 4.0, "memory_tokens": 1.5}
# An error is relative to the recorded value, or to this where that is smaller.
MIN_SCALE = 0.1


def fit_scales(
    trace: RoutingTrace,
    hidden_sizes: Sequence[int] = (1, 2, 3),
    *,
    num_layers: int = 4,
    num_rounds: int = 4,
) -> ScoreScales:
    """Fit the scales so that a drawn trace has the recorded one's `FITTED_STATISTICS`.

    Damped Gauss-Newton over the logarithms, from the same start for each hidden size; every trial
    draws with the same seed, so that the statistics are smooth in the scales.

    Args:
        trace: the recorded routing; drawn traces have its shape, domains and lengths.
        hidden_sizes: to try; the best one is taken.
        num_layers: drawn per trial, to save time.
        num_rounds: most steps for each hidden size.
    """
    recorded = measure_statistics(trace)
    target = np.array([recorded[name] for name in FITTED_STATISTICS])

    def errors(log_scales: FloatArray, hidden_size: int) -> FloatArray:
        scales = _make_scales(log_scales, hidden_size)
        drawn = measure_statistics(draw_like(trace, scales, FIT_SEED, num_layers=num_layers))
        values = np.array([drawn[name] for name in FITTED_STATISTICS])
        return np.asarray((values - target) / np.maximum(target, MIN_SCALE))

    start = np.log(list(START.values()))
    fits = [
        _least_squares(partial(errors, hidden_size=size), start, num_rounds)
        for size in hidden_sizes
    ]
    best = int(np.argmin([error for _, error in fits]))
    return _make_scales(fits[best][0], hidden_sizes[best])


def _make_scales(log_scales: FloatArray, hidden_size: int) -> ScoreScales:
    # Three digits, so that what was measured is what can be written down.
    scales = {name: float(f"{x:.3g}") for name, x in zip(START, np.exp(log_scales))}
    return ScoreScales(**scales, hidden_size=hidden_size)


def _least_squares(
    errors: Callable[[FloatArray], FloatArray], x: FloatArray, num_rounds: int
) -> tuple[FloatArray, float]:
    """Return a minimum and its sum of squares; a step that does not help is halved, twice."""
    difference, damping = 0.1, 0.01
    identity = np.eye(len(x))
    current = errors(x)
    for _ in range(num_rounds):
        columns = [(errors(x + difference * row) - current) / difference for row in identity]
        jacobian = np.stack(columns, axis=1)
        curvature = jacobian.T @ jacobian + damping * identity
        step = -np.linalg.solve(curvature, jacobian.T @ current).clip(-1, 1)
        for fraction in (1.0, 0.5, 0.25):
            trial = errors(x + fraction * step)
            if trial @ trial < current @ current:
                x, current = x + fraction * step, trial
                break
        else:
            break
    return x, float(current @ current)


def draw_like(
    trace: RoutingTrace,
    scales: ScoreScales,
    seed: int,
    *,
    num_experts: int | None = None,
    top_k: int | None = None,
    num_layers: int | None = None,
) -> RoutingTrace:
    """Draw a trace with another's domains and lengths, and its shape where none is given."""
    routing = SyntheticRouting(
        num_experts=num_experts or trace.num_experts,
        top_k=top_k or trace.top_k,
        num_layers=num_layers or trace.num_layers,
        num_domains=len(trace.domain_names),
        scales=scales,
        seed=seed,
    )
    return routing.draw(trace.domain, np.diff(trace.offsets))


def report_fit(
    trace: RoutingTrace, scales: ScoreScales, seeds: Sequence[int] = REPORT_SEEDS
) -> dict[str, dict[str, Any]]:
    """Compare the statistics of a recorded trace and of drawn ones, with seeds not fitted to.

    Returns:
        Statistic -> `stated`, `recorded`, `is_fitted` and [mean, min, max] over the seeds of
        `synthetic_32x4` (named by the trace's shape) and `synthetic_128x8`.
    """
    shapes = {(trace.num_experts, trace.top_k), (128, 8)}
    drawn = {
        f"synthetic_{num_experts}x{top_k}": [
            measure_statistics(draw_like(trace, scales, seed, num_experts=num_experts, top_k=top_k))
            for seed in seeds
        ]
        for num_experts, top_k in sorted(shapes)
    }
    return {
        name: {
            "stated": STATED.get(name),
            "recorded": recorded,
            "is_fitted": name in FITTED_STATISTICS,
            **{
                shape: _mean_and_range([s[name] for s in samples])
                for shape, samples in drawn.items()
            },
        }
        for name, recorded in measure_statistics(trace).items()
    }


def _mean_and_range(values: Sequence[float]) -> list[float]:
    return [float(np.mean(values)), min(values), max(values)]


def main() -> None:
    """Fit the scales to a recorded trace and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True, help="recorded routing, an .npz")
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--quick", action="store_true", help="report FITTED without a fit")
    args = parser.parse_args()

    trace = RoutingTrace.load(args.trace)
    scales = FITTED if args.quick else fit_scales(trace)
    report = report_fit(trace, scales)
    print(f"{hardware_line()}\n{scales}")
    shapes = [column for column in next(iter(report.values())) if column.startswith("synthetic")]
    print(f"{'':20} {'stated':>7} {'recorded':>9}", *(f"{shape:>24}" for shape in shapes))
    for name, row in report.items():
        stated = "" if row["stated"] is None else f"{row['stated']:.2f}"
        cells = ["{:8.3f} [{:6.3f},{:6.3f}]".format(*row[shape]) for shape in shapes]
        fitted = "*" if row["is_fitted"] else " "
        print(f"{name:19}{fitted} {stated:>7} {row['recorded']:9.3f}", *cells)
    print("* fitted, on 32 experts and top-4 only; [min, max] of other seeds")
    if args.json:
        command = "python -m bench.synthetic --trace FILE.npz --json FILE"
        seeds = {"fit_seed": FIT_SEED, "report_seeds": REPORT_SEEDS}
        columns = {"command": command, "scales": asdict(scales), **seeds, "statistics": report}
        write_json(args.json, columns)


if __name__ == "__main__":
    main()
