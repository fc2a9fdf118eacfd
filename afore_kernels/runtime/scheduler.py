"""The scheduler process: collect demand, plan, publish (paper section 6.1).

The loop runs compiled, without the GIL and without Python objects, on the tier's shared memory;
Python only starts it and reports how it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import typeof

from afore_kernels.errors import PlanRingTimeout
from afore_kernels.plan import Int32Array, Rejection, UInt8Array
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.mailbox import ENTRY_OK, Mailbox, collect_entry
from afore_kernels.runtime.memory import LOST, TierMemory
from afore_kernels.runtime.placement import Candidate, LayerState, layer_state
from afore_kernels.runtime.plan_ring import PlanWriter, wait_for_free_record, write_plan
from afore_kernels.runtime.planner import Limits, plan_core
from afore_kernels.runtime.processes import ChildContext
from afore_kernels.runtime.shared import (
    READY,
    RUNNING,
    SLEEP_SLICE_NS,
    SPIN_NS,
    STOPPED,
    TIMED_OUT,
    Array,
    advance,
    compiled,
    count,
    load_acquire,
    monotonic_ns,
    sleep_on_bell,
)
from afore_kernels.runtime.timeline import Stage, record_event
from afore_kernels.runtime.window import WindowEstimate, observe_lookahead, window_us

_NONE = int(Rejection.NONE)
_DEMAND_TIMEOUT = int(Rejection.DEMAND_TIMEOUT)
_TARGET_MISMATCH = int(Rejection.TARGET_MISMATCH)
_BAD_DEMAND = int(Rejection.BAD_DEMAND)
_PLANNED = int(Stage.PLANNED)
_SCHEDULER_TRACK = 0


class Bounds(NamedTuple):
    """What the loop checks and waits for.

    Attributes:
        top_k: most pairs of one token.
        max_tokens: most tokens of one rank.
        demand_timeout_ns: from a target's first demand to its last.
        ring_timeout_ns: for the workers to copy an old plan.
        uses_previous_step: plan from the previous step's demand (ablation).
        measures_window: plan with the measured lookahead window.
    """

    top_k: int
    max_tokens: int
    demand_timeout_ns: int
    ring_timeout_ns: int
    uses_previous_step: bool
    measures_window: bool


class Buffers(NamedTuple):
    """Arrays of the target being planned, and the previous step's demand for the ablation.

    Attributes:
        demand: d_t, int32 [num_experts].
        rank_tokens: int32 [num_ranks].
        target: (step, layer, microbatch), int64 [3].
        rank_target: the same as one rank posted it.
        slot_pairs, slot_copy, is_protected: [num_workers, redundant_slots].
        empty_slots: an empty slot table, for rejected targets.
        previous_demand: int32 [num_layers, microbatches, num_experts].
        has_previous: uint8 [num_layers, microbatches].
    """

    demand: Int32Array
    rank_tokens: Int32Array
    target: Array
    rank_target: Array
    slot_pairs: Int32Array
    slot_copy: UInt8Array
    is_protected: UInt8Array
    empty_slots: Int32Array
    previous_demand: Int32Array
    has_previous: UInt8Array

    @classmethod
    def allocate(cls, memory: TierMemory) -> Buffers:
        """Allocate for a tier; microbatches beyond `targets_in_flight` share previous demands."""
        moe, tier = memory.moe, memory.tier
        slots = (tier.num_workers, tier.redundant_slots)
        positions = (moe.num_layers, tier.targets_in_flight)
        return cls(
            demand=np.zeros(moe.num_experts, np.int32),
            rank_tokens=np.zeros(tier.num_ranks, np.int32),
            target=np.zeros(3, np.int64),
            rank_target=np.zeros(3, np.int64),
            slot_pairs=np.zeros(slots, np.int32),
            slot_copy=np.zeros(slots, np.uint8),
            is_protected=np.zeros(slots, np.uint8),
            empty_slots=np.full(slots, -1, np.int32),
            previous_demand=np.zeros((*positions, moe.num_experts), np.int32),
            has_previous=np.zeros(positions, np.uint8),
        )


@compiled
def wait_for_demand(mailbox, num_ranks, sequence, timeout_ns):  # type: ignore[no-untyped-def]
    """Wait until every rank that is not lost has posted `sequence`.

    The timeout starts with the first post, so an idle tier waits as long as it runs.

    Returns:
        (READY, -1), (TIMED_OUT, the rank waited for) or (STOPPED, -1).
    """
    start_ns = monotonic_ns()
    deadline_ns = np.int64(-1)
    while True:
        seen = load_acquire(mailbox.bell, 0)
        num_posted, missing = 0, -1
        for rank in range(num_ranks):
            if count(mailbox.posted, rank) > sequence:
                num_posted += 1
            elif count(mailbox.rank_state, rank) != LOST:
                missing = rank
        if missing == -1 and num_posted > 0:
            return READY, -1
        if load_acquire(mailbox.state, 0) != RUNNING:
            return STOPPED, -1
        now_ns = monotonic_ns()
        if num_posted > 0 and deadline_ns < 0:
            deadline_ns = now_ns + timeout_ns
        remaining_ns = SLEEP_SLICE_NS if deadline_ns < 0 else deadline_ns - now_ns
        if remaining_ns <= 0:
            return TIMED_OUT, missing
        if now_ns - start_ns > SPIN_NS:
            sleep_on_bell(mailbox.bell, seen, min(remaining_ns, SLEEP_SLICE_NS))


@compiled
def collect_demand(mailbox, buffers, bounds, sequence, num_layers):  # type: ignore[no-untyped-def]
    """Sum the ranks' demand of `sequence` into `buffers`.

    A rank that has not posted is lost, or timed out, and counts as empty.

    Returns:
        (rejection, rank it is about).
    """
    buffers.demand[:] = 0
    buffers.rank_tokens[:] = 0
    buffers.target[:] = -1
    first = -1
    for rank in range(buffers.rank_tokens.size):
        if count(mailbox.posted, rank) <= sequence:
            continue
        result = collect_entry(
            mailbox,
            rank,
            sequence,
            bounds.top_k,
            bounds.max_tokens,
            buffers.demand,
            buffers.rank_target,
            buffers.rank_tokens,
        )
        if result != ENTRY_OK or not 0 <= buffers.rank_target[1] < num_layers:
            return _BAD_DEMAND, rank
        if first == -1:
            first = rank
            buffers.target[:] = buffers.rank_target
        elif (buffers.target != buffers.rank_target).any():
            return _TARGET_MISMATCH, rank
    return _NONE, -1


@compiled
def plan_target(states, candidate, buffers, limits, cost, bounds, sequence):  # type: ignore[no-untyped-def]
    """Plan the collected target; its slot table is then in the layer's state."""
    layer = buffers.target[1]
    position = buffers.target[2] % buffers.has_previous.shape[1]
    state = layer_state(states, layer)
    for worker in range(buffers.is_protected.shape[0]):
        for slot in range(buffers.is_protected.shape[1]):
            last_use = state.slot_last_use[worker, slot]
            buffers.is_protected[worker, slot] = last_use >= 0 and last_use == sequence - 1
    planning_demand = buffers.demand
    if bounds.uses_previous_step and buffers.has_previous[layer, position]:
        planning_demand = buffers.previous_demand[layer, position]
    num_copies = plan_core(
        buffers.slot_pairs,
        buffers.slot_copy,
        state,
        candidate,
        buffers.demand,
        planning_demand,
        buffers.is_protected,
        limits,
        cost,
        sequence,
    )
    buffers.previous_demand[layer, position] = buffers.demand
    buffers.has_previous[layer, position] = 1
    return num_copies


