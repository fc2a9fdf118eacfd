"""A worker process: builds an `FfnWorker` on its device and runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from afore_kernels.runtime.collectives import Collectives
from afore_kernels.runtime.devices import Device
from afore_kernels.runtime.devices.cpu import CpuDevice
from afore_kernels.runtime.executors import Executor
from afore_kernels.runtime.executors.host import HostExecutor
from afore_kernels.runtime.lanes import NUM_LANES, TargetBuffers
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.processes import ChildContext
from afore_kernels.runtime.timeline import Track
from afore_kernels.runtime.transports.local import LocalTransport
from afore_kernels.runtime.weights import ExpertSlots
from afore_kernels.runtime.worker import FfnWorker

_COLLECTIVE_TIMEOUTS = 2
"""A worker may wait one reply timeout for inputs before it joins the others in a collective."""


class Equipment(NamedTuple):
    """What depends on the device: itself, all workers' weights, the executor, the collectives."""

    device: Device
    slots: list[ExpertSlots]
    executor: Executor
    backend: str


def main(context: ChildContext, report_ready: Callable[[], None]) -> None:
    """Build the worker of `context` and run it until the tier stops."""
    memory, worker = context.memory, context.worker
    tier = memory.tier
    torch.set_num_threads(tier.threads_per_worker)
    device, slots, executor, backend = (
        _equip_cuda(context) if tier.device == "cuda" else _equip_cpu(context)
    )
    migration_track = Track(memory, f"worker {worker} migration")
    collectives = Collectives(
        worker,
        tier.num_workers,
        context.store_port,
        _COLLECTIVE_TIMEOUTS * tier.reply_timeout_s,
        backend=backend,
        scatters=tier.reduction == "reduce_scatter",
    )
    ffn = FfnWorker(
        worker,
        memory,
        executor,
        TargetBuffers(memory, worker, device, executor),
        Migrator(worker, memory.placement, slots, device, migration_track),
        device,
        collectives,
        PlanReader(memory, worker),
        LocalTransport(memory),
    )
    report_ready()
    with torch.inference_mode():
        ffn.run()


def _equip_cpu(context: ChildContext) -> Equipment:
    memory, worker = context.memory, context.worker
    slots = [
        ExpertSlots(memory.moe, memory.placement, w, segment)
        for w, segment in enumerate(context.weight_segments)
    ]
    executor = HostExecutor(worker, memory.moe, memory.placement, slots[worker], NUM_LANES)
    return Equipment(CpuDevice(memory.tier.reply_timeout_s), slots, executor, "gloo")


def _equip_cuda(context: ChildContext) -> Equipment:
    # A CPU tier needs neither Triton nor CUDA.
    from afore_kernels.runtime.device_weights import share_slots
    from afore_kernels.runtime.worker_cuda import choose_devices, make_executor, open_device

    memory, worker = context.memory, context.worker
    peers = choose_devices(memory.tier.num_workers)
    device = open_device(memory, peers[worker])
    slots = share_slots(memory, worker, context.weight_segments, device, peers)
    executor = make_executor(memory, worker, slots[worker], device)
    # NCCL takes one worker per GPU.
    return Equipment(device, slots, executor, "nccl" if len(set(peers)) == len(peers) else "gloo")
