"""Ways from the attention ranks' demand over a planner to the plan in every worker.

Ours is the tier's mailbox, scheduler process and plan ring. The alternatives put messages in place
of the shared memory and change nothing else: the same records, checked alike at both ends, and the
same compiled planner.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
from numba import int64, typeof

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import PeerLost
from afore_kernels.plan import Int32Array, Plan, Target
from afore_kernels.runtime import scheduler
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.mailbox import DemandWriter, Mailbox, write_entry
from afore_kernels.runtime.memory import TierMemory, deadline_after
from afore_kernels.runtime.placement import Candidate, LayerState, layer_state
from afore_kernels.runtime.plan_ring import PlanReader, PlanWriter, check_order, write_plan
from afore_kernels.runtime.planner import Limits
from afore_kernels.runtime.processes import ChildContext
from afore_kernels.runtime.scheduler import Bounds, Buffers, collect_demand, plan_target
from afore_kernels.runtime.shared import advance, compiled
from bench.channels import TIMEOUT_S, Channel

CLOSE_TIMEOUT_S = 5.0

Post = Callable[[int, int, Target, int, Int32Array], None]


class Link(Protocol):
    """One way from the poster over a planner to the readers."""

    def poster(self) -> Post:
        """Open the attention ranks' end: `post(rank, sequence, target, num_tokens, demand)`."""

    def reader(self, worker: int) -> Callable[[], Plan]:
        """Open a worker's end: the call waits for the next plan and returns it."""


class SharedMemoryLink:
    """The tier's own mailbox, scheduler process and plan ring."""

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory

    def poster(self) -> Post:
        """Open the attention ranks' end."""
        writers = [DemandWriter(self._memory, rank) for rank in range(self._memory.tier.num_ranks)]

        def post(
            rank: int, sequence: int, target: Target, num_tokens: int, demand: Int32Array
        ) -> None:
            deadline_ns = deadline_after(TIMEOUT_S)
            writers[rank].post(sequence, target, num_tokens, demand, deadline_ns)

        return post

    def reader(self, worker: int) -> Callable[[], Plan]:
        """Open a worker's end."""
        plan_reader = PlanReader(self._memory, worker)
        return lambda: plan_reader.read(deadline_after(TIMEOUT_S))


def serve_plans(memory: TierMemory, ready: Connection) -> None:
    """Be the tier's scheduler until the tier stops or the process that forked this one is gone."""

    def watch_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        memory.stop()

    threading.Thread(target=watch_parent, daemon=True).start()
    with suppress(PeerLost):
        scheduler.main(ChildContext(memory, -1, [], 0), lambda: ready.send(True))


@contextmanager
def running_scheduler(memory: TierMemory) -> Iterator[None]:
    """Run the tier's scheduler process on `memory`."""
    context = multiprocessing.get_context("fork")
    ready, ready_end = context.Pipe(duplex=False)
    process = context.Process(target=serve_plans, args=(memory, ready_end), daemon=True)
    process.start()
    ready_end.close()
    try:
        if not ready.poll(memory.tier.startup_timeout_s):
            raise TimeoutError("the scheduler is not ready")
        ready.recv()
        yield
    finally:
        memory.stop()
        process.join(CLOSE_TIMEOUT_S)
        process.kill()
        process.join()
        ready.close()


@compiled
def plan_posted(mailbox, ring, states, candidate, buffers, limits, cost, bounds, sequence):  # type: ignore[no-untyped-def]
    """Do what `run_scheduler` does for one target between its waits; returns the rejection."""
    for rank in range(buffers.rank_tokens.size):
        advance(mailbox.posted, rank, sequence + 1, mailbox.bell)
    num_layers = states.slot_expert.shape[0]
    rejection, rank = collect_demand(mailbox, buffers, bounds, sequence, num_layers)
    if rejection == 0:
        plan_target(states, candidate, buffers, limits, cost, bounds, sequence)
        write_plan(
            ring,
            sequence,
            buffers.target,
            limits.tile_m,
            rejection,
            rank,
            buffers.demand,
            buffers.rank_tokens,
            layer_state(states, buffers.target[1]).slot_expert,
            buffers.slot_pairs,
            buffers.slot_copy,
        )
    return rejection


class MessageLink:
    """A channel from each rank to a planner process and one from there to each worker."""

    def __init__(self, moe: MoEConfig, tier: TierConfig, open_channel: Callable[[], Channel]):
        self._moe, self._tier = moe, tier
        self._demand: list[Channel] = [open_channel() for _ in range(tier.num_ranks)]
        self._plans: list[Channel] = [open_channel() for _ in range(tier.num_workers)]

    def poster(self) -> Post:
        """Open the attention ranks' end."""
        mailbox = Mailbox.of(TierMemory.create(self._moe, self._tier))  # private: builds entries
        entries = mailbox.entries.view(np.uint8)

        def post(
            rank: int, sequence: int, target: Target, num_tokens: int, demand: Int32Array
        ) -> None:
            write_entry(mailbox, rank, sequence, *target, num_tokens, demand)
            self._demand[rank].send(entries[rank, sequence % entries.shape[1]])

        return post

    def planner(self) -> Callable[[int], int]:
        """Open the planner's end: `plan(sequence)` serves one target; returns its planning ns."""
        memory = TierMemory.create(self._moe, self._tier)  # private: holds the records it is sent
        mailbox, ring = Mailbox.of(memory), PlanWriter.of(memory)
        entries, records = mailbox.entries.view(np.uint8), memory.arrays["plan_records"]
        arguments = (
            mailbox,
            ring,
            LayerState.initial(memory.placement, self._moe.num_layers),
            Candidate.allocate(memory.placement),
            Buffers.allocate(memory),
            Limits.from_config(self._moe, self._tier),
            CostModel.from_config(self._tier),
            Bounds(self._moe.top_k, self._tier.max_tokens_per_rank, 0, 0, False, False),
        )
        plan_posted.compile((*(typeof(argument) for argument in arguments), int64))

        def plan(sequence: int) -> int:
            for rank, channel in enumerate(self._demand):
                channel.receive(entries[rank, sequence % entries.shape[1]])
            start_ns = time.monotonic_ns()
            if plan_posted(*arguments, sequence) != 0:
                raise RuntimeError(f"the demand of sequence {sequence} was rejected")
            planned_ns = time.monotonic_ns() - start_ns
            for channel in self._plans:
                channel.send(records[sequence % len(records)])
            return planned_ns

        return plan

    def reader(self, worker: int) -> Callable[[], Plan]:
        """Open a worker's end."""
        layout = TierMemory.create(self._moe, self._tier).plan_layout
        record = np.zeros(layout.record_bytes, np.uint8)
        sequence = 0

        def read() -> Plan:
            nonlocal sequence
            self._plans[worker].receive(record)
            plan = layout.unpack(record)
            check_order(plan, sequence)
            sequence += 1
            return plan

        return read

    def close(self) -> None:
        """Release this process's ends of the channels."""
        for channel in (*self._demand, *self._plans):
            channel.close()
