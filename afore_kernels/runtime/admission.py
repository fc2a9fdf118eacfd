"""Which attention ranks have a client, and where in the order of targets a new client starts."""

from __future__ import annotations

import threading

from afore_kernels.errors import ConfigError, MailboxTimeout, PeerLost
from afore_kernels.runtime.memory import (
    AWAITED,
    CONNECTED,
    DEMAND_BELL,
    INPUT_BELL,
    LOST,
    REPLY_BELL,
    TierMemory,
    deadline_after,
)
from afore_kernels.runtime.shared import advance, count, ring_bell


class Admission:
    """Admits one client per attention rank.

    A rank whose client is gone counts as empty, so the other ranks go on. It can be taken again
    once no other rank is connected: only then does a new client know which target comes next.
    """

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()

    def admit(self, rank: int) -> int:
        """Take a rank; returns the sequence of its first target.

        Raises:
            ConfigError: if the rank does not exist.
            PeerLost: if it is taken, or may not be taken now.
            MailboxTimeout: if targets of its lost client do not drain.
        """
        num_ranks = self._memory.tier.num_ranks
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"attention rank must be in [0, {num_ranks}), got {rank}")
        with self._lock:
            state = self._state(rank)
            if state == CONNECTED:
                raise PeerLost(f"attention rank {rank} already has a client")
            others = [r for r in range(num_ranks) if r != rank and self._state(r) == CONNECTED]
            if state == LOST and others:
                raise PeerLost(
                    f"attention rank {rank} was lost; it can be taken again when no other rank is "
                    f"connected, but rank {others[0]} is"
                )
            if state == LOST:  # nobody is connected: start afresh with every rank
                first = self._drain(rank)
                for lost in range(num_ranks):
                    if self._state(lost) == LOST:
                        self._set(lost, AWAITED, first)
            else:
                first = int(count(self._memory.arrays["next_sequence"], 0))
            self._set(rank, CONNECTED, first)
            return first

    def release(self, rank: int) -> None:
        """Give a rank back; its unfinished targets fail and later ones count it as empty."""
        with self._lock:
            if self._state(rank) == CONNECTED:
                self._set(rank, LOST, int(count(self._memory.arrays["demand_posted"], rank)))

    def _drain(self, rank: int) -> int:
        """Wait until every posted target has been replied; returns the next sequence."""
        memory = self._memory
        posted = memory.arrays["demand_posted"]
        first = max(int(count(posted, r)) for r in range(memory.tier.num_ranks))
        deadline_ns = deadline_after(memory.tier.reply_timeout_s)
        for worker in range(memory.tier.num_workers):
            index = rank * memory.tier.num_workers + worker
            if not memory.wait("reply_ready", index, first, REPLY_BELL, deadline_ns):
                raise MailboxTimeout(
                    f"worker {worker} has not finished the targets of rank {rank}'s lost client"
                )
        return first

    def _state(self, rank: int) -> int:
        return int(count(self._memory.arrays["rank_state"], rank))

    def _set(self, rank: int, state: int, posted: int) -> None:
        demand_bell = self._memory.bell(DEMAND_BELL)
        advance(self._memory.arrays["demand_posted"], rank, posted, demand_bell)
        advance(self._memory.arrays["rank_state"], rank, state, demand_bell)
        ring_bell(self._memory.bell(INPUT_BELL))
