"""What a plan may assign, and bounds of its busiest worker's tiles that need no solver.

The optimum is that of the planner's own constraints: tiles T of the busiest worker, minimised over
every assignment that one plan may make from the same slot table, protected slots, copy budget and
compactness threshold. Tiles are whole: filling them with pairs of one expert each, no assignment of
pairs (Eq. 2-5) has a smaller busiest worker.

With theta > 0 the planner also moves more than theta tiles at a time. Of that only its consequence
for small experts is modelled, that they stay on their primary; the bounds are those of this
relaxation, so they remain valid lower bounds.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from afore_kernels.errors import InfeasiblePlanError
from afore_kernels.gemm.tiles import count_tiles
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """What the planner starts from, and which tile assignments it may end with.

    An assignment is int64 [num_experts, num_workers], the tiles of each expert on each worker. A
    worker runs its primaries, replicas in slots that are not rebound, and new copies, one per
    unprotected slot. So each used replica but those in protected slots takes one unprotected slot.

    Attributes:
        demand: pairs per expert, int32 [num_experts].
        state: of the layer before the plan.
        placement: the fixed primaries.
        limits: tile size, copy budget and compactness threshold.
        is_protected: U_t, 1 where a slot must not be rebound, uint8 [num_workers, redundant_slots].
    """

    demand: Int32Array
    state: LayerState
    placement: PrimaryPlacement
    limits: Limits
    is_protected: UInt8Array

    @cached_property
    def expert_tiles(self) -> Int64Array:
        """Tiles of each expert k_t, int64 [num_experts]."""
        return count_tiles(self.demand, self.limits.tile_m).astype(np.int64)

    @cached_property
    def is_movable(self) -> BoolArray:
        """Whether any tile may leave the expert's primary, bool [num_experts]."""
        return self.expert_tiles > self.limits.compactness_threshold

    @cached_property
    def is_primary(self) -> BoolArray:
        """Whether the worker has the expert's primary, bool [num_experts, num_workers]."""
        is_primary = np.zeros((self.placement.num_experts, self.placement.num_workers), np.bool_)
        is_primary[np.arange(len(is_primary)), self.placement.primary_worker] = True
        return is_primary

    @cached_property
    def is_resident(self) -> BoolArray:
        """Whether the worker has a replica of a movable expert, bool [num_experts, num_workers]."""
        return self._is_bound(self.state.slot_expert >= 0)

    @cached_property
    def is_kept(self) -> BoolArray:
        """Whether that replica is in a protected slot, bool [num_experts, num_workers]."""
        return self._is_bound((self.state.slot_expert >= 0) & (self.is_protected != 0))

    def _is_bound(self, is_listed: BoolArray) -> BoolArray:
        is_bound = np.zeros_like(self.is_primary)
        is_bound[self.state.slot_expert[is_listed], np.nonzero(is_listed)[0]] = True
        return is_bound & self.is_movable[:, None]

    @cached_property
    def free_slots(self) -> Int64Array:
        """Slots that may be rebound, int64 [num_workers]."""
        free_slots: Int64Array = np.count_nonzero(self.is_protected == 0, axis=1)
        return free_slots

    @cached_property
    def primary_tiles(self) -> Int64Array:
        """The assignment without replicas."""
        return self.expert_tiles[:, None] * self.is_primary

    @cached_property
    def pinned_load(self) -> Int64Array:
        """Tiles that cannot leave their worker, int64 [num_workers]."""
        pinned_load: Int64Array = self.primary_tiles[~self.is_movable].sum(axis=0)
        return pinned_load

    def assignment(self, planned: PlannedTarget) -> Int64Array:
        """Return the assignment of a plan made for this problem."""
        state = planned.state
        tiles = self.is_primary * state.primary_tiles.astype(np.int64)[:, None]
        is_bound = state.slot_expert >= 0
        tiles[state.slot_expert[is_bound], np.nonzero(is_bound)[0]] += state.slot_tiles[is_bound]
        return tiles

    def validate(self, tiles: Int64Array) -> None:
        """Check that a plan may make this assignment.

        Raises:
            InfeasiblePlanError: naming the constraint it breaks.
        """
        is_used = (tiles > 0) & ~self.is_primary
        num_copies = np.count_nonzero(is_used & ~self.is_resident)
        slots = np.count_nonzero(is_used & ~self.is_kept, axis=0)
        if (tiles < 0).any() or (tiles.sum(axis=1) != self.expert_tiles).any():
            raise InfeasiblePlanError("the tiles of an expert do not add up to its demand")
        if is_used[~self.is_movable].any():
            raise InfeasiblePlanError("an expert of at most theta tiles leaves its primary")
        if num_copies > self.limits.copy_budget:
            raise InfeasiblePlanError(
                f"{num_copies} copies, the budget is {self.limits.copy_budget}"
            )
        if (slots > self.free_slots).any():
            worker = int(np.argmax(slots - self.free_slots))
            raise InfeasiblePlanError(
                f"worker {worker} uses {slots[worker]} of {self.free_slots[worker]} slots"
            )


def busiest_load(tiles: Int64Array) -> int:
    """Return the tiles of an assignment's busiest worker."""
    return int(tiles.sum(axis=0).max())


