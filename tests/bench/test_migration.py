"""Figure 11's bookkeeping on hand-made events, and on a real tier whose copies must be hidden."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.plan import Target
from afore_kernels.replay.workload import Workload, drive_tier
from afore_kernels.runtime.client import AttentionClient
from afore_kernels.runtime.launch import Tier
from afore_kernels.runtime.timeline import Event, Stage, Timeline
from afore_kernels.runtime.weights import RandomWeights
from afore_kernels.traces import split_tokens
from bench import migration
from bench.migration_events import (
    COMPUTE_STAGES,
    Sample,
    compare,
    copy_samples,
    exposed_when_fitting,
    gemm_samples,
    idle_waits_us,
    overlap_by_stage,
    overlap_share,
    target_copies,
)
from bench.synthetic_routing import FITTED, SyntheticRouting

US = 1000


def event(stage: Stage, sequence: int, start: int, end: int, value: int = 1, worker: int = 0):
    """An event from `start` to `end` us of one worker."""
    stream = "migration" if stage is Stage.COPY else "model"
    return Event(f"worker {worker} {stream}", stage, sequence, start * US, end * US, value)


def row_of(*events: Event):
    (row,) = target_copies(events)
    return row


def test_a_copy_in_time_leaves_the_rest_of_its_window() -> None:
    row = row_of(event(Stage.COPY, 3, 100, 140), event(Stage.COPY_WAIT, 3, 300, 302))
    assert (row.sequence, row.raw_copy_us, row.lookahead_us) == (3, 40, 200)
    assert (row.remaining_us, row.exposed_us, row.fits) == (160, 2, True)


def test_a_late_copy_is_exposed() -> None:
    row = row_of(event(Stage.COPY, 3, 100, 300), event(Stage.COPY_WAIT, 3, 160, 301))
    assert (row.raw_copy_us, row.lookahead_us, row.remaining_us) == (200, 60, -140)
    assert (row.exposed_us, row.fits) == (141, False)
    assert exposed_when_fitting([row]) == (1, 0, None, None)


def test_a_copy_on_the_critical_path_has_no_window() -> None:
    row = row_of(event(Stage.COPY_WAIT, 3, 100, 310), event(Stage.COPY, 3, 105, 305))
    assert (row.lookahead_us, row.remaining_us, row.fits) == (-5, -205, False)


def test_a_target_is_its_worst_worker() -> None:
    row = row_of(
        event(Stage.COPY, 0, 0, 100),
        event(Stage.COPY_WAIT, 0, 150, 151),
        event(Stage.COPY, 0, 0, 10, worker=1),
        event(Stage.COPY_WAIT, 0, 20, 25, worker=1),
    )
    # Worker 1 is the nearest to its use; with the other one's copy it would be late.
    assert (row.raw_copy_us, row.lookahead_us) == (100, 20)
    assert (row.remaining_us, row.exposed_us, row.fits) == (10, 5, True)
    late = row_of(
        event(Stage.COPY, 0, 0, 100),
        event(Stage.COPY_WAIT, 0, 150, 151),
        event(Stage.COPY, 0, 0, 30, worker=1),
        event(Stage.COPY_WAIT, 0, 20, 31, worker=1),
    )
    assert (late.remaining_us, late.fits) == (-10, False)


def test_a_target_that_has_not_run_yet_has_no_row() -> None:
    assert target_copies([event(Stage.COPY, 3, 0, 10)]) == []


def test_only_fitting_targets_count_as_fitting() -> None:
    events = [
        *(event(Stage.COPY, sequence, 0, 10) for sequence in range(4)),
        *(event(Stage.COPY_WAIT, sequence, 20, 21 + sequence) for sequence in range(3)),
        event(Stage.COPY_WAIT, 3, 5, 105),
    ]
    assert exposed_when_fitting(target_copies(events)) == (4, 3, 2, 3)


def test_idle_waits_have_nothing_to_wait_for() -> None:
    events = [
        event(Stage.COPY, 1, 100, 200),
        event(Stage.COPY_WAIT, 0, 99, 102, value=0),
        event(Stage.COPY_WAIT, 1, 150, 201),  # for copies of its own
        event(Stage.COPY_WAIT, 2, 199, 209, value=0),  # for those of an earlier plan
        event(Stage.COPY_WAIT, 3, 200, 204, value=0),
        event(Stage.COPY_WAIT, 4, 300, 309),  # the copies, of before the first event, were ready
        event(Stage.COPY_WAIT, 2, 150, 155, value=0, worker=1),  # the other worker's copy
    ]
    assert idle_waits_us(events) == [3, 4, 5]


@pytest.mark.parametrize("stage", COMPUTE_STAGES)
def test_a_copy_beside_an_earlier_target_overlaps(stage: Stage) -> None:
    copy = event(Stage.COPY, 5, 100, 200)
    assert overlap_share([copy, event(stage, 4, 50, 130)]) == 0.3
    assert overlap_share([copy, event(stage, 4, 120, 900)]) == 0.8
    assert overlap_share([copy, event(stage, 3, 90, 110), event(stage, 4, 150, 160)]) == 0.2


def test_a_copy_that_does_not_overlap_is_shown_so() -> None:
    copy = event(Stage.COPY, 5, 100, 200)
    for other in (
        event(Stage.GEMM, 4, 0, 100),
        event(Stage.GEMM, 4, 200, 300),
        event(Stage.GEMM, 5, 100, 200),  # its own target
        event(Stage.GEMM, 6, 100, 200),  # a later one
        event(Stage.GEMM, 4, 100, 200, worker=1),
        event(Stage.INPUT, 4, 100, 200),  # nothing is computed
    ):
        assert overlap_share([copy, other]) == 0, other
    other_worker = event(Stage.COPY, 5, 100, 200, worker=1)
    assert overlap_share([other_worker, event(Stage.GEMM, 4, 100, 200)]) == 0
    assert overlap_share([event(Stage.GEMM, 4, 0, 100)]) == 0, "no copies"


def test_the_copy_time_is_divided_among_the_stages() -> None:
    events = [
        event(Stage.COPY, 5, 100, 200),
        event(Stage.GATHER, 4, 90, 120),
        event(Stage.PARTITION, 4, 120, 130),
        event(Stage.GEMM, 4, 130, 180),
        event(Stage.COPY, 6, 300, 400),  # beside nothing
    ]
    shares = {stage.name: share for stage, share in overlap_by_stage(events).items() if share}
    assert shares == {"GATHER": 0.1, "PARTITION": 0.05, "GEMM": 0.25}
    assert overlap_share(events) == pytest.approx(0.3)


def test_samples_say_what_ran_beside_them() -> None:
    events = [
        event(Stage.GEMM, 0, 0, 100, value=7),  # all of the first copy
        event(Stage.COPY, 1, 20, 40, value=2),
        event(Stage.GEMM, 1, 200, 300, value=8),  # a fifth of the second copy
        event(Stage.COPY, 2, 280, 380),
        event(Stage.GEMM, 2, 400, 500, value=9),  # none; the other worker copies
        event(Stage.COPY, 3, 400, 500, worker=1),
        event(Stage.GEMM, 3, 600, 700, value=0),  # a worker without pairs computes nothing
    ]
    assert gemm_samples(events) == {
        ("worker 0", 0): Sample(100, 7, True),
        ("worker 0", 1): Sample(100, 8, None),
        ("worker 0", 2): Sample(100, 9, False),
    }
    assert copy_samples(events) == {
        ("worker 0", 1): Sample(10, 2, True),
        ("worker 0", 2): Sample(100, 1, None),
        ("worker 1", 3): Sample(100, 1, False),
    }


def test_a_copy_is_timed_from_the_end_of_the_one_before_it() -> None:
    events = [event(Stage.COPY, 1, 0, 100), event(Stage.COPY, 2, 60, 150)]
    assert [sample.time_us for sample in copy_samples(events).values()] == [100, 50]


def test_interference_pairs_the_same_work() -> None:
    measured = {
        ("worker 0", 0): Sample(20.0, 4, True),
        ("worker 0", 1): Sample(60.0, 4, True),
        ("worker 0", 2): Sample(90.0, 4, True),
        ("worker 0", 3): Sample(11.0, 4, False),
        ("worker 0", 4): Sample(99.0, 4, None),
        ("worker 0", 5): Sample(99.0, 4, True),
        ("worker 0", 6): Sample(99.0, 4, True),
    }
    reference = {
        ("worker 0", 0): Sample(10.0, 4, False),
        ("worker 0", 1): Sample(20.0, 4, False),
        ("worker 0", 2): Sample(10.0, 4, False),
        ("worker 0", 3): Sample(10.0, 4, False),
        ("worker 0", 4): Sample(10.0, 4, False),
        ("worker 0", 5): Sample(10.0, 4, True),  # no reference: the other ran beside it too
    }
    found = compare(measured, reference)
    assert (found.num_beside, found.beside_us, found.reference_us) == (3, 60, 10)
    assert found.ratio == 3, "the median of the ratios, not the ratio of the medians"
    assert (found.num_alone, found.alone_ratio) == (1, 1.1)


def test_interference_needs_equal_plans() -> None:
    key = ("worker 0", 0)
    with pytest.raises(RuntimeError, match=r"different plans.*5, 4"):
        compare({key: Sample(20.0, 5, True)}, {key: Sample(10.0, 4, False)})


def test_no_pairs_are_not_a_ratio() -> None:
    assert compare({}, {}) == (0, None, None, None, 0, None)


def test_the_fewest_microbatches_and_the_overlap_are_what_others_are_divided_by() -> None:
    beside = [event(Stage.COPY, 1, 0, 50), event(Stage.GEMM, 0, 0, 60)]
    apart = [event(Stage.COPY, 1, 80, 90), event(Stage.GEMM, 0, 0, 20)]
    rows = migration.compare_runs(
        {
            migration.Setting(False, 4): migration.Run(apart, [60.0, 40.0]),
            migration.Setting(True, 4): migration.Run(beside, [20.0, 20.0]),
            migration.Setting(False, 1): migration.Run(apart, [30.0, 30.0]),
            migration.Setting(True, 1): migration.Run(apart, [10.0, 10.0]),
        },
        expert_bytes=100_000,
    )
    assert [row["num_microbatches"] for row in rows] == [1, 4]
    assert [row["step_ratio_to_overlapped"] for row in rows] == [3, 2.5]
    assert [row["step_ratio_to_fewest"] for row in rows] == [1, 2]
    assert (rows[1]["gemm"]["num_beside"], rows[1]["gemm"]["ratio"]) == (1, 3)
    assert (rows[1]["copy"]["num_beside"], rows[1]["copy"]["ratio"]) == (1, 5)
    # 100 kB in 50 us and in 10 us.
    bandwidths = ("beside_gb_per_s", "reference_gb_per_s")
    assert [rows[1]["copy"][name] for name in bandwidths] == [2, 10]
    assert [rows[0]["copy"][name] for name in bandwidths] == [None, None]


def test_a_run_without_copies_is_an_error() -> None:
    run = migration.Run([event(Stage.GEMM, 0, 0, 1)], [1.0])
    with pytest.raises(SystemExit, match="overlapped, 2 in flight: no target needed a copy"):
        migration.summarise(migration.Setting(True, 2), run)


def test_no_rounds_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["migration.py", "--rounds", "0"])
    with pytest.raises(SystemExit):
        migration.main()
    assert "too few rounds" in capsys.readouterr().err


def test_paper_values_are_those_of_the_text() -> None:
    # Section 7.5: "Mean raw migration cost ranges from 0.453-0.495 ms, compared with a mean
    # lookahead window of 2.008-2.119 ms. All 324 sampled targets complete their required copies
    # before use ... The median remaining time ranges from 1.459-1.668 ms across workloads, with a
    # minimum of 0.447 ms."
    paper = migration.PAPER
    assert (paper["raw_copy_us"], paper["lookahead_us"]) == (
        {"mean": [453, 495]},
        {"mean": [2008, 2119]},
    )
    assert paper["remaining_us"] == {"p50": [1459, 1668], "min": [447, 447]}
    assert (paper["targets_with_copies"], paper["share_fitting"]) == (324, 1)
    assert paper["exposed_us"] == {"max": [0, 0]}


class DelayedInputs:
    """A client whose inputs follow their demand after a while, as attention's do."""

    def __init__(self, client: AttentionClient, delay_s: float) -> None:
        self.send_demand = client.send_demand
        self.wait = client.wait
        self._client = client
        self._delay_s = delay_s

    def submit(self, target: Target, *inputs: torch.Tensor) -> None:
        time.sleep(self._delay_s)
        self._client.submit(target, *inputs)


