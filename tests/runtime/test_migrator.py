"""Rules of expert copies, each a check that holds for `Migrator` and fails for a faulty one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch

from afore_kernels.config import MoEConfig
from afore_kernels.plan import Plan, PrimaryPlacement, ReplicaCopy, Target
from afore_kernels.runtime.devices.cpu import CpuDevice
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.timeline import Stage, Track, read_events
from afore_kernels.runtime.weights import ExpertSlots, RandomWeights

MOE = {"num_layers": 2, "num_experts": 6, "hidden_size": 3, "intermediate_size": 2}
PLACEMENT = PrimaryPlacement(num_experts=6, num_workers=2, redundant_slots=2)
WORKER = 0
A, B = 4, 5  # experts whose primary is on worker 1


class ScriptedEvent:
    """Passed once its stream has run past it."""

    def __init__(self) -> None:
        self.has_passed = False

    def is_done(self) -> bool:
        return self.has_passed

    def wait(self, timeout_s: float) -> bool:
        raise AssertionError("the host must not block")


class ScriptedStream:
    """A device's stream: work runs only when the test says so, however far the host is ahead."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None] | ScriptedEvent] = deque()

    def submit(self, work: Callable[[], None], *, reads=(), writes=()) -> None:
        self._queue.append(work)

    def record_event(self) -> ScriptedEvent:
        event = ScriptedEvent()
        self._queue.append(lambda: setattr(event, "has_passed", True))
        return event

    def wait_event(self, event: ScriptedEvent) -> None:
        self._queue.append(event)

    def close(self) -> None:
        self.run()

    def run(self) -> bool:
        """Run up to the first event that has not passed; returns whether everything ran."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, ScriptedEvent):
                if not head.has_passed:
                    return False
            else:
                head()
            self._queue.popleft()
        return True


class ScriptedDevice(CpuDevice):
    """A device whose migration stream is the test's."""

    def __init__(self) -> None:
        super().__init__(timeout_s=20)
        self.migration = ScriptedStream()

    def migration_stream(self) -> ScriptedStream:
        return self.migration


class Scene:
    """Worker 0 of two, its migrator and both streams."""

    def __init__(self, make_memory, migrator_class: type[Migrator]) -> None:
        self.memory = make_memory(MOE, num_workers=2)
        moe: MoEConfig = self.memory.moe
        self.source = RandomWeights(moe)
        self.slots = []
        for worker in range(2):
            segment = ExpertSlots.create_segment(moe, PLACEMENT, worker)
            self.slots.append(ExpertSlots(moe, PLACEMENT, worker, segment))
            self.slots[worker].load_primaries(self.source)
            segment.close()
        device = ScriptedDevice()
        self.model, self.migration = ScriptedStream(), device.migration
        track = Track(self.memory, f"worker {WORKER} migration")
        self.migrator = migrator_class(WORKER, PLACEMENT, self.slots, device, track)
        self.seen: list[int | None] = []

    def expert_in(self, slot: int, layer: int = 0, worker: int = WORKER) -> int | None:
        """The expert whose weights are in a redundant slot, or None."""
        slots = self.slots[worker]
        index = slots.num_primaries + slot
        for expert in range(MOE["num_experts"]):
            tensors = self.source.expert(layer, expert)
            if torch.equal(slots.gate_up[layer, index], tensors.gate_up) and torch.equal(
                slots.down[layer, index], tensors.down
            ):
                return expert
        return None

    def execute(self, plan: Plan, slot: int) -> None:
        """Queue the kernel of a target, which notes what it finds in `slot`."""
        self.migrator.make_ready(plan, self.model)
        self.model.submit(lambda: self.seen.append(self.expert_in(slot, plan.target.layer)))
        self.migrator.mark_used(plan, self.model)

    def run_all(self) -> None:
        for _ in range(4):
            self.migration.run()
            self.model.run()
        assert self.migration.run()
        assert self.model.run()


def plan_of(
    sequence: int,
    *replicas: ReplicaCopy,
    pairs: dict[tuple[int, int], int] | None = None,
    layer: int = 0,
    is_new: bool = True,
) -> Plan:
    """A plan with the given replicas; `pairs` maps (worker, slot) to pairs, 8 by default."""
    slot_expert = np.full((2, 2), -1, np.int32)
    slot_pairs, slot_copy = np.zeros((2, 2), np.int32), np.zeros((2, 2), np.uint8)
    for expert, worker, slot in replicas:
        slot_expert[worker, slot] = expert
        slot_pairs[worker, slot] = 8 if pairs is None else pairs.get((worker, slot), 0)
        slot_copy[worker, slot] = is_new
    plan = Plan(
        Target(sequence, layer, 0),
        sequence,
        4,
        np.full(6, 32, np.int32),
        np.array([96], np.int32),
        slot_expert,
        slot_pairs,
        slot_copy,
    )
    plan.validate(PLACEMENT)
    return plan


def check_no_copy_over_live_weights(make_memory, migrator_class) -> None:
    """Rule 6: the kernel of an earlier target still reads the slot when its rebinding is queued."""
    scene = Scene(make_memory, migrator_class)
    first = plan_of(0, ReplicaCopy(A, WORKER, 1))
    scene.migrator.submit(first)
    assert scene.migration.run()
    scene.execute(first, slot=1)  # queued on the device, not run yet
    rebinding = plan_of(2, ReplicaCopy(B, WORKER, 1))
    scene.migrator.submit(rebinding)
    scene.migration.run()
    assert scene.expert_in(1) == A, "the copy ran before the last work that reads the slot"
    scene.execute(rebinding, slot=1)
    scene.run_all()
    assert scene.seen == [A, B]


