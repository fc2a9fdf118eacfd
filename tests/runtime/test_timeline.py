from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from afore_kernels.plan import Plan, PrimaryPlacement, Rejection, Target
from afore_kernels.runtime.memory import PLAN_BELL, TierMemory
from afore_kernels.runtime.shared import advance
from afore_kernels.runtime.timeline import (
    Event,
    Stage,
    Timeline,
    Track,
    read_events,
    track_names,
    worker_loads,
)

US = 1000


def worked_example(sequence: int = 0) -> Plan:
    """Two workers, primaries 0-2 and 3-5, tile_m 4; worker 1 takes 10 of expert 0's 23 pairs.

    Pairs: worker 0 runs 13 + 1, worker 1 runs 10 + 5.
    Tiles: worker 0 runs 4 + 1, worker 1 runs 3 + 2. Static: 23 + 1 and 5 pairs, 6 + 1 and 2 tiles.
    """
    return Plan(
        Target(7, 1, sequence % 2),
        sequence,
        4,
        np.array([23, 0, 1, 0, 5, 0], np.int32),
        np.array([10, 5], np.int32),
        np.array([[-1, -1], [-1, 0]], np.int32),
        np.array([[0, 0], [0, 10]], np.int32),
        np.array([[0, 0], [0, 1]], np.uint8),
    )


@pytest.fixture
def memory(make_memory) -> TierMemory:
    return make_memory(num_ranks=2, timeline_events=16)


def publish(memory: TierMemory, plan: Plan) -> None:
    records = memory.arrays["plan_records"]
    records[plan.sequence % len(records)] = memory.plan_layout.pack(plan)
    advance(memory.arrays["plans_published"], 0, plan.sequence + 1, memory.bell(PLAN_BELL))


def record(memory: TierMemory, track: str, stage: Stage, sequence: int, *times_and_value: int):
    Track(memory, track).record(stage, sequence, *times_and_value)


def test_worker_loads_of_a_worked_example():
    pairs, tiles = worker_loads(worked_example(), PrimaryPlacement(6, 2, 2))
    assert pairs.tolist() == [14, 15]
    assert tiles.tolist() == [5, 5]


def test_every_track_keeps_its_own_events(memory):
    names = track_names(memory.tier)
    assert len(set(names)) == len(names) == 1 + 2 + 2 + 2
    expected = []
    for i, name in enumerate(names):
        for sequence in range(2):
            event = Event(name, Stage(i % len(Stage)), sequence, 10 * i, 10 * i + 5, -i)
            record(memory, name, *event[1:])
            expected.append(event)
    assert list(read_events(memory)) == expected


def test_full_track_keeps_its_newest_events(memory):
    for sequence in range(16 + 5):
        record(memory, "worker 1 model", Stage.GEMM, sequence, sequence, sequence + 1, 0)
    record(memory, "scheduler", Stage.PLANNED, 0, 0, 1, 0)
    by_track = {}
    for event in read_events(memory):
        by_track.setdefault(event.track, []).append(event.sequence)
    assert by_track == {"scheduler": [0], "worker 1 model": list(range(5, 21))}


def test_per_target_row_of_a_worked_example(memory):
    publish(memory, worked_example(0))
    record(memory, "scheduler", Stage.PLANNED, 0, 100 * US, 130 * US, 1)
    # Worker 1's copy takes 40 us, is needed 25 us after its submission, and exposes 15 us.
    record(memory, "worker 1 migration", Stage.COPY, 0, 200 * US, 240 * US, 1)
    record(memory, "worker 1 model", Stage.COPY_WAIT, 0, 225 * US, 240 * US, 1)
    # Worker 0 copies nothing; its empty wait counts for nothing.
    record(memory, "worker 0 model", Stage.COPY_WAIT, 0, 150 * US, 250 * US, 0)
    (row,) = Timeline(memory).per_target
    assert [int(row[name]) for name in ("sequence", "step", "layer", "microbatch")] == [0, 7, 1, 0]
    assert (int(row["num_tokens"]), int(row["num_copies"])) == (15, 1)
    assert row["pairs_per_worker"].tolist() == [14, 15]
    assert row["tiles_per_worker"].tolist() == [5, 5]
    assert row["static_pairs_per_worker"].tolist() == [24, 5]
    assert row["static_tiles_per_worker"].tolist() == [7, 2]
    times = [float(row[f"{name}_us"]) for name in ("planned", "raw_copy", "lookahead", "exposed")]
    assert times == [30.0, 40.0, 25.0, 15.0]


def test_per_target_takes_the_slowest_copy_and_the_shortest_lookahead(memory):
    publish(memory, worked_example(0))
    for worker, copy_us, lookahead_us, exposed_us in ((0, 10, 8, 2), (1, 50, 45, 5)):
        end = lookahead_us + exposed_us
        record(memory, f"worker {worker} migration", Stage.COPY, 0, 0, copy_us * US, 1)
        waits = (lookahead_us * US, end * US, 1)
        record(memory, f"worker {worker} model", Stage.COPY_WAIT, 0, *waits)
    (row,) = Timeline(memory).per_target
    assert [row["raw_copy_us"], row["lookahead_us"], row["exposed_us"]] == [50.0, 8.0, 5.0]


def test_target_without_copies_has_no_copy_times(memory):
    plan = worked_example(0)
    publish(memory, dataclasses.replace(plan, slot_copy=np.zeros_like(plan.slot_copy)))
    record(memory, "worker 1 model", Stage.COPY_WAIT, 0, 0, 5 * US, 0)
    (row,) = Timeline(memory).per_target
    assert row["num_copies"] == 0
    assert all(math.isnan(row[f"{name}_us"]) for name in ("raw_copy", "lookahead", "exposed"))


def test_rows_are_those_of_executed_targets(memory):
    publish(memory, worked_example(0))
    publish(memory, dataclasses.replace(worked_example(1), rejection=Rejection.DEMAND_TIMEOUT))
    publish(memory, worked_example(2))
    record(memory, "scheduler", Stage.PLANNED, 1, 0, 9 * US, 0)
    record(memory, "scheduler", Stage.PLANNED, 2, 0, 3 * US, 0)
    rows = Timeline(memory).per_target
    assert rows["sequence"].tolist() == [0, 2]
    assert rows["planned_us"].tolist() == [0.0, 3.0]


def test_trace_file_has_a_named_track_and_a_slice_per_event(memory, tmp_path):
    publish(memory, worked_example(0))
    record(memory, "scheduler", Stage.PLANNED, 0, 5_000_500, 5_030_500, 1)
    record(memory, "worker 0 model", Stage.GEMM, 0, 5_040_500, 5_041_000, 14)
    record(memory, "worker 0 model", Stage.GEMM, 99, 5_050_500, 5_051_000, 3)
    Timeline(memory).write(tmp_path / "timeline.json")
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
    slices = [e for e in trace if e["ph"] == "X"]
    assert len(trace) == len(tracks) + len(slices)
    assert [(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("scheduler", "planned", 0.0, 30.0),
        ("worker 0 model", "gemm", 40.0, 0.5),
        ("worker 0 model", "gemm", 50.0, 0.5),
    ]
    key = {"step": 7, "layer": 1, "microbatch": 0}
    assert [e["args"] for e in slices] == [
        {"sequence": 0, "value": 1, **key},
        {"sequence": 0, "value": 14, **key},
        {"sequence": 99, "value": 3},  # its plan has left the ring
    ]


def test_empty_timeline_can_be_written(memory, tmp_path):
    timeline = Timeline(memory)
    timeline.write(tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []
    assert len(timeline.per_target) == 0
