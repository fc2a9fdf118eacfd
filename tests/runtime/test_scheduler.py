"""The scheduler's loop on a thread, with the test as its attention ranks and workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from afore_kernels.errors import PeerLost, PlanRingTimeout
from afore_kernels.plan import Int32Array, Plan, Rejection, Target
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.mailbox import DemandWriter, Mailbox, write_entry
from afore_kernels.runtime.memory import CONNECTED, DEMAND_BELL, LOST, TierMemory, deadline_after
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.plan_ring import PlanReader
from afore_kernels.runtime.planner import Limits
from afore_kernels.runtime.planner_oracle import plan_microbatch_oracle
from afore_kernels.runtime.processes import ChildContext
from afore_kernels.runtime.scheduler import main
from afore_kernels.runtime.shared import advance, count
from afore_kernels.runtime.timeline import Stage, read_events

SHAPES = {"num_experts": 8, "tile_m": 4}
COPIES_PAY = {"copy_time_us": 0.0}
SHORT_S = 0.1


class Ranks:
    """Every attention rank and every worker of a tier."""

    def __init__(self, memory: TierMemory) -> None:
        self.memory = memory
        self.writers = [DemandWriter(memory, r) for r in range(memory.tier.num_ranks)]
        self.readers = [PlanReader(memory, w) for w in range(memory.tier.num_workers)]

    def post(self, sequence: int, target: Target, *demands: Int32Array | None) -> None:
        """Post one demand per rank; None is a rank that posts nothing."""
        for writer, demand in zip(self.writers, demands):
            if demand is not None:
                num_tokens = -(-int(demand.sum()) // self.memory.moe.top_k)
                writer.post(sequence, target, num_tokens, demand, deadline_after(20.0))

    def read(self) -> Plan:
        """Read the next plan as every worker; returns worker 0's."""
        plans = [reader.read(deadline_after(20.0)) for reader in self.readers]
        return plans[0]

    def is_published(self) -> bool:
        return self.readers[0].is_published()


@pytest.fixture
def start(make_memory, background) -> Callable[..., Ranks]:
    """Start a scheduler on a new tier memory; `ranks.thread` is its call."""

    def create(*, first_sequence: int = 0, moe=None, **tier) -> Ranks:
        # The oracle is Algorithm 1 alone.
        memory = make_memory(SHAPES | (moe or {}), **({"refine_plans": False} | tier))
        for field, rank in [("next_sequence", 0), *(("demand_posted", r) for r in range(2))]:
            if rank < memory.tier.num_ranks:
                advance(memory.arrays[field], rank, first_sequence, memory.bell(DEMAND_BELL))
        for rank in range(memory.tier.num_ranks):
            bell = memory.bell(DEMAND_BELL)
            advance(memory.arrays["rank_state"], rank, CONNECTED, bell)
            advance(memory.arrays["demand_collected"], rank, first_sequence, bell)
        ready = threading.Event()
        ranks = Ranks(memory)
        ranks.thread = background(main, ChildContext(memory, -1, [], 0), ready.set)
        assert ready.wait(180.0)
        return ranks

    return create


def counts(*values: int) -> Int32Array:
    return np.array([*values, *[0] * (8 - len(values))], np.int32)


