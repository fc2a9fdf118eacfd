"""The scheduler's cost model: FFN time, copy time and net gain (paper Eq. 5-8).

The functions are compiled for the planner's loop and callable from Python. numba's on-disk cache
of a compiled caller does not notice an edit of this file: remove `__pycache__` after one.
"""

from __future__ import annotations

from typing import NamedTuple

from afore_kernels.config import TierConfig
from afore_kernels.runtime.arrays import Int64Array, planner_compiled


class CostModel(NamedTuple):
    """Estimates the net gain is computed from, all float, in microseconds.

    Attributes:
        tile_time_us: time of one tile on one worker (the paper's beta_tile).
        slot_time_us: time per expert a worker runs, whatever its tiles: at decode, time follows the
            weight bytes that are read. 0 gives the paper's F.
        copy_time_us: time of one expert's weights over one link.
        window_us: lookahead window W_t, the copy time that the microbatches in flight hide.
    """

    tile_time_us: float
    slot_time_us: float
    copy_time_us: float
    window_us: float

    @classmethod
    def from_config(cls, config: TierConfig) -> CostModel:
        """Take the estimates of `config`.

        `overlap_copies=False` does not shorten the window: that ablation moves the copies and keeps
        the same scheduler (section 7.4). A scheduler that knows is `window_us=0`.
        """
        return cls(
            float(config.tile_time_us),
            float(config.slot_time_us),
            float(config.copy_time_us),
            float(config.window_us),
        )


@planner_compiled
def ffn_time_us(tile_load: Int64Array, active_slots: Int64Array, cost: CostModel) -> float:
    """Estimate the FFN time F of an assignment: its slowest worker (section 5.1, before Eq. 8).

    Args:
        tile_load: T_w, tiles per worker, int64 [num_workers].
        active_slots: slots with at least one tile per worker, int64 [num_workers].
        cost: the estimates.

    Returns:
        Microseconds.

    >>> import numpy as np
    >>> cost = CostModel(10.0, 3.0, 0.0, 0.0)
    >>> ffn_time_us(np.array([4, 3]), np.array([1, 5]), cost)
    45.0
    """
    slowest = 0.0
    for worker in range(tile_load.size):
        time = cost.tile_time_us * tile_load[worker] + cost.slot_time_us * active_slots[worker]
        slowest = max(slowest, time)
    return slowest


@planner_compiled
def copy_time_us(copies_in: Int64Array, copies_out: Int64Array, cost: CostModel) -> float:
    """Estimate the raw time M of a copy list on its busiest link (Eq. 6).

    Copies of different workers run side by side; those that share a destination, or a source (the
    worker of the expert's primary), share its link and run one after another.

    Args:
        copies_in: copies per destination worker, int64 [num_workers].
        copies_out: copies per source worker, int64 [num_workers].
        cost: the estimates.

    Returns:
        Microseconds.

    >>> import numpy as np
    >>> cost = CostModel(0.0, 0.0, 50.0, 0.0)
    >>> copy_time_us(np.array([1, 2, 0]), np.array([0, 0, 3]), cost)
    150.0
    """
    busiest = 0
    for worker in range(copies_in.size):
        busiest = max(busiest, copies_in[worker], copies_out[worker])
    return cost.copy_time_us * busiest


@planner_compiled
def exposed_time_us(raw_copy_us: float, window_us: float) -> float:
    """Return the part O_t of the raw copy time that the window W_t does not hide (Eq. 7).

    >>> exposed_time_us(150.0, 100.0), exposed_time_us(150.0, 400.0)
    (50.0, 0.0)
    """
    return max(0.0, raw_copy_us - window_us)


@planner_compiled
def net_gain_us(baseline_us: float, candidate_us: float, exposed_us: float) -> float:
    """Return G_t, the FFN time a candidate saves minus the copy time it exposes (Eq. 8).

    >>> net_gain_us(400.0, 250.0, 50.0)
    100.0
    """
    return baseline_us - candidate_us - exposed_us
