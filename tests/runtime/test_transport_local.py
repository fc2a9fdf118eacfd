from __future__ import annotations

import pytest
import torch

from afore_kernels.errors import PeerLost
from afore_kernels.plan import Target
from afore_kernels.runtime.memory import INPUT_BELL, LOST, REPLY_BELL, deadline_after
from afore_kernels.runtime.shared import advance, get_word
from afore_kernels.runtime.transports.local import (
    OK,
    LocalTransport,
    Outcome,
    ReplyStatus,
    torch_dtype,
)

TARGET = Target(2**40, 1, 3)
NUM_TOKENS = 5


@pytest.fixture
def memory(make_memory):
    return make_memory(num_ranks=2, num_workers=3, targets_in_flight=2)


@pytest.fixture
def transport(memory):
    return LocalTransport(memory)


def inputs(transport: LocalTransport, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [rows.shape for rows in transport.input_rows(0, 0, NUM_TOKENS)]
    return [torch.randint(0, 6, shape, generator=generator) for shape in shapes]


def wait_input(transport, rank=0, sequence=0, target=TARGET, num_tokens=NUM_TOKENS, seconds=5.0):
    return transport.wait_input(rank, sequence, target, num_tokens, deadline_after(seconds))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_inputs_of_all_ranks_and_targets_in_flight_arrive_unmixed(make_memory, dtype):
    memory = make_memory({"dtype": dtype}, num_ranks=2, targets_in_flight=2)
    transport, worker = LocalTransport(memory), LocalTransport(memory)
    assert torch_dtype(memory.moe) is getattr(torch, dtype)
    slots = [(rank, sequence) for rank in range(2) for sequence in (6, 7)]
    for seed, (rank, sequence) in enumerate(slots):
        rows = transport.input_rows(rank, sequence, NUM_TOKENS)
        for row, tensor in zip(rows, inputs(transport, seed), strict=True):
            row.copy_(tensor)
        transport.send(rank, sequence, TARGET, NUM_TOKENS)
    for seed, (rank, sequence) in enumerate(slots):
        assert wait_input(worker, rank, sequence) == OK
        rows = worker.input_rows(rank, sequence, NUM_TOKENS)
        assert rows.hidden.dtype is torch_dtype(memory.moe)
        for row, tensor in zip(rows, inputs(transport, seed), strict=True):
            assert (row == tensor).all()


@pytest.mark.parametrize(
    "announced",
    [
        {"target": TARGET._replace(step=1)},
        {"target": TARGET._replace(layer=0)},
        {"target": TARGET._replace(microbatch=2)},
        {"num_tokens": NUM_TOKENS + 1},
        {"sequence": -2},  # the slot's previous target
    ],
)
def test_input_that_is_not_the_planned_one_is_bad(transport, announced):
    transport.send(1, 0, TARGET, NUM_TOKENS)
    outcome = wait_input(transport, rank=1, **announced)
    assert outcome == Outcome(ReplyStatus.BAD_INPUT, 1)
    assert wait_input(transport, rank=1) == OK


def test_missing_input_times_out_and_names_the_rank(transport):
    transport.send(0, 0, TARGET, NUM_TOKENS)
    outcome = wait_input(transport, rank=1, seconds=0.02)
    assert outcome == Outcome(ReplyStatus.INPUT_TIMEOUT, 1)
    assert wait_input(transport, sequence=2, seconds=0.02) == Outcome(ReplyStatus.INPUT_TIMEOUT, 0)


def test_input_of_a_lost_rank_is_not_waited_for(memory, transport, background):
    waiting = background(wait_input, transport, 1, 0, TARGET, NUM_TOKENS, 20.0)
    while get_word(memory.bell(INPUT_BELL), 1) == 0:
        pass
    advance(memory.arrays["rank_state"], 1, LOST, memory.bell(INPUT_BELL))
    assert waiting.result(10.0) == Outcome(ReplyStatus.RANK_LOST, 1)


def test_input_that_a_lost_rank_had_sent_is_used(memory, transport):
    transport.send(1, 0, TARGET, NUM_TOKENS)
    advance(memory.arrays["rank_state"], 1, LOST, memory.bell(INPUT_BELL))
    assert wait_input(transport, rank=1) == OK


def test_reply_is_complete_when_every_worker_has_replied(transport):
    for worker in (0, 2):
        transport.reply(worker, 1, 0, OK)
    assert transport.wait_reply(1, 0, deadline_after(0.02)) is None
    transport.reply(1, 0, 0, OK)  # another rank's
    assert transport.wait_reply(1, 0, deadline_after(0.02)) is None
    transport.reply(1, 1, 0, OK)
    assert transport.wait_reply(1, 0, deadline_after(5.0)) == OK
    assert transport.wait_reply(1, 1, deadline_after(0.02)) is None


@pytest.mark.parametrize("status", list(ReplyStatus))
def test_reply_carries_the_outcome_of_its_target(transport, status):
    for sequence, outcome in ((4, Outcome(status, 1)), (5, OK)):
        for worker in range(3):
            transport.reply(worker, 0, sequence, outcome)
    assert transport.wait_reply(0, 4, deadline_after(5.0)) == Outcome(status, 1)
    assert transport.wait_reply(0, 5, deadline_after(5.0)) == OK


def test_output_rows_are_the_same_memory_at_both_ends(memory, transport):
    worker = LocalTransport(memory)
    worker.output_rows(1, 3, NUM_TOKENS)[:] = 7.0
    assert (transport.output_rows(1, 3, NUM_TOKENS) == 7.0).all()
    assert (transport.output_rows(1, 3, NUM_TOKENS + 1)[NUM_TOKENS] == 0.0).all()
    for rank, sequence in ((0, 3), (1, 2)):
        assert (transport.output_rows(rank, sequence, NUM_TOKENS) == 0.0).all()
    assert transport.output_rows(0, 0, 0).shape == (0, memory.moe.hidden_size)


def test_waits_end_when_the_tier_stops(memory, transport, background):
    waiting = background(transport.wait_reply, 0, 0, deadline_after(20.0))
    while get_word(memory.bell(REPLY_BELL), 1) == 0:
        pass
    memory.stop()
    with pytest.raises(PeerLost):
        waiting.result()
    with pytest.raises(PeerLost):
        wait_input(transport)
