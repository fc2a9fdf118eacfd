"""Devices: where a worker's weights live and its work runs.

A device gives a worker two streams. Work submitted to one stream runs in order; work of different
streams is ordered by events alone. The model stream runs partition, GEMMs and combine; the
migration stream runs expert copies.
"""

from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether the stream has passed the point."""

    def wait(self, timeout_s: float) -> bool:
        """Block the host until the stream has passed the point; False on timeout."""


class Stream(Protocol):
    """An ordered queue of work."""

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work` behind everything submitted before."""

    def record_event(self) -> Event:
        """An event at the end of the work submitted so far."""

    def wait_event(self, event: Event) -> None:
        """Let work submitted from now on start only after `event`."""

    def close(self) -> None:
        """Finish the submitted work and release the stream."""
