"""The local transport: execution inputs and replies through shared memory on one host.

The A2F / F2A path of the paper's Figure 6, separate from the demand path. Per attention rank a ring
of `targets_in_flight` slots; a rank writes its hidden states, ids and routing weights once, every
worker reads the rows of its share, and every worker writes its share of the reply.
"""

from __future__ import annotations

import enum
import time
from typing import NamedTuple

import numpy as np
import torch

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.plan import Target
from afore_kernels.runtime.memory import INPUT_BELL, LOST, REPLY_BELL, TierMemory
from afore_kernels.runtime.shared import SLEEP_SLICE_NS, Field, advance, count, counters

_HEADER_FIELDS = 5


class ReplyStatus(enum.IntEnum):
    """Outcome of one target, the same on every worker."""

    OK = 0
    DEMAND_TIMEOUT = 1
    TARGET_MISMATCH = 2
    BAD_DEMAND = 3
    INPUT_TIMEOUT = 4
    BAD_INPUT = 5
    RANK_LOST = 6
    COUNT_MISMATCH = 7


class Outcome(NamedTuple):
    """A status and the attention rank it is about (-1: none)."""

    status: ReplyStatus
    rank: int = -1


OK = Outcome(ReplyStatus.OK)


def torch_dtype(moe: MoEConfig) -> torch.dtype:
    """Dtype of hidden states and weights."""
    dtype = getattr(torch, moe.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _row_bytes(moe: MoEConfig) -> int:
    return moe.hidden_size * (4 if moe.dtype == "float32" else 2)


def fields(moe: MoEConfig, tier: TierConfig) -> dict[str, Field]:
    """Shared fields of the transport."""
    slots = (tier.num_ranks, tier.targets_in_flight)
    rows = (*slots, tier.max_tokens_per_rank)
    return {
        "input_ready": counters(tier.num_ranks * tier.targets_in_flight),
        "input_header": Field(np.int64, (*slots, _HEADER_FIELDS)),
        "input_hidden": Field(np.uint8, (*rows, _row_bytes(moe))),
        "input_ids": Field(np.int32, (*rows, moe.top_k)),
        "input_weights": Field(np.float32, (*rows, moe.top_k)),
        "reply_ready": counters(tier.num_ranks * tier.num_workers),
        "reply_status": Field(np.int64, (*slots, tier.num_workers, 2)),
        "reply_output": Field(np.uint8, (*rows, _row_bytes(moe))),
    }


class InputRows(NamedTuple):
    """One rank's slot: hidden [rows, H], ids int32 and weights fp32 [rows, top_k]."""

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    routing_weights: torch.Tensor


class LocalTransport:
    """Both ends of the path; a rank's client uses the first half, a worker the second."""

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory
        self._depth = memory.tier.targets_in_flight
        self._num_workers = memory.tier.num_workers
        dtype = torch_dtype(memory.moe)
        arrays = memory.arrays
        self._header = arrays["input_header"]
        self._hidden = torch.from_numpy(arrays["input_hidden"]).view(dtype)
        self._ids = torch.from_numpy(arrays["input_ids"])
        self._weights = torch.from_numpy(arrays["input_weights"])
        self._status = arrays["reply_status"]
        self._output = torch.from_numpy(arrays["reply_output"]).view(dtype)

    # Attention rank's end.

    def input_rows(self, rank: int, sequence: int, num_tokens: int) -> InputRows:
        """The rows of a slot: filled by a rank before `send`, read after `wait_input`."""
        slot = sequence % self._depth
        return InputRows(
            self._hidden[rank, slot, :num_tokens],
            self._ids[rank, slot, :num_tokens],
            self._weights[rank, slot, :num_tokens],
        )

    def send(self, rank: int, sequence: int, target: Target, num_tokens: int) -> None:
        """Publish a filled slot to the workers."""
        slot = sequence % self._depth
        self._header[rank, slot] = (sequence, *target, num_tokens)
        ready = self._memory.arrays["input_ready"]
        advance(ready, rank * self._depth + slot, sequence + 1, self._memory.bell(INPUT_BELL))

    def wait_reply(self, rank: int, sequence: int, deadline_ns: int) -> Outcome | None:
        """Wait for every worker's share of the reply; None at the deadline."""
        for worker in range(self._num_workers):
            index = rank * self._num_workers + worker
            if not self._memory.wait("reply_ready", index, sequence + 1, REPLY_BELL, deadline_ns):
                return None
        status, about = self._status[rank, sequence % self._depth, 0]
        return Outcome(ReplyStatus(int(status)), int(about))

    def output_rows(self, rank: int, sequence: int, num_tokens: int) -> torch.Tensor:
        """The reply rows of a slot, [num_tokens, H]."""
        return self._output[rank, sequence % self._depth, :num_tokens]

    # Worker's end.

    def wait_input(
        self, rank: int, sequence: int, target: Target, num_tokens: int, deadline_ns: int
    ) -> Outcome:
        """Wait for one rank's input and check that it is the planned target and size."""
        slot = sequence % self._depth
        index = rank * self._depth + slot
        while True:
            now_ns = time.monotonic_ns()
            until_ns = min(deadline_ns, now_ns + SLEEP_SLICE_NS)
            if self._memory.wait("input_ready", index, sequence + 1, INPUT_BELL, until_ns):
                break
            if count(self._memory.arrays["rank_state"], rank) == LOST:
                return Outcome(ReplyStatus.RANK_LOST, rank)
            if until_ns == deadline_ns:
                return Outcome(ReplyStatus.INPUT_TIMEOUT, rank)
        if tuple(self._header[rank, slot]) != (sequence, *target, num_tokens):
            return Outcome(ReplyStatus.BAD_INPUT, rank)
        return OK

    def reply(self, worker: int, rank: int, sequence: int, outcome: Outcome) -> None:
        """Publish this worker's share of a rank's reply."""
        self._status[rank, sequence % self._depth, worker] = outcome
        index = rank * self._num_workers + worker
        bell = self._memory.bell(REPLY_BELL)
        advance(self._memory.arrays["reply_ready"], index, sequence + 1, bell)
