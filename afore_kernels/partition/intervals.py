"""Intervals: the ordinals of each expert that every local slot runs under a plan (Eq. 11)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afore_kernels.gemm.tiles import Int32Array, TileSchedule
from afore_kernels.plan import Plan, PrimaryPlacement


@dataclass(frozen=True, eq=False)
class SlotIntervals:
    """What each local slot of one worker runs: ordinals [lo, hi) of its expert.

    Slots are the worker's primaries in expert order, then its redundant slots.

    Attributes:
        expert: expert of each slot, int32 [num_slots], -1 for an empty slot.
        lo: first ordinal, int32 [num_slots].
        hi: one past the last ordinal, int32 [num_slots]; equal to `lo` if the slot runs nothing.
        demand: pairs of each expert under the plan, int32 [num_experts].
    """

    expert: Int32Array
    lo: Int32Array
    hi: Int32Array
    demand: Int32Array

    def tile_schedule(self, tile_m: int) -> TileSchedule:
        """Lay out the slots' pairs in tiles of `tile_m`, the plan's."""
        return TileSchedule.from_pair_counts(self.hi - self.lo, tile_m)


def _replica_pairs(plan: Plan, num_workers: int) -> Int32Array:
    """Pairs that replicas on workers below `num_workers` run, int32 [num_experts]."""
    expert, pairs = plan.slot_expert[:num_workers], plan.slot_pairs[:num_workers]
    total = np.zeros_like(plan.demand)
    np.add.at(total, expert[expert >= 0], pairs[expert >= 0])
    return total


def pair_intervals(plan: Plan, placement: PrimaryPlacement, worker: int) -> SlotIntervals:
    """Derive the ordinals that the slots of `worker` run (Eq. 11).

    The replicas of an expert, in worker order, own consecutive intervals from ordinal 0; its
    primary owns the remainder.

    Args:
        plan: a valid plan of `placement`.
        placement: primaries of the tier.
        worker: whose slots.
    """
    primaries = np.array(placement.primaries(worker), np.int32)
    replicas = plan.slot_expert[worker]
    primary_lo = _replica_pairs(plan, placement.num_workers)[primaries]
    replica_lo = np.where(replicas >= 0, _replica_pairs(plan, worker)[replicas], np.int32(0))
    return SlotIntervals(
        expert=np.concatenate([primaries, replicas]),
        lo=np.concatenate([primary_lo, replica_lo]),
        hi=np.concatenate([plan.demand[primaries], replica_lo + plan.slot_pairs[worker]]),
        demand=plan.demand,
    )
