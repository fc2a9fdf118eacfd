"""Policies: what plans a target in place of Algorithm 1, for comparison (section 7.1).

A policy is a frozen record of its own knobs with two pure methods: `initial_state` gives what it
remembers of a layer before the first target, `plan` turns the demand of one target and the state
before it into the plan's slot arrays and the state after it, like `planner.plan_microbatch`.

Every policy plans in the same slots (fixed primaries, redundant slots beside them) and keeps:

- a worker holds at most one replica of an expert, and none beside its primary;
- a protected slot (U_t) is not rebound, and a slot is rebound at most once per target;
- a copy is a slot whose expert changes, and there are at most `limits.copy_budget` per target; a
  replica that is already resident is used without one;
- the replicas run no more than the expert's demand, and the primary runs the remainder.

Pairs need not fill tiles: the peers balance pairs, and the tiles of the state follow from them.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np

from afore_kernels.errors import ShapeError
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.arrays import BoolArray, Int64Array, planner_compiled
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import NONE, LayerState
from afore_kernels.runtime.planner import Limits, PlannedTarget


class SlotState(Protocol):
    """What every policy's state of a layer has: the arrays of `placement.LayerState`."""

    @property
    def slot_expert(self) -> Int32Array:
        """Slot table, int32 [num_workers, redundant_slots], -1 = empty."""

    @property
    def slot_tiles(self) -> Int32Array:
        """Tiles per replica in the previous assignment, int32, same shape."""

    @property
    def slot_last_use(self) -> Int64Array:
        """Sequence of the last target with pairs there, -1 = none, int64, same shape."""

    @property
    def primary_tiles(self) -> Int32Array:
        """Tiles per primary in the previous assignment, int32 [num_experts]."""


StateT = TypeVar("StateT", bound=SlotState)
StateT_co = TypeVar("StateT_co", bound=SlotState, covariant=True)


class Planned(Protocol[StateT_co]):
    """A plan's slot arrays and the state after it; `planner.PlannedTarget` is one."""

    @property
    def slot_expert(self) -> Int32Array:
        """Slot table, int32 [num_workers, redundant_slots], -1 = empty."""

    @property
    def slot_pairs(self) -> Int32Array:
        """Pairs per replica, int32, same shape; primaries run the remainder."""

    @property
    def slot_copy(self) -> UInt8Array:
        """1 where the replica must first be copied, uint8, same shape."""

    @property
    def state(self) -> StateT_co:
        """What to plan the layer's next target from."""


class Policy(Protocol[StateT]):
    """What the runtime and the benchmarks ask of a policy."""

    def initial_state(self, placement: PrimaryPlacement) -> StateT:
        """Return the state of a layer before its first target."""

    def plan(
        self,
        demand: Int32Array,
        state: StateT,
        placement: PrimaryPlacement,
        limits: Limits,
        cost: CostModel,
        *,
        sequence: int,
        is_protected: UInt8Array | None = None,
    ) -> Planned[StateT]:
        """Plan one target without changing `state`.

        Args:
            demand: pairs per expert, int32 [num_experts].
            state: of the target's layer, from `initial_state` or from the plan before.
            placement: the fixed primaries.
            limits: `tile_m` for the tiles of the state, `copy_budget` for the copies.
            cost: the estimates of the net gain, for policies that weigh copies.
            sequence: the target's position in the tier's order.
            is_protected: U_t, uint8 [num_workers, redundant_slots]; by default the slots that the
                layer's previous assignment uses.

        Raises:
            ShapeError: if `demand` is not int32 [num_experts] or has a negative count.
        """


def check_demand(demand: Int32Array, placement: PrimaryPlacement) -> None:
    """Raise `ShapeError` unless `demand` is int32 [num_experts] without a negative count."""
    if demand.dtype != np.int32 or demand.shape != (placement.num_experts,):
        raise ShapeError(
            f"demand is {demand.dtype} {demand.shape}, expected int32 ({placement.num_experts},)"
        )
    if (demand < 0).any():
        raise ShapeError(f"demand of expert {int(np.argmin(demand))} is {int(demand.min())}")


def protected_slots(state: SlotState, is_protected: UInt8Array | None) -> UInt8Array:
    """Return U_t: `is_protected`, or by default the slots of the previous assignment."""
    return (state.slot_tiles > 0).astype(np.uint8) if is_protected is None else is_protected


def count_primary_load(demand: Int32Array, placement: PrimaryPlacement) -> Int64Array:
    """Count the pairs per worker with every expert on its primary, int64 [num_workers]."""
    load = np.zeros(placement.num_workers, np.int64)
    np.add.at(load, placement.primary_worker, demand)
    return load


@planner_compiled
def find_slot(
    expert: int,
    worker: int,
    slot_expert: Int32Array,
    is_taken: BoolArray,
    is_protected: UInt8Array,
    last_use: Int64Array,
) -> int:
    """Find the redundant slot in which `worker` can run `expert`, or -1.

    The slot that holds the expert already, else an empty one, else the least recently used, ties to
    the lower slot. A slot that is protected or taken by the plan so far cannot be rebound.

    Args:
        expert: whose primary is elsewhere.
        worker: where to run it.
        slot_expert: slot table of the plan so far, int32 [num_workers, redundant_slots].
        is_taken: slots that the plan so far gives pairs, bool, same shape.
        is_protected: U_t, uint8, same shape.
        last_use: sequence of the last target with pairs there, int64, same shape.
    """
    best, best_last_use = NONE, np.int64(0)
    for slot in range(slot_expert.shape[1]):
        held = slot_expert[worker, slot]
        if held == expert:
            return int(slot)
        if is_taken[worker, slot] or is_protected[worker, slot]:
            continue
        used = np.int64(NONE - 1) if held == NONE else last_use[worker, slot]
        if best == NONE or used < best_last_use:
            best, best_last_use = int(slot), used
    return best


def record_plan(
    demand: Int32Array,
    state: SlotState,
    slot_expert: Int32Array,
    slot_pairs: Int32Array,
    *,
    tile_m: int,
    sequence: int,
) -> PlannedTarget:
    """Complete a plan: its copies, and the state of the layer after it.

    Args:
        demand: pairs per expert, int32 [num_experts].
        state: before the target.
        slot_expert: slot table of the plan, int32 [num_workers, redundant_slots].
        slot_pairs: pairs per replica, int32, same shape.
        tile_m: pairs per tile.
        sequence: the target's position in the tier's order.
    """
    primary_pairs = demand.astype(np.int64)
    is_bound = slot_expert != NONE
    np.subtract.at(primary_pairs, slot_expert[is_bound], slot_pairs[is_bound])
    assert (primary_pairs >= 0).all()
    after = LayerState(
        slot_expert=slot_expert.copy(),
        slot_tiles=_count_tiles(slot_pairs, tile_m),
        slot_last_use=np.where(slot_pairs > 0, np.int64(sequence), state.slot_last_use),
        primary_tiles=_count_tiles(primary_pairs, tile_m),
    )
    slot_copy = (slot_expert != state.slot_expert).astype(np.uint8)
    return PlannedTarget(slot_expert, slot_pairs, slot_copy, after)


def _count_tiles(pairs: Int32Array | Int64Array, tile_m: int) -> Int32Array:
    return (-(-pairs.astype(np.int64) // tile_m)).astype(np.int32)
