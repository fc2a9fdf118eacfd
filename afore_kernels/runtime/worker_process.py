"""A CPU worker process: builds an `FfnWorker` and runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from afore_kernels.runtime.collectives import Collectives
from afore_kernels.runtime.devices.cpu import InlineStream, ThreadStream
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.processes import ChildContext
from afore_kernels.runtime.timeline import Track
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
    timeout_s = tier.reply_timeout_s
    migration_stream = ThreadStream("migration-stream", timeout_s)
    migrator = Migrator(
        worker,
        memory.placement,
        slots,
        migration_stream,
        Track(memory, f"worker {worker} migration"),
    )
    collectives = Collectives(
        worker, tier.num_workers, context.store_port, _COLLECTIVE_TIMEOUTS * timeout_s
    )
    model_stream = InlineStream(timeout_s)
    ffn = FfnWorker(worker, memory, slots[worker], migrator, model_stream, collectives)
    report_ready()
    with torch.inference_mode():
        ffn.run()
