"""Rebalancing of a candidate: stages 2 and 3 of Algorithm 1 (section 5.2), compiled.

Both are greedy: workers h in decreasing load are scanned for tiles to move to workers c in
increasing load, and the first pair that admits a move of more than theta tiles makes it. What a
move does not touch is not looked at again: a worker without a move is *settled* until a load that
could change that has changed.
"""

from __future__ import annotations

import numpy as np

from afore_kernels.plan import Int32Array, UInt8Array
from afore_kernels.runtime.arrays import BoolArray, Int64Array, planner_compiled
from afore_kernels.runtime.cost import CostModel, exposed_time_us, ffn_time_us, net_gain_us
from afore_kernels.runtime.load_order import (
    index_of,
    index_of_displaced,
    replace_key,
    start_of_ties,
)
from afore_kernels.runtime.placement import NONE, Candidate, LayerState, bind_replica, is_on_worker

_NO_KEY = np.iinfo(np.int64).max


@planner_compiled
def rebalance_within(candidate: Candidate, num_experts: int, threshold: int) -> None:
    """Move tiles between existing replicas until no eligible move remains (stage 2).

    Terminates: each move strictly decreases the sorted load vector in lexicographic order.

    Args:
        candidate: in and out, with its workers in order.
        num_experts: experts of the placement.
        threshold: theta, a move carries more tiles than this.
    """
    worker_bits, keys, tile_load = candidate.worker_bits, candidate.keys, candidate.tile_load
    replica_worker, replica_expert = candidate.replica_worker, candidate.replica_expert
    replica_tiles, is_settled = candidate.replica_tiles, candidate.is_settled
    first_replica, next_replica = candidate.first_replica, candidate.next_replica
    first_shared, next_shared = candidate.first_shared, candidate.next_shared
    worker_mask = (1 << worker_bits) - 1
    redundant_slots = (replica_expert.size - num_experts) // tile_load.size
    for worker in range(keys.size):
        is_settled[worker] = False

    stop = keys.size
    while stop > 0:
        heaviest = keys[stop - 1] >> worker_bits
        if (heaviest - (keys[0] >> worker_bits)) >> 1 <= threshold:
            return
        start = start_of_ties(keys, stop, worker_bits)
        next_stop = start
        for i in range(start, stop):
            h = keys[i] & worker_mask
            if is_settled[h]:
                continue
            donor, receiver, tiles = _best_shared_move(
                h,
                num_experts,
                redundant_slots,
                threshold,
                worker_bits,
                tile_load,
                replica_worker,
                replica_expert,
                replica_tiles,
                first_replica,
                next_replica,
                first_shared,
                next_shared,
            )
            if tiles == 0:
                is_settled[h] = True
                continue
            c = np.int64(replica_worker[receiver])
            j = index_of(keys, tile_load[c] << worker_bits | c)
            replica_tiles[donor] -= tiles
            replica_tiles[receiver] += tiles
            tile_load[h] -= tiles
            tile_load[c] += tiles
            # c stays below h's old key and h above c's: neither replacement moves the other's.
            replace_key(keys, i, tile_load[h] << worker_bits | h)
            j = index_of_displaced(keys, j, (tile_load[c] - tiles) << worker_bits | c)
            replace_key(keys, j, tile_load[c] << worker_bits | c)
            is_settled[c] = False
            _unsettle_sharers(
                h,
                num_experts,
                redundant_slots,
                is_settled,
                replica_worker,
                replica_expert,
                first_replica,
                next_replica,
                first_shared,
                next_shared,
            )
            next_stop = keys.size
            break
        stop = next_stop


