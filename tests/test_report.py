from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from afore_kernels.errors import ShapeError
from afore_kernels.report import RunSummary, comparison_table, imbalance, summarise
from afore_kernels.runtime.timeline import per_target_dtype

NAN = float("nan")


def make_rows(num_targets: int, **columns) -> np.ndarray:
    rows = np.zeros(num_targets, per_target_dtype(2))
    for name, values in columns.items():
        rows[name] = values
    return rows


def test_imbalance_by_hand():
    loads = np.array([[4, 2, 0], [3, 3, 3], [0, 0, 9]])
    np.testing.assert_allclose(imbalance(loads), [2.0, 1.0, 3.0])


def test_imbalance_leaves_idle_targets_out():
    assert imbalance(np.array([[0, 0], [3, 1]])).tolist() == [1.5]
    assert imbalance(np.zeros((0, 4), np.int64)).size == 0


def test_imbalance_of_another_shape_is_rejected():
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        imbalance(np.ones(3, np.int64))


def test_summary_by_hand():
    rows = make_rows(
        2,
        pairs_per_worker=[[6, 2], [4, 4]],
        tiles_per_worker=[[2, 1], [1, 3]],
        static_pairs_per_worker=[[8, 0], [8, 0]],
        num_copies=[3, 0],
        raw_copy_us=[40.0, NAN],
        lookahead_us=[90.0, NAN],
        exposed_us=[10.0, NAN],
    )
    assert summarise(rows) == RunSummary(
        num_targets=2,
        num_copies=3,
        pair_imbalance=(1.5 + 1.0) / 2,
        tile_imbalance=(2 / 1.5 + 3 / 2) / 2,
        raw_copy_us=40.0,
        lookahead_us=90.0,
        exposed_us=5.0,
    )


def test_summary_without_copies():
    rows = make_rows(
        1,
        pairs_per_worker=[[1, 1]],
        tiles_per_worker=[[1, 1]],
        raw_copy_us=NAN,
        lookahead_us=NAN,
        exposed_us=NAN,
    )
    summary = summarise(rows)
    assert (summary.raw_copy_us, summary.lookahead_us, summary.exposed_us) == (None, None, 0.0)


def test_table_has_a_column_per_run():
    common = {"num_targets": 8, "pair_imbalance": 1.25}
    summaries = {
        "static": RunSummary(
            **common,
            num_copies=0,
            tile_imbalance=1.75,
            raw_copy_us=None,
            lookahead_us=None,
            exposed_us=0.0,
        ),
        "afore": RunSummary(
            **common,
            num_copies=5,
            tile_imbalance=1.5,
            raw_copy_us=30.4,
            lookahead_us=91.0,
            exposed_us=2.0,
        ),
    }
    output = io.StringIO()
    table = comparison_table(summaries, {"static": 120.0, "afore": 130.6})
    Console(file=output, width=100).print(table)
    lines = [line.replace("│", " ").split() for line in output.getvalue().splitlines()]
    assert ["tile", "imbalance", "1.75", "1.50"] in lines
    assert ["copies", "(of", "targets)", "0", "(8)", "5", "(8)"] in lines
    assert ["raw", "copy", "time", "-", "30", "us"] in lines
    assert ["tokens/s", "120", "131"] in lines
