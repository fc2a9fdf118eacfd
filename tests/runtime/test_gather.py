from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.runtime.gather import (
    GatherBlock,
    Gathered,
    GatherLayout,
    first_failure,
    rank_rows,
)
from afore_kernels.runtime.transports.local import OK, InputRows, Outcome, ReplyStatus, torch_dtype
from afore_kernels.testing import random_plan

gather_property = settings(max_examples=60, deadline=None, derandomize=True)
rank_tokens_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def plan_of(rank_tokens: list[int], num_workers: int) -> Plan:
    placement = PrimaryPlacement(6, num_workers, 1)
    return random_plan(np.zeros(6, np.int32), placement, 4, 0, rank_tokens=rank_tokens)


def configs(rank_tokens: list[int], num_workers: int, dtype: str = "float32"):
    moe = MoEConfig(
        num_layers=1, num_experts=6, top_k=3, hidden_size=5, intermediate_size=4, dtype=dtype
    )
    return moe, TierConfig(num_workers=num_workers, num_ranks=len(rank_tokens))


def draw_inputs(moe: MoEConfig, rank_tokens: list[int], seed: int = 0) -> list[InputRows]:
    generator = torch.Generator().manual_seed(seed)
    return [
        InputRows(
            torch.randn(rows, moe.hidden_size, generator=generator).to(torch_dtype(moe)),
            torch.randint(-1, 6, (rows, moe.top_k), generator=generator, dtype=torch.int32),
            torch.rand(rows, moe.top_k, generator=generator),
        )
        for rows in rank_tokens
    ]


def gather(moe, tier, plan, inputs, outcome_of=lambda worker, rank: OK, extra_rows=0) -> Gathered:
    """What every worker unpacks when each has seen `outcome_of(worker, rank)`."""
    num_workers = tier.num_workers
    layout = GatherLayout(moe, tier, -(-plan.num_tokens // num_workers) + extra_rows)
    # What torch.empty may hold: no valid id.
    blocks = torch.full((num_workers, layout.block_bytes), 0x7F, dtype=torch.uint8)
    for worker in range(num_workers):
        block = GatherBlock(layout, plan, worker, blocks[worker])
        for rank, rows in enumerate(inputs):
            block.add_rank(rank, outcome_of(worker, rank), rows)
    num_rows = num_workers * layout.share
    gathered = Gathered(
        torch.empty(num_rows, moe.hidden_size, dtype=torch_dtype(moe)),
        torch.empty(num_rows, moe.top_k, dtype=torch.int32),
        torch.empty(num_rows, moe.top_k),
        torch.empty(num_workers * tier.num_ranks, 2, dtype=torch.int64),
    )
    layout.unpack(blocks, gathered)
    return gathered


@gather_property
@given(rank_tokens_lists, st.integers(1, 7))
def test_pieces_cover_every_row_exactly_once(rank_tokens, num_workers):
    plan = plan_of(rank_tokens, num_workers)
    rank_starts = np.cumsum([0, *rank_tokens])
    share = -(-plan.num_tokens // num_workers)
    owners = np.full(plan.num_tokens, -1)
    for worker in range(num_workers):
        next_row = worker * share
        for piece in rank_rows(plan, worker, share):
            assert piece.row == next_row
            assert 0 <= piece.start < piece.stop <= rank_tokens[piece.rank]
            assert piece.row == rank_starts[piece.rank] + piece.start
            next_row += piece.stop - piece.start
            assert (owners[piece.row : next_row] == -1).all()
            owners[piece.row : next_row] = worker
    assert (owners == np.arange(plan.num_tokens) // max(share, 1)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@gather_property
@given(rank_tokens_lists, st.integers(1, 7), st.integers(0, 3))
def test_blocks_of_all_workers_unpack_to_the_inputs_in_rank_order(
    dtype, rank_tokens, num_workers, extra_rows
):
    moe, tier = configs(rank_tokens, num_workers, dtype)
    plan = plan_of(rank_tokens, num_workers)
    inputs = draw_inputs(moe, rank_tokens)
    expected = [torch.cat(tensors) for tensors in zip(*inputs)]
    gathered = gather(moe, tier, plan, inputs, extra_rows=extra_rows)
    assert first_failure(gathered.outcomes) == OK
    for found, tensor in zip(gathered[:3], expected, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found[: plan.num_tokens], tensor)
    assert (gathered.expert_ids[plan.num_tokens :] == -1).all(), "padding is no work"


@gather_property
@given(rank_tokens_lists, st.integers(1, 5), st.data())
def test_failure_seen_by_any_worker_is_the_outcome_of_all(rank_tokens, num_workers, data):
    moe, tier = configs(rank_tokens, num_workers)
    plan = plan_of(rank_tokens, num_workers)
    bad_rank = data.draw(st.integers(0, len(rank_tokens) - 1))
    bad_worker = data.draw(st.integers(0, num_workers - 1))
    status = data.draw(st.sampled_from(list(ReplyStatus)[1:]))
    failure = Outcome(status, bad_rank)

    def outcome_of(worker, rank):
        return failure if (worker, rank) == (bad_worker, bad_rank) else OK

    inputs = draw_inputs(moe, rank_tokens)
    gathered = gather(moe, tier, plan, inputs, outcome_of)
    assert first_failure(gathered.outcomes) == failure
    # The failed rank's rows of that worker are no work: their memory was never written.
    assert ((gathered.expert_ids >= -1) & (gathered.expert_ids < 6)).all()


def test_workers_agree_on_one_of_several_failures():
    rank_tokens = [3, 3]
    moe, tier = configs(rank_tokens, 3)
    failures = {
        (2, 0): Outcome(ReplyStatus.INPUT_TIMEOUT, 0),
        (1, 1): Outcome(ReplyStatus.RANK_LOST, 1),
    }
    gathered = gather(
        moe,
        tier,
        plan_of(rank_tokens, 3),
        draw_inputs(moe, rank_tokens),
        lambda worker, rank: failures.get((worker, rank), OK),
    )
    assert first_failure(gathered.outcomes) == Outcome(ReplyStatus.RANK_LOST, 1)
