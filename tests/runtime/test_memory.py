from __future__ import annotations

import math
import os

import pytest

from afore_kernels.errors import AforeError, MailboxTimeout, PeerLost, PlanRingTimeout
from afore_kernels.runtime import device_weights, mailbox, plan_ring, timeline, window
from afore_kernels.runtime.memory import (
    ACK_BELL,
    NUM_BELLS,
    TierMemory,
    deadline_after,
    decode_error,
)
from afore_kernels.runtime.shared import FAILED, RUNNING, Segment, advance, get_word
from afore_kernels.runtime.transports import local


def test_two_mappings_see_one_layout(make_memory):
    memory = make_memory(num_workers=3, num_ranks=2)
    other = TierMemory(memory.moe, memory.tier, Segment.open(os.dup(memory.segment.fd)))
    assert list(other.arrays) == list(memory.arrays)
    for i, array in enumerate(memory.arrays.values()):
        array.reshape(-1).view("u1")[:] = i + 1
    for i, array in enumerate(other.arrays.values()):
        assert (array.reshape(-1).view("u1") == i + 1).all()
    other.segment.close()


def test_no_component_shadows_a_field_of_another(make_memory):
    memory = make_memory()
    components = [
        mailbox.fields(memory.moe, memory.tier),
        plan_ring.fields(memory.moe, memory.tier),
        local.fields(memory.moe, memory.tier),
        timeline.fields(memory.tier),
        window.fields(memory.tier),
        device_weights.fields(memory.tier),
    ]
    own = {"state", "failure", "bells", "rank_state"}
    assert len(memory.arrays) == len(own) + sum(len(fields) for fields in components)


def test_wait_tells_ready_from_timed_out(make_memory):
    memory = make_memory()
    advance(memory.arrays["plans_copied"], 1, 3, memory.bell(ACK_BELL))
    assert memory.wait("plans_copied", 1, 3, ACK_BELL, deadline_after(5.0)) is True
    assert memory.wait("plans_copied", 1, 4, ACK_BELL, deadline_after(0.01)) is False
    assert memory.wait("plans_copied", 0, 1, ACK_BELL, deadline_after(0.01)) is False


@pytest.mark.parametrize("bell", range(NUM_BELLS))
def test_stop_ends_a_wait_on_any_bell(make_memory, background, bell):
    memory = make_memory()
    waiting = background(memory.wait, "plans_copied", 0, 1, bell, deadline_after(20.0))
    while get_word(memory.bell(bell), 1) == 0:
        pass
    memory.stop()
    with pytest.raises(PeerLost, match="the tier was closed"):
        waiting.result()


def test_first_failure_is_the_one_every_wait_raises(make_memory):
    memory = make_memory()
    assert memory.state[0] == RUNNING
    memory.fail(PlanRingTimeout("worker 1 is late"))
    memory.fail(PeerLost("a longer message that came second"))
    memory.stop()
    assert memory.state[0] == FAILED
    with pytest.raises(PlanRingTimeout, match=r"^worker 1 is late$"):
        memory.wait("plans_copied", 0, 1, ACK_BELL, deadline_after(5.0))


@pytest.mark.parametrize("message", ["x" * 5000, "\U0001f525" * 5000, '"\n' * 5000, ""])
def test_failure_keeps_its_class_whatever_the_message(make_memory, message):
    memory = make_memory()
    memory.fail(MailboxTimeout(message))
    failure = memory.failure()
    assert type(failure) is MailboxTimeout
    assert str(failure) == message[:800]


@pytest.mark.parametrize(
    ("text", "error_class"),
    [
        (b'{"error": "PlanRingTimeout", "message": "m"}', PlanRingTimeout),
        (b'{"error": "NoSuchError", "message": "m"}', AforeError),
        (b'{"error": "__name__", "message": "m"}', AforeError),
        (b'{"error": "PeerLost"}', PeerLost),
        (b"[1]", PeerLost),
        (b"not json", PeerLost),
        (b"\xff\xfe", PeerLost),
        (b"", PeerLost),
    ],
)
def test_decode_error_names_an_error_of_the_package(text, error_class):
    assert type(decode_error(text)) is error_class


def test_any_wait_fits_the_clock():
    assert deadline_after(math.inf) > deadline_after(1e9) > deadline_after(0.0) > 0
    assert deadline_after(math.inf) < 2**63
