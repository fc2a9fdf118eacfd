"""EPLB: periodic replication from the load of a past window (github.com/deepseek-ai/EPLB).

`rebalance_experts` is the published mapping, the `free` form: it places every replica anywhere,
with up to several of one expert on a GPU. Fixed primaries rule that out, so the policy `Eplb`
replicates in the same way and packs the extra replicas onto workers without the expert, the
`fixed_primary` form. Figures must name the form they show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.plan import Int32Array, PrimaryPlacement, UInt8Array
from afore_kernels.runtime.arrays import BoolArray, Int64Array
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import NONE, LayerState
from afore_kernels.runtime.planner import Limits
from afore_kernels.runtime.policies import check_demand, protected_slots, record_plan

Weights = npt.NDArray[Any]


def balanced_packing(weight: Weights, num_packs: int) -> tuple[Int64Array, Int64Array]:
    """Pack n items into packs of n / num_packs each: heaviest first, to the lightest open pack.

    Ties go to the lower item and the lower pack. Packs of one item are the identity.

    Args:
        weight: [n], any real dtype.
        num_packs: a divisor of n.

    Returns:
        Pack of each item and its rank in it, int64 [n].

    >>> balanced_packing(np.array([5, 4, 3, 2]), 2)
    (array([0, 1, 1, 0]), array([0, 0, 1, 1]))
    """
    items_per_pack = len(weight) // num_packs
    pack, rank = np.arange(len(weight)), np.zeros(len(weight), np.int64)
    if items_per_pack == 1:
        return pack, rank
    pack_weight, num_items = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    for item in np.argsort(-weight, kind="stable"):
        lightest = int(np.argmin(np.where(num_items < items_per_pack, pack_weight, np.inf)))
        pack[item], rank[item] = lightest, num_items[lightest]
        pack_weight[lightest] += weight[item]
        num_items[lightest] += 1
    return pack, rank


def replicate_experts(
    weight: Weights, num_replicas: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Give each expert one replica and every further one where weight per replica is largest.

    Ties go to the lower expert.

    Args:
        weight: load per expert, [num_experts], any real dtype.
        num_replicas: at least num_experts.

    Returns:
        Expert of each replica and its rank among the expert's, int64 [num_replicas], and replicas
        per expert, int64 [num_experts].

    >>> replicate_experts(np.array([9, 2, 4]), 5)
    (array([0, 1, 2, 0, 0]), array([0, 0, 0, 1, 2]), array([3, 1, 1]))
    """
    num_experts = len(weight)
    expert, rank = np.arange(num_replicas), np.zeros(num_replicas, np.int64)
    count = np.ones(num_experts, np.int64)
    for replica in range(num_experts, num_replicas):
        hottest = int(np.argmax(weight / count))
        expert[replica], rank[replica] = hottest, count[hottest]
        count[hottest] += 1
    return expert, rank, count


