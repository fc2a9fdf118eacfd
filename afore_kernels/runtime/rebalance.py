"""Rebalancing of a candidate: stages 2 and 3 of Algorithm 1 (section 5.2), compiled.

Both are greedy: workers h in decreasing load are scanned for tiles to move to workers c in
increasing load, and the first pair that admits a move of more than theta tiles makes it.
"""

from __future__ import annotations

import numba
import numpy as np

from afore_kernels.plan import UInt8Array
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
    find_replica,
    move_tiles,
    redundant_range,
)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def rebalance_within(candidate: Candidate, threshold: int) -> None:
    """Move tiles between existing replicas until no eligible move remains (stage 2).

    Terminates: each move strictly decreases the sorted load vector in lexicographic order.

    Args:
        candidate: in and out, with its loads counted.
        threshold: theta, a move carries more tiles than this.
    """
    while True:
        donor, receiver, tiles = _find_within_move(candidate, threshold)
        if tiles == 0:
            break
        move_tiles(candidate, donor, receiver, tiles)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find_within_move(candidate: Candidate, threshold: int) -> tuple[int, int, int]:
    """Find stage 2's next move: donor replica, receiver replica, tiles (0 if there is none)."""
    for h in candidate.heaviest_first:
        for c in candidate.lightest_first:
            most = (candidate.tile_load[h] - candidate.tile_load[c]) // 2
            if most <= threshold:
                break  # so does every later c: they carry at least as much
            donor, receiver, tiles = _best_shared_expert(candidate, h, c, most)
            if tiles > threshold:
                return donor, receiver, tiles
    return NONE, NONE, 0


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _best_shared_expert(candidate: Candidate, h: int, c: int, most: int) -> tuple[int, int, int]:
    """Find the expert on h and c with the largest q_e(h, c) (Eq. 10), ties to the lower expert.

    Such an expert sits in a redundant slot of c, or in one of h with its primary on c.
    """
    best_donor, best_receiver, best_expert, best_tiles = NONE, NONE, NONE, 0
    start, stop = redundant_range(candidate, c)
    for receiver in range(start, stop):
        expert = candidate.replica_expert[receiver]
        donor = NONE if expert == NONE else find_replica(candidate, expert, h)
        tiles = 0 if donor == NONE else min(candidate.replica_tiles[donor], most)
        if tiles > best_tiles or (tiles == best_tiles and expert < best_expert):
            best_donor, best_receiver, best_expert, best_tiles = donor, receiver, expert, tiles
    start, stop = redundant_range(candidate, h)
    for donor in range(start, stop):
        expert = candidate.replica_expert[donor]
        is_shared = expert != NONE and candidate.replica_worker[expert] == c
        tiles = min(candidate.replica_tiles[donor], most) if is_shared else 0
        if tiles > best_tiles or (tiles == best_tiles and expert < best_expert):
            best_donor, best_receiver, best_expert, best_tiles = donor, expert, expert, tiles
    return best_donor, best_receiver, best_tiles


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def rebalance_beyond(
    candidate: Candidate,
    state: LayerState,
    is_protected: UInt8Array,
    copy_budget: int,
    threshold: int,
    cost: CostModel,
) -> None:
    """Explore new replicas and keep the moves up to the best positive net gain (stage 3).

    Every candidate extends the one before it, so the selected one is a prefix of the moves and
    restoring it is undoing the others.

    Args:
        candidate: in and out, after stage 2.
        state: the recorded state, of which only `slot_last_use` is read.
        is_protected: U_t, 1 where a slot must not be rebound, uint8 [num_workers, redundant_slots].
        copy_budget: B, most new replicas.
        threshold: theta, a move carries more tiles than this.
        cost: the estimates of the net gain, all float.
    """
    moves, replica_worker = candidate.moves, candidate.replica_worker
    baseline_us = ffn_time_us(candidate.tile_load, candidate.active_slots, cost)
    best_gain_us = 0.0
    num_moves, num_selected = 0, 0
    while num_moves < copy_budget:
        donor, receiver, tiles = _find_beyond_move(candidate, state, is_protected, threshold)
        if tiles == 0:
            break
        expert = candidate.replica_expert[donor]
        moves[num_moves, 0], moves[num_moves, 1], moves[num_moves, 2] = donor, receiver, tiles
        moves[num_moves, 3] = candidate.replica_expert[receiver]
        num_moves += 1
        bind_replica(candidate, receiver, expert)
        candidate.is_reserved[receiver] = True
        candidate.copies_in[replica_worker[receiver]] += 1
        candidate.copies_out[replica_worker[expert]] += (
            1  # the source is the primary, not the donor
        )
        move_tiles(candidate, donor, receiver, tiles)

        candidate_us = ffn_time_us(candidate.tile_load, candidate.active_slots, cost)
        raw_copy_us = copy_time_us(candidate.copies_in, candidate.copies_out, cost)
        exposed_us = exposed_time_us(raw_copy_us, cost.window_us)
        gain_us = net_gain_us(baseline_us, candidate_us, exposed_us)
        if gain_us > best_gain_us:
            best_gain_us, num_selected = gain_us, num_moves

    for i in range(num_moves - 1, num_selected - 1, -1):
        donor, receiver, tiles, evicted = moves[i]
        move_tiles(candidate, receiver, donor, tiles)
        bind_replica(candidate, receiver, evicted)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find_beyond_move(
    candidate: Candidate, state: LayerState, is_protected: UInt8Array, threshold: int
) -> tuple[int, int, int]:
    """Find stage 3's next move: donor replica, slot to bind, tiles (0 if there is none)."""
    for h in candidate.heaviest_first:
        for c in candidate.lightest_first:
            most = (candidate.tile_load[h] - candidate.tile_load[c]) // 2
            if most <= threshold:
                break
            receiver = find_safe_slot(candidate, state, is_protected, c)
            if receiver == NONE:
                continue
            donor, tiles = _best_missing_expert(candidate, h, c, most)
            if tiles > threshold:
                return donor, receiver, tiles
    return NONE, NONE, 0


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def find_safe_slot(
    candidate: Candidate, state: LayerState, is_protected: UInt8Array, worker: int
) -> int:
    """Find the slot of `worker` to rebind, or -1: an empty one, else the least recently used.

    A slot that holds tiles, is protected, or was rebound by this candidate is not safe.
    """
    best, best_last_use = NONE, np.int64(0)
    start, stop = redundant_range(candidate, worker)
    for replica in range(start, stop):
        slot = replica - start
        if is_protected[worker, slot] or candidate.is_reserved[replica]:
            continue
        if candidate.replica_expert[replica] == NONE:
            return replica
        last_use = state.slot_last_use[worker, slot]
        if candidate.replica_tiles[replica] == 0 and (best == NONE or last_use < best_last_use):
            best, best_last_use = replica, last_use
    return best


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _best_missing_expert(candidate: Candidate, h: int, c: int, most: int) -> tuple[int, int]:
    """Find the expert on h and not on c with the largest q_e(h, c): its replica on h, its tiles."""
    best_donor, best_expert, best_tiles = NONE, NONE, 0
    primaries = candidate.primary_starts[h + 1] - candidate.primary_starts[h]
    start, stop = redundant_range(candidate, h)
    for i in range(primaries + stop - start):
        donor = candidate.primary_starts[h] + i if i < primaries else start + i - primaries
        expert = candidate.replica_expert[donor]
        tiles = min(candidate.replica_tiles[donor], most)
        is_better = tiles > best_tiles or (tiles == best_tiles and expert < best_expert)
        if is_better and find_replica(candidate, expert, c) == NONE:
            best_donor, best_expert, best_tiles = donor, expert, tiles
    return best_donor, best_tiles
