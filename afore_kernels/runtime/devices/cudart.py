"""The CUDA runtime library through ctypes: what the cuda device needs and torch does not offer.

Prototypes, structures and values are those of `cuda_runtime_api.h` and `driver_types.h`. Except for
`cudaMemcpyBatchAsync` they are the same in CUDA 12.6, 12.8, 12.9, 13.0 and 13.1. Addresses and
streams are plain integers, as `Tensor.data_ptr()` and `torch.cuda.Stream.cuda_stream` give them.
Calls that name no device act on the calling thread's current one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from afore_kernels.errors import AforeError, ConfigError

IPC_HANDLE_BYTES = 64

_SUCCESS = 0
_PEER_ACCESS_ALREADY_ENABLED = 704
_MEMCPY_DEFAULT = 4
_HOST_REGISTER_PORTABLE = 1
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_LEGACY_STREAM = 0

_BATCH = "cudaMemcpyBatchAsync"
_BATCH_VERSION = 12080
"""First CUDA version, 1000 * major + 10 * minor, with `cudaMemcpyBatchAsync`."""
_BATCH_WITHOUT_FAIL_INDEX = 13000
"""First version without its `size_t *failIdx` before the stream."""
_SRC_ACCESS_ORDER_STREAM = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1

_MAPS = Path("/proc/self/maps")


class CudaError(AforeError):
    """A CUDA call failed, or CUDA memory was used after its end."""


class IpcMemHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`, passed by value: 64 opaque bytes."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class MemLocation(ctypes.Structure):
    """`cudaMemLocation`; zeros are `cudaMemLocationTypeInvalid`, which as a hint says nothing."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """`cudaMemcpyAttributes`, 24 bytes, the same in CUDA 12.8, 12.9, 13.0 and 13.1."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location_hint", MemLocation),
        ("dst_location_hint", MemLocation),
        ("flags", ctypes.c_uint),
    )


_INT_OUT = ctypes.POINTER(ctypes.c_int)
_ADDRESS_OUT = ctypes.POINTER(ctypes.c_void_p)
_ADDRESSES = ctypes.POINTER(ctypes.c_void_p)
_SIZES = ctypes.POINTER(ctypes.c_size_t)
_ADDRESS, _STREAM, _SIZE, _FLAGS = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_uint,
)

_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudaRuntimeGetVersion": (_INT_OUT,),
    "cudaDriverGetVersion": (_INT_OUT,),
    "cudaGetLastError": (),
    "cudaMalloc": (_ADDRESS_OUT, _SIZE),
    "cudaFree": (_ADDRESS,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(IpcMemHandle), _ADDRESS),
    "cudaIpcOpenMemHandle": (_ADDRESS_OUT, IpcMemHandle, _FLAGS),
    "cudaIpcCloseMemHandle": (_ADDRESS,),
    "cudaDeviceCanAccessPeer": (_INT_OUT, ctypes.c_int, ctypes.c_int),
    "cudaDeviceEnablePeerAccess": (ctypes.c_int, _FLAGS),
    "cudaMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, ctypes.c_int, _STREAM),
    "cudaHostRegister": (_ADDRESS, _SIZE, _FLAGS),
    "cudaHostUnregister": (_ADDRESS,),
}
_BATCH_PROTOTYPE = (
    _ADDRESSES,
    _ADDRESSES,
    _SIZES,
    _SIZE,
    ctypes.POINTER(MemcpyAttributes),
    _SIZES,
    _SIZE,
)


