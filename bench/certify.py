"""Certificates of a plan's largest tile load: how far it is from the optimum (section 7.3, Table 2).

The optimum is that of the planner's own constraints: tiles T of the busiest worker, minimised over
every assignment that one plan may make from the same slot table, protected slots, copy budget and
compactness threshold. Tiles are whole: filling them with pairs of one expert each, no assignment of
pairs (Eq. 2-5) has a smaller busiest worker. `certify` climbs from cheap bounds to CP-SAT.

With theta > 0 the planner also moves more than theta tiles at a time. Of that only its consequence
for small experts is modelled, that they stay on their primary; the bounds are those of this
relaxation, so they remain valid lower bounds.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from afore_kernels.errors import InfeasiblePlanError
from afore_kernels.gemm.tiles import count_tiles
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
Method = Literal["mean", "pieces", "cp-sat", "unproved"]


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
        return count_tiles(self.demand.astype(np.int64), self.limits.tile_m)

    @cached_property
    def is_movable(self) -> BoolArray:
        """Whether any tile may leave the expert's primary, bool [num_experts]."""
        return self.expert_tiles > self.limits.compactness_threshold

    @cached_property
    def primary_tiles(self) -> Int64Array:
        """The assignment without replicas."""
        tiles = np.zeros((self.placement.num_experts, self.placement.num_workers), np.int64)
        tiles[np.arange(len(tiles)), self.placement.primary_worker] = self.expert_tiles
        return tiles

    @cached_property
    def is_primary(self) -> BoolArray:
        """Whether the worker has the expert's primary, bool [num_experts, num_workers]."""
        workers = np.arange(self.placement.num_workers, dtype=np.int32)
        return self.placement.primary_worker[:, None] == workers

    @cached_property
    def is_resident(self) -> BoolArray:
        """Whether the worker has a replica of a movable expert, bool [num_experts, num_workers]."""
        return self._bound(self.state.slot_expert >= 0)

    @cached_property
    def is_kept(self) -> BoolArray:
        """Whether that replica is in a protected slot, bool [num_experts, num_workers]."""
        return self._bound((self.state.slot_expert >= 0) & (self.is_protected != 0))

    @cached_property
    def free_slots(self) -> Int64Array:
        """Slots that may be rebound, int64 [num_workers]."""
        return np.count_nonzero(self.is_protected == 0, axis=1)

    def _bound(self, is_bound: BoolArray) -> BoolArray:
        on_worker = np.zeros_like(self.is_primary)
        on_worker[self.state.slot_expert[is_bound], np.nonzero(is_bound)[0]] = True
        return on_worker & self.is_movable[:, None]

    def assignment(self, planned: PlannedTarget) -> Int64Array:
        """Return the assignment of a plan made for this problem."""
        state = planned.state
        tiles = self.is_primary * state.primary_tiles.astype(np.int64)[:, None]
        is_bound = state.slot_expert >= 0
        at = state.slot_expert[is_bound], np.nonzero(is_bound)[0]
        tiles[at] += state.slot_tiles[is_bound]
        return tiles

    def validate(self, tiles: Int64Array) -> None:
        """Check that a plan may make this assignment.

        Raises:
            InfeasiblePlanError: naming the constraint it breaks.
        """
        is_used = (tiles > 0) & ~self.is_primary
        is_new = is_used & ~self.is_resident
        slots = np.count_nonzero(is_used & ~self.is_kept, axis=0)
        if (tiles < 0).any() or (tiles.sum(axis=1) != self.expert_tiles).any():
            raise InfeasiblePlanError("the tiles of an expert do not add up to its demand")
        if is_used[~self.is_movable].any():
            raise InfeasiblePlanError("an expert of at most theta tiles leaves its primary")
        if np.count_nonzero(is_new) > self.limits.copy_budget:
            raise InfeasiblePlanError(
                f"{np.count_nonzero(is_new)} copies, the budget is {self.limits.copy_budget}"
            )
        if (slots > self.free_slots).any():
            worker = int(np.argmax(slots - self.free_slots))
            raise InfeasiblePlanError(
                f"worker {worker} uses {slots[worker]} of {self.free_slots[worker]} slots"
            )


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known about the optimum beside an achieved tile load.

    Attributes:
        achieved: tiles of the busiest worker, as judged.
        lower_bound: no plan has fewer.
        upper_bound: some plan has as few, at most `achieved`.
        method: what proves `lower_bound`; "unproved" while a smaller `upper_bound` is possible.
        seconds: spent.
    """

    achieved: int
    lower_bound: int
    upper_bound: int
    method: Method
    seconds: float

    @property
    def is_proved(self) -> bool:
        """Whether the optimum is known."""
        return self.lower_bound == self.upper_bound

    @property
    def is_optimal(self) -> bool:
        """Whether `achieved` is proved to be the optimum."""
        return self.achieved == self.lower_bound

    @property
    def gap(self) -> tuple[float, float]:
        """Least and largest possible excess over the optimum, relative to it; equal if proved."""
        if self.achieved == 0:
            return 0.0, 0.0
        return self.achieved / self.upper_bound - 1, self.achieved / self.lower_bound - 1


def mean_load_bound(problem: Problem) -> int:
    """Return the mean load, or the load that cannot leave a worker if that is more."""
    tiles = problem.primary_tiles
    pinned_load = tiles[~problem.is_movable].sum(axis=0)
    return max(-(-int(tiles.sum()) // tiles.shape[1]), int(pinned_load.max()))


def piece_count_bound(problem: Problem) -> int:
    """Return the smallest T whose overload fits into the replicas that one plan may use.

    What the primaries of a worker have beyond T tiles runs on replicas, at most T tiles on each. The
    fewest of them that are not resident must be within the copy budget, and the fewest that are not
    in protected slots within the unprotected ones.
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

    loads = range(mean_load_bound(problem), int(problem.primary_tiles.sum(axis=0).max()) + 1)
    return loads[bisect.bisect_left(loads, True, key=is_possible)]


