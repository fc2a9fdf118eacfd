"""The placement migrator: pulls replicas into this worker's slots on the migration stream.

Paper section 6.2. Copies come from fixed primaries only. Readiness is per slot, not per plan: a
later plan may reuse a replica whose copy, submitted by an earlier plan, is still in flight. A copy
into a slot waits for the last work that reads the slot.
"""

from __future__ import annotations

import time
from functools import partial

from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.runtime.devices import Buffer, Device, Event, Stream
from afore_kernels.runtime.timeline import Stage, Track
from afore_kernels.runtime.weights import ExpertSlots

SlotKey = tuple[int, int]
"""(layer, redundant slot)."""


class Migrator:
    """One worker's migration stream and the events that order it against the model stream.

    Args:
        worker: this worker.
        placement: where the primaries are.
        slots: the weights of every worker, index = worker.
        device: of this worker.
        track: the timeline track of the migration stream.
    """

    def __init__(
        self,
        worker: int,
        placement: PrimaryPlacement,
        slots: list[ExpertSlots],
        device: Device,
        track: Track,
    ) -> None:
        self._worker = worker
        self._placement = placement
        self._slots = slots
        self._device = device
        self._stream = device.migration_stream()
        self._completions = device.completions(self._stream)
        self._track = track
        self._copied: dict[SlotKey, Event] = {}
        self._last_use: dict[SlotKey, Event] = {}

    def submit(self, plan: Plan) -> int:
        """Queue the copies of `plan` whose destination is this worker; returns how many.

        The recorded raw copy time runs from this call to the completion of the last copy.
        """
        copies = [copy for copy in plan.copies if copy.worker == self._worker]
        if not copies:
            return 0
        layer = plan.target.layer
        submitted_ns = time.monotonic_ns()
        for copy in copies:
            key = (layer, copy.slot)
            if key in self._last_use:
                self._stream.wait_event(self._last_use[key])
            donor = int(self._placement.primary_worker[copy.expert])
            self._stream.submit(
                partial(self._copy, layer, copy.expert, donor, copy.slot),
                reads=[primaries_name(donor, layer)],
                writes=[slot_name(self._worker, key)],
            )
            self._copied[key] = self._stream.record_event()
        self._completions.wait_event(self._stream.record_event())
        self._completions.submit(partial(self._record, plan.sequence, submitted_ns, len(copies)))
        return len(copies)

    def make_ready(self, plan: Plan, model_stream: Stream) -> None:
        """Let the model stream wait for every slot that `plan` uses and whose copy is in flight."""
        for key in self._used_slots(plan):
            event = self._copied.get(key)
            if event is not None:
                model_stream.wait_event(event)

    def mark_used(self, plan: Plan, model_stream: Stream) -> None:
        """Note that the work submitted to the model stream so far reads the slots `plan` uses."""
        used = self._used_slots(plan)
        if used:
            event = model_stream.record_event()
            self._last_use.update((key, event) for key in used)

    def slots_read_by(self, plan: Plan) -> list[Buffer]:
        """The names of the weights that this worker's share of `plan` reads."""
        replicas = [slot_name(self._worker, key) for key in self._used_slots(plan)]
        return [primaries_name(self._worker, plan.target.layer), *replicas]

    def _used_slots(self, plan: Plan) -> list[SlotKey]:
        pairs = plan.slot_pairs[self._worker]
        return [(plan.target.layer, slot) for slot in range(len(pairs)) if pairs[slot]]

    def _copy(self, layer: int, expert: int, donor: int, slot: int) -> None:
        donor_slot = expert - self._placement.primaries(donor).start
        mine = self._slots[self._worker]
        index = mine.num_primaries + slot
        self._device.copy(mine.expert_copies(layer, index, self._slots[donor], donor_slot))

    def _record(self, sequence: int, submitted_ns: int, num_copies: int) -> None:
        self._track.record(Stage.COPY, sequence, submitted_ns, time.monotonic_ns(), num_copies)


def slot_name(worker: int, key: SlotKey) -> Buffer:
    """The name of a redundant slot."""
    return Buffer("slot", (worker, *key))


def primaries_name(worker: int, layer: int) -> Buffer:
    """The name of all primaries of a worker in a layer; nobody writes them once the tier serves."""
    return Buffer("primaries", (worker, layer))
