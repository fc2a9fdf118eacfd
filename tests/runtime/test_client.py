"""The client against a scripted tier: the test plays the scheduler and the workers."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
import torch

from afore_kernels.errors import (
    AforeError,
    ConfigError,
    CountMismatchError,
    MailboxTimeout,
    PeerLost,
    PlanError,
    PlanOrderError,
    ReplyTimeout,
    ShapeError,
)
from afore_kernels.plan import Target
from afore_kernels.runtime.client import AttentionClient
from afore_kernels.runtime.mailbox import ENTRY_OK, Mailbox, collect_entry
from afore_kernels.runtime.memory import DEMAND_BELL, PLAN_BELL, TierMemory, deadline_after
from afore_kernels.runtime.shared import advance, count, get_word
from afore_kernels.runtime.timeline import Stage, read_events
from afore_kernels.runtime.transports.local import OK, LocalTransport, Outcome, ReplyStatus

TARGET = Target(3, 1, 0)
IDS = torch.tensor([[0, 5], [2, -1], [2, 0]])


class ScriptedTier:
    """Every worker of a tier, and its scheduler as far as a client sees it."""

    def __init__(self, memory: TierMemory) -> None:
        self.memory = memory
        self._transport = LocalTransport(memory)

    def publish(self, sequence: int) -> None:
        advance(self.memory.arrays["plans_published"], 0, sequence + 1, self.memory.bell(PLAN_BELL))

    def reply(self, sequence: int, outcome: Outcome = OK, value: float = 1.0, rank: int = 0):
        """Reply `value` in every row, as every worker."""
        self.publish(sequence)
        self.collect(sequence)
        self._transport.output_rows(rank, sequence, self.memory.tier.max_tokens_per_rank)[:] = value
        for worker in range(self.memory.tier.num_workers):
            self._transport.reply(worker, rank, sequence, outcome)

    def collect(self, sequence: int) -> None:
        for rank in range(self.memory.tier.num_ranks):
            bell = self.memory.bell(DEMAND_BELL)
            advance(self.memory.arrays["demand_collected"], rank, sequence + 1, bell)

    def serve(self, num_targets: int) -> None:
        """Reply `1 + sequence` to every target once its input is there."""
        depth = self.memory.tier.targets_in_flight
        for sequence in range(num_targets):
            deadline_ns = deadline_after(20.0)
            assert self.memory.wait("demand_posted", 0, sequence + 1, DEMAND_BELL, deadline_ns)
            *target, num_tokens = self.posted(sequence)
            outcome = self._transport.wait_input(
                0, sequence, Target(*target), num_tokens, deadline_ns
            )
            assert outcome == OK
            assert count(self.memory.arrays["input_ready"], sequence % depth) == sequence + 1
            self.reply(sequence, value=1.0 + sequence)

    def posted(self, sequence: int) -> list[int]:
        """Target and token count of rank 0's entry."""
        demand, target = np.zeros(6, np.int32), np.zeros(3, np.int64)
        rank_tokens = np.zeros(self.memory.tier.num_ranks, np.int32)
        mailbox = Mailbox.of(self.memory)
        result = collect_entry(mailbox, 0, sequence, 2, 64, demand, target, rank_tokens)
        assert result == ENTRY_OK
        return [*target.tolist(), int(rank_tokens[0])]


@pytest.fixture
def tier(make_memory):
    return ScriptedTier(make_memory(num_ranks=2, demand_timeout_s=0.05, reply_timeout_s=0.05))


@pytest.fixture
def client(tier):
    with AttentionClient(tier.memory, 0, 0, lambda: None) as client:
        yield client


def inputs(ids=IDS):
    """Hidden states, ids and routing weights; the weight of an id -1 is NaN, which is allowed."""
    weights = torch.where(ids < 0, torch.nan, 0.5)
    return torch.arange(8.0).expand(len(ids), 8), ids, weights


def send(client, target=TARGET, ids=IDS):
    client.send_demand(target, ids)
    client.submit(target, *inputs(ids))


