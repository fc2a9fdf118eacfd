"""Bounds, balance and certificates against brute force over slot tables, and cases by hand."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import sys

import numpy as np
import pytest

from afore_kernels.errors import InfeasiblePlanError
from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget
from afore_kernels.runtime.planner_oracle import plan_microbatch_oracle
from bench.certify import (
    Certificate,
    Problem,
    balance,
    best_found,
    certify,
    mean_load_bound,
    piece_count_bound,
)

FREE_COPIES = CostModel(tile_time_us=10.0, slot_time_us=0.0, copy_time_us=0.0, window_us=0.0)


@pytest.fixture
def solver():
    """Skip where CP-SAT is not installed."""
    return pytest.importorskip("ortools.sat.python.cp_model")


@pytest.fixture
def no_solver(monkeypatch):
    """Make `import ortools` fail, installed or not."""
    for name in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)


def make_problem(
    demand, *, num_workers=2, redundant_slots=2, budget=2, theta=0, resident=(), protected=()
):
    """Build a problem of one-pair tiles.

    Args:
        demand: tiles per expert.
        num_workers: N, primaries in contiguous blocks.
        redundant_slots: R.
        budget: B.
        theta: compactness threshold.
        resident: (worker, slot, expert) bound before the plan.
        protected: (worker, slot).
    """
    placement = PrimaryPlacement(len(demand), num_workers, redundant_slots)
    state = LayerState.initial(placement)
    is_protected = np.zeros(state.slot_expert.shape, np.uint8)
    for worker, slot, expert in resident:
        state.slot_expert[worker, slot] = expert
    for slot in protected:
        is_protected[slot] = 1
    limits = Limits(tile_m=1, copy_budget=budget, compactness_threshold=theta)
    return Problem(np.array(demand, np.int32), state, placement, limits, is_protected)


def make_hint(problem, primary_tiles, replicas):
    """Build a plan of primaries and replicas (worker, slot): (expert, tiles)."""
    state = problem.state.copy()
    state.primary_tiles[:] = primary_tiles
    for slot, (expert, tiles) in replicas.items():
        state.slot_expert[slot] = expert
        state.slot_tiles[slot] = tiles
    unused = np.zeros(state.slot_expert.shape, np.int32)
    return PlannedTarget(state.slot_expert, unused, unused.astype(np.uint8), state)


# Brute force


def most_tiles(tiles):
    return int(tiles.sum(axis=0).max())


def splits(tiles, num_parts):
    """Yield every way to write `tiles` as an ordered sum of `num_parts` numbers from 0."""
    for bars in itertools.combinations(range(tiles + num_parts - 1), num_parts - 1):
        ends = (-1, *bars, tiles + num_parts - 1)
        yield [after - before - 1 for before, after in itertools.pairwise(ends)]


def all_assignments(expert_tiles, is_host):
    """Yield every int64 [num_experts, num_workers] with tiles on hosts only."""
    hosts = [np.flatnonzero(row) for row in is_host]
    choices = [list(splits(k, len(workers))) for k, workers in zip(expert_tiles.tolist(), hosts)]
    for choice in itertools.product(*choices):
        tiles = np.zeros(is_host.shape, np.int64)
        for expert, split in enumerate(choice):
            tiles[expert, hosts[expert]] = split
        yield tiles


def least_busiest(expert_tiles, is_host):
    """Try every assignment to fixed replicas, expert by expert; equal loads are continued once."""
    loads = {(0,) * is_host.shape[1]}
    for tiles, hosts in zip(expert_tiles.tolist(), map(np.flatnonzero, is_host)):
        longer = set()
        for load, split in itertools.product(loads, splits(tiles, len(hosts))):
            added = list(load)
            for worker, count in zip(hosts, split):
                added[worker] += count
            longer.add(tuple(added))
        loads = longer
    return min(map(max, loads))


def optimum(problem):
    """Try every slot table that one plan may leave, with every assignment to its replicas."""
    placement, limits, before = problem.placement, problem.limits, problem.state.slot_expert
    expert_tiles = -(-problem.demand // limits.tile_m)
    open_slots = list(zip(*np.nonzero(problem.is_protected == 0)))
    hosts_of_tables = {}
    for bound in itertools.product(range(-1, placement.num_experts), repeat=len(open_slots)):
        after = before.copy()
        for slot, expert in zip(open_slots, bound):
            after[slot] = expert
        if np.count_nonzero((after != before) & (after >= 0)) > limits.copy_budget:
            continue
        is_host = np.zeros((placement.num_experts, placement.num_workers), bool)
        for (worker, _), expert in np.ndenumerate(after):
            is_host[expert, worker] |= expert >= 0
        is_host[expert_tiles <= limits.compactness_threshold] = False
        is_host[np.arange(placement.num_experts), placement.primary_worker] = True
        hosts_of_tables[is_host.tobytes()] = is_host
    return min(least_busiest(expert_tiles, is_host) for is_host in hosts_of_tables.values())


def least_admitted(problem):
    """Try every assignment that `Problem.validate` admits."""
    admitted = []
    for tiles in all_assignments(problem.expert_tiles, np.ones_like(problem.is_primary)):
        with contextlib.suppress(InfeasiblePlanError):
            problem.validate(tiles)
            admitted.append(most_tiles(tiles))
    return min(admitted)


def random_problem(rng):
    """Draw up to 5 experts on up to 3 workers, with tiles of 2 pairs, some of them half full."""
    num_workers = int(rng.choice([1, 2, 2, 3, 3, 3]))
    placement = PrimaryPlacement(
        num_experts=int(rng.integers(num_workers, 6)),
        num_workers=num_workers,
        redundant_slots=int(rng.choice([0, 1, 1, 1] if num_workers == 3 else [0, 1, 2, 2])),
    )
    state = LayerState.initial(placement)
    for worker in range(num_workers):
        missing = np.flatnonzero(placement.primary_worker != worker)
        bound = rng.permutation(np.append(missing, [-1] * placement.redundant_slots))
        state.slot_expert[worker] = bound[: placement.redundant_slots]
        state.slot_tiles[worker] = rng.integers(0, 3, placement.redundant_slots)
    state.slot_tiles[state.slot_expert < 0] = 0
    state.primary_tiles[:] = rng.integers(0, 5, placement.num_experts)
    demand = rng.integers(0, 13, placement.num_experts)
    if rng.random() < 0.6:
        demand[placement.primary_worker > 0] //= 4
    return Problem(
        demand.astype(np.int32),
        state,
        placement,
        Limits(
            tile_m=2,
            copy_budget=int(rng.integers(0, 4)),
            compactness_threshold=int(rng.choice([0, 0, 1, 2])),
        ),
        (rng.random(state.slot_expert.shape) < 0.3).astype(np.uint8),
    )


def two_hot_problem(rng):
    """Draw two hot workers whose overloads may not match the room of the other two."""
    hot = int(rng.integers(4, 13))
    demand = (hot, max(hot - int(rng.integers(0, 2)), 0), *rng.integers(0, hot // 2 + 1, 2))
    return make_problem(demand, num_workers=4, redundant_slots=1, budget=2)


@functools.cache
def solved_problems():
    """Draw problems, each with its optimum."""
    rng = np.random.default_rng(0)
    problems = [random_problem(rng) for _ in range(450)]
    problems += [two_hot_problem(rng) for _ in range(60)]
    return [(problem, optimum(problem)) for problem in problems]


def test_bounds_never_exceed_the_optimum():
    pieces_beat_mean = pieces_below_optimum = 0
    for problem, best in solved_problems():
        mean, pieces = mean_load_bound(problem), piece_count_bound(problem)
        assert mean <= pieces <= best
        pieces_beat_mean += mean < pieces
        pieces_below_optimum += pieces < best
    assert pieces_beat_mean > 100
    assert pieces_below_optimum > 3  # so that there is something left for CP-SAT


def test_validate_admits_what_some_slot_table_does():
    checked = 0
    for problem, best in solved_problems():
        others = problem.placement.num_workers - 1
        if math.prod(math.comb(k + others, others) for k in problem.expert_tiles.tolist()) < 200:
            assert least_admitted(problem) == best
            checked += 1
    assert checked > 50


def test_balance_is_exact_for_fixed_replicas():
    rng = np.random.default_rng(0)
    for _ in range(150):
        num_experts, num_workers = rng.integers(1, 6), rng.integers(1, 5)
        is_host = rng.random((num_experts, num_workers)) < 0.4
        is_host[np.arange(num_experts), rng.integers(0, num_workers, num_experts)] = True
        tiles = rng.integers(0, 4, is_host.shape) * is_host
        before = tiles.copy()
        balanced = balance(tiles, is_host)
        np.testing.assert_array_equal(tiles, before)
        np.testing.assert_array_equal(balanced.sum(axis=1), tiles.sum(axis=1))
        assert (balanced >= 0).all()
        assert not balanced[~is_host].any()
        assert most_tiles(balanced) == least_busiest(tiles.sum(axis=1), is_host)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("prove", [certify, best_found])
def test_certificates_are_exact(prove):
    methods = collections.Counter()
    for number, (problem, best) in enumerate(solved_problems()):
        achieved = best + number % 3
        certificate = prove(problem, achieved)
        assert (certificate.lower_bound, certificate.upper_bound) == (best, best)
        assert certificate.is_proved
        assert certificate.is_optimal == (achieved == best)
        with pytest.raises(ValueError, match=f"{best - 1} tiles achieved, below the "):
            prove(problem, best - 1)
        methods[certificate.method] += 1
    assert methods.keys() == {"mean", "pieces", "cp-sat"}


@pytest.mark.usefixtures("solver")
def test_plans_are_never_better_than_the_optimum():
    optimal = 0
    for problem, best in solved_problems():
        planned = plan_microbatch_oracle(
            problem.demand,
            problem.state,
            problem.placement,
            problem.limits,
            FREE_COPIES,
            sequence=1,
            is_protected=problem.is_protected,
            planning_demand=problem.demand,
        )
        achieved = most_tiles(problem.assignment(planned))
        certificate = certify(problem, achieved, hint=planned)
        assert certificate.is_proved
        assert certificate.lower_bound == best
        assert certificate.is_optimal == (achieved == best)
        optimal += certificate.is_optimal
    assert optimal > 200


# By hand. Two workers unless said otherwise; the first half of the experts are worker 0's.


@pytest.mark.parametrize(("budget", "expected"), [(0, 6), (1, 4), (2, 3), (3, 3)])
def test_copy_budget_binds(budget, expected):
    problem = make_problem([2, 2, 2, 0, 0, 0], budget=budget)
    assert mean_load_bound(problem) == 3
    assert piece_count_bound(problem) == optimum(problem) == expected


@pytest.mark.parametrize(
    ("protected", "expected"),
    [
        ([], 3),
        ([(1, 0)], 4),
        ([(1, 0), (1, 1)], 6),
        ([(0, 0), (0, 1)], 3),  # the hot worker's own slots are of no use
    ],
)
def test_protected_slots_bind(protected, expected):
    problem = make_problem([2, 2, 2, 0, 0, 0], protected=protected)
    assert piece_count_bound(problem) == optimum(problem) == expected


@pytest.mark.parametrize("protected", [[], [(1, 0)]])
def test_resident_replica_needs_no_copy(protected, no_solver):
    # Worker 0's 4 + 2 tiles; 3 of expert 0 run on its replica.
    problem = make_problem([4, 2, 0, 0], budget=0, resident=[(1, 0, 0)], protected=protected)
    certificate = certify(problem, 6)
    assert (certificate.upper_bound, certificate.method) == (3, "mean")


@pytest.mark.parametrize(
    ("redundant_slots", "protected", "expected"),
    [
        (1, [], 4),  # the replica or a copy in its slot, one piece of 2 tiles
        (1, [(1, 0)], 4),  # the replica
        (2, [], 3),  # both
        (2, [(1, 0)], 3),
        (2, [(1, 1)], 4),
    ],
)
def test_used_replica_takes_its_slot(redundant_slots, protected, expected):
    problem = make_problem(
        [2, 2, 2, 0, 0, 0],
        redundant_slots=redundant_slots,
        budget=1,
        resident=[(1, 0, 0)],
        protected=protected,
    )
    assert least_admitted(problem) == optimum(problem) == expected


@pytest.mark.parametrize(
    ("demand", "theta", "expected"),
    [
        ([1, 1, 1, 1, 0, 0, 0, 0], 0, 2),
        ([1, 1, 1, 1, 0, 0, 0, 0], 1, 4),
        ([1, 1, 1, 3, 0, 0, 0, 0], 1, 3),  # the three stay, expert 3 leaves as a whole
    ],
)
def test_small_experts_stay(demand, theta, expected):
    problem = make_problem(demand, theta=theta)
    assert mean_load_bound(problem) == piece_count_bound(problem) == optimum(problem) == expected


def test_no_demand(no_solver):
    problem = make_problem([0, 0, 0])
    certificate = certify(problem, 0)
    assert (certificate.lower_bound, certificate.is_optimal, certificate.gap) == (0, True, (0, 0))


def mismatch(budget=2):
    """Four workers of 8, 8, 3 and 1 tiles, mean 5, with one slot each.

    At 5, workers 0 and 1 are to hand over 3 tiles each, and worker 2 has room for 2: two copies do
    not do. At 6 they hand over 2 each. Three copies reach 5 by way of a hot worker: 2 of expert 0
    to worker 2, 4 of expert 1 to worker 3, 1 of expert 0 to worker 1.
    """
    return make_problem([8, 8, 3, 1], num_workers=4, redundant_slots=1, budget=budget)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("prove", [certify, best_found])
def test_solver_closes_the_gap(prove):
    assert mean_load_bound(mismatch()) == piece_count_bound(mismatch()) == 5
    certificate = prove(mismatch(), 7)
    assert (certificate.lower_bound, certificate.upper_bound) == (6, 6)
    assert certificate.method == "cp-sat"
    assert certificate.gap == (7 / 6 - 1, 7 / 6 - 1)

    certificate = prove(mismatch(budget=3), 6)
    assert (certificate.lower_bound, certificate.upper_bound) == (5, 5)
    assert certificate.method == "mean"


def test_balanced_hint_is_enough(no_solver):
    # 5 of 6 tiles on worker 0; the plan copied expert 0 but moved too little.
    problem = make_problem([4, 2, 0, 0], budget=1)
    hint = make_hint(problem, [3, 2, 0, 0], {(1, 0): (0, 1)})
    np.testing.assert_array_equal(problem.assignment(hint), [[3, 1], [2, 0], [0, 0], [0, 0]])
    certificate = certify(problem, 5, hint=hint)
    assert (certificate.lower_bound, certificate.upper_bound) == (3, 3)
    assert not certificate.is_optimal
    assert certificate.gap == (5 / 3 - 1, 5 / 3 - 1)


# What is not proved


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("prove", [certify, best_found])
def test_out_of_time(prove):
    certificate = prove(mismatch(), 7, time_limit_s=0.0)
    assert (certificate.lower_bound, certificate.upper_bound) == (5, 7)
    assert certificate.method == "unproved"
    assert not certificate.is_proved
    assert not certificate.is_optimal
    assert certificate.gap == (0.0, 7 / 5 - 1)


def test_gap_is_an_interval_until_proved():
    certificate = Certificate(
        achieved=6, lower_bound=4, upper_bound=5, method="unproved", seconds=0.0
    )
    assert certificate.gap == (6 / 5 - 1, 6 / 4 - 1)
    assert not certificate.is_proved


# Errors


@pytest.mark.parametrize("prove", [certify, best_found])
def test_achieved_below_a_bound(prove, no_solver):
    with pytest.raises(ValueError, match="2 tiles achieved, below the mean bound 3"):
        prove(make_problem([2, 2, 2, 0, 0, 0], budget=2), 2)
    with pytest.raises(ValueError, match="3 tiles achieved, below the pieces bound 4"):
        prove(make_problem([2, 2, 2, 0, 0, 0], budget=1), 3)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("prove", [certify, best_found])
def test_achieved_below_what_the_solver_proves(prove):
    with pytest.raises(ValueError, match="5 tiles achieved, below the cp-sat bound 6"):
        prove(mismatch(), 5)


def test_hint_of_another_load(no_solver):
    problem = make_problem([4, 2, 0, 0])
    hint = make_hint(problem, [2, 2, 0, 0], {(1, 0): (0, 2)})
    with pytest.raises(ValueError, match="3 tiles achieved, the hint has 4"):
        certify(problem, 3, hint=hint)


@pytest.mark.parametrize(
    ("changes", "primary_tiles", "replicas", "message"),
    [
        ({}, [2, 2, 0, 0], {}, "do not add up"),
        ({}, [5, 2, 0, 0], {(1, 0): (0, -1)}, "do not add up"),
        ({"theta": 2}, [4, 1, 0, 0], {(1, 0): (1, 1)}, "at most theta tiles"),
        (
            {"budget": 1},
            [2, 1, 0, 0],
            {(1, 0): (0, 2), (1, 1): (1, 1)},
            "2 copies, the budget is 1",
        ),
        (
            {"protected": [(1, 0)]},
            [2, 1, 0, 0],
            {(1, 0): (0, 2), (1, 1): (1, 1)},
            "worker 1 uses 2 of 1 slots",
        ),
    ],
)
def test_hint_that_no_plan_may_be(changes, primary_tiles, replicas, message, no_solver):
    problem = make_problem([4, 2, 0, 0], **changes)
    hint = make_hint(problem, primary_tiles, replicas)
    achieved = most_tiles(problem.assignment(hint))
    with pytest.raises(InfeasiblePlanError, match=message):
        certify(problem, achieved, hint=hint)


@pytest.mark.parametrize("prove", [certify, best_found])
def test_solver_is_not_installed(prove, no_solver):
    with pytest.raises(ModuleNotFoundError, match="ortools"):
        prove(mismatch(), 7)
