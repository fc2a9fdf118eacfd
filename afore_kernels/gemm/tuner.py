"""Search of block sizes and fit of the cost model, over any way to measure.

The search is pure: it asks `Measure` for the time of a load under a configuration. `afore tune`
measures on a GPU (`tune`), tests on a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from afore_kernels.errors import ConfigError
from afore_kernels.gemm.launch import TILE_M_CHOICES, GemmConfig, LaunchConfig
from afore_kernels.gemm.quant import SCALE_BLOCK
from afore_kernels.gemm.tile_table import Bucket, TileTable
from afore_kernels.gemm.tiles import count_tiles

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Load(NamedTuple):
    """A worker's work: `num_slots` active slots with `pairs_per_slot` pairs each."""

    pairs_per_slot: int
    num_slots: int


# Time in microseconds of a load, or None if the configuration does not run on the device.
Measure = Callable[[Load, int, LaunchConfig], float | None]


def neighbours(config: GemmConfig, max_block: int) -> Iterator[GemmConfig]:
    """Yield `config` and those that differ from it by one step in one field."""
    yield config
    for block_n in (config.block_n // 2, config.block_n * 2):
        if 16 <= block_n <= max_block:
            yield replace(config, block_n=block_n)
    for block_k in (config.block_k // 2, config.block_k * 2):
        if 32 <= block_k <= max_block:
            yield replace(config, block_k=block_k)
    for num_warps in (config.num_warps // 2, config.num_warps * 2):
        if 2 <= num_warps <= 8:
            yield replace(config, num_warps=num_warps)
    for num_stages in (config.num_stages - 1, config.num_stages + 1):
        if num_stages >= 1:
            yield replace(config, num_stages=num_stages)
    yield replace(config, swap_ab=not config.swap_ab)
    yield replace(config, use_descriptors=not config.use_descriptors)
    for programs_per_sm in (1, 2, 3):
        if programs_per_sm != config.programs_per_sm:
            yield replace(config, programs_per_sm=programs_per_sm)


def _time_of(measure: Measure, loads: Sequence[Load], tile_m: int, launch: LaunchConfig) -> float:
    """Geometric mean over the loads; infinite if one does not run."""
    times = [measure(load, tile_m, launch) for load in loads]
    if any(time is None for time in times):
        return math.inf
    return math.exp(sum(math.log(time) for time in times if time is not None) / len(times))


def improve(
    measure: Measure, start: LaunchConfig, tile_m: int, loads: Sequence[Load], max_block: int
) -> LaunchConfig:
    """Descend from `start`, one field of one GEMM at a time, until no step is faster.

    Args:
        measure: of a load.
        start: where the search begins.
        tile_m: block M.
        loads: the configuration is best for their geometric mean.
        max_block: largest block_n and block_k.

    Raises:
        ConfigError: if nothing tried runs on the device.
    """
    best, best_time = start, _time_of(measure, loads, tile_m, start)
    is_improving = True
    while is_improving:
        is_improving = False
        for name in ("gate_up", "down"):
            for config in list(neighbours(getattr(best, name), max_block))[1:]:
                candidate = replace(best, **{name: config})
                time = _time_of(measure, loads, tile_m, candidate)
                if time < best_time:
                    best, best_time, is_improving = candidate, time, True
    if math.isinf(best_time):
        raise ConfigError(f"no configuration near {start} runs with tile_m {tile_m}")
    return best


def choose_buckets(
    measure: Measure, launches: dict[int, LaunchConfig], num_slots: int
) -> tuple[Bucket, ...]:
    """Return the fastest `tile_m` of each measured load; it never falls as the load grows."""
    chosen: list[Bucket] = []
    smallest = min(launches)
    for pairs_per_slot in LOADS:
        load = Load(pairs_per_slot, num_slots)
        times = {
            tile_m: _time_of(measure, [load], tile_m, launch)
            for tile_m, launch in launches.items()
            if tile_m >= smallest
        }
        smallest = min(times, key=times.__getitem__)
        if chosen and chosen[-1].tile_m == smallest:
            chosen.pop()
        chosen.append(Bucket(float(pairs_per_slot), smallest))
    return (*chosen[:-1], Bucket(None, chosen[-1].tile_m))


def fit_ffn_time(
    tiles: Sequence[int], active_slots: Sequence[int], times_us: Sequence[float]
) -> tuple[float, float]:
    """Fit `time = tile_time * tiles + slot_time * active_slots`, both at least 0.

    Args:
        tiles: tiles of each sample.
        active_slots: slots with a tile, of each sample.
        times_us: measured.

    Returns:
        tile_time_us, slot_time_us: least squares in relative error.

    >>> fit_ffn_time([4, 8, 8], [4, 4, 8], [44.0, 48.0, 88.0])
    (1.0, 10.0)
    """
    weights = 1.0 / np.asarray(times_us, np.float64)
    columns = np.stack([np.asarray(tiles), np.asarray(active_slots)], 1) * weights[:, None]
    ones = np.ones(len(weights))
    both = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if both.min() < 0:  # then the better of the two one-sided fits is the optimum
        alone = [float(column @ ones / (column @ column)) for column in columns.T]
        errors = [np.square(column * a - 1).sum() for column, a in zip(columns.T, alone)]
        both = np.zeros(2)
        both[int(np.argmin(errors))] = alone[int(np.argmin(errors))]
    return round(float(both[0]), 6), round(float(both[1]), 6)


def tune(measure: Measure, start: TileTable, device: str, num_slots: int) -> TileTable:
    """Search every `tile_m` from the rows of `start` and fit the cost model.

    Args:
        measure: of a load.
        start: usually `TileTable.heuristic`.
        device: name to file the table under.
        num_slots: active slots of a typical worker.

    Raises:
        ConfigError: if a `tile_m` has no configuration that runs.
    """
    max_block = SCALE_BLOCK if start.shape.weight_format == "fp8_block" else 256
    launches, tile_time_us, slot_time_us = {}, {}, {}
    for tile_m in TILE_M_CHOICES:
        loads = [Load(tile_m // 2, num_slots), Load(tile_m, num_slots)]
        launch = improve(measure, start.launch(tile_m), tile_m, loads, max_block)
        samples = [
            Load(pairs, slots)
            for slots in (max(1, num_slots // 2), num_slots)
            for pairs in (tile_m // 2, tile_m, 2 * tile_m, 4 * tile_m)
        ]
        times = [measure(load, tile_m, launch) for load in samples]
        done = [(load, time) for load, time in zip(samples, times) if time is not None]
        launches[tile_m] = launch
        tile_time_us[tile_m], slot_time_us[tile_m] = fit_ffn_time(
            [count_tiles(load.pairs_per_slot, tile_m) * load.num_slots for load, _ in done],
            [load.num_slots for load, _ in done],
            [time for _, time in done],
        )
    return TileTable(
        device=device,
        shape=start.shape,
        source="measured",
        buckets=choose_buckets(measure, launches, num_slots),
        launches=launches,
        tile_time_us=tile_time_us,
        slot_time_us=slot_time_us,
    )