def test_round_trip(tier, client):
    assert (client.moe, client.tier) == (tier.memory.moe, tier.memory.tier)
    send(client)
    entry = tier.memory.arrays["demand_entries"][0, 0]
    assert entry[16:22].tolist() == [2, 0, 2, 0, 0, 1]
    rows = LocalTransport(tier.memory).input_rows(0, 0, 3)
    for row, tensor in zip(rows, inputs(), strict=True):
        assert torch.equal(row.nan_to_num(), tensor.nan_to_num().to(row.dtype))
    assert tuple(tier.memory.arrays["input_header"][0, 0]) == (0, *TARGET, 3)
    tier.reply(0, value=4.0)
    output = client.wait(TARGET)
    assert torch.equal(output, torch.full((3, 8), 4.0))
    tier.reply(0, value=9.0)
    assert (output == 4.0).all()  # the caller's own copy
    stages = [(e.stage, e.sequence, e.value) for e in read_events(tier.memory)]
    assert stages == [(Stage.DEMAND_POSTED, 0, 3), (Stage.RECEIVED, 0, 3)]


def test_rank_without_tokens_takes_part(tier, client):
    send(client, ids=torch.empty(0, 2, dtype=torch.int64))
    assert tier.posted(0) == [*TARGET, 0]
    tier.reply(0)
    assert client.wait(TARGET).shape == (0, 8)


BAD_IDS = {
    "floating point": torch.zeros(3, 2),
    "bool": torch.zeros(3, 2, dtype=torch.bool),
    "one dimension": torch.zeros(6, dtype=torch.int64),
    "another top_k": torch.zeros(3, 3, dtype=torch.int64),
    "too many tokens": torch.zeros(65, 2, dtype=torch.int64),
    "id of no expert": torch.tensor([[0, 6]]),
    "id below -1": torch.tensor([[0, -2]]),
}


@pytest.mark.parametrize("bad", BAD_IDS)
def test_ids_are_checked(tier, client, bad):
    with pytest.raises(ShapeError):
        client.send_demand(TARGET, BAD_IDS[bad])
    assert count(tier.memory.arrays["demand_posted"], 0) == 0
    client.send_demand(TARGET, IDS)
    with pytest.raises(ShapeError):
        client.submit(TARGET, *inputs()[:1], BAD_IDS[bad], inputs()[2])


@pytest.mark.parametrize("target", [(0, 2, 0), (0, -1, 0), (-1, 0, 0), (0, 0, -1), (0, 0, 2**31)])
def test_target_is_checked(client, target):
    with pytest.raises(ShapeError, match="is not a target of 2 layers"):
        client.send_demand(Target(*target), IDS)


HIDDEN, _, WEIGHTS = inputs()
BAD_INPUTS = {
    "hidden size": ({"hidden": torch.zeros(3, 7)}, "hidden is"),
    "hidden rows": ({"hidden": torch.zeros(2, 8)}, "hidden is"),
    "hidden of integers": ({"hidden": torch.zeros(3, 8, dtype=torch.int32)}, "hidden is"),
    "hidden of another dtype": ({"hidden": torch.zeros(3, 8).half()}, "the tier runs float32"),
    "weights shape": ({"weights": torch.zeros(3, 1)}, "routing_weights is"),
    "weights of integers": ({"weights": torch.zeros(3, 2).long()}, "routing_weights is"),
    "NaN weight": ({"weights": WEIGHTS * torch.nan}, "not finite"),
    "infinite weight": ({"weights": WEIGHTS * torch.inf}, "not finite"),
    "other token count": (
        {"hidden": HIDDEN[:2], "ids": IDS[:2], "weights": WEIGHTS[:2]},
        "announced with 3 tokens, submitted with 2",
    ),
}


@pytest.mark.parametrize("bad", BAD_INPUTS)
def test_inputs_are_checked_and_may_be_submitted_again(tier, client, bad):
    changes, message = BAD_INPUTS[bad]
    client.send_demand(TARGET, IDS)
    arguments = {"hidden": HIDDEN, "ids": IDS, "weights": WEIGHTS} | changes
    with pytest.raises(ShapeError, match=message):
        client.submit(TARGET, *arguments.values())
    assert count(tier.memory.arrays["input_ready"], 0) == 0
    client.submit(TARGET, *inputs())
    assert count(tier.memory.arrays["input_ready"], 0) == 1


def test_calls_out_of_order_are_refused(tier, client):
    with pytest.raises(PlanOrderError, match="its demand was not sent"):
        client.submit(TARGET, *inputs())
    with pytest.raises(PlanOrderError, match="its demand was not sent"):
        client.wait(TARGET)
    client.send_demand(TARGET, IDS)
    with pytest.raises(PlanOrderError, match="already in flight"):
        client.send_demand(TARGET, IDS)
    assert count(tier.memory.arrays["demand_posted"], 0) == 1
    client.submit(TARGET, *inputs())
    with pytest.raises(PlanOrderError, match="submitted before"):
        client.submit(TARGET, *inputs())
    tier.reply(0)
    client.wait(TARGET)
    with pytest.raises(PlanOrderError, match="not in flight"):
        client.wait(TARGET)
    client.send_demand(TARGET, IDS)  # the same target may come again once it has ended


