"""Workers by load: one sorted array that both searches of the planner scan.

A worker's *key* is `load << worker_bits | worker`. Ascending keys are workers from the lightest to
the heaviest, ties to the lower worker; a move displaces two keys and leaves the others in order.
"""

from __future__ import annotations

import numpy as np

from afore_kernels.runtime.arrays import Int64Array, planner_compiled

NUM_BUCKETS = 1024
_SHELL_GAPS = (57, 23, 10, 4, 1)


@planner_compiled
def sort_by_load(
    keys: Int64Array, buckets: Int64Array, tile_load: Int64Array, worker_bits: int
) -> None:
    """Write the keys of all workers in ascending order.

    Loads that lie close together, as they do after the first targets, are counted; others compared.

    Args:
        keys: out, int64 [num_workers].
        buckets: working array, int64 [NUM_BUCKETS].
        tile_load: tiles per worker, below 2 ** (63 - worker_bits), int64 [num_workers].
        worker_bits: bits that hold a worker.
    """
    lightest, heaviest = tile_load[0], tile_load[0]
    for worker in range(keys.size):
        lightest = min(lightest, tile_load[worker])
        heaviest = max(heaviest, tile_load[worker])
    if heaviest - lightest < min(NUM_BUCKETS, 4 * keys.size):
        _counting_sort(keys, buckets, tile_load, lightest, heaviest, worker_bits)
    else:
        _shell_sort(keys, tile_load, worker_bits)


@planner_compiled
def _counting_sort(
    keys: Int64Array,
    buckets: Int64Array,
    tile_load: Int64Array,
    lightest: int,
    heaviest: int,
    worker_bits: int,
) -> None:
    for bucket in range(heaviest - lightest + 1):
        buckets[bucket] = 0
    for worker in range(keys.size):
        buckets[tile_load[worker] - lightest] += 1
    start = np.int64(0)
    for bucket in range(heaviest - lightest + 1):
        count = buckets[bucket]
        buckets[bucket] = start
        start += count
    for worker in range(keys.size):
        bucket = tile_load[worker] - lightest
        keys[buckets[bucket]] = tile_load[worker] << worker_bits | worker
        buckets[bucket] += 1


@planner_compiled
def _shell_sort(keys: Int64Array, tile_load: Int64Array, worker_bits: int) -> None:
    for worker in range(keys.size):
        keys[worker] = tile_load[worker] << worker_bits | worker
    for gap in _SHELL_GAPS:
        for i in range(gap, keys.size):
            key = keys[i]
            j = i - gap
            while j >= 0 and keys[j] > key:
                keys[j + gap] = keys[j]
                j -= gap
            keys[j + gap] = key


@planner_compiled
def replace_key(keys: Int64Array, index: int, key: int) -> None:
    """Put `key` in the place of `keys[index]` and restore the order."""
    while index > 0 and keys[index - 1] > key:
        keys[index] = keys[index - 1]
        index -= 1
    last = keys.size - 1
    while index < last and keys[index + 1] < key:
        keys[index] = keys[index + 1]
        index += 1
    keys[index] = key


@planner_compiled
def index_of(keys: Int64Array, key: int) -> int:
    """Return the position of a key that is there."""
    low, high = 0, keys.size - 1
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@planner_compiled
def index_of_displaced(keys: Int64Array, index: int, key: int) -> int:
    """Return where `keys[index] = key` is after another key has passed over it, or has not."""
    return index if keys[index] == key else index + 1


@planner_compiled
def start_of_ties(keys: Int64Array, stop: int, worker_bits: int) -> int:
    """Return where the workers begin that carry as much as the one before `stop`.

    Scanning heaviest first with ties to the lower worker is: from here to `stop` upwards, then the
    same with this as `stop`.
    """
    first_key = keys[stop - 1] >> worker_bits << worker_bits
    start = stop - 1
    while start > 0 and keys[start - 1] >= first_key:
        start -= 1
    return start
