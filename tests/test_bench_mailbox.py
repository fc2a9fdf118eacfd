from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.mailbox import PAUSE_S, draw_demand, make_schedule

NUM_TARGETS, NUM_WORKERS = 5, 2


def test_every_link_serves_the_same_targets_once():
    schedule = make_schedule(3, 120)
    per_link = [[b for b in schedule if b.link == link] for link in range(3)]
    served = [[s for b in batches for s in b.sequences] for batches in per_link]
    # One warm-up batch of 50 and two timed ones, in two modes.
    assert served[0] == served[1] == served[2] == list(range(300))
    assert sum(len(b.sequences) for b in per_link[0] if not b.is_warmup) == 200
    assert {b.link for b in schedule[:: len(per_link)]} == {0, 1, 2}, "the first place rotates"


def test_demand_is_skewed_and_drifts():
    demand = draw_demand(16, 2, 8)
    assert (demand.sum(axis=2) == demand[0, 0].sum()).all()
    assert (demand.max(axis=2) > 3 * demand.mean(axis=2)).all()
    assert (demand[0] != demand[4]).any()


@pytest.mark.multiprocess
def test_every_worker_sees_every_plan(tmp_path):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "bench.mailbox", "--experts", "16", "--json", str(path)]
    command += ["--workers", str(NUM_WORKERS), "--targets", str(NUM_TARGETS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rows = json.loads(path.read_text())["rows"]
    links = {"shared memory (afore)", "multiprocessing.Queue", "Unix socket", "TCP socket"}
    for mode in PAUSE_S:
        measured = {row["link"]: row for row in rows if row["mode"] == mode}
        assert set(measured) - {"pyzmq"} == links
        for row in measured.values():
            assert row["samples"] == NUM_TARGETS
            assert row["reads"] == NUM_TARGETS * NUM_WORKERS
            assert row["planning_us"] > 0
            assert row["median_us"] <= row["p99_us"]
            assert row["link"] in result.stdout
        assert measured["shared memory (afore)"]["ratio"] == 1
    assert ("pyzmq" in measured) != ("not installed" in result.stdout)
