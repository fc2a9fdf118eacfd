"""CUDA streams and events, device memory that other processes can open, and copies between peers.

The host only queues: a stream calls `work` at once with itself as the current stream, where the
work launches kernels and copies. Streams are ordered among themselves by events, on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from afore_kernels.errors import ConfigError, PeerLost, ShapeError
from afore_kernels.runtime.devices import Buffer, Event, Stream, TensorCopy
from afore_kernels.runtime.devices.cpu import ThreadStream
from afore_kernels.runtime.devices.cudart import CudaError, CudaRuntime

MODEL_PRIORITY = -1
"""The model stream's: its kernels' blocks are placed before those of copy kernels."""
MIGRATION_PRIORITY = 0
"""The migration stream's, the lowest: a copy has a whole microbatch to hide under, so its kernels
take what the model leaves. Copy engines know no priorities."""

CopyPath = Literal["copy_engine", "sm"]

_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3
_BLOCK_BYTES = 2 << 20


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

    def touch(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """Nothing to note."""

    def enable_peers(self, peers: Sequence[int]) -> PeerAccess:
        """Let this device access the memory of every peer that it can reach.

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

    def wait_event(self, event: Event) -> None:
        """Hold later work until `event`: on the device if it is a CUDA event, else on the host.

        Raises:
            PeerLost: if another device's event does not come within the timeout.
        """
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)
        elif not event.wait(self._timeout_s):
            raise PeerLost(f"an event did not come within {self._timeout_s} s")

    def close(self) -> None:
        """Wait for the submitted work; torch keeps the stream itself for its next user.

        Raises:
            PeerLost: if the work is not done within the timeout.
        """
        if not self.record_event().wait(self._timeout_s):
            raise PeerLost(f"a stream's work was not done within {self._timeout_s} s")


class DeviceMemory:
    """Memory of a device, allocated by this process or opened from the one that did.

    A context manager; or call `close`. Close the streams that use it first, and every opener before
    the process that allocated it.

    Attributes:
        num_bytes: its size.
    """

    def __init__(
        self, address: int, num_bytes: int, device: CudaDevice, release: Callable[[int], None]
    ) -> None:
        self.num_bytes = num_bytes
        self._address: int | None = address
        self._device = device
        self._release = release

    @classmethod
    def allocate(cls, num_bytes: int, device: CudaDevice) -> DeviceMemory:
        """Allocate uninitialised memory that other processes can open."""
        # A handle shares whole blocks of 2 MiB, into which cudaMalloc packs small allocations.
        num_blocks = -(-num_bytes // _BLOCK_BYTES)
        with device.cuda.device(device.torch_device):
            address = device.runtime.malloc(num_blocks * _BLOCK_BYTES)
        return cls(address, num_bytes, device, device.runtime.free)

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, device: CudaDevice) -> DeviceMemory:
        """Map memory of another process into `device`, which has it or is a peer of its device.

        Args:
            handle: what `share` returned there.
            num_bytes: the size there.
            device: the device whose work here uses the memory.

        Raises:
            CudaError: if the handle is not valid here, or its device is no peer.
        """
        with device.cuda.device(device.torch_device):
            address = device.runtime.mem_open_handle(handle)
        return cls(address, num_bytes, device, device.runtime.mem_close_handle)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as uint8 [num_bytes] on the device it was opened for; ends with the memory."""
        # Not by __cuda_array_interface__: it names no device, torch takes the one where the memory
        # resides, and `as_tensor` for another device returns a copy.
        device = self._device.torch_device
        storage = torch._C._construct_storage_from_data_pointer(
            self._open_address(), device, self.num_bytes
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def share(self) -> bytes:
        """The handle, 64 bytes, by which other processes open the memory."""
        with self._device.cuda.device(self._device.torch_device):
            return self._device.runtime.mem_get_handle(self._open_address())

    def close(self) -> None:
        """Free or unmap the memory, once."""
        if self._address is None:
            return
        address, self._address = self._address, None
        with self._device.cuda.device(self._device.torch_device):
            self._release(address)

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_address(self) -> int:
        if self._address is None:
            raise CudaError("the device memory is closed")
        return self._address


def copy_batch(
    device: CudaDevice, copies: Sequence[TensorCopy], path: CopyPath = "copy_engine"
) -> None:
    """Queue copies on the device's current stream, in no order among themselves.

    Args:
        device: the destinations'; it pulls from its peers.
        copies: pairs of contiguous tensors.
        path: `copy_engine` leaves the SMs to the model wherever the driver can; `sm` copies by a
            kernel, and needs the sources opened for this device.

    Raises:
        ShapeError: if two tensors differ in shape or dtype (`sm`: or device), or one is not
            contiguous; then nothing is queued.
    """
    for destination, source in copies:
        _check_copy(destination, source, path)
    # The driver refuses a batch with an empty copy.
    copies = [copy for copy in copies if copy[0].numel()]
    if not copies:
        return
    destinations, sources = zip(*copies)
    if path == "sm":
        # Not `Tensor.copy_`, which is a cudaMemcpyAsync where both are contiguous. This is one
        # kernel for all the copies, as long as all have one dtype: bytes.
        torch._foreach_copy_(_bytes(destinations), _bytes(sources))
        return
    device.runtime.memcpy_batch_async(
        [destination.data_ptr() for destination in destinations],
        [source.data_ptr() for source in sources],
        [destination.nbytes for destination in destinations],
        device.cuda.current_stream(device.torch_device).cuda_stream,
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]


def _check_copy(destination: torch.Tensor, source: torch.Tensor, path: CopyPath) -> None:
    if (destination.shape, destination.dtype) != (source.shape, source.dtype):
        raise ShapeError(
            f"copy of {source.dtype} {tuple(source.shape)} "
            f"into {destination.dtype} {tuple(destination.shape)}"
        )
    if not (destination.is_contiguous() and source.is_contiguous()):
        raise ShapeError(f"copy of {tuple(source.shape)} between tensors not both contiguous")
    if path == "sm" and destination.device != source.device:
        raise ShapeError(f"copy by a kernel from {source.device} to {destination.device}")