def _fewest_pieces(problem: Problem, most: int, num_given: Int64Array) -> npt.NDArray[np.float64]:
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
        count = min(int(tiles[expert, before].item()) for expert, before, _ in path)
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


def certify(
    problem: Problem,
    achieved: int,
    *,
    hint: PlannedTarget | None = None,
    time_limit_s: float = 60.0,
) -> Certificate:
    """Prove how far an achieved tile load is from the optimum.

    The ladder: mean load, piece count, then CP-SAT on whether one tile less than the best known is
    possible, until it is not.

    Args:
        problem: what the plan was made for.
        achieved: tiles of its busiest worker.
        hint: the plan, checked against the problem; the search starts from it.
        time_limit_s: most seconds for CP-SAT.

    Raises:
        InfeasiblePlanError: if `hint` breaks a constraint.
        ValueError: if `achieved` is below a proved bound, or not the tile load of `hint`.
        ModuleNotFoundError: if CP-SAT is needed and ortools is not installed.
    """
    start = time.perf_counter()
    method, lower, tiles = _start(problem, achieved, hint)
    upper = min(achieved, _busiest(tiles))
    while lower < upper:
        left_s = time_limit_s - (time.perf_counter() - start)
        bound, found = _solve(problem, upper - 1, upper - 1, tiles, left_s)
        if found is not None:
            tiles, upper = found, _busiest(found)
        elif bound == upper:
            method, lower = "cp-sat", upper
        else:
            method = "unproved"
            break
    return Certificate(achieved, lower, upper, method, time.perf_counter() - start)


def best_found(
    problem: Problem,
    achieved: int,
    *,
    hint: PlannedTarget | None = None,
    time_limit_s: float = 60.0,
) -> Certificate:
    """Search for the best assignment within a time, where `certify` would stay at its first step.

    One CP-SAT run minimises the busiest worker's tiles and raises the lower bound beside. Arguments
    and errors as of `certify`.
    """
    start = time.perf_counter()
    method, lower, tiles = _start(problem, achieved, hint)
    upper = min(achieved, _busiest(tiles))
    if lower < upper:
        bound, found = _solve(problem, lower, upper, tiles, time_limit_s)
        if bound > lower:
            method, lower = "cp-sat", bound
        if found is not None:
            upper = min(upper, _busiest(found))
        if lower < upper:
            method = "unproved"
    return Certificate(achieved, lower, upper, method, time.perf_counter() - start)


def _busiest(tiles: Int64Array) -> int:
    return int(tiles.sum(axis=0).max())


