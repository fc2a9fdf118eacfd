"""The demand mailbox: attention ranks post each target's demand ahead of its hidden states.

Paper section 6.1. Per rank a ring of `targets_in_flight` fixed-size entries (`docs/wire.md`),
written by the rank and collected by the scheduler. A rank with no tokens for a target posts a zero
vector.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from afore_kernels.config import INT32_MAX, MoEConfig, TierConfig
from afore_kernels.errors import MailboxTimeout
from afore_kernels.plan import Target, record_checksum
from afore_kernels.runtime.memory import DEMAND_BELL, TierMemory
from afore_kernels.runtime.shared import (
    Array,
    Field,
    advance,
    compiled,
    counters,
)

DEMAND_MAGIC = 0x4D44_4641  # b"AFDM"
ENTRY_HEADER_WORDS = 16
CHECKSUM_WORD = ENTRY_HEADER_WORDS - 1
(
    _MAGIC,
    _RANK,
    _LAYER,
    _MICROBATCH,
    _NUM_TOKENS,
    _NUM_EXPERTS,
) = range(6)
_SEQUENCE_WORD64, _STEP_WORD64 = 3, 4

ENTRY_OK, ENTRY_BAD = 0, 1


def fields(moe: MoEConfig, tier: TierConfig) -> dict[str, Field]:
    """Shared fields of the mailbox."""
    words = -(-(ENTRY_HEADER_WORDS + moe.num_experts) // 16) * 16
    return {
        "demand_posted": counters(tier.num_ranks),
        "demand_collected": counters(tier.num_ranks),
        "demand_entries": Field(np.int32, (tier.num_ranks, tier.targets_in_flight, words)),
        "next_sequence": counters(1),
    }


class Mailbox(NamedTuple):
    """The mailbox as compiled code sees it.

    Attributes:
        posted: per rank, 1 + the last posted sequence.
        collected: per rank, 1 + the last sequence the scheduler is done with.
        entries: int32 [num_ranks, depth, words].
        rank_state: per rank, AWAITED, CONNECTED or LOST.
        next_sequence: the sequence the scheduler collects next.
        bell: rung after each post and each rank state change.
        state: the tier's state word.
    """

    posted: Array
    collected: Array
    entries: Array
    rank_state: Array
    next_sequence: Array
    bell: Array
    state: Array

    @classmethod
    def of(cls, memory: TierMemory) -> Mailbox:
        """View the mailbox of a tier."""
        return cls(
            memory.arrays["demand_posted"],
            memory.arrays["demand_collected"],
            memory.arrays["demand_entries"],
            memory.arrays["rank_state"],
            memory.arrays["next_sequence"],
            memory.bell(DEMAND_BELL),
            memory.state,
        )


@compiled
def write_entry(mailbox, rank, sequence, step, layer, microbatch, num_tokens, demand):  # type: ignore[no-untyped-def]
    """Fill the entry of `sequence` and publish it."""
    entry = mailbox.entries[rank, sequence % mailbox.entries.shape[1]]
    entry[_MAGIC] = np.int32(DEMAND_MAGIC)
    entry[_RANK] = rank
    entry[_LAYER] = layer
    entry[_MICROBATCH] = microbatch
    entry[_NUM_TOKENS] = num_tokens
    entry[_NUM_EXPERTS] = demand.size
    wide = entry[:ENTRY_HEADER_WORDS].view(np.int64)
    wide[_SEQUENCE_WORD64] = sequence
    wide[_STEP_WORD64] = step
    entry[ENTRY_HEADER_WORDS : ENTRY_HEADER_WORDS + demand.size] = demand
    entry[CHECKSUM_WORD] = np.int32(record_checksum(entry, CHECKSUM_WORD))
    advance(mailbox.posted, rank, sequence + 1, mailbox.bell)


@compiled
def collect_entry(mailbox, rank, sequence, top_k, max_tokens, demand, target, rank_tokens):  # type: ignore[no-untyped-def]
    """Check a rank's entry and add it to `demand`; a bad one changes nothing.

    Args:
        mailbox: the mailbox; the entry has been posted.
        rank: which attention rank.
        sequence: expected sequence.
        top_k: a token has at most this many pairs.
        max_tokens: most tokens of one rank.
        demand: int32 [num_experts], accumulated over ranks.
        target: int64 [3], receives (step, layer, microbatch).
        rank_tokens: int32 [num_ranks], receives the rank's token count.
    """
    entry = mailbox.entries[rank, sequence % mailbox.entries.shape[1]]
    wide = entry[:ENTRY_HEADER_WORDS].view(np.int64)
    num_tokens = entry[_NUM_TOKENS]
    counts = entry[ENTRY_HEADER_WORDS : ENTRY_HEADER_WORDS + demand.size]
    if (
        entry[_MAGIC] != np.int32(DEMAND_MAGIC)
        or entry[_RANK] != rank
        or entry[_NUM_EXPERTS] != demand.size
        or wide[_SEQUENCE_WORD64] != sequence
        or num_tokens < 0
        or num_tokens > max_tokens
        or entry[CHECKSUM_WORD] != np.int32(record_checksum(entry, CHECKSUM_WORD))
    ):
        return ENTRY_BAD
    total = np.int64(0)
    for expert in range(demand.size):
        if counts[expert] < 0 or np.int64(demand[expert]) + counts[expert] > INT32_MAX:
            return ENTRY_BAD
        total += counts[expert]
    if total > np.int64(num_tokens) * top_k:
        return ENTRY_BAD
    for expert in range(demand.size):
        demand[expert] += counts[expert]
    target[0] = wide[_STEP_WORD64]
    target[1] = entry[_LAYER]
    target[2] = entry[_MICROBATCH]
    rank_tokens[rank] = num_tokens
    return ENTRY_OK


class DemandWriter:
    """An attention rank's end of the mailbox."""

    def __init__(self, memory: TierMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._mailbox = Mailbox.of(memory)
        self._depth = memory.tier.targets_in_flight

    def post(
        self,
        sequence: int,
        target: Target,
        num_tokens: int,
        demand: npt.NDArray[np.int32],
        deadline_ns: int,
    ) -> None:
        """Post the demand of one target.

        Args:
            sequence: the rank's next sequence.
            target: its key.
            num_tokens: tokens of this rank in the target.
            demand: pairs per expert, int32 [num_experts].
            deadline_ns: on the monotonic clock.

        Raises:
            MailboxTimeout: if the scheduler has not freed the entry by the deadline.
            PeerLost: or the tier's failure, if the tier stops.
        """
        free_at = sequence + 1 - self._depth
        if not self._memory.wait("demand_collected", self._rank, free_at, DEMAND_BELL, deadline_ns):
            raise MailboxTimeout(
                f"the scheduler has not collected sequence {free_at - 1} of attention rank "
                f"{self._rank}; {target} cannot be posted"
            )
        write_entry(self._mailbox, self._rank, sequence, *target, num_tokens, demand)