def rebalance_experts(
    weight: Weights, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Map replicas to GPUs as published, the `free` form.

    Hierarchical: expert groups are packed to nodes, experts replicated inside their node, replicas
    packed to its GPUs. Where the groups do not divide among the nodes it is global: as of one group
    and one node. The current placement is ignored.

    Args:
        weight: load per layer and expert, [num_layers, num_experts], any real dtype.
        num_replicas: at least num_experts; replica i is on GPU i // (num_replicas / num_gpus).
        num_groups: expert groups, a divisor of num_experts.
        num_nodes: nodes, a divisor of num_gpus.
        num_gpus: a divisor of num_replicas.

    Returns:
        Expert of each replica, int64 [num_layers, num_replicas]; replicas of each expert, int64
        [num_layers, num_experts, most replicas of any], -1 where it has fewer; replicas per
        expert, int64 [num_layers, num_experts].

    Raises:
        ShapeError: if `weight` is not two-dimensional.
        ConfigError: if a number does not divide as it must, or replicas are fewer than experts.
    """
    if weight.ndim != 2:
        raise ShapeError(f"weight must be [num_layers, num_experts], got shape {weight.shape}")
    num_layers, num_experts = weight.shape
    if num_replicas < num_experts:
        raise ConfigError(f"num_replicas {num_replicas} is below num_experts {num_experts}")
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    for name, total, parts_name, parts in (
        ("num_experts", num_experts, "num_groups", num_groups),
        ("num_gpus", num_gpus, "num_nodes", num_nodes),
        ("num_replicas", num_replicas, "num_gpus", num_gpus),
    ):
        if total % parts:
            raise ConfigError(f"{name} {total} is no multiple of {parts_name} {parts}")
    layers = [
        _rebalance_layer(layer_weight, num_replicas, num_groups, num_nodes, num_gpus)
        for layer_weight in weight
    ]
    replica_expert, replica_rank, count = (np.stack(arrays) for arrays in zip(*layers))
    expert_replicas = np.full((num_layers, num_experts, count.max()), NONE, np.int64)
    layer = np.arange(num_layers)[:, None]
    expert_replicas[layer, replica_expert, replica_rank] = np.arange(num_replicas)
    return replica_expert, expert_replicas, count


def _rebalance_layer(
    weight: Weights, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    group_experts = np.arange(len(weight)).reshape(num_groups, -1)
    group_node, group_rank = balanced_packing(weight[group_experts].sum(axis=1), num_nodes)
    replicas_per_node, replicas_per_gpu = num_replicas // num_nodes, num_replicas // num_gpus
    replica_expert, replica_rank = np.empty((2, num_replicas), np.int64)
    count = np.empty(len(weight), np.int64)
    for node in range(num_nodes):
        groups = np.flatnonzero(group_node == node)
        experts = group_experts[groups[np.argsort(group_rank[groups])]].ravel()
        expert, rank, count[experts] = replicate_experts(weight[experts], replicas_per_node)
        replica_weight = (weight[experts] / count[experts])[expert]
        gpu, rank_in_gpu = balanced_packing(replica_weight, num_gpus // num_nodes)
        position = node * replicas_per_node + gpu * replicas_per_gpu + rank_in_gpu
        replica_expert[position] = experts[expert]
        replica_rank[position] = rank
    return replica_expert, replica_rank, count


def fixed_primary_slots(load: Weights, placement: PrimaryPlacement) -> Int32Array:
    """Fill the redundant slots from the load per expert, the `fixed_primary` form.

    Every expert has its primary; each further replica goes where load per replica is largest, up to
    one per worker. They are then packed, largest share first, onto the worker with the least load
    that has a free slot and not the expert. Ties go to the lower expert and worker. A replica that
    no longer fits anywhere gives its slot to the expert with the largest load per replica among
    those its worker lacks. Experts without load get no replica.

    Args:
        load: pairs per expert, [num_experts], any real dtype.
        placement: the fixed primaries.

    Returns:
        Slot table, int32 [num_workers, redundant_slots], of each worker the largest share first
        and -1 at the end.
    """
    num_workers, redundant_slots = placement.num_workers, placement.redundant_slots
    primary_worker = placement.primary_worker
    count = np.ones(placement.num_experts, np.int64)
    replicas: list[int] = []
    for _ in range(num_workers * redundant_slots):
        share = np.where(count < num_workers, load / count, 0.0)
        expert = int(np.argmax(share))
        if share[expert] == 0:
            break
        replicas.append(expert)
        count[expert] += 1

    share = load / count
    worker_load = np.bincount(primary_worker, weights=share, minlength=num_workers)
    slots = np.full((num_workers, redundant_slots), NONE, np.int32)
    num_used = np.zeros(num_workers, np.int64)
    holds = np.zeros((num_workers, placement.num_experts), np.bool_)
    holds[primary_worker, np.arange(placement.num_experts)] = True

    def place(expert: int, worker: int) -> None:
        slots[worker, num_used[worker]] = expert
        num_used[worker] += 1
        holds[worker, expert] = True

    for expert in sorted(replicas, key=lambda replica: (-share[replica], replica)):
        can_take = (num_used < redundant_slots) & ~holds[:, expert]
        if can_take.any():
            lightest = int(np.argmin(np.where(can_take, worker_load, np.inf)))
            place(expert, lightest)
            worker_load[lightest] += share[expert]
    for worker in range(num_workers):
        while num_used[worker] < redundant_slots:
            lacking = np.where(holds[worker], 0.0, load / count)
            expert = int(np.argmax(lacking))
            if lacking[expert] == 0:
                break
            place(expert, worker)
            count[expert] += 1
    return slots


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
