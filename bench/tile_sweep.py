"""What a tile size does to a layer, computed without a device: balance, padding, predicted time.

The planner runs as in a tier, on drawn or recorded routing. Its tiles give the balance; the
prediction is that of the slowest worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from afore_kernels.config import TierConfig
from afore_kernels.gemm.tiles import Int32Array, count_tiles
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.replay.workload import Workload, plan_workload
from afore_kernels.report import imbalance
from afore_kernels.testing import make_routing
from afore_kernels.traces import ContinuousBatching, RoutingTrace, split_tokens
from bench.roofline import BF16_BYTES, make_roofline
from bench.shapes import Device, Model

REDUNDANT_SLOTS = 2
SKEWS = {"uniform": 0.0, "zipf": 1.0}
# Assumed, as no datasheet has it: how much faster than memory the L2 gives a weight to the second
# and later tiles of a slot.
L2_SPEEDUP = 2.0
# Recorded layers differ in skew; these are spread over the model.
TRACE_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePoint:
    """One setting of the sweep; the rest are means over its targets.

    Attributes:
        routing: `uniform`, `zipf` or `trace`.
        num_tokens: of a target, over all ranks.
        num_workers: workers.
        tile_m: pairs per tile.
        policy: `afore`, with replicas, or `static`.
        pairs_per_slot: pairs per slot with any.
        tile_balance: largest over mean tiles per worker.
        tile_efficiency: share of the tiles' rows that hold a pair.
        predicted_us: time of the slowest worker, by `predict_us`.
    """

    routing: str
    num_tokens: int
    num_workers: int
    tile_m: int
    policy: str
    pairs_per_slot: float
    tile_balance: float
    tile_efficiency: float
    predicted_us: float


def draw_ids(model: Model, num_tokens: int, num_targets: int, skew: float) -> npt.NDArray[np.uint8]:
    """Draw targets that share one popularity, uint8 [num_targets, num_tokens, 1, top_k]."""
    config = model.config
    ids, _ = make_routing(num_targets * num_tokens, config.num_experts, config.top_k, skew=skew)
    return ids.numpy().astype(np.uint8).reshape(num_targets, num_tokens, 1, config.top_k)


def recorded_ids(trace: RoutingTrace, num_tokens: int, num_steps: int) -> npt.NDArray[np.uint8]:
    """Replay decode steps, uint8 [num_steps, num_tokens, TRACE_LAYERS, top_k]."""
    layers = np.linspace(0, trace.num_layers - 1, TRACE_LAYERS).astype(int)
    steps = itertools.islice(ContinuousBatching(trace, concurrency=num_tokens), num_steps)
    return np.stack([step[:, layers] for step in steps])


def make_routings(
    model: Model, num_tokens: int, num_targets: int, trace: RoutingTrace | None = None
) -> dict[str, npt.NDArray[np.uint8]]:
    """Return the routings of a sweep by name; `trace` is left out if it is of another model."""
    routings = {
        name: draw_ids(model, num_tokens, num_targets, skew) for name, skew in SKEWS.items()
    }
    config = model.config
    if trace and (trace.num_experts, trace.top_k) == (config.num_experts, config.top_k):
        routings["trace"] = recorded_ids(trace, num_tokens, num_targets)
    return routings


def plan_targets(
    model: Model, ids: npt.NDArray[np.uint8], num_workers: int, tile_m: int, device: Device
) -> tuple[list[Plan], PrimaryPlacement]:
    """Plan every target of `ids` [num_targets, num_tokens, num_layers, top_k] with replicas.

    The planner's costs are those of the prediction: a tile streams its weights from the L2, a slot
    from memory.
    """
    moe = replace(model.config, num_layers=ids.shape[2], tile_m=tile_m)
    slot_us = model.expert_bytes / device.bytes_per_us
    tier = TierConfig(
        num_workers=num_workers,
        redundant_slots=REDUNDANT_SLOTS,
        tile_time_us=slot_us / L2_SPEEDUP,
        slot_time_us=slot_us,
    )
    workload = Workload(moe, ids, split_tokens(ids.shape[1], 1, 1))
    placement = PrimaryPlacement(moe.num_experts, num_workers, REDUNDANT_SLOTS)
    return list(plan_workload(workload, tier)), placement


def pairs_of_workers(plan: Plan, placement: PrimaryPlacement) -> list[Int32Array]:
    """Return the pairs of each worker's slots, int32 [num_slots]."""
    intervals = (pair_intervals(plan, placement, w) for w in range(placement.num_workers))
    return [each.hi - each.lo for each in intervals]


