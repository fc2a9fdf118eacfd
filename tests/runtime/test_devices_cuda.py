"""The cuda device on a recorded one, whose streams run in an order of the test's, and on a GPU."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afore_kernels.errors import ConfigError, PeerLost, ShapeError
from afore_kernels.runtime.devices import cuda_streams
from afore_kernels.runtime.devices.cpu import CpuEvent
from afore_kernels.runtime.devices.cuda import CudaDevice, PeerAccess
from afore_kernels.runtime.devices.cuda_memory import CopyPath, DeviceMemory, copy_batch
from afore_kernels.runtime.devices.cuda_streams import (
    MIGRATION_PRIORITY,
    MODEL_PRIORITY,
    CudaEvent,
    CudaStream,
)
from afore_kernels.runtime.devices.cudart import CudaError, CudaRuntime
from tests.runtime.recording_cuda import (
    PEER_ACCESS_ALREADY_ENABLED,
    FakeCudart,
    RecordingCuda,
)

TIMEOUT_S = 20.0
CPU = torch.device("cpu")
PATHS: tuple[CopyPath, ...] = ("copy_engine", "sm")
BLOCK_BYTES = 2 << 20
OLD, NEW = 1, 2


class Recorded(SimpleNamespace):
    """A device whose CUDA is recorded.

    Attributes:
        cuda, library: the stand-ins.
        log: of both.
        device: on the CPU's memory, or on `torch_device`.
    """

    def __init__(
        self,
        torch_device: torch.device = CPU,
        timeout_s: float = TIMEOUT_S,
        copy_path: CopyPath = "copy_engine",
        **library: Any,
    ) -> None:
        self.cuda = RecordingCuda()
        self.library = FakeCudart(self.cuda, **library)
        self.log = self.cuda.log
        self.device = CudaDevice(
            torch_device,
            timeout_s,
            copy_path=copy_path,
            runtime=CudaRuntime(self.library),
            cuda=self.cuda,
        )


def handle_of(stream: CudaStream) -> int:
    return stream._stream.cuda_stream


def test_device_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="without CUDA"):
        CudaDevice(torch.device("cuda", 0), TIMEOUT_S)


def test_unknown_copy_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="copy path 'dma' is none of"):
        Recorded(copy_path="dma")  # type: ignore[arg-type]


def test_model_stream_goes_before_the_migration_stream() -> None:
    """Lower numbers go first."""
    recorded = Recorded(torch.device("cuda", 3))
    streams = [recorded.device.model_stream(), recorded.device.migration_stream()]
    priorities = [recorded.cuda.streams[handle_of(stream)].priority for stream in streams]
    assert priorities == [MODEL_PRIORITY, MIGRATION_PRIORITY]
    assert MODEL_PRIORITY < MIGRATION_PRIORITY
    assert {stream.device for stream in recorded.cuda.streams[1:]} == {torch.device("cuda", 3)}


def test_submit_calls_the_work_at_once_on_its_stream() -> None:
    recorded = Recorded()
    stream, ran = recorded.device.model_stream(), []
    stream.submit(lambda: ran.append(recorded.cuda.current_stream().cuda_stream))
    assert ran == [handle_of(stream)]
    assert recorded.cuda.current_stream().cuda_stream == 0


def test_event_passes_when_the_work_before_it_has_run() -> None:
    recorded = Recorded()
    stream = recorded.device.model_stream()
    stream.submit(lambda: recorded.cuda.launch(lambda: None))
    event = stream.record_event()
    assert not event.is_done()
    assert event.wait(0.0) is False
    recorded.cuda.run(handle_of(stream))
    assert event.is_done()
    assert event.wait(0.0) is True


def test_stamps_are_the_devices_times_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded()
    device, cuda = recorded.device, recorded.cuda
    monkeypatch.setattr(cuda_streams, "time", SimpleNamespace(monotonic_ns=lambda: 5_000_000))
    stream = device.model_stream()
    cuda.now_ms = 100.0
    stamps = [device.stamp(stream)]  # tied to the host's clock here
    stream.submit(lambda: cuda.launch(lambda: setattr(cuda, "now_ms", 100.25)))
    stamps.append(device.stamp(stream))
    stream.submit(lambda: cuda.launch(lambda: setattr(cuda, "now_ms", 103.0)))
    stamps.append(device.stamp(stream))
    cuda.run(handle_of(stream))
    assert [stamp() for stamp in stamps] == [5_000_000, 5_250_000, 8_000_000]


def test_event_without_timing_has_no_time() -> None:
    """What the stand-in refuses, as CUDA does: the clock needs events of its own."""
    recorded = Recorded()
    event = recorded.device.model_stream().record_event().event
    with pytest.raises(ValueError, match="without timing"):
        event.elapsed_time(event)


def test_wait_returns_soon_after_the_event(background: Callable[..., Any]) -> None:
    recorded = Recorded()
    stream = recorded.device.model_stream()
    event = stream.record_event()
    waiting = background(event.wait, TIMEOUT_S)
    time.sleep(0.02)
    recorded.cuda.run(handle_of(stream))
    start_s = time.monotonic()
    assert waiting.result() is True
    assert time.monotonic() - start_s < TIMEOUT_S / 2


def test_wait_sleeps_longer_and_longer_up_to_a_millisecond_or_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(cuda_streams, "time", clock)
    assert Recorded().device.model_stream().record_event().wait(4e-3) is False
    assert [round(1e6 * pause) for pause in pauses] == [50, 100, 200, 400, 800, 1000, 1000, 450]


def test_failure_of_the_device_is_raised_by_the_event() -> None:
    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    event = CudaEvent(SimpleNamespace(query=fail))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        event.wait(TIMEOUT_S)


class WaitsOnHost(CudaStream):
    """Blocks the host instead of the stream."""

    def wait_event(self, event: Any) -> None:
        if not event.wait(0.01):
            raise PeerLost("blocked")


class DoesNotWait(CudaStream):
    def wait_event(self, event: Any) -> None:
        pass


class RecordsBefore(CudaStream):
    """Its events are those at the start of the latest work."""

    def submit(self, work: Callable[[], None], **names: Any) -> None:
        self._early = super().record_event()
        super().submit(work, **names)

    def record_event(self) -> CudaEvent:
        return self._early


class SubmitsElsewhere(CudaStream):
    """Its work goes to torch's default stream."""

    def submit(self, work: Callable[[], None], **names: Any) -> None:
        work()


