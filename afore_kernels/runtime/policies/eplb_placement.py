"""Which experts EPLB replicates, and on which workers (github.com/deepseek-ai/EPLB).

`rebalance_experts` is the published mapping, the `free` form: it places every replica anywhere,
with up to several of one expert on a GPU. Fixed primaries rule that out, so `fixed_primary_slots`
replicates in the same way and packs the extra replicas onto workers without the expert, the
`fixed_primary` form. Figures must name the form they show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.plan import Int32Array, PrimaryPlacement
from afore_kernels.runtime.arrays import Int64Array
from afore_kernels.runtime.placement import NONE

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