def _start(
    problem: Problem, achieved: int, hint: PlannedTarget | None
) -> tuple[Method, int, Int64Array]:
    """Return the best cheap bound and an assignment, balanced within the replicas of `hint`."""
    bounds: dict[Method, int] = {
        "mean": mean_load_bound(problem),
        "pieces": piece_count_bound(problem),
    }
    method = max(bounds, key=lambda method: bounds[method])
    if achieved < bounds[method]:
        raise ValueError(f"{achieved} tiles achieved, below the {method} bound {bounds[method]}")
    if hint is None:
        is_host = problem.is_primary | problem.is_resident
        return method, bounds[method], balance(problem.primary_tiles, is_host)
    tiles = problem.assignment(hint)
    problem.validate(tiles)
    if _busiest(tiles) != achieved:
        raise ValueError(f"{achieved} tiles achieved, the hint has {_busiest(tiles)}")
    is_host = problem.is_primary | (tiles > 0)
    return method, bounds[method], balance(tiles, is_host)


def _solve(
    problem: Problem, lower: int, upper: int, hint: Int64Array, time_limit_s: float
) -> tuple[int, Int64Array | None]:
    """Minimise the busiest worker's tiles between `lower` and `upper` with CP-SAT.

    Returns:
        A lower bound, `upper + 1` if there is no assignment; and the best one found, validated.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    busiest = model.new_int_var(lower, upper, "busiest")
    if lower < upper:
        model.minimize(busiest)
    movable = np.flatnonzero(problem.is_movable).tolist()
    pinned_load = problem.primary_tiles[~problem.is_movable].sum(axis=0).tolist()
    num_workers = problem.placement.num_workers
    tiles_of: list[dict[int, cp_model.IntVar]] = [{} for _ in range(num_workers)]
    slots_of: list[list[cp_model.IntVar]] = [[] for _ in range(num_workers)]
    copies: list[cp_model.IntVar] = []
    for expert in movable:
        for worker in range(num_workers):
            most = min(int(problem.expert_tiles[expert]), upper - pinned_load[worker])
            is_resident = bool(problem.is_resident[expert, worker])
            is_primary = bool(problem.is_primary[expert, worker])
            is_kept = bool(problem.is_kept[expert, worker])
            if not (is_primary or is_kept) and problem.free_slots[worker] == 0:
                continue
            tiles = model.new_int_var(0, most, f"tiles_{expert}_{worker}")
            model.add_hint(tiles, int(hint[expert, worker]))
            tiles_of[worker][expert] = tiles
            if is_primary or is_kept:
                continue
            is_used = model.new_bool_var(f"is_used_{expert}_{worker}")
            model.add_hint(is_used, bool(hint[expert, worker]))
            model.add(tiles <= most * is_used)
            slots_of[worker].append(is_used)
            if not is_resident:
                copies.append(is_used)
    for expert in movable:
        everywhere = [tiles[expert] for tiles in tiles_of if expert in tiles]
        model.add(sum(everywhere) == int(problem.expert_tiles[expert]))
    loads = [sum(tiles_of[worker].values()) + pinned_load[worker] for worker in range(num_workers)]
    for worker in range(num_workers):
        model.add(loads[worker] <= busiest)
        model.add(sum(slots_of[worker]) <= int(problem.free_slots[worker]))
    model.add(sum(copies) <= problem.limits.copy_budget)
    for heavier, lighter in _interchangeable(problem, hint):
        model.add(loads[heavier] >= loads[lighter])

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return upper + 1, None
    if status not in (cp_model.FEASIBLE, cp_model.OPTIMAL):
        return lower, None
    found = problem.primary_tiles.copy()
    for worker, tiles_on in enumerate(tiles_of):
        for expert, tiles in tiles_on.items():
            found[expert, worker] = solver.value(tiles)
    problem.validate(found)
    bound = math.ceil(solver.best_objective_bound - 1e-6) if lower < upper else lower
    return max(lower, bound), found


def _interchangeable(problem: Problem, hint: Int64Array) -> list[tuple[int, int]]:
    """Pair up workers that any plan may swap, in decreasing load of the hint.

    Those have no movable primary and no resident replica, and agree in pinned load and free slots.
    """
    has_own = (problem.is_movable[:, None] & problem.is_primary | problem.is_resident).any(axis=0)
    pinned_load = problem.primary_tiles[~problem.is_movable].sum(axis=0)
    load = hint.sum(axis=0)
    alike: dict[tuple[int, int], list[int]] = {}
    for worker in np.flatnonzero(~has_own).tolist():
        key = int(pinned_load[worker]), int(problem.free_slots[worker])
        alike.setdefault(key, []).append(worker)
    pairs = []
    for workers in alike.values():
        workers.sort(key=lambda worker: -load[worker])
        pairs += zip(workers, workers[1:])
    return pairs
