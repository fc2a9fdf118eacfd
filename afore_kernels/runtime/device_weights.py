"""Weights on GPUs: every worker's slots in the memory of its device, opened by the other workers.

A worker loads its primaries from the segment that the starting process filled, and shares its
memory by handle. Nobody writes a primary after that, so copies from it need no event of its worker:
the counters below order them behind the load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from afore_kernels.config import TierConfig
from afore_kernels.errors import PeerLost
from afore_kernels.runtime.devices.cuda import CudaDevice
from afore_kernels.runtime.devices.cuda_memory import DeviceMemory
from afore_kernels.runtime.memory import WEIGHTS_BELL, TierMemory, deadline_after
from afore_kernels.runtime.shared import Field, Segment, advance, counters
from afore_kernels.runtime.weights import ExpertSlots, weight_bytes

HANDLE_BYTES = 64


def fields(tier: TierConfig) -> dict[str, Field]:
    """Shared fields: who has loaded its primaries, the starting process last; memory handles."""
    return {
        "primaries_loaded": counters(tier.num_workers + 1),
        "weight_handles": Field(np.uint8, (tier.num_workers, HANDLE_BYTES)),
    }


def note_loaded(memory: TierMemory, worker: int | None = None) -> None:
    """Tell the others that the primaries of `worker`, or all segments, are loaded."""
    index = memory.tier.num_workers if worker is None else worker
    advance(memory.arrays["primaries_loaded"], index, 1, memory.bell(WEIGHTS_BELL))


def wait_loaded(memory: TierMemory, worker: int | None = None) -> None:
    """Wait until the primaries of `worker`, or all segments, are loaded.

    Raises:
        PeerLost: if they are not within `startup_timeout_s`.
    """
    index = memory.tier.num_workers if worker is None else worker
    deadline_ns = deadline_after(memory.tier.startup_timeout_s)
    if not memory.wait("primaries_loaded", index, 1, WEIGHTS_BELL, deadline_ns):
        who = "the starting process" if worker is None else f"worker {worker}"
        raise PeerLost(f"{who} did not load its weights in {memory.tier.startup_timeout_s} s")


def share_slots(
    memory: TierMemory,
    worker: int,
    segments: Sequence[Segment],
    device: CudaDevice,
    peers: Sequence[int],
) -> list[ExpertSlots]:
    """Load this worker's weights into its device, and open everybody's.

    Args:
        memory: the tier's.
        worker: this worker.
        segments: all workers' weights in host memory.
        device: of this worker.
        peers: index of each worker's device.

    Returns:
        The slots of every worker, index = worker; of one whose device is out of reach the host
        segment, from which copies come instead.

    Raises:
        PeerLost: if another worker does not load its weights in time.
        CudaError: if memory cannot be allocated, shared or opened.
    """
    moe, placement = memory.moe, memory.placement
    sizes = [weight_bytes(moe, placement, w) for w in range(memory.tier.num_workers)]
    own = DeviceMemory.allocate(sizes[worker], device)
    wait_loaded(memory)
    own.tensor.copy_(torch.frombuffer(segments[worker].buffer, dtype=torch.uint8)[: sizes[worker]])
    device.cuda.synchronize(device.torch_device)
    memory.arrays["weight_handles"][worker] = np.frombuffer(own.share(), np.uint8)
    note_loaded(memory, worker)
    direct = device.enable_peers(peers).direct
    slots = []
    for w, peer in enumerate(peers):
        storage: torch.Tensor | Segment = segments[w]
        if w == worker:
            storage = own.tensor
        elif peer in direct:
            wait_loaded(memory, w)
            handle = memory.arrays["weight_handles"][w].tobytes()
            storage = DeviceMemory.open(handle, sizes[w], device).tensor
        slots.append(ExpertSlots(moe, placement, w, storage))
    return slots