class CudaRuntime:
    """The loaded CUDA runtime; every failed call raises `CudaError`.

    Attributes:
        runtime_version, driver_version: 1000 * major + 10 * minor.
        has_batch_copy: whether `memcpy_batch_async` is one call of the driver.

    Args:
        library: object with the runtime's functions; by default the library that torch uses.

    Raises:
        ConfigError: if torch has no CUDA, or the machine has no CUDA runtime or driver.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = _load_library() if library is None else library
        for name, prototype in _PROTOTYPES.items():
            self._declare(name, prototype)
        self._library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self.runtime_version = self._version("cudaRuntimeGetVersion")
        self.driver_version = self._version("cudaDriverGetVersion")
        if self.driver_version == 0:
            raise ConfigError("this machine has no CUDA driver")
        # Within a major version a runtime also loads on an older driver, which lacks the call.
        older = min(self.runtime_version, self.driver_version)
        self.has_batch_copy = older >= _BATCH_VERSION and hasattr(self._library, _BATCH)
        self._has_fail_index = self.runtime_version < _BATCH_WITHOUT_FAIL_INDEX
        if self.has_batch_copy:
            fail_index = (_SIZES,) if self._has_fail_index else ()
            self._declare(_BATCH, (*_BATCH_PROTOTYPE, *fail_index, _STREAM))

    def malloc(self, num_bytes: int) -> int:
        """Allocate uninitialised memory on the current device; returns its address."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), num_bytes)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free memory of `malloc`; every process that opened it must have closed it."""
        self._call("cudaFree", address)

    def mem_get_handle(self, address: int) -> bytes:
        """A handle, 64 bytes, by which other processes can open memory of `malloc`."""
        handle = IpcMemHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def mem_open_handle(self, handle: bytes) -> int:
        """Map another process's memory into the current device; returns its address here.

        Raises:
            CudaError: if the handle is not 64 bytes or not valid here, or the device that has the
                memory is no peer of the current one.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaError(f"a memory handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_void_p()
        value = IpcMemHandle.from_buffer_copy(handle)
        self._call(
            "cudaIpcOpenMemHandle", ctypes.byref(address), value, _IPC_LAZY_ENABLE_PEER_ACCESS
        )
        return address.value or 0

    def mem_close_handle(self, address: int) -> None:
        """Unmap memory of `mem_open_handle`."""
        self._call("cudaIpcCloseMemHandle", address)

    def device_can_access_peer(self, device: int, peer: int) -> bool:
        """Whether `device` can read and write the memory of `peer` directly."""
        can_access = ctypes.c_int()
        self._call("cudaDeviceCanAccessPeer", ctypes.byref(can_access), device, peer)
        return bool(can_access.value)

    def enable_peer_access(self, peer: int) -> None:
        """Let the current device access the memory of `peer`; enabled before is fine."""
        self._call("cudaDeviceEnablePeerAccess", peer, 0, tolerated=_PEER_ACCESS_ALREADY_ENABLED)

    def memcpy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Queue a copy; the addresses tell where from and where to."""
        self._call("cudaMemcpyAsync", dst, src, num_bytes, _MEMCPY_DEFAULT, stream)

    def memcpy_batch_async(
        self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Queue independent copies, in no order among themselves, on the copy engines if possible.

        The batch needs non-zero sizes and a stream that is not being captured into a CUDA graph.
        The driver refuses it on the legacy default stream, which gets single copies.
        """
        if not self.has_batch_copy or stream == _LEGACY_STREAM:
            for dst, src, num_bytes in zip(dsts, srcs, sizes):
                self.memcpy_async(dst, src, num_bytes, stream)
            return
        count = len(sizes)
        attributes = MemcpyAttributes(
            src_access_order=_SRC_ACCESS_ORDER_STREAM, flags=_PREFER_OVERLAP_WITH_COMPUTE
        )
        first_copy, fail_index = ctypes.c_size_t(0), ctypes.c_size_t()
        self._call(
            _BATCH,
            (ctypes.c_void_p * count)(*dsts),
            (ctypes.c_void_p * count)(*srcs),
            (ctypes.c_size_t * count)(*sizes),
            count,
            ctypes.byref(attributes),
            ctypes.byref(first_copy),
            1,  # one set of attributes, from the first copy on
            *([ctypes.byref(fail_index)] if self._has_fail_index else []),
            stream,
        )

    def host_register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory, so that copies from and to devices are fast and asynchronous."""
        self._call("cudaHostRegister", address, num_bytes, _HOST_REGISTER_PORTABLE)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`, before the memory is unmapped."""
        self._call("cudaHostUnregister", address)

    def _declare(self, name: str, prototype: tuple[Any, ...]) -> None:
        function = getattr(self._library, name)
        function.argtypes = prototype
        function.restype = ctypes.c_int

    def _version(self, name: str) -> int:
        version = ctypes.c_int()
        self._call(name, ctypes.byref(version))
        return version.value

    def _call(self, name: str, *arguments: Any, tolerated: int = _SUCCESS) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _SUCCESS:
            return
        # The runtime also keeps the error; torch would report it after its next kernel launch.
        self._library.cudaGetLastError()
        if status != tolerated:
            text = self._library.cudaGetErrorString(status).decode()
            raise CudaError(f"{name} failed with status {status}: {text}")


def _load_library() -> ctypes.CDLL:
    """The library that torch loaded: of two copies each would keep its own current device."""
    if torch.version.cuda is None:
        raise ConfigError("this torch is built without CUDA")
    maps = _MAPS.read_text().splitlines()
    paths = [line.split(maxsplit=5)[5] for line in maps if "/libcudart.so" in line]
    path = paths[0] if paths else f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise ConfigError(f"the CUDA runtime library does not load: {error}") from error
