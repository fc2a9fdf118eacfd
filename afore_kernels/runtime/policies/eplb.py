"""EPLB: periodic replication from the load of a past window (github.com/deepseek-ai/EPLB).

The policy `Eplb` plans with fixed primaries, in the `fixed_primary` form of `eplb_placement`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from afore_kernels.errors import ConfigError
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.arrays import BoolArray, Int64Array
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import NONE, LayerState
from afore_kernels.runtime.planner import Limits
from afore_kernels.runtime.policies import check_demand, protected_slots, record_plan
from afore_kernels.runtime.policies.eplb_placement import fixed_primary_slots


class EplbState(NamedTuple):
    """What the policy remembers of one layer: `LayerState`, and the window of its load.

    Attributes:
        slot_expert, slot_tiles, slot_last_use, primary_tiles: as of `LayerState`.
        loads: demand of the last targets, at most `window`, each int32 [num_experts].
        counter: targets since the last rebalancing; starts at `Eplb.first_counter`.
        wanted: slot table that the last rebalancing asked for, int32 [num_workers,
            redundant_slots].
    """

    slot_expert: Int32Array
    slot_tiles: Int32Array
    slot_last_use: Int64Array
    primary_tiles: Int32Array
    loads: tuple[Int32Array, ...]
    counter: int
    wanted: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class EplbTarget:
    """A plan's slot arrays and the layer state after it, as `planner.PlannedTarget`.

    Attributes:
        slot_expert: slot table, int32 [num_workers, redundant_slots], -1 = empty.
        slot_pairs: pairs per replica, int32, same shape; primaries run the remainder.
        slot_copy: 1 where the replica must first be copied, uint8, same shape.
        state: what to plan the layer's next target from.
    """

    slot_expert: Int32Array
    slot_pairs: Int32Array
    slot_copy: UInt8Array
    state: EplbState


@dataclass(frozen=True, slots=True, kw_only=True)
class Eplb:
    """The policy, in the `fixed_primary` form, and its knobs.

    All counts are targets of the layer, so engine steps times microbatches per step. The defaults
    are vLLM's; SGLang rebalances every 1000 with a counter from 0. A run much shorter than the
    interval never rebalances: scale `interval` and `window` to its length, and say so.

    Its own design copies at once whatever the new placement needs. Here `limits.copy_budget` caps
    the copies per target, and the rest follow at the layer's next targets. An expert that stays on
    a worker stays in its slot and costs no copy. A slot that is still protected is drained: it gets
    no pairs, and can be rebound at the next target.

    An expert's pairs are split over its replicas as evenly as whole pairs can be, by count alone:
    the engines pick a replica per token without looking at the load of the batch.

    Attributes:
        window: latest targets whose demand is summed.
        interval: targets between rebalancings.
        initial_counter: targets counted before the first; None means three quarters of `interval`.
        is_asynchronous: a copied replica gets pairs from the layer's next target on, so nothing
            waits for its copy (vLLM since 0.24); False gives it pairs at once, and they wait.

    Raises:
        ConfigError: if `window` or `interval` is below 1, or `initial_counter` below 0.
    """

    window: int = 1000
    interval: int = 3000
    initial_counter: int | None = None
    is_asynchronous: bool = True

    def __post_init__(self) -> None:
        for name, low in (("window", 1), ("interval", 1), ("initial_counter", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")

    @property
    def first_counter(self) -> int:
        """`initial_counter` with its default resolved."""
        if self.initial_counter is None:
            return self.interval - self.interval // 4
        return self.initial_counter

    def initial_state(self, placement: PrimaryPlacement) -> EplbState:
        """Return the state of a layer before its first target."""
        empty = LayerState.initial(placement)
        return EplbState(*empty, (), self.first_counter, empty.slot_expert.copy())

    def plan(
        self,
        demand: Int32Array,
        state: EplbState,
        placement: PrimaryPlacement,
        limits: Limits,
        cost: CostModel,
        *,
        sequence: int,
        is_protected: UInt8Array | None = None,
    ) -> EplbTarget:
        """Plan one target, see `Policy.plan`; `cost` is not used.

        Rebalancing uses the demand of earlier targets only.
        """
        check_demand(demand, placement)
        counter, wanted = state.counter, state.wanted
        if counter >= self.interval and state.loads:
            counter = 0
            load = np.stack(state.loads).sum(axis=0, dtype=np.int64)
            wanted = _keep_residents(fixed_primary_slots(load, placement), state.slot_expert)

        slot_expert = state.slot_expert.copy()
        is_idle = np.zeros(slot_expert.shape, np.bool_)
        for worker, slot, is_blocked in _due_slots(
            wanted != slot_expert, protected_slots(state, is_protected), limits.copy_budget
        ):
            is_idle[worker, slot] = is_blocked or self.is_asynchronous
            if not is_blocked:
                slot_expert[worker, slot] = wanted[worker, slot]

        planned = record_plan(
            demand,
            state,
            slot_expert,
            _split_evenly(demand, np.where(is_idle, np.int32(NONE), slot_expert)),
            tile_m=limits.tile_m,
            sequence=sequence,
        )
        loads = (*state.loads, demand.copy())[-self.window :]
        return EplbTarget(
            planned.slot_expert,
            planned.slot_pairs,
            planned.slot_copy,
            EplbState(*planned.state, loads, counter + 1, wanted),
        )


def _keep_residents(wanted: Int32Array, slot_expert: Int32Array) -> Int32Array:
    """Arrange each worker's wanted experts so that those it holds stay in their slots.

    A slot for which nothing is wanted keeps what it holds.
    """
    arranged = slot_expert.copy()
    for experts, slots in zip(wanted, arranged):
        missing = [expert for expert in experts if expert != NONE and expert not in slots]
        free = [r for r, held in enumerate(slots) if held == NONE or held not in experts]
        for slot, expert in zip(free, missing):
            slots[slot] = expert
    return arranged


def _due_slots(
    is_pending: BoolArray, is_protected: UInt8Array, copy_budget: int
) -> list[tuple[int, int, bool]]:
    """List the slots to rebind at this target, or to drain: (worker, slot, is protected).

    As many as the copy budget has, unprotected ones first, then slot by slot over all workers.
    """
    slots = [(int(w), int(r), bool(is_protected[w, r])) for r, w in np.argwhere(is_pending.T)]
    return sorted(slots, key=lambda due: due[2])[:copy_budget]


def _split_evenly(demand: Int32Array, slot_expert: Int32Array) -> Int32Array:
    """Split each expert's pairs over the primary and its replicas, to within one pair.

    The pairs left over go to the primary first, then to the replicas in worker order.

    Returns:
        Pairs per replica, int32 [num_workers, redundant_slots].
    """
    workers, slots = np.nonzero(slot_expert != NONE)
    experts = slot_expert[workers, slots]
    count = 1 + np.bincount(experts, minlength=demand.size)
    share, left_over = np.divmod(demand, count)
    rank = np.ones(demand.size, np.int64)
    slot_pairs = np.zeros_like(slot_expert)
    for worker, slot, expert in zip(workers, slots, experts):
        slot_pairs[worker, slot] = share[expert] + (rank[expert] < left_over[expert])
        rank[expert] += 1
    return slot_pairs