def mean_load_bound(problem: Problem) -> int:
    """Return the mean load, or the load that cannot leave a worker if that is more."""
    mean = -(-int(problem.expert_tiles.sum()) // problem.placement.num_workers)
    return max(mean, int(problem.pinned_load.max()))


def piece_count_bound(problem: Problem) -> int:
    """Return the smallest T whose overload fits into the replicas that one plan may use.

    What the primaries of a worker have beyond T tiles runs on replicas, at most T tiles on each.
    The fewest of them that are not resident must be within the copy budget, and the fewest that are
    not in protected slots within the unprotected ones.
    """
    num_free_slots = int(problem.free_slots.sum())
    num_resident = problem.is_resident.sum(axis=1)
    num_kept = problem.is_kept.sum(axis=1)

    def is_possible(most: int) -> bool:
        copies = _fewest_pieces(problem, most, num_resident).sum()
        replicas = _fewest_pieces(problem, most, num_kept).sum()
        return bool(
            copies <= min(problem.limits.copy_budget, num_free_slots)
            and replicas <= num_free_slots
            and _most_run(problem, most) >= problem.expert_tiles.sum()
        )

    loads = range(mean_load_bound(problem), busiest_load(problem.primary_tiles) + 1)
    return loads[bisect.bisect_left(loads, True, key=is_possible)]


def _fewest_pieces(problem: Problem, most: int, num_given: Int64Array) -> Float64Array:
    """Count the replicas that relieve each worker of its overload, beside those given.

    Args:
        problem: the problem.
        most: tiles a worker may have.
        num_given: replicas of each expert that are not counted, int64 [num_experts].

    Returns:
        float64 [num_workers], infinite where no number of replicas suffices.
    """
    pieces = np.zeros(problem.placement.num_workers)
    for worker, load in enumerate(problem.primary_tiles.sum(axis=0)):
        experts = np.array(problem.placement.primaries(worker), np.int64)
        experts = experts[problem.is_movable[experts]]
        given = np.minimum(problem.expert_tiles[experts], num_given[experts] * most)
        rest = problem.expert_tiles[experts] - given
        overload = load - most - given.sum()
        if overload <= 0:
            continue
        num_full = int((rest // most).sum())
        relief = np.cumsum(np.append(np.full(num_full, most), np.sort(rest % most)[::-1]))
        is_enough = relief >= overload
        pieces[worker] = np.argmax(is_enough) + 1 if is_enough.any() else np.inf
    return pieces


def _most_run(problem: Problem, most: int) -> int:
    """Bound the tiles that all workers together can run, each at most `most`.

    A worker runs its primaries, its resident replicas, and one piece for each new copy: with the
    largest experts copied, into the workers with most room.
    """
    placed = problem.expert_tiles @ (problem.is_primary | problem.is_resident)
    room = np.maximum(most - placed, 0)
    largest = np.sort(problem.expert_tiles[problem.is_movable])[::-1]
    slots = np.arange(min(problem.placement.redundant_slots, len(largest)))
    filled = np.minimum(room[:, None], np.cumsum(np.append(0, largest[: len(slots)])))
    pieces = np.where(slots < problem.free_slots[:, None], np.diff(filled, axis=1), 0)
    received = np.sort(pieces, axis=None)[::-1][: problem.limits.copy_budget]
    return int(np.minimum(placed, most).sum() + received.sum())


def balance(tiles: Int64Array, is_host: BoolArray) -> Int64Array:
    """Minimise the busiest worker's tiles over assignments to fixed replicas, exactly.

    Tiles flow along paths of shared experts from a busiest worker to one with at least two tiles
    less (optimal semi-matchings, Harvey et al., WADS 2003). When no such worker can be reached, the
    workers that can be have no tile that may leave them, and a mean load above T - 1.

    Args:
        tiles: assignment to start from, int64 [num_experts, num_workers], not changed.
        is_host: where each expert may run, bool, same shape.

    Returns:
        The balanced assignment.
    """
    tiles = tiles.copy()
    load = tiles.sum(axis=0)
    while path := _relieving_path(tiles, is_host, load):
        donor, receiver = path[0][1], path[-1][2]
        count = min(int(tiles[expert, before]) for expert, before, _ in path)
        count = min(count, int(load[donor] - load[receiver]) // 2)
        for expert, before, after in path:
            tiles[expert, before] -= count
            tiles[expert, after] += count
        load[donor] -= count
        load[receiver] += count
    return tiles


def _relieving_path(
    tiles: Int64Array, is_host: BoolArray, load: Int64Array
) -> list[tuple[int, int, int]]:
    """Find moves (expert, donor, receiver) in a row from a busiest worker to one with less."""
    busiest = int(np.argmax(load))
    move_to: dict[int, tuple[int, int]] = {busiest: (-1, -1)}
    queue = deque([busiest])
    while queue:
        donor = queue.popleft()
        for expert in np.flatnonzero(tiles[:, donor]).tolist():
            for worker in np.flatnonzero(is_host[expert]).tolist():
                if worker in move_to:
                    continue
                move_to[worker] = expert, donor
                queue.append(worker)
                if load[worker] <= load[busiest] - 2:
                    path = []
                    while worker != busiest:
                        expert, donor = move_to[worker]
                        path.append((expert, donor, worker))
                        worker = donor
                    return path[::-1]
    return []
