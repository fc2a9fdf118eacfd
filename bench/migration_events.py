"""How well copies are hidden, read off the events of a tier's timeline.

A copy is in flight from its submission until the migration stream has passed it. The target it is
for uses it at its COPY_WAIT (C in the paper's Figure 7), which a copy that has arrived leaves at
once: what is left is the call itself, measured by the waits that had nothing to wait for.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from afore_kernels.runtime.timeline import Event, Stage

# What a worker does for a target, one after another (section 6.2), and what of it is left once the
# target's own replicas are ready.
TARGET_STAGES = (
    Stage.INPUT,
    Stage.GATHER,
    Stage.COPY_WAIT,
    Stage.PARTITION,
    Stage.GEMM,
    Stage.REDUCE,
    Stage.REPLY,
)
COMPUTE_STAGES = (Stage.PARTITION, Stage.GEMM, Stage.REDUCE)

Key = tuple[str, int]
"""(worker, sequence)."""


@dataclass(frozen=True, slots=True)
class TargetCopies:
    """One target that needed copies, by its worst worker; times in us (paper section 7.5).

    Attributes:
        sequence: of the target.
        raw_copy_us: D, longest time from submission to completion.
        lookahead_us: W, shortest time from submission to first use.
        remaining_us: shortest time from completion to first use, W - D of one worker; negative if
            the copies came late.
        exposed_us: longest COPY_WAIT, the call included.
    """

    sequence: int
    raw_copy_us: float
    lookahead_us: float
    remaining_us: float
    exposed_us: float

    @property
    def fits(self) -> bool:
        """Whether every worker had its copies when the target came to use them."""
        return self.remaining_us >= 0


class FittingWaits(NamedTuple):
    """Waits of the targets whose copies fit their window; times in us, None if there are none."""

    num_targets: int
    num_fitting: int
    median_us: float | None
    largest_us: float | None


class Sample(NamedTuple):
    """One GEMM stage, or one batch of copies.

    Attributes:
        time_us: of the GEMM stage, or of one copy of the batch.
        work: pairs, or copies.
        is_beside: it ran beside the other for at least half of the shorter one; False if never,
            None for what lies between.
    """

    time_us: float
    work: int
    is_beside: bool | None


class Interference(NamedTuple):
    """Times beside the other kind of work, against the same work in the tier without overlap.

    Attributes:
        num_beside: samples beside the other kind; without any, their medians are None.
        beside_us, reference_us: medians in us of these, and of the same work in the other tier.
        ratio: median of the paired ratios.
        num_alone: samples without the other kind beside them in either tier.
        alone_ratio: median of theirs: what the tiers differ by anyway.
    """

    num_beside: int
    beside_us: float | None
    reference_us: float | None
    ratio: float | None
    num_alone: int
    alone_ratio: float | None


def target_copies(events: Iterable[Event]) -> list[TargetCopies]:
    """Return a row per target whose copies have been used, in order."""
    events = list(events)
    waits = _by_key(events, Stage.COPY_WAIT)
    workers: dict[int, list[tuple[Event, Event]]] = {}
    for key, copy in _by_key(events, Stage.COPY).items():
        if key in waits:
            workers.setdefault(copy.sequence, []).append((copy, waits[key]))
    return [
        TargetCopies(
            sequence,
            raw_copy_us=max(_duration_us(copy) for copy, _ in pairs),
            lookahead_us=min((wait.start_ns - copy.start_ns) / 1e3 for copy, wait in pairs),
            remaining_us=min((wait.start_ns - copy.end_ns) / 1e3 for copy, wait in pairs),
            exposed_us=max(_duration_us(wait) for _, wait in pairs),
        )
        for sequence, pairs in sorted(workers.items())
    ]


def exposed_when_fitting(rows: Sequence[TargetCopies]) -> FittingWaits:
    """Count the targets whose copies fit, and how long these waited all the same.

    That is to be compared with `idle_waits_us`: it is the call itself, not zero.
    """
    exposed_us = [row.exposed_us for row in rows if row.fits]
    return FittingWaits(
        len(rows), len(exposed_us), _median(exposed_us), max(exposed_us, default=None)
    )


def idle_waits_us(events: Iterable[Event]) -> list[float]:
    """Return the length of every COPY_WAIT that began with no copy in flight on its worker."""
    events = list(events)
    in_flight = _by_worker(_busy_copies(events))
    return [
        _duration_us(wait)
        for (worker, _), wait in _by_key(events, Stage.COPY_WAIT).items()
        if not wait.value
        and not any(_overlapping(wait._replace(end_ns=wait.start_ns + 1), in_flight[worker]))
    ]


def overlap_by_stage(events: Iterable[Event]) -> dict[Stage, float]:
    """Return the share of the copy time that lay in each stage of earlier targets of the worker.

    The stages of a worker's targets follow each other, so shares add up, to at most 1.
    """
    events = list(events)
    stages = _by_worker(event for event in events if event.stage in TARGET_STAGES)
    copies = _by_key(events, Stage.COPY)
    overlap_ns = dict.fromkeys(TARGET_STAGES, 0)
    for (worker, sequence), copy in copies.items():
        for event, shared_ns in _overlapping(copy, stages[worker]):
            if event.sequence < sequence:
                overlap_ns[event.stage] += shared_ns
    copy_ns = sum(copy.end_ns - copy.start_ns for copy in copies.values())
    return {stage: ns / copy_ns if copy_ns else 0.0 for stage, ns in overlap_ns.items()}


def overlap_share(events: Iterable[Event]) -> float:
    """Return the share of the copy time that lay in `COMPUTE_STAGES` of earlier targets."""
    shares = overlap_by_stage(events)
    return sum(shares[stage] for stage in COMPUTE_STAGES)


def gemm_samples(events: Iterable[Event]) -> dict[Key, Sample]:
    """Return every GEMM stage, and whether a copy of the same worker was in flight beside it."""
    return _samples(list(events), Stage.GEMM, Stage.COPY)


def copy_samples(events: Iterable[Event]) -> dict[Key, Sample]:
    """Return every batch of copies, and whether the same worker ran a GEMM stage beside it."""
    return _samples(list(events), Stage.COPY, Stage.GEMM)


def compare(measured: dict[Key, Sample], reference: dict[Key, Sample]) -> Interference:
    """Pair the samples of two tiers that ran the same plans.

    Args:
        measured: of the tier in which copies and GEMMs overlap.
        reference: of the tier in which they do not.

    Raises:
        RuntimeError: if the tiers did not do the same work.
    """
    beside, alone = [], []
    for key in measured.keys() & reference.keys():
        sample, paired = measured[key], reference[key]
        if sample.work != paired.work:
            raise RuntimeError(f"the tiers ran different plans: {key}, {sample.work, paired.work}")
        if sample.is_beside is not None and paired.is_beside is False:
            (beside if sample.is_beside else alone).append((sample.time_us, paired.time_us))
    return Interference(
        len(beside),
        _median([time_us for time_us, _ in beside]),
        _median([reference_us for _, reference_us in beside]),
        _median([time_us / reference_us for time_us, reference_us in beside]),
        len(alone),
        _median([time_us / reference_us for time_us, reference_us in alone]),
    )


def _samples(events: list[Event], stage: Stage, other: Stage) -> dict[Key, Sample]:
    busy = {
        Stage.COPY: _busy_copies(events),
        Stage.GEMM: list(_by_key(events, Stage.GEMM).values()),
    }
    others = _by_worker(busy[other])
    samples = {}
    for event in busy[stage]:
        if not event.value:
            continue
        length_ns = event.end_ns - event.start_ns
        beside = list(_overlapping(event, others[_worker(event)]))
        shared_ns = sum(ns for _, ns in beside)
        shorter_ns = min(length_ns, sum(o.end_ns - o.start_ns for o, _ in beside))
        is_beside = None if 0 < 2 * shared_ns < shorter_ns else shared_ns > 0
        num_timed = event.value if stage is Stage.COPY else 1
        sample = Sample(length_ns / 1e3 / num_timed, event.value, is_beside)
        samples[_worker(event), event.sequence] = sample
    return samples


def _busy_copies(events: Iterable[Event]) -> list[Event]:
    """Return the copies without the time in which the stream was still at the batch before."""
    free_ns: dict[str, int] = defaultdict(int)
    busy = []
    for (worker, _), copy in sorted(_by_key(events, Stage.COPY).items(), key=lambda c: c[0][1]):
        busy.append(copy._replace(start_ns=max(copy.start_ns, free_ns[worker])))
        free_ns[worker] = copy.end_ns
    return busy


def _by_key(events: Iterable[Event], stage: Stage) -> dict[Key, Event]:
    return {(_worker(event), event.sequence): event for event in events if event.stage is stage}


def _by_worker(events: Iterable[Event]) -> dict[str, list[Event]]:
    by_worker: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_ns):
        by_worker[_worker(event)].append(event)
    return by_worker


def _overlapping(event: Event, others: Sequence[Event]) -> Iterator[tuple[Event, int]]:
    """Yield those of `others`, which follow each other, that share time with `event`, and ns."""
    first = bisect.bisect_right(others, event.start_ns, key=lambda other: other.end_ns)
    for index in range(first, len(others)):
        other = others[index]
        if other.start_ns >= event.end_ns:
            return
        yield other, min(event.end_ns, other.end_ns) - max(event.start_ns, other.start_ns)


def _worker(event: Event) -> str:
    """Return the worker of one of its two tracks, as `worker 0`."""
    return event.track.rsplit(" ", 1)[0]


def _duration_us(event: Event) -> float:
    return (event.end_ns - event.start_ns) / 1e3


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
