"""Executors: a worker's share of a target, from a plan and the gathered rows to a partial output.

`host` runs the torch executor on a CPU, `triton` the kernels on a GPU. Both keep what the host
prepares for a target in the lane of that target, since the host runs ahead of the device.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from afore_kernels.plan import Plan
from afore_kernels.runtime.gather import Gathered


class ShareSize(NamedTuple):
    """What a plan gives one worker."""

    num_pairs: int
    num_tiles: int


class Executor(Protocol):
    """One worker's executor. The model stream runs `partition` and `run_experts`."""

    def rows_per_worker(self, num_tokens: int) -> int:
        """Rows that each worker gathers and replies for a target; the same on every worker."""

    def stage(self, lane: int, plan: Plan) -> ShareSize:
        """Keep in host memory what `plan` needs; nothing queued reads the lane any more."""

    def partition(self, lane: int, gathered: Gathered) -> None:
        """Select exactly this worker's pairs (Eq. 11) and check the staged plan's counts."""

    def run_experts(self, layer: int, gathered: Gathered, out: torch.Tensor) -> None:
        """Write this worker's partial output, fp32 [num_rows, H], of the pairs selected last."""

    def mismatched_expert(self, lane: int) -> int:
        """First expert whose gathered pairs differ from the plan's demand, or -1.

        Only once the model stream has passed `partition`.
        """
