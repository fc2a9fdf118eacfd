"""Refinement of stage 3, beyond the paper: aim at a load instead of halving differences.

The greedy search halves the difference of the heaviest and the lightest worker with every copy, so
where the copy budget or the slots bind it spends copies on pieces that are larger or smaller than
needed. Here a ceiling is given, every worker above it hands over just its excess in as few pieces
as possible, and binary search finds the lowest ceiling that the budget and the slots reach.
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
from afore_kernels.runtime.placement import NONE, Candidate, LayerState, count_active_slots
from afore_kernels.runtime.refine_moves import (
    apply_move,
    find_copy,
    find_free_move,
    find_slot,
    gather_at_primaries,
    replica_on,
    undo_moves,
)
from afore_kernels.runtime.refine_paths import find_path, move_along_path

# How to reach a ceiling, tried in this order. Replicas that exist cost nothing, so they come first;
# if that fails, the largest pieces do. Where even those are smaller than the room of the lightest
# workers, slots are scarce: they go to the largest experts of all, whoever has them.
FREE_FIRST, LARGEST_FIRST, FILL_FIRST = 0, 1, 2


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
    while low <= high:
        ceiling = (low + high) >> 1
        is_below = False
        for strategy in range(FILL_FIRST + 1):
            if not is_below:
                undo_moves(candidate, num_moves)
                num_moves, is_below = _move_below(
                    ceiling,
                    strategy,
                    candidate,
                    state.slot_last_use,
                    is_protected,
                    copy_budget,
                    threshold,
                )
        if is_below:
            reached_us = _net_gain_us(candidate, num_moves, cost, baseline_us)
            if reached_us > gain_us:
                gain_us, num_kept = reached_us, num_moves
                kept[:num_kept] = moves[:num_kept]
            high = ceiling - 1
        else:
            low = ceiling + 1
    undo_moves(candidate, num_moves)
    for i in range(num_kept):
        apply_move(candidate, kept[i, 0], kept[i, 1], kept[i, 2], i)


@planner_compiled
def _move_below(
    ceiling: int,
    strategy: int,
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
    num_copies, num_moves = 0, gather_at_primaries(candidate)
    if strategy == FILL_FIRST:
        num_copies, num_moves = _fill_lightest(
            ceiling, candidate, last_use, is_protected, copy_budget, threshold, num_moves
        )
    while True:
        h = np.argmax(tile_load)
        excess = tile_load[h] - ceiling
        if excess <= 0:
            return num_moves, True
        if num_moves == moves.shape[0]:
            return num_moves, False
        most = max(excess, np.int64(threshold + 1))
        donor, receiver, tiles = find_free_move(h, ceiling, most, threshold, candidate)
        is_enough = tiles > 0 if strategy == FREE_FIRST else tiles == most
        if not is_enough and num_copies < copy_budget:
            copy_donor, slot, copy_tiles = find_copy(
                h, ceiling, most, threshold, candidate, last_use, is_protected
            )
            if copy_tiles > tiles:
                donor, receiver, tiles = copy_donor, slot, copy_tiles
                num_copies += 1
        if tiles > 0:
            apply_move(candidate, donor, receiver, tiles, num_moves)
            num_moves += 1
            continue
        c = find_path(
            h, ceiling, threshold, copy_budget - num_copies, candidate, last_use, is_protected
        )
        if c == NONE or num_moves + tile_load.size > moves.shape[0]:
            return num_moves, False
        num_copies += candidate.hops[c, 2]
        num_moves = move_along_path(h, c, ceiling, most, candidate, num_moves)


@planner_compiled
def _fill_lightest(
    ceiling: int,
    candidate: Candidate,
    last_use: Int64Array,
    is_protected: UInt8Array,
    copy_budget: int,
    threshold: int,
    num_moves: int,
) -> tuple[int, int]:
    """Fill the lightest workers with the largest experts of the others while those are scarce.

    Returns:
        The number of copies, and of moves so far.
    """
    tile_load, is_filled = candidate.tile_load, candidate.is_settled
    num_copies = 0
    is_filled[:] = False
    while True:
        c = NONE
        for worker in range(tile_load.size):
            if not is_filled[worker] and (c == NONE or tile_load[worker] < tile_load[c]):
                c = worker
        if c == NONE or candidate.replica_tiles.max() >= ceiling - tile_load[c]:
            return num_copies, num_moves
        is_filled[c] = True
        while ceiling - tile_load[c] > threshold and num_moves < candidate.moves.shape[0]:
            slot = NONE
            if num_copies < copy_budget:
                slot = find_slot(c, candidate, last_use, is_protected)
            donor, receiver, tiles = _largest_elsewhere(c, slot, threshold, candidate)
            if donor == NONE:
                break
            num_copies += receiver == slot
            tiles = min(tiles, ceiling - tile_load[c])
            apply_move(candidate, donor, receiver, tiles, num_moves)
            num_moves += 1


@planner_compiled
def _largest_elsewhere(
    c: int, slot: int, threshold: int, candidate: Candidate
) -> tuple[int, int, int]:
    """Find the most tiles of an expert on a worker not yet filled: donor, receiver on c, tiles."""
    best_donor, best_receiver, best_tiles = NONE, NONE, np.int64(threshold)
    for donor in range(candidate.replica_tiles.size):
        tiles = candidate.replica_tiles[donor]
        if tiles <= best_tiles or candidate.is_settled[candidate.replica_worker[donor]]:
            continue
        receiver = replica_on(c, candidate.replica_expert[donor], candidate)
        if receiver == NONE:
            receiver = slot
        if receiver != NONE:
            best_donor, best_receiver, best_tiles = donor, receiver, tiles
    return best_donor, best_receiver, int(best_tiles)


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
