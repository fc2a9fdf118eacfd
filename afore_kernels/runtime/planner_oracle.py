"""Algorithm 1 of the paper (section 5.2), transcribed line by line: slow, literal, readable.

`planner` must return the same plan. "line n" is the numbered line of Algorithm 1. Workers, experts
and slots are plain integers; N_t is a dict from (expert, worker) to tiles, C_t one from
(worker, slot) to expert, and the replica set R_e(P) is derived from C_t whenever it is needed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget

Tiles = dict[tuple[int, int], int]  # N_t: (expert, worker) -> tiles, absent = 0
SlotTable = dict[tuple[int, int], int]  # C_t: (worker, slot) -> expert, absent = empty
Copies = list[tuple[int, int, int]]  # Delta_t: (expert, worker, slot)


class Move(NamedTuple):
    """One rebalancing step that was tried, selected or not."""

    stage: Literal[2, 3]
    expert: int
    donor: int
    receiver: int
    tiles: int


class _Search:
    """The problem of one target: what stays fixed while the candidate (P, N_t, C_t) changes."""

    def __init__(self, placement: PrimaryPlacement, limits: Limits, cost: CostModel) -> None:
        self.num_workers = placement.num_workers
        self.num_experts = placement.num_experts
        self.redundant_slots = placement.redundant_slots
        self.primary = [int(worker) for worker in placement.primary_worker]
        self.limits = limits
        self.cost = cost

    def replicas(self, expert: int, table: SlotTable) -> set[int]:
        """R_e(P): the primary's worker and those with a slot bound to the expert."""
        return {self.primary[expert]} | {w for (w, _), bound in table.items() if bound == expert}

    def loads(self, tiles: Tiles) -> list[int]:
        """T: tiles per worker."""
        load = [0] * self.num_workers
        for (_, worker), count in tiles.items():
            load[worker] += count
        return load

    def apportion(self, previous: Tiles, demand: list[int], table: SlotTable) -> Tiles:
        """InitializeAssignment: rescale the previous proportions to the demand."""
        tiles: Tiles = {}
        for expert, pairs in enumerate(demand):
            k = -(-pairs // self.limits.tile_m)
            replicas = sorted(self.replicas(expert, table))
            weight = {w: previous.get((expert, w), 0) for w in replicas}
            total = sum(weight.values())
            if k <= self.limits.compactness_threshold or total == 0:
                tiles[expert, self.primary[expert]] = k
                continue
            for w in replicas:
                tiles[expert, w] = k * weight[w] // total
            leftover = k - sum(tiles[expert, w] for w in replicas)
            by_remainder = sorted(replicas, key=lambda w: (-(k * weight[w] % total), w))
            for w in by_remainder[:leftover]:
                tiles[expert, w] += 1
        return tiles

    def worker_pairs(self, tiles: Tiles) -> list[tuple[int, int, int]]:
        """Pairs (h, c) and floor((T_h - T_c) / 2), in the order both searches scan them."""
        load = self.loads(tiles)
        decreasing = sorted(range(self.num_workers), key=lambda w: (-load[w], w))
        increasing = sorted(range(self.num_workers), key=lambda w: (load[w], w))
        return [
            (h, c, (load[h] - load[c]) // 2)
            for h in decreasing
            for c in increasing
            if load[h] - load[c] > 1
        ]

    def best_expert(
        self, tiles: Tiles, table: SlotTable, h: int, c: int, most: int, *, is_within: bool
    ) -> tuple[int, int] | None:
        """The eligible expert with the largest q_e(h, c) (Eq. 10) and q; ties to the lower one."""
        best = None
        for expert in range(self.num_experts):
            q = min(tiles.get((expert, h), 0), most)
            is_larger = q > self.limits.compactness_threshold and (best is None or q > best[1])
            if is_larger and (c in self.replicas(expert, table)) == is_within:
                best = (expert, q)
        return best

    def find_within_move(self, tiles: Tiles, table: SlotTable) -> Move | None:
        """FindWithinMove: the receiver already has a replica."""
        for h, c, most in self.worker_pairs(tiles):
            if best := self.best_expert(tiles, table, h, c, most, is_within=True):
                return Move(2, best[0], h, c, best[1])
        return None

    def safe_slot(
        self,
        worker: int,
        tiles: Tiles,
        table: SlotTable,
        unsafe: set[tuple[int, int]],
        last_use: dict[tuple[int, int], int],
    ) -> int | None:
        """The empty slot, else the least recently used one whose replica has no work in N_t."""
        slots = [r for r in range(self.redundant_slots) if (worker, r) not in unsafe]
        empty = [r for r in slots if (worker, r) not in table]
        if empty:
            return min(empty)
        idle = [r for r in slots if tiles.get((table[worker, r], worker), 0) == 0]
        return min(idle, key=lambda r: (last_use[worker, r], r), default=None)

    def find_beyond_move(
        self,
        tiles: Tiles,
        table: SlotTable,
        unsafe: set[tuple[int, int]],
        last_use: dict[tuple[int, int], int],
    ) -> tuple[Move, int] | None:
        """FindBeyondMove: the receiver has no replica but a safe slot r."""
        for h, c, most in self.worker_pairs(tiles):
            slot = self.safe_slot(c, tiles, table, unsafe, last_use)
            if slot is None:
                continue
            if best := self.best_expert(tiles, table, h, c, most, is_within=False):
                return Move(3, best[0], h, c, best[1]), slot
        return None

    def ffn_time_us(self, tiles: Tiles) -> float:
        """F of an assignment."""
        active = [0] * self.num_workers
        for (_, worker), count in tiles.items():
            active[worker] += count > 0
        return max(
            self.cost.tile_time_us * load + self.cost.slot_time_us * slots
            for load, slots in zip(self.loads(tiles), active)
        )

    def exposed_time_us(self, copies: Copies) -> float:
        """O_t of a copy list (Eq. 7)."""
        into = [sum(w == worker for _, w, _ in copies) for worker in range(self.num_workers)]
        out = [
            sum(self.primary[e] == worker for e, _, _ in copies)
            for worker in range(self.num_workers)
        ]
        return max(0.0, self.cost.copy_time_us * max(into + out) - self.cost.window_us)

    def slot_pairs(self, tiles: Tiles, demand: list[int], table: SlotTable) -> SlotTable:
        """A_t of the redundant slots: whole tiles, but for the partial tile of an idle primary."""
        pairs = {}
        for (worker, slot), expert in table.items():
            pairs[worker, slot] = tiles.get((expert, worker), 0) * self.limits.tile_m
            busy = [w for (e, w), count in tiles.items() if e == expert and count > 0]
            if pairs[worker, slot] and not tiles.get((expert, self.primary[expert])):
                k = sum(tiles.get((expert, w), 0) for w in busy)
                if worker == max(busy):
                    pairs[worker, slot] -= k * self.limits.tile_m - demand[expert]
        return pairs


def plan_microbatch_oracle(
    demand: Int32Array,
    state: LayerState,
    placement: PrimaryPlacement,
    limits: Limits,
    cost: CostModel,
    *,
    sequence: int,
    is_protected: UInt8Array,
    planning_demand: Int32Array,
    trace: list[Move] | None = None,
) -> PlannedTarget:
    """Plan one target; arguments and result as of `planner.plan_microbatch`.

    Args:
        trace: receives every move that was tried, in order.
    """
    search = _Search(placement, limits, cost)
    trace = [] if trace is None else trace
    slots = [(w, r) for w in range(search.num_workers) for r in range(search.redundant_slots)]
    table = {slot: int(state.slot_expert[slot]) for slot in slots if state.slot_expert[slot] >= 0}
    last_use = {slot: int(state.slot_last_use[slot]) for slot in slots}
    unsafe = {slot for slot in slots if is_protected[slot]}
    previous = {(e, search.primary[e]): int(n) for e, n in enumerate(state.primary_tiles)}
    previous |= {(e, w): int(state.slot_tiles[w, r]) for (w, r), e in table.items()}

    # Stage 1, lines 4-5
    copies: Copies = []
    tiles = search.apportion(previous, planning_demand.tolist(), table)
    # Stage 2, lines 7-9
    while move := search.find_within_move(tiles, table):
        trace.append(move)
        _apply(move, tiles)
    # Stage 3, lines 11-12
    baseline_us = search.ffn_time_us(tiles)
    best_gain_us = 0.0
    selected = (dict(tiles), dict(table), list(copies))
    # line 13
    while len(copies) < limits.copy_budget and (
        found := search.find_beyond_move(tiles, table, unsafe, last_use)
    ):
        move, slot = found
        trace.append(move)
        # lines 14-15; a slot reserved by an earlier move cannot be rebound either
        table[move.receiver, slot] = move.expert
        unsafe.add((move.receiver, slot))
        copies.append((move.expert, move.receiver, slot))
        # line 16
        _apply(move, tiles)
        # lines 17-21
        gain_us = baseline_us - search.ffn_time_us(tiles) - search.exposed_time_us(copies)
        if gain_us > best_gain_us:
            selected = (dict(tiles), dict(table), list(copies))
            best_gain_us = gain_us
    # line 23
    tiles, table, copies = selected

    # lines 24-25
    tiles = search.apportion(tiles, demand.tolist(), table)
    pairs = search.slot_pairs(tiles, demand.tolist(), table)
    after = state.copy()
    slot_pairs = np.zeros_like(state.slot_expert)
    slot_copy = np.zeros(state.slot_expert.shape, np.uint8)
    for expert, worker, slot in copies:
        slot_copy[worker, slot] = 1
        after.slot_expert[worker, slot] = expert
    for slot_index in slots:
        count = tiles.get((table.get(slot_index, -1), slot_index[0]), 0)
        slot_pairs[slot_index] = pairs.get(slot_index, 0)
        after.slot_tiles[slot_index] = count
        if count > 0:
            after.slot_last_use[slot_index] = sequence
    for expert in range(search.num_experts):
        after.primary_tiles[expert] = tiles.get((expert, search.primary[expert]), 0)
    return PlannedTarget(after.slot_expert.copy(), slot_pairs, slot_copy, after)


def _apply(move: Move, tiles: Tiles) -> None:
    receiver = (move.expert, move.receiver)
    tiles[move.expert, move.donor] -= move.tiles
    tiles[receiver] = tiles.get(receiver, 0) + move.tiles
