"""LLEP: least-loaded expert parallelism (arXiv 2601.17111).

Experts in descending demand: the primary takes pairs up to the capacity, 1.1 times the mean load,
and the rest spills in chunks to the least loaded workers. A worker's effective load is what it has
taken plus the demand of its own primaries that are still to come, so nobody is given pairs that its
own experts will need. The demand must be the target's own: nothing is predicted, and nothing is
kept but the weights that happen to be resident.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from afore_kernels.errors import ConfigError
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.arrays import BoolArray, Int64Array, planner_compiled
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import NONE, LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget
from afore_kernels.runtime.policies import (
    check_demand,
    count_primary_load,
    find_slot,
    protected_slots,
    record_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llep:
    """The policy and its knobs (alpha, m and lambda of the publication).

    Its own design may send any number of experts to any worker, and every chunk is one transfer.
    Here a chunk needs one of the worker's redundant slots, `limits.copy_budget` caps the copies,
    and a chunk whose expert the slot still holds costs none. What finds no slot stays on the
    primary.

    Attributes:
        min_chunk: fewest pairs of a chunk, unless they are all that is left; published 1024 for
            prefill and training, scale it to the mean load. 1 is no minimum.
        capacity_factor: most pairs of a worker, times the mean load, rounded up.
        imbalance_threshold: an imbalance (largest over mean load on the primaries) up to this is
            left alone; 1 plans always. Published runs use 1.3.

    Raises:
        ConfigError: if `min_chunk`, `capacity_factor` or `imbalance_threshold` is below 1.
    """

    min_chunk: int = 1
    capacity_factor: float = 1.1
    imbalance_threshold: float = 1.0

    def __post_init__(self) -> None:
        for name in ("min_chunk", "capacity_factor", "imbalance_threshold"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be finite and at least 1, got {getattr(self, name)}"
                )

    def initial_state(self, placement: PrimaryPlacement) -> LayerState:
        """Return the state of a layer before its first target."""
        return LayerState.initial(placement)

    def plan(
        self,
        demand: Int32Array,
        state: LayerState,
        placement: PrimaryPlacement,
        limits: Limits,
        cost: CostModel,
        *,
        sequence: int,
        is_protected: UInt8Array | None = None,
    ) -> PlannedTarget:
        """Plan one target, see `Policy.plan`; `cost` is not used."""
        check_demand(demand, placement)
        load = count_primary_load(demand, placement)
        mean_load = int(load.sum()) / load.size
        slot_expert, slot_pairs = state.slot_expert.copy(), np.zeros_like(state.slot_expert)
        if load.max() > self.imbalance_threshold * mean_load:
            _assign(
                slot_expert,
                slot_pairs,
                demand,
                np.argsort(-demand.astype(np.int64), kind="stable"),
                load,
                placement.primary_worker,
                protected_slots(state, is_protected),
                state.slot_last_use,
                math.ceil(self.capacity_factor * mean_load),
                self.min_chunk,
                limits.copy_budget,
            )
        return record_plan(
            demand, state, slot_expert, slot_pairs, tile_m=limits.tile_m, sequence=sequence
        )


@planner_compiled
def _assign(
    slot_expert: Int32Array,
    slot_pairs: Int32Array,
    demand: Int32Array,
    expert_order: Int64Array,
    effective_load: Int64Array,
    primary_worker: Int32Array,
    is_protected: UInt8Array,
    last_use: Int64Array,
    capacity: int,
    min_chunk: int,
    copy_budget: int,
) -> None:
    """Assign every expert's pairs.

    Args:
        slot_expert: in, the slot table before; out, with the chunks' experts.
        slot_pairs: in, zeros; out, the chunks.
        expert_order: experts by descending demand, ties to the lower expert, int64 [num_experts].
        effective_load: in, pairs per worker on its primaries; out, those of the plan, int64
            [num_workers].
    """
    is_taken = np.zeros(slot_expert.shape, np.bool_)
    num_copies = 0
    for expert in expert_order:
        owner = primary_worker[expert]
        remaining = np.int64(demand[expert])
        effective_load[owner] -= remaining
        kept = min(remaining, max(capacity - effective_load[owner], 0))
        effective_load[owner] += kept
        remaining -= kept
        while remaining > 0:
            receiver, slot = _find_receiver(
                expert,
                owner,
                num_copies < copy_budget,
                effective_load,
                slot_expert,
                is_taken,
                is_protected,
                last_use,
            )
            if receiver == NONE:
                effective_load[owner] += remaining
                break
            chunk = min(remaining, capacity - effective_load[receiver])
            if chunk < min_chunk:  # nobody has room for more: over its capacity, if need be
                chunk = remaining
            num_copies += slot_expert[receiver, slot] != expert
            slot_expert[receiver, slot] = expert
            slot_pairs[receiver, slot] += chunk
            is_taken[receiver, slot] = True
            effective_load[receiver] += chunk
            remaining -= chunk


@planner_compiled
def _find_receiver(
    expert: int,
    owner: int,
    can_copy: bool,
    effective_load: Int64Array,
    slot_expert: Int32Array,
    is_taken: BoolArray,
    is_protected: UInt8Array,
    last_use: Int64Array,
) -> tuple[int, int]:
    """Find the least loaded worker with a slot for `expert`, ties to the lower one, and the slot.

    Returns:
        (-1, -1) where none is less loaded than the primary's worker. While slots and copies last
        that cannot be: the primary's worker is full, and somebody is below the capacity.
    """
    receiver, receiver_slot = NONE, NONE
    for worker in range(effective_load.size):
        if worker == owner or effective_load[worker] >= effective_load[owner]:
            continue
        if receiver != NONE and effective_load[worker] >= effective_load[receiver]:
            continue
        slot = find_slot(expert, worker, slot_expert, is_taken, is_protected, last_use)
        if slot == NONE or (slot_expert[worker, slot] != expert and not can_copy):
            continue
        receiver, receiver_slot = worker, slot
    return receiver, receiver_slot
