"""The grouped GEMMs by tile size, tokens, skew and workers, for named models.

With a GPU: times beside their baselines, the share of what the device sustains, error, bitwise
repeat. Without one: what every launch compiles to on four architectures, the roofline floor of five
devices, and the balance and predicted time of each tile size; times are then not run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from afore_kernels.gemm.launch import TILE_M_CHOICES
from afore_kernels.traces import RoutingTrace
from bench.cross_compile import compile_all
from bench.gemm_gpu import CudaTimer, measure_device, measure_worker
from bench.gemm_jobs import make_gemm_jobs
from bench.harness import hardware_line, write_json
from bench.occupancy import ARCHITECTURES
from bench.roofline import make_roofline
from bench.shapes import DEVICES, MODELS, Device, Model
from bench.tile_sweep import TilePoint, make_routings, sweep

# Bytes of one worker's weights that a GPU's memory certainly holds beside their dequantised twins.
MAX_WEIGHT_BYTES = 16 << 30
FLOOR_SLOTS = 16


def report_compiled(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Compile every row of the launch tables for `models` and print what became of it."""
    rows = [
        (model, architecture, tile_m, gemm)
        for model in models
        for architecture in ARCHITECTURES
        for tile_m in TILE_M_CHOICES
        for gemm in ("gate_up", "down")
    ]
    jobs = [getattr(make_gemm_jobs(m, a, tile_m), gemm) for m, a, tile_m, gemm in rows]
    results = []
    columns = "registers", "spills", "shared", "CTAs/SM", "tensor core", "instr/tc"
    print(f"{'model':<15}{'arch':<8}{'tile_m':>6} {'kernel':<8}", end="")
    print("".join(f"{name:>13}" for name in columns))
    for (model, architecture, tile_m, gemm), report in zip(rows, compile_all(jobs)):
        kinds = " ".join(f"{kind} {n}" for kind, n in report.tensor_core.items())
        row = {
            "model": model.name,
            "architecture": architecture.name,
            "tile_m": tile_m,
            "kernel": gemm,
            "registers": report.registers,
            "spills": report.spill_bytes + report.spilled_registers,
            "shared_bytes": report.shared_bytes,
            "ctas_per_sm": report.ctas_per_sm,
            "tensor_core": kinds,
            "instructions_per_tensor_core": round(report.instructions_per_tensor_core or 0.0, 1),
        }
        results.append(row)
        values = list(row.values())
        print(f"{model.name:<15}{architecture.name:<8}{tile_m:>6} {gemm:<8}", end="")
        print("".join(f"{value:>13}" for value in values[4:]))
    return results