STATUS_ERRORS = {
    ReplyStatus.DEMAND_TIMEOUT: (MailboxTimeout, r"no demand of attention rank 1 within 0\.05 s"),
    ReplyStatus.TARGET_MISMATCH: (PlanOrderError, "attention rank 1 posted another target"),
    ReplyStatus.BAD_DEMAND: (PlanError, "demand record of attention rank 1 is not valid"),
    ReplyStatus.INPUT_TIMEOUT: (MailboxTimeout, r"no input of attention rank 1 within 0\.05 s"),
    ReplyStatus.BAD_INPUT: (ShapeError, "input of attention rank 1 is not what it announced"),
    ReplyStatus.RANK_LOST: (PeerLost, "client of attention rank 1 is gone"),
    ReplyStatus.COUNT_MISMATCH: (CountMismatchError, "not those whose demand was sent"),
}


@pytest.mark.parametrize("status", list(ReplyStatus)[1:])
def test_every_status_is_a_named_error_that_ends_the_target(tier, client, status):
    error_class, message = STATUS_ERRORS[status]
    send(client)
    tier.reply(0, Outcome(status, 1))
    with pytest.raises(AforeError, match=message) as raised:
        client.wait(TARGET)
    assert raised.type is error_class
    assert str(TARGET) in str(raised.value)
    with pytest.raises(PlanOrderError, match="not in flight"):
        client.wait(TARGET)


def test_reply_timeout_names_who_is_late_and_keeps_the_target(tier, client):
    send(client)

    def late() -> str:
        with pytest.raises(ReplyTimeout) as raised:
            client.wait(TARGET, timeout_s=0.01)
        return str(raised.value).partition("waiting for ")[2]

    assert late() == "attention rank 1"
    advance(tier.memory.arrays["demand_posted"], 1, 1, tier.memory.bell(DEMAND_BELL))
    assert late() == "the scheduler"
    tier.publish(0)
    assert late() == "worker 0, worker 1"
    LocalTransport(tier.memory).reply(0, 0, 0, OK)
    assert late() == "worker 1"
    tier.reply(0, value=2.0)
    assert (client.wait(TARGET) == 2.0).all()


def test_slot_is_not_reused_before_its_result_was_taken(tier, client):
    targets = [Target(step, 0, 0) for step in range(3)]
    for sequence, target in enumerate(targets[:2]):  # as many as may be in flight
        send(client, target)
        tier.reply(sequence, value=1.0 + sequence)
    with pytest.raises(MailboxTimeout, match="2 targets are in flight and the oldest"):
        client.send_demand(targets[2], IDS)
    assert (client.wait(targets[1]) == 2.0).all()  # not the oldest: its slot is another
    with pytest.raises(MailboxTimeout, match="2 targets are in flight"):
        client.send_demand(targets[2], IDS)
    assert (client.wait(targets[0]) == 1.0).all()
    send(client, targets[2])
    tier.reply(2, value=3.0)
    assert (client.wait(targets[2]) == 3.0).all()


def test_demand_that_the_scheduler_does_not_collect_can_be_sent_again(tier, client):
    targets = [Target(step, 0, 0) for step in range(3)]
    transport = LocalTransport(tier.memory)
    for sequence, target in enumerate(targets[:2]):
        send(client, target)
        for worker in range(2):
            transport.reply(worker, 0, sequence, OK)
        client.wait(target)
    with pytest.raises(MailboxTimeout, match="has not collected sequence 0 of attention rank 0"):
        client.send_demand(targets[2], IDS)
    tier.collect(1)
    client.send_demand(targets[2], IDS)
    assert tier.posted(2) == [*targets[2], 3]


def test_first_sequence_is_that_of_admission(tier):
    client = AttentionClient(tier.memory, 0, 41, lambda: None)
    tier.collect(40)
    send(client)
    assert tier.posted(41) == [*TARGET, 3]
    tier.reply(41, value=5.0)
    assert (client.wait(TARGET) == 5.0).all()