@planner_compiled
def _best_shared_move(
    h: int,
    num_experts: int,
    redundant_slots: int,
    threshold: int,
    worker_bits: int,
    tile_load: Int64Array,
    replica_worker: Int32Array,
    replica_expert: Int32Array,
    replica_tiles: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
    first_shared: Int32Array,
    next_shared: Int32Array,
) -> tuple[int, int, int]:
    """Find the move from h to the lightest worker with an eligible expert (Eq. 10).

    Of the experts eligible there the one with the largest q_e(h, c), ties to the lower expert.

    Returns:
        Donor replica, receiver replica, tiles; 0 tiles if there is none.
    """
    best_donor, best_receiver, best_expert = NONE, NONE, NONE
    best_tiles, best_key = np.int64(0), np.int64(_NO_KEY)
    slot = num_experts + h * redundant_slots
    slot_stop = slot + redundant_slots
    shared = first_shared[h]
    while slot < slot_stop or shared != NONE:
        if slot < slot_stop:
            donor = slot
            slot += 1
            expert = replica_expert[donor]
        else:
            donor = int(shared)
            shared = next_shared[shared]
            expert = np.int32(donor)
        available = replica_tiles[donor]
        if expert == NONE or available <= threshold:
            continue
        receiver = first_replica[expert]
        while receiver != NONE:
            c = np.int64(replica_worker[receiver])
            tiles = min(available, (tile_load[h] - tile_load[c]) >> 1)
            key = tile_load[c] << worker_bits | c
            if tiles > threshold and (
                key < best_key
                or (
                    key == best_key
                    and (tiles > best_tiles or (tiles == best_tiles and expert < best_expert))
                )
            ):
                best_donor, best_receiver, best_expert = donor, receiver, expert
                best_tiles, best_key = tiles, key
            receiver = next_replica[receiver]
    return best_donor, best_receiver, int(best_tiles)


@planner_compiled
def _unsettle_sharers(
    h: int,
    num_experts: int,
    redundant_slots: int,
    is_settled: BoolArray,
    replica_worker: Int32Array,
    replica_expert: Int32Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
    first_shared: Int32Array,
    next_shared: Int32Array,
) -> None:
    """Have the workers that share an expert with h looked at again: h has become lighter."""
    start = num_experts + h * redundant_slots
    for slot in range(start, start + redundant_slots):
        expert = replica_expert[slot]
        replica = NONE if expert == NONE else first_replica[expert]
        while replica != NONE:
            is_settled[replica_worker[replica]] = False
            replica = next_replica[replica]
    shared = first_shared[h]
    while shared != NONE:
        replica = first_replica[shared]
        while replica != NONE:
            is_settled[replica_worker[replica]] = False
            replica = next_replica[replica]
        shared = next_shared[shared]


