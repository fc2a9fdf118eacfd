"""`FfnWorker` on threads: the order of Figure 7, and one plan per target everywhere (rule 4)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from afore_kernels.config import Activation
from afore_kernels.errors import InfeasiblePlanError, PeerLost
from afore_kernels.partition.demand import count_demand
from afore_kernels.plan import Plan, Target
from afore_kernels.runtime.collectives import Collectives
from afore_kernels.runtime.devices import Stream
from afore_kernels.runtime.devices.cpu import CpuDevice
from afore_kernels.runtime.executors.host import HostExecutor
from afore_kernels.runtime.lanes import NUM_LANES, TargetBuffers
from afore_kernels.runtime.memory import PLAN_BELL, TierMemory, deadline_after
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.shared import advance
from afore_kernels.runtime.timeline import Stage, Track, read_events
from afore_kernels.runtime.transports.local import OK, LocalTransport
from afore_kernels.runtime.weights import ExpertSlots, RandomWeights
from afore_kernels.runtime.worker import FfnWorker
from afore_kernels.testing import make_routing, random_plan
from tests.runtime.dense_reference import reference_layer

NUM_WORKERS, NUM_EXPERTS, NUM_TOKENS, TILE_M = 3, 7, 24, 4
MOE = {
    "num_layers": 1,
    "num_experts": NUM_EXPERTS,
    "top_k": 2,
    "hidden_size": 8,
    "intermediate_size": 6,
    "tile_m": TILE_M,
    "activation": Activation(kind="none"),
}


class ThreadCollectives(Collectives):
    """The collectives of workers that are threads of one process."""

    def __init__(self, worker: int, shared: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._worker = worker
        self._shared = shared
        self._barrier = barrier

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self._worker] = mine.clone()
        self._barrier.wait(20)
        all_of_them = list(self._shared)
        self._barrier.wait(20)
        return all_of_them

    def all_gather(self, stream: Stream, blocks: torch.Tensor, **names: object) -> None:
        blocks.copy_(torch.stack(self._exchange(blocks[self._worker])))

    def reduce(self, stream: Stream, output: torch.Tensor, **names: object) -> None:
        output.copy_(torch.stack(self._exchange(output)).sum(0))


class FallsBackAlone(FfnWorker):
    """Breaks rule 4: decides for itself to run a target without replicas."""

    def _read_plan(self) -> None:
        super()._read_plan()
        assert self._pending is not None
        alone = self._pending.plan.without_replicas()
        size = self._executor.stage(self._pending.lane.index, alone)
        self._pending = self._pending._replace(plan=alone, size=size)


class Threads:
    """Workers on threads, and the ends of the tier that feed them."""

    def __init__(
        self, memory: TierMemory, kinds: list[type[FfnWorker]], background: Callable[..., object]
    ) -> None:
        self.memory = memory
        self.weights = RandomWeights(memory.moe, integer=True)
        self.transport = LocalTransport(memory)
        placement = memory.placement
        segments = [
            ExpertSlots.create_segment(memory.moe, placement, w) for w in range(NUM_WORKERS)
        ]
        slots = [
            ExpertSlots(memory.moe, placement, w, segment) for w, segment in enumerate(segments)
        ]
        for one in slots:
            one.gate_up[:, one.num_primaries :] = torch.nan  # never read before a copy arrived
            one.load_primaries(self.weights)
        shared = [torch.empty(0)] * NUM_WORKERS
        barrier = threading.Barrier(NUM_WORKERS)
        self.runs = []
        for w, kind in enumerate(kinds):
            track = Track(memory, f"worker {w} migration")
            device = CpuDevice(20)
            executor = HostExecutor(w, memory.moe, placement, slots[w], NUM_LANES)
            worker = kind(
                w,
                memory,
                executor,
                TargetBuffers(memory, w, device, executor),
                Migrator(w, placement, slots, device, track),
                device,
                ThreadCollectives(w, shared, barrier),
                PlanReader(memory, w),
                LocalTransport(memory),
            )
            self.runs.append(background(worker.run))

    def publish(self, *plans: Plan) -> None:
        """Publish plans as the scheduler does, all at once."""
        records = self.memory.arrays["plan_records"]
        for plan in plans:
            records[plan.sequence % len(records)] = self.memory.plan_layout.pack(plan)
        published = self.memory.arrays["plans_published"]
        advance(published, 0, plans[-1].sequence + 1, self.memory.bell(PLAN_BELL))

    def submit(self, plan: Plan, inputs: tuple[torch.Tensor, ...]) -> None:
        """Send rank 0's input of a plan's target."""
        rows = self.transport.input_rows(0, plan.sequence, NUM_TOKENS)
        for row, tensor in zip(rows, inputs):
            row.copy_(tensor)
        self.transport.send(0, plan.sequence, plan.target, NUM_TOKENS)

    def result(self, plan: Plan) -> torch.Tensor:
        """Wait for rank 0's rows."""
        assert self.transport.wait_reply(0, plan.sequence, deadline_after(20)) == OK
        return self.transport.output_rows(0, plan.sequence, NUM_TOKENS).clone()

    def expected(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Dense reference."""
        return reference_layer(self.memory.moe, self.weights, 0, inputs)


def make_target(memory: TierMemory, sequence: int) -> tuple[Plan, tuple[torch.Tensor, ...]]:
    """A random plan whose replicas are all copied anew, and its input."""
    generator = torch.Generator().manual_seed(sequence)
    expert_ids, _ = make_routing(NUM_TOKENS, NUM_EXPERTS, 2, skew=1.0, seed=sequence)
    hidden = torch.randint(-2, 3, (NUM_TOKENS, 8), generator=generator).float()
    routing_weights = torch.randint(1, 4, expert_ids.shape, generator=generator).float()
    demand = count_demand(expert_ids.numpy(), NUM_EXPERTS)
    plan = random_plan(
        demand, memory.placement, TILE_M, sequence, rank_tokens=[NUM_TOKENS], sequence=sequence
    )
    plan = replace(plan, target=Target(sequence, 0, 0))
    copy_all = (plan.slot_expert >= 0).astype(np.uint8)
    return replace(plan, slot_copy=copy_all), (hidden, expert_ids, routing_weights)


def check_results(threads: Threads, num_targets: int) -> None:
    """Run targets whose copies overwrite each other's slots, an empty one between any two."""
    for i in range(num_targets):
        plan, inputs = make_target(threads.memory, 2 * i)
        threads.publish(plan)
        threads.submit(plan, inputs)
        assert torch.equal(threads.result(plan), threads.expected(inputs)), plan
        idle = replace(
            plan.without_replicas(),
            sequence=2 * i + 1,
            demand=np.zeros_like(plan.demand),
            rank_tokens=np.zeros_like(plan.rank_tokens),
        )
        threads.publish(idle)


def test_every_worker_executes_the_published_plan(make_memory, background) -> None:  # type: ignore[no-untyped-def]
    memory = make_memory(MOE, num_workers=NUM_WORKERS, num_ranks=1)
    check_results(Threads(memory, [FfnWorker] * NUM_WORKERS, background), 10)


def test_a_worker_that_falls_back_alone_is_noticed(make_memory, background) -> None:  # type: ignore[no-untyped-def]
    memory = make_memory(MOE, num_workers=NUM_WORKERS, num_ranks=1)
    threads = Threads(memory, [FfnWorker, FallsBackAlone, FfnWorker], background)
    with pytest.raises(AssertionError):
        check_results(threads, 10)


def test_next_plan_is_read_and_its_copies_submitted_before_the_partition(  # type: ignore[no-untyped-def]
    make_memory, background
) -> None:
    """Figure 7: R and S of t+1 come before the partition of t."""
    memory = make_memory(MOE, num_workers=NUM_WORKERS, num_ranks=1)
    threads = Threads(memory, [FfnWorker] * NUM_WORKERS, background)
    first, inputs = make_target(memory, 0)
    second, _ = make_target(memory, 1)
    used = first.slot_pairs > 0
    second.slot_copy[used] = 0
    second.slot_expert[used] = -1
    second.slot_pairs[used] = 0
    threads.publish(first)
    threads.publish(second)
    threads.submit(first, inputs)
    assert torch.equal(threads.result(first), threads.expected(inputs))
    starts = {(e.track, e.stage, e.sequence): e.start_ns for e in read_events(memory)}
    for w in range(NUM_WORKERS):
        track = f"worker {w} model"
        submitted = starts[track, Stage.COPIES_SUBMITTED, 1]
        assert submitted < starts[track, Stage.PARTITION, 0]


def test_copy_into_a_slot_in_use_is_refused(make_memory, background) -> None:  # type: ignore[no-untyped-def]
    memory = make_memory(MOE, num_workers=NUM_WORKERS, num_ranks=1)
    threads = Threads(memory, [FfnWorker] * NUM_WORKERS, background)
    first, _ = make_target(memory, 0)
    assert (first.slot_pairs > 0).any()
    # At once: a worker that waits for the first's input reads no plan meanwhile.
    threads.publish(first, replace(first, sequence=1))
    with pytest.raises(InfeasiblePlanError, match="copies into worker"):
        threads.runs[0].result(20)


def test_stop_ends_the_worker(make_memory, background) -> None:  # type: ignore[no-untyped-def]
    memory = make_memory(MOE, num_workers=NUM_WORKERS, num_ranks=1)
    threads = Threads(memory, [FfnWorker] * NUM_WORKERS, background)
    reader = PlanReader(memory, 0)
    assert not reader.is_published()
    memory.stop()
    for run in threads.runs:
        with pytest.raises(PeerLost, match="tier was closed"):
            run.result(20)