def run_hand_over(
    model_type: type[CudaStream],
    migration_type: type[CudaStream],
    order: tuple[int, ...],
    **library: Any,
) -> list[int]:
    """What the model reads from a slot before and after a copy into it.

    The host submits everything before the device runs anything, in any order of the streams.
    """
    recorded = Recorded(**library)
    device = recorded.device
    model = model_type(device, priority=MODEL_PRIORITY)
    migration = migration_type(device, priority=MIGRATION_PRIORITY)
    slot = torch.full((2, 3), OLD)
    source = torch.full((2, 3), NEW)
    seen: list[int] = []

    def read() -> None:
        recorded.cuda.launch(lambda: seen.append(int(slot[0, 0])))

    model.submit(read)
    migration.wait_event(model.record_event())
    migration.submit(lambda: device.copy([(slot[row], source[row]) for row in range(2)]))
    model.wait_event(migration.record_event())
    model.submit(read)
    assert seen == [], "the host waited for the device"
    recorded.cuda.run(*order)
    assert len(seen) == 2
    assert slot.equal(source)
    return seen


ORDERS = list(itertools.permutations((0, 1, 2)))


@pytest.mark.parametrize("library", [{}, {"runtime_version": 12080}, {"runtime_version": 12060}])
@pytest.mark.parametrize("order", ORDERS)
def test_slot_changes_between_the_reads_that_events_set_apart(
    order: tuple[int, ...], library: dict[str, int]
) -> None:
    assert run_hand_over(CudaStream, CudaStream, order, **library) == [OLD, NEW]


@pytest.mark.parametrize("faulty", [DoesNotWait, RecordsBefore, SubmitsElsewhere])
def test_faulty_stream_is_caught(faulty: type[CudaStream]) -> None:
    for types in ((faulty, CudaStream), (CudaStream, faulty)):
        assert any(run_hand_over(*types, order) != [OLD, NEW] for order in ORDERS), types


def test_stream_that_blocks_the_host_is_caught() -> None:
    with pytest.raises(PeerLost, match="blocked"):
        run_hand_over(CudaStream, WaitsOnHost, (1, 2, 0))


