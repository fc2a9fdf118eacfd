"""The binding against a library with the headers' prototypes: arguments, errors, versions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afore_kernels.errors import AforeError, ConfigError
from afore_kernels.runtime.devices import cudart
from afore_kernels.runtime.devices.cudart import (
    CudaError,
    CudaRuntime,
    IpcMemHandle,
    MemcpyAttributes,
    MemLocation,
)
from tests.runtime.recording_cuda import PEER_ACCESS_ALREADY_ENABLED, FakeCudart, RecordingCuda

# Beyond 32 bits, which an undeclared argument would be cut to.
ADDRESS, OTHER = 0x7F12_3456_7000, 0x7F65_4321_8000
NUM_BYTES = 5 << 30
STREAM = 0x5566_7788_9900
HANDLE = ADDRESS.to_bytes(8, "little") + bytes(48) + (7).to_bytes(8, "little")
BATCH_ATTRIBUTES = (1, 0, 0, 0, 0, 1)  # order "stream", no location hints, overlap with compute


class Library(FakeCudart):
    """A fake library with its own log."""

    def __init__(self, **arguments: Any) -> None:
        cuda = RecordingCuda()
        super().__init__(cuda, **arguments)
        self.log = cuda.log


def offsets(structure: Any) -> dict[str, int]:
    return {name: getattr(structure, name).offset for name, _ in structure._fields_}


def test_structures_have_the_layout_of_the_headers() -> None:
    """`offsetof` and `sizeof` by a C compiler, CUDA 12.8, 12.9, 13.0 and 13.1."""
    assert ctypes.sizeof(MemLocation) == 8
    assert offsets(MemLocation) == {"type": 0, "id": 4}
    assert ctypes.sizeof(MemcpyAttributes) == 24
    assert offsets(MemcpyAttributes) == {
        "src_access_order": 0,
        "src_location_hint": 4,
        "dst_location_hint": 12,
        "flags": 20,
    }
    assert ctypes.sizeof(IpcMemHandle) == 64


def test_arguments_arrive() -> None:
    library = Library()
    runtime = CudaRuntime(library)
    address = runtime.malloc(NUM_BYTES)
    assert address in library.memory
    runtime.free(address)
    assert runtime.mem_get_handle(ADDRESS) == HANDLE
    assert runtime.mem_open_handle(HANDLE) == ADDRESS
    runtime.mem_close_handle(ADDRESS)
    runtime.enable_peer_access(3)
    runtime.memcpy_async(ADDRESS, OTHER, NUM_BYTES, STREAM)
    runtime.host_register(ADDRESS, NUM_BYTES)
    runtime.host_unregister(ADDRESS)
    assert library.log == [
        ("cudaMalloc", NUM_BYTES, None),
        ("cudaFree", address, None),
        ("cudaIpcGetMemHandle", ADDRESS, None),
        ("cudaIpcOpenMemHandle", ADDRESS, 7, 1, None),  # enable peer access lazily
        ("cudaIpcCloseMemHandle", ADDRESS, None),
        ("cudaDeviceEnablePeerAccess", 3, 0, None),
        ("cudaMemcpyAsync", ADDRESS, OTHER, NUM_BYTES, 4, STREAM),  # direction by the addresses
        ("cudaHostRegister", ADDRESS, NUM_BYTES, 1),  # for all contexts
        ("cudaHostUnregister", ADDRESS),
    ]


def test_peer_access_is_asked_in_its_direction() -> None:
    library = Library()
    library.peers = {(1, 2)}
    runtime = CudaRuntime(library)
    assert runtime.device_can_access_peer(1, 2)
    assert not runtime.device_can_access_peer(2, 1)


def test_versions() -> None:
    runtime = CudaRuntime(Library(runtime_version=12080, driver_version=13010))
    assert (runtime.runtime_version, runtime.driver_version) == (12080, 13010)


@pytest.mark.parametrize("runtime_version", [12080, 12090, 13000, 13010])
def test_batch_is_one_call_with_the_arguments_of_its_version(runtime_version: int) -> None:
    """13.0 took `failIdx` away: with one argument too many the driver gets it as the stream."""
    library = Library(runtime_version=runtime_version, driver_version=13010)
    runtime = CudaRuntime(library)
    assert runtime.has_batch_copy
    dsts, srcs, sizes = [ADDRESS, OTHER, 64], [OTHER, ADDRESS, 128], [NUM_BYTES, 1, 7]
    runtime.memcpy_batch_async(dsts, srcs, sizes, STREAM)
    copies = list(zip(dsts, srcs, sizes))
    assert library.log == [("cudaMemcpyBatchAsync", copies, BATCH_ATTRIBUTES, 0, 1, STREAM)]


@pytest.mark.parametrize(
    ("library", "stream"),
    [
        ({"runtime_version": 12060}, STREAM),
        ({"runtime_version": 12080, "driver_version": 12060}, STREAM),
        ({"missing": ("cudaMemcpyBatchAsync",)}, STREAM),
        ({}, 0),
    ],
    ids=["old runtime", "old driver", "no symbol", "legacy stream"],
)
def test_batch_falls_back_to_single_copies(library: dict[str, Any], stream: int) -> None:
    fake = Library(**library)
    runtime = CudaRuntime(fake)
    assert runtime.has_batch_copy == (stream == 0)
    runtime.memcpy_batch_async([1, 2], [3, 4], [NUM_BYTES, 6], stream)
    assert fake.log == [
        ("cudaMemcpyAsync", 1, 3, NUM_BYTES, 4, stream),
        ("cudaMemcpyAsync", 2, 4, 6, 4, stream),
    ]


CALLS: dict[str, Callable[[CudaRuntime], Any]] = {
    "cudaMalloc": lambda runtime: runtime.malloc(1),
    "cudaFree": lambda runtime: runtime.free(1),
    "cudaIpcGetMemHandle": lambda runtime: runtime.mem_get_handle(1),
    "cudaIpcOpenMemHandle": lambda runtime: runtime.mem_open_handle(HANDLE),
    "cudaIpcCloseMemHandle": lambda runtime: runtime.mem_close_handle(1),
    "cudaDeviceCanAccessPeer": lambda runtime: runtime.device_can_access_peer(0, 1),
    "cudaDeviceEnablePeerAccess": lambda runtime: runtime.enable_peer_access(1),
    "cudaMemcpyAsync": lambda runtime: runtime.memcpy_async(1, 2, 3, STREAM),
    "cudaMemcpyBatchAsync": lambda runtime: runtime.memcpy_batch_async([1], [2], [3], STREAM),
    "cudaHostRegister": lambda runtime: runtime.host_register(1, 2),
    "cudaHostUnregister": lambda runtime: runtime.host_unregister(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_failure_is_raised_and_left_to_nobody_else(name: str) -> None:
    library = Library()
    runtime = CudaRuntime(library)
    library.failing[name] = 719
    with pytest.raises(CudaError, match=f"^{name} failed with status 719: a fake error$") as raised:
        CALLS[name](runtime)
    assert isinstance(raised.value, AforeError)
    assert library.last_error == 0, "torch would raise it after its next kernel launch"


def test_peer_access_that_is_enabled_already_is_fine() -> None:
    library = Library()
    runtime = CudaRuntime(library)
    library.failing["cudaDeviceEnablePeerAccess"] = PEER_ACCESS_ALREADY_ENABLED
    runtime.enable_peer_access(1)
    assert library.log == [("cudaDeviceEnablePeerAccess",)]
    assert library.last_error == 0


@pytest.mark.parametrize("handle", [b"", HANDLE[:-1], HANDLE + b"\0"], ids=len)
def test_handle_of_another_size_is_refused(handle: bytes) -> None:
    library = Library()
    with pytest.raises(CudaError, match=f"a memory handle has 64 bytes, not {len(handle)}"):
        CudaRuntime(library).mem_open_handle(handle)
    assert library.log == []


def test_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="torch is built without CUDA"):
        CudaRuntime()


def test_machine_without_driver_is_refused() -> None:
    """`cudaDriverGetVersion` then succeeds and says 0."""
    with pytest.raises(ConfigError, match="no CUDA driver"):
        CudaRuntime(Library(driver_version=0))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> SimpleNamespace:
    """A process whose torch has CUDA 13, the libraries mapped into it, and those it loads."""
    process = SimpleNamespace(maps=tmp_path / "maps", loaded=[], library=Library())

    def load(path: str) -> Any:
        process.loaded.append(path)
        return process.library

    monkeypatch.setattr(torch.version, "cuda", "13.1")
    monkeypatch.setattr(cudart, "_MAPS", process.maps)
    monkeypatch.setattr(ctypes, "CDLL", load)
    return process


def test_library_is_the_one_that_torch_loaded(process: SimpleNamespace) -> None:
    process.maps.write_text(
        "7f00-7f10 r-xp 00000000 00:1f 11   /usr/lib/libc.so.6\n"
        "7f20-7f30 rw-p 00000000 00:00 0 \n"
        "7f40-7f50 r--p 00000000 00:1f 12   /opt/my env/nvidia/lib/libcudart.so.13\n"
        "7f50-7f60 r-xp 00010000 00:1f 12   /opt/my env/nvidia/lib/libcudart.so.13\n"
    )
    assert CudaRuntime().runtime_version == 13000
    assert process.loaded == ["/opt/my env/nvidia/lib/libcudart.so.13"]


def test_library_that_torch_has_linked_in_is_loaded_by_name(process: SimpleNamespace) -> None:
    process.maps.write_text("7f00-7f10 r-xp 00000000 00:1f 11   /usr/lib/libc.so.6\n")
    assert CudaRuntime().runtime_version == 13000
    assert process.loaded == ["libcudart.so.13"]


def test_library_that_does_not_load_is_reported(
    process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> Any:
        raise OSError(f"{path}: cannot open shared object file")

    process.maps.write_text("")
    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(ConfigError, match=r"libcudart\.so\.13: cannot open"):
        CudaRuntime()
