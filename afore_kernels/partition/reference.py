"""The literal twin of `partition_pairs`: one pair, one slot, one row at a time."""

from __future__ import annotations

import numpy as np

from afore_kernels.gemm.tiles import IntegerArray, PairTiles, TileSchedule
from afore_kernels.partition.intervals import SlotIntervals
from afore_kernels.partition.pack import Partition


def reference_partition(
    expert_ids: IntegerArray, intervals: SlotIntervals, schedule: TileSchedule
) -> Partition:
    """Return what `partition_pairs` must return, by definition."""
    flat = expert_ids.reshape(-1).tolist()
    num_experts = intervals.demand.size
    seen = [0] * num_experts
    num_invalid = 0
    sorted_pair = np.full(schedule.num_rows, len(flat), np.int32)
    pair_row = np.full(len(flat), -1, np.int32)
    for pair, expert in enumerate(flat):
        if not 0 <= expert < num_experts:
            num_invalid += 1
            continue
        ordinal = seen[expert]
        seen[expert] += 1
        for slot in range(intervals.expert.size):
            lo, hi = intervals.lo[slot], intervals.hi[slot]
            if intervals.expert[slot] == expert and lo <= ordinal < hi:
                pair_row[pair] = schedule.row_starts[slot] + ordinal - lo
                sorted_pair[pair_row[pair]] = pair
    differing = [e for e in range(num_experts) if seen[e] != intervals.demand[e]]
    return Partition(
        tiles=PairTiles(schedule, sorted_pair, pair_row),
        num_invalid=num_invalid,
        mismatched_expert=differing[0] if differing else -1,
    )
