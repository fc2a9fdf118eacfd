"""The host executor: the torch twin of the kernels, on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from afore_kernels.config import MoEConfig
from afore_kernels.gemm.tiles import PairTiles, TileSchedule
from afore_kernels.gemm.torch_executor import run_dense_ffn, run_expert_ffn
from afore_kernels.partition.intervals import SlotIntervals, pair_intervals
from afore_kernels.partition.pack import partition_pairs
from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.runtime.executors import ShareSize
from afore_kernels.runtime.gather import Gathered
from afore_kernels.runtime.weights import ExpertSlots


class _Staged(NamedTuple):
    """What a plan alone determines."""

    intervals: SlotIntervals
    schedule: TileSchedule


class HostExecutor:
    """Runs a worker's share in host memory.

    Args:
        worker: this worker.
        moe: shapes.
        placement: of the tier.
        slots: this worker's weights.
        num_lanes: targets in flight on the worker.
    """

    def __init__(
        self,
        worker: int,
        moe: MoEConfig,
        placement: PrimaryPlacement,
        slots: ExpertSlots,
        num_lanes: int,
    ) -> None:
        self._worker = worker
        self._activation = moe.activation
        self._placement = placement
        self._slots = slots
        self._staged: list[_Staged | None] = [None] * num_lanes
        self._mismatched = [-1] * num_lanes
        self._tiles: PairTiles | None = None

    def rows_per_worker(self, num_tokens: int) -> int:
        """An equal share, rounded up."""
        return -(-num_tokens // self._placement.num_workers)

    def stage(self, lane: int, plan: Plan) -> ShareSize:
        """Derive intervals and tiles before the inputs are there."""
        intervals = pair_intervals(plan, self._placement, self._worker)
        schedule = intervals.tile_schedule(plan.tile_m)
        self._staged[lane] = _Staged(intervals, schedule)
        return ShareSize(int(schedule.pairs_per_slot.sum()), schedule.num_tiles)

    def partition(self, lane: int, gathered: Gathered) -> None:
        """Select this worker's pairs and check the counts."""
        staged = self._staged[lane]
        assert staged is not None
        partition = partition_pairs(gathered.expert_ids.numpy(), *staged)
        self._tiles = partition.tiles
        self._mismatched[lane] = partition.mismatched_expert

    def run_experts(self, layer: int, gathered: Gathered, out: torch.Tensor) -> None:
        """Run the selected pairs and this worker's columns of the shared expert."""
        slots, tiles = self._slots, self._tiles
        assert tiles is not None
        routed = run_expert_ffn(
            gathered.hidden,
            gathered.routing_weights,
            slots.gate_up[layer],
            slots.down[layer],
            tiles,
            activation=self._activation,
            gate_up_bias=None if slots.gate_up_bias is None else slots.gate_up_bias[layer],
            down_bias=None if slots.down_bias is None else slots.down_bias[layer],
        )
        if slots.shared_gate_up is not None and slots.shared_down is not None:
            routed += run_dense_ffn(
                gathered.hidden,
                slots.shared_gate_up[layer],
                slots.shared_down[layer],
                activation=self._activation,
            )
        out.copy_(routed)

    def mismatched_expert(self, lane: int) -> int:
        """Of the lane's last partition."""
        return self._mismatched[lane]