def test_copies_lie_between_the_wait_before_and_the_event_after() -> None:
    recorded = Recorded()
    model, migration = recorded.device.model_stream(), recorded.device.migration_stream()
    migration.wait_event(model.record_event())
    migration.submit(lambda: recorded.device.copy([(torch.zeros(4), torch.ones(4))]))
    migration.record_event()
    assert [(name, entry[-1]) for name, *entry in recorded.log] == [
        ("record", handle_of(model)),
        ("wait", handle_of(migration)),
        ("cudaMemcpyBatchAsync", handle_of(migration)),
        ("record", handle_of(migration)),
    ]


def test_event_of_another_device_is_waited_for_by_the_host(
    background: Callable[..., Any],
) -> None:
    stream, event = Recorded().device.model_stream(), CpuEvent()
    waiting = background(stream.wait_event, event)
    event.set()
    waiting.result()


def test_wait_for_an_event_of_another_device_is_bounded_and_passes_its_failure() -> None:
    recorded = Recorded(timeout_s=0.01)
    stream = recorded.device.model_stream()
    with pytest.raises(PeerLost, match=r"an event did not come within 0\.01 s"):
        stream.wait_event(CpuEvent())
    event = CpuEvent()
    event.set(ValueError("the copy failed"))
    with pytest.raises(ValueError, match="the copy failed"):
        stream.wait_event(event)
    assert recorded.log == []


def test_close_waits_for_the_submitted_work(background: Callable[..., Any]) -> None:
    recorded = Recorded()
    stream, ran = recorded.device.model_stream(), []
    stream.submit(lambda: recorded.cuda.launch(lambda: ran.append("kernel")))
    closing = background(stream.close)
    while ("record", handle_of(stream)) not in recorded.log:
        time.sleep(0.001)
    assert ran == []
    recorded.cuda.run(handle_of(stream))
    closing.result()
    assert ran == ["kernel"]


def test_close_of_a_stream_that_hangs_is_bounded() -> None:
    stream = Recorded(timeout_s=0.01).device.model_stream()
    with pytest.raises(PeerLost, match=r"work was not done within 0\.01 s"):
        stream.close()


def test_completions_wait_for_the_device_while_the_host_goes_on() -> None:
    recorded = Recorded()
    stream, ran = recorded.device.migration_stream(), []
    completions = recorded.device.completions(stream)
    completions.wait_event(stream.record_event())
    completions.submit(lambda: ran.append("recorded"))
    done = completions.record_event()
    assert done.wait(0.02) is False
    recorded.cuda.run(handle_of(stream))
    assert done.wait(TIMEOUT_S)
    assert ran == ["recorded"]
    completions.close()


def test_host_buffer_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: calls.append((*shape, kwargs)))
    Recorded().device.host_buffer(12)
    assert calls == [(12, {"dtype": torch.uint8, "pin_memory": True})]


def test_memory_is_allocated_in_blocks_of_its_own_on_its_device() -> None:
    recorded = Recorded(torch.device("cuda", 1))
    for num_bytes in (1, BLOCK_BYTES, BLOCK_BYTES + 1):
        assert DeviceMemory.allocate(num_bytes, recorded.device).num_bytes == num_bytes
    assert recorded.log == [
        ("cudaMalloc", num_blocks * BLOCK_BYTES, torch.device("cuda", 1))
        for num_blocks in (1, 1, 2)
    ]


def test_memory_is_viewed_without_a_copy() -> None:
    recorded = Recorded()
    with DeviceMemory.allocate(24, recorded.device) as memory:
        view = memory.tensor
        assert (view.dtype, view.shape, view.device) == (torch.uint8, (24,), CPU)
        assert view.data_ptr() in recorded.library.memory
        view.view(torch.int64)[:] = torch.tensor([1, 2, 3])
        assert memory.tensor.view(torch.int64).tolist() == [1, 2, 3]


