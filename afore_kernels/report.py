"""What a run did to the workers' load, and how well its weight copies were hidden (section 7.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from afore_kernels.errors import ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Means over the targets of one run.

    Attributes:
        num_targets: targets that ran.
        num_copies: new replicas, over all targets.
        pair_imbalance: largest over mean pairs per worker.
        tile_imbalance: largest over mean tiles per worker.
        raw_copy_us: submission to completion of a target's copies (Fig. 11's D), None if nothing
            was copied.
        lookahead_us: submission to first use of a target's copies (Fig. 11's W), or None.
        exposed_us: wait for copies, 0 for a target that needs none.
    """

    num_targets: int
    num_copies: int
    pair_imbalance: float
    tile_imbalance: float
    raw_copy_us: float | None
    lookahead_us: float | None
    exposed_us: float


def imbalance(loads: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Largest over mean load per worker of each target; 1 is perfect balance.

    Args:
        loads: pairs or tiles, [num_targets, num_workers].

    Returns:
        float64, one ratio in [1, num_workers] for each target that has any load.

    Raises:
        ShapeError: if `loads` is not two-dimensional.

    >>> imbalance(np.array([[3, 1], [0, 0], [2, 2]])).tolist()
    [1.5, 1.0]
    """
    if loads.ndim != 2:
        raise ShapeError(f"loads has shape {loads.shape}, expected [num_targets, num_workers]")
    busy = loads[loads.sum(axis=1) > 0]
    ratios: npt.NDArray[np.float64] = busy.max(axis=1) / busy.mean(axis=1)
    return ratios


def summarise(per_target: npt.NDArray[Any]) -> RunSummary:
    """Summarise the rows of `Timeline.per_target` of a run of at least one target."""

    def mean_us(name: str) -> float | None:
        known = per_target[name][~np.isnan(per_target[name])]
        return float(known.mean()) if known.size else None

    return RunSummary(
        num_targets=len(per_target),
        num_copies=int(per_target["num_copies"].sum()),
        pair_imbalance=float(imbalance(per_target["pairs_per_worker"]).mean()),
        tile_imbalance=float(imbalance(per_target["tiles_per_worker"]).mean()),
        raw_copy_us=mean_us("raw_copy_us"),
        lookahead_us=mean_us("lookahead_us"),
        exposed_us=float(np.nan_to_num(per_target["exposed_us"]).mean()),
    )


def comparison_table(
    summaries: Mapping[str, RunSummary], tokens_per_s: Mapping[str, float]
) -> Table:
    """One column per run, one row per quantity.

    Args:
        summaries: by the name of the run.
        tokens_per_s: throughput, by the same names.
    """

    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f} us"

    runs = summaries.values()
    table = Table(caption="imbalance: largest over mean load, 1 is perfect")
    table.add_column("mean over targets")
    for name in summaries:
        table.add_column(name, justify="right")
    rows = {
        "pair imbalance": [f"{run.pair_imbalance:.2f}" for run in runs],
        "tile imbalance": [f"{run.tile_imbalance:.2f}" for run in runs],
        "copies (of targets)": [f"{run.num_copies} ({run.num_targets})" for run in runs],
        "raw copy time": [us(run.raw_copy_us) for run in runs],
        "lookahead window": [us(run.lookahead_us) for run in runs],
        "exposed wait": [us(run.exposed_us) for run in runs],
        "tokens/s": [f"{tokens_per_s[name]:.0f}" for name in summaries],
    }
    for quantity, values in rows.items():
        table.add_row(quantity, *values)
    return table
