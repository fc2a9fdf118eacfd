"""`GraphCache`: eager once, captured once per key, eager for good where a capture fails."""

from __future__ import annotations

import logging

import pytest

from afore_kernels.runtime.executors.graphs import GraphCache, Work


class RecordingCapture:
    """Captures like CUDA: nothing runs meanwhile, and a replay is what was captured."""

    def __init__(self) -> None:
        self.captured: list[Work] = []

    def __call__(self, work: Work) -> Work:
        self.captured.append(work)
        return work


def test_first_run_is_eager_the_second_captures_and_later_ones_replay() -> None:
    capture, ran = RecordingCapture(), []
    cache = GraphCache(capture)
    for name in "abcd":
        cache.run("key", lambda name=name: ran.append(name))  # type: ignore[misc]
    assert ran == ["a", "b", "b", "b"]
    assert len(capture.captured) == 1


def test_keys_have_graphs_of_their_own() -> None:
    capture, ran = RecordingCapture(), []
    cache = GraphCache(capture)
    for _ in range(3):
        cache.run(("experts", 0), lambda: ran.append(0))
        cache.run(("experts", 1), lambda: ran.append(1))
    assert ran == [0, 1] * 3
    assert len(capture.captured) == 2


def test_without_a_capture_everything_is_eager() -> None:
    ran: list[str] = []
    cache = GraphCache(None)
    for _ in range(3):
        cache.run("key", lambda: ran.append("eager"))
    assert ran == ["eager"] * 3


def test_a_failed_capture_falls_back_with_a_logged_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def capture(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    cache, ran = GraphCache(capture), []
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            cache.run(("experts", 3, 64), lambda: ran.append("eager"))
    assert ran == ["eager"] * 4
    (record,) = caplog.records
    assert "('experts', 3, 64)" in record.getMessage()
    assert "not permitted" in record.getMessage()


def test_an_error_of_the_work_itself_is_raised() -> None:
    def work() -> None:
        raise ValueError("a shape")

    cache = GraphCache(RecordingCapture())
    with pytest.raises(ValueError, match="a shape"):
        cache.run("key", work)