def test_opened_memory_is_the_shared_one_and_its_release_leaves_it_alone() -> None:
    owner = Recorded()
    memory = DeviceMemory.allocate(8, owner.device)
    memory.tensor[:] = torch.arange(8)
    handle = memory.share()
    assert len(handle) == 64
    peer = Recorded()
    with DeviceMemory.open(handle, 8, peer.device) as opened:
        assert opened.num_bytes == 8
        assert opened.tensor.tolist() == list(range(8))
        opened.tensor[0] = 9
        address = opened.tensor.data_ptr()
        assert peer.library.opened == [address]
    assert peer.library.opened == []
    assert [name for name, *_ in peer.log] == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]
    assert memory.tensor[0] == 9
    memory.close()
    assert owner.library.memory == {}


def test_every_call_is_made_on_the_device() -> None:
    recorded = Recorded(torch.device("cuda", 2))
    with DeviceMemory.allocate(8, recorded.device) as memory:
        DeviceMemory.open(memory.share(), 8, recorded.device).close()
    assert [(name, entry[-1]) for name, *entry in recorded.log] == [
        (name, torch.device("cuda", 2))
        for name in (
            "cudaMalloc",
            "cudaIpcGetMemHandle",
            "cudaIpcOpenMemHandle",
            "cudaIpcCloseMemHandle",
            "cudaFree",
        )
    ]
    assert recorded.cuda.current_device is None


def test_memory_is_released_once_even_if_that_fails() -> None:
    recorded = Recorded()
    memory = DeviceMemory.allocate(8, recorded.device)
    recorded.library.failing["cudaFree"] = 719
    with pytest.raises(CudaError, match="cudaFree failed with status 719"):
        memory.close()
    memory.close()
    assert [name for name, *_ in recorded.log] == ["cudaMalloc", "cudaFree"]


def test_closed_memory_is_not_used() -> None:
    memory = DeviceMemory.allocate(8, Recorded().device)
    memory.close()
    for use in (memory.share, lambda: memory.tensor):
        with pytest.raises(CudaError, match="the device memory is closed"):
            use()


def test_memory_that_cannot_be_had_is_reported() -> None:
    recorded = Recorded()
    recorded.library.failing = {"cudaMalloc": 2, "cudaIpcOpenMemHandle": 201}
    with pytest.raises(CudaError, match="cudaMalloc failed with status 2"):
        DeviceMemory.allocate(8, recorded.device)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle failed with status 201"):
        DeviceMemory.open(bytes(64), 8, recorded.device)


def make_copies(device: torch.device = CPU) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of several dtypes, sizes and shapes, into other values."""
    generator = torch.Generator().manual_seed(0)
    sources = [
        torch.randn(3, 64, 32, generator=generator).bfloat16()[1],
        torch.randn(17, generator=generator),
        torch.randn(0, 8, generator=generator),
        torch.randint(0, 256, (5, 3), generator=generator).byte(),
        torch.randn((), generator=generator),
    ]
    return [
        (torch.full_like(source, 77, device=device), source.to(device, copy=True))
        for source in sources
    ]


def assert_copied(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Check the destinations of `make_copies` bit by bit, against sources that nobody had."""
    for (destination, _), (_, source) in zip(copies, make_copies(), strict=True):
        assert destination.cpu().view(-1).view(torch.uint8).equal(source.view(-1).view(torch.uint8))


@pytest.mark.parametrize("path", PATHS)
def test_copies_are_bit_exact(path: CopyPath) -> None:
    recorded = Recorded(copy_path=path)
    stream, copies = recorded.device.migration_stream(), make_copies()
    stream.submit(lambda: recorded.device.copy(copies))
    recorded.cuda.run(handle_of(stream))
    assert_copied(copies)
    num_calls = {"copy_engine": 1, "sm": 0}[path]
    assert [name for name, *_ in recorded.log] == ["cudaMemcpyBatchAsync"] * num_calls


@pytest.mark.parametrize("path", PATHS)
def test_batch_without_bytes_is_nothing(path: CopyPath) -> None:
    recorded = Recorded()
    copy_batch(recorded.device, [], path)
    copy_batch(recorded.device, [(torch.empty(0), torch.empty(0))], path)
    assert recorded.log == []


