"""Certificates of a plan's largest tile load: how far it is from the optimum (section 7.3).

`certify` climbs from the bounds of `certify_bounds` to CP-SAT. CP-SAT needs ortools; where a bound
meets the plan, as it mostly does, nothing is solved.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from afore_kernels.runtime.planner import PlannedTarget
from bench.certify_bounds import (
    Int64Array,
    Problem,
    balance,
    busiest_load,
    mean_load_bound,
    piece_count_bound,
)

__all__ = [
    "Certificate",
    "Method",
    "Problem",
    "balance",
    "best_found",
    "certify",
    "mean_load_bound",
    "piece_count_bound",
]

Method = Literal["mean", "pieces", "cp-sat", "unproved"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known about the optimum beside an achieved tile load.

    Attributes:
        achieved: tiles of the busiest worker, as judged.
        lower_bound: no plan has fewer.
        upper_bound: some plan has as few, at most `achieved`.
        method: what proves `lower_bound`; "unproved" while a smaller `upper_bound` is possible.
        seconds: spent.

    Raises:
        ValueError: if `achieved` is below `lower_bound`.
    """

    achieved: int
    lower_bound: int
    upper_bound: int
    method: Method
    seconds: float

    def __post_init__(self) -> None:
        if self.achieved < self.lower_bound:
            raise ValueError(
                f"{self.achieved} tiles achieved, below the {self.method} bound {self.lower_bound}"
            )

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
        achieved: tiles of its busiest worker; without `hint`, believed where the time runs out.
        hint: the plan, checked against the problem; the search starts from it.
        time_limit_s: most seconds for CP-SAT.

    Raises:
        InfeasiblePlanError: if `hint` breaks a constraint.
        ValueError: if `achieved` is below a proved bound, or not the tile load of `hint`.
        ModuleNotFoundError: if CP-SAT is needed and ortools is not installed.
    """
    start = time.perf_counter()
    method, lower, tiles = _start(problem, achieved, hint)
    upper = busiest_load(tiles)
    while lower < upper and lower <= achieved:
        most = min(achieved, upper - 1)
        left_s = time_limit_s - (time.perf_counter() - start)
        bound, found = _solve(problem, most, most, tiles, left_s)
        if found is not None:
            tiles, upper = found, busiest_load(found)
        elif bound > most:
            method, lower = "cp-sat", bound
        else:
            method = "unproved"
            break
    return Certificate(achieved, lower, min(achieved, upper), method, time.perf_counter() - start)


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
    upper = busiest_load(tiles)
    if lower < upper and lower <= achieved:
        bound, found = _solve(problem, lower, min(achieved, upper), tiles, time_limit_s)
        if bound > lower:
            method, lower = "cp-sat", bound
        if found is not None:
            upper = busiest_load(found)
        if lower < min(achieved, upper):
            method = "unproved"
    return Certificate(achieved, lower, min(achieved, upper), method, time.perf_counter() - start)


def _start(
    problem: Problem, achieved: int, hint: PlannedTarget | None
) -> tuple[Method, int, Int64Array]:
    """Return the best cheap bound and an assignment, balanced within the replicas of `hint`."""
    bounds: dict[Method, int] = {
        "mean": mean_load_bound(problem),
        "pieces": piece_count_bound(problem),
    }
    method = max(bounds, key=lambda method: bounds[method])
    if hint is None:
        is_host = problem.is_primary | problem.is_resident
        return method, bounds[method], balance(problem.primary_tiles, is_host)
    tiles = problem.assignment(hint)
    problem.validate(tiles)
    if busiest_load(tiles) != achieved:
        raise ValueError(f"{achieved} tiles achieved, the hint has {busiest_load(tiles)}")
    return method, bounds[method], balance(tiles, problem.is_primary | (tiles > 0))


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
    num_workers = problem.placement.num_workers
    pinned_load = problem.pinned_load.tolist()
    has_place = problem.is_primary | problem.is_kept
    movable = np.flatnonzero(problem.is_movable).tolist()
    tiles_on: list[dict[int, cp_model.IntVar]] = [{} for _ in range(num_workers)]
    slots_on: list[list[cp_model.IntVar]] = [[] for _ in range(num_workers)]
    copies: list[cp_model.IntVar] = []
    for expert, worker in itertools.product(movable, range(num_workers)):
        needs_slot = not has_place[expert, worker]
        if needs_slot and problem.free_slots[worker] == 0:
            continue
        most = min(int(problem.expert_tiles[expert]), upper - pinned_load[worker])
        tiles = model.new_int_var(0, most, f"tiles_{expert}_{worker}")
        model.add_hint(tiles, int(hint[expert, worker]))
        tiles_on[worker][expert] = tiles
        if needs_slot:
            is_used = model.new_bool_var(f"is_used_{expert}_{worker}")
            model.add_hint(is_used, bool(hint[expert, worker]))
            model.add(tiles <= most * is_used)
            slots_on[worker].append(is_used)
            if not problem.is_resident[expert, worker]:
                copies.append(is_used)
    for expert in movable:
        everywhere = [tiles[expert] for tiles in tiles_on if expert in tiles]
        model.add(sum(everywhere) == int(problem.expert_tiles[expert]))
    loads = [sum(tiles_on[worker].values()) + pinned_load[worker] for worker in range(num_workers)]
    for worker in range(num_workers):
        model.add(loads[worker] <= busiest)
        model.add(sum(slots_on[worker]) <= int(problem.free_slots[worker]))
    model.add(sum(copies) <= problem.limits.copy_budget)
    for heavier, lighter in _interchangeable(problem, hint):
        model.add(loads[heavier] >= loads[lighter])

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.0)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return upper + 1, None
    if status not in (cp_model.FEASIBLE, cp_model.OPTIMAL):
        return lower, None
    found = problem.primary_tiles.copy()
    for worker, tiles_of in enumerate(tiles_on):
        for expert, tiles in tiles_of.items():
            found[expert, worker] = solver.value(tiles)
    problem.validate(found)
    bound = math.ceil(solver.best_objective_bound - 1e-6) if lower < upper else lower
    return max(lower, bound), found


def _interchangeable(problem: Problem, hint: Int64Array) -> list[tuple[int, int]]:
    """Pair up workers that any plan may swap, in decreasing load of the hint.

    Those have no movable primary and no resident replica, and agree in pinned load and free slots.
    """
    has_own = (problem.is_movable[:, None] & problem.is_primary | problem.is_resident).any(axis=0)
    load = hint.sum(axis=0)
    alike: dict[tuple[int, int], list[int]] = {}
    for worker in np.flatnonzero(~has_own).tolist():
        key = int(problem.pinned_load[worker]), int(problem.free_slots[worker])
        alike.setdefault(key, []).append(worker)
    pairs: list[tuple[int, int]] = []
    for workers in alike.values():
        workers.sort(key=lambda worker: -load[worker])
        pairs += itertools.pairwise(workers)
    return pairs
