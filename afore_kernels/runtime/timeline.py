"""The timeline of every target: who did what, when, on one clock, viewable in Perfetto.

Every process appends fixed-size events to its own tracks in shared memory; nothing is sent. A track
keeps its most recent `timeline_events` events.
"""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from afore_kernels.config import TierConfig
from afore_kernels.gemm.tiles import count_tiles
from afore_kernels.plan import Plan, PrimaryPlacement, Rejection
from afore_kernels.runtime.memory import TierMemory
from afore_kernels.runtime.plan_ring import recent_plans
from afore_kernels.runtime.shared import (
    LINE_WORDS,
    Array,
    Field,
    compiled,
    count,
    counters,
    store_release,
)

EVENT_WORDS = 5


class Stage(enum.IntEnum):
    """What an event's time was spent on; `value` in brackets."""

    DEMAND_POSTED = 0  # attention rank: histogram and post [tokens]
    PLANNED = 1  # scheduler: demand complete -> plan published [copies]
    INPUT = 2  # worker: wait for the ranks' inputs [tokens]
    GATHER = 3  # worker: all-gather [tokens]
    COPIES_SUBMITTED = 4  # worker: plan read, copies submitted [copies]
    COPY = 5  # worker's migration stream: submitted -> done [copies]
    COPY_WAIT = 6  # worker: wait for copies when the target needs them [copies of this target]
    PARTITION = 7  # worker [tiles]
    GEMM = 8  # worker: expert and shared FFN [pairs]
    REDUCE = 9  # worker: all-reduce [tokens]
    REPLY = 10  # worker: slices to the ranks [tokens]
    RECEIVED = 11  # attention rank: submitted -> result taken [tokens]


class Event(NamedTuple):
    """One event; times in ns on the monotonic clock."""

    track: str
    stage: Stage
    sequence: int
    start_ns: int
    end_ns: int
    value: int


def fields(tier: TierConfig) -> dict[str, Field]:
    """Shared fields of the timeline."""
    num_tracks = len(track_names(tier))
    return {
        "events_recorded": counters(num_tracks),
        "events": Field(np.int64, (num_tracks, tier.timeline_events, EVENT_WORDS)),
    }


def track_names(tier: TierConfig) -> list[str]:
    """Tracks in index order."""
    return [
        "scheduler",
        *(f"worker {w} model" for w in range(tier.num_workers)),
        *(f"worker {w} migration" for w in range(tier.num_workers)),
        *(f"attention rank {a}" for a in range(tier.num_ranks)),
    ]


@compiled
def record_event(recorded, events, track, stage, sequence, start_ns, end_ns, value):  # type: ignore[no-untyped-def]
    """Append one event to a track; only the track's owner may call this."""
    index = recorded[track * LINE_WORDS]
    event = events[track, index % events.shape[1]]
    event[0] = stage
    event[1] = sequence
    event[2] = start_ns
    event[3] = end_ns
    event[4] = value
    store_release(recorded, track * LINE_WORDS, index + 1)


class Track:
    """One process's (or stream's) end of the timeline; its threads take turns."""

    def __init__(self, memory: TierMemory, name: str) -> None:
        self._recorded = memory.arrays["events_recorded"]
        self._events = memory.arrays["events"]
        self._track = track_names(memory.tier).index(name)
        self._lock = threading.Lock()

    def record(self, stage: Stage, sequence: int, start_ns: int, end_ns: int, value: int) -> None:
        """Append one event."""
        with self._lock:
            record_event(
                self._recorded, self._events, self._track, stage, sequence, start_ns, end_ns, value
            )


def read_events(memory: TierMemory) -> Iterator[Event]:
    """All kept events, track by track, oldest first."""
    recorded, events = memory.arrays["events_recorded"], memory.arrays["events"]
    for track, name in enumerate(track_names(memory.tier)):
        end = int(count(recorded, track))
        for index in range(max(0, end - events.shape[1]), end):
            stage, sequence, start_ns, end_ns, value = events[track, index % events.shape[1]]
            yield Event(
                name, Stage(int(stage)), int(sequence), int(start_ns), int(end_ns), int(value)
            )


def worker_loads(plan: Plan, placement: PrimaryPlacement) -> tuple[Array, Array]:
    """Pairs and tiles of each worker under a plan (Eqs. 3 and 4), int64 [num_workers] each."""
    bound = plan.slot_expert >= 0
    replica_pairs = np.zeros(placement.num_experts, np.int64)
    np.add.at(replica_pairs, plan.slot_expert[bound], plan.slot_pairs[bound])
    primary_pairs: Array = plan.demand - replica_pairs
    pairs = plan.slot_pairs.sum(axis=1, dtype=np.int64)
    tiles = count_tiles(plan.slot_pairs, plan.tile_m).sum(axis=1, dtype=np.int64)
    np.add.at(pairs, placement.primary_worker, primary_pairs)
    np.add.at(tiles, placement.primary_worker, count_tiles(primary_pairs, plan.tile_m))
    return pairs, tiles


