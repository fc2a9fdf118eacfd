"""Refinement of stage 3, beyond the paper: aim at a load instead of halving differences.

The greedy search halves the difference of the heaviest and the lightest worker with every copy, so
where the copy budget or the slots bind it spends copies on pieces that are larger or smaller than
needed. Here a ceiling is given, every worker above it hands over just its excess in as few pieces
as possible, and binary search finds the lowest ceiling that the budget reaches. Moves to replicas
that exist already cost nothing and come first.
"""

from __future__ import annotations

import numpy as np

from afore_kernels.plan import UInt8Array
from afore_kernels.runtime.arrays import Int64Array, planner_compiled
from afore_kernels.runtime.cost import (
    CostModel,
    copy_time_us,
    exposed_time_us,
    ffn_time_us,
    net_gain_us,
)
from afore_kernels.runtime.placement import (
    NONE,
    Candidate,
    LayerState,
    bind_replica,
    count_active_slots,
    is_on_worker,
)
from afore_kernels.runtime.rebalance import find_safe_slot


@planner_compiled
def refine_beyond(
    candidate: Candidate,
    state: LayerState,
    is_protected: UInt8Array,
    copy_budget: int,
    threshold: int,
    cost: CostModel,
    baseline_us: float,
    gain_us: float,
    num_moves: int,
) -> None:
    """Replace stage 3's moves where others reach a higher net gain within the same limits.

    Args:
        candidate: in and out, after stage 3; `moves` begins with those that stage 3 kept.
        state: the recorded state, of which only `slot_last_use` is read.
        is_protected: U_t, 1 where a slot must not be rebound, uint8 [num_workers, redundant_slots].
        copy_budget: B, most new replicas.
        threshold: theta, a move carries more tiles than this.
        cost: the estimates of the net gain, all float.
        baseline_us: F before stage 3.
        gain_us: net gain of the moves that stage 3 kept.
        num_moves: how many it kept.
    """
    moves, kept, tile_load = candidate.moves, candidate.kept_moves, candidate.tile_load
    low = (tile_load.sum() + tile_load.size - 1) // tile_load.size
    high = tile_load.max() - 1
    if low > high or copy_budget == 0:
        return
    num_kept = num_moves
    kept[:num_kept] = moves[:num_kept]
    _undo_moves(candidate, num_moves)
    while low <= high:
        ceiling = (low + high) >> 1
        # With the replicas that exist first; if that fails, the largest pieces first.
        num_moves, is_below = _move_below(
            ceiling, True, candidate, state.slot_last_use, is_protected, copy_budget, threshold
        )
        if not is_below:
            _undo_moves(candidate, num_moves)
            num_moves, is_below = _move_below(
                ceiling, False, candidate, state.slot_last_use, is_protected, copy_budget, threshold
            )
        if is_below:
            reached_us = _net_gain_us(candidate, num_moves, cost, baseline_us)
            if reached_us > gain_us:
                gain_us, num_kept = reached_us, num_moves
                kept[:num_kept] = moves[:num_kept]
            high = ceiling - 1
        else:
            low = ceiling + 1
        _undo_moves(candidate, num_moves)
    for i in range(num_kept):
        _apply_move(candidate, kept[i, 0], kept[i, 1], kept[i, 2], i)


@planner_compiled
def _move_below(
    ceiling: int,
    prefers_free: bool,
    candidate: Candidate,
    last_use: Int64Array,
    is_protected: UInt8Array,
    copy_budget: int,
    threshold: int,
) -> tuple[int, bool]:
    """Move the excess over `ceiling` from the heaviest worker on; nobody is lifted above it.

    Terminates: the sum of the excesses decreases with every move.

    Returns:
        The number of moves made, and whether no worker is above the ceiling.
    """
    tile_load, moves = candidate.tile_load, candidate.moves
    num_copies, num_moves = 0, _gather_at_primaries(candidate)
    while True:
        h = np.argmax(tile_load)
        excess = tile_load[h] - ceiling
        if excess <= 0:
            return num_moves, True
        if num_moves == moves.shape[0]:
            return num_moves, False
        most = max(excess, np.int64(threshold + 1))
        donor, receiver, tiles = _find_free_move(h, ceiling, most, threshold, candidate)
        is_enough = tiles > 0 if prefers_free else tiles == most
        if not is_enough and num_copies < copy_budget:
            copy_donor, slot, copy_tiles = _find_copy(
                h, ceiling, most, threshold, candidate, last_use, is_protected
            )
            if copy_tiles > tiles:
                donor, receiver, tiles = copy_donor, slot, copy_tiles
                num_copies += 1
        if tiles == 0:
            return num_moves, False
        _apply_move(candidate, donor, receiver, tiles, num_moves)
        num_moves += 1


