"""Fixtures of the runtime's tests: a tier's memory without its processes, and bounded threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.runtime.memory import TierMemory

MemoryFactory = Callable[..., TierMemory]


class Background:
    """A call on a daemon thread."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, arguments), daemon=True)
        self._thread.start()

    def result(self, timeout_s: float = 20.0) -> Any:
        """What the call returned or raised; fails the test if it is still running."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still running after {timeout_s} s"
        if self._error is not None:
            raise self._error
        return self._value

    def join(self) -> None:
        self._thread.join(20.0)

    def _run(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self._value = call(*arguments)
        except BaseException as error:  # raised by `result`
            self._error = error


@pytest.fixture
def background() -> Iterator[Callable[..., Background]]:
    """`background(call, *arguments)` runs a call on a thread that ends with the test."""
    calls: list[Background] = []

    def start(call: Callable[..., Any], *arguments: Any) -> Background:
        calls.append(Background(call, *arguments))
        return calls[-1]

    yield start
    for call in calls:
        call.join()


@pytest.fixture
def make_memory(background: Callable[..., Background]) -> Iterator[MemoryFactory]:
    """`make_memory(moe={...}, **tier)` creates a small tier's memory, stopped after the test.

    It depends on `background`, so that the memory stops before the threads are joined.
    """
    memories: list[TierMemory] = []

    def create(moe: dict[str, Any] | None = None, **tier: Any) -> TierMemory:
        shapes = {
            "num_layers": 2,
            "num_experts": 6,
            "top_k": 2,
            "hidden_size": 8,
            "intermediate_size": 4,
            "tile_m": 4,
        }
        limits = {
            "num_workers": 2,
            "max_tokens_per_rank": 64,
            "targets_in_flight": 2,
            "plan_ring_depth": 64,
            "timeline_events": 64,
        }
        memory = TierMemory.create(MoEConfig(**shapes | (moe or {})), TierConfig(**limits | tier))
        memories.append(memory)
        return memory

    yield create
    for memory in memories:
        memory.stop()
        memory.segment.close()
