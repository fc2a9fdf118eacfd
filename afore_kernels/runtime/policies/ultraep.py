"""UltraEP: quotas under the least target load that greedy filling reaches (arXiv 2606.04101).

For a target load T, every worker whose primaries carry more gives its excess away in quotas to
workers with room below T. Binary search finds the smallest T, from 1.01 times the mean, for which
that succeeds. The demand must be the target's own: nothing is predicted, and nothing is kept but
the weights that happen to be resident. Published for prefill and training, where it plans and
copies between the gate and the FFN of the same microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from afore_kernels.errors import ConfigError
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.arrays import Int64Array, planner_compiled
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import NONE, LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget
from afore_kernels.runtime.policies import (
    check_demand,
    count_primary_load,
    find_slot,
    protected_slots,
    record_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UltraEp:
    """The policy and its knobs.

    Its own design has no copy budget and starts every target from empty slots. Here
    `limits.copy_budget` caps the copies (a T that needs more is not reached), and a replica that
    the layer's slots still hold costs none.

    Attributes:
        min_quota: fewest pairs a replica may get; published 1024 for prefill, scale it to the mean
            load. Every excess must divide into such quotas, so at decode, with tens of pairs per
            worker, already 2 puts most T out of reach: 1, no minimum, balances best.
        balance_threshold: smallest T, times the mean load per worker.

    Raises:
        ConfigError: if `min_quota` is below 1 or `balance_threshold` below 1.
    """

    min_quota: int = 1
    balance_threshold: float = 1.01

    def __post_init__(self) -> None:
        if self.min_quota < 1:
            raise ConfigError(f"min_quota must be at least 1, got {self.min_quota}")
        if not 1.0 <= self.balance_threshold < math.inf:
            raise ConfigError(
                f"balance_threshold must be finite and at least 1, got {self.balance_threshold}"
            )

    def initial_state(self, placement: PrimaryPlacement) -> LayerState:
        """Return the state of a layer before its first target."""
        return LayerState.initial(placement)

    def plan(
        self,
        demand: Int32Array,
        state: LayerState,
        placement: PrimaryPlacement,
        limits: Limits,
        cost: CostModel,
        *,
        sequence: int,
        is_protected: UInt8Array | None = None,
    ) -> PlannedTarget:
        """Plan one target, see `Policy.plan`; `cost` is not used."""
        check_demand(demand, placement)
        is_protected = protected_slots(state, is_protected)
        load = count_primary_load(demand, placement)
        worker_order = np.argsort(-load, kind="stable")
        expert_order = np.lexsort((-demand.astype(np.int64), placement.primary_worker))

        slot_expert, slot_pairs = state.slot_expert.copy(), np.zeros_like(state.slot_expert)
        # At the largest load nobody has an excess, so `high` is always reached.
        high = int(load.max())
        low = min(math.ceil(self.balance_threshold * int(load.sum()) / load.size), high)
        while low < high:
            target_load = (low + high) // 2
            quota_expert, quota_pairs = state.slot_expert.copy(), np.zeros_like(slot_pairs)
            if _give_excess(
                quota_expert,
                quota_pairs,
                demand,
                load,
                worker_order,
                expert_order,
                placement.primary_starts,
                is_protected,
                state.slot_last_use,
                target_load,
                self.min_quota,
                limits.copy_budget,
            ):
                high, slot_expert, slot_pairs = target_load, quota_expert, quota_pairs
            else:
                low = target_load + 1
        return record_plan(
            demand, state, slot_expert, slot_pairs, tile_m=limits.tile_m, sequence=sequence
        )


@planner_compiled
def _give_excess(
    slot_expert: Int32Array,
    slot_pairs: Int32Array,
    demand: Int32Array,
    load: Int64Array,
    worker_order: Int64Array,
    expert_order: Int64Array,
    primary_starts: Int32Array,
    is_protected: UInt8Array,
    last_use: Int64Array,
    target_load: int,
    min_quota: int,
    copy_budget: int,
) -> bool:
    """Try to bring every worker to `target_load`; on failure the outputs are incomplete.

    Sources and their experts from the most loaded, ties to the lower id; each quota goes to the
    worker with most room, ties to the lower worker, that has no quota of the expert yet and a slot
    for it. A primary keeps at least one pair.

    Args:
        slot_expert: in, the slot table before; out, with the quotas' experts.
        slot_pairs: in, zeros; out, the quotas.
        load: pairs per worker on its primaries, int64 [num_workers].
        worker_order: workers by descending load, int64 [num_workers].
        expert_order: experts by primary worker, then by descending demand, int64 [num_experts].
    """
    is_taken = np.zeros(slot_expert.shape, np.bool_)
    room = np.maximum(target_load - load, 0)
    num_copies = 0
    for source in worker_order:
        need = load[source] - target_load
        if need <= 0:
            break
        for expert in expert_order[primary_starts[source] : primary_starts[source + 1]]:
            available = np.int64(demand[expert]) - 1
            while need > 0 and available > 0:
                best, best_slot = NONE, NONE
                for worker in range(room.size):
                    if min(need, room[worker], available) < min_quota:
                        continue
                    if best != NONE and room[worker] <= room[best]:
                        continue
                    slot = find_slot(expert, worker, slot_expert, is_taken, is_protected, last_use)
                    if slot == NONE or is_taken[worker, slot]:
                        continue
                    if slot_expert[worker, slot] != expert and num_copies == copy_budget:
                        continue
                    best, best_slot = worker, slot
                if best == NONE:
                    break
                quota = min(need, room[best], available)
                num_copies += slot_expert[best, best_slot] != expert
                slot_expert[best, best_slot] = expert
                slot_pairs[best, best_slot] = quota
                is_taken[best, best_slot] = True
                room[best] -= quota
                need -= quota
                available -= quota
        if need > 0:
            return False
    return True