def run_tier(overlap_copies: bool) -> Timeline:
    """Serve targets of one layer whose inputs follow their demand by 60 ms.

    At every step all pairs are on two other experts of worker 0's eight, so that worker 1 needs a
    replica of one of them. The second slot is for it: the microbatch before uses the first.
    """
    num_steps, num_tokens = 12, 96
    hot = 2 * np.arange(num_steps) % 8
    ids = np.broadcast_to(np.stack([hot, hot + 1], 1)[:, None, None], (num_steps, num_tokens, 1, 2))
    moe = MoEConfig(
        num_layers=1, num_experts=16, top_k=2, hidden_size=256, intermediate_size=256, tile_m=4
    )
    workload = Workload(moe, ids.astype(np.uint8), split_tokens(num_tokens, 2, 1))
    tier = TierConfig(
        num_workers=2,
        max_tokens_per_rank=num_tokens,
        redundant_slots=2,
        targets_in_flight=2,
        overlap_copies=overlap_copies,
    )
    with Tier.start(moe, tier, RandomWeights(moe)) as running, running.client() as client:
        for _ in drive_tier([DelayedInputs(client, 0.06)], workload, 2):
            pass
        return running.timeline()


@pytest.mark.multiprocess
def test_copies_that_fit_a_real_tiers_window_are_hidden() -> None:
    timeline = run_tier(overlap_copies=True)
    rows = target_copies(timeline.events)
    assert len(rows) >= 8
    assert all(row.fits for row in rows), min(row.remaining_us for row in rows)
    waits = exposed_when_fitting(rows)
    assert waits.num_fitting == waits.num_targets == len(rows)
    assert waits.median_us is not None
    assert waits.median_us <= max(idle_waits_us(timeline.events))
    assert waits.median_us < 0.5 * np.median([row.raw_copy_us for row in rows])
    assert overlap_share(timeline.events) > 0
    # The timeline's own summary is of the same targets and times.
    recorded = timeline.per_target[timeline.per_target["num_copies"] > 0]
    for name in ("sequence", "raw_copy_us", "lookahead_us", "exposed_us"):
        np.testing.assert_allclose(recorded[name], [getattr(row, name) for row in rows])


