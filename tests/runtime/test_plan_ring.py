from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import (
    InfeasiblePlanError,
    PeerLost,
    PlanError,
    PlanOrderError,
    PlanRingTimeout,
    StalePlanError,
)
from afore_kernels.plan import (
    CHECKSUM_WORD,
    PLAN_HEADER,
    Plan,
    Rejection,
    Target,
    record_checksum,
)
from afore_kernels.runtime.memory import ACK_BELL, PLAN_BELL, TierMemory, deadline_after
from afore_kernels.runtime.plan_ring import (
    PlanReader,
    PlanWriter,
    recent_plans,
    wait_for_free_record,
    write_plan,
)
from afore_kernels.runtime.shared import READY, STOPPED, TIMED_OUT, advance, count
from afore_kernels.testing import random_plan

DEPTH = 4


@pytest.fixture
def memory(make_memory):
    return make_memory(plan_ring_depth=DEPTH, num_ranks=2)


def plan_of(memory: TierMemory, sequence: int, seed: int = 0) -> Plan:
    demand = np.random.default_rng(seed).integers(0, 40, memory.moe.num_experts, dtype=np.int32)
    ranks = range(memory.tier.num_ranks)
    tokens = [seed % 7 + rank for rank in ranks]
    plan = random_plan(demand, memory.placement, 4, seed, rank_tokens=tokens, sequence=sequence)
    return dataclasses.replace(plan, target=Target(2**33 + sequence, 1, seed))


def publish(memory: TierMemory, plan: Plan) -> None:
    write_plan(
        PlanWriter.of(memory),
        plan.sequence,
        np.array(plan.target, np.int64),
        plan.tile_m,
        int(plan.rejection),
        plan.rejected_rank,
        plan.demand,
        plan.rank_tokens,
        plan.slot_expert,
        plan.slot_pairs,
        plan.slot_copy,
    )


def publish_record(memory: TierMemory, sequence: int, record: np.ndarray) -> None:
    """Publish bytes that the scheduler would never write."""
    memory.arrays["plan_records"][sequence % DEPTH] = record
    advance(memory.arrays["plans_published"], 0, sequence + 1, memory.bell(PLAN_BELL))


def read(reader: PlanReader) -> Plan:
    return reader.read(deadline_after(5.0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from(list(Rejection)),
)
def test_compiled_record_is_bit_equal_to_pack(
    num_experts, num_workers, redundant_slots, num_ranks, seed, rejection
):
    moe = MoEConfig(
        num_layers=2, num_experts=num_experts, top_k=1, hidden_size=1, intermediate_size=1
    )
    tier = TierConfig(
        num_workers=num_workers,
        num_ranks=num_ranks,
        redundant_slots=redundant_slots,
        max_tokens_per_rank=1,
        plan_ring_depth=DEPTH,
    )
    memory = TierMemory.create(moe, tier)
    memory.arrays["plan_records"][:] = 0xAB  # what an earlier plan left
    rejected_rank = -1 if rejection is Rejection.NONE else num_ranks - 1
    plan = dataclasses.replace(
        plan_of(memory, seed, seed), rejection=rejection, rejected_rank=rejected_rank
    )
    plan = plan if seed < 2**31 else dataclasses.replace(plan, target=Target(-1, -1, -1))
    publish(memory, plan)
    record = memory.arrays["plan_records"][seed % DEPTH]
    assert record.tobytes() == memory.plan_layout.pack(plan).tobytes()
    memory.segment.close()


def test_every_worker_reads_every_plan_and_acknowledges_it(memory):
    readers = [PlanReader(memory, worker) for worker in range(2)]
    assert not readers[0].is_published()
    plans = [plan_of(memory, sequence, seed=sequence) for sequence in range(DEPTH)]
    for plan in plans:
        publish(memory, plan)
    for plan in plans:
        assert readers[0].is_published()
        assert memory.plan_layout.pack(read(readers[0])).tobytes() == (
            memory.plan_layout.pack(plan).tobytes()
        )
        assert count(memory.arrays["plans_copied"], 0) == plan.sequence + 1
    assert not readers[0].is_published()
    assert count(memory.arrays["plans_copied"], 1) == 0
    assert read(readers[1]).sequence == 0


def test_a_plan_that_was_read_does_not_change_with_the_ring(memory):
    publish(memory, plan_of(memory, 0))
    plan = read(PlanReader(memory, 0))
    before = plan.demand.copy()
    memory.arrays["plan_records"][:] = 0
    assert (plan.demand == before).all()


def test_record_is_not_reused_before_every_worker_copied_it(memory):
    ring = PlanWriter.of(memory)

    def wait(sequence, seconds=5.0):
        return wait_for_free_record(ring, 2, sequence, deadline_after(seconds))

    assert wait(DEPTH - 1) == (READY, -1)
    assert wait(DEPTH, 0.01) == (TIMED_OUT, 0)
    advance(ring.copied, 0, 2, ring.ack_bell)
    assert wait(DEPTH, 0.01) == (TIMED_OUT, 1)
    advance(ring.copied, 1, 1, ring.ack_bell)
    assert wait(DEPTH) == (READY, -1)
    assert wait(DEPTH + 1, 0.01) == (TIMED_OUT, 1)
    memory.stop()
    assert wait(DEPTH + 1) == (STOPPED, 1)


def test_acknowledgement_wakes_the_writer(memory, background):
    ring = PlanWriter.of(memory)
    waiting = background(wait_for_free_record, ring, 2, DEPTH, deadline_after(20.0))
    publish(memory, plan_of(memory, 0))
    for worker in range(2):
        read(PlanReader(memory, worker))
    assert waiting.result() == (READY, -1)
    assert memory.bell(ACK_BELL)[0] == 2


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (3, StalePlanError, "plan 3 .* stale, expected sequence 7"),
        (11, PlanOrderError, "plan 11 .* out of order, expected sequence 7"),
    ],
)
def test_plan_of_another_sequence_is_named(memory, found, error, message):
    publish_record(memory, 7, memory.plan_layout.pack(plan_of(memory, found)))
    reader = PlanReader(memory, 0)
    reader.next_sequence = 7
    with pytest.raises(error, match=message):
        read(reader)
    assert reader.next_sequence == 7


