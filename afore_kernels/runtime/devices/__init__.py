"""Devices: where a worker's weights live and its work runs.

A device gives a worker streams. Work submitted to one stream runs in order; work of different
streams is ordered by events alone, and the host runs ahead of all of them. The model stream runs
partition, GEMMs and combine; the migration stream runs expert copies.

Whoever submits work names the buffers that it reads and writes. `cpu` and `cuda` ignore the names;
`checking` proves from them that every two conflicting accesses are ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch


class Buffer(NamedTuple):
    """The name of a piece of memory; equal names are the same memory, others never overlap.

    Attributes:
        kind: what it is, as `"slot"`.
        key: which one of its kind, as `(worker, layer, slot)`.
    """

    kind: str
    key: tuple[int, ...]


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether the stream has passed the point."""

    def wait(self, timeout_s: float) -> bool:
        """Block the host until the stream has passed the point; False on timeout."""


class Stream(Protocol):
    """An ordered queue of work."""

    def submit(
        self,
        work: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Queue `work`, which accesses the named buffers, behind everything submitted before."""

    def record_event(self) -> Event:
        """An event at the end of the work submitted so far."""

    def wait_event(self, event: Event) -> None:
        """Let work submitted from now on start only after `event`."""

    def close(self) -> None:
        """Finish the submitted work and release the stream."""


Stamp = Callable[[], int]
"""The time of a point in a stream, in ns of the monotonic clock; once the stream has passed it."""

TensorCopy = tuple[torch.Tensor, torch.Tensor]
"""(destination, source), of one shape and dtype."""


class Device(Protocol):
    """What one worker needs of its device.

    Attributes:
        torch_device: where its tensors live.
    """

    torch_device: torch.device

    def model_stream(self) -> Stream:
        """Create the stream of partition, GEMMs and combine."""

    def migration_stream(self) -> Stream:
        """Create the stream of expert copies."""

    def completions(self, stream: Stream) -> Stream:
        """A stream of host work that may wait for events of `stream`; perhaps `stream` itself."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory that the device's copies can reach, uint8 [num_bytes]."""

    def copy(self, copies: Sequence[TensorCopy]) -> None:
        """Copy, as part of the work that calls it."""

    def stamp(self, stream: Stream) -> Stamp:
        """Take the time at the end of the work submitted to `stream` so far."""

    def touch(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """Note that the host itself accesses the named buffers now."""
