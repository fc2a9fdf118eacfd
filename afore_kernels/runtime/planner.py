"""The per-microbatch planner: Algorithm 1 of the paper (section 5.2), compiled.

`plan_core` is the form for the scheduler's loop: no allocation, no Python objects, no GIL.
`plan_microbatch` is the pure form for everybody else. `planner_oracle` is the same algorithm,
written literally; both return the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import ShapeError
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import (
    NONE,
    Candidate,
    LayerState,
    count_loads,
    load_candidate,
    redundant_range,
)
from afore_kernels.runtime.rebalance import rebalance_beyond, rebalance_within


class Limits(NamedTuple):
    """What bounds a plan.

    Attributes:
        tile_m: pairs per tile (Eq. 4).
        copy_budget: B, most new replicas per target.
        compactness_threshold: theta, a move must carry more tiles than this.
    """

    tile_m: int
    copy_budget: int
    compactness_threshold: int

    @classmethod
    def from_config(cls, moe: MoEConfig, tier: TierConfig) -> Limits:
        """Take the limits of a tier.

        The static policy is a budget of 0: from an empty slot table no replica ever appears, so
        every pair stays on its primary.
        """
        budget = 0 if tier.policy == "static" else tier.effective_copy_budget
        return cls(moe.tile_m, budget, tier.compactness_threshold)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _apportion(candidate: Candidate, demand: Int32Array, limits: Limits) -> None:
    """Rescale every expert's tiles to `demand` in the proportions they have now (stage 1).

    Largest remainder: replica i of n_i tiles, K' in all, gets floor(k * n_i / K'), and the tiles
    left over go to the largest remainders k * n_i mod K', ties to the lower worker. An expert
    without tiles so far, or with no more than theta now, starts on its primary.
    """
    tiles, remainders = candidate.replica_tiles, candidate.remainders
    next_replica = candidate.next_replica
    for expert in range(demand.size):
        expert_tiles = (np.int64(demand[expert]) + limits.tile_m - 1) // limits.tile_m
        previous = np.int64(0)
        first = candidate.first_replica[expert]
        replica = first
        while replica != NONE:
            previous += tiles[replica]
            replica = next_replica[replica]

        if previous == 0 or expert_tiles <= limits.compactness_threshold:
            replica = first
            while replica != NONE:
                tiles[replica] = 0
                replica = next_replica[replica]
            tiles[expert] = expert_tiles
            continue

        leftover = expert_tiles
        replica = first
        while replica != NONE:
            share = expert_tiles * tiles[replica]
            tiles[replica] = share // previous
            remainders[replica] = share % previous
            leftover -= tiles[replica]
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


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _record(
    slot_pairs: Int32Array,
    slot_copy: UInt8Array,
    state: LayerState,
    candidate: Candidate,
    demand: Int32Array,
    tile_m: int,
    sequence: int,
) -> int:
    """Write the selected candidate to the plan and to the state; return the number of copies.

    A replica fills its tiles and the primary runs the remainder. Where the primary has no tile, the
    partial tile falls to the replica on the highest worker, the last of the list (Eq. 2, 11).
    """
    for expert in range(demand.size):
        state.primary_tiles[expert] = candidate.replica_tiles[expert]
    num_copies = 0
    replica = np.int64(demand.size)
    for worker in range(slot_pairs.shape[0]):
        for slot in range(slot_pairs.shape[1]):
            expert, tiles = candidate.replica_expert[replica], candidate.replica_tiles[replica]
            is_new = expert != state.slot_expert[worker, slot]
            num_copies += is_new
            slot_copy[worker, slot] = is_new
            slot_pairs[worker, slot] = 0
            state.slot_expert[worker, slot] = expert
            state.slot_tiles[worker, slot] = tiles
            if tiles > 0:
                state.slot_last_use[worker, slot] = sequence
            replica += 1

    for expert in range(demand.size):
        unassigned = np.int64(demand[expert])
        replica = np.int64(candidate.first_replica[expert])
        while replica != NONE:
            if replica >= demand.size:
                worker = candidate.replica_worker[replica]
                slot = replica - redundant_range(candidate, worker)[0]
                pairs = min(candidate.replica_tiles[replica] * tile_m, unassigned)
                slot_pairs[worker, slot] = pairs
                unassigned -= pairs
            replica = np.int64(candidate.next_replica[replica])
    return num_copies


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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
    load_candidate(candidate, state)
    _apportion(candidate, planning_demand, limits)
    count_loads(candidate)
    rebalance_within(candidate, limits.compactness_threshold)
    rebalance_beyond(
        candidate, state, is_protected, limits.copy_budget, limits.compactness_threshold, cost
    )
    _apportion(candidate, demand, limits)  # changes nothing when the demand is the one planned for
    num_copies: int = _record(
        slot_pairs, slot_copy, state, candidate, demand, limits.tile_m, sequence
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
