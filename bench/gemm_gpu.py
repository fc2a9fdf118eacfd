"""Times of the expert FFN of one worker, beside its baselines on the same weights and routing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import architecture, heuristic_launch
from afore_kernels.gemm.measure import draw_weight
from afore_kernels.gemm.quant import ExpertWeight
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn
from afore_kernels.partition.device_plan import DevicePlan
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.partition.pack import partition_pairs
from afore_kernels.plan import Plan, PlanLayout, PrimaryPlacement
from bench.gemm_baselines import TorchExperts, local_slots, run_expert_loop, run_grouped_mm
from bench.roofline import make_roofline
from bench.shapes import Device, Model
from bench.tile_sweep import pairs_of_workers, plan_targets

# Launch i of something whose routing changes from launch to launch -> its output.
Launch: TypeAlias = Callable[[int], torch.Tensor | None]
# Median time of a launch in microseconds.
Timer: TypeAlias = Callable[[Launch], float]

CHECKED_TOKENS = 64
_GIB = 1 << 30


class CudaTimer:
    """Times launches with events, the L2 overwritten before each.

    Args:
        repeats: timed launches; the median counts.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._flush = torch.empty(_GIB // 2, dtype=torch.uint8, device="cuda")

    def __call__(self, launch: Launch) -> float:
        """Return the median time of `launch` in microseconds."""
        times = []
        for i in range(-3, self._repeats):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            self._flush.zero_()  # long enough for the host to launch all that follows
            start.record()
            launch(i)
            end.record()
            end.synchronize()
            if i >= 0:
                times.append(1e3 * start.elapsed_time(end))
        return statistics.median(times)


def measure_device(name: str, timer: Timer) -> Device:
    """Measure what this GPU sustains: a copy of 1 GiB, and a bf16 product of 8192 x 8192."""
    source = torch.empty(_GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = timer(lambda _: target.copy_(source))
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    product_us = timer(lambda _: a @ a)
    return Device(
        name=name,
        num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
        bytes_per_us=2 * _GIB / copy_us,
        bf16_flops_per_us=2.0 * size**3 / product_us,
        fp8_flops_per_us=None,
    )


class Routed(NamedTuple):
    """One target on the worker.

    Attributes:
        ids: int32 [num_tokens, top_k], of all workers.
        record: the plan's, int32 words.
        tiles: the worker's pairs.
        slots: int64 [num_tokens, top_k], -1 for a pair of another worker.
        pairs_per_slot: int32 [num_slots].
    """

    ids: torch.Tensor
    record: torch.Tensor
    tiles: DeviceTiles
    slots: torch.Tensor
    pairs_per_slot: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class WorkerTargets:
    """Targets of the worker that has the most pairs in the first of them.

    Attributes:
        plan: reads the records of `routed`.
        routed: the targets.
        num_slots: of the worker.
    """

    plan: DevicePlan
    routed: list[Routed]
    num_slots: int

    @classmethod
    def build(
        cls,
        ids: npt.NDArray[np.uint8],
        plans: list[Plan],
        placement: PrimaryPlacement,
        tile_m: int,
        device: torch.device,
    ) -> Self:
        """Partition every target on the host.

        Args:
            ids: [num_targets, num_tokens, num_layers, top_k].
            plans: of the targets, by step and layer.
            placement: primaries of the tier.
            tile_m: pairs per tile.
            device: of the kernels.
        """
        layout = PlanLayout(placement, num_ranks=1)
        loads = [int(pairs.sum()) for pairs in pairs_of_workers(plans[0], placement)]
        worker = int(np.argmax(loads))
        num_pairs = ids.shape[1] * ids.shape[3]
        device_plan = DevicePlan.allocate(layout, worker, tile_m, num_pairs, device)
        routed = []
        for plan in plans:
            record = torch.from_numpy(layout.pack(plan).view(np.int32)).to(device)
            target = plan.target
            routing = ids[target.step, :, target.layer].astype(np.int32)
            intervals = pair_intervals(plan, placement, worker)
            tiles = partition_pairs(routing, intervals, intervals.tile_schedule(tile_m)).tiles
            routed.append(
                Routed(
                    torch.from_numpy(routing).to(device),
                    record,
                    DeviceTiles.from_host(tiles, device),
                    local_slots(tiles, ids.shape[3]).to(device),
                    tiles.schedule.pairs_per_slot,
                )
            )
        return cls(device_plan, routed, placement.num_slots(worker))


@dataclass(frozen=True, eq=False)
class WorkerExperts:
    """Random weights of a worker's slots, as the kernels and as the baselines take them."""

    gate_up: ExpertWeight
    down: ExpertWeight
    torch: TorchExperts

    @classmethod
    def draw(cls, model: Model, num_slots: int, device: torch.device) -> Self:
        """Draw weights in the model's format, and dequantise them."""
        config = model.config
        dtype = getattr(torch, config.dtype)
        width, hidden_size = config.intermediate_size, config.hidden_size
        common = dtype, model.weight_format, device
        gate_up = draw_weight(num_slots, 2, width, hidden_size, *common)
        down = draw_weight(num_slots, 1, hidden_size, width, *common)
        if config.activation.interleaved:
            # Rows are random: which of them are gates is a matter of reading.
            scale = None if gate_up.scale is None else gate_up.scale.flatten(1, 2)
            gate_up = ExpertWeight.gate_up(
                gate_up.data.flatten(1, 2), scale, format=gate_up.format, interleaved=True
            )
        biases: list[torch.Tensor | None] = [None, None]
        if config.has_bias:
            sizes = 2 * width, hidden_size
            biases = [torch.randn(num_slots, n, device=device).to(dtype) for n in sizes]
        experts = TorchExperts(
            gate_up=_dequantise(gate_up, dtype),
            down=_dequantise(down, dtype),
            gate_up_bias=biases[0],
            down_bias=biases[1],
            activation=config.activation,
        )
        return cls(gate_up, down, experts)


def _dequantise(weight: ExpertWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise a slot at a time: all of them in fp32 may not fit the device."""
    rows = []
    for slot in range(weight.num_slots):
        one = slice(slot, slot + 1)
        scale = None if weight.scale is None else weight.scale[one]
        rows.append(replace(weight, data=weight.data[one], scale=scale).as_rows(dtype))
    return torch.cat(rows)


def measure_worker(
    model: Model,
    ids: npt.NDArray[np.uint8],
    num_workers: int,
    tile_m: int,
    device: Device,
    timer: Timer,
    torch_device: torch.device,
) -> dict[str, Any]:
    """Time partition, kernels and baselines; every launch has another target than the one before.

    Args:
        model: shapes and weight format.
        ids: routing, [num_targets, num_tokens, num_layers, top_k].
        num_workers: workers of the tier; the one with the most pairs is measured.
        tile_m: pairs per tile.
        device: measured limits of this GPU.
        timer: of the launches.
        torch_device: where to run.
    """
    config = model.config
    dtype = getattr(torch, config.dtype)
    plans, placement = plan_targets(model, ids, num_workers, tile_m, device)
    targets = WorkerTargets.build(ids, plans, placement, tile_m, torch_device)
    experts = WorkerExperts.draw(model, targets.num_slots, torch_device)
    routed = targets.routed
    num_tokens, hidden_size = ids.shape[1], config.hidden_size
    hidden = torch.randn(num_tokens, hidden_size, device=torch_device).to(dtype)
    weights = torch.rand(num_tokens, config.top_k, device=torch_device).softmax(1)
    max_rows = max(target.tiles.schedule.max_rows for target in routed)
    workspace = Workspace.allocate(
        max_rows, hidden_size, config.intermediate_size, dtype, torch_device
    )
    out = torch.empty(num_tokens, hidden_size, device=torch_device)
    shared_tiles = DeviceTiles.allocate(targets.plan.schedule, routed[0].ids.numel())
    launch = heuristic_launch(
        architecture(torch_device),
        tile_m,
        dtype=dtype,
        weight_format=model.weight_format,
        has_bias=config.has_bias,
    )

    def partition(i: int) -> None:
        target = routed[i % len(routed)]
        targets.plan.expand(target.record)
        targets.plan.partition(target.ids, shared_tiles)

    def kernels(i: int) -> torch.Tensor:
        tiles = routed[i % len(routed)].tiles
        run_expert_ffn(
            out,
            hidden,
            weights,
            experts.gate_up,
            experts.down,
            tiles,
            workspace,
            activation=config.activation,
            config=launch,
            gate_up_bias=experts.torch.gate_up_bias,
            down_bias=experts.torch.down_bias,
            num_tiles=tiles.schedule.max_tiles,
        )
        return out

    def loop(i: int, dtype: torch.dtype) -> torch.Tensor:
        slots = routed[i % len(routed)].slots
        return run_expert_loop(experts.torch, hidden, slots, weights, dtype)

    def grouped(i: int) -> torch.Tensor:
        return run_grouped_mm(experts.torch, hidden, routed[i % len(routed)].slots, weights)

    checked = slice(CHECKED_TOKENS)
    expected = loop(0, torch.float32)[checked]
    first = kernels(0).clone()
    kernels(1)
    rooflines = [make_roofline(model, t.pairs_per_slot.tolist(), tile_m, device) for t in routed]
    result: dict[str, Any] = {
        "pairs": statistics.mean(r.num_pairs for r in rooflines),
        "tile_efficiency": statistics.mean(r.tile_efficiency for r in rooflines),
        "max_error": float((first[checked] - expected).abs().max()),
        "expected_rms": float(expected.square().mean().sqrt()),
        "repeats_bitwise": torch.equal(first, kernels(0)),
        "partition_us": timer(partition),
        "gemm_us": timer(kernels),
        "fp32_loop_us": timer(lambda i: loop(i, torch.float32)),
        "expert_loop_us": timer(lambda i: loop(i, dtype)),
        "grouped_mm_us": timer(grouped),
    }
    is_memory_bound = rooflines[0].is_memory_bound
    active = statistics.mean(np.count_nonzero(t.pairs_per_slot) for t in routed)
    ideal_us = (
        active * model.expert_bytes / device.bytes_per_us
        if is_memory_bound
        else statistics.mean(r.flops for r in rooflines) / device.bf16_flops_per_us
    )
    return result | {
        "bound": "copy bandwidth" if is_memory_bound else "cuBLAS rate",
        "percent_of_bound": 100 * ideal_us / result["gemm_us"],
    }
