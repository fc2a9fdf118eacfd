"""Placement and tile assignment of one layer: the recorded state and the planner's candidate.

In compiled code a *replica* is an index: replica `e < num_experts` is the primary of expert e,
replica `num_experts + worker * redundant_slots + r` is whatever redundant slot r of a worker holds.
The replicas of one expert (R_e(P) of the paper) form a list in increasing worker order, so that no
step needs an experts x workers matrix. The compiled functions take the arrays they use: a tuple of
arrays costs more to pass than most of them cost to run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from afore_kernels.plan import Int32Array, PrimaryPlacement
from afore_kernels.runtime.arrays import BoolArray, Int64Array, planner_compiled
from afore_kernels.runtime.load_order import NUM_BUCKETS

NONE = -1


class LayerState(NamedTuple):
    """What the planner remembers of one layer between targets, or of all layers along a first axis.

    Attributes:
        slot_expert: projected slot table C_t, int32 [num_workers, redundant_slots], -1 = empty.
        slot_tiles: tiles of each replica in the previous assignment, int32, same shape.
        slot_last_use: sequence of the last target with tiles there, -1 = none, int64, same shape.
        primary_tiles: tiles of each primary in the previous assignment, int32 [num_experts].
    """

    slot_expert: Int32Array
    slot_tiles: Int32Array
    slot_last_use: Int64Array
    primary_tiles: Int32Array

    @classmethod
    def initial(cls, placement: PrimaryPlacement, num_layers: int | None = None) -> LayerState:
        """Return the state without replicas and without a preceding assignment."""
        layers = () if num_layers is None else (num_layers,)
        slots = (*layers, placement.num_workers, placement.redundant_slots)
        return cls(
            slot_expert=np.full(slots, NONE, np.int32),
            slot_tiles=np.zeros(slots, np.int32),
            slot_last_use=np.full(slots, NONE, np.int64),
            primary_tiles=np.zeros((*layers, placement.num_experts), np.int32),
        )

    def copy(self) -> LayerState:
        """Return a state that shares no memory with this one."""
        return LayerState._make(array.copy() for array in self)


@planner_compiled
def layer_state(states: LayerState, layer: int) -> LayerState:
    """Return the view of one layer of a state with a layer axis."""
    return LayerState(
        states.slot_expert[layer],
        states.slot_tiles[layer],
        states.slot_last_use[layer],
        states.primary_tiles[layer],
    )


class Candidate(NamedTuple):
    """The planner's tentative (P, N_t, C_t) and its working arrays, preallocated once per thread.

    Nothing in it is recorded before it is selected, and nothing but the constants of the placement
    (the primaries) outlives a call.
    """

    worker_bits: int  # of a key of `load_order`, constant
    primary_starts: Int32Array  # [num_workers + 1], constant
    replica_worker: Int32Array  # [num_replicas], constant
    replica_expert: Int32Array  # [num_replicas], the primaries (constant), then C_t
    replica_tiles: Int64Array  # [num_replicas], N_t
    first_replica: Int32Array  # [num_experts], head of the list of R_e(P)
    next_replica: Int32Array  # [num_replicas], its links
    first_shared: Int32Array  # [num_workers], head of the list of the primaries with replicas
    next_shared: Int32Array  # [num_experts], its links
    tile_load: Int64Array  # [num_workers], T
    active_slots: Int64Array  # [num_workers], replicas with tiles
    keys: Int64Array  # [num_workers], workers by load
    buckets: Int64Array  # [NUM_BUCKETS], to sort them
    is_settled: BoolArray  # [num_workers], no move from here until a load nearby changes
    is_reserved: BoolArray  # [num_replicas], rebound by this candidate
    safe_slot: Int32Array  # [num_workers], the replica to rebind next, or -1
    copies_in: Int64Array  # [num_workers], Delta_t per destination
    copies_out: Int64Array  # [num_workers], Delta_t per source
    moves: Int64Array  # [4 * redundant slots, 4]: donor, receiver, tiles, expert bound before
    kept_moves: Int64Array  # of the same shape, the best so far
    remainders: Int64Array  # [num_replicas], stage 1
    hops: Int64Array  # [num_workers, 3]: donor, receiver, copies; how refinement reached a worker
    reached: Int64Array  # [num_workers], in the order it reached them

    @classmethod
    def allocate(cls, placement: PrimaryPlacement) -> Candidate:
        """Allocate the arrays for `placement`."""
        num_workers, num_experts = placement.num_workers, placement.num_experts
        slot_worker = np.repeat(np.arange(num_workers, dtype=np.int32), placement.redundant_slots)
        num_replicas = num_experts + slot_worker.size
        return cls(
            worker_bits=num_workers.bit_length(),
            primary_starts=placement.primary_starts,
            replica_worker=np.concatenate([placement.primary_worker, slot_worker]),
            replica_expert=np.concatenate(
                [np.arange(num_experts, dtype=np.int32), np.full(slot_worker.size, NONE, np.int32)]
            ),
            replica_tiles=np.zeros(num_replicas, np.int64),
            first_replica=np.arange(num_experts, dtype=np.int32),
            next_replica=np.full(num_replicas, NONE, np.int32),
            first_shared=np.zeros(num_workers, np.int32),
            next_shared=np.zeros(num_experts, np.int32),
            tile_load=np.zeros(num_workers, np.int64),
            active_slots=np.zeros(num_workers, np.int64),
            keys=np.zeros(num_workers, np.int64),
            buckets=np.zeros(NUM_BUCKETS, np.int64),
            is_settled=np.zeros(num_workers, np.bool_),
            is_reserved=np.zeros(num_replicas, np.bool_),
            safe_slot=np.zeros(num_workers, np.int32),
            copies_in=np.zeros(num_workers, np.int64),
            copies_out=np.zeros(num_workers, np.int64),
            moves=np.zeros((4 * slot_worker.size, 4), np.int64),
            kept_moves=np.zeros((4 * slot_worker.size, 4), np.int64),
            remainders=np.zeros(num_replicas, np.int64),
            hops=np.zeros((num_workers, 3), np.int64),
            reached=np.zeros(num_workers, np.int64),
        )


@planner_compiled
def load_placement(
    slot_expert: Int32Array,
    slot_tiles: Int32Array,
    replica_worker: Int32Array,
    replica_expert: Int32Array,
    replica_tiles: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
    first_shared: Int32Array,
    next_shared: Int32Array,
) -> bool:
    """Start from the recorded placement and the preceding assignment of the redundant slots.

    Returns:
        Whether any expert has a replica beside its primary.
    """
    num_workers, redundant_slots = slot_expert.shape
    # Only experts with replicas have lists longer than their primary.
    for replica in range(first_replica.size, replica_expert.size):
        expert = replica_expert[replica]
        if expert != NONE:
            first_replica[expert] = expert
            next_replica[expert] = NONE
    for worker in range(num_workers):
        first_shared[worker] = NONE
    has_replicas = False
    # From the last worker to the first, so that most replicas go to the head of their list.
    replica = replica_expert.size
    for worker in range(num_workers - 1, -1, -1):
        for slot in range(redundant_slots - 1, -1, -1):
            replica -= 1
            expert = slot_expert[worker, slot]
            replica_expert[replica] = NONE
            replica_tiles[replica] = slot_tiles[worker, slot]
            if expert == NONE:
                continue
            has_replicas = True
            if first_replica[expert] == expert and next_replica[expert] == NONE:
                owner = replica_worker[expert]
                next_shared[expert] = first_shared[owner]
                first_shared[owner] = expert
            bind_replica(
                replica, expert, replica_worker, replica_expert, first_replica, next_replica
            )
    return has_replicas


@planner_compiled
def list_shared(
    replica_worker: Int32Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
    first_shared: Int32Array,
    next_shared: Int32Array,
) -> None:
    """List every worker's primaries that have replicas, as `load_placement` does."""
    first_shared[:] = NONE
    for expert in range(first_replica.size):
        if first_replica[expert] != expert or next_replica[expert] != NONE:
            owner = replica_worker[expert]
            next_shared[expert] = first_shared[owner]
            first_shared[owner] = expert


