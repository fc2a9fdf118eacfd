"""A device without hardware that proves that conflicting accesses are ordered.

The same workers and migrators run on it as on a GPU. Work of streams, and the hosts that submit it,
run in a random one of the orders that streams, events and flags allow; whatever order it was, every
pair of accesses to one buffer, at least one a write, that nothing orders is reported as a race.

    device = CheckingDevice(seed)
    model, migration = device.stream("model"), device.stream("migration")
    device.run({"worker 0": run_worker, "attention": send_inputs})
    device.assert_no_races()
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from afore_kernels.runtime.devices import Buffer, Event
from afore_kernels.runtime.devices.clocks import AccessLog, CallSite, Race, Snapshot
from afore_kernels.runtime.devices.schedule import Deadlock, Schedule, StreamActor


class CheckingDevice:
    """Streams, events and hosts whose order a seed decides.

    Outside of `run` the calling thread is the host "main": it submits work, which runs only while
    it waits.

    Args:
        seed: of the schedule; equal seeds repeat it.
    """

    def __init__(self, seed: int) -> None:
        self._schedule = Schedule(seed)
        self._log = AccessLog()
        self._releases: defaultdict[Hashable, dict[str, Snapshot]] = defaultdict(dict)
        self._unraised: list[BaseException] = []

    @property
    def races(self) -> list[Race]:
        """The races so far, one per buffer and pair of call sites."""
        return self._log.races

    def assert_no_races(self) -> None:
        """Check that everything so far was ordered.

        Raises:
            AssertionError: naming every race.
        """
        if self.races:
            raise AssertionError("\n  ".join([f"{len(self.races)} races", *map(str, self.races)]))

    def stream(self, name: str) -> CheckingStream:
        """A stream; its name must not be in use.

        Raises:
            ValueError: if it is.
        """
        stream = CheckingStream(self, name)
        self._schedule.add_stream(stream)
        return stream

    def event(self) -> CheckingEvent:
        """An event to be recorded later, which hosts and streams may wait for at once."""
        return CheckingEvent(self)

    def touch(self, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> None:
        """Note that the host accesses buffers right after this call."""
        actor = self._schedule.point()
        self._log.record(actor.clock, self._log.call_site(), reads, writes)

    def release(self, key: Hashable) -> None:
        """Note that the host sets a flag right after this call: who sees it sees all before."""
        actor = self._schedule.point()
        self._releases[key][actor.name] = actor.clock.snapshot()

    def acquire(self, key: Hashable) -> None:
        """Note that the host saw a flag right before this call: it goes on after every release.

        Raises:
            AssertionError: if nobody has released `key`.
        """
        releases = self._releases.get(key)
        if releases is None:
            raise AssertionError(f"{key!r} was acquired before it was released")
        clock = self._schedule.current().clock
        for snapshot in releases.values():
            clock.join(snapshot)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let others go on until `condition` holds, which must not use the device.

        It orders nothing: what the condition reads needs `acquire`, without a call in between.

        Args:
            condition: without side effects, as any thread may ask, any number of times.
            what: the condition in words, for a deadlock's report.

        Raises:
            Deadlock: if it never will.
        """
        self._schedule.wait_until(condition, what, self._log.call_site())

    def run(self, hosts: Mapping[str, Callable[[], None]]) -> None:
        """Run hosts, by name, and streams until all hosts have returned and all work has run.

        The caller goes on after all that ran, and hosts begin after what it did before.

        Raises:
            Deadlock: if that never happens.
            ValueError: if a host has the name of a stream, or "main".
            BaseException: what a host raised, or work that no event has raised.
        """
        try:
            self._schedule.run(hosts)
        except Deadlock:
            self._raise_error()  # work that failed is its likely cause
            raise
        self._raise_error()

    def _raise_error(self) -> None:
        if self._unraised:
            raise self._unraised.pop(0)