def check_no_use_before_arrival(make_memory, migrator_class) -> None:
    """Rule 7: a later plan reuses a replica whose copy, by an earlier plan, is in flight."""
    scene = Scene(make_memory, migrator_class)
    copying = plan_of(0, ReplicaCopy(A, WORKER, 0), pairs={})
    scene.migrator.submit(copying)
    scene.migrator.make_ready(copying, scene.model)  # has no pairs there: need not wait
    assert scene.model.run()
    scene.execute(plan_of(1, ReplicaCopy(A, WORKER, 0), is_new=False), slot=0)
    assert not scene.model.run(), "the model stream did not wait for the slot's copy"
    scene.run_all()
    assert scene.seen == [A]


def check_copies_come_from_primaries(make_memory, migrator_class) -> None:
    """Rule 8: another worker's, or this worker's own, replica of the expert is never the source."""
    scene = Scene(make_memory, migrator_class)
    scene.migrator.submit(plan_of(0, ReplicaCopy(A, WORKER, 0)))
    scene.run_all()
    scene.slots[WORKER].gate_up[0, scene.slots[WORKER].num_primaries] = 7.0
    scene.slots[1].gate_up[:, scene.slots[1].num_primaries :] = 7.0
    scene.migrator.submit(plan_of(1, ReplicaCopy(A, WORKER, 1)))
    scene.run_all()
    assert scene.expert_in(1) == A


def check_only_own_copies(make_memory, migrator_class) -> None:
    """Rule 8: a worker pulls the copies whose destination it is, and touches nothing else."""
    scene = Scene(make_memory, migrator_class)
    before = [[slots.gate_up.clone(), slots.down.clone()] for slots in scene.slots]
    plan = plan_of(0, ReplicaCopy(A, WORKER, 1), ReplicaCopy(0, 1, 0), layer=1)
    assert scene.migrator.submit(plan) == 1
    scene.run_all()
    assert scene.expert_in(1, layer=1) == A
    for slots, (gate_up, down) in zip(scene.slots, before):
        changed = (slots.gate_up != gate_up).flatten(2).any(2) | (slots.down != down).flatten(
            2
        ).any(2)
        index = slots.num_primaries + 1
        assert changed.nonzero().tolist() == ([[1, index]] if slots.worker == WORKER else [])


class ForgetsLastUse(Migrator):
    def mark_used(self, plan, model_stream):
        pass


class RemembersOneUse(Migrator):
    def mark_used(self, plan, model_stream):
        self._last_use = dict.fromkeys(self._used_slots(plan)[1:], model_stream.record_event())


class ReadyPerPlan(Migrator):
    def make_ready(self, plan, model_stream):
        if plan.slot_copy[self._worker].any():
            super().make_ready(plan, model_stream)


class NeverWaits(Migrator):
    def make_ready(self, plan, model_stream):
        pass


class CopiesFromReplica(Migrator):
    def _copy(self, layer, expert, donor, slot):
        mine = self._slots[self._worker]
        super()._copy(layer, expert, donor, slot)
        if slot == 1:
            first = mine.num_primaries
            self._device.copy(mine.expert_copies(layer, first + 1, mine, first))


class PullsEveryCopy(Migrator):
    def submit(self, plan):
        plan.slot_expert[self._worker] = plan.slot_expert.max(axis=0)
        plan.slot_copy[self._worker] = plan.slot_copy.max(axis=0)
        return super().submit(plan)


FAULTS = [
    (check_no_copy_over_live_weights, ForgetsLastUse),
    (check_no_copy_over_live_weights, RemembersOneUse),
    (check_no_use_before_arrival, ReadyPerPlan),
    (check_no_use_before_arrival, NeverWaits),
    (check_copies_come_from_primaries, CopiesFromReplica),
    (check_only_own_copies, PullsEveryCopy),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _ in FAULTS))
def test_rule_holds(make_memory, check):
    check(make_memory, Migrator)


@pytest.mark.parametrize(("check", "faulty_class"), FAULTS)
def test_check_fails_for_a_faulty_migrator(make_memory, check, faulty_class):
    with pytest.raises(AssertionError):
        check(make_memory, faulty_class)


def test_slots_of_other_layers_do_not_wait_for_each_other(make_memory):
    scene = Scene(make_memory, Migrator)
    used = plan_of(0, ReplicaCopy(A, WORKER, 0))
    scene.migrator.submit(used)
    scene.migration.run()
    scene.execute(used, slot=0)
    scene.migrator.submit(plan_of(1, ReplicaCopy(B, WORKER, 0), layer=1))
    assert scene.migration.run(), "a copy waited for a slot of another layer"
    scene.migrator.submit(plan_of(2, ReplicaCopy(B, WORKER, 1)))
    assert scene.migration.run(), "a copy waited for another slot"
    assert (scene.expert_in(0), scene.expert_in(0, layer=1), scene.expert_in(1)) == (A, B, B)


def test_one_event_is_recorded_per_plan_with_copies(make_memory):
    scene = Scene(make_memory, Migrator)
    assert scene.migrator.submit(plan_of(3)) == 0
    both = plan_of(4, ReplicaCopy(A, WORKER, 0), ReplicaCopy(B, WORKER, 1))
    assert scene.migrator.submit(both) == 2
    assert not list(read_events(scene.memory))
    scene.run_all()
    (event,) = read_events(scene.memory)
    assert event[:3] == ("worker 0 migration", Stage.COPY, 4)
    assert event.value == 2
    assert event.start_ns < event.end_ns