@pytest.mark.multiprocess
def test_copies_on_a_real_tiers_critical_path_are_exposed() -> None:
    events = run_tier(overlap_copies=False).events
    rows = target_copies(events)
    assert len(rows) >= 8
    for row in rows:
        assert not row.fits
        assert row.remaining_us <= -row.raw_copy_us < 0, "the copy begins in the wait for it"
    ratio = np.median([row.exposed_us / row.raw_copy_us for row in rows])
    assert 0.5 < ratio < 2
    assert overlap_share(events) == 0


@pytest.mark.multiprocess
def test_the_command_measures_every_alternative(tmp_path: Path) -> None:
    routing = SyntheticRouting(
        num_experts=16, top_k=4, num_layers=2, num_domains=1, scales=FITTED, seed=1
    )
    recorded = routing.draw(np.zeros(100, np.int64), np.full(100, 20))
    trace, path, figure = (tmp_path / name for name in ("routing.npz", "out.json", "out.png"))
    np.savez(
        trace,
        **{name: getattr(recorded, name) for name in ("ids", "offsets", "domain", "domain_names")},
        num_experts=np.int64(recorded.num_experts),
    )
    command = [sys.executable, "-m", "bench.migration", "--quick", "--trace", str(trace)]
    command += ["--json", str(path), "--plot", str(figure)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["command"].startswith("python -m bench.migration --quick --trace ")
    assert document["hardware"] in result.stdout
    assert document["paper"] == migration.PAPER
    assert migration.PAPER["hardware"] in result.stdout
    fitting = document["rows"][-1]["exposed_when_fitting"]
    assert f" {fitting['num_fitting']}/{fitting['num_targets']} " in result.stdout
    assert figure.stat().st_size > 1000
    rows = {row["overlap_copies"]: row for row in document["rows"]}
    for row in rows.values():
        assert row["num_microbatches"] == 2
        assert row["targets"] == migration.QUICK_ROUNDS * migration.STEPS_PER_ROUND * 2 * 2
        for name in ("raw_copy_us", "lookahead_us", "remaining_us", "exposed_us"):
            levels = [row[name][level] for level in ("min", "p5", "p50", "p95", "p99", "max")]
            assert levels == sorted(levels)
            assert levels[0] <= row[name]["mean"] <= levels[-1]
        assert row["step_us"] > 0
    assert rows[True]["targets_with_copies"] == rows[False]["targets_with_copies"] > 0
    assert rows[True]["share_fitting"] > 0
    assert rows[False]["share_fitting"] == rows[False]["overlap_share"] == 0
    (comparison,) = document["comparisons"]
    assert comparison["step_ratio_to_overlapped"] > 0
    assert comparison["step_ratio_to_fewest"] == 1
    assert comparison["gemm"]["num_alone"] > 0