BAD_COPIES = {
    "shape": (torch.zeros(4), torch.ones(2, 2), r"float32 \(2, 2\) into torch.float32 \(4,\)"),
    "dtype": (torch.zeros(4), torch.ones(4).half(), r"torch.float16 \(4,\) into torch.float32"),
    "strided source": (torch.zeros(2), torch.ones(4)[::2], "not both contiguous"),
    "strided destination": (torch.zeros(4)[::2], torch.ones(2), "not both contiguous"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD_COPIES)
def test_bad_copy_is_refused_before_any(name: str, path: CopyPath) -> None:
    recorded, good = Recorded(), (torch.zeros(4), torch.ones(4))
    *bad, message = BAD_COPIES[name]
    with pytest.raises(ShapeError, match=message):
        copy_batch(recorded.device, [good, tuple(bad)], path)
    assert recorded.log == []
    assert not good[0].any()


def test_kernel_needs_both_tensors_on_one_device() -> None:
    """torch would fall back to cudaMemcpyAsync without a word."""
    copies = [(torch.zeros(4), torch.ones(4, device="meta"))]
    with pytest.raises(ShapeError, match="copy by a kernel from meta to cpu"):
        copy_batch(Recorded().device, copies, "sm")


@pytest.mark.parametrize("name", ["cudaMemcpyBatchAsync", "cudaMemcpyAsync"])
def test_copy_that_cannot_be_queued_is_reported(name: str) -> None:
    recorded = Recorded(driver_version=13000 if "Batch" in name else 12060)
    recorded.library.failing[name] = 900
    stream = recorded.device.migration_stream()
    with pytest.raises(CudaError, match=f"{name} failed with status 900"):
        stream.submit(lambda: recorded.device.copy(make_copies()))


def test_peers_are_direct_or_staged() -> None:
    """Device 1 reaches 0 and itself; 3 reaches it, but not the other way round."""
    torch_device = torch.device("cuda", 1)
    recorded = Recorded(torch_device)
    recorded.library.peers = {(1, 0), (3, 1)}
    assert recorded.device.enable_peers([0, 1, 2, 3]) == PeerAccess(direct=(0, 1), staged=(2, 3))
    assert recorded.log == [("cudaDeviceEnablePeerAccess", 0, 0, torch_device)]


@pytest.mark.parametrize("status", [PEER_ACCESS_ALREADY_ENABLED, 217])
def test_peer_access_fails_unless_it_is_enabled_already(status: int) -> None:
    recorded = Recorded(torch.device("cuda", 1))
    recorded.library.peers = {(1, 0)}
    recorded.library.failing["cudaDeviceEnablePeerAccess"] = status
    if status == PEER_ACCESS_ALREADY_ENABLED:
        assert recorded.device.enable_peers([0]).direct == (0,)
    else:
        with pytest.raises(CudaError, match="status 217"):
            recorded.device.enable_peers([0])


def test_event_that_was_never_recorded_has_passed() -> None:
    """As of CUDA, so that the stand-in does not make a missing record look like a wait."""
    assert RecordingCuda().Event().query()


def on_gpu(test: Callable[..., None]) -> Any:
    reason = "runs on a CUDA device"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


@pytest.fixture
def gpu() -> Iterator[CudaDevice]:
    yield CudaDevice(torch.device("cuda", torch.cuda.current_device()), TIMEOUT_S)
    torch.cuda.synchronize()


SLEEP_CYCLES = 200_000_000  # about 0.1 s
NUM_ELEMENTS = 1 << 20


@on_gpu
@pytest.mark.parametrize("path", PATHS)
def test_gpu_streams_hold_each_other_by_events(gpu: CudaDevice, path: CopyPath) -> None:
    model, migration = gpu.model_stream(), gpu.migration_stream()
    slot = torch.full((NUM_ELEMENTS,), OLD, device=gpu.torch_device)
    source = torch.full_like(slot, NEW)
    seen = [torch.zeros_like(slot) for _ in range(2)]
    copy_batch(gpu, [(torch.empty_like(slot), source)], path)  # loads the kernel
    torch.cuda.synchronize()

    def read_late() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        seen[0].copy_(slot)

    def copy_late() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        copy_batch(gpu, [(slot, source)], path)

    model.submit(read_late)
    read = model.record_event()
    assert not read.is_done()
    assert read.wait(0.001) is False
    migration.wait_event(read)
    migration.submit(copy_late)
    copied = migration.record_event()
    model.wait_event(copied)
    model.submit(lambda: seen[1].copy_(slot))
    assert not copied.is_done(), "the host waited for the device"
    model.close()
    assert copied.is_done()
    assert [int(values.unique()) for values in seen] == [OLD, NEW]
    migration.close()


@on_gpu
@pytest.mark.parametrize("path", PATHS)
def test_gpu_copies_are_bit_exact(gpu: CudaDevice, path: CopyPath) -> None:
    copies = make_copies(gpu.torch_device)
    arena = torch.full((3, 1 << 22), 0xA5, dtype=torch.uint8, device=gpu.torch_device)
    source = (torch.arange(1 << 22, device=gpu.torch_device) % 251).byte()
    expected = source.cpu()
    torch.cuda.synchronize()
    stream = gpu.migration_stream()
    stream.submit(lambda: copy_batch(gpu, [*copies, (arena[1], source)], path))
    stream.close()
    assert_copied(copies)
    assert arena[1].cpu().equal(expected)
    assert (arena[[0, 2]] == 0xA5).all()


@on_gpu
def test_gpu_single_copies_are_bit_exact(gpu: CudaDevice) -> None:
    """What a runtime without the batch call does, and any on the default stream."""
    copies = make_copies(gpu.torch_device)
    gpu.copy(copies)
    torch.cuda.synchronize()
    assert_copied(copies)
    copies = make_copies(gpu.torch_device)
    torch.cuda.synchronize()
    gpu.runtime.has_batch_copy = False
    stream = gpu.migration_stream()
    stream.submit(lambda: gpu.copy(copies))
    stream.close()
    assert_copied(copies)


@on_gpu
def test_gpu_failed_call_does_not_fail_the_next_kernel(gpu: CudaDevice) -> None:
    with pytest.raises(CudaError, match="cudaFree failed"):
        gpu.runtime.free(1)
    assert int(torch.ones(4, device=gpu.torch_device).sum()) == 4


OPENER = """
import sys
import torch
from afore_kernels.runtime.devices.cuda import CudaDevice, DeviceMemory, copy_batch

handle, num_bytes, index, path = bytes.fromhex(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
device = CudaDevice(torch.device("cuda", index), 20.0)
with DeviceMemory.open(handle, num_bytes, device) as memory:
    mine = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    torch.cuda.synchronize()
    stream = device.migration_stream()
    stream.submit(lambda: copy_batch(device, [(mine, memory.tensor)], path))
    stream.close()
    memory.tensor.copy_(mine.flip(0))
    torch.cuda.synchronize()
"""


@on_gpu
@pytest.mark.parametrize("path", PATHS)
def test_gpu_memory_is_opened_by_another_process(gpu: CudaDevice, path: CopyPath) -> None:
    num_bytes, index = 3_000_001, gpu.torch_device.index
    with DeviceMemory.allocate(num_bytes, gpu) as memory:
        memory.tensor.copy_(torch.arange(num_bytes) % 251)
        expected = memory.tensor.cpu().flip(0)
        arguments = [memory.share().hex(), str(num_bytes), str(index), path]
        subprocess.run([sys.executable, "-c", OPENER, *arguments], check=True, timeout=120)
        assert memory.tensor.cpu().equal(expected)


@on_gpu
def test_gpu_copies_from_registered_and_pinned_host_memory(gpu: CudaDevice) -> None:
    shared = mmap.mmap(-1, 1 << 20)
    host = torch.frombuffer(shared, dtype=torch.uint8)
    host.copy_(torch.arange(1 << 20) % 253)
    assert not host.is_pinned()
    gpu.runtime.host_register(host.data_ptr(), host.nbytes)
    assert host.is_pinned()
    pinned = gpu.host_buffer(1 << 20)
    assert pinned.is_pinned()
    there = torch.empty_like(host, device=gpu.torch_device)
    torch.cuda.synchronize()
    stream = gpu.migration_stream()
    stream.submit(lambda: gpu.copy([(there, host)]))
    stream.submit(lambda: gpu.copy([(pinned, there)]))
    stream.close()
    assert pinned.equal(host)
    gpu.runtime.host_unregister(host.data_ptr())
    assert not host.is_pinned()


@on_gpu
def test_gpu_is_its_own_peer(gpu: CudaDevice) -> None:
    index = gpu.torch_device.index
    assert gpu.enable_peers([index]) == PeerAccess(direct=(index,), staged=())
