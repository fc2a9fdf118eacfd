"""A CPU worker process: builds an `FfnWorker` and runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from afore_kernels.runtime.collectives import Collectives
from afore_kernels.runtime.devices.cpu import CpuDevice
from afore_kernels.runtime.executors.host import HostExecutor
from afore_kernels.runtime.lanes import NUM_LANES
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.processes import ChildContext
from afore_kernels.runtime.timeline import Track
from afore_kernels.runtime.transports.local import LocalTransport
from afore_kernels.runtime.weights import ExpertSlots
from afore_kernels.runtime.worker import FfnWorker

_COLLECTIVE_TIMEOUTS = 2
"""A worker may wait one reply timeout for inputs before it joins the others in a collective."""


def main(context: ChildContext, report_ready: Callable[[], None]) -> None:
    """Build the worker of `context` and run it until the tier stops."""
    memory, worker = context.memory, context.worker
    tier = memory.tier
    torch.set_num_threads(tier.threads_per_worker)
    slots = [
        ExpertSlots(memory.moe, memory.placement, w, segment)
        for w, segment in enumerate(context.weight_segments)
    ]
    device = CpuDevice(tier.reply_timeout_s)
    migration_track = Track(memory, f"worker {worker} migration")
    migrator = Migrator(worker, memory.placement, slots, device, migration_track)
    collectives = Collectives(
        worker,
        tier.num_workers,
        context.store_port,
        _COLLECTIVE_TIMEOUTS * tier.reply_timeout_s,
        scatters=tier.reduction == "reduce_scatter",
    )
    executor = HostExecutor(worker, memory.moe, memory.placement, slots[worker], NUM_LANES)
    ffn = FfnWorker(
        worker,
        memory,
        executor,
        migrator,
        device,
        collectives,
        PlanReader(memory, worker),
        LocalTransport(memory),
    )
    report_ready()
    with torch.inference_mode():
        ffn.run()
