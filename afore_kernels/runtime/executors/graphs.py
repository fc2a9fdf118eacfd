"""CUDA graphs of steady-state decode: work on static addresses, captured once and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger(__name__)

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Records the launches of some work, and returns what launches them again."""


class CudaCapture:
    """Captures on the current stream; all graphs share one memory pool, as they never overlap."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Capture `work` without running it.

        Raises:
            RuntimeError: if something in it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls belong to the capture: others wait for events meanwhile.
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            work()
        return graph.replay


class GraphCache:
    """Runs work eagerly the first time, which compiles it, and as a graph from then on.

    Args:
        capture: how to capture, or None to run everything eagerly.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._replays: dict[Hashable, Work | None] = {}

    def run(self, key: Hashable, work: Work) -> None:
        """Run `work`, which for one key always launches the same on the same addresses.

        Falls back to eager runs, with a logged reason, if the work cannot be captured.
        """
        if key not in self._replays:
            self._replays[key] = None
            work()
            return
        replay = self._replays[key]
        if replay is None:
            replay = self._replays[key] = self._captured(key, work)
        replay()

    def _captured(self, key: Hashable, work: Work) -> Work:
        if self._capture is None:
            return work
        try:
            return self._capture(work)
        except RuntimeError as error:
            logger.warning("%s runs without a CUDA graph: %s", key, error)
            return work