@planner_compiled
def bind_replica(
    replica: int,
    expert: int,
    replica_worker: Int32Array,
    replica_expert: Int32Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
) -> None:
    """Bind a redundant slot to `expert` (-1 empties it) and keep the lists of R_e(P) in order."""
    evicted = replica_expert[replica]
    if evicted != NONE:
        before, after = NONE, first_replica[evicted]
        while after != replica:
            before, after = after, next_replica[after]
        if before == NONE:
            first_replica[evicted] = next_replica[replica]
        else:
            next_replica[before] = next_replica[replica]
    replica_expert[replica] = expert
    if expert != NONE:
        worker = replica_worker[replica]
        before, after = NONE, first_replica[expert]
        while after != NONE and replica_worker[after] < worker:
            before, after = after, next_replica[after]
        next_replica[replica] = after
        if before == NONE:
            first_replica[expert] = replica
        else:
            next_replica[before] = replica


@planner_compiled
def is_on_worker(
    expert: int,
    worker: int,
    replica_worker: Int32Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
) -> bool:
    """Return whether `expert` has a replica on `worker`."""
    replica = first_replica[expert]
    while replica != NONE:
        if replica_worker[replica] == worker:
            return True
        replica = next_replica[replica]
    return False


@planner_compiled
def count_active_slots(
    active_slots: Int64Array, replica_tiles: Int64Array, replica_worker: Int32Array
) -> None:
    """Count the replicas with tiles of every worker."""
    active_slots[:] = 0
    for replica in range(replica_tiles.size):
        active_slots[replica_worker[replica]] += replica_tiles[replica] > 0