@planner_compiled
def rebalance_beyond(
    candidate: Candidate,
    state: LayerState,
    is_protected: UInt8Array,
    copy_budget: int,
    threshold: int,
    cost: CostModel,
) -> tuple[float, float, int]:
    """Explore new replicas and keep the moves up to the best positive net gain (stage 3).

    Every candidate extends the one before it, so the selected one is a prefix of the moves and
    restoring it is undoing the others. The order of the loads is not restored.

    Args:
        candidate: in and out, after stage 2.
        state: the recorded state, of which only `slot_last_use` is read.
        is_protected: U_t, 1 where a slot must not be rebound, uint8 [num_workers, redundant_slots].
        copy_budget: B, most new replicas.
        threshold: theta, a move carries more tiles than this.
        cost: the estimates of the net gain, all float.

    Returns:
        F before this stage, the net gain, both in microseconds, and the number of moves kept.
    """
    worker_bits, keys, tile_load = candidate.worker_bits, candidate.keys, candidate.tile_load
    replica_worker, replica_expert = candidate.replica_worker, candidate.replica_expert
    replica_tiles, is_reserved = candidate.replica_tiles, candidate.is_reserved
    first_replica, next_replica = candidate.first_replica, candidate.next_replica
    primary_starts, safe_slot = candidate.primary_starts, candidate.safe_slot
    active_slots, is_settled = candidate.active_slots, candidate.is_settled
    copies_in, copies_out, moves = candidate.copies_in, candidate.copies_out, candidate.moves
    last_use = state.slot_last_use
    worker_mask = (1 << worker_bits) - 1
    num_workers, redundant_slots = is_protected.shape
    num_experts = replica_expert.size - num_workers * redundant_slots

    for replica in range(num_experts, is_reserved.size):
        is_reserved[replica] = False
    for worker in range(num_workers):
        copies_in[worker] = 0
        copies_out[worker] = 0
        is_settled[worker] = False
        safe_slot[worker] = find_safe_slot(
            worker, num_experts, is_protected, last_use, is_reserved, replica_expert, replica_tiles
        )

    baseline_us = _ffn_time_us(keys, worker_bits, tile_load, active_slots, cost)
    best_gain_us = 0.0
    num_moves, num_selected = 0, 0
    busiest_link = np.int64(0)
    while num_moves < copy_budget:
        i, j, donor, tiles = _find_beyond_move(
            threshold,
            worker_bits,
            num_experts,
            redundant_slots,
            keys,
            safe_slot,
            is_settled,
            primary_starts,
            replica_worker,
            replica_expert,
            replica_tiles,
            first_replica,
            next_replica,
        )
        if tiles == 0:
            break
        h, c = keys[i] & worker_mask, keys[j] & worker_mask
        receiver, expert = np.int64(safe_slot[c]), np.int64(replica_expert[donor])
        source = replica_worker[expert]  # the primary, not the donor
        moves[num_moves, 0], moves[num_moves, 1], moves[num_moves, 2] = donor, receiver, tiles
        moves[num_moves, 3] = replica_expert[receiver]
        num_moves += 1

        bind_replica(receiver, expert, replica_worker, replica_expert, first_replica, next_replica)
        is_reserved[receiver] = True
        copies_in[c] += 1
        copies_out[source] += 1
        busiest_link = max(busiest_link, copies_in[c], copies_out[source])
        replica_tiles[donor] -= tiles
        replica_tiles[receiver] = tiles
        active_slots[c] += 1
        active_slots[h] -= replica_tiles[donor] == 0
        tile_load[h] -= tiles
        tile_load[c] += tiles
        light_key = keys[j]
        replace_key(keys, i, tile_load[h] << worker_bits | h)
        j = index_of_displaced(keys, j, light_key)
        replace_key(keys, j, tile_load[c] << worker_bits | c)
        is_settled[c] = False
        for worker in (h, c):
            safe_slot[worker] = find_safe_slot(
                worker,
                num_experts,
                is_protected,
                last_use,
                is_reserved,
                replica_expert,
                replica_tiles,
            )

        candidate_us = _ffn_time_us(keys, worker_bits, tile_load, active_slots, cost)
        exposed_us = exposed_time_us(cost.copy_time_us * busiest_link, cost.window_us)
        gain_us = net_gain_us(baseline_us, candidate_us, exposed_us)
        if gain_us > best_gain_us:
            best_gain_us, num_selected = gain_us, num_moves

    for i in range(num_moves - 1, num_selected - 1, -1):
        donor, receiver, tiles, evicted = moves[i, 0], moves[i, 1], moves[i, 2], moves[i, 3]
        replica_tiles[receiver] = 0
        replica_tiles[donor] += tiles
        tile_load[replica_worker[donor]] += tiles
        tile_load[replica_worker[receiver]] -= tiles
        is_reserved[receiver] = False
        bind_replica(receiver, evicted, replica_worker, replica_expert, first_replica, next_replica)
    return baseline_us, best_gain_us, num_selected


@planner_compiled
def _ffn_time_us(
    keys: Int64Array,
    worker_bits: int,
    tile_load: Int64Array,
    active_slots: Int64Array,
    cost: CostModel,
) -> float:
    """Return F; where slots cost nothing it is read off the heaviest worker."""
    if cost.slot_time_us == 0.0:
        return float(cost.tile_time_us * (keys[keys.size - 1] >> worker_bits))
    return float(ffn_time_us(tile_load, active_slots, cost))


