"""One worker's part of a checking device: streams of its own, and memory that starts poisoned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from afore_kernels.runtime.devices import Buffer, Stream
from afore_kernels.runtime.devices.checking import CheckingDevice, CheckingStream
from afore_kernels.runtime.devices.cpu import HostMemoryDevice

_POISON = 0x7F  # no expert id, and a NaN or a huge number as a weight


class CheckingWorker(HostMemoryDevice):
    """The device of one of several workers on a checking device.

    Like a GPU's, its streams are behind the host, and replies have a stream of their own.

    Args:
        device: that all workers share.
        worker: this worker.
    """

    def __init__(self, device: CheckingDevice, worker: int) -> None:
        self._device = device
        self._worker = worker

    def model_stream(self) -> CheckingStream:
        """The worker's model stream."""
        return self._device.stream(f"model stream {self._worker}")

    def migration_stream(self) -> CheckingStream:
        """The worker's migration stream."""
        return self._device.stream(f"migration stream {self._worker}")

    def completions(self, stream: Stream) -> CheckingStream:
        """A stream of its own."""
        assert isinstance(stream, CheckingStream)
        return self._device.stream(f"completions of {stream.name}")

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate uint8 [num_bytes]."""
        return torch.full((num_bytes,), _POISON, dtype=torch.uint8)

    def touch(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """Note the accesses."""
        self._device.touch(reads=reads, writes=writes)
