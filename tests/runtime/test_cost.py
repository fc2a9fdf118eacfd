"""The cost formulas by hand, compiled and in Python."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from afore_kernels.config import TierConfig
from afore_kernels.runtime import cost as cost_module
from afore_kernels.runtime.cost import (
    CostModel,
    copy_time_us,
    exposed_time_us,
    ffn_time_us,
    net_gain_us,
)


def as_counts(*values: int) -> cost_module.Int64Array:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("slot_time_us", "expected"),
    [
        (0.0, 80.0),  # worker 0: 8 tiles (Eq. 5)
        (30.0, 190.0),  # worker 1: 7 tiles in 4 slots
    ],
)
def test_ffn_time_is_that_of_the_slowest_worker(slot_time_us: float, expected: float) -> None:
    cost = CostModel(10.0, slot_time_us, 0.0, 0.0)
    arguments = (as_counts(8, 7, 0), as_counts(1, 4, 0), cost)
    assert ffn_time_us(*arguments) == expected
    assert ffn_time_us.py_func(*arguments) == expected


def test_ffn_time_of_an_idle_tier_is_0() -> None:
    assert ffn_time_us(as_counts(0, 0), as_counts(0, 0), CostModel(10.0, 5.0, 1.0, 1.0)) == 0.0


@pytest.mark.parametrize(
    ("copies_in", "copies_out", "expected"),
    [
        ((0, 0, 0), (0, 0, 0), 0.0),
        ((1, 1, 1), (1, 1, 1), 50.0),  # all side by side
        ((2, 0, 0), (0, 1, 1), 100.0),  # a shared destination
        ((1, 1, 1), (3, 0, 0), 150.0),  # a shared source
    ],
)
def test_copy_time_is_that_of_the_busiest_link(
    copies_in: tuple[int, ...], copies_out: tuple[int, ...], expected: float
) -> None:
    arguments = (as_counts(*copies_in), as_counts(*copies_out), CostModel(1.0, 1.0, 50.0, 1.0))
    assert copy_time_us(*arguments) == expected
    assert copy_time_us.py_func(*arguments) == expected


@pytest.mark.parametrize(
    ("raw", "window", "exposed"),
    [(0, 0, 0), (40, 50, 0), (50, 50, 0), (60, 50, 10), (9, np.inf, 0)],
)
def test_only_the_time_beyond_the_window_is_exposed(
    raw: float, window: float, exposed: float
) -> None:
    assert exposed_time_us(float(raw), float(window)) == exposed


def test_net_gain_subtracts_the_exposed_time_from_the_saving() -> None:
    assert net_gain_us(100.0, 60.0, 25.0) == 15.0
    assert net_gain_us(100.0, 100.0, 25.0) == -25.0


def test_estimates_come_from_the_configuration_as_floats() -> None:
    config = TierConfig(
        num_workers=2,
        tile_time_us=3,
        slot_time_us=4,
        copy_time_us=5,
        window_us=6,
        overlap_copies=False,
    )
    cost = CostModel.from_config(config)
    assert cost == (3.0, 4.0, 5.0, 6.0)
    assert all(isinstance(estimate, float) for estimate in cost)


def test_examples_in_the_docstrings() -> None:
    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner()
    for function in (ffn_time_us, copy_time_us, exposed_time_us, net_gain_us):
        for example in finder.find(function.py_func, globs=vars(cost_module)):
            runner.run(example)
    results = runner.summarize(verbose=False)
    assert results.attempted >= 4
    assert results.failed == 0
