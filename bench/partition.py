"""Routing, plan expansion and the two partition paths, by pairs and experts.

With a GPU: times against a stable sort, equality with the host twin, bitwise repeat. Without one:
what every kernel compiles to on four architectures; times are then not run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from afore_kernels.gemm.count import CHUNK_PAIRS, _count_pairs_kernel
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.layout import _lay_out_tiles_kernel
from afore_kernels.gemm.select import (
    BY_EXPERT_OPTIONS,
    STEP_PAIRS,
    SelectPath,
    _select_by_chunk_kernel,
    _select_by_expert_kernel,
)
from afore_kernels.partition.demand import count_demand
from afore_kernels.partition.device_plan import DevicePlan
from afore_kernels.partition.expand import expand_plan_kernel
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.partition.pack import partition_pairs
from afore_kernels.partition.route import _route_tokens_kernel, launch_options
from afore_kernels.partition.router import Router
from afore_kernels.plan import PlanLayout, PrimaryPlacement
from afore_kernels.testing import make_routing, random_plan
from bench.cross_compile import CompileJob, compile_all
from bench.harness import hardware_line, write_json
from bench.occupancy import ARCHITECTURES, Architecture

TILE_M = 16
PATHS: tuple[SelectPath, ...] = ("slot_major", "chunked")
# (num_tokens, num_experts, top_k): decode and prefill of the named models.
CASES = (
    (64, 128, 8),
    (256, 128, 8),
    (1024, 128, 8),
    (256, 256, 8),
    (4096, 256, 8),
    (16384, 256, 8),
    (256, 32, 4),
)


ROUTERS = {
    "Qwen3-30B-A3B": (Router(num_experts=128, top_k=8, normalise=True), 2048, "*bf16"),
    "DeepSeek-V3": (
        Router(
            num_experts=256,
            top_k=8,
            score="sigmoid",
            normalise=True,
            num_groups=8,
            topk_groups=4,
            has_correction_bias=True,
        ),
        7168,
        "*fp32",
    ),
}


def make_job(
    kernel: Any, options: dict[str, Any], architecture: Architecture, **arguments: str
) -> CompileJob:
    """Build the compilation of a kernel whose unnamed pointers and numbers are int32."""
    constexprs = {name: options[name] for name in kernel.arg_names if name in options}
    types = {
        name: arguments.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
        if name not in constexprs
    }
    num_warps, num_stages = options.get("num_warps", 4), options.get("num_stages", 3)
    return CompileJob(kernel, types, constexprs, architecture, num_warps, num_stages)


def compile_jobs(architecture: Architecture) -> Iterator[tuple[str, CompileJob]]:
    """Yield the compilation of every kernel as its wrapper launches it, and what it is for."""
    for bins in (64, 512):
        counting = {"IS_SHARED": False, "CHUNK": CHUNK_PAIRS, "BLOCK_P": CHUNK_PAIRS}
        yield (
            f"{bins} bins",
            make_job(_count_pairs_kernel, counting | {"BLOCK_E": bins}, architecture),
        )
        chunked = {"CHUNK": CHUNK_PAIRS, "BLOCK_P": STEP_PAIRS, "BLOCK_C": 16, "BLOCK_E": bins}
        yield f"{bins} bins", make_job(_select_by_chunk_kernel, chunked, architecture)
    yield "any", make_job(_select_by_expert_kernel, BY_EXPERT_OPTIONS, architecture)
    yield "any", make_job(expand_plan_kernel, {"BLOCK": 256}, architecture)
    layout = {"TILE_M": TILE_M, "BLOCK_S": 64, "BLOCK_T": 256}
    yield "any", make_job(_lay_out_tiles_kernel, layout, architecture)
    for name, (router, hidden_size, gate_type) in ROUTERS.items():
        is_16_bit = gate_type != "*fp32"
        options = launch_options(router, hidden_size, is_16_bit)
        options |= {"UPCAST": not is_16_bit, "logits_bias_ptr": None}
        if not router.has_correction_bias:
            options["correction_bias_ptr"] = None
        yield (
            name,
            make_job(
                _route_tokens_kernel,
                options,
                architecture,
                hidden_ptr="*bf16",
                weight_ptr=gate_type,
                correction_bias_ptr="*fp32",
                routing_weights_ptr="*fp32",
                partial_ptr="*fp32",
                routed_scaling_factor="fp32",
                stride_hidden_h="1",
                stride_weight_h="1",
                hidden_size="i32:16",
            ),
        )


def report_compiled() -> list[dict[str, Any]]:
    """Compile every kernel for every architecture and print a row each."""
    jobs = [named for architecture in ARCHITECTURES for named in compile_jobs(architecture)]
    rows = []
    print(f"{'kernel':<26}{'for':<16}{'arch':<8}{'registers':>10}{'spills':>8}", end="")
    print(f"{'shared':>8}{'CTAs/SM':>9}")
    for (name, _), report in zip(jobs, compile_all([job for _, job in jobs])):
        row = {
            "kernel": report.name,
            "for": name,
            "architecture": report.architecture.name,
            "registers": report.registers,
            "spills": report.spill_bytes + report.spilled_registers,
            "shared_bytes": report.shared_bytes,
            "ctas_per_sm": report.ctas_per_sm,
        }
        rows.append(row)
        print(
            f"{row['kernel']:<26}{name:<16}{row['architecture']:<8}{row['registers']:>10}"
            f"{row['spills']:>8}{row['shared_bytes']:>8}{row['ctas_per_sm']:>9}"
        )
    return rows


def time_gpu(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of `call` in a CUDA graph, in microseconds."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def measure_case(
    num_tokens: int, num_experts: int, top_k: int, num_workers: int, repeats: int
) -> dict[str, Any]:
    """Time one routing on worker 0, and compare both paths with the host and with each other."""
    ids, _ = make_routing(num_tokens, num_experts, top_k, skew=0.8)
    placement = PrimaryPlacement(num_experts, num_workers, redundant_slots=2)
    layout = PlanLayout(placement, num_ranks=1)
    demand = count_demand(ids.numpy(), num_experts)
    plan = random_plan(demand, placement, TILE_M, seed=0, rank_tokens=(num_tokens,))
    record = torch.from_numpy(layout.pack(plan).view(np.int32)).cuda()
    device_ids = ids.cuda()
    device_plan = DevicePlan.allocate(layout, 0, TILE_M, ids.numel(), "cuda")
    device_plan.expand(record)
    intervals = pair_intervals(plan, placement, 0)
    expected = partition_pairs(ids.numpy(), intervals, intervals.tile_schedule(TILE_M)).tiles

    row: dict[str, Any] = {"pairs": ids.numel(), "experts": num_experts, "workers": num_workers}
    row["expand_us"] = time_gpu(lambda: device_plan.expand(record), repeats)
    for path in PATHS:
        tiles = DeviceTiles.allocate(device_plan.schedule, ids.numel())
        runs = []
        for _ in range(3):
            device_plan.partition(device_ids, tiles, path)
            runs.append(tiles.to_host())
        row[f"{path}_is_exact"] = all(
            np.array_equal(run.sorted_pair, expected.sorted_pair)
            and np.array_equal(run.pair_row, expected.pair_row)
            for run in runs
        )
        row[f"{path}_us"] = time_gpu(
            lambda tiles=tiles, path=path: device_plan.partition(device_ids, tiles, path), repeats
        )
    flat = device_ids.flatten()
    row["stable_sort_us"] = time_gpu(lambda: torch.sort(flat, stable=True), repeats)
    row["ratio_to_sort"] = row["slot_major_us"] / row["stable_sort_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    arguments = parser.parse_args()
    print(hardware_line())
    result: dict[str, Any] = {}
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        cases = CASES[::3] if arguments.quick else CASES
        repeats = 20 if arguments.quick else 100
        result["device"] = torch.cuda.get_device_name()
        result["rows"] = rows = []
        for case in cases:
            for num_workers in arguments.workers:
                row = measure_case(*case, num_workers, repeats)
                rows.append(row)
                print(
                    "  ".join(f"{k} {v:.1f}" if "us" in k else f"{k} {v}" for k, v in row.items())
                )
    else:
        result["compiled"] = report_compiled()
        print("GPU times: not run (torch sees no GPU)")
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
