"""Every planner is timed on the same plans, and what the results say of the times."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import pytest

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits
from bench import scheduler
from bench.plain_planner import PlainState
from bench.planner_targets import TargetSequence
from bench.scheduler import (
    NUM_ROUNDS,
    ORACLE,
    ORACLE_TARGETS,
    OURS,
    PAPER_US,
    PLAIN,
    REFINED,
    OraclePolicy,
    measure,
    time_core,
    time_plain,
    time_policy,
)

NAMES = [OURS, REFINED, PLAIN, ORACLE, "eplb", "ultraep", "llep"]


def make_targets(num_targets=16, *, in_a_row=1, num_experts=8, num_warmup=4, name="test"):
    """Draw targets of two layers, whose hot experts differ and change enough to rebind slots."""
    rng = np.random.default_rng(1)
    shares = rng.dirichlet(np.full(num_experts, 0.4), 2)
    layer = np.arange(num_targets) // in_a_row % 2
    mixed = [0.5 * (shares[one] + rng.dirichlet(np.full(num_experts, 0.4))) for one in layer]
    demand = np.array([rng.multinomial(2000, mix) for mix in mixed], np.int32)
    return TargetSequence(name, demand, layer, num_warmup)


class RecordingOracle(OraclePolicy):
    """The oracle, with what it is asked and what the layers' last states are."""

    def __init__(self, targets):
        self.layer, self.asked, self.states = targets.layer, [], [None, None]

    def plan(self, demand, state, *args, sequence, is_protected, **kwargs):
        self.asked.append((demand.tolist(), state, sequence, is_protected))
        planned = super().plan(
            demand, state, *args, sequence=sequence, is_protected=is_protected, **kwargs
        )
        self.states[self.layer[sequence]] = planned.state
        return planned


def keep_initial_states(monkeypatch, state_class):
    """Return a list that gets every state `state_class.initial` makes, to look at it later."""
    made, initial = [], state_class.initial

    def initial_state(*args):
        made.append(initial(*args))
        return made[-1]

    monkeypatch.setattr(state_class, "initial", initial_state)
    return made


@pytest.fixture(params=["python", pytest.param("compiled", marks=pytest.mark.slow)])
def timing_loops(request, monkeypatch):
    """Run the loops around the planners in Python, where compiling them is not worth its time."""
    if request.param == "python":
        monkeypatch.setattr(scheduler, "_time_core", scheduler._time_core.py_func)
        monkeypatch.setattr(scheduler, "_time_plain", scheduler._time_plain.py_func)
        monkeypatch.setattr(scheduler, "monotonic_ns", time.monotonic_ns)


@pytest.mark.usefixtures("timing_loops")
def test_timing_loops_plan_what_the_oracle_plans(monkeypatch):
    # Several targets of a layer in a row, so that all but the first find slots protected.
    targets = make_targets(in_a_row=4)
    placement, limits = PrimaryPlacement(8, 4, 1), Limits(16, 8, 0)
    oracle = RecordingOracle(targets)
    core_states = keep_initial_states(monkeypatch, LayerState)
    plain_states = keep_initial_states(monkeypatch, PlainState)
    for times in (
        time_core(targets, placement, limits),
        time_plain(targets, placement, limits),
        time_policy(targets, placement, limits, oracle),
    ):
        assert (times.dtype, times.shape) == (np.int64, (16,))
        assert (times > 0).all()
    assert len(plain_states) == 2
    for layer, (plain, expected) in enumerate(zip(plain_states, oracle.states)):
        assert (expected.slot_expert >= 0).any()
        for core_array, array in zip(core_states[0], expected):
            np.testing.assert_array_equal(core_array[layer], array)
        np.testing.assert_array_equal(plain.slot_expert, expected.slot_expert)
        np.testing.assert_array_equal(plain.slot_last_use, expected.slot_last_use)


