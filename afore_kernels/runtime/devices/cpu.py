"""CPU streams: the model stream is the calling thread, the migration stream a copy thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from afore_kernels.errors import PeerLost
from afore_kernels.runtime.devices import Buffer, Event, Stamp, Stream, TensorCopy


class CpuEvent:
    """An event of a CPU stream; it carries the failure of the work before it, if any."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """Mark the point as passed."""
        self._error = error
        self._passed.set()

    def is_done(self) -> bool:
        """Whether the stream has passed the point."""
        return self._passed.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until the stream has passed the point; raises what the stream's work raised."""
        passed = self._passed.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return passed


def await_event(event: Event, timeout_s: float) -> None:
    """Block the host until `event`.

    Raises:
        PeerLost: if it does not come within the timeout.
    """
    if not event.wait(timeout_s):
        raise PeerLost(f"an event did not come within {timeout_s} s")


class InlineStream:
    """Runs work at once in the calling thread, so every event it records has already passed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def submit(
        self,
        work: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Run `work`."""
        work()

    def record_event(self) -> CpuEvent:
        """A passed event."""
        event = CpuEvent()
        event.set()
        return event

    def wait_event(self, event: Event) -> None:
        """Block until `event`.

        Raises:
            PeerLost: if it does not come within the timeout.
        """
        await_event(event, self._timeout_s)

    def close(self) -> None:
        """Nothing is pending."""


class ThreadStream:
    """Runs work in order on its own thread; a failure is raised by every later event."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Queue `work`; it is skipped once earlier work has failed."""
        self._work.put(lambda: None if self._error else work())

    def record_event(self) -> CpuEvent:
        """An event behind all submitted work."""
        event = CpuEvent()
        self._work.put(lambda: event.set(self._error))
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work until `event`."""
        self.submit(partial(await_event, event, self._timeout_s))

    def close(self) -> None:
        """Finish the submitted work and end the thread."""
        self._work.put(None)
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:  # reported by every later event
                self._error = error


class HostMemoryDevice:
    """What devices share whose tensors are in host memory, whatever their streams are."""

    torch_device = torch.device("cpu")

    def copy(self, copies: Sequence[TensorCopy]) -> None:
        """Copy one after another."""
        for destination, source in copies:
            destination.copy_(source)

    def stamp(self, stream: Stream) -> Stamp:
        """Take the time now: what is submitted inline has run by then."""
        now_ns = time.monotonic_ns()
        return lambda: now_ns


class CpuDevice(HostMemoryDevice):
    """A worker's share of the CPU; its work is host work, so streams are their own completions.

    Args:
        timeout_s: longest wait for an event.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def model_stream(self) -> InlineStream:
        """The calling thread."""
        return InlineStream(self._timeout_s)

    def migration_stream(self) -> ThreadStream:
        """A thread of its own."""
        return ThreadStream("migration-stream", self._timeout_s)

    def completions(self, stream: Stream) -> Stream:
        """The stream itself."""
        return stream

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def touch(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """Nothing to note."""
