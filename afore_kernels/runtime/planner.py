"""The per-microbatch planner: Algorithm 1 of the paper (section 5.2), compiled.

`plan_core` is the form for the scheduler's loop: no allocation, no Python objects, no GIL.
`plan_microbatch` is the pure form for everybody else. `planner_oracle` is the same algorithm,
written literally; both return the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import ShapeError
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.arrays import Int64Array, planner_compiled
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.load_order import sort_by_load
from afore_kernels.runtime.placement import (
    NONE,
    Candidate,
    LayerState,
    count_active_slots,
    list_shared,
    load_placement,
)
from afore_kernels.runtime.rebalance import rebalance_beyond, rebalance_within
from afore_kernels.runtime.refine import refine_beyond


class Limits(NamedTuple):
    """What bounds a plan.

    Attributes:
        tile_m: pairs per tile (Eq. 4).
        copy_budget: B, most new replicas per target.
        compactness_threshold: theta, a move must carry more tiles than this.
        is_refined: look for better moves than stage 3's where it leaves a worker above the mean
            (`refine`); beyond the paper.
    """

    tile_m: int
    copy_budget: int
    compactness_threshold: int
    is_refined: bool = False

    @classmethod
    def from_config(cls, moe: MoEConfig, tier: TierConfig) -> Limits:
        """Take the limits of a tier.

        The static policy is a budget of 0: from an empty slot table no replica ever appears, so
        every pair stays on its primary.
        """
        budget = 0 if tier.policy == "static" else tier.effective_copy_budget
        return cls(moe.tile_m, budget, tier.compactness_threshold, tier.refine_plans)


@planner_compiled
def _is_uneven(tile_load: Int64Array, threshold: int) -> bool:
    """Return whether any pair of workers differs enough for a move of more than theta tiles."""
    lightest, heaviest = tile_load[0], tile_load[0]
    for worker in range(1, tile_load.size):
        lightest = min(lightest, tile_load[worker])
        heaviest = max(heaviest, tile_load[worker])
    return bool((heaviest - lightest) >> 1 > threshold)


@planner_compiled
def _apportion(
    demand: Int32Array,
    tile_m: int,
    threshold: int,
    previous_primary: Int32Array,
    primary_starts: Int32Array,
    tile_load: Int64Array,
    tiles: Int64Array,
    remainders: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
    first_shared: Int32Array,
    next_shared: Int32Array,
    replica_worker: Int32Array,
) -> None:
    """Rescale every expert's tiles to `demand` in the proportions they had (stage 1).

    Largest remainder: replica i of n_i tiles, K' in all, gets floor(k * n_i / K'), and the tiles
    left over go to the largest remainders k * n_i mod K', ties to the lower worker. An expert
    without tiles so far, or with no more than theta now, starts on its primary. The workers' loads
    are counted on the way.

    Args:
        previous_primary: tiles of the primaries before, int32 [num_experts].
        tiles: in, those of the redundant replicas before; out, those of all replicas.
    """
    if tile_m & (tile_m - 1) == 0:
        shift = 0
        while 1 << shift < tile_m:
            shift += 1
        for expert in range(demand.size):
            tiles[expert] = (np.int64(demand[expert]) + (tile_m - 1)) >> shift
    else:
        for expert in range(demand.size):
            tiles[expert] = (np.int64(demand[expert]) + (tile_m - 1)) // tile_m
    for worker in range(tile_load.size):
        # Unsigned: a signed index is compared with 0 each time, as Python's may be negative.
        start, stop = np.uint64(primary_starts[worker]), np.uint64(primary_starts[worker + 1])
        load = np.int64(0)
        for expert in range(start, stop):
            load += tiles[expert]
        tile_load[worker] = load
    for worker in range(tile_load.size):
        expert = first_shared[worker]
        while expert != NONE:
            expert_tiles = tiles[expert]
            tiles[expert] = previous_primary[expert]
            _apportion_replicas(
                expert, expert_tiles, threshold, tiles, remainders, first_replica, next_replica
            )
            tile_load[worker] -= expert_tiles
            replica = first_replica[expert]
            while replica != NONE:
                tile_load[replica_worker[replica]] += tiles[replica]
                replica = next_replica[replica]
            expert = next_shared[expert]


@planner_compiled
def _apportion_replicas(
    expert: int,
    expert_tiles: int,
    threshold: int,
    tiles: Int64Array,
    remainders: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
) -> None:
    """Apportion the tiles of one expert with several replicas."""
    first = first_replica[expert]
    previous = np.int64(0)
    replica = first
    while replica != NONE:
        previous += tiles[replica]
        replica = next_replica[replica]

    # All its tiles on the primary before and now: the common case of an idle replica.
    if previous == 0 or expert_tiles <= threshold or tiles[expert] == previous:
        replica = first
        while replica != NONE:
            tiles[replica] = 0
            replica = next_replica[replica]
        tiles[expert] = expert_tiles
        return

    leftover = expert_tiles
    replica = first
    while replica != NONE:
        share = expert_tiles * tiles[replica]
        quotient = share // previous
        tiles[replica] = quotient
        remainders[replica] = share - quotient * previous
        leftover -= quotient
        replica = next_replica[replica]
    for _ in range(leftover):
        largest = first
        replica = next_replica[first]
        while replica != NONE:
            if remainders[replica] > remainders[largest]:
                largest = replica
            replica = next_replica[replica]
        tiles[largest] += 1
        remainders[largest] = -1


@planner_compiled
def _record(
    slot_pairs: Int32Array,
    slot_copy: UInt8Array,
    state: LayerState,
    demand: Int32Array,
    tile_m: int,
    sequence: int,
    replica_worker: Int32Array,
    replica_expert: Int32Array,
    replica_tiles: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
) -> int:
    """Write the selected candidate to the plan and to the state; return the number of copies.

    A replica fills its tiles and the primary runs the remainder. Where the primary has no tile, the
    partial tile falls to the replica on the highest worker, the last of the list (Eq. 2, 11).
    """
    slot_expert, slot_tiles, last_use = state.slot_expert, state.slot_tiles, state.slot_last_use
    primary_tiles = state.primary_tiles
    for expert in range(demand.size):
        primary_tiles[expert] = replica_tiles[expert]
    num_copies = 0
    replica = np.int64(demand.size)
    num_workers, redundant_slots = slot_pairs.shape
    for worker in range(num_workers):
        for slot in range(redundant_slots):
            expert, tiles = replica_expert[replica], replica_tiles[replica]
            is_new = expert != slot_expert[worker, slot]
            num_copies += is_new
            slot_copy[worker, slot] = is_new
            slot_expert[worker, slot] = expert
            slot_tiles[worker, slot] = tiles
            pairs = np.int64(0)
            if tiles > 0:
                last_use[worker, slot] = sequence
                pairs = tiles * tile_m
                if replica_tiles[expert] == 0:
                    pairs -= _unfilled(
                        replica,
                        demand[expert],
                        tile_m,
                        expert,
                        replica_tiles,
                        first_replica,
                        next_replica,
                    )
            slot_pairs[worker, slot] = pairs
            replica += 1
    return num_copies


@planner_compiled
def _unfilled(
    replica: int,
    demand: int,
    tile_m: int,
    expert: int,
    replica_tiles: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
) -> int:
    """Return the empty rows of an expert's tiles if `replica` is the last that has any, else 0."""
    total, last = np.int64(0), np.int64(NONE)
    other = first_replica[expert]
    while other != NONE:
        if replica_tiles[other] > 0:
            total += replica_tiles[other]
            last = np.int64(other)
        other = next_replica[other]
    return int(total * tile_m - demand) if last == replica else 0


