"""The memory of targets on a worker: lanes in host memory, static buffers on the device.

The host runs ahead of the device, so what it prepares for a target stays in that target's lane
until the target's reply is out. On the device targets run one after another and share buffers,
whose addresses never change: a captured graph follows every target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from afore_kernels.errors import PeerLost
from afore_kernels.plan import Plan
from afore_kernels.runtime.devices import Buffer, Device, Event, Stamp
from afore_kernels.runtime.executors import Executor
from afore_kernels.runtime.gather import Gathered, GatherLayout
from afore_kernels.runtime.memory import TierMemory
from afore_kernels.runtime.timeline import Stage
from afore_kernels.runtime.transports.local import torch_dtype

NUM_LANES = 4
"""Targets per worker from reading the plan to the reply: one pending, the others run ahead."""


class Timing(NamedTuple):
    """When the device ran one stage of a target; `value` as in `Stage`."""

    stage: Stage
    start: Stamp
    end: Stamp
    value: int


@dataclass(slots=True, eq=False)
class Lane:
    """One target's host memory.

    Attributes:
        index: of the lane.
        block: this worker's contribution to the all-gather, uint8 [block bytes].
        outcomes: `Gathered.outcomes` of the target, int64 [num_workers * num_ranks, 2].
        replied: when the reply of the target is out, or None.
        plan_name, block_name, status_name: of what the host staged, and of what came back.
    """

    index: int
    block: torch.Tensor
    outcomes: torch.Tensor
    replied: Event | None
    plan_name: Buffer
    block_name: Buffer
    status_name: Buffer
    timings: list[Timing] = field(default_factory=list)


class TargetBuffers:
    """One worker's lanes and static buffers, sized for the largest target.

    Args:
        memory: the tier's.
        worker: this worker.
        device: of this worker.
        executor: of this worker.
        num_lanes: most targets from reading the plan to the reply.

    Attributes:
        blocks_name, gathered_name, tiles_name, partial_name: of the static buffers.
    """

    def __init__(
        self,
        memory: TierMemory,
        worker: int,
        device: Device,
        executor: Executor,
        num_lanes: int = NUM_LANES,
    ) -> None:
        self._memory = memory
        self._worker = worker
        self._executor = executor
        moe, tier = memory.moe, memory.tier
        share = executor.rows_per_worker(tier.num_ranks * tier.max_tokens_per_rank)
        block_bytes = GatherLayout(moe, tier, share).block_bytes
        num_rows, num_outcomes = tier.num_workers * share, tier.num_workers * tier.num_ranks

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device.torch_device)

        self._lanes = [
            Lane(
                index=lane,
                block=device.host_buffer(block_bytes),
                outcomes=device.host_buffer(num_outcomes * 16).view(torch.int64).view(-1, 2),
                replied=None,
                plan_name=Buffer("plan", (worker, lane)),
                block_name=Buffer("block", (worker, lane)),
                status_name=Buffer("status", (worker, lane)),
            )
            for lane in range(num_lanes)
        ]
        self._blocks = empty(torch.uint8, tier.num_workers * block_bytes)
        self._gathered = Gathered(
            hidden=empty(torch_dtype(moe), num_rows, moe.hidden_size),
            expert_ids=empty(torch.int32, num_rows, moe.top_k),
            routing_weights=empty(torch.float32, num_rows, moe.top_k),
            outcomes=empty(torch.int64, num_outcomes, 2),
        )
        self._partial = empty(torch.float32, num_rows, moe.hidden_size)
        self.blocks_name = Buffer("blocks", (worker,))
        self.gathered_name = Buffer("gathered", (worker,))
        self.tiles_name = Buffer("tiles", (worker,))
        self.partial_name = Buffer("partial", (worker,))

    def claim_lane(self, plan: Plan) -> Lane:
        """Take the lane of a plan's target, once the reply of the target before is out.

        Raises:
            PeerLost: if that reply does not come within `reply_timeout_s`; or what failed.
        """
        lane = self._lanes[plan.sequence % len(self._lanes)]
        timeout_s = self._memory.tier.reply_timeout_s
        if lane.replied is not None and not lane.replied.wait(timeout_s):
            raise PeerLost(
                f"worker {self._worker} did not finish target {plan.sequence - len(self._lanes)} "
                f"within {timeout_s} s"
            )
        return lane

    def layout(self, plan: Plan) -> GatherLayout:
        """The layout of a target's blocks."""
        share = self._executor.rows_per_worker(plan.num_tokens)
        return GatherLayout(self._memory.moe, self._memory.tier, share)

    def blocks(self, layout: GatherLayout) -> torch.Tensor:
        """The workers' blocks, uint8 [num_workers, layout.block_bytes]."""
        num_workers = self._memory.tier.num_workers
        return self._blocks[: num_workers * layout.block_bytes].view(num_workers, -1)

    def gathered(self, layout: GatherLayout) -> Gathered:
        """The gathered rows, `num_workers * layout.share` of them."""
        rows = slice(self._memory.tier.num_workers * layout.share)
        hidden, expert_ids, routing_weights, outcomes = self._gathered
        return Gathered(hidden[rows], expert_ids[rows], routing_weights[rows], outcomes)

    def partial(self, layout: GatherLayout) -> torch.Tensor:
        """The output of those rows, fp32 [num_workers * layout.share, H]."""
        return self._partial[: self._memory.tier.num_workers * layout.share]

    def upload(self, layout: GatherLayout, lane: Lane) -> None:
        """Bring the lane's block to its place among the blocks; queued work."""
        own = self.blocks(layout)[self._worker]
        own.copy_(lane.block[: layout.block_bytes], non_blocking=True)

    def unpack(self, layout: GatherLayout, lane: Lane) -> None:
        """Bring the blocks' rows together, and the outcomes to the lane; queued work."""
        gathered = self.gathered(layout)
        layout.unpack(self.blocks(layout), gathered)
        lane.outcomes.copy_(gathered.outcomes, non_blocking=True)

    def input_name(self, rank: int, plan: Plan) -> Buffer:
        """The name of a rank's input slot."""
        return Buffer("input", (rank, plan.sequence % self._memory.tier.targets_in_flight))

    def reply_name(self, rank: int, plan: Plan) -> Buffer:
        """The name of this worker's share of a rank's reply slot."""
        slot = plan.sequence % self._memory.tier.targets_in_flight
        return Buffer("reply", (rank, slot, self._worker))
