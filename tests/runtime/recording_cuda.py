"""A CUDA device that is only recorded: stand-ins for `torch.cuda` and for the runtime library.

Both write what is called into one log. Work waits in its stream's queue until `run`, which takes
the streams in the order given, so that a test decides how far each gets; only events hold them.
Memory is the host's.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_void_p
from functools import partial
from typing import Any

INVALID_VALUE = 1
PEER_ACCESS_ALREADY_ENABLED = 704


class RecordingEvent:
    """Passed unless it was recorded behind work that has not run."""

    def __init__(self, cuda: RecordingCuda, enable_timing: bool) -> None:
        self._cuda = cuda
        self._stream: RecordingStream | None = None
        self._has_timing = enable_timing
        self._time_ms = 0.0
        self.is_passed = True

    def record(self, stream: RecordingStream) -> None:
        self._cuda.log.append(("record", stream.cuda_stream))
        self._stream = stream
        self.is_passed = False
        stream.queue(self._pass)

    def synchronize(self) -> None:
        assert self._stream is not None
        self._cuda.run(self._stream.cuda_stream)
        assert self.is_passed

    def elapsed_time(self, end: RecordingEvent) -> float:
        if not (self._has_timing and end._has_timing):
            raise ValueError("an event without timing")
        assert self.is_passed
        assert end.is_passed
        return end._time_ms - self._time_ms

    def query(self) -> bool:
        return self.is_passed

    def _pass(self) -> bool:
        self._time_ms = self._cuda.now_ms
        self.is_passed = True
        return True


class RecordingStream:
    def __init__(self, cuda: RecordingCuda, device: Any, priority: int) -> None:
        self._cuda = cuda
        self._steps: deque[Callable[[], bool]] = deque()
        self.device = device
        self.priority = priority
        self.cuda_stream = len(cuda.streams)

    def queue(self, step: Callable[[], bool]) -> None:
        """Append a step, which returns whether it could run."""
        self._steps.append(step)

    def wait_event(self, event: RecordingEvent) -> None:
        self._cuda.log.append(("wait", self.cuda_stream))
        self.queue(lambda: event.is_passed)

    def step(self) -> bool:
        """Run the next step; False if there is none or it has to wait."""
        can_run = bool(self._steps) and self._steps[0]()
        if can_run:
            self._steps.popleft()
        return can_run


class RecordingCuda:
    """`torch.cuda`, as far as the cuda device uses it; `streams[0]` is the default stream."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.streams: list[RecordingStream] = []
        self.current_device: Any = None
        self.now_ms = 0.0
        self._current_stream = self.Stream(None)

    def Stream(self, device: Any, priority: int = 0) -> RecordingStream:
        self.streams.append(RecordingStream(self, device, priority))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> RecordingEvent:
        return RecordingEvent(self, enable_timing)

    def current_stream(self, device: Any = None) -> RecordingStream:
        return self._current_stream

    @contextmanager
    def stream(self, stream: RecordingStream) -> Iterator[None]:
        before, self._current_stream = self._current_stream, stream
        try:
            yield
        finally:
            self._current_stream = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current_device = self.current_device, device
        try:
            yield
        finally:
            self.current_device = before

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel on the current stream."""
        self._current_stream.queue(lambda: kernel() is None)

    def run(self, *order: int) -> None:
        """Run the streams with these handles, always the next step of the first that can."""
        while any(self.streams[handle].step() for handle in order):
            pass


class HandleStruct(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class FakeCudart:
    """A runtime library: C functions, with the prototypes of the CUDA headers.

    Args:
        cuda: whose log and streams it uses.
        runtime_version, driver_version: what it says it is.
        missing: functions that it lacks.

    Attributes:
        failing: statuses of functions that fail; may be changed at any time.
        last_error: what `cudaGetLastError` would return.
        peers: the pairs of devices (device, peer) with access.
        memory: address -> buffer of the allocations that live.
        opened: addresses that are open.
    """

    def __init__(
        self,
        cuda: RecordingCuda,
        *,
        runtime_version: int = 13000,
        driver_version: int = 13000,
        missing: tuple[str, ...] = (),
    ) -> None:
        self._cuda = cuda
        self._versions = {"Runtime": runtime_version, "Driver": driver_version}
        self.failing: dict[str, int] = {}
        self.last_error = 0
        self.peers: set[tuple[int, int]] = set()
        self.memory: dict[int, Any] = {}
        self.opened: list[int] = []
        self._text = ctypes.create_string_buffer(b"a fake error")
        # `const char *`: ctypes calls a callback that returns c_char_p a leak.
        self.cudaGetErrorString = CFUNCTYPE(c_void_p, c_int)(
            lambda status: ctypes.addressof(self._text)
        )
        for name, prototype in header_prototypes(runtime_version).items():
            if name not in missing:
                setattr(self, name, CFUNCTYPE(c_int, *prototype)(partial(self._enter, name)))

    def _enter(self, name: str, *arguments: Any) -> int:
        if name in self.failing:
            self._cuda.log.append((name,))
            self.last_error = self.failing[name]
            return self.last_error
        return getattr(self, f"_{name}")(*arguments) or 0

    def _record(self, name: str, *arguments: Any) -> None:
        self._cuda.log.append((name, *arguments))

    def _cudaRuntimeGetVersion(self, version: Any) -> None:
        version[0] = self._versions["Runtime"]

    def _cudaDriverGetVersion(self, version: Any) -> None:
        version[0] = self._versions["Driver"]

    def _cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error

    def _cudaMalloc(self, address: Any, num_bytes: int) -> None:
        self._record("cudaMalloc", num_bytes, self._cuda.current_device)
        buffer = ctypes.create_string_buffer(min(num_bytes, 4096))
        address[0] = ctypes.addressof(buffer)
        self.memory[ctypes.addressof(buffer)] = buffer

    def _cudaFree(self, address: int) -> None:
        self._record("cudaFree", address, self._cuda.current_device)
        del self.memory[address]

    def _cudaIpcGetMemHandle(self, handle: Any, address: int) -> None:
        self._record("cudaIpcGetMemHandle", address, self._cuda.current_device)
        # Zeros in the middle, as a handle is no C string.
        handle[0].reserved[:] = struct.pack("<Q48xQ", address, 7)

    def _cudaIpcOpenMemHandle(self, address: Any, handle: HandleStruct, flags: int) -> None:
        exported, end = struct.unpack("<Q48xQ", bytes(handle))
        self._record("cudaIpcOpenMemHandle", exported, end, flags, self._cuda.current_device)
        self.opened.append(exported)
        address[0] = exported

    def _cudaIpcCloseMemHandle(self, address: int) -> None:
        self._record("cudaIpcCloseMemHandle", address, self._cuda.current_device)
        self.opened.remove(address)

    def _cudaDeviceCanAccessPeer(self, can_access: Any, device: int, peer: int) -> None:
        can_access[0] = (device, peer) in self.peers

    def _cudaDeviceEnablePeerAccess(self, peer: int, flags: int) -> None:
        self._record("cudaDeviceEnablePeerAccess", peer, flags, self._cuda.current_device)

    def _cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> None:
        self._record("cudaHostRegister", address, num_bytes, flags)

    def _cudaHostUnregister(self, address: int) -> None:
        self._record("cudaHostUnregister", address)

    def _cudaMemcpyAsync(self, dst: int, src: int, num_bytes: int, kind: int, stream: Any) -> None:
        self._record("cudaMemcpyAsync", dst, src, num_bytes, kind, stream or 0)
        self._queue_copy(dst, src, num_bytes, stream or 0)

    def _cudaMemcpyBatchAsync(
        self,
        dsts: Any,
        srcs: Any,
        sizes: Any,
        count: int,
        attributes: Any,
        firsts: Any,
        num_attributes: int,
        *rest: Any,
    ) -> int:
        """What the driver refuses, and copies in reverse, as their order is not promised."""
        copies = [(dsts[i], srcs[i], sizes[i]) for i in range(count)]
        values = struct.unpack("<IiiiiI", ctypes.string_at(attributes, 24))
        stream = rest[-1] or 0
        if len(rest) == 2:
            rest[0][0] = 2**64 - 1
        self._record("cudaMemcpyBatchAsync", copies, values, firsts[0], num_attributes, stream)
        if not (stream and copies and num_attributes and all(size for _, _, size in copies)):
            return INVALID_VALUE
        for copy in reversed(copies):
            self._queue_copy(*copy, stream)
        return 0

    def _queue_copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        # Handles that are no stream of `cuda` stand for real ones, whose work nobody runs.
        if stream < len(self._cuda.streams):
            copy = partial(ctypes.memmove, dst, src, num_bytes)
            self._cuda.streams[stream].queue(lambda: bool(copy()))


def header_prototypes(version: int) -> dict[str, tuple[Any, ...]]:
    """Parameters of the functions in `cuda_runtime_api.h` of a CUDA version, as of 12.6 to 13.1."""
    prototypes: dict[str, tuple[Any, ...]] = {
        "cudaRuntimeGetVersion": (POINTER(c_int),),
        "cudaDriverGetVersion": (POINTER(c_int),),
        "cudaGetLastError": (),
        "cudaMalloc": (POINTER(c_void_p), c_size_t),
        "cudaFree": (c_void_p,),
        "cudaIpcGetMemHandle": (POINTER(HandleStruct), c_void_p),
        "cudaIpcOpenMemHandle": (POINTER(c_void_p), HandleStruct, c_uint),
        "cudaIpcCloseMemHandle": (c_void_p,),
        "cudaDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
        "cudaDeviceEnablePeerAccess": (c_int, c_uint),
        "cudaHostRegister": (c_void_p, c_size_t, c_uint),
        "cudaHostUnregister": (c_void_p,),
        "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    }
    if version >= 12080:
        prototypes["cudaMemcpyBatchAsync"] = (
            POINTER(c_void_p),
            POINTER(c_void_p),
            POINTER(c_size_t),
            c_size_t,
            c_void_p,
            POINTER(c_size_t),
            c_size_t,
            *((POINTER(c_size_t),) if version < 13000 else ()),
            c_void_p,
        )
    return prototypes