def predict_us(
    model: Model, pairs_per_slot: Sequence[int] | Int32Array, tile_m: int, device: Device
) -> float:
    """Return the time that one worker cannot beat with tiles of `tile_m`.

    The slowest of memory, which reads a slot's weights once; the L2, which gives them to every
    tile; and the tensor cores, which also multiply the padding.
    """
    config = model.config
    roofline = make_roofline(model, list(map(int, pairs_per_slot)), tile_m, device)
    activation_bytes = BF16_BYTES * 2 * (config.hidden_size + config.intermediate_size)
    l2_bytes = roofline.num_tiles * (model.expert_bytes + tile_m * activation_bytes)
    rows = roofline.num_tiles * tile_m
    flops = 6.0 * rows * config.hidden_size * config.intermediate_size
    return max(
        roofline.num_bytes / device.bytes_per_us,
        l2_bytes / (L2_SPEEDUP * device.bytes_per_us),
        flops / device.bf16_flops_per_us,
    )


def summarise(
    model: Model,
    targets: Sequence[Sequence[Int32Array]],
    tile_m: int,
    device: Device,
) -> Mapping[str, float]:
    """Return the figures of `TilePoint` from the pairs of [target][worker][slot]."""
    tiles = np.array([[int(count_tiles(w, tile_m).sum()) for w in target] for target in targets])
    slots = [pairs for target in targets for pairs in target]
    num_pairs = sum(int(pairs.sum()) for pairs in slots)
    return {
        "pairs_per_slot": num_pairs / sum(np.count_nonzero(pairs) for pairs in slots),
        "tile_balance": float(imbalance(tiles).mean()),
        "tile_efficiency": num_pairs / float(tiles.sum() * tile_m),
        "predicted_us": float(
            np.mean([max(predict_us(model, w, tile_m, device) for w in t) for t in targets])
        ),
    }


def sweep(
    model: Model,
    device: Device,
    *,
    tile_sizes: Sequence[int],
    tokens: Sequence[int],
    workers: Sequence[int],
    num_targets: int,
    trace: RoutingTrace | None = None,
) -> Iterator[TilePoint]:
    """Yield every setting, static and with replicas.

    Args:
        model: shapes and weight format.
        device: whose datasheet figures the prediction takes.
        tile_sizes: values of tile_m.
        tokens: tokens per target.
        workers: worker counts.
        num_targets: targets, or recorded steps, per setting.
        trace: recorded routing, used if it is of the model's experts and top-k.
    """
    for num_tokens in tokens:
        routings = make_routings(model, num_tokens, num_targets, trace)
        for (routing, ids), num_workers, tile_m in itertools.product(
            routings.items(), workers, tile_sizes
        ):
            plans, placement = plan_targets(model, ids, num_workers, tile_m, device)
            policies = {"static": [plan.without_replicas() for plan in plans], "afore": plans}
            for policy, chosen in policies.items():
                targets = [pairs_of_workers(plan, placement) for plan in chosen]
                yield TilePoint(
                    routing=routing,
                    num_tokens=num_tokens,
                    num_workers=num_workers,
                    tile_m=tile_m,
                    policy=policy,
                    **summarise(model, targets, tile_m, device),
                )