@planner_compiled
def _gather_at_primaries(candidate: Candidate) -> int:
    """Move the tiles of all replicas to their primaries; return the number of moves.

    Then a slot is taken only where the ceiling needs it, and the others can be rebound.
    """
    num_moves = 0
    for replica in range(candidate.first_replica.size, candidate.replica_expert.size):
        tiles = candidate.replica_tiles[replica]
        if tiles > 0:
            expert = candidate.replica_expert[replica]
            _apply_move(candidate, replica, int(expert), int(tiles), num_moves)
            num_moves += 1
    return num_moves


@planner_compiled
def _replica_on(candidate: Candidate, worker: int, index: int) -> int:
    """Return the index-th replica on a worker: its primaries, then its slots; -1 after the last."""
    start, stop = candidate.primary_starts[worker], candidate.primary_starts[worker + 1]
    if index < stop - start:
        return int(start) + index
    num_experts = candidate.first_replica.size
    redundant_slots = (candidate.replica_expert.size - num_experts) // candidate.tile_load.size
    slot = index - (stop - start)
    return num_experts + worker * redundant_slots + slot if slot < redundant_slots else NONE


@planner_compiled
def _find_free_move(
    h: int, ceiling: int, most: int, threshold: int, candidate: Candidate
) -> tuple[int, int, int]:
    """Find the largest move from h to replicas that exist: donor, receiver, tiles (0 = none)."""
    best_donor, best_receiver, best_tiles = NONE, NONE, threshold
    index = 0
    donor = _replica_on(candidate, h, index)
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
        donor = _replica_on(candidate, h, index)
    return best_donor, best_receiver, best_tiles if best_donor != NONE else 0


@planner_compiled
def _find_copy(
    h: int,
    ceiling: int,
    most: int,
    threshold: int,
    candidate: Candidate,
    last_use: Int64Array,
    is_protected: UInt8Array,
) -> tuple[int, int, int]:
    """Find the largest move from h to a new replica: donor, slot to bind, tiles (0 = none).

    Of several as large the receiver with the least room: the others keep theirs for larger pieces.
    """
    best_donor, best_receiver, best_tiles = NONE, NONE, threshold
    best_room = np.int64(0)
    index = 0
    donor = _replica_on(candidate, h, index)
    while donor != NONE:
        expert = candidate.replica_expert[donor]
        available = min(candidate.replica_tiles[donor], most)
        for c in range(candidate.tile_load.size if available >= max(best_tiles, 1) else 0):
            room = ceiling - candidate.tile_load[c]
            tiles = min(available, room)
            if tiles <= threshold or tiles < best_tiles:
                continue
            if tiles == best_tiles and best_donor != NONE and room >= best_room:
                continue
            if is_on_worker(
                expert,
                c,
                candidate.replica_worker,
                candidate.first_replica,
                candidate.next_replica,
            ):
                continue
            slot = find_safe_slot(
                c,
                candidate.first_replica.size,
                is_protected,
                last_use,
                candidate.is_reserved,
                candidate.replica_expert,
                candidate.replica_tiles,
            )
            if slot != NONE:
                best_donor, best_receiver, best_tiles = donor, slot, int(tiles)
                best_room = room
        index += 1
        donor = _replica_on(candidate, h, index)
    return best_donor, best_receiver, best_tiles if best_donor != NONE else 0


@planner_compiled
def _apply_move(candidate: Candidate, donor: int, receiver: int, tiles: int, index: int) -> None:
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
def _undo_moves(candidate: Candidate, num_moves: int) -> None:
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
def _net_gain_us(
    candidate: Candidate, num_moves: int, cost: CostModel, baseline_us: float
) -> float:
    """Return G of the candidate as it stands after `num_moves` moves."""
    copies_in, copies_out = candidate.copies_in, candidate.copies_out
    copies_in[:] = 0
    copies_out[:] = 0
    for i in range(num_moves):
        receiver = candidate.moves[i, 1]
        expert = candidate.replica_expert[receiver]
        if candidate.moves[i, 3] != expert:
            copies_in[candidate.replica_worker[receiver]] += 1
            copies_out[candidate.replica_worker[expert]] += 1
    if cost.slot_time_us != 0.0:
        count_active_slots(
            candidate.active_slots, candidate.replica_tiles, candidate.replica_worker
        )
    candidate_us = ffn_time_us(candidate.tile_load, candidate.active_slots, cost)
    raw_copy_us = copy_time_us(copies_in, copies_out, cost)
    exposed_us = exposed_time_us(raw_copy_us, cost.window_us)
    return float(net_gain_us(baseline_us, candidate_us, exposed_us))
