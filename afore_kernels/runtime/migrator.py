"""The placement migrator: pulls replicas into this worker's slots on the migration stream.

Paper section 6.2. Copies come from fixed primaries only. Readiness is per slot, not per plan: a
later plan may reuse a replica whose copy, submitted by an earlier plan, is still in flight. A copy
into a slot waits for the last work that reads the slot.
"""

from __future__ import annotations

import time
from functools import partial

from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.runtime.devices import Event, Stream
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
        stream: the migration stream.
        track: the timeline track of the migration stream.
    """

    def __init__(
        self,
        worker: int,
        placement: PrimaryPlacement,
        slots: list[ExpertSlots],
        stream: Stream,
        track: Track,
    ) -> None:
        self._worker = worker
        self._placement = placement
        self._slots = slots
        self._stream = stream
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
            self._stream.submit(partial(self._copy, layer, copy.expert, copy.slot))
            self._copied[key] = self._stream.record_event()
        sequence, num_copies = plan.sequence, len(copies)
        self._stream.submit(
            lambda: self._track.record(
                Stage.COPY, sequence, submitted_ns, time.monotonic_ns(), num_copies
            )
        )
        return num_copies

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

    def _used_slots(self, plan: Plan) -> list[SlotKey]:
        pairs = plan.slot_pairs[self._worker]
        return [(plan.target.layer, slot) for slot in range(len(pairs)) if pairs[slot]]

    def _copy(self, layer: int, expert: int, slot: int) -> None:
        donor = int(self._placement.primary_worker[expert])
        donor_slot = expert - self._placement.primaries(donor).start
        mine = self._slots[self._worker]
        mine.copy_expert(layer, mine.num_primaries + slot, self._slots[donor], donor_slot)
