"""What the workers exchange before a target: each contributes an equal share of the token rows.

The global rows of a target are the ranks' rows in rank order (`Plan.rank_tokens`). Worker w
contributes, and later replies, rows `[w * share, (w + 1) * share)`; rows past the last token are
padding, without a valid id. A block also carries what the worker saw of each rank, so that all
workers agree on the target's outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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


def rank_rows(plan: Plan, worker: int, share: int) -> Iterator[RankRows]:
    """The pieces of the ranks' rows that make up a worker's share of `share` rows, in order."""
    first, last = worker * share, min((worker + 1) * share, plan.num_tokens)
    rank_start = 0
    for rank, num_tokens in enumerate(plan.rank_tokens.tolist()):
        low, high = max(first, rank_start), min(last, rank_start + num_tokens)
        if low < high:
            yield RankRows(rank, low - rank_start, high - rank_start, low)
        rank_start += num_tokens


class Gathered(NamedTuple):
    """A target's input as every worker sees it; `num_rows = num_workers * share`, with padding.

    Attributes:
        hidden: [num_rows, H]; undefined in padding.
        expert_ids: int32 [num_rows, top_k]; -1 in padding.
        routing_weights: fp32 [num_rows, top_k]; undefined in padding.
        outcomes: what each worker saw of each rank, int64 [num_workers * num_ranks, 2].
    """

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    routing_weights: torch.Tensor
    outcomes: torch.Tensor


def first_failure(outcomes: torch.Tensor) -> Outcome:
    """The outcome of `Gathered.outcomes` in host memory: OK, or the first failure."""
    failed = outcomes[outcomes[:, 0] != int(ReplyStatus.OK)].tolist()
    return Outcome(ReplyStatus(failed[0][0]), failed[0][1]) if failed else OK


class GatherLayout:
    """The sections of every worker's block: outcomes int64 [num_ranks, 2], rows of each input.

    Args:
        moe, tier: configurations.
        share: rows per worker.
    """

    def __init__(self, moe: MoEConfig, tier: TierConfig, share: int) -> None:
        self.share = share
        self._sections = {
            "hidden": (torch_dtype(moe), share, moe.hidden_size),
            "expert_ids": (torch.int32, share, moe.top_k),
            "routing_weights": (torch.float32, share, moe.top_k),
            "outcomes": (torch.int64, tier.num_ranks, 2),
        }
        self.block_bytes = sum(map(_section_bytes, self._sections.values()))

    def unpack(self, blocks: torch.Tensor, out: Gathered) -> None:
        """Copy the rows of stacked blocks, uint8 [num_workers, block_bytes], to `out`."""
        for name, view in self.view(blocks).items():
            getattr(out, name).view(view.shape).copy_(view)

    def view(self, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
        """The sections of stacked blocks, [num_blocks, rows, width] each."""
        views, offset = {}, 0
        for name, section in self._sections.items():
            dtype, rows, width = section
            used = rows * width * dtype.itemsize
            view = blocks[:, offset : offset + used].view(dtype)
            views[name] = view.reshape(len(blocks), rows, width)
            offset += _section_bytes(section)
        return views


class GatherBlock:
    """One worker's contribution to one target.

    Args:
        layout: of the block.
        plan: of the target.
        worker: whose share.
        block: host memory, uint8 [layout.block_bytes].
    """

    def __init__(self, layout: GatherLayout, plan: Plan, worker: int, block: torch.Tensor) -> None:
        self._pieces = {piece.rank: piece for piece in rank_rows(plan, worker, layout.share)}
        self._first_row = worker * layout.share
        self._sections = {name: view[0] for name, view in layout.view(block[None]).items()}
        num_rows = max(0, min(layout.share, plan.num_tokens - self._first_row))
        self._sections["expert_ids"][num_rows:] = -1

    def add_rank(self, rank: int, outcome: Outcome, rows: InputRows) -> None:
        """Add a rank's rows that fall into this worker's share, if its input is there."""
        self._sections["outcomes"][rank] = torch.tensor(outcome)
        piece = self._pieces.get(rank)
        if piece is None:
            return
        first = piece.row - self._first_row
        at = slice(first, first + piece.stop - piece.start)
        if outcome != OK:
            self._sections["expert_ids"][at] = -1
            return
        for name, tensor in rows._asdict().items():
            self._sections[name][at] = tensor[piece.start : piece.stop]


def _section_bytes(section: tuple[torch.dtype, int, int]) -> int:
    dtype, rows, width = section
    return -(-rows * width * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
