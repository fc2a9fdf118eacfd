"""What a worker builds on a GPU, on a recorded one: who waits for whom, and where weights live."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from afore_kernels.errors import ConfigError, PeerLost
from afore_kernels.runtime.device_weights import note_loaded, share_slots, wait_loaded
from afore_kernels.runtime.devices.cuda import CudaDevice, PeerAccess
from afore_kernels.runtime.devices.cudart import CudaError, CudaRuntime
from afore_kernels.runtime.weights import ExpertSlots, RandomWeights
from afore_kernels.runtime.worker_cuda import choose_devices, open_device
from tests.runtime.recording_cuda import FakeCudart, RecordingCuda

MOE = {"num_layers": 1, "num_experts": 4, "hidden_size": 4, "intermediate_size": 2}
NUM_WORKERS = 2


class HostMemoryDevice(CudaDevice):
    """A recorded GPU 0 whose tensors are the host's; it reaches itself alone."""

    def enable_peers(self, peers) -> PeerAccess:
        return PeerAccess((0,), tuple(peer for peer in peers if peer != 0))


class Gpus:
    """Workers' devices over one recorded library, whose memory is the host's."""

    def __init__(self, make_memory, **tier) -> None:
        self.memory = make_memory(MOE, num_workers=NUM_WORKERS, redundant_slots=1, **tier)
        self.cuda = RecordingCuda()
        self.cuda.synchronize = lambda device: self.cuda.log.append(("synchronize", device))
        self.library = FakeCudart(self.cuda)
        moe, placement = self.memory.moe, self.memory.placement
        self.source = RandomWeights(moe)
        self.segments = [ExpertSlots.create_segment(moe, placement, w) for w in range(NUM_WORKERS)]

    def device(self) -> CudaDevice:
        runtime = CudaRuntime(self.library)
        return HostMemoryDevice(torch.device("cpu"), 20.0, runtime=runtime, cuda=self.cuda)

    def load_segments(self) -> None:
        """What the starting process does."""
        for w, segment in enumerate(self.segments):
            slots = ExpertSlots(self.memory.moe, self.memory.placement, w, segment)
            slots.load_primaries(self.source)
        note_loaded(self.memory)

    def share(self, worker: int, peers: tuple[int, ...] = (0, 0)) -> list[ExpertSlots]:
        return share_slots(self.memory, worker, self.segments, self.device(), peers)

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


@pytest.fixture
def gpus(make_memory):
    gpus = Gpus(make_memory)
    yield gpus
    gpus.close()


def check_primaries(gpus: Gpus, slots: list[ExpertSlots]) -> None:
    for worker, one in enumerate(slots):
        first = gpus.memory.placement.primaries(worker).start
        for slot in range(one.num_primaries):
            expected = gpus.source.expert(0, first + slot)
            assert torch.equal(one.gate_up[0, slot], expected.gate_up)
            assert torch.equal(one.down[0, slot], expected.down)


def test_every_worker_sees_all_primaries_in_device_memory(gpus, background) -> None:
    runs = [background(gpus.share, worker) for worker in range(NUM_WORKERS)]
    gpus.load_segments()
    views = [run.result(20) for run in runs]
    for slots in views:
        check_primaries(gpus, slots)
    # The owner's memory and the other's view are one, and not the host's segment.
    views[0][0].gate_up[0, 0] = 7.0
    assert (views[1][0].gate_up[0, 0] == 7.0).all()
    host = ExpertSlots(gpus.memory.moe, gpus.memory.placement, 0, gpus.segments[0])
    assert not (host.gate_up[0, 0] == 7.0).any()
    # Each was uploaded, and the upload waited for, before its handle went out.
    calls = [call[0] for call in gpus.cuda.log]
    assert calls.count("cudaMalloc") == calls.count("cudaIpcOpenMemHandle") == NUM_WORKERS
    assert calls.index("synchronize") < calls.index("cudaIpcGetMemHandle")


def test_weights_of_a_device_out_of_reach_come_from_the_host(gpus, background) -> None:
    gpus.load_segments()
    peers = (0, 3)
    slots = background(gpus.share, 0, peers).result(20)  # does not wait for worker 1
    check_primaries(gpus, slots)
    host = ExpertSlots(gpus.memory.moe, gpus.memory.placement, 1, gpus.segments[1])
    assert slots[1].gate_up.data_ptr() == host.gate_up.data_ptr()
    assert not [call for call in gpus.cuda.log if call[0] == "cudaIpcOpenMemHandle"]


def test_nothing_is_uploaded_before_the_segments_are_loaded(gpus, background) -> None:
    run = background(gpus.share, 0, (0, 3))
    with pytest.raises(AssertionError, match="still running"):
        run.result(0.2)
    assert not [call for call in gpus.cuda.log if call[0] == "synchronize"]
    gpus.load_segments()
    check_primaries(gpus, run.result(20))


@pytest.mark.parametrize(("worker", "who"), [(None, "the starting process"), (1, "worker 1")])
def test_who_did_not_load_is_named(make_memory, worker, who) -> None:
    memory = make_memory(MOE, num_workers=NUM_WORKERS, startup_timeout_s=0.05)
    with pytest.raises(PeerLost, match=f"{who} did not load its weights in 0.05 s"):
        wait_loaded(memory, worker)
    note_loaded(memory, worker)
    wait_loaded(memory, worker)


def test_full_device_memory_is_a_named_error(gpus) -> None:
    gpus.library.failing["cudaMalloc"] = 2
    gpus.load_segments()
    with pytest.raises(CudaError, match="cudaMalloc failed with status 2"):
        gpus.share(0)


def test_workers_take_gpus_in_turns() -> None:
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    assert choose_devices(2, cuda) == [0, 1]
    assert choose_devices(5, cuda) == [0, 1, 0, 1, 0]
    cuda.is_available = lambda: False
    with pytest.raises(ConfigError, match="afore doctor"):
        choose_devices(2, cuda)


def test_the_tiers_memory_is_registered_for_copies(gpus, caplog) -> None:
    gpus.cuda.set_device = lambda index: gpus.cuda.log.append(("set_device", index))
    runtime = CudaRuntime(gpus.library)
    device = open_device(gpus.memory, 1, runtime, gpus.cuda)
    assert device.torch_device == torch.device("cuda", 1)
    set_device, register = gpus.cuda.log
    assert set_device == ("set_device", 1)
    name, address, num_bytes, _ = register
    assert name == "cudaHostRegister"
    assert address == torch.from_numpy(gpus.memory.arrays["state"]).data_ptr()
    assert num_bytes == gpus.memory.segment.num_bytes
    gpus.library.failing["cudaHostRegister"] = 801
    with caplog.at_level(logging.WARNING):
        open_device(gpus.memory, 1, runtime, gpus.cuda)
    assert "cudaHostRegister failed with status 801" in caplog.text