def per_target_dtype(num_workers: int) -> np.dtype[Any]:
    """Row of `Timeline.per_target`; times in us, NaN where the target needed no copy."""
    loads = (np.int64, (num_workers,))
    return np.dtype(
        [
            ("sequence", np.int64),
            ("step", np.int64),
            ("layer", np.int32),
            ("microbatch", np.int32),
            ("num_tokens", np.int32),
            ("pairs_per_worker", *loads),
            ("tiles_per_worker", *loads),
            ("static_pairs_per_worker", *loads),
            ("static_tiles_per_worker", *loads),
            ("num_copies", np.int32),
            ("raw_copy_us", np.float64),
            ("lookahead_us", np.float64),
            ("exposed_us", np.float64),
            ("planned_us", np.float64),
        ]
    )


class Timeline:
    """What the tier has recorded so far."""

    def __init__(self, memory: TierMemory) -> None:
        self._placement = memory.placement
        self.events = list(read_events(memory))
        self.plans = [p for p in recent_plans(memory) if p.rejection is Rejection.NONE]

    @property
    def per_target(self) -> Array:
        """One row per executed target still in the plan ring, see `per_target_dtype`.

        `raw_copy_us` is the longest copy batch from submission to completion over workers,
        `lookahead_us` the shortest time from submission to first use, `exposed_us` the longest wait
        for copies when the target needed them (paper section 7.5).
        """
        rows = np.zeros(len(self.plans), per_target_dtype(self._placement.num_workers))
        row_of = {plan.sequence: row for row, plan in enumerate(self.plans)}
        for row, plan in zip(rows, self.plans):
            pairs, tiles = worker_loads(plan, self._placement)
            static_pairs, static_tiles = worker_loads(plan.without_replicas(), self._placement)
            row["sequence"] = plan.sequence
            row["step"], row["layer"], row["microbatch"] = plan.target
            row["num_tokens"] = plan.num_tokens
            row["pairs_per_worker"], row["tiles_per_worker"] = pairs, tiles
            row["static_pairs_per_worker"] = static_pairs
            row["static_tiles_per_worker"] = static_tiles
            row["num_copies"] = int(plan.slot_copy.sum())
        rows["raw_copy_us"] = rows["lookahead_us"] = rows["exposed_us"] = np.nan
        submitted_ns = {
            (e.track.split()[1], e.sequence): e.start_ns
            for e in self.events
            if e.stage is Stage.COPY
        }
        for event in self.events:
            if event.sequence not in row_of:
                continue
            row = rows[row_of[event.sequence]]
            duration_us = (event.end_ns - event.start_ns) / 1e3
            if event.stage is Stage.PLANNED:
                row["planned_us"] = duration_us
            elif event.stage is Stage.COPY:
                row["raw_copy_us"] = np.fmax(row["raw_copy_us"], duration_us)
            elif event.stage is Stage.COPY_WAIT and event.value:
                row["exposed_us"] = np.fmax(row["exposed_us"], duration_us)
                start_ns = submitted_ns.get((event.track.split()[1], event.sequence))
                if start_ns is not None:
                    lookahead_us = (event.start_ns - start_ns) / 1e3
                    row["lookahead_us"] = np.fmin(row["lookahead_us"], lookahead_us)
        return rows

    def write(self, path: str | Path) -> None:
        """Write Chrome trace-event JSON, which https://ui.perfetto.dev opens."""
        target_of = {plan.sequence: plan.target for plan in self.plans}
        origin_ns = min((e.start_ns for e in self.events), default=0)
        tracks = list(dict.fromkeys(e.track for e in self.events))
        trace: list[dict[str, Any]] = [
            {
                "ph": "M",
                "pid": 1,
                "tid": tid,
                "name": "thread_name",
                "args": {"name": track},
            }
            for tid, track in enumerate(tracks)
        ]
        for event in self.events:
            target = target_of.get(event.sequence)
            trace.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": tracks.index(event.track),
                    "name": event.stage.name.lower(),
                    "ts": (event.start_ns - origin_ns) / 1e3,
                    "dur": (event.end_ns - event.start_ns) / 1e3,
                    "args": {
                        "sequence": event.sequence,
                        "value": event.value,
                        **(target._asdict() if target else {}),
                    },
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ns"}))
