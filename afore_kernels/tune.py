"""`afore tune`: measure block sizes for one layer shape on this GPU and write the tile table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch

from afore_kernels.config import Activation, Dtype
from afore_kernels.errors import ConfigError
from afore_kernels.gemm.launch import architecture
from afore_kernels.gemm.quant import WEIGHT_FORMATS
from afore_kernels.gemm.tile_table import LayerShape, TileTable
from afore_kernels.gemm.tuner import tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `afore tune`."""
    parser.add_argument("--hidden-size", type=int, required=True, help="H")
    parser.add_argument("--intermediate-size", type=int, required=True, help="I of one expert")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--weight-format", choices=WEIGHT_FORMATS, default="plain")
    parser.add_argument("--bias", action="store_true", help="experts have biases")
    parser.add_argument("--gpt-oss", action="store_true", help="gpt-oss activation")
    parser.add_argument("--slots", type=int, default=16, help="active experts of a worker")
    parser.add_argument(
        "--output", type=Path, default=Path("tile_tables"), help="directory of the JSON table"
    )


def run(args: argparse.Namespace) -> int:
    """Tune, write the table and print the fitted costs."""
    if not torch.cuda.is_available():
        raise ConfigError("afore tune measures on a GPU, and torch sees none")
    # Only a GPU needs Triton.
    from afore_kernels.gemm.measure import GpuMeasure

    shape = LayerShape(
        args.hidden_size, args.intermediate_size, args.dtype, args.weight_format, args.bias
    )
    activation = Activation()
    if args.gpt_oss:
        activation = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
    start = TileTable.heuristic(architecture(torch.device("cuda")), shape)
    measure = GpuMeasure(shape, activation, args.slots)
    table = tune(measure, start, torch.cuda.get_device_name(), args.slots)
    print(f"wrote {table.save(args.output)}")
    print("tile_m  tile_time_us  slot_time_us")
    for tile_m, tile_time in table.tile_time_us.items():
        print(f"{tile_m:6d}  {tile_time:12.2f}  {table.slot_time_us[tile_m]:12.2f}")
    return 0