def test_a_policy_plans_every_target_from_its_layers_last_state():
    targets = make_targets()
    oracle = RecordingOracle(targets)
    time_policy(targets, PrimaryPlacement(8, 4, 1), Limits(16, 8, 0), oracle)
    assert [demand for demand, *_ in oracle.asked] == targets.demand.tolist()
    assert [sequence for _, _, sequence, _ in oracle.asked] == list(range(16))
    assert (oracle.asked[0][1].slot_expert == -1).all()
    assert oracle.asked[-1][1].slot_last_use.max() == 13
    # The slots in use by the target just before are another layer's.
    assert not any(is_protected.any() for *_, is_protected in oracle.asked)


def test_slots_of_the_target_before_are_protected():
    targets = make_targets(in_a_row=2)
    oracle = RecordingOracle(targets)
    time_policy(targets, PrimaryPlacement(8, 4, 1), Limits(16, 8, 0), oracle)
    for _, state, sequence, is_protected in oracle.asked:
        assert is_protected.dtype == np.uint8
        np.testing.assert_array_equal(is_protected, (state.slot_tiles > 0) & (sequence % 2 == 1))
    assert oracle.asked[-1][3].any()


@pytest.fixture
def calls(monkeypatch):
    """Replace the timing by fixed times; a call is (planner, targets, placement, limits).

    The first call of each compiled planner and every target of the warm-up take a second, the
    others 1, 2, 3, 4 and 9 us over and over.
    """
    made = []

    def time_as(name_of):
        def timed(targets, placement, limits, *policy):
            name = name_of(limits, *policy)
            is_first = name not in [called for called, *_ in made]
            made.append((name, targets, placement, limits))
            times = np.resize(np.array([1, 2, 3, 4, 9]) * 1000, len(targets.demand))
            times = np.roll(times, targets.num_warmup)
            is_slow = is_first and name in (OURS, REFINED, PLAIN)
            times[: len(times) if is_slow else targets.num_warmup] = 10**9
            return times

        return timed

    policies = {"OraclePolicy": ORACLE, "Eplb": "eplb", "UltraEp": "ultraep", "Llep": "llep"}
    monkeypatch.setattr(
        scheduler, "time_core", time_as(lambda limits: REFINED if limits.is_refined else OURS)
    )
    monkeypatch.setattr(scheduler, "time_plain", time_as(lambda limits: PLAIN))
    monkeypatch.setattr(
        scheduler, "time_policy", time_as(lambda limits, policy: policies[type(policy).__name__])
    )
    return made


def test_planners_take_turns_on_the_same_targets(calls):
    targets = make_targets(num_targets=64)
    measure(targets, 4)
    compiled, rounds = calls[:3], calls[3:]
    assert [name for name, *_ in compiled] == [OURS, REFINED, PLAIN]
    without_oracle = [name for name in NAMES if name != ORACLE]
    assert [name for name, *_ in rounds] == [
        *NAMES,
        *without_oracle[1:],
        *without_oracle[:1],
        *without_oracle[2:],
        *without_oracle[:2],
    ]
    for name, timed, placement, limits in rounds:
        if name == ORACLE:
            np.testing.assert_array_equal(timed.demand, targets.demand[: 4 + ORACLE_TARGETS])
            assert timed.num_warmup == 4
        else:
            assert timed is targets
        assert (placement.num_experts, placement.num_workers) == (8, 4)
        assert placement.redundant_slots == 2
        assert limits == Limits(16, 8, 0, name == REFINED)


def test_times_leave_out_compilation_and_the_warm_up(calls):
    # Five targets count, in each of three rounds: 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 9, 9, 9.
    # The oracle's one round has its 95th percentile at 4 + 0.8 * (9 - 4).
    result = measure(make_targets(num_targets=9), 4)
    assert list(result) == NAMES
    assert NUM_ROUNDS == 3
    for name, times in result.items():
        p95 = pytest.approx(8.0) if name == ORACLE else 9.0
        assert times == {"median_us": 3.0, "p95_us": p95}


@pytest.mark.usefixtures("timing_loops")
def test_every_planner_runs():
    result = measure(make_targets(), 2)
    assert list(result) == NAMES
    assert all(0 < times["median_us"] <= times["p95_us"] for times in result.values())


