"""Pack: select the local pairs of the gathered routing and give each its row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.tiles import IntegerArray, PairTiles, TileSchedule, number_pairs
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
    if not np.issubdtype(expert_ids.dtype, np.integer):
        raise ShapeError(f"expert_ids must be integers, got {expert_ids.dtype}")
    num_experts = intervals.demand.size
    ordinals, counts = number_pairs(expert_ids, num_experts)

    slot_of_expert = np.full(num_experts, -1, np.int32)
    bound_slots = np.flatnonzero(intervals.expert >= 0)
    slot_of_expert[intervals.expert[bound_slots]] = bound_slots

    pairs = np.flatnonzero(ordinals >= 0)
    slots = slot_of_expert[expert_ids.reshape(-1)[pairs]]
    pairs, slots = pairs[slots >= 0], slots[slots >= 0]
    ordinals = ordinals[pairs]
    is_local = (intervals.lo[slots] <= ordinals) & (ordinals < intervals.hi[slots])
    pairs, slots, ordinals = pairs[is_local], slots[is_local], ordinals[is_local]

    pair_row = np.full(expert_ids.size, -1, np.int32)
    pair_row[pairs] = schedule.row_starts[slots] + ordinals - intervals.lo[slots]
    mismatched = np.flatnonzero(counts != intervals.demand)
    return Partition(
        tiles=PairTiles.from_pair_rows(schedule, pair_row),
        num_invalid=expert_ids.size - int(counts.sum()),
        mismatched_expert=int(mismatched[0]) if mismatched.size else -1,
    )