@planner_compiled
def plan_core(
    slot_pairs: Int32Array,
    slot_copy: UInt8Array,
    state: LayerState,
    candidate: Candidate,
    demand: Int32Array,
    planning_demand: Int32Array,
    is_protected: UInt8Array,
    limits: Limits,
    cost: CostModel,
    sequence: int,
) -> int:
    """Plan one target and record it in `state`, in place and without allocating (Algorithm 1).

    Afterwards `state.slot_expert` is the plan's slot table.

    Args:
        slot_pairs: out, pairs per replica, int32 [num_workers, redundant_slots].
        slot_copy: out, 1 where the replica must first be copied, uint8, same shape.
        state: in and out, of the target's layer.
        candidate: working arrays of this thread for this placement.
        demand: pairs per expert, all >= 0, int32 [num_experts].
        planning_demand: what to balance for: `demand` itself, or the previous step's (the ablation
            without prefetching); the placement chosen for it then serves `demand` in proportion.
        is_protected: U_t, 1 where a slot must not be rebound, uint8 [num_workers, redundant_slots].
        limits: tile size, copy budget and compactness threshold.
        cost: the estimates of the net gain, all float.
        sequence: the target's position in the tier's order, for the least-recently-used choice.

    Returns:
        Number of copies.
    """
    replica_worker, replica_expert = candidate.replica_worker, candidate.replica_expert
    replica_tiles, tile_load = candidate.replica_tiles, candidate.tile_load
    first_replica, next_replica = candidate.first_replica, candidate.next_replica
    first_shared, next_shared = candidate.first_shared, candidate.next_shared
    primary_starts, remainders = candidate.primary_starts, candidate.remainders
    tile_m, threshold = limits.tile_m, limits.compactness_threshold
    has_replicas = load_placement(
        state.slot_expert,
        state.slot_tiles,
        replica_worker,
        replica_expert,
        replica_tiles,
        first_replica,
        next_replica,
        first_shared,
        next_shared,
    )
    _apportion(
        planning_demand,
        tile_m,
        threshold,
        state.primary_tiles,
        primary_starts,
        tile_load,
        replica_tiles,
        remainders,
        first_replica,
        next_replica,
        first_shared,
        next_shared,
        replica_worker,
    )
    if has_replicas and _is_uneven(tile_load, threshold):
        sort_by_load(candidate.keys, candidate.buckets, tile_load, candidate.worker_bits)
        rebalance_within(candidate, demand.size, threshold)
    if limits.copy_budget > 0 and _is_uneven(tile_load, threshold):
        if not has_replicas:
            sort_by_load(candidate.keys, candidate.buckets, tile_load, candidate.worker_bits)
        if cost.slot_time_us != 0.0:
            count_active_slots(candidate.active_slots, replica_tiles, replica_worker)
        baseline_us, gain_us, num_moves = rebalance_beyond(
            candidate, state, is_protected, limits.copy_budget, threshold, cost
        )
        if limits.is_refined:
            refine_beyond(
                candidate,
                state,
                is_protected,
                limits.copy_budget,
                threshold,
                cost,
                baseline_us,
                gain_us,
                num_moves,
            )
    if planning_demand.ctypes.data != demand.ctypes.data:
        state.primary_tiles[:] = replica_tiles[: demand.size]
        list_shared(replica_worker, first_replica, next_replica, first_shared, next_shared)
        _apportion(
            demand,
            tile_m,
            threshold,
            state.primary_tiles,
            primary_starts,
            tile_load,
            replica_tiles,
            remainders,
            first_replica,
            next_replica,
            first_shared,
            next_shared,
            replica_worker,
        )
    num_copies: int = _record(
        slot_pairs,
        slot_copy,
        state,
        demand,
        tile_m,
        sequence,
        replica_worker,
        replica_expert,
        replica_tiles,
        first_replica,
        next_replica,
    )
    return num_copies


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTarget:
    """A plan's slot arrays and the layer state after it.

    Attributes:
        slot_expert: slot table, int32 [num_workers, redundant_slots], -1 = empty.
        slot_pairs: pairs per replica, int32, same shape; primaries run the remainder.
        slot_copy: 1 where the replica must first be copied, uint8, same shape.
        state: what to plan the layer's next target from.
    """

    slot_expert: Int32Array
    slot_pairs: Int32Array
    slot_copy: UInt8Array
    state: LayerState


