"""Workers by load: both sorts, and the order after a move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore_kernels.runtime.load_order import (
    NUM_BUCKETS,
    index_of,
    replace_key,
    sort_by_load,
    start_of_ties,
)

BITS = 11


def sorted_keys(load: np.ndarray) -> np.ndarray:
    keys = np.full(load.size, -1, np.int64)
    sort_by_load(keys, np.full(NUM_BUCKETS, 7, np.int64), load, BITS)
    return keys


def workers(keys: np.ndarray) -> list[int]:
    return [int(key) & (1 << BITS) - 1 for key in keys]


loads = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**42)), min_size=1, max_size=200).map(
    lambda values: np.array(values, np.int64)
)


@given(loads)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_lightest_first_with_ties_to_the_lower_worker(load: np.ndarray) -> None:
    assert workers(sorted_keys(load)) == sorted(range(load.size), key=lambda w: (load[w], w))


@pytest.mark.parametrize("spread", [0, 1, 3, NUM_BUCKETS - 1, NUM_BUCKETS, 2**40])
def test_both_sorts_at_the_edge_between_them(spread: int) -> None:
    load = np.full(1024, 10, np.int64)
    load[::3] += spread
    assert workers(sorted_keys(load)) == sorted(range(1024), key=lambda w: (load[w], w))


@given(loads, st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_order_holds_after_any_replacement(load: np.ndarray, data: st.DataObject) -> None:
    keys = sorted_keys(load)
    worker = data.draw(st.integers(0, load.size - 1))
    index = index_of(keys, load[worker] << BITS | worker)
    assert workers(keys)[index] == worker
    load[worker] = data.draw(st.integers(0, 2**42))
    replace_key(keys, index, load[worker] << BITS | worker)
    np.testing.assert_array_equal(keys, sorted_keys(load))


def test_heaviest_first_visits_ties_from_the_lower_worker() -> None:
    load = np.array([3, 9, 3, 9, 9, 0], np.int64)
    keys, visited = sorted_keys(load), []
    stop = keys.size
    while stop > 0:
        start = start_of_ties(keys, stop, BITS)
        visited += workers(keys)[start:stop]
        stop = start
    assert visited == [1, 3, 4, 0, 2, 5]
