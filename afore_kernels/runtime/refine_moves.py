"""Single moves of the refinement: what a candidate can move where, made and undone.

A move is a row of `Candidate.moves`: donor, receiver, tiles, and the expert bound before. One whose
receiver is bound to another expert than before is a copy.
"""

from __future__ import annotations

import numpy as np

from afore_kernels.plan import UInt8Array
from afore_kernels.runtime.arrays import Int64Array, planner_compiled
from afore_kernels.runtime.placement import NONE, Candidate, bind_replica
from afore_kernels.runtime.rebalance import find_safe_slot


@planner_compiled
def find_slot(
    worker: int, candidate: Candidate, last_use: Int64Array, is_protected: UInt8Array
) -> int:
    """Find the slot of a worker to rebind, see `find_safe_slot`."""
    slot = find_safe_slot(
        worker,
        candidate.first_replica.size,
        is_protected,
        last_use,
        candidate.is_reserved,
        candidate.replica_expert,
        candidate.replica_tiles,
    )
    return int(slot)


@planner_compiled
def nth_replica(candidate: Candidate, worker: int, index: int) -> int:
    """Return the index-th replica on a worker: its primaries, then its slots; -1 after the last."""
    start, stop = candidate.primary_starts[worker], candidate.primary_starts[worker + 1]
    if index < stop - start:
        return int(start) + index
    num_experts = candidate.first_replica.size
    redundant_slots = (candidate.replica_expert.size - num_experts) // candidate.tile_load.size
    slot = index - (stop - start)
    return num_experts + worker * redundant_slots + slot if slot < redundant_slots else NONE


@planner_compiled
def replica_on(worker: int, expert: int, candidate: Candidate) -> int:
    """Return the replica of `expert` on `worker`, -1 if there is none."""
    replica = candidate.first_replica[expert]
    while replica != NONE and candidate.replica_worker[replica] != worker:
        replica = candidate.next_replica[replica]
    return int(replica)


@planner_compiled
def apply_move(candidate: Candidate, donor: int, receiver: int, tiles: int, index: int) -> None:
    """Make a move, bind the receiver if it holds another expert, and note it at `index`."""
    moves, replica_tiles = candidate.moves, candidate.replica_tiles
    expert, bound = candidate.replica_expert[donor], candidate.replica_expert[receiver]
    moves[index, 0], moves[index, 1], moves[index, 2], moves[index, 3] = (
        donor,
        receiver,
        tiles,
        bound,
    )
    if bound != expert:
        _bind(candidate, receiver, expert)
        candidate.is_reserved[receiver] = True
    replica_tiles[donor] -= tiles
    replica_tiles[receiver] += tiles
    candidate.tile_load[candidate.replica_worker[donor]] -= tiles
    candidate.tile_load[candidate.replica_worker[receiver]] += tiles


@planner_compiled
def undo_moves(candidate: Candidate, num_moves: int) -> None:
    """Undo the first `num_moves` of `moves`, the last one first."""
    for i in range(num_moves - 1, -1, -1):
        donor, receiver = candidate.moves[i, 0], candidate.moves[i, 1]
        tiles, bound = candidate.moves[i, 2], candidate.moves[i, 3]
        candidate.replica_tiles[receiver] -= tiles
        candidate.replica_tiles[donor] += tiles
        candidate.tile_load[candidate.replica_worker[donor]] += tiles
        candidate.tile_load[candidate.replica_worker[receiver]] -= tiles
        if bound != candidate.replica_expert[receiver]:
            _bind(candidate, receiver, bound)
            candidate.is_reserved[receiver] = False


@planner_compiled
def _bind(candidate: Candidate, replica: int, expert: int) -> None:
    bind_replica(
        replica,
        expert,
        candidate.replica_worker,
        candidate.replica_expert,
        candidate.first_replica,
        candidate.next_replica,
    )


@planner_compiled
def gather_at_primaries(candidate: Candidate) -> int:
    """Move the tiles of all replicas to their primaries; return the number of moves.

    Then a slot is taken only where the ceiling needs it, and the others can be rebound.
    """
    num_moves = 0
    for replica in range(candidate.first_replica.size, candidate.replica_expert.size):
        tiles = candidate.replica_tiles[replica]
        if tiles > 0:
            expert = candidate.replica_expert[replica]
            apply_move(candidate, replica, int(expert), int(tiles), num_moves)
            num_moves += 1
    return num_moves


@planner_compiled
def find_free_move(
    h: int, ceiling: int, most: int, threshold: int, candidate: Candidate
) -> tuple[int, int, int]:
    """Find the largest move from h to replicas that exist: donor, receiver, tiles (0 = none)."""
    best_donor, best_receiver, best_tiles = NONE, NONE, threshold
    index = 0
    donor = nth_replica(candidate, h, index)
    while donor != NONE:
        expert = candidate.replica_expert[donor]
        available = min(candidate.replica_tiles[donor], most)
        receiver = NONE if available <= threshold else candidate.first_replica[expert]
        while receiver != NONE:
            c = candidate.replica_worker[receiver]
            tiles = min(available, ceiling - candidate.tile_load[c])
            if c != h and tiles > best_tiles:
                best_donor, best_receiver, best_tiles = donor, int(receiver), int(tiles)
            receiver = candidate.next_replica[receiver]
        index += 1
        donor = nth_replica(candidate, h, index)
    return best_donor, best_receiver, best_tiles if best_donor != NONE else 0


@planner_compiled
def find_copy(
    h: int,
    ceiling: int,
    most: int,
    threshold: int,
    candidate: Candidate,
    last_use: Int64Array,
    is_protected: UInt8Array,
) -> tuple[int, int, int]:
    """Find the largest move from h to a new replica: donor, slot to bind, tiles (0 = none).

    Of several as large, the receiver with the least room: the others keep theirs for larger pieces.
    Then the expert with the most tiles: a replica that can take more shortens later paths.
    """
    best_donor, best_receiver, best_tiles = NONE, NONE, threshold
    best_room, best_expert_tiles = np.int64(0), np.int64(0)
    index = 0
    donor = nth_replica(candidate, h, index)
    while donor != NONE:
        expert = candidate.replica_expert[donor]
        available = min(candidate.replica_tiles[donor], most)
        for c in range(candidate.tile_load.size if available >= max(best_tiles, 1) else 0):
            room = ceiling - candidate.tile_load[c]
            tiles = min(available, room)
            if tiles <= threshold or tiles < best_tiles:
                continue
            expert_tiles = candidate.replica_tiles[donor]
            is_tie = tiles == best_tiles and best_donor != NONE
            if is_tie and (room, -expert_tiles) >= (best_room, -best_expert_tiles):
                continue
            if replica_on(c, expert, candidate) != NONE:
                continue
            slot = find_slot(c, candidate, last_use, is_protected)
            if slot != NONE:
                best_donor, best_receiver, best_tiles = donor, slot, int(tiles)
                best_room, best_expert_tiles = room, expert_tiles
        index += 1
        donor = nth_replica(candidate, h, index)
    return best_donor, best_receiver, best_tiles if best_donor != NONE else 0
