"""The CUDA device of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from afore_kernels.config import CopyPath
from afore_kernels.errors import ConfigError
from afore_kernels.runtime.devices import Buffer, Stamp, Stream, TensorCopy
from afore_kernels.runtime.devices.cpu import ThreadStream
from afore_kernels.runtime.devices.cuda_memory import copy_batch
from afore_kernels.runtime.devices.cuda_streams import (
    MIGRATION_PRIORITY,
    MODEL_PRIORITY,
    CudaClock,
    CudaStream,
)
from afore_kernels.runtime.devices.cudart import CudaRuntime


class CudaDevice:
    """A CUDA device of one worker.

    Args:
        torch_device: the device, with its index.
        timeout_s: longest wait of the host for an event.
        copy_path: of `copy`, see `copy_batch`.
        runtime: the CUDA runtime, by default torch's.
        cuda: `torch.cuda`.

    Raises:
        ConfigError: if the copy path is unknown, or the machine has no CUDA.
    """

    def __init__(
        self,
        torch_device: torch.device,
        timeout_s: float,
        *,
        copy_path: CopyPath = "copy_engine",
        runtime: CudaRuntime | None = None,
        cuda: Any = torch.cuda,
    ) -> None:
        if copy_path not in get_args(CopyPath):
            raise ConfigError(f"copy path {copy_path!r} is none of {get_args(CopyPath)}")
        self.torch_device = torch_device
        self.timeout_s = timeout_s
        self.runtime = runtime or CudaRuntime()
        self.cuda = cuda
        self._copy_path = copy_path
        self._clocks: dict[CudaStream, CudaClock] = {}

    def model_stream(self) -> CudaStream:
        """A stream of high priority."""
        return CudaStream(self, priority=MODEL_PRIORITY)

    def migration_stream(self) -> CudaStream:
        """A stream of the lowest priority."""
        return CudaStream(self, priority=MIGRATION_PRIORITY)

    def completions(self, stream: Stream) -> ThreadStream:
        """A thread, which can wait for events while the host runs ahead."""
        return ThreadStream("cuda-completions", self.timeout_s)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-locked host memory, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, copies: Sequence[TensorCopy]) -> None:
        """Queue copies on the current stream by this device's path, see `copy_batch`."""
        copy_batch(self, copies, self._copy_path)

    def stamp(self, stream: Stream) -> Stamp:
        """Take the device's time at the end of the work submitted so far; to be read in order.

        The first call for a stream waits for its work.
        """
        assert isinstance(stream, CudaStream)
        if stream not in self._clocks:
            self._clocks[stream] = CudaClock(stream)
        return self._clocks[stream].stamp()

    def touch(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """Nothing to note."""

    def enable_peers(self, peers: Sequence[int]) -> PeerAccess:
        """Let this device access this process's memory on every peer that it can reach.

        It starts CUDA on each of them here; `DeviceMemory.open` does without.

        Args:
            peers: device indices; this device's own, of another worker on it, is direct.
        """
        index = self.torch_device.index
        direct = [
            peer
            for peer in peers
            if peer == index or self.runtime.device_can_access_peer(index, peer)
        ]
        with self.cuda.device(self.torch_device):
            for peer in direct:
                if peer != index:
                    self.runtime.enable_peer_access(peer)
        return PeerAccess(tuple(direct), tuple(peer for peer in peers if peer not in direct))


class PeerAccess(NamedTuple):
    """How a device reaches its peers, as device indices.

    Attributes:
        direct: it accesses their memory itself.
        staged: their memory has to pass through the host.
    """

    direct: tuple[int, ...]
    staged: tuple[int, ...]
