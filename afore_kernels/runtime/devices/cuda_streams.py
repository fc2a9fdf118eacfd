"""CUDA streams and events.

The host only queues: a stream calls `work` at once with itself as the current stream, where the
work launches kernels and copies. Streams are ordered among themselves by events, on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from afore_kernels.errors import PeerLost
from afore_kernels.runtime.devices import Buffer, Event, Stamp
from afore_kernels.runtime.devices.cpu import await_event

if TYPE_CHECKING:
    from afore_kernels.runtime.devices.cuda import CudaDevice

MODEL_PRIORITY = -1
"""The model stream's: its kernels' blocks are placed before those of copy kernels."""
MIGRATION_PRIORITY = 0
"""The migration stream's, the lowest: a copy has a whole microbatch to hide under, so its kernels
take what the model leaves. Copy engines know no priorities."""

_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3


class CudaEvent:
    """A point in a CUDA stream's work.

    Attributes:
        event: the recorded `torch.cuda.Event`.
    """

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_done(self) -> bool:
        """Whether the stream has passed the point; raises what failed on the device."""
        return bool(self.event.query())

    def wait(self, timeout_s: float) -> bool:
        """Block the host until the stream has passed the point; False on timeout.

        It polls between growing sleeps, as CUDA's own wait has no timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while not self.is_done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True


class CudaStream:
    """A CUDA stream, which the host runs ahead of; not ordered against torch's default stream.

    Args:
        device: where its work runs.
        priority: `MODEL_PRIORITY` or `MIGRATION_PRIORITY`.
    """

    def __init__(self, device: CudaDevice, *, priority: int) -> None:
        self._cuda = device.cuda
        self._timeout_s = device.timeout_s
        self._stream = device.cuda.Stream(device.torch_device, priority=priority)

    def submit(
        self,
        work: Callable[[], None],
        *,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Call `work`, which queues kernels and copies on the current stream, here this one."""
        with self._cuda.stream(self._stream):
            work()

    def record_event(self) -> CudaEvent:
        """An event behind all submitted work."""
        event = self._cuda.Event()
        event.record(self._stream)
        return CudaEvent(event)

    def record_timed(self) -> Any:
        """A `torch.cuda.Event` there that has a time."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def wait_event(self, event: Event) -> None:
        """Hold later work until `event`: on the device if it is a CUDA event, else on the host.

        Raises:
            PeerLost: if another device's event does not come within the timeout.
        """
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)
        else:
            await_event(event, self._timeout_s)

    def close(self) -> None:
        """Wait for the submitted work; torch keeps the stream itself for its next user.

        Raises:
            PeerLost: if the work is not done within the timeout.
        """
        if not self.record_event().wait(self._timeout_s):
            raise PeerLost(f"a stream's work was not done within {self._timeout_s} s")


class CudaClock:
    """Times of points in a stream, in ns of the host's monotonic clock.

    The device measures the time from one point to the next; the first is tied to the host's clock
    by waiting for it. The drift between the two clocks adds up.

    Args:
        stream: whose points.
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        self._last = stream.record_timed()
        self._last.synchronize()
        self._last_ns = time.monotonic_ns()

    def stamp(self) -> Stamp:
        """Take the time behind all submitted work; stamps are to be read in order."""
        event = self._stream.record_timed()
        return lambda: self._read(event)

    def _read(self, event: Any) -> int:
        self._last_ns += round(self._last.elapsed_time(event) * 1e6)  # from ms
        self._last = event
        return self._last_ns
