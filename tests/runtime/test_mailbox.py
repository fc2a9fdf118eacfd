from __future__ import annotations

import numpy as np
import pytest

from afore_kernels.config import INT32_MAX
from afore_kernels.errors import MailboxTimeout, PeerLost
from afore_kernels.plan import Target, record_checksum
from afore_kernels.runtime.mailbox import (
    CHECKSUM_WORD,
    ENTRY_BAD,
    ENTRY_HEADER_WORDS,
    ENTRY_OK,
    DemandWriter,
    Mailbox,
    collect_entry,
)
from afore_kernels.runtime.memory import DEMAND_BELL, TierMemory, deadline_after
from afore_kernels.runtime.shared import advance, count, get_word

TARGET = Target(2**40, 1, 3)
DEMAND = np.array([5, 0, 3, 0, 0, 2], np.int32)
NUM_TOKENS = 7


def post(memory: TierMemory, rank: int = 0, sequence: int = 0, **changes) -> None:
    entry = {"target": TARGET, "num_tokens": NUM_TOKENS, "demand": DEMAND} | changes
    DemandWriter(memory, rank).post(sequence, *entry.values(), deadline_after(5.0))


class Collected:
    """Outputs of `collect_entry`, with recognisable values before it."""

    def __init__(self) -> None:
        self.demand = np.arange(6, dtype=np.int32)
        self.target = np.full(3, -7, np.int64)
        self.rank_tokens = np.full(2, -7, np.int32)

    def collect(self, memory, rank=0, sequence=0, top_k=2, max_tokens=64) -> int:
        outputs = (self.demand, self.target, self.rank_tokens)
        return collect_entry(Mailbox.of(memory), rank, sequence, top_k, max_tokens, *outputs)

    def assert_untouched(self) -> None:
        assert self.demand.tolist() == list(range(6))
        assert self.target.tolist() == [-7] * 3
        assert self.rank_tokens.tolist() == [-7] * 2


def test_round_trip_adds_each_rank(make_memory):
    memory = make_memory(num_ranks=2)
    post(memory, rank=1, sequence=1)
    post(memory, rank=0, sequence=1, num_tokens=0, demand=np.zeros(6, np.int32))
    collected = Collected()
    assert collected.collect(memory, rank=1, sequence=1) == ENTRY_OK
    assert collected.demand.tolist() == (np.arange(6) + DEMAND).tolist()
    assert collected.target.tolist() == list(TARGET)
    assert collected.rank_tokens.tolist() == [-7, NUM_TOKENS]
    assert collected.collect(memory, rank=0, sequence=1) == ENTRY_OK  # the zero vector
    assert collected.demand.tolist() == (np.arange(6) + DEMAND).tolist()
    assert collected.rank_tokens.tolist() == [0, NUM_TOKENS]
    assert [count(memory.arrays["demand_posted"], r) for r in range(2)] == [2, 2]


def test_every_corrupted_word_is_detected(make_memory):
    memory = make_memory(num_ranks=2)
    post(memory)
    entry = memory.arrays["demand_entries"][0, 0]
    collected = Collected()
    for word in range(entry.size):
        for flip in (1, 1 << 16, -(2**31)):
            entry[word] ^= flip
            assert collected.collect(memory) == ENTRY_BAD, f"word {word} ^ {flip:#x}"
            collected.assert_untouched()
            entry[word] ^= flip
    assert collected.collect(memory) == ENTRY_OK


WRONG_WORDS = {
    "magic": (0, 1),
    "rank": (1, 1),
    "negative token count": (4, -1),
    "more tokens than the tier takes": (4, 65),
    "more pairs than tokens * top_k": (4, 4),
    "number of experts": (5, 5),
    "stale sequence": (6, -2),
    "sequence of the far future": (7, 1),
    "negative count": (ENTRY_HEADER_WORDS + 1, -1),
    "one pair too many": (ENTRY_HEADER_WORDS + 1, 2 * NUM_TOKENS - int(DEMAND.sum()) + 1),
}


@pytest.mark.parametrize("wrong", WRONG_WORDS)
def test_wrong_entry_with_a_valid_checksum_changes_nothing(make_memory, wrong):
    memory = make_memory(num_ranks=2)
    post(memory)
    entry = memory.arrays["demand_entries"][0, 0]
    word, value = WRONG_WORDS[wrong]
    right = int(entry[word])
    collected = Collected()
    rewrite(entry, word, value)
    assert collected.collect(memory) == ENTRY_BAD
    collected.assert_untouched()
    rewrite(entry, word, right)
    assert collected.collect(memory) == ENTRY_OK


def rewrite(entry: np.ndarray, word: int, value: int) -> None:
    entry[word] = value
    entry[CHECKSUM_WORD] = np.uint32(record_checksum(entry, CHECKSUM_WORD)).view(np.int32)


def test_as_many_pairs_as_the_tokens_have_are_accepted(make_memory):
    memory = make_memory()
    post(memory, num_tokens=64, demand=np.array([64, 64, 0, 0, 0, 0], np.int32))
    assert Collected().collect(memory) == ENTRY_OK


def test_demand_of_all_ranks_may_reach_but_not_pass_int32(make_memory):
    memory = make_memory(num_ranks=2)
    large = np.full(6, 2**30, np.int32)
    post(memory, rank=0, num_tokens=64, demand=large)
    collected = Collected()
    collected.demand[:] = 0
    assert collected.collect(memory, rank=0, top_k=2**30) == ENTRY_OK
    for last, result in ((2**30, ENTRY_BAD), (2**30 - 1, ENTRY_OK)):
        large[5] = last
        large[:5] = 2**30 - 1
        post(memory, rank=1, num_tokens=64, demand=large)
        assert collected.collect(memory, rank=1, top_k=2**30) == result
        expected = 2**30 if result == ENTRY_BAD else INT32_MAX
        assert collected.demand.tolist() == [expected] * 6


def test_writer_never_overwrites_an_uncollected_entry(make_memory):
    memory = make_memory(num_ranks=2)
    writer = DemandWriter(memory, 1)
    for sequence in range(2):
        writer.post(sequence, Target(sequence, 0, 0), NUM_TOKENS, DEMAND, deadline_after(5.0))
    before = memory.arrays["demand_entries"].copy()
    message = (
        r"sequence 0 of attention rank 1; Target\(step=2, layer=0, microbatch=0\) cannot be posted"
    )
    with pytest.raises(MailboxTimeout, match=message):
        writer.post(2, Target(2, 0, 0), NUM_TOKENS, DEMAND, deadline_after(0.02))
    assert (memory.arrays["demand_entries"] == before).all()
    assert count(memory.arrays["demand_posted"], 1) == 2

    advance(memory.arrays["demand_collected"], 1, 1, memory.bell(DEMAND_BELL))
    writer.post(2, Target(2, 0, 0), NUM_TOKENS, DEMAND, deadline_after(5.0))
    collected = Collected()
    assert collected.collect(memory, rank=1, sequence=1) == ENTRY_OK
    assert collected.collect(memory, rank=1, sequence=2) == ENTRY_OK
    assert collected.collect(memory, rank=1, sequence=0) == ENTRY_BAD


def test_post_ends_when_the_tier_stops(make_memory, background):
    memory = make_memory()
    waiting = background(post, memory, 0, 2)
    while get_word(memory.bell(DEMAND_BELL), 1) == 0:
        pass
    memory.stop()
    with pytest.raises(PeerLost):
        waiting.result()
