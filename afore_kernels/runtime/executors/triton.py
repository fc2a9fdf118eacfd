"""The Triton executor: a worker's share on a GPU, without a host sync.

Every buffer has a fixed address and every count is read on the device, so partition and expert FFN
are captured as CUDA graphs, one per number of rows and, for the FFN, per layer. The plan record is
uploaded before the replay that expands it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from afore_kernels.config import MoEConfig
from afore_kernels.errors import InfeasiblePlanError
from afore_kernels.gemm.activation import gated_activation
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import LaunchConfig
from afore_kernels.gemm.quant import ExpertWeight
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn
from afore_kernels.partition.device_plan import STATUS_WORDS, DevicePlan, PlanStatus
from afore_kernels.partition.expand import PlanDefect
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.plan import Plan, PlanLayout
from afore_kernels.runtime.devices import Device
from afore_kernels.runtime.executors import ShareSize
from afore_kernels.runtime.executors.graphs import GraphCache
from afore_kernels.runtime.gather import Gathered
from afore_kernels.runtime.weights import ExpertSlots

_ROW_STEPS = 8


class TritonExecutor:
    """Runs a worker's share with the Triton kernels.

    Args:
        worker: this worker.
        moe: shapes.
        layout: of the tier's plan records.
        slots: this worker's weights, on the device.
        device: of this worker.
        max_tokens: of a target, over all ranks.
        num_lanes: targets in flight on the worker.
        launch: block sizes.
        graphs: runs partition and FFN.
        idle_sms: multiprocessors left to copies.
    """

    def __init__(
        self,
        worker: int,
        moe: MoEConfig,
        layout: PlanLayout,
        slots: ExpertSlots,
        device: Device,
        max_tokens: int,
        num_lanes: int,
        *,
        launch: LaunchConfig,
        graphs: GraphCache,
        idle_sms: int = 0,
    ) -> None:
        self._worker = worker
        self._moe = moe
        self._layout = layout
        self._slots = slots
        self._launch = launch
        self._graphs = graphs
        self._idle_sms = idle_sms
        num_workers = layout.placement.num_workers
        max_pairs = num_workers * self.rows_per_worker(max_tokens) * moe.top_k
        where = device.torch_device
        self._staged = [
            device.host_buffer(layout.record_bytes).view(torch.int32) for _ in range(num_lanes)
        ]
        self._statuses = [
            device.host_buffer(4 * STATUS_WORDS).view(torch.int32) for _ in range(num_lanes)
        ]
        self._record = torch.empty(layout.record_bytes // 4, dtype=torch.int32, device=where)
        self._plan = DevicePlan.allocate(layout, worker, moe.tile_m, max_pairs, where)
        self._tiles = DeviceTiles.allocate(self._plan.schedule, max_pairs)
        self._workspace = Workspace.allocate(
            self._plan.schedule.max_rows,
            moe.hidden_size,
            moe.intermediate_size,
            slots.gate_up.dtype,
            where,
        )
        interleaved = moe.activation.interleaved
        self._gate_up = [ExpertWeight.gate_up(w, interleaved=interleaved) for w in slots.gate_up]
        self._down = [ExpertWeight.down(w) for w in slots.down]

    def rows_per_worker(self, num_tokens: int) -> int:
        """An equal share, rounded up to one of few sizes, each of which has its graphs.

        At most an eighth of it is padding from 8 rows on.
        """
        share = max(1, -(-num_tokens // self._layout.placement.num_workers))
        step = max(1, (1 << (share - 1).bit_length()) // 2 // _ROW_STEPS)
        return -(-share // step) * step

    def stage(self, lane: int, plan: Plan) -> ShareSize:
        """Serialise the plan, which its reader has checked, for the upload."""
        self._staged[lane].numpy()[:] = self._layout.pack(plan).view(np.int32)
        intervals = pair_intervals(plan, self._layout.placement, self._worker)
        schedule = intervals.tile_schedule(plan.tile_m)
        return ShareSize(int(schedule.pairs_per_slot.sum()), schedule.num_tiles)

    def partition(self, lane: int, gathered: Gathered) -> None:
        """Expand the plan, select this worker's pairs, and fetch the status."""
        self._record.copy_(self._staged[lane], non_blocking=True)
        num_rows = len(gathered.expert_ids)
        self._graphs.run(("partition", num_rows), partial(self._partition, gathered.expert_ids))
        self._statuses[lane].copy_(self._plan.status, non_blocking=True)

    def run_experts(self, layer: int, gathered: Gathered, out: torch.Tensor) -> None:
        """Run the selected pairs and this worker's columns of the shared expert."""
        key = ("experts", layer, len(gathered.hidden))
        self._graphs.run(key, partial(self._run_experts, layer, gathered, out))

    def mismatched_expert(self, lane: int) -> int:
        """Of the lane's last partition.

        Raises:
            InfeasiblePlanError: if the device refused the plan.
        """
        status = PlanStatus.from_words(self._statuses[lane])
        if status.defect is not PlanDefect.NONE:
            raise InfeasiblePlanError(
                f"worker {self._worker} cannot run the plan: {status.defect.name}"
            )
        return status.mismatched_expert

    def _tiles_of(self, num_pairs: int) -> DeviceTiles:
        tiles = self._tiles
        return DeviceTiles(tiles.schedule, tiles.sorted_pair, tiles.pair_row[:num_pairs])

    def _partition(self, expert_ids: torch.Tensor) -> None:
        self._plan.expand(self._record)
        self._plan.partition(expert_ids, self._tiles_of(expert_ids.numel()))

    def _run_experts(self, layer: int, gathered: Gathered, out: torch.Tensor) -> None:
        slots, activation = self._slots, self._moe.activation
        run_expert_ffn(
            out,
            gathered.hidden,
            gathered.routing_weights,
            self._gate_up[layer],
            self._down[layer],
            self._tiles_of(gathered.expert_ids.numel()),
            self._workspace,
            activation=activation,
            config=self._launch,
            gate_up_bias=None if slots.gate_up_bias is None else slots.gate_up_bias[layer],
            down_bias=None if slots.down_bias is None else slots.down_bias[layer],
            idle_sms=self._idle_sms,
        )
        if slots.shared_gate_up is not None and slots.shared_down is not None:
            up = gathered.hidden @ slots.shared_gate_up[layer].T
            activated = gated_activation(up.float(), activation).to(up.dtype)
            out += (activated @ slots.shared_down[layer].T).float()
