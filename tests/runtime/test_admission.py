from __future__ import annotations

import pytest

from afore_kernels.errors import ConfigError, MailboxTimeout, PeerLost
from afore_kernels.runtime.admission import Admission
from afore_kernels.runtime.memory import (
    AWAITED,
    CONNECTED,
    DEMAND_BELL,
    INPUT_BELL,
    LOST,
    REPLY_BELL,
    TierMemory,
)
from afore_kernels.runtime.shared import advance, count, get_word


@pytest.fixture
def memory(make_memory):
    return make_memory(num_ranks=2, num_workers=2, reply_timeout_s=0.05)


@pytest.fixture
def admission(memory):
    return Admission(memory)


def states(memory: TierMemory) -> list[int]:
    return [int(count(memory.arrays["rank_state"], rank)) for rank in range(2)]


def set_posted(memory: TierMemory, rank: int, posted: int) -> None:
    advance(memory.arrays["demand_posted"], rank, posted, memory.bell(DEMAND_BELL))


def reply(memory: TierMemory, rank: int, worker: int, sequence: int) -> None:
    index = rank * memory.tier.num_workers + worker
    bell = memory.bell(REPLY_BELL)
    advance(memory.arrays["reply_ready"], index, sequence + 1, bell)


def test_first_clients_start_at_the_scheduler_s_next_sequence(memory, admission):
    assert states(memory) == [AWAITED, AWAITED]
    assert admission.admit(1) == 0
    assert states(memory) == [AWAITED, CONNECTED]
    advance(memory.arrays["next_sequence"], 0, 5, memory.bell(DEMAND_BELL))
    assert admission.admit(0) == 5
    assert count(memory.arrays["demand_posted"], 0) == 5
    assert states(memory) == [CONNECTED, CONNECTED]


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_that_does_not_exist_is_refused(memory, admission, rank):
    with pytest.raises(ConfigError, match=rf"must be in \[0, 2\), got {rank}"):
        admission.admit(rank)
    assert states(memory) == [AWAITED, AWAITED]


def test_taken_rank_is_refused(memory, admission):
    admission.admit(0)
    with pytest.raises(PeerLost, match="rank 0 already has a client"):
        admission.admit(0)
    assert states(memory) == [CONNECTED, AWAITED]


def test_release_loses_the_rank_and_wakes_the_scheduler_and_the_workers(memory, admission):
    admission.admit(0)
    set_posted(memory, 0, 3)
    rings = [get_word(memory.bell(bell), 0) for bell in (DEMAND_BELL, INPUT_BELL)]
    admission.release(0)
    assert states(memory) == [LOST, AWAITED]
    assert count(memory.arrays["demand_posted"], 0) == 3
    for bell, before in zip((DEMAND_BELL, INPUT_BELL), rings):
        assert get_word(memory.bell(bell), 0) > before


def test_release_of_a_rank_without_a_client_changes_nothing(memory, admission):
    admission.release(0)
    assert states(memory) == [AWAITED, AWAITED]


def test_lost_rank_cannot_be_taken_while_another_is_connected(memory, admission):
    admission.admit(0)
    admission.admit(1)
    admission.release(0)
    with pytest.raises(PeerLost, match=r"rank 0 was lost; .* but rank 1 is"):
        admission.admit(0)
    assert states(memory) == [LOST, CONNECTED]


def test_taking_a_lost_rank_starts_afresh_after_every_posted_target(memory, admission):
    for rank, posted in ((0, 2), (1, 4)):
        admission.admit(rank)
        set_posted(memory, rank, posted)
        admission.release(rank)
    for worker in range(2):
        reply(memory, 0, worker, sequence=3)
    advance(memory.arrays["next_sequence"], 0, 4, memory.bell(DEMAND_BELL))
    assert admission.admit(0) == 4
    assert states(memory) == [CONNECTED, AWAITED]
    assert [count(memory.arrays["demand_posted"], rank) for rank in range(2)] == [4, 4]
    assert admission.admit(1) == 4


def test_lost_rank_is_not_taken_before_its_targets_have_drained(memory, admission):
    admission.admit(0)
    set_posted(memory, 0, 2)
    admission.release(0)
    reply(memory, 0, 0, sequence=1)
    reply(memory, 0, 1, sequence=0)
    with pytest.raises(MailboxTimeout, match=r"worker 1 has not finished .* rank 0's lost client"):
        admission.admit(0)
    assert states(memory)[0] == LOST
    reply(memory, 0, 1, sequence=1)
    assert admission.admit(0) == 2
