"""`afore calibrate`: measure the scheduler's cost estimates for one layer shape on this machine.

The scheduler compares FFN time with copy time (Eq. 6-8), so its estimates must come from the
machine it plans for. This measures the executor that CPU workers run; on a GPU `afore tune` fits
tile and slot time for the kernels, per tile size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from afore_kernels.config import Activation, Dtype
from afore_kernels.errors import ConfigError
from afore_kernels.gemm.tiles import PairTiles
from afore_kernels.gemm.torch_executor import run_expert_ffn
from afore_kernels.gemm.tuner import fit_ffn_time
from afore_kernels.testing import make_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Cost estimates of one layer shape on one machine, named as in `TierConfig`.

    Attributes:
        tile_time_us: beta_tile, time of one tile.
        slot_time_us: time per slot with at least one tile.
        copy_time_us: time of one expert copy, while nothing else runs.
        worst_error: largest relative error of the fitted FFN time over the samples.
    """

    tile_time_us: float
    slot_time_us: float
    copy_time_us: float
    worst_error: float


def calibrate(
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    tile_m: int,
    *,
    num_slots: int = 8,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Time the FFN by tiles and active slots, and the copy of an expert, and fit the cost model.

    Args:
        hidden_size: H.
        intermediate_size: I of one expert.
        dtype: of weights and hidden states.
        tile_m: pairs per tile.
        num_slots: active slots of the largest sample, at least 2.
        rounds: times every sample is run; medians count.
        clock: seconds.

    Raises:
        ConfigError: if a size is not positive or there are fewer than 2 slots.
    """
    for name, value, least in (
        ("hidden_size", hidden_size, 1),
        ("intermediate_size", intermediate_size, 1),
        ("tile_m", tile_m, 1),
        ("num_slots", num_slots, 2),
        ("rounds", rounds, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    weights = make_weights(num_slots, hidden_size, intermediate_size, dtype=dtype)
    sources = [weights.gate_up[1], weights.down[1]]
    copied = [torch.empty_like(source) for source in sources]
    samples = list(itertools.product((max(1, num_slots // 4), num_slots), (1, 2, 4)))
    calls: list[Callable[[], object]] = [
        _ffn_call(weights.gate_up, weights.down, slots, tiles, tile_m) for slots, tiles in samples
    ]

    def copy() -> None:
        for destination, source in zip(copied, sources):
            destination.copy_(source)

    times = _median_us([*calls, copy], rounds, clock)
    ffn_us, copy_us = times[:-1], times[-1]
    num_tiles = [slots * tiles for slots, tiles in samples]
    active = [slots for slots, _ in samples]
    tile_us, slot_us = fit_ffn_time(num_tiles, active, ffn_us)
    errors = [
        abs((tile_us * n + slot_us * s) / measured - 1)
        for n, s, measured in zip(num_tiles, active, ffn_us)
    ]
    return Calibration(
        tile_time_us=tile_us,
        slot_time_us=slot_us,
        copy_time_us=round(copy_us, 3),
        worst_error=round(max(errors), 4),
    )


def _ffn_call(
    gate_up: torch.Tensor, down: torch.Tensor, num_slots: int, tiles_per_slot: int, tile_m: int
) -> Callable[[], torch.Tensor]:
    """Prepare one FFN with that many full tiles in each of the first slots."""
    num_tokens = num_slots * tiles_per_slot * tile_m
    expert_ids = np.repeat(np.arange(num_slots, dtype=np.int32), num_tokens // num_slots)
    tiles = PairTiles.from_expert_ids(expert_ids[:, None], num_slots, tile_m)
    hidden = torch.randn(num_tokens, gate_up.shape[2], generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(gate_up.dtype)
    routing_weights = torch.ones(num_tokens, 1)
    return lambda: run_expert_ffn(
        hidden,
        routing_weights,
        gate_up[:num_slots],
        down[:num_slots],
        tiles,
        activation=Activation(),
    )


def _median_us(
    calls: list[Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> list[float]:
    """Run the calls in a new random order each round, after one untimed; medians in order."""
    times: list[list[float]] = [[] for _ in calls]
    order, shuffle = list(range(len(calls))), random.Random(0)
    for round_index in range(-1, rounds):
        shuffle.shuffle(order)
        for index in order:
            start = clock()
            calls[index]()
            if round_index >= 0:
                times[index].append((clock() - start) * 1e6)
    return [statistics.median(samples) for samples in times]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `afore calibrate`."""
    parser.add_argument("--hidden-size", type=int, required=True, help="H")
    parser.add_argument("--intermediate-size", type=int, required=True, help="I of one expert")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--tile-m", type=int, default=16, help="pairs per tile")
    parser.add_argument("--slots", type=int, default=8, help="active experts of a worker")
    parser.add_argument("--threads", type=int, default=1, help="as TierConfig.threads_per_worker")
    parser.add_argument("--json", type=Path, help="write the estimates to this file")


def run(args: argparse.Namespace) -> int:
    """Measure and print the estimates."""
    if args.threads < 1:
        raise ConfigError(f"threads must be at least 1, got {args.threads}")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        found = calibrate(
            args.hidden_size,
            args.intermediate_size,
            getattr(torch, args.dtype),
            args.tile_m,
            num_slots=args.slots,
        )
    finally:
        torch.set_num_threads(threads_before)
    print(
        f"TierConfig(tile_time_us={found.tile_time_us}, slot_time_us={found.slot_time_us}, "
        f"copy_time_us={found.copy_time_us})"
    )
    print(f"the fitted FFN time is within {found.worst_error:.0%} of every sample")
    if args.json:
        args.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    return 0
