"""An FFN worker: reads plans, keeps its replicas ready, and runs exactly its planned share.

`FfnWorker.execute` is the model thread of the paper's Figure 7.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from afore_kernels.gemm.tiles import PairTiles, TileSchedule
from afore_kernels.gemm.torch_executor import run_dense_ffn, run_expert_ffn
from afore_kernels.partition.intervals import SlotIntervals, pair_intervals
from afore_kernels.partition.pack import partition_pairs
from afore_kernels.plan import Plan, Rejection
from afore_kernels.runtime.collectives import Collectives
from afore_kernels.runtime.devices import Stream
from afore_kernels.runtime.gather import GatherBlock, Gathered, rank_rows
from afore_kernels.runtime.memory import TierMemory, deadline_after
from afore_kernels.runtime.migrator import Migrator
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.shared import FOREVER_NS
from afore_kernels.runtime.timeline import Stage, Track
from afore_kernels.runtime.transports.local import OK, LocalTransport, Outcome, ReplyStatus
from afore_kernels.runtime.weights import ExpertSlots


class PreparedPlan(NamedTuple):
    """A plan and what this worker derives from it alone, before any input has arrived."""

    plan: Plan
    intervals: SlotIntervals
    schedule: TileSchedule
    submitted_ns: int


class FfnWorker:
    """One FFN process's model thread.

    Args:
        worker: index of this worker.
        memory: the tier's shared memory.
        slots: this worker's weights.
        migrator: of this worker.
        model_stream: where partition, GEMMs and combine run.
        collectives: between the workers.
    """

    def __init__(
        self,
        worker: int,
        memory: TierMemory,
        slots: ExpertSlots,
        migrator: Migrator,
        model_stream: Stream,
        collectives: Collectives,
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._slots = slots
        self._migrator = migrator
        self._model_stream = model_stream
        self._collectives = collectives
        self._plans = PlanReader(memory, worker)
        self._transport = LocalTransport(memory)
        self._track = Track(memory, f"worker {worker} model")
        self._overlap_copies = memory.tier.overlap_copies
        self._pending: PreparedPlan | None = None
        self._latest_plan: Plan | None = None

    def run(self) -> None:
        """Execute targets in order until the tier stops, which ends this by `PeerLost`."""
        while True:
            if self._pending is None:
                self._read_plan()
            prepared, self._pending = self._pending, None
            assert prepared is not None
            self.execute(prepared)

    def execute(self, prepared: PreparedPlan) -> None:
        """Run one target (paper Figure 7) and reply each rank's slice."""
        plan = prepared.plan
        if plan.rejection is not Rejection.NONE:
            self._reply(plan, Outcome(ReplyStatus(int(plan.rejection)), plan.rejected_rank))
            return
        gathered = self._gather(plan)
        self._read_next_plan_if_published()
        self._make_replicas_ready(prepared)
        tiles, outcome = self._partition(prepared, gathered)
        if outcome != OK:
            self._reply(plan, outcome)
            return
        partial = self._run_experts(plan, gathered, tiles)
        output = self._reduce(plan, partial)
        self._reply(plan, OK, output)

    def _read_plan(self) -> None:
        """R and S: wait for the next plan, and submit its copies at once."""
        plan = self._plans.read(FOREVER_NS)
        with self._timed(Stage.COPIES_SUBMITTED, plan) as event:
            if self._latest_plan is not None:
                plan.validate_after(self._latest_plan)
            self._latest_plan = plan
            submitted_ns = time.monotonic_ns()
            if self._overlap_copies:
                event.value = self._migrator.submit(plan)
            intervals = pair_intervals(plan, self._memory.placement, self._worker)
            schedule = intervals.tile_schedule(plan.tile_m)
            self._pending = PreparedPlan(plan, intervals, schedule, submitted_ns)

    def _read_next_plan_if_published(self) -> None:
        if self._pending is None and self._plans.is_published():
            self._read_plan()

    def _gather(self, plan: Plan) -> Gathered:
        """A2F: wait for the ranks' inputs and all-gather them, so all workers see the same rows."""
        block = GatherBlock(self._memory.moe, self._memory.tier, plan, self._worker)
        with self._timed(Stage.INPUT, plan, plan.num_tokens):
            deadline_ns = deadline_after(self._memory.tier.reply_timeout_s)
            for rank in range(self._memory.tier.num_ranks):
                num_tokens = int(plan.rank_tokens[rank])
                outcome = OK
                if num_tokens:
                    self._read_next_plan_if_published()
                    outcome = self._transport.wait_input(
                        rank, plan.sequence, plan.target, num_tokens, deadline_ns
                    )
                rows = self._transport.input_rows(rank, plan.sequence, num_tokens)
                block.add_rank(rank, outcome, rows)
        with self._timed(Stage.GATHER, plan, plan.num_tokens):
            return block.unpack(self._collectives.all_gather(block.bytes))

    def _make_replicas_ready(self, prepared: PreparedPlan) -> None:
        """C: the model stream waits for the copies of the slots this target uses."""
        plan = prepared.plan
        lookahead_ns = time.monotonic_ns() - prepared.submitted_ns
        self._memory.arrays["lookahead_ns"][self._worker] = max(1, lookahead_ns)
        num_copies = int(plan.slot_copy[self._worker].sum())
        with self._timed(Stage.COPY_WAIT, plan, num_copies):
            if not self._overlap_copies:
                self._migrator.submit(plan)
            self._migrator.make_ready(plan, self._model_stream)

    def _partition(self, prepared: PreparedPlan, gathered: Gathered) -> tuple[PairTiles, Outcome]:
        """Select exactly this worker's pairs (Eq. 11) and check the plan's counts."""
        with self._timed(Stage.PARTITION, prepared.plan, prepared.schedule.num_tiles):
            partition = partition_pairs(
                gathered.expert_ids.numpy(), prepared.intervals, prepared.schedule
            )
        outcome = gathered.outcome
        if outcome == OK and partition.mismatched_expert >= 0:
            outcome = Outcome(ReplyStatus.COUNT_MISMATCH)
        return partition.tiles, outcome

    def _run_experts(self, plan: Plan, gathered: Gathered, tiles: PairTiles) -> torch.Tensor:
        """This worker's partial output, fp32 [num_tokens, H]."""
        layer, slots = plan.target.layer, self._slots
        activation = self._memory.moe.activation
        with self._timed(Stage.GEMM, plan, int(tiles.schedule.pairs_per_slot.sum())):
            partial = run_expert_ffn(
                gathered.hidden,
                gathered.routing_weights,
                slots.gate_up[layer],
                slots.down[layer],
                tiles,
                activation=activation,
                gate_up_bias=None if slots.gate_up_bias is None else slots.gate_up_bias[layer],
                down_bias=None if slots.down_bias is None else slots.down_bias[layer],
            )
            if slots.shared_gate_up is not None and slots.shared_down is not None:
                partial += run_dense_ffn(
                    gathered.hidden,
                    slots.shared_gate_up[layer],
                    slots.shared_down[layer],
                    activation=activation,
                )
            self._migrator.mark_used(plan, self._model_stream)
        return partial

    def _reduce(self, plan: Plan, partial: torch.Tensor) -> torch.Tensor:
        with self._timed(Stage.REDUCE, plan, plan.num_tokens):
            return self._collectives.all_reduce(partial)

    def _reply(self, plan: Plan, outcome: Outcome, output: torch.Tensor | None = None) -> None:
        """F2A: write this worker's share of the rows to the ranks' reply slots."""
        with self._timed(Stage.REPLY, plan, plan.num_tokens):
            if output is not None:
                self._write_share(plan, output)
            for rank in range(self._memory.tier.num_ranks):
                self._transport.reply(self._worker, rank, plan.sequence, outcome)

    def _write_share(self, plan: Plan, output: torch.Tensor) -> None:
        for part in rank_rows(plan, self._worker, self._memory.tier.num_workers):
            rows = self._transport.output_rows(part.rank, plan.sequence, part.stop)
            rows[part.start :].copy_(output[part.row : part.row + part.stop - part.start])

    @contextmanager
    def _timed(self, stage: Stage, plan: Plan, value: int = 0) -> Iterator[_Timed]:
        event = _Timed(value)
        start_ns = time.monotonic_ns()
        yield event
        self._track.record(stage, plan.sequence, start_ns, time.monotonic_ns(), event.value)


class _Timed:
    """The value of the event being timed, which its body may set."""

    def __init__(self, value: int) -> None:
        self.value = value
