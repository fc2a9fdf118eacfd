"""The lookahead window W_t (section 5.1, Eq. 7), measured: how long copies have before their use.

Every worker notes, per target, the time from submitting a plan's copies to its first use of the
slots. The scheduler keeps the shortest over the workers, target by target, and plans with the
median of the last ones: a stalled client makes one target's window long, and a median of many does
not follow it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from afore_kernels.config import TierConfig
from afore_kernels.runtime.arrays import Int64Array, planner_compiled
from afore_kernels.runtime.shared import Field

NUM_SAMPLES = 31


def fields(tier: TierConfig) -> dict[str, Field]:
    """The shared array: each worker's latest lookahead in ns, 0 = none yet, int64 [num_workers]."""
    return {"lookahead_ns": Field(np.int64, (tier.num_workers,))}


class WindowEstimate(NamedTuple):
    """The last lookaheads and their median.

    Attributes:
        recent_ns: a ring of samples, int64 [NUM_SAMPLES].
        sorted_ns: the samples in ascending order, int64 [NUM_SAMPLES].
        num_seen: samples ever taken, int64 [1].
    """

    recent_ns: Int64Array
    sorted_ns: Int64Array
    num_seen: Int64Array

    @classmethod
    def allocate(cls) -> WindowEstimate:
        """Return an estimate without samples."""
        samples = np.zeros(NUM_SAMPLES, np.int64)
        return cls(samples, samples.copy(), np.zeros(1, np.int64))


@planner_compiled
def observe_lookahead(estimate: WindowEstimate, lookahead_ns: Int64Array) -> None:
    """Take the shortest lookahead of the workers as a sample, once all have one.

    Args:
        estimate: in and out.
        lookahead_ns: latest of each worker, 0 = none yet, int64 [num_workers].
    """
    shortest = lookahead_ns[0]
    for worker in range(1, lookahead_ns.size):
        shortest = min(shortest, lookahead_ns[worker])
    if shortest <= 0:
        return
    recent, ascending = estimate.recent_ns, estimate.sorted_ns
    position = estimate.num_seen[0] % recent.size
    last = min(estimate.num_seen[0], recent.size)
    if last == recent.size:  # the oldest leaves
        oldest = 0
        while ascending[oldest] != recent[position]:
            oldest += 1
        last -= 1
        for i in range(oldest, last):
            ascending[i] = ascending[i + 1]
    while last > 0 and ascending[last - 1] > shortest:
        ascending[last] = ascending[last - 1]
        last -= 1
    ascending[last] = shortest
    recent[position] = shortest
    estimate.num_seen[0] += 1


@planner_compiled
def window_us(estimate: WindowEstimate, initial_us: float) -> float:
    """Return the median lookahead in microseconds, `initial_us` before there is one.

    Of an even number of samples the lower of the two in the middle: copies that are thought hidden
    and are not cost more than those left out.
    """
    num_samples = min(estimate.num_seen[0], estimate.sorted_ns.size)
    if num_samples == 0:
        return initial_us
    return float(estimate.sorted_ns[(num_samples - 1) // 2] / 1e3)
