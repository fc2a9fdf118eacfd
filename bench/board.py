"""Where the processes of the mailbox benchmark note what they saw, and how they pace each other."""

from __future__ import annotations

import numpy as np

from afore_kernels.runtime.memory import deadline_after
from afore_kernels.runtime.shared import (
    READY,
    Field,
    Segment,
    bells,
    compiled,
    counters,
    fetch_add,
    layout_bytes,
    map_fields,
    ring_bell,
    wait_at_least,
)
from bench.channels import TIMEOUT_S


class Board:
    """One shared segment, mapped before the processes fork.

    Attributes:
        read_ns: when a worker had read a plan, int64 [links, num_workers, sequences].
        digest: checksum of the assignment it read, same shape.
        planned_ns: planning time in the message links' planner, int64 [links, sequences].
    """

    def __init__(self, num_links: int, num_workers: int, num_sequences: int) -> None:
        fields = {
            "num_reads": counters(1),
            "bell": bells(1),
            "state": Field(np.int64, (8,)),
            "read_ns": Field(np.int64, (num_links, num_workers, num_sequences)),
            "digest": Field(np.int64, (num_links, num_workers, num_sequences)),
            "planned_ns": Field(np.int64, (num_links, num_sequences)),
        }
        self._arrays = map_fields(Segment.create("afore-bench", layout_bytes(fields)), fields)
        self._bell = self._arrays["bell"][0]
        self._num_workers = num_workers
        self.read_ns, self.digest = self._arrays["read_ns"], self._arrays["digest"]
        self.planned_ns = self._arrays["planned_ns"]

    def count_read(self) -> None:
        """Count one worker's read; only the last worker of a target wakes the poster."""
        _count_read(self._arrays["num_reads"], self._num_workers, self._bell)

    def wait_until_read(self, num_targets: int) -> None:
        """Wait until every worker has read `num_targets` plans, over all links."""
        result = wait_at_least(
            self._arrays["num_reads"],
            0,
            num_targets * self._num_workers,
            self._bell,
            self._arrays["state"],
            deadline_after(TIMEOUT_S),
        )
        if result != READY:
            raise TimeoutError(f"a worker has not read its plans within {TIMEOUT_S} s")


@compiled
def _count_read(num_reads, num_workers, bell):  # type: ignore[no-untyped-def]
    if (fetch_add(num_reads, 0, np.int64(1)) + 1) % num_workers == 0:
        ring_bell(bell)
