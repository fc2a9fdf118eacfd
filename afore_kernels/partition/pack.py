"""Pack: select the local pairs of the gathered routing and give each its row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afore_kernels.gemm.tiles import IntegerArray, PairTiles, TileSchedule
from afore_kernels.partition.intervals import SlotIntervals


@dataclass(frozen=True, eq=False)
class Partition:
    """The pairs of one worker, and what the routing revealed about itself.

    Attributes:
        tiles: which pair fills which row.
        num_invalid: pairs of the whole routing with an id outside [0, num_experts).
        mismatched_expert: first expert whose pair count differs from the plan's demand, or -1; the
            result is then not the target's and must not be returned.
    """

    tiles: PairTiles
    num_invalid: int
    mismatched_expert: int


def partition_pairs(
    expert_ids: IntegerArray, intervals: SlotIntervals, schedule: TileSchedule
) -> Partition:
    """Select the pairs whose ordinal lies in a local slot's interval (section 6.2).

    A pair past the plan's demand lies in no interval, so a wrong routing never leaves its rows.

    Args:
        expert_ids: gathered ids in rank order, any integer dtype and shape.
        intervals: the worker's, from the target's plan.
        schedule: `intervals.tile_schedule(plan.tile_m)`, built before the routing arrived.

    Raises:
        ShapeError: if the ids are not integers.
    """
    slot_of_expert = np.full(intervals.demand.size, -1, np.int32)
    bound_slots = np.flatnonzero(intervals.expert >= 0)
    slot_of_expert[intervals.expert[bound_slots]] = bound_slots
    tiles, counts = PairTiles.select(schedule, expert_ids, slot_of_expert, intervals.lo)
    mismatched = np.flatnonzero(counts != intervals.demand)
    return Partition(
        tiles=tiles,
        num_invalid=expert_ids.size - int(counts.sum()),
        mismatched_expert=int(mismatched[0]) if mismatched.size else -1,
    )
