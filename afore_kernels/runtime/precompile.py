"""Compile everything a tier compiles, by running a scheduler once on a memory of its own.

The launcher does this before it forks, so that no two processes compile the same function; an
install script may do it too (`python -m afore_kernels.runtime.precompile`), so that the first tier
starts from numba's cache.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import PeerLost
from afore_kernels.partition.demand import count_demand
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.partition.pack import partition_pairs
from afore_kernels.plan import Target
from afore_kernels.runtime import scheduler
from afore_kernels.runtime.admission import Admission
from afore_kernels.runtime.mailbox import DemandWriter
from afore_kernels.runtime.memory import TierMemory, deadline_after
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.processes import ChildContext
from afore_kernels.runtime.timeline import Stage, Track
from afore_kernels.runtime.transports.local import OK, LocalTransport

_TIMEOUT_S = 300.0


def precompile() -> None:
    """Plan one target in this process, through mailbox, scheduler, plan ring and transport."""
    moe = MoEConfig(num_layers=1, num_experts=2, top_k=1, hidden_size=1, intermediate_size=1)
    memory = TierMemory.create(moe, TierConfig(num_workers=1, max_tokens_per_rank=1))
    is_ready = threading.Event()

    def run_scheduler() -> None:
        with suppress(PeerLost):  # the stop below
            scheduler.main(ChildContext(memory, -1, [], 0), is_ready.set)

    thread = threading.Thread(target=run_scheduler, name="precompile", daemon=True)
    thread.start()
    is_ready.wait(_TIMEOUT_S)
    target, deadline_ns = Target(0, 0, 0), deadline_after(_TIMEOUT_S)
    try:
        sequence = Admission(memory).admit(0)
        expert_ids = np.zeros((1, 1), np.int32)
        count_demand(expert_ids.astype(np.int64), moe.num_experts)
        demand = count_demand(expert_ids, moe.num_experts)
        DemandWriter(memory, 0).post(sequence, target, 1, demand, deadline_ns)
        reader = PlanReader(memory, 0)
        reader.is_published()
        plan = reader.read(deadline_ns)
        intervals = pair_intervals(plan, memory.placement, 0)
        partition_pairs(expert_ids, intervals, intervals.tile_schedule(plan.tile_m))
        transport = LocalTransport(memory)
        transport.send(0, sequence, target, 1)
        transport.wait_input(0, sequence, plan.target, 1, deadline_ns)
        transport.reply(0, 0, sequence, OK)
        transport.wait_reply(0, sequence, deadline_ns)
        Track(memory, "worker 0 model").record(Stage.REPLY, sequence, 0, 0, 0)
    finally:
        memory.stop()
        thread.join(_TIMEOUT_S)
        memory.segment.close()


if __name__ == "__main__":
    precompile()
