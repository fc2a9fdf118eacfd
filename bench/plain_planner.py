"""Algorithm 1 of the paper transcribed to numba as it stands: the baseline of `bench.scheduler`.

Experts x workers matrices, loads sorted for every search, every expert tried for every pair of
workers, a candidate kept by copying it. The same plans as `afore_kernels.runtime.planner`.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numba
import numpy as np
import numpy.typing as npt

from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.planner import Limits


class PlainState(NamedTuple):
    """What is remembered of one layer.

    Attributes:
        primary: worker of each expert's primary, int64 [num_experts].
        slot_expert: C_t, -1 = empty, int64 [num_workers, redundant_slots].
        slot_last_use: sequence of the last target with tiles there, int64, same shape.
        tiles: N_t, int64 [num_experts, num_workers].
    """

    primary: npt.NDArray[np.int64]
    slot_expert: npt.NDArray[np.int64]
    slot_last_use: npt.NDArray[np.int64]
    tiles: npt.NDArray[np.int64]

    @classmethod
    def initial(cls, placement: PrimaryPlacement) -> Self:
        """Return the state without replicas and without a preceding assignment."""
        slots = (placement.num_workers, placement.redundant_slots)
        return cls(
            placement.primary_worker.astype(np.int64),
            np.full(slots, -1, np.int64),
            np.full(slots, -1, np.int64),
            np.zeros((placement.num_experts, placement.num_workers), np.int64),
        )


@numba.njit(cache=True, nogil=True)
def _replicas(state, slot_expert):
    """P: whether worker w holds expert e, bool [num_experts, num_workers]."""
    is_replica = np.zeros(state.tiles.shape, np.bool_)
    for expert in range(state.primary.size):
        is_replica[expert, state.primary[expert]] = True
    for worker in range(slot_expert.shape[0]):
        for slot in range(slot_expert.shape[1]):
            if slot_expert[worker, slot] >= 0:
                is_replica[slot_expert[worker, slot], worker] = True
    return is_replica


@numba.njit(cache=True, nogil=True)
def _initialize(state, previous, is_replica, demand, limits):
    """InitializeAssignment: rescale the previous proportions, largest remainder."""
    num_experts, num_workers = previous.shape
    tiles = np.zeros_like(previous)
    for expert in range(num_experts):
        expert_tiles = -(-np.int64(demand[expert]) // limits.tile_m)
        total = (previous[expert] * is_replica[expert]).sum()
        if expert_tiles <= limits.compactness_threshold or total == 0:
            tiles[expert, state.primary[expert]] = expert_tiles
            continue
        remainders = np.full(num_workers, -1, np.int64)
        for worker in range(num_workers):
            if is_replica[expert, worker]:
                share = expert_tiles * previous[expert, worker]
                tiles[expert, worker] = share // total
                remainders[worker] = share % total
        for _ in range(expert_tiles - tiles[expert].sum()):
            worker = np.argmax(remainders)
            tiles[expert, worker] += 1
            remainders[worker] = -1
    return tiles


@numba.njit(cache=True, nogil=True)
def _find_move(tiles, is_replica, is_receiver, is_within, threshold):
    """FindWithinMove or FindBeyondMove: expert, donor, receiver, tiles (0 if there is none)."""
    load = tiles.sum(axis=0)
    lightest_first = np.argsort(load, kind="mergesort")
    heaviest_first = np.argsort(-load, kind="mergesort")
    for h in heaviest_first:
        for c in lightest_first:
            most = (load[h] - load[c]) // 2
            if most <= threshold:
                break
            if not is_receiver[c]:
                continue
            best, best_tiles = -1, threshold
            for expert in range(tiles.shape[0]):
                if is_replica[expert, c] == is_within:
                    q = min(tiles[expert, h], most)
                    if q > best_tiles:
                        best, best_tiles = expert, q
            if best >= 0:
                return best, h, c, best_tiles
    return -1, -1, -1, 0


@numba.njit(cache=True, nogil=True)
def _safe_slot(worker, tiles, slot_expert, slot_last_use, is_unsafe):
    best = -1
    for slot in range(slot_expert.shape[1]):
        if is_unsafe[worker, slot]:
            continue
        expert = slot_expert[worker, slot]
        if expert < 0:
            return slot
        if tiles[expert, worker] == 0 and (
            best < 0 or slot_last_use[worker, slot] < slot_last_use[worker, best]
        ):
            best = slot
    return best


@numba.njit(cache=True, nogil=True)
def _ffn_time_us(tiles, cost):
    slowest = 0.0
    for worker in range(tiles.shape[1]):
        active = (tiles[:, worker] > 0).sum()
        time = cost.tile_time_us * tiles[:, worker].sum() + cost.slot_time_us * active
        slowest = max(slowest, time)
    return slowest


@numba.njit(cache=True, nogil=True)
def plain_plan(
    slot_pairs: Int32Array,
    slot_copy: UInt8Array,
    state: PlainState,
    demand: Int32Array,
    is_protected: UInt8Array,
    limits: Limits,
    cost: CostModel,
    sequence: int,
) -> int:
    """Plan one target and record it in `state`; arguments as of `planner.plan_core`.

    Returns:
        Number of copies.
    """
    num_workers, redundant_slots = state.slot_expert.shape
    threshold = limits.compactness_threshold
    slot_expert = state.slot_expert.copy()
    is_replica = _replicas(state, slot_expert)
    tiles = _initialize(state, state.tiles, is_replica, demand, limits)

    anyone = np.ones(num_workers, np.bool_)
    while True:
        expert, h, c, q = _find_move(tiles, is_replica, anyone, True, threshold)
        if q == 0:
            break
        tiles[expert, h] -= q
        tiles[expert, c] += q

    baseline_us, best_gain_us = _ffn_time_us(tiles, cost), 0.0
    selected_tiles, selected_slots, num_copies = tiles.copy(), slot_expert.copy(), 0
    is_unsafe = is_protected > 0
    into, out_of = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64)
    for copy in range(limits.copy_budget):
        is_receiver = np.zeros(num_workers, np.bool_)
        for worker in range(num_workers):
            slot = _safe_slot(worker, tiles, slot_expert, state.slot_last_use, is_unsafe)
            is_receiver[worker] = slot >= 0
        expert, h, c, q = _find_move(tiles, is_replica, is_receiver, False, threshold)
        if q == 0:
            break
        slot = _safe_slot(c, tiles, slot_expert, state.slot_last_use, is_unsafe)
        if slot_expert[c, slot] >= 0:
            is_replica[slot_expert[c, slot], c] = False
        slot_expert[c, slot] = expert
        is_replica[expert, c] = True
        is_unsafe[c, slot] = True
        into[c] += 1
        out_of[state.primary[expert]] += 1
        tiles[expert, h] -= q
        tiles[expert, c] += q
        raw_us = cost.copy_time_us * max(into.max(), out_of.max())
        gain_us = baseline_us - _ffn_time_us(tiles, cost) - max(0.0, raw_us - cost.window_us)
        if gain_us > best_gain_us:
            best_gain_us = gain_us
            selected_tiles, selected_slots, num_copies = tiles.copy(), slot_expert.copy(), copy + 1

    state.tiles[:] = selected_tiles
    for worker in range(num_workers):
        for slot in range(redundant_slots):
            expert = selected_slots[worker, slot]
            slot_copy[worker, slot] = expert != state.slot_expert[worker, slot]
            slot_pairs[worker, slot] = 0
            if expert >= 0 and selected_tiles[expert, worker] > 0:
                state.slot_last_use[worker, slot] = sequence
                pairs = selected_tiles[expert, worker] * limits.tile_m
                if selected_tiles[expert, state.primary[expert]] == 0:
                    busy = np.nonzero(selected_tiles[expert])[0]
                    if busy[-1] == worker:
                        pairs -= selected_tiles[expert].sum() * limits.tile_m - demand[expert]
                slot_pairs[worker, slot] = pairs
    state.slot_expert[:] = selected_slots
    return num_copies