def make_row(workload, ep, **medians):
    planners = {name: {"median_us": us, "p95_us": 2 * us} for name, us in medians.items()}
    return {"workload": workload, "ep": ep, "planners": planners}


def lines_of(axis):
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines
    }


def test_plot_has_a_panel_per_workload_and_a_line_per_planner(monkeypatch, tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure")
    saved, savefig = [], figure_module.Figure.savefig

    def keep(figure, *args, **kwargs):
        saved.append(figure)
        savefig(figure, *args, **kwargs)

    monkeypatch.setattr(figure_module.Figure, "savefig", keep)
    rows = [
        make_row("b", 2, afore=1.0, oracle=50.0),
        make_row("b", 8, afore=3.0, oracle=70.0),
        make_row("b", 128, afore=9.0, oracle=90.0),
        make_row("a", 8, afore=2.0, oracle=60.0),
    ]
    path = tmp_path / "latency.png"
    scheduler.plot(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    first, second = saved[0].axes
    assert [first.get_title(), second.get_title()] == ["a", "b"]
    assert lines_of(first) == {"afore": ([8], [2.0]), "oracle": ([8], [60.0]), "paper": ([], [])}
    assert lines_of(second) == {
        "afore": ([2, 8, 128], [1.0, 3.0, 9.0]),
        "oracle": ([2, 8, 128], [50.0, 70.0, 90.0]),
        "paper": ([2, 128], [8.23, 245.81]),
    }


@pytest.fixture
def run_main(monkeypatch, tmp_path):
    """Run the command with the planners' times made up; returns the document it writes."""
    pinned, loaded = [], []

    def load(trace, num_targets):
        loaded.append((trace, num_targets))
        return [make_targets(name="small"), make_targets(num_experts=128, name="large")]

    monkeypatch.setattr(scheduler, "load_sequences", load)
    monkeypatch.setattr(
        scheduler, "measure", lambda targets, ep: make_row("", ep, afore=ep, llep=5.0)["planners"]
    )
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append((pid, cores)))

    def run(*arguments):
        path = tmp_path / "scheduler.json"
        monkeypatch.setattr(sys, "argv", ["scheduler.py", *arguments, "--json", str(path)])
        scheduler.main()
        return json.loads(path.read_text()), loaded, pinned

    return run


def test_json_has_a_row_per_workload_and_ep_degree(run_main, tmp_path):
    document, loaded, pinned = run_main("--ep", "2", "8", "128", "--targets", "7")
    assert set(document) == {"hardware", "command", "unit", "rows"}
    assert document["command"].startswith("python -m bench.scheduler --ep 2 8 128 --targets 7 ")
    assert document["unit"] == "us per target"
    # 128 workers are too many for 8 experts.
    assert [(row["workload"], row["ep"]) for row in document["rows"]] == [
        ("small", 2),
        ("small", 8),
        ("large", 2),
        ("large", 8),
        ("large", 128),
    ]
    assert document["rows"][0] == make_row("small", 2, afore=2, llep=5.0) | {"paper_us": 8.23}
    assert [row.get("paper_us") for row in document["rows"]] == [8.23, None, 8.23, None, 245.81]
    assert loaded == [(None, 7)]
    ((process, cores),) = pinned
    assert (process, len(cores)) == (0, 1)


def test_quick_takes_fewer_degrees_and_targets(run_main):
    document, loaded, _ = run_main("--quick")
    assert {row["ep"] for row in document["rows"]} == {2, 8}
    assert loaded == [(None, 40)]


def test_printed_rows_have_a_column_per_planner_and_the_paper(run_main, capsys):
    run_main("--ep", "2", "8")
    _, header, first, second, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["workload", "EP", "afore", "llep", "paper"]
    assert first.split() == ["small", "2", "2.00", "5.00", "8.23"]
    assert second.split() == ["small", "8", "8.00", "5.00", "nan"]


def test_paper_values_are_those_of_the_text():
    # Section 7.3: "8.23 us at EP=2 and remains 245.81 us even at EP=128".
    assert PAPER_US == {2: 8.23, 128: 245.81}