class CheckingEvent:
    """A point in a stream's work.

    Attributes:
        recorded: on which stream, and where, once it has been submitted.
        past: what happens before it, once its stream has passed it.
        error: the failure of the stream's work before it, if any.
    """

    def __init__(self, device: CheckingDevice) -> None:
        self._device = device
        self.recorded: tuple[str, CallSite] | None = None
        self.past: Snapshot | None = None
        self.error: BaseException | None = None

    def __str__(self) -> str:
        if self.recorded is None:
            return "an event that nobody has recorded"
        stream, site = self.recorded
        return f"the event of {stream} (recorded at {site})"

    def is_done(self) -> bool:
        """Whether the stream has passed the point; if so, the host goes on after it."""
        actor = self._device._schedule.point()
        if self.past is None:
            return False
        actor.clock.join(self.past)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Let others go on until the stream has passed the point, however long; returns True.

        Raises:
            Deadlock: if it never will.
            BaseException: what the stream's work raised.
        """
        self._wait_passed()
        if self.error is not None:
            unraised = self._device._unraised
            unraised[:] = [error for error in unraised if error is not self.error]
            raise self.error
        return True

    def _wait_passed(self) -> None:
        device = self._device
        host = device._schedule.wait_until(self._has_passed, self, device._log.call_site())
        assert self.past is not None
        host.clock.join(self.past)

    def _has_passed(self) -> bool:
        return self.past is not None


class _Operation(NamedTuple):
    """An entry of a stream's queue.

    Attributes:
        submitted: what happens before its submission.
        call_site: of its submission.
        event: which it waits for, if any.
        run: what it does.
    """

    submitted: Snapshot
    call_site: CallSite
    event: CheckingEvent | None
    run: Callable[[], None]


class CheckingStream(StreamActor):
    """A queue whose head runs when the schedule says so; after a failure, work is skipped."""

    def __init__(self, device: CheckingDevice, name: str) -> None:
        super().__init__(name)
        self._device = device
        self._queue: deque[_Operation] = deque()
        self._error: BaseException | None = None

    def submit(
        self,
        work: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Queue `work`, which accesses the named buffers when it runs."""
        site = self._device._log.call_site()
        self._append(site, partial(self._work, work, site, tuple(reads), tuple(writes)))

    def record_event(self, event: CheckingEvent | None = None) -> CheckingEvent:
        """Queue `event`, or a new one, behind everything submitted before.

        Raises:
            ValueError: if the event has been recorded before.
        """
        site = self._device._log.call_site()
        event = event or CheckingEvent(self._device)
        if event.recorded is not None:
            raise ValueError(f"{event} is recorded again")
        event.recorded = (self.name, site)
        self._append(site, partial(self._pass, event))
        return event

    def wait_event(self, event: Event) -> None:
        """Let later work start only after `event`, which need not be recorded yet.

        Raises:
            TypeError: if it is not a checking device's.
        """
        if not isinstance(event, CheckingEvent):
            raise TypeError(f"a checking stream cannot wait for {event!r}")
        self._append(self._device._log.call_site(), partial(self._follow, event), event)

    def close(self) -> None:
        """Let others go on until everything submitted before has run."""
        self.record_event()._wait_passed()

    def is_ready(self) -> bool:
        """Whether the head of the queue may run."""
        if not self._queue:
            return False
        event = self._queue[0].event
        return event is None or event.past is not None or self._error is not None

    def is_empty(self) -> bool:
        """Whether everything submitted has run."""
        return not self._queue

    def awaited(self) -> str:
        """The event that the head of the queue waits for."""
        if not self._queue:
            return ""
        head = self._queue[0]
        return f"{head.event}, at {head.call_site}"

    def step(self) -> None:
        """Run the head of the queue."""
        operation = self._queue.popleft()
        self.clock.join(operation.submitted)
        operation.run()

    def _append(
        self, site: CallSite, run: Callable[[], None], event: CheckingEvent | None = None
    ) -> None:
        submitted = self._device._schedule.point().clock.snapshot()
        self._queue.append(_Operation(submitted, site, event, run))

    def _work(
        self,
        work: Callable[[], None],
        site: CallSite,
        reads: tuple[Buffer, ...],
        writes: tuple[Buffer, ...],
    ) -> None:
        if self._error is not None:
            return
        self._device._log.record(self.clock, site, reads, writes)
        try:
            work()
        except BaseException as error:  # raised by every later event
            self._error = error
            self._device._unraised.append(error)

    def _pass(self, event: CheckingEvent) -> None:
        event.error = self._error
        event.past = self.clock.snapshot()

    def _follow(self, event: CheckingEvent) -> None:
        if self._error is None:
            assert event.past is not None
            self.clock.join(event.past)
            self._error = event.error