def plan_microbatch(
    demand: Int32Array,
    state: LayerState,
    placement: PrimaryPlacement,
    limits: Limits,
    cost: CostModel,
    *,
    sequence: int,
    is_protected: UInt8Array | None = None,
    planning_demand: Int32Array | None = None,
) -> PlannedTarget:
    """Plan one target without changing `state` (Algorithm 1).

    Args:
        demand: pairs per expert, int32 [num_experts].
        state: of the target's layer, without a layer axis.
        placement: the fixed primaries.
        limits: tile size, copy budget and compactness threshold.
        cost: the estimates of the net gain.
        sequence: the target's position in the tier's order.
        is_protected: U_t, uint8 [num_workers, redundant_slots]; by default the slots that the
            layer's previous assignment uses.
        planning_demand: demand to balance for, `demand` by default.

    Raises:
        ShapeError: if a demand is not int32 [num_experts] or has a negative count.
    """
    planning_demand = demand if planning_demand is None else planning_demand
    for name, counts in (("demand", demand), ("planning_demand", planning_demand)):
        if counts.dtype != np.int32 or counts.shape != (placement.num_experts,):
            raise ShapeError(
                f"{name} is {counts.dtype} {counts.shape}, "
                f"expected int32 ({placement.num_experts},)"
            )
        if (counts < 0).any():
            raise ShapeError(f"{name} of expert {int(np.argmin(counts))} is {int(counts.min())}")
    if is_protected is None:
        is_protected = (state.slot_tiles > 0).astype(np.uint8)
    state = state.copy()
    slot_pairs = np.empty_like(state.slot_expert)
    slot_copy = np.empty(state.slot_expert.shape, np.uint8)
    plan_core(
        slot_pairs,
        slot_copy,
        state,
        Candidate.allocate(placement),
        demand,
        planning_demand,
        is_protected,
        limits,
        CostModel(*(float(estimate) for estimate in cost)),
        sequence,
    )
    return PlannedTarget(state.slot_expert.copy(), slot_pairs, slot_copy, state)