@planner_compiled
def _find_beyond_move(
    threshold: int,
    worker_bits: int,
    num_experts: int,
    redundant_slots: int,
    keys: Int64Array,
    safe_slot: Int32Array,
    is_settled: BoolArray,
    primary_starts: Int32Array,
    replica_worker: Int32Array,
    replica_expert: Int32Array,
    replica_tiles: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
) -> tuple[int, int, int, int]:
    """Find stage 3's next move: positions of h and c in `keys`, donor replica, tiles (0 = none)."""
    worker_mask = (1 << worker_bits) - 1
    lightest = 0
    while lightest < keys.size and safe_slot[keys[lightest] & worker_mask] == NONE:
        lightest += 1
    if lightest == keys.size:
        return NONE, NONE, NONE, 0
    stop = keys.size
    while stop > 0:
        heaviest = keys[stop - 1] >> worker_bits
        if (heaviest - (keys[lightest] >> worker_bits)) >> 1 <= threshold:
            break
        start = start_of_ties(keys, stop, worker_bits)
        for i in range(start, stop):
            h = keys[i] & worker_mask
            if is_settled[h]:
                continue
            for j in range(lightest, start):
                most = (heaviest - (keys[j] >> worker_bits)) >> 1
                if most <= threshold:
                    break
                c = keys[j] & worker_mask
                if safe_slot[c] == NONE:
                    continue
                donor, tiles, is_spread = _best_missing_expert(
                    h,
                    c,
                    most,
                    threshold,
                    num_experts + h * redundant_slots,
                    num_experts + (h + 1) * redundant_slots,
                    primary_starts,
                    replica_worker,
                    replica_expert,
                    replica_tiles,
                    first_replica,
                    next_replica,
                )
                if tiles > 0:
                    return i, j, donor, tiles
                if is_spread:
                    is_settled[h] = True
                    break
        stop = start
    return NONE, NONE, NONE, 0


@planner_compiled
def find_safe_slot(
    worker: int,
    num_experts: int,
    is_protected: UInt8Array,
    last_use: Int64Array,
    is_reserved: BoolArray,
    replica_expert: Int32Array,
    replica_tiles: Int64Array,
) -> int:
    """Find the slot of `worker` to rebind, or -1: an empty one, else the least recently used.

    A slot that holds tiles, is protected, or was rebound by this candidate is not safe.
    """
    best, best_last_use = NONE, np.int64(0)
    redundant_slots = is_protected.shape[1]
    start = num_experts + worker * redundant_slots
    for slot in range(redundant_slots):
        replica = start + slot
        if is_protected[worker, slot] or is_reserved[replica]:
            continue
        if replica_expert[replica] == NONE:
            return int(replica)
        used = last_use[worker, slot]
        if replica_tiles[replica] == 0 and (best == NONE or used < best_last_use):
            best, best_last_use = replica, used
    return best


@planner_compiled
def _best_missing_expert(
    h: int,
    c: int,
    most: int,
    threshold: int,
    slot_start: int,
    slot_stop: int,
    primary_starts: Int32Array,
    replica_worker: Int32Array,
    replica_expert: Int32Array,
    replica_tiles: Int64Array,
    first_replica: Int32Array,
    next_replica: Int32Array,
) -> tuple[int, int, bool]:
    """Find the expert on h and not on c with the largest q_e(h, c), ties to the lower expert.

    Returns:
        Its replica on h, its tiles (0 if none is eligible), and whether no expert of h has tiles
        enough for any move.
    """
    best_donor, best_expert, best_tiles = NONE, np.int64(NONE), np.int64(threshold)
    largest = np.int64(0)
    primary, primary_stop = np.int64(primary_starts[h]), np.int64(primary_starts[h + 1])
    for i in range(primary_stop - primary + slot_stop - slot_start):
        donor = primary + i
        if donor >= primary_stop:
            donor += slot_start - primary_stop
        available = replica_tiles[donor]
        largest = max(largest, available)
        tiles = min(available, most)
        if tiles < best_tiles or tiles <= threshold:
            continue
        expert = np.int64(replica_expert[donor])
        is_better = tiles > best_tiles or expert < best_expert
        if is_better and not is_on_worker(expert, c, replica_worker, first_replica, next_replica):
            best_donor, best_expert, best_tiles = int(donor), expert, tiles
    if best_donor == NONE:
        best_tiles = np.int64(0)
    return best_donor, int(best_tiles), bool(largest <= threshold)
