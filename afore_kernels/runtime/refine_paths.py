"""Paths of the refinement: a heavy worker reaches one with room over workers between.

The one with room may have neither a slot for the heavy one's experts nor a replica of them, while
another worker has both.
"""

from __future__ import annotations

import numpy as np

from afore_kernels.plan import UInt8Array
from afore_kernels.runtime.arrays import Int64Array, planner_compiled
from afore_kernels.runtime.placement import NONE, Candidate
from afore_kernels.runtime.refine_moves import apply_move, find_slot, nth_replica


@planner_compiled
def find_path(
    h: int,
    ceiling: int,
    threshold: int,
    copies_left: int,
    candidate: Candidate,
    last_use: Int64Array,
    is_protected: UInt8Array,
) -> int:
    """Find a worker with room that hops over others reach from h, -1 if there is none.

    A hop moves tiles of some expert to a replica that exists, or else to a new one. The way back is
    in `candidate.hops`: of every worker reached the donor, the receiver and the copies from h on.
    """
    hops, reached = candidate.hops, candidate.reached
    hops[:, 0] = NONE
    hops[h, 0], hops[h, 2] = h, 0
    reached[0] = h
    first, num_reached = 0, 1
    while first < num_reached:
        worker = reached[first]
        first += 1
        if ceiling - candidate.tile_load[worker] > threshold:
            return int(worker)
        num_reached = _hop_to_replicas(worker, threshold, candidate, num_reached)
        if hops[worker, 2] < copies_left:
            num_reached = _hop_to_slots(
                worker, threshold, candidate, last_use, is_protected, num_reached
            )
    return NONE


@planner_compiled
def move_along_path(
    h: int, c: int, ceiling: int, most: int, candidate: Candidate, num_moves: int
) -> int:
    """Move as many tiles as fit over every hop from h to c; return the number of moves then.

    The last hop first, so that no worker between has more than before at any time.
    """
    hops = candidate.hops
    tiles = min(most, ceiling - candidate.tile_load[c])
    worker = c
    while worker != h:
        donor = hops[worker, 0]
        tiles = min(tiles, candidate.replica_tiles[donor])
        worker = candidate.replica_worker[donor]
    worker = c
    while worker != h:
        donor = hops[worker, 0]
        apply_move(candidate, donor, hops[worker, 1], tiles, num_moves)
        num_moves += 1
        worker = candidate.replica_worker[donor]
    return num_moves


@planner_compiled
def _hop_to_replicas(worker: int, threshold: int, candidate: Candidate, num_reached: int) -> int:
    """Reach the workers that share an expert with `worker`; return how many are reached then."""
    index = 0
    donor = nth_replica(candidate, worker, index)
    while donor != NONE:
        receiver = NONE
        if candidate.replica_tiles[donor] > threshold:
            receiver = candidate.first_replica[candidate.replica_expert[donor]]
        while receiver != NONE:
            num_reached = _reach(worker, donor, receiver, 0, candidate, num_reached)
            receiver = candidate.next_replica[receiver]
        index += 1
        donor = nth_replica(candidate, worker, index)
    return num_reached


@planner_compiled
def _hop_to_slots(
    worker: int,
    threshold: int,
    candidate: Candidate,
    last_use: Int64Array,
    is_protected: UInt8Array,
    num_reached: int,
) -> int:
    """Reach the workers with a safe slot, by the expert with the most tiles on `worker`."""
    best, most = NONE, np.int64(threshold)
    index = 0
    donor = nth_replica(candidate, worker, index)
    while donor != NONE:
        if candidate.replica_tiles[donor] > most:
            best, most = donor, candidate.replica_tiles[donor]
        index += 1
        donor = nth_replica(candidate, worker, index)
    if best == NONE:
        return num_reached
    # Workers that have this expert were reached by a hop to their replica.
    for c in range(candidate.tile_load.size):
        if candidate.hops[c, 0] == NONE:
            slot = find_slot(c, candidate, last_use, is_protected)
            if slot != NONE:
                num_reached = _reach(worker, best, slot, 1, candidate, num_reached)
    return num_reached


@planner_compiled
def _reach(
    worker: int, donor: int, receiver: int, num_copies: int, candidate: Candidate, num_reached: int
) -> int:
    """Note the hop by which a worker is reached first; return how many are reached then."""
    hops = candidate.hops
    c = candidate.replica_worker[receiver]
    if hops[c, 0] != NONE:
        return num_reached
    hops[c, 0], hops[c, 1], hops[c, 2] = donor, receiver, hops[worker, 2] + num_copies
    candidate.reached[num_reached] = c
    return num_reached + 1
