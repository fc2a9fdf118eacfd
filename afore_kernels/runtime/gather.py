"""What the workers exchange before a target: each contributes an equal share of the token rows.

The global rows of a target are the ranks' rows in rank order (`Plan.rank_tokens`). Worker w
contributes, and later replies, rows `[w * share, (w + 1) * share)` with `share = ceil(num_tokens /
num_workers)`. A block also carries what the worker saw of each rank, so that all workers agree on
the target's outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.plan import Plan
from afore_kernels.runtime.transports.local import (
    OK,
    InputRows,
    Outcome,
    ReplyStatus,
    torch_dtype,
)

_ALIGNMENT = 16


class RankRows(NamedTuple):
    """Rows [start, stop) of one rank, which are global rows from `row` on."""

    rank: int
    start: int
    stop: int
    row: int


def rows_per_worker(plan: Plan, num_workers: int) -> int:
    """Token rows each worker contributes and replies, the last ones padded."""
    return -(-plan.num_tokens // num_workers)


def rank_rows(plan: Plan, worker: int, num_workers: int) -> Iterator[RankRows]:
    """The pieces of the ranks' rows that make up a worker's share, in order."""
    share = rows_per_worker(plan, num_workers)
    first, last = worker * share, min((worker + 1) * share, plan.num_tokens)
    rank_start = 0
    for rank, num_tokens in enumerate(plan.rank_tokens.tolist()):
        low, high = max(first, rank_start), min(last, rank_start + num_tokens)
        if low < high:
            yield RankRows(rank, low - rank_start, high - rank_start, low)
        rank_start += num_tokens


class Gathered(NamedTuple):
    """A target's input as every worker sees it.

    Attributes:
        hidden: [num_tokens, H].
        expert_ids: int32 [num_tokens, top_k].
        routing_weights: fp32 [num_tokens, top_k].
        outcome: OK, or the first failure any worker saw.
    """

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    routing_weights: torch.Tensor
    outcome: Outcome


class GatherBlock:
    """One worker's contribution: outcomes int64 [num_ranks, 2], then its rows of each input."""

    def __init__(self, moe: MoEConfig, tier: TierConfig, plan: Plan, worker: int) -> None:
        self._plan = plan
        self._share = rows_per_worker(plan, tier.num_workers)
        self._pieces = {p.rank: p for p in rank_rows(plan, worker, tier.num_workers)}
        self._first_row = worker * self._share
        self._sections = {
            "outcome": (torch.int64, tier.num_ranks, 2),
            "hidden": (torch_dtype(moe), self._share, moe.hidden_size),
            "expert_ids": (torch.int32, self._share, moe.top_k),
            "routing_weights": (torch.float32, self._share, moe.top_k),
        }
        num_bytes = sum(_section_bytes(section) for section in self._sections.values())
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._mine = {name: tensor[0] for name, tensor in self._view(self.bytes[None]).items()}

    def add_rank(self, rank: int, outcome: Outcome, rows: InputRows) -> None:
        """Add a rank's rows that fall into this worker's share, if its input is there."""
        self._mine["outcome"][rank] = torch.tensor(outcome)
        piece = self._pieces.get(rank)
        if piece is None:
            return
        at = slice(
            piece.row - self._first_row, piece.row - self._first_row + piece.stop - piece.start
        )
        if outcome != OK:
            self._mine["expert_ids"][at] = -1
            return
        for name, tensor in rows._asdict().items():
            self._mine[name][at] = tensor[piece.start : piece.stop]

    def unpack(self, gathered: torch.Tensor) -> Gathered:
        """Read the stacked blocks of all workers, uint8 [num_workers, block bytes]."""
        views = self._view(gathered)
        num_tokens = self._plan.num_tokens

        def rows(name: str) -> torch.Tensor:
            return views[name].flatten(0, 1)[:num_tokens]

        outcome = OK
        failed = views["outcome"].flatten(0, 1).numpy()
        failed = failed[failed[:, 0] != int(ReplyStatus.OK)]
        if len(failed):
            outcome = Outcome(ReplyStatus(int(failed[0, 0])), int(failed[0, 1]))
        return Gathered(rows("hidden"), rows("expert_ids"), rows("routing_weights"), outcome)

    def _view(self, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
        views, offset = {}, 0
        for name, section in self._sections.items():
            dtype, rows, width = section
            used = rows * width * dtype.itemsize
            view = blocks[:, offset : offset + used].view(dtype)
            views[name] = view.reshape(len(blocks), rows, width)
            offset += _section_bytes(section)
        return views


def _section_bytes(section: tuple[torch.dtype, int, int]) -> int:
    dtype, rows, width = section
    return int(np.ceil(rows * width * dtype.itemsize / _ALIGNMENT)) * _ALIGNMENT
