"""Placement and tile assignment of one layer: the recorded state and the planner's candidate.

In compiled code a *replica* is an index: replica `e < num_experts` is the primary of expert e,
replica `num_experts + worker * redundant_slots + r` is whatever redundant slot r of a worker holds.
The replicas of one expert (R_e(P) of the paper) form a list in increasing worker order, so that no
step needs an experts x workers matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from afore_kernels.plan import Int32Array, PrimaryPlacement
from afore_kernels.runtime.cost import Int64Array

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


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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

    primary_starts: Int32Array  # [num_workers + 1], constant
    replica_worker: Int32Array  # [num_replicas], constant
    replica_expert: Int32Array  # [num_replicas], the primaries (constant), then C_t
    replica_tiles: Int64Array  # [num_replicas], N_t
    first_replica: Int32Array  # [num_experts], head of the list of R_e(P)
    next_replica: Int32Array  # [num_replicas], its links
    is_reserved: npt.NDArray[np.bool_]  # [num_replicas], rebound by this candidate
    tile_load: Int64Array  # [num_workers], T
    active_slots: Int64Array  # [num_workers], replicas with tiles
    heaviest_first: Int32Array  # [num_workers], workers by decreasing load
    lightest_first: Int32Array  # [num_workers], workers by increasing load
    copies_in: Int64Array  # [num_workers], Delta_t per destination
    copies_out: Int64Array  # [num_workers], Delta_t per source
    moves: Int64Array  # [all redundant slots, 4], stage 3: donor, receiver, tiles, evicted expert
    remainders: Int64Array  # [num_replicas], stage 1

    @classmethod
    def allocate(cls, placement: PrimaryPlacement) -> Candidate:
        """Allocate the arrays for `placement`."""
        num_workers, num_experts = placement.num_workers, placement.num_experts
        workers = np.arange(num_workers, dtype=np.int32)
        slot_worker = np.repeat(workers, placement.redundant_slots)
        num_replicas = num_experts + slot_worker.size
        return cls(
            primary_starts=placement.primary_starts,
            replica_worker=np.concatenate([placement.primary_worker, slot_worker]),
            replica_expert=np.arange(num_replicas, dtype=np.int32),
            replica_tiles=np.zeros(num_replicas, np.int64),
            first_replica=np.zeros(num_experts, np.int32),
            next_replica=np.zeros(num_replicas, np.int32),
            is_reserved=np.zeros(num_replicas, np.bool_),
            tile_load=np.zeros(num_workers, np.int64),
            active_slots=np.zeros(num_workers, np.int64),
            heaviest_first=workers.copy(),
            lightest_first=workers.copy(),
            copies_in=np.zeros(num_workers, np.int64),
            copies_out=np.zeros(num_workers, np.int64),
            moves=np.zeros((slot_worker.size, 4), np.int64),
            remainders=np.zeros(num_replicas, np.int64),
        )


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def load_candidate(candidate: Candidate, state: LayerState) -> None:
    """Start from the recorded placement and the preceding assignment, with nothing copied."""
    num_workers, redundant_slots = state.slot_expert.shape
    num_experts = state.primary_tiles.size
    for expert in range(num_experts):
        candidate.replica_tiles[expert] = state.primary_tiles[expert]
        candidate.first_replica[expert] = expert
        candidate.next_replica[expert] = NONE
    replica = num_experts
    for worker in range(num_workers):
        candidate.copies_in[worker] = 0
        candidate.copies_out[worker] = 0
        for slot in range(redundant_slots):
            candidate.replica_expert[replica] = NONE
            candidate.replica_tiles[replica] = state.slot_tiles[worker, slot]
            candidate.is_reserved[replica] = False
            bind_replica(candidate, replica, state.slot_expert[worker, slot])
            replica += 1


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def bind_replica(candidate: Candidate, replica: int, expert: int) -> None:
    """Bind a redundant slot to `expert` (-1 empties it) and keep the lists of R_e(P) in order."""
    next_replica, first_replica = candidate.next_replica, candidate.first_replica
    worker = candidate.replica_worker[replica]
    evicted = candidate.replica_expert[replica]
    if evicted != NONE:
        before, after = NONE, first_replica[evicted]
        while after != replica:
            before, after = after, next_replica[after]
        if before == NONE:
            first_replica[evicted] = next_replica[replica]
        else:
            next_replica[before] = next_replica[replica]
    candidate.replica_expert[replica] = expert
    if expert != NONE:
        before, after = NONE, first_replica[expert]
        while after != NONE and candidate.replica_worker[after] < worker:
            before, after = after, next_replica[after]
        next_replica[replica] = after
        if before == NONE:
            first_replica[expert] = replica
        else:
            next_replica[before] = replica


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def redundant_range(candidate: Candidate, worker: int) -> tuple[int, int]:
    """Return the first replica of `worker`'s redundant slots and the one after the last."""
    num_experts = candidate.first_replica.size
    redundant_slots = (candidate.replica_expert.size - num_experts) // candidate.tile_load.size
    start = num_experts + worker * redundant_slots
    return start, start + redundant_slots


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def find_replica(candidate: Candidate, expert: int, worker: int) -> int:
    """Return the replica of `expert` on `worker`, or -1 if there is none."""
    replica: int = candidate.first_replica[expert]
    while replica != NONE and candidate.replica_worker[replica] != worker:
        replica = candidate.next_replica[replica]
    return replica


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def count_loads(candidate: Candidate) -> None:
    """Count the tiles and active slots of every worker and order the workers by load."""
    candidate.tile_load[:] = 0
    candidate.active_slots[:] = 0
    for replica in range(candidate.replica_tiles.size):
        tiles = candidate.replica_tiles[replica]
        if tiles > 0:
            candidate.tile_load[candidate.replica_worker[replica]] += tiles
            candidate.active_slots[candidate.replica_worker[replica]] += 1
    _order_workers(candidate)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def move_tiles(candidate: Candidate, donor: int, receiver: int, tiles: int) -> None:
    """Move tiles between two replicas of one expert and update the worker loads."""
    replica_tiles, active_slots = candidate.replica_tiles, candidate.active_slots
    from_worker = candidate.replica_worker[donor]
    to_worker = candidate.replica_worker[receiver]
    if replica_tiles[receiver] == 0:
        active_slots[to_worker] += 1
    replica_tiles[donor] -= tiles
    replica_tiles[receiver] += tiles
    if replica_tiles[donor] == 0:
        active_slots[from_worker] -= 1
    candidate.tile_load[from_worker] -= tiles
    candidate.tile_load[to_worker] += tiles
    _order_workers(candidate)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _order_workers(candidate: Candidate) -> None:
    """Restore both load orders; ties go to the lower worker in both."""
    _insertion_sort(candidate.heaviest_first, candidate.tile_load, -1)
    _insertion_sort(candidate.lightest_first, candidate.tile_load, 1)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _insertion_sort(order: Int32Array, load: Int64Array, sign: int) -> None:
    """Sort workers by (sign * load, worker): linear here, as one move displaces two workers."""
    for i in range(1, order.size):
        worker = order[i]
        key = sign * load[worker]
        j = i - 1
        while j >= 0 and (
            sign * load[order[j]] > key or (sign * load[order[j]] == key and order[j] > worker)
        ):
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = worker
