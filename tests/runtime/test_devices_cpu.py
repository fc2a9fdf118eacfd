from __future__ import annotations

import threading
import time

import pytest

from afore_kernels.errors import PeerLost
from afore_kernels.runtime.devices.cpu import CpuEvent, InlineStream, ThreadStream

TIMEOUT_S = 20.0


@pytest.fixture
def stream():
    stream = ThreadStream("test-stream", TIMEOUT_S)
    yield stream
    stream.close()


def test_thread_stream_runs_work_in_order_on_its_own_thread(stream):
    ran = []
    for i in range(100):
        stream.submit(lambda i=i: ran.append((i, threading.current_thread().name)))
    event = stream.record_event()
    assert event.wait(TIMEOUT_S)
    assert ran == [(i, "test-stream") for i in range(100)]


def test_event_passes_when_the_work_before_it_is_done(stream):
    gate = threading.Event()
    stream.submit(lambda: None)
    before = stream.record_event()
    stream.submit(lambda: gate.wait(TIMEOUT_S))
    after = stream.record_event()
    assert before.wait(TIMEOUT_S)
    assert not after.is_done()
    assert after.wait(0.01) is False
    gate.set()
    assert after.wait(TIMEOUT_S)
    assert after.is_done()


def test_wait_event_holds_later_work_and_not_the_caller(stream):
    event, ran = CpuEvent(), []
    stream.submit(lambda: ran.append("before"))
    start = time.monotonic()
    stream.wait_event(event)
    stream.submit(lambda: ran.append("after"))
    assert time.monotonic() - start < TIMEOUT_S / 2
    done = stream.record_event()
    assert done.wait(0.02) is False
    assert ran == ["before"]
    event.set()
    assert done.wait(TIMEOUT_S)
    assert ran == ["before", "after"]


def test_failure_skips_later_work_and_is_raised_by_every_later_event(stream):
    ran = []

    def fail():
        raise ValueError("copy failed")

    stream.submit(lambda: ran.append("before"))
    before = stream.record_event()
    stream.submit(fail)
    stream.submit(lambda: ran.append("after"))
    assert before.wait(TIMEOUT_S)
    for _ in range(2):
        with pytest.raises(ValueError, match="copy failed"):
            stream.record_event().wait(TIMEOUT_S)
    assert ran == ["before"]


def test_stream_that_waits_in_vain_reports_it():
    stream = ThreadStream("test-stream", 0.01)
    stream.wait_event(CpuEvent())
    with pytest.raises(PeerLost, match=r"an event did not come within 0\.01 s"):
        stream.record_event().wait(TIMEOUT_S)
    stream.close()


def test_failure_passes_from_stream_to_stream(stream):
    other = ThreadStream("other-stream", TIMEOUT_S)
    other.submit(lambda: 1 // 0)
    stream.wait_event(other.record_event())
    with pytest.raises(ZeroDivisionError):
        stream.record_event().wait(TIMEOUT_S)
    with pytest.raises(ZeroDivisionError):
        InlineStream(TIMEOUT_S).wait_event(stream.record_event())
    other.close()


def test_close_finishes_the_submitted_work_and_ends_the_thread():
    stream, ran = ThreadStream("closing-stream", TIMEOUT_S), []
    for i in range(10):
        stream.submit(lambda i=i: ran.append(i))
    stream.close()
    assert ran == list(range(10))
    assert "closing-stream" not in [thread.name for thread in threading.enumerate()]


def test_inline_stream_runs_work_at_once_in_the_calling_thread():
    stream, ran = InlineStream(TIMEOUT_S), []
    stream.submit(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    assert stream.record_event().is_done()
    stream.close()


def test_inline_stream_waits_for_events_within_its_timeout(stream):
    gate, ran = threading.Event(), []
    stream.submit(lambda: gate.wait(TIMEOUT_S))
    stream.submit(lambda: ran.append("copy"))
    event = stream.record_event()
    with pytest.raises(PeerLost, match=r"did not come within 0\.01 s"):
        InlineStream(0.01).wait_event(event)
    assert ran == []
    gate.set()
    InlineStream(TIMEOUT_S).wait_event(event)
    assert ran == ["copy"]