def skewed_demands(num_demands: int, seed: int) -> Iterator[Int32Array]:
    """Demands with two hot experts that move now and then."""
    rng = np.random.default_rng(seed)
    for i in range(num_demands):
        demand = rng.integers(0, 6, 8, dtype=np.int32)
        hot = (i // 7 + rng.integers(0, 2)) % 8
        demand[[hot, (hot + 3) % 8]] += np.array([40, 25], np.int32)
        yield demand


class Oracle:
    """What the scheduler must publish, by `planner_oracle`."""

    def __init__(self, memory: TierMemory, *, protects: bool = True) -> None:
        self._memory = memory
        self._protects = protects
        self._states = [LayerState.initial(memory.placement) for _ in range(memory.moe.num_layers)]
        self._previous: dict[tuple[int, int], Int32Array] = {}

    def plan(self, sequence: int, target: Target, demand: Int32Array) -> list[np.ndarray]:
        """The slot arrays of one plan."""
        memory, state = self._memory, self._states[target.layer]
        protected = (state.slot_last_use >= 0) & (state.slot_last_use == sequence - 1)
        position = (target.layer, target.microbatch)
        planning_demand = demand
        if memory.tier.demand_source == "previous_step":
            planning_demand = self._previous.get(position, demand)
        planned = plan_microbatch_oracle(
            demand,
            state,
            memory.placement,
            Limits.from_config(memory.moe, memory.tier),
            CostModel.from_config(memory.tier),
            sequence=sequence,
            is_protected=(protected & self._protects).astype(np.uint8),
            planning_demand=planning_demand,
        )
        self._states[target.layer] = planned.state
        self._previous[position] = demand
        return [planned.slot_expert, planned.slot_pairs, planned.slot_copy]


def slot_arrays(plan: Plan) -> list[np.ndarray]:
    return [plan.slot_expert, plan.slot_pairs, plan.slot_copy]


def are_equal(found: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> bool:
    return all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_demand_of_all_ranks_is_summed(start):
    ranks = start(num_ranks=3)
    target = Target(2**40, 1, 5)
    ranks.post(0, target, counts(1, 2, 3), counts(10), counts(0, 0, 0, 0, 7, 100))
    plan = ranks.read()
    assert plan.demand.tolist() == [11, 2, 3, 0, 7, 100, 0, 0]
    assert plan.rank_tokens.tolist() == [3, 5, 54]
    assert (plan.target, plan.sequence, plan.tile_m) == (target, 0, 4)
    assert (plan.rejection, plan.rejected_rank) == (Rejection.NONE, -1)


@pytest.mark.parametrize("demand_source", ["target", "previous_step"])
def test_plans_equal_the_oracle_over_many_targets(start, demand_source):
    ranks = start(num_workers=3, demand_source=demand_source, **COPIES_PAY)
    oracle = Oracle(ranks.memory)
    unprotected = Oracle(ranks.memory, protects=False)
    own_demand = Oracle(start(num_workers=3, **COPIES_PAY).memory)
    rng = np.random.default_rng(1)
    num_copies = num_unlike_unprotected = num_unlike_own_demand = 0
    for sequence, demand in enumerate(skewed_demands(80, seed=2)):
        # Runs of one layer, so that its own previous target is often the tier's preceding one.
        target = Target(sequence // 8, sequence // 4 % 2, int(rng.integers(2)))
        ranks.post(sequence, target, demand)
        plan = ranks.read()
        expected = oracle.plan(sequence, target, demand)
        assert are_equal(slot_arrays(plan), expected), f"sequence {sequence}"
        assert plan.demand.tolist() == demand.tolist()
        num_copies += int(plan.slot_copy.sum())
        num_unlike_unprotected += not are_equal(
            expected, unprotected.plan(sequence, target, demand)
        )
        num_unlike_own_demand += not are_equal(expected, own_demand.plan(sequence, target, demand))
    assert num_copies > 0
    # The comparison can tell: these oracles of another rule disagree with the scheduler.
    assert num_unlike_unprotected > 0
    assert (num_unlike_own_demand > 0) == (demand_source == "previous_step")


def test_no_copy_goes_into_a_slot_that_the_preceding_target_uses(start):
    ranks = start(moe={"num_layers": 1}, redundant_slots=1, **COPIES_PAY)
    previous, num_copies = None, 0
    for sequence, demand in enumerate(skewed_demands(60, seed=3)):
        ranks.post(sequence, Target(sequence, 0, 0), demand)
        plan = ranks.read()
        if previous is not None:
            plan.validate_after(previous)
        previous = plan
        num_copies += int(plan.slot_copy.sum())
    assert num_copies > 1


def test_static_policy_never_copies(start):
    num_copies = {}
    for policy in ("static", "afore"):
        ranks = start(policy=policy, **COPIES_PAY)
        num_copies[policy] = 0
        for sequence, demand in enumerate(skewed_demands(10, seed=4)):
            ranks.post(sequence, Target(sequence, 0, 0), demand)
            plan = ranks.read()
            num_copies[policy] += int(plan.slot_copy.sum())
            if policy == "static":
                assert (plan.slot_expert == -1).all()
                assert (plan.slot_pairs == 0).all()
    assert num_copies["static"] == 0
    assert num_copies["afore"] > 0


def reject_by_timeout(ranks: Ranks, sequence: int, target: Target) -> None:
    ranks.post(sequence, target, counts(4), None)


def reject_by_mismatch(ranks: Ranks, sequence: int, target: Target) -> None:
    ranks.post(sequence, target, counts(4), None)
    ranks.post(sequence, target._replace(microbatch=target.microbatch + 1), None, counts(4))


def reject_by_corruption(ranks: Ranks, sequence: int, target: Target) -> None:
    """Rank 1 is first, so its bad word is in place before the scheduler may look."""
    ranks.post(sequence, target, None, counts(4))
    depth = ranks.memory.tier.targets_in_flight
    ranks.memory.arrays["demand_entries"][1, sequence % depth, 17] ^= 1
    ranks.post(sequence, target, counts(4), None)


def reject_by_layer(ranks: Ranks, sequence: int, target: Target) -> None:
    ranks.post(sequence, target, counts(4), None)
    num_layers = ranks.memory.moe.num_layers
    write_entry(Mailbox.of(ranks.memory), 1, sequence, target.step, num_layers, 0, 2, counts(1))


REJECTIONS = {
    Rejection.DEMAND_TIMEOUT: [reject_by_timeout],
    Rejection.TARGET_MISMATCH: [reject_by_mismatch],
    Rejection.BAD_DEMAND: [reject_by_corruption, reject_by_layer],
}


@pytest.mark.parametrize(
    ("rejection", "reject"), [(key, reject) for key, ways in REJECTIONS.items() for reject in ways]
)
def test_rejection_is_a_published_plan_and_the_loop_goes_on(start, rejection, reject):
    # Long enough that a slow test thread does not trip it between two posts of one target.
    timeout_s = 0.5 if rejection is Rejection.DEMAND_TIMEOUT else 20.0
    ranks = start(num_ranks=2, num_workers=3, demand_timeout_s=timeout_s, **COPIES_PAY)
    oracle = Oracle(ranks.memory)
    none = np.zeros(8, np.int32)
    for sequence, demand in enumerate(skewed_demands(9, seed=5)):
        target = Target(sequence, sequence % 2, 0)
        if sequence % 3 != 1:
            ranks.post(sequence, target, demand, none)
            plan = ranks.read()
            assert plan.rejection is Rejection.NONE
            assert are_equal(slot_arrays(plan), oracle.plan(sequence, target, demand))
            continue
        reject(ranks, sequence, target)
        plan = ranks.read()
        assert (plan.sequence, plan.target) == (sequence, target)
        assert (plan.rejection, plan.rejected_rank) == (rejection, 1)
        assert not plan.demand.any()
        assert plan.num_tokens == 0
        assert (plan.slot_expert == -1).all()
        assert not plan.slot_pairs.any()
        assert not plan.slot_copy.any()
        if reject is reject_by_timeout:  # too late for its target, and no harm to the next
            ranks.post(sequence, target, None, counts(4))


def test_rejected_target_is_unknown_when_the_first_entry_is_bad(start):
    ranks = start(num_ranks=2)
    ranks.post(0, Target(5, 1, 1), counts(4), counts(4))
    assert ranks.read().target == Target(5, 1, 1)
    ranks.post(1, Target(6, 1, 1), counts(4), None)
    ranks.memory.arrays["demand_entries"][0, 1, 0] ^= 1
    ranks.post(1, Target(6, 1, 1), None, counts(4))
    plan = ranks.read()
    assert (plan.rejection, plan.rejected_rank) == (Rejection.BAD_DEMAND, 0)
    assert plan.target == Target(-1, -1, -1)


def test_lost_rank_counts_as_empty(start):
    ranks = start(num_ranks=2, demand_timeout_s=20.0)
    memory = ranks.memory
    ranks.post(0, Target(0, 0, 0), counts(4), None)
    time.sleep(SHORT_S)
    assert not ranks.is_published()
    advance(memory.arrays["rank_state"], 1, LOST, memory.bell(DEMAND_BELL))
    for sequence in range(3):  # more than the lost rank's entries
        if sequence:
            ranks.post(sequence, Target(sequence, 0, 0), counts(4), None)
        plan = ranks.read()
        assert plan.rejection is Rejection.NONE
        assert plan.demand.tolist() == counts(4).tolist()
        assert plan.rank_tokens.tolist() == [2, 0]


def test_idle_tier_rejects_nothing(start):
    ranks = start(demand_timeout_s=SHORT_S)
    time.sleep(3 * SHORT_S)
    assert not ranks.is_published()
    ranks.post(0, Target(0, 0, 0), counts(4))
    plan = ranks.read()
    assert (plan.sequence, plan.rejection) == (0, Rejection.NONE)


def test_collected_entries_are_free_and_the_planning_is_recorded(start):
    ranks = start(num_ranks=2, **COPIES_PAY)
    num_copies = []
    for sequence, demand in enumerate(skewed_demands(5, seed=6)):
        ranks.post(sequence, Target(sequence, 0, 0), demand, counts())
        num_copies.append(int(ranks.read().slot_copy.sum()))
    arrays = ranks.memory.arrays
    deadline = deadline_after(20.0)
    for rank in range(2):
        assert ranks.memory.wait("demand_collected", rank, 5, DEMAND_BELL, deadline)
    assert count(arrays["next_sequence"], 0) == 5
    events = list(read_events(ranks.memory))
    assert [(e.track, e.stage, e.sequence, e.value) for e in events] == [
        ("scheduler", Stage.PLANNED, sequence, copies) for sequence, copies in enumerate(num_copies)
    ]
    assert all(event.start_ns < event.end_ns for event in events)


def test_full_ring_names_the_worker_that_does_not_read(start):
    ranks = start(plan_ring_depth=2, targets_in_flight=8, reply_timeout_s=SHORT_S)
    for sequence in range(3):
        ranks.post(sequence, Target(sequence, 0, 0), counts(4))
    for _ in range(2):
        ranks.readers[0].read(deadline_after(20.0))
    with pytest.raises(PlanRingTimeout, match=r"worker 1 has not copied a plan for 0\.1 s"):
        ranks.thread.result()


def test_scheduler_continues_from_the_next_sequence(start):
    ranks = start(first_sequence=7)
    for reader in ranks.readers:
        reader.next_sequence = 7
    for sequence in (7, 8):
        ranks.post(sequence, Target(sequence, 0, 0), counts(sequence))
        assert ranks.read().demand.tolist() == counts(sequence).tolist()


def test_scheduler_ends_when_the_tier_stops(start):
    ranks = start()
    ranks.memory.stop()
    with pytest.raises(PeerLost, match="the tier was closed"):
        ranks.thread.result(5.0)
