"""The plan ring: one publication makes a plan visible to every worker.

Paper section 6.1. One writer (the scheduler), `num_workers` readers; a record is reused only after
every worker has copied it. The ring is deep enough that an observer, which does not acknowledge,
can still read recent plans; the checksum tells it when a record was overwritten meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import PlanError, PlanOrderError, PlanRingTimeout, StalePlanError
from afore_kernels.plan import (
    CHECKSUM_WORD,
    HEADER_WORDS,
    PLAN_MAGIC,
    PLAN_VERSION,
    Plan,
    PlanLayout,
    record_checksum,
)
from afore_kernels.runtime.memory import ACK_BELL, PLAN_BELL, TierMemory, primary_placement
from afore_kernels.runtime.shared import (
    READY,
    Array,
    Field,
    advance,
    compiled,
    count,
    counters,
    wait_at_least,
)


def fields(moe: MoEConfig, tier: TierConfig) -> dict[str, Field]:
    """Shared fields of the plan ring."""
    layout = PlanLayout(primary_placement(moe, tier), tier.num_ranks)
    return {
        "plans_published": counters(1),
        "plans_copied": counters(tier.num_workers),
        "plan_records": Field(np.uint8, (tier.plan_ring_depth, layout.record_bytes)),
    }


class PlanWriter(NamedTuple):
    """The ring as the compiled scheduler sees it.

    Attributes:
        published: 1 + the last published sequence.
        copied: per worker, 1 + the last sequence it has copied.
        records: int32 [depth, words].
        plan_bell: rung after each publication.
        ack_bell: rung after each acknowledgement.
        state: the tier's state word.
    """

    published: Array
    copied: Array
    records: Array
    plan_bell: Array
    ack_bell: Array
    state: Array

    @classmethod
    def of(cls, memory: TierMemory) -> PlanWriter:
        """View the ring of a tier."""
        return cls(
            memory.arrays["plans_published"],
            memory.arrays["plans_copied"],
            memory.arrays["plan_records"].view(np.int32),
            memory.bell(PLAN_BELL),
            memory.bell(ACK_BELL),
            memory.state,
        )


@compiled
def wait_for_free_record(ring, num_workers, sequence, deadline_ns):  # type: ignore[no-untyped-def]
    """Wait until every worker has copied the plan whose record `sequence` reuses.

    Returns:
        (READY, -1), or the other result of the wait and the worker it waited for.
    """
    for worker in range(num_workers):
        needed = sequence + 1 - ring.records.shape[0]
        result = wait_at_least(ring.copied, worker, needed, ring.ack_bell, ring.state, deadline_ns)
        if result != READY:
            return result, worker
    return READY, -1


@compiled
def write_plan(  # type: ignore[no-untyped-def]
    ring,
    sequence,
    target,
    tile_m,
    rejection,
    rejected_rank,
    demand,
    rank_tokens,
    slot_expert,
    slot_pairs,
    slot_copy,
):
    """Fill the record of `sequence`, which is free, and publish it (layout: `docs/wire.md`)."""
    record = ring.records[sequence % ring.records.shape[0]]
    num_copies = 0
    word = HEADER_WORDS
    for expert in range(demand.size):
        record[word + expert] = demand[expert]
    word += demand.size
    for rank in range(rank_tokens.size):
        record[word + rank] = rank_tokens[rank]
    word += rank_tokens.size
    num_workers, redundant_slots = slot_expert.shape
    num_slots = num_workers * redundant_slots
    copy_bytes = record[word + 2 * num_slots :].view(np.uint8)
    copy_bytes[:] = 0
    for worker in range(num_workers):
        for slot in range(redundant_slots):
            flat = worker * redundant_slots + slot
            record[word + flat] = slot_expert[worker, slot]
            record[word + num_slots + flat] = slot_pairs[worker, slot]
            copy_bytes[flat] = slot_copy[worker, slot]
            num_copies += slot_copy[worker, slot]
    record[0] = np.int32(PLAN_MAGIC)
    record[1] = PLAN_VERSION
    record[2] = 4 * record.size
    record[3] = rejection
    wide = record[:HEADER_WORDS].view(np.int64)
    wide[2] = sequence
    wide[3] = target[0]
    record[8] = target[1]
    record[9] = target[2]
    record[10] = tile_m
    record[11] = num_copies
    record[12] = rejected_rank
    record[13] = 0
    record[14] = 0
    record[CHECKSUM_WORD] = np.int32(record_checksum(record, CHECKSUM_WORD))
    advance(ring.published, 0, sequence + 1, ring.plan_bell)


class PlanReader:
    """One worker's end of the ring."""

    def __init__(self, memory: TierMemory, worker: int) -> None:
        self._memory = memory
        self._worker = worker
        self._records = memory.arrays["plan_records"]
        self._layout = memory.plan_layout
        self.next_sequence = 0

    def is_published(self) -> bool:
        """Whether the next plan can be read without waiting."""
        return bool(count(self._memory.arrays["plans_published"], 0) > self.next_sequence)

    def read(self, deadline_ns: int) -> Plan:
        """Copy the next plan, acknowledge it, and check it.

        Raises:
            PlanRingTimeout: if no plan was published by the deadline.
            StalePlanError: if the record is older than expected.
            PlanOrderError: if the record is newer than expected.
            PlanError: if the record is not valid.
            PeerLost: or the tier's failure, if the tier stops.
        """
        sequence = self.next_sequence
        if not self._memory.wait("plans_published", 0, sequence + 1, PLAN_BELL, deadline_ns):
            raise PlanRingTimeout(
                f"worker {self._worker} waited for the scheduler's plan of sequence {sequence}"
            )
        record = self._records[sequence % len(self._records)].copy()
        copied = self._memory.arrays["plans_copied"]
        advance(copied, self._worker, sequence + 1, self._memory.bell(ACK_BELL))
        plan = self._layout.unpack(record)
        check_order(plan, sequence)
        self.next_sequence = sequence + 1
        return plan


def check_order(plan: Plan, sequence: int) -> None:
    """Check that `plan` is the one expected next.

    Raises:
        StalePlanError: if it is older.
        PlanOrderError: if it is newer.
    """
    if plan.sequence < sequence:
        raise StalePlanError(
            f"plan {plan.sequence} for {plan.target} is stale, expected sequence {sequence}"
        )
    if plan.sequence > sequence:
        raise PlanOrderError(
            f"plan {plan.sequence} for {plan.target} is out of order, expected sequence {sequence}"
        )


def recent_plans(memory: TierMemory) -> list[Plan]:
    """All plans still in the ring, oldest first, as an observer sees them."""
    records = memory.arrays["plan_records"]
    published = int(count(memory.arrays["plans_published"], 0))
    plans = []
    for sequence in range(max(0, published - len(records)), published):
        try:
            plan = memory.plan_layout.unpack(records[sequence % len(records)])
        except PlanError:
            continue  # overwritten while it was read
        if plan.sequence == sequence:
            plans.append(plan)
    return plans
