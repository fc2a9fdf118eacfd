"""The measured lookahead window."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore_kernels.runtime.window import (
    NUM_SAMPLES,
    WindowEstimate,
    observe_lookahead,
    window_us,
)


def observe(estimate: WindowEstimate, *lookahead_ns: int) -> None:
    observe_lookahead(estimate, np.array(lookahead_ns, np.int64))


def test_configured_window_holds_until_every_worker_has_measured() -> None:
    estimate = WindowEstimate.allocate()
    assert window_us(estimate, 2000.0) == 2000.0
    observe(estimate, 5000, 0)
    assert window_us(estimate, 2000.0) == 2000.0
    observe(estimate, 5000, 3000)
    assert window_us(estimate, 2000.0) == 3.0


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=3 * NUM_SAMPLES))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_is_the_lower_median_of_the_last_samples(samples: list[int]) -> None:
    estimate = WindowEstimate.allocate()
    for index, sample in enumerate(samples):
        observe(estimate, sample, sample + 1)
        recent = samples[max(0, index + 1 - NUM_SAMPLES) : index + 1]
        assert window_us(estimate, 0.0) == pytest.approx(statistics.median_low(recent) / 1e3)


def test_outliers_do_not_move_it() -> None:
    estimate = WindowEstimate.allocate()
    for index in range(3 * NUM_SAMPLES):
        observe(estimate, 10**12 if index % 3 == 0 else 1000 + index % 5)
    assert 1.0 <= window_us(estimate, 0.0) < 1.005


def test_follows_a_lasting_change() -> None:
    estimate = WindowEstimate.allocate()
    for _ in range(NUM_SAMPLES):
        observe(estimate, 9000)
    for _ in range(NUM_SAMPLES // 2 + 1):
        observe(estimate, 4000)
    assert window_us(estimate, 0.0) == 4.0
