"""Workers of a tier on a checking device: their own code, in random legal orders.

The ranks and the scheduler are hosts that keep the protocol; flags in shared memory, and the
collectives, are what orders workers among each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from afore_kernels.config import Activation, MoEConfig, TierConfig
from afore_kernels.partition.demand import count_demand
from afore_kernels.plan import Plan, PrimaryPlacement, Rejection, Target
from afore_kernels.runtime.collectives import Collectives
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.devices import Buffer
from afore_kernels.runtime.devices.checking import CheckingDevice, CheckingEvent, CheckingStream
from afore_kernels.runtime.devices.checking_worker import CheckingWorker
from afore_kernels.runtime.devices.clocks import Race
from afore_kernels.runtime.executors import Executor
from afore_kernels.runtime.executors.host import HostExecutor
from afore_kernels.runtime.lanes import TargetBuffers
from afore_kernels.runtime.memory import PLAN_BELL, TierMemory, deadline_after
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.planner import Limits, plan_microbatch
from afore_kernels.runtime.shared import advance, count
from afore_kernels.runtime.timeline import Track
from afore_kernels.runtime.transports.local import OK, LocalTransport, Outcome, ReplyStatus
from afore_kernels.runtime.weights import ExpertSlots, RandomWeights
from afore_kernels.runtime.worker import FfnWorker
from afore_kernels.testing import make_routing
from tests.runtime.dense_reference import reference_layer

NUM_EXPERTS, NUM_TOKENS, TOP_K, TILE_M, IN_FLIGHT = 8, 96, 2, 16, 3
REDUNDANT_SLOTS = 1
NUM_LANES = 2  # fewer than targets in flight, so that lanes are waited for
FREE_COPIES = CostModel(1.0, 0.0, 0.0, 0.0)
MOE = MoEConfig(
    num_layers=1,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    hidden_size=4,
    intermediate_size=4,
    tile_m=TILE_M,
    activation=Activation(kind="none"),
)
WHOLE_MOE = replace(MOE, num_layers=2, shared_intermediate_size=6, has_bias=True)


class CheckedTarget(NamedTuple):
    """A plan, its input, what comes out, [num_tokens, H], and whether it does."""

    plan: Plan
    hidden: torch.Tensor
    expert_ids: torch.Tensor
    routing_weights: torch.Tensor
    expected: torch.Tensor
    outcome: Outcome = OK

    def rejected(self) -> CheckedTarget:
        """The target as the scheduler rejects it: nobody runs it."""
        plan = self.plan
        nothing = replace(
            plan.without_replicas(),
            demand=np.zeros_like(plan.demand),
            rank_tokens=np.zeros_like(plan.rank_tokens),
            rejection=Rejection.BAD_DEMAND,
            rejected_rank=0,
        )
        return self._replace(plan=nothing, outcome=Outcome(ReplyStatus.BAD_DEMAND, 0))

    def mismatched(self) -> CheckedTarget:
        """The target with an input that is not the one it was planned for."""
        expert_ids = (self.expert_ids + 1) % NUM_EXPERTS
        outcome = Outcome(ReplyStatus.COUNT_MISMATCH)
        return self._replace(expert_ids=expert_ids, outcome=outcome)


def make_targets(
    num_workers: int, num_targets: int, seed: int, moe: MoEConfig = MOE
) -> list[CheckedTarget]:
    """Targets under the planner's own plans, its layers in turn: slots are copied, reused, rebound.

    With an odd seed a copy of every second target is not used by the target itself, as may happen
    to plans made from the previous step's demand, but by the next.
    """
    placement = PrimaryPlacement(NUM_EXPERTS, num_workers, REDUNDANT_SLOTS)
    states, targets = [LayerState.initial(placement)] * moe.num_layers, []
    for sequence in range(num_targets):
        layer = sequence % moe.num_layers
        state = states[layer]
        generator = torch.Generator().manual_seed(1000 * seed + sequence)
        ids, _ = make_routing(NUM_TOKENS, NUM_EXPERTS, TOP_K, skew=4.0, seed=1000 * seed + sequence)
        # Two targets in a row prefer the same experts, so replicas are used again.
        ids = (ids + 3 * (sequence // 2)) % NUM_EXPERTS
        hidden = torch.randint(-2, 3, (NUM_TOKENS, MOE.hidden_size), generator=generator).float()
        routing_weights = torch.randint(1, 4, ids.shape, generator=generator).float()
        demand = count_demand(ids.numpy(), NUM_EXPERTS)
        is_protected = (state.slot_last_use == sequence - 1) & (state.slot_last_use >= 0)
        planned = plan_microbatch(
            demand,
            state,
            placement,
            Limits(TILE_M, 2 * num_workers, 0, True),
            FREE_COPIES,
            sequence=sequence,
            is_protected=is_protected.astype(np.uint8),
        )
        if seed % 2 and sequence % 2 == 0:
            planned.slot_pairs[planned.slot_copy == 1] = 0
        states[layer] = planned.state
        plan = Plan(
            Target(sequence, layer, 0),
            sequence,
            TILE_M,
            demand,
            np.array([NUM_TOKENS], np.int32),
            planned.slot_expert,
            planned.slot_pairs,
            planned.slot_copy,
        )
        plan.validate(placement)
        inputs = hidden, ids, routing_weights
        expected = reference_layer(moe, RandomWeights(moe, integer=True), layer, inputs)
        targets.append(CheckedTarget(plan, hidden, ids.int(), routing_weights, expected))
    return targets


class CheckedPlans(PlanReader):
    """The plan ring, whose published counter orders the reader behind the scheduler."""

    def __init__(self, memory: TierMemory, worker: int, device: CheckingDevice) -> None:
        super().__init__(memory, worker)
        self._device = device

    def is_published(self) -> bool:
        if not super().is_published():
            return False
        self._device.acquire(("plan", self.next_sequence))
        return True

    def read(self, deadline_ns: int) -> Plan:
        sequence = self.next_sequence
        self._device.wait_until(super().is_published, f"plan {sequence}")
        self._device.acquire(("plan", sequence))
        return super().read(deadline_ns)


class CheckedTransport(LocalTransport):
    """Inputs and replies, whose counters order worker and rank."""

    def __init__(self, memory: TierMemory, device: CheckingDevice) -> None:
        super().__init__(memory)
        self._device = device

    def wait_input(self, rank: int, sequence: int, *rest: object) -> Outcome:
        ready = self._memory.arrays["input_ready"]
        index = rank * self._depth + sequence % self._depth
        self._device.wait_until(lambda: count(ready, index) > sequence, f"input {sequence}")
        self._device.acquire(("input", sequence))
        return super().wait_input(rank, sequence, *rest)  # type: ignore[arg-type]

    def reply(self, worker: int, rank: int, sequence: int, outcome: Outcome) -> None:
        self._device.release(("reply", worker, sequence))
        super().reply(worker, rank, sequence, outcome)


class CheckedCollectives(Collectives):
    """Collectives on the workers' model streams: everybody publishes, then waits for everybody.

    Args:
        worker: this worker.
        rounds: the collectives of all workers so far: tensors and events by worker.
    """

    def __init__(self, worker: int, num_workers: int, rounds: Rounds) -> None:
        self._worker = worker
        self._num_workers = num_workers
        self._rounds = rounds
        self._next = 0

    def all_gather(self, stream, blocks, *, reads=(), writes=()) -> None:
        def finish(parts: list[torch.Tensor]) -> None:
            blocks.copy_(torch.stack(parts))

        self._exchange(stream, lambda: blocks[self._worker], finish, reads, writes)

    def reduce(self, stream, output, *, reads=(), writes=()) -> None:
        def finish(parts: list[torch.Tensor]) -> None:
            output.copy_(torch.stack(parts).sum(0))

        self._exchange(stream, lambda: output, finish, reads, writes)

    def _exchange(
        self,
        stream: CheckingStream,
        mine: Callable[[], torch.Tensor],
        finish: Callable[[list[torch.Tensor]], None],
        reads: list[Buffer],
        writes: list[Buffer],
    ) -> None:
        events, tensors = self._rounds[self._next]
        self._next += 1

        def publish() -> None:
            tensors[self._worker] = mine().clone()

        stream.submit(publish, reads=reads)
        stream.record_event(events[self._worker])
        for event in events:
            stream.wait_event(event)
        stream.submit(lambda: finish([tensors[w] for w in range(self._num_workers)]), writes=writes)


Rounds = dict[int, tuple[list[CheckingEvent], dict[int, torch.Tensor]]]


def host_executor(
    memory: TierMemory, worker: int, slots: ExpertSlots, device: CheckingWorker
) -> Executor:
    """The torch twin of the kernels."""
    return HostExecutor(worker, memory.moe, memory.placement, slots, NUM_LANES)


def triton_executor(
    memory: TierMemory, worker: int, slots: ExpertSlots, device: CheckingWorker
) -> Executor:
    """The kernels, interpreted, with graphs that replay what they captured."""
    from afore_kernels.gemm.launch import architecture, heuristic_launch
    from afore_kernels.runtime.executors.graphs import GraphCache
    from afore_kernels.runtime.executors.triton import TritonExecutor

    return TritonExecutor(
        worker,
        memory.moe,
        memory.plan_layout,
        slots,
        device,
        NUM_TOKENS,
        NUM_LANES,
        launch=heuristic_launch(architecture(device.torch_device), TILE_M, dtype=torch.float32),
        graphs=GraphCache(lambda work: work),
    )


class Kinds(NamedTuple):
    """The classes that run, one of which a test may replace by a faulty one."""

    worker: type[FfnWorker] = FfnWorker
    migrator: type[Migrator] = Migrator
    executor: Callable[[TierMemory, int, ExpertSlots, CheckingWorker], Executor] = host_executor
    buffers: type[TargetBuffers] = TargetBuffers


class CheckedRun(NamedTuple):
    """What one schedule showed: races, targets whose output was wrong, and what was raised."""

    races: list[Race]
    wrong: list[int]
    error: Exception | None


class CheckedTier:
    """Memory, weights and slots of one number of workers, used for many schedules.

    Args:
        num_workers: workers.
        moe: shapes.
        options: more of the tier's configuration.
    """

    def __init__(self, num_workers: int, moe: MoEConfig = MOE, **options: Any) -> None:
        self.num_workers = num_workers
        tier = TierConfig(
            num_workers=num_workers,
            max_tokens_per_rank=NUM_TOKENS,
            redundant_slots=REDUNDANT_SLOTS,
            targets_in_flight=IN_FLIGHT,
            plan_ring_depth=16,
            timeline_events=16,
            **options,
        )
        self.memory = TierMemory.create(moe, tier)
        self.slots = []
        for worker in range(num_workers):
            segment = ExpertSlots.create_segment(moe, self.memory.placement, worker)
            self.slots.append(ExpertSlots(moe, self.memory.placement, worker, segment))
            segment.close()
            self.slots[-1].load_primaries(RandomWeights(moe, integer=True))

    def close(self) -> None:
        """Release the memory."""
        self.memory.stop()
        self.memory.segment.close()

    def run(
        self, targets: list[CheckedTarget], seed: int, kinds: Kinds | None = None
    ) -> CheckedRun:
        """Run `targets` in one random schedule."""
        kinds = kinds or Kinds()
        self._num_taken = 0
        for array in self.memory.arrays.values():
            array[...] = 0
        for slots in self.slots:
            slots.gate_up[:, slots.num_primaries :] = torch.nan  # never read before a copy came
        device = CheckingDevice(seed)
        rounds: Rounds = defaultdict(
            lambda: ([device.event() for _ in range(self.num_workers)], {})
        )
        hosts = {
            f"worker {w}": partial(self._work, self._worker(w, device, rounds, kinds), len(targets))
            for w in range(self.num_workers)
        }
        wrong: list[int] = []
        hosts["scheduler"] = partial(self._publish, targets, device)
        hosts["rank"] = partial(self._feed, targets, device, wrong)
        error = None
        try:
            device.run(hosts)
        except Exception as raised:
            error = raised
        return CheckedRun(device.races, wrong, error)

    def _worker(
        self, worker: int, device: CheckingDevice, rounds: Rounds, kinds: Kinds
    ) -> FfnWorker:
        memory = self.memory
        own = CheckingWorker(device, worker)
        slots = self.slots[worker]
        executor = kinds.executor(memory, worker, slots, own)
        track = Track(memory, f"worker {worker} migration")
        return kinds.worker(
            worker,
            memory,
            executor,
            kinds.buffers(memory, worker, own, executor, NUM_LANES),
            kinds.migrator(worker, memory.placement, self.slots, own, track),
            own,
            CheckedCollectives(worker, self.num_workers, rounds),
            CheckedPlans(memory, worker, device),
            CheckedTransport(memory, device),
        )

    @staticmethod
    def _work(worker: FfnWorker, num_targets: int) -> None:
        for _ in range(num_targets):
            worker.run_target()

    def _publish(self, targets: list[CheckedTarget], device: CheckingDevice) -> None:
        """The scheduler: plans as soon as their demand is there, ahead of the inputs."""
        records, published = (
            self.memory.arrays["plan_records"],
            self.memory.arrays["plans_published"],
        )
        for target in targets:
            plan = target.plan
            self._wait_for_room(device, plan.sequence)
            records[plan.sequence % len(records)] = self.memory.plan_layout.pack(plan)
            device.release(("plan", plan.sequence))
            advance(published, 0, plan.sequence + 1, self.memory.bell(PLAN_BELL))

    def _wait_for_room(self, device: CheckingDevice, sequence: int) -> None:
        """A rank announces a target only after it took the reply of the one `IN_FLIGHT` before."""
        taken = sequence - IN_FLIGHT
        if taken >= 0:
            device.wait_until(lambda: self._num_taken > taken, f"reply {taken} to be taken")
            device.acquire(("taken", taken))

    def _feed(self, targets: list[CheckedTarget], device: CheckingDevice, wrong: list[int]) -> None:
        """The attention rank: `IN_FLIGHT` targets submitted, then one reply for one input."""
        transport = LocalTransport(self.memory)
        for i in range(len(targets) + IN_FLIGHT):
            if i >= IN_FLIGHT:
                target = targets[i - IN_FLIGHT]
                outcome, output = self._take(transport, device, i - IN_FLIGHT)
                is_right = outcome != OK or torch.equal(output, target.expected)
                if outcome != target.outcome or not is_right:
                    wrong.append(i - IN_FLIGHT)
                device.release(("taken", i - IN_FLIGHT))
                self._num_taken = i - IN_FLIGHT + 1
            if i < len(targets):
                plan, *inputs = targets[i][:4]
                device.touch(writes=[Buffer("input", (0, i % IN_FLIGHT))])
                for rows, tensor in zip(transport.input_rows(0, i, NUM_TOKENS), inputs):
                    rows.copy_(tensor)
                device.release(("input", i))
                transport.send(0, i, plan.target, NUM_TOKENS)

    def _take(
        self, transport: LocalTransport, device: CheckingDevice, i: int
    ) -> tuple[Outcome | None, torch.Tensor]:
        ready = self.memory.arrays["reply_ready"]
        for worker in range(self.num_workers):
            device.wait_until(lambda w=worker: count(ready, w) > i, f"reply {i}")
            device.acquire(("reply", worker, i))
        outcome = transport.wait_reply(0, i, deadline_after(20))
        names = [Buffer("reply", (0, i % IN_FLIGHT, w)) for w in range(self.num_workers)]
        device.touch(reads=names)
        return outcome, transport.output_rows(0, i, NUM_TOKENS).clone()