def report_floors(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Print the roofline floor of a worker with 16 active slots, by pairs per slot."""
    results = []
    print(f"\nroofline floor in us, {FLOOR_SLOTS} active slots, datasheet rates")
    loads = 1, 16, 64, 256, 1024
    print(f"{'model':<15}{'device':<16}" + "".join(f"{n:>6}/slot" for n in loads))
    for model in models:
        for device in DEVICES.values():
            floors = [
                make_roofline(model, [pairs] * FLOOR_SLOTS, 16, device).floor_us for pairs in loads
            ]
            results.append(
                {"model": model.name, "device": device.name, "floor_us": dict(zip(loads, floors))}
            )
            print(f"{model.name:<15}{device.name:<16}" + "".join(f"{t:>11.0f}" for t in floors))
    return results


def report_sweep(points: Sequence[TilePoint]) -> None:
    """Print balance, padding and predicted time of every setting, a line per tile size."""
    print(f"\n{'routing':<9}{'tokens':>7}{'workers':>8}{'tile_m':>7}{'pairs/slot':>11}", end="")
    print(f"{'static':>8}{'afore':>8}{'efficiency':>11}{'predicted us, static':>21}{'afore':>8}")
    for static, afore in zip(points[::2], points[1::2]):
        print(
            f"{afore.routing:<9}{afore.num_tokens:>7}{afore.num_workers:>8}{afore.tile_m:>7}"
            f"{afore.pairs_per_slot:>11.1f}{static.tile_balance:>8.2f}{afore.tile_balance:>8.2f}"
            f"{afore.tile_efficiency:>11.2f}{static.predicted_us:>21.0f}{afore.predicted_us:>8.0f}"
        )


def plot_sweep(points: Sequence[TilePoint], model: Model, device: Device, path: Path) -> None:
    """Draw tile size against balance and against predicted time; a line per routing and policy."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("a plot needs matplotlib: pip install 'afore-kernels[bench]'") from None

    largest = max((p.num_tokens, p.num_workers) for p in points)
    shown = [p for p in points if (p.num_tokens, p.num_workers) == largest]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    lines = sorted({(p.routing, p.policy) for p in shown})
    colours = {routing: f"C{i}" for i, routing in enumerate(sorted({p.routing for p in shown}))}
    for routing, policy in lines:
        line = [p for p in shown if (p.routing, p.policy) == (routing, policy)]
        style = {
            "color": colours[routing],
            "linestyle": "-" if policy == "afore" else "--",
            "marker": "o",
            "label": f"{routing}, {policy}",
        }
        axes[0].plot([p.tile_m for p in line], [p.tile_balance for p in line], **style)
        axes[1].plot([p.tile_m for p in line], [p.predicted_us for p in line], **style)
    axes[0].set_ylabel("tile balance: largest / mean worker")
    axes[1].set_ylabel(f"predicted us, slowest worker, {device.name}")
    for axis in axes:
        axis.set_xlabel("tile_m")
        axis.set_xscale("log", base=2)
        ticks = sorted({p.tile_m for p in shown})
        axis.set_xticks(ticks, map(str, ticks))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{model.name}: {largest[0]} tokens, {largest[1]} workers")
    figure.savefig(path, dpi=110)


def measure_gpu(
    models: Sequence[Model],
    tile_sizes: Sequence[int],
    tokens: Sequence[int],
    workers: Sequence[int],
    trace: RoutingTrace | None,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Measure every setting that fits this GPU and print a line each."""
    timer = CudaTimer(repeats)
    device = measure_device(torch.cuda.get_device_name(), timer)
    print(
        f"{device.name}: copies {device.bytes_per_us / 1e6:.2f} TB/s, "
        f"bf16 products {device.bf16_flops_per_us / 1e6:.0f} TFLOP/s, both measured"
    )
    for model in models:
        for num_tokens in tokens:
            for routing, ids in make_routings(model, num_tokens, 4, trace).items():
                for num_workers in workers:
                    slots = -(-model.config.num_experts // num_workers)
                    if slots * model.expert_bytes > MAX_WEIGHT_BYTES:
                        print(f"{model.name}, {num_workers} workers: weights too large, left out")
                        continue
                    for tile_m in tile_sizes:
                        setting = {
                            "model": model.name,
                            "tokens": num_tokens,
                            "routing": routing,
                            "workers": num_workers,
                            "tile_m": tile_m,
                        }
                        figures = measure_worker(
                            model, ids, num_workers, tile_m, device, timer, torch.device("cuda")
                        )
                        print(" ".join(f"{k}={_show(v)}" for k, v in (setting | figures).items()))
                        yield setting | figures


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tile-m", nargs="+", type=int, default=list(TILE_M_CHOICES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--trace", type=Path, help="recorded routing, for the model it is of")
    parser.add_argument("--device", choices=DEVICES, default="H200", help="of the prediction")
    parser.add_argument("--plot", type=Path, help="PNG of tile size against balance and time")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="one token count, one model")
    arguments = parser.parse_args()
    models = [MODELS[name] for name in arguments.models]
    trace = RoutingTrace.load(arguments.trace) if arguments.trace else None
    repeats = 50
    if arguments.quick:
        models, arguments.tokens, repeats = models[:1], arguments.tokens[:1], 10
    sizes = arguments.tile_m, arguments.tokens, arguments.workers
    print(hardware_line())
    result: dict[str, Any] = {"command": shlex.join(["python", "-m", "bench.gemm", *sys.argv[1:]])}
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
        result["measured"] = list(measure_gpu(models, *sizes, trace, repeats))
    else:
        result["compiled"] = report_compiled(models)
        result["floors"] = report_floors(models)
        print("\nGPU times: not run (torch sees no GPU)")
    result["sweep"] = {}
    for model in models:
        device = DEVICES[arguments.device]
        print(f"\n{model.name}: tile balance, and time predicted for {device.name}")
        points = list(
            sweep(
                model,
                device,
                tile_sizes=arguments.tile_m,
                tokens=arguments.tokens,
                workers=arguments.workers,
                num_targets=4 if arguments.quick else 16,
                trace=trace,
            )
        )
        report_sweep(points)
        result["sweep"][model.name] = [asdict(point) for point in points]
        if arguments.plot:
            path = arguments.plot
            if len(models) > 1:
                path = path.with_stem(f"{path.stem}-{model.name}")
            plot_sweep(points, model, device, path)
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