@compiled
def run_scheduler(  # type: ignore[no-untyped-def]
    mailbox,
    ring,
    recorded,
    events,
    states,
    candidate,
    buffers,
    limits,
    cost,
    bounds,
    window,
    lookahead_ns,
):
    """Serve targets in sequence until the tier stops.

    Returns:
        The worker that did not copy its plans in time, or -1 when the tier stopped.
    """
    num_ranks = buffers.rank_tokens.size
    num_workers = buffers.slot_pairs.shape[0]
    sequence = count(mailbox.next_sequence, 0)
    while True:
        result, late_rank = wait_for_demand(mailbox, num_ranks, sequence, bounds.demand_timeout_ns)
        if result == STOPPED:
            return -1
        start_ns = monotonic_ns()
        rejection, rank = collect_demand(
            mailbox, buffers, bounds, sequence, states.slot_expert.shape[0]
        )
        if result == TIMED_OUT:
            rejection, rank = _DEMAND_TIMEOUT, late_rank
        result, late_worker = wait_for_free_record(
            ring, num_workers, sequence, start_ns + bounds.ring_timeout_ns
        )
        if result == STOPPED:
            return -1
        if result != READY:
            return late_worker
        num_copies = 0
        slot_expert = buffers.empty_slots
        if rejection == _NONE:
            if bounds.measures_window:
                observe_lookahead(window, lookahead_ns)
            target_cost = CostModel(
                cost.tile_time_us,
                cost.slot_time_us,
                cost.copy_time_us,
                window_us(window, cost.window_us),
            )
            num_copies = plan_target(
                states, candidate, buffers, limits, target_cost, bounds, sequence
            )
            slot_expert = layer_state(states, buffers.target[1]).slot_expert
        else:
            buffers.demand[:] = 0
            buffers.rank_tokens[:] = 0
            buffers.slot_pairs[:] = 0
            buffers.slot_copy[:] = 0
        write_plan(
            ring,
            sequence,
            buffers.target,
            limits.tile_m,
            rejection,
            rank,
            buffers.demand,
            buffers.rank_tokens,
            slot_expert,
            buffers.slot_pairs,
            buffers.slot_copy,
        )
        end_ns = monotonic_ns()
        record_event(
            recorded, events, _SCHEDULER_TRACK, _PLANNED, sequence, start_ns, end_ns, num_copies
        )
        sequence += 1
        advance(mailbox.next_sequence, 0, sequence, mailbox.bell)
        for rank in range(num_ranks):
            advance(mailbox.collected, rank, sequence, mailbox.bell)