def test_every_corrupted_word_is_detected(memory):
    record = memory.plan_layout.pack(plan_of(memory, 0, seed=3))
    reader = PlanReader(memory, 0)
    for word in range(record.size // 4):
        bad = record.copy()
        bad.view(np.int32)[word] ^= 1 << (word % 31)
        publish_record(memory, 0, bad)
        with pytest.raises(PlanError):
            read(reader)
    publish_record(memory, 0, record)
    assert read(reader).sequence == 0


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("magic", 1, PlanError, "magic"),
        ("version", 2, PlanError, "version"),
        ("record_bytes", 64, PlanError, "record_bytes"),
        ("rejection", 9, PlanError, "unknown rejection 9"),
        ("num_copies", 3, PlanError, "announces 3 copies"),
        ("tile_m", 3, InfeasiblePlanError, "tile_m 3"),
    ],
)
def test_wrong_field_with_a_valid_checksum_is_named(memory, field, value, error, message):
    record = memory.plan_layout.pack(plan_of(memory, 0, seed=3))
    record[: PLAN_HEADER.itemsize].view(PLAN_HEADER)[field] = value
    words = record.view(np.uint32)
    words[CHECKSUM_WORD] = record_checksum(record.view(np.int32), CHECKSUM_WORD)
    publish_record(memory, 0, record)
    with pytest.raises(error, match=message):
        read(PlanReader(memory, 0))


def test_read_names_the_worker_and_the_sequence_it_waited_for(memory):
    reader = PlanReader(memory, 1)
    with pytest.raises(PlanRingTimeout, match=r"worker 1 waited .* sequence 0"):
        reader.read(deadline_after(0.01))
    memory.stop()
    with pytest.raises(PeerLost):
        read(reader)


def test_observer_sees_the_plans_still_in_the_ring(memory):
    assert recent_plans(memory) == []
    for sequence in range(DEPTH + 2):
        publish(memory, plan_of(memory, sequence, seed=sequence))
    plans = recent_plans(memory)
    assert [plan.sequence for plan in plans] == [2, 3, 4, 5]
    assert [plan.target.microbatch for plan in plans] == [2, 3, 4, 5]
    assert count(memory.arrays["plans_copied"], 0) == 0


def test_observer_skips_records_that_are_being_overwritten(memory):
    for sequence in range(DEPTH):
        publish(memory, plan_of(memory, sequence))
    records = memory.arrays["plan_records"]
    records[1] = memory.plan_layout.pack(plan_of(memory, 1 + DEPTH))  # complete, not yet published
    records[2, 70] ^= 1  # half written
    assert [plan.sequence for plan in recent_plans(memory)] == [0, 3]