def test_threads_drive_their_own_microbatches(make_memory, background):
    num_threads, num_steps = 3, 10
    tier = ScriptedTier(make_memory(targets_in_flight=4, timeline_events=4096))
    client = AttentionClient(tier.memory, 0, 0, lambda: None)
    served = background(tier.serve, num_threads * num_steps)

    def drive(microbatch: int) -> list[float]:
        results = []
        for step in range(num_steps):
            target = Target(step, 0, microbatch)
            send(client, target, IDS[: microbatch + 1])
            output = client.wait(target, timeout_s=20.0)
            assert output.shape == (microbatch + 1, 8)
            assert (output == output[0, 0]).all()
            results.append(float(output[0, 0]))
        return results

    driven = [background(drive, microbatch) for microbatch in range(num_threads)]
    results = [thread.result() for thread in driven]
    served.result()
    assert all(values == sorted(values) for values in results)
    num_targets = num_threads * num_steps
    assert sorted(value for values in results for value in values) == [
        1.0 + sequence for sequence in range(num_targets)
    ]
    stages = [event.stage for event in read_events(tier.memory)]
    assert stages.count(Stage.DEMAND_POSTED) == stages.count(Stage.RECEIVED) == num_targets


def test_stop_of_the_tier_ends_a_wait(tier, client, background):
    send(client)
    waiting = background(client.wait, TARGET, 20.0)
    tier.memory.fail(PeerLost("worker 1 was killed by SIGKILL"))
    with pytest.raises(PeerLost, match="worker 1 was killed by SIGKILL"):
        waiting.result()


def test_stop_of_the_tier_ends_a_post_that_waits_for_a_slot(make_memory, background):
    memory = make_memory(demand_timeout_s=20.0)
    client = AttentionClient(memory, 0, 0, lambda: None)
    for step in range(2):
        client.send_demand(Target(step, 0, 0), IDS)
    waiting = background(client.send_demand, Target(2, 0, 0), IDS)
    memory.fail(PeerLost("the scheduler was killed by SIGKILL"))
    with pytest.raises(PeerLost, match="the scheduler was killed by SIGKILL"):
        waiting.result(10.0)


def test_close_gives_the_rank_back_once(tier):
    closed = []
    with AttentionClient(tier.memory, 0, 0, lambda: closed.append(True)) as client:
        pass
    client.close()
    assert closed == [True]
    with pytest.raises(PeerLost, match="the client was closed"):
        client.send_demand(TARGET, IDS)


class Listener:
    """A tier's socket that answers one hello."""

    def __init__(self, path: str, answer: bytes, fds: list[int]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(20.0)
        self._socket.bind(path)
        self._socket.listen()
        self._answer = answer
        self._fds = fds

    def serve(self) -> tuple[bytes, bytes]:
        """Returns the hello and what came after it, up to the end of the connection."""
        connection, _ = self._socket.accept()
        connection.settimeout(20.0)
        with self._socket, connection:
            hello = connection.recv(4096)
            socket.send_fds(connection, [self._answer], self._fds)
            return hello, connection.recv(4096)


def test_connect_maps_the_tier_and_close_hangs_up(tier, background, tmp_path):
    memory = tier.memory
    answer = {"moe": memory.moe.to_json(), "tier": memory.tier.to_json(), "first_sequence": 1}
    path = str(tmp_path / "s")
    listener = Listener(path, json.dumps(answer).encode(), [memory.segment.fd])
    served = background(listener.serve)
    with AttentionClient.connect(path, rank=1) as client:
        assert (client.rank, client.moe, client.tier) == (1, memory.moe, memory.tier)
        client.send_demand(TARGET, IDS)
        assert get_word(memory.arrays["demand_posted"], 8) == 2
    assert served.result() == (b'{"rank": 1}\n', b"")


def test_connect_raises_the_refusal(background, tmp_path):
    path = str(tmp_path / "s")
    answer = json.dumps({"error": "ConfigError", "message": "refused: no rank 7"}).encode()
    served = background(Listener(path, answer, []).serve)
    with pytest.raises(ConfigError, match="refused: no rank 7"):
        AttentionClient.connect(path, rank=7)
    assert served.result()[1] == b""


def test_connect_to_nothing_is_peer_lost(tmp_path):
    with pytest.raises(PeerLost, match="no tier answers at"):
        AttentionClient.connect(str(tmp_path / "s"))


def test_connect_to_a_silent_tier_ends_within_its_timeout(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(PeerLost, match=r"no tier answers at .* timed out"):
            AttentionClient.connect(str(tmp_path / "s"), timeout_s=0.05)
