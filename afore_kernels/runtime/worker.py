"""An FFN worker: reads plans, keeps its replicas ready, and runs exactly its planned share.

`FfnWorker.execute` is the model thread of the paper's Figure 7. It queues work on the model stream
and waits for none of it: a target's reply is published by the model stream's completions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from afore_kernels.plan import Plan, Rejection
from afore_kernels.runtime.collectives import Collectives
from afore_kernels.runtime.devices import Device
from afore_kernels.runtime.executors import Executor, ShareSize
from afore_kernels.runtime.gather import GatherBlock, GatherLayout, first_failure, rank_rows
from afore_kernels.runtime.lanes import Lane, TargetBuffers, Timing
from afore_kernels.runtime.memory import TierMemory, deadline_after
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.shared import FOREVER_NS
from afore_kernels.runtime.timeline import Stage, Track
from afore_kernels.runtime.transports.local import OK, LocalTransport, Outcome, ReplyStatus


class PreparedPlan(NamedTuple):
    """A plan whose copies were submitted and which is staged in a lane, before its inputs come."""

    plan: Plan
    lane: Lane
    layout: GatherLayout
    size: ShareSize
    submitted_ns: int


class FfnWorker:
    """One FFN process's model thread.

    Args:
        worker: index of this worker.
        memory: the tier's shared memory.
        executor: of this worker.
        buffers: of this worker.
        migrator: of this worker.
        device: of this worker.
        collectives: between the workers.
        plans: this worker's end of the plan ring.
        transport: of inputs and replies.
    """

    def __init__(
        self,
        worker: int,
        memory: TierMemory,
        executor: Executor,
        buffers: TargetBuffers,
        migrator: Migrator,
        device: Device,
        collectives: Collectives,
        plans: PlanReader,
        transport: LocalTransport,
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._executor = executor
        self._buffers = buffers
        self._migrator = migrator
        self._device = device
        self._model_stream = device.model_stream()
        self._completions = device.completions(self._model_stream)
        self._collectives = collectives
        self._plans = plans
        self._transport = transport
        self._track = Track(memory, f"worker {worker} model")
        self._overlap_copies = memory.tier.overlap_copies
        self._pending: PreparedPlan | None = None
        self._latest_plan: Plan | None = None

    def run(self) -> None:
        """Execute targets in order until the tier stops, which ends this by `PeerLost`."""
        while True:
            self.run_target()

    def run_target(self) -> None:
        """Wait for the next plan, if none is pending, and execute it."""
        if self._pending is None:
            self._read_plan()
        prepared, self._pending = self._pending, None
        assert prepared is not None
        self.execute(prepared)

    def execute(self, prepared: PreparedPlan) -> None:
        """Run one target (paper Figure 7) and reply each rank's slice."""
        plan = prepared.plan
        if plan.rejection is Rejection.NONE:
            self._collect_inputs(prepared)
            self._gather(prepared)
            self._read_next_plan_if_published()
            self._make_replicas_ready(prepared)
            self._partition(prepared)
            self._run_experts(prepared)
            self._reduce(prepared)
            self._write_reply(prepared)
        self._publish_reply(prepared)

    def _read_plan(self) -> None:
        """R and S: wait for the next plan, and submit its copies at once."""
        plan = self._plans.read(FOREVER_NS)
        start_ns = time.monotonic_ns()
        if self._latest_plan is not None:
            plan.validate_after(self._latest_plan)
        self._latest_plan = plan
        submitted_ns = time.monotonic_ns()
        num_copies = self._migrator.submit(plan) if self._overlap_copies else 0
        lane = self._buffers.claim_lane(plan)
        self._device.touch(writes=[lane.plan_name])
        size = self._executor.stage(lane.index, plan)
        layout = self._buffers.layout(plan)
        self._pending = PreparedPlan(plan, lane, layout, size, submitted_ns)
        self._record(Stage.COPIES_SUBMITTED, plan, start_ns, num_copies)

    def _read_next_plan_if_published(self) -> None:
        if self._pending is None and self._plans.is_published():
            self._read_plan()

    def _collect_inputs(self, prepared: PreparedPlan) -> None:
        """A2F: wait for the ranks' inputs and take this worker's share of their rows."""
        plan, lane = prepared.plan, prepared.lane
        block = GatherBlock(prepared.layout, plan, self._worker, lane.block)
        self._device.touch(writes=[lane.block_name])
        start_ns = time.monotonic_ns()
        deadline_ns = deadline_after(self._memory.tier.reply_timeout_s)
        for rank in range(self._memory.tier.num_ranks):
            num_tokens = int(plan.rank_tokens[rank])
            outcome = OK
            if num_tokens:
                self._read_next_plan_if_published()
                outcome = self._transport.wait_input(
                    rank, plan.sequence, plan.target, num_tokens, deadline_ns
                )
            self._device.touch(reads=[self._buffers.input_name(rank, plan)])
            rows = self._transport.input_rows(rank, plan.sequence, num_tokens)
            block.add_rank(rank, outcome, rows)
        self._record(Stage.INPUT, plan, start_ns, plan.num_tokens)

    def _gather(self, prepared: PreparedPlan) -> None:
        """All-gather the workers' rows, so all see the same."""
        lane, buffers = prepared.lane, self._buffers
        with self._timed(Stage.GATHER, prepared, prepared.plan.num_tokens):
            self._model_stream.submit(
                partial(buffers.upload, prepared.layout, lane),
                reads=[lane.block_name],
                writes=[buffers.blocks_name],
            )
            self._collectives.all_gather(
                self._model_stream,
                buffers.blocks(prepared.layout),
                reads=[buffers.blocks_name],
                writes=[buffers.blocks_name],
            )
            self._model_stream.submit(
                partial(buffers.unpack, prepared.layout, lane),
                reads=[buffers.blocks_name],
                writes=[buffers.gathered_name, lane.status_name],
            )

    def _make_replicas_ready(self, prepared: PreparedPlan) -> None:
        """C: the model stream waits for the copies of the slots this target uses."""
        plan = prepared.plan
        lookahead_ns = time.monotonic_ns() - prepared.submitted_ns
        self._memory.arrays["lookahead_ns"][self._worker] = max(1, lookahead_ns)
        num_copies = int(plan.slot_copy[self._worker].sum())
        with self._timed(Stage.COPY_WAIT, prepared, num_copies):
            if not self._overlap_copies:
                self._migrator.submit(plan)
            self._migrator.make_ready(plan, self._model_stream)

    def _partition(self, prepared: PreparedPlan) -> None:
        """Select exactly this worker's pairs (Eq. 11) and check the plan's counts."""
        lane, buffers = prepared.lane, self._buffers
        gathered = buffers.gathered(prepared.layout)
        with self._timed(Stage.PARTITION, prepared, prepared.size.num_tiles):
            self._model_stream.submit(
                partial(self._executor.partition, lane.index, gathered),
                reads=[lane.plan_name, buffers.gathered_name],
                writes=[buffers.tiles_name, lane.status_name],
            )

    def _run_experts(self, prepared: PreparedPlan) -> None:
        """Queue this worker's partial output, fp32 [num_rows, H]."""
        plan, buffers = prepared.plan, self._buffers
        layer = plan.target.layer
        gathered, out = buffers.gathered(prepared.layout), buffers.partial(prepared.layout)
        with self._timed(Stage.GEMM, prepared, prepared.size.num_pairs):
            self._model_stream.submit(
                partial(self._executor.run_experts, layer, gathered, out),
                reads=[
                    buffers.gathered_name,
                    buffers.tiles_name,
                    *self._migrator.slots_read_by(plan),
                ],
                writes=[buffers.partial_name],
            )
            self._migrator.mark_used(plan, self._model_stream)

    def _reduce(self, prepared: PreparedPlan) -> None:
        """Add up the workers' partial outputs."""
        buffers = self._buffers
        with self._timed(Stage.REDUCE, prepared, prepared.plan.num_tokens):
            self._collectives.reduce(
                self._model_stream,
                buffers.partial(prepared.layout),
                reads=[buffers.partial_name],
                writes=[buffers.partial_name],
            )

    def _write_reply(self, prepared: PreparedPlan) -> None:
        """F2A: write this worker's share of the rows to the ranks' reply slots."""
        plan, buffers = prepared.plan, self._buffers
        with self._timed(Stage.REPLY, prepared, plan.num_tokens):
            self._model_stream.submit(
                partial(self._write_share, prepared),
                reads=[buffers.partial_name],
                writes=[buffers.reply_name(rank, plan) for rank in range(len(plan.rank_tokens))],
            )

    def _write_share(self, prepared: PreparedPlan) -> None:
        plan, layout = prepared.plan, prepared.layout
        output = self._buffers.partial(layout)  # the sum, in the rows of this worker's share
        for part in rank_rows(plan, self._worker, layout.share):
            rows = self._transport.output_rows(part.rank, plan.sequence, part.stop)[part.start :]
            mine = output[part.row : part.row + len(rows)]
            rows.copy_(mine.to(rows.dtype), non_blocking=True)

    def _publish_reply(self, prepared: PreparedPlan) -> None:
        """Tell the ranks, once the model stream has written their rows."""
        lane = prepared.lane
        self._completions.wait_event(self._model_stream.record_event())
        self._completions.submit(partial(self._reply, prepared), reads=[lane.status_name])
        lane.replied = self._completions.record_event()

    def _reply(self, prepared: PreparedPlan) -> None:
        plan, lane = prepared.plan, prepared.lane
        outcome = Outcome(ReplyStatus(int(plan.rejection)), plan.rejected_rank)
        if plan.rejection is Rejection.NONE:
            outcome = first_failure(lane.outcomes)
            if outcome == OK and self._executor.mismatched_expert(lane.index) >= 0:
                outcome = Outcome(ReplyStatus.COUNT_MISMATCH)
        for stage, start, end, value in lane.timings:
            self._track.record(stage, plan.sequence, start(), end(), value)
        lane.timings.clear()
        for rank in range(self._memory.tier.num_ranks):
            self._transport.reply(self._worker, rank, plan.sequence, outcome)

    def _record(self, stage: Stage, plan: Plan, start_ns: int, value: int) -> None:
        """Note what the host did since `start_ns`."""
        self._track.record(stage, plan.sequence, start_ns, time.monotonic_ns(), value)

    @contextmanager
    def _timed(self, stage: Stage, prepared: PreparedPlan, value: int) -> Iterator[None]:
        """Note when the device runs what is queued meanwhile."""
        start = self._device.stamp(self._model_stream)
        yield
        end = self._device.stamp(self._model_stream)
        prepared.lane.timings.append(Timing(stage, start, end, value))