def main(context: ChildContext, report_ready: Callable[[], None]) -> None:
    """Run the scheduler of a tier until it stops.

    Raises:
        PlanRingTimeout: if a worker does not copy its plans in time.
        PeerLost: when the tier stops.
    """
    memory = context.memory
    moe, tier = memory.moe, memory.tier
    arguments = (
        Mailbox.of(memory),
        PlanWriter.of(memory),
        memory.arrays["events_recorded"],
        memory.arrays["events"],
        LayerState.initial(memory.placement, moe.num_layers),
        Candidate.allocate(memory.placement),
        Buffers.allocate(memory),
        Limits.from_config(moe, tier),
        CostModel.from_config(tier),
        Bounds(
            top_k=moe.top_k,
            max_tokens=tier.max_tokens_per_rank,
            demand_timeout_ns=int(tier.demand_timeout_s * 1e9),
            ring_timeout_ns=int(tier.reply_timeout_s * 1e9),
            uses_previous_step=tier.demand_source == "previous_step",
            measures_window=tier.measure_window,
        ),
        WindowEstimate.allocate(),
        memory.arrays["lookahead_ns"],
    )
    run_scheduler.compile(tuple(typeof(argument) for argument in arguments))
    report_ready()
    late_worker = run_scheduler(*arguments)
    if late_worker >= 0:
        raise PlanRingTimeout(
            f"worker {late_worker} has not copied a plan for {tier.reply_timeout_s} s; "
            f"the ring of {tier.plan_ring_depth} plans is full"
        )
    raise memory.failure()
