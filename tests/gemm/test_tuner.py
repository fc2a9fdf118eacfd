"""The tuner on a formula: it finds the planted optimum and the planted costs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from afore_kernels import cli
from afore_kernels.errors import ConfigError
from afore_kernels.gemm.launch import GemmConfig, LaunchConfig, heuristic_launch
from afore_kernels.gemm.tile_table import LayerShape, TileTable
from afore_kernels.gemm.tiles import count_tiles
from afore_kernels.gemm.tuner import (
    LOADS,
    Load,
    choose_buckets,
    fit_ffn_time,
    improve,
    neighbours,
    tune,
)

SLOT_TIME, TILE_TIME_PER_ROW = 9.0, 0.05
BEST = GemmConfig(block_n=32, block_k=256, num_warps=8, num_stages=4, programs_per_sm=3)


def distance(config: GemmConfig) -> float:
    """How many steps `config` is from the planted optimum."""
    steps = sum(
        abs(math.log2(getattr(config, name) / getattr(BEST, name)))
        for name in ("block_n", "block_k", "num_warps")
    )
    steps += abs(config.num_stages - BEST.num_stages)
    return steps + sum(
        getattr(config, name) != getattr(BEST, name)
        for name in ("swap_ab", "use_descriptors", "programs_per_sm")
    )


def measure(load: Load, tile_m: int, launch: LaunchConfig) -> float | None:
    """Weight reads, and tiles whose time grows with their rows; worse away from the optimum."""
    if launch.down.num_stages > 6:
        return None  # a device that runs out of shared memory
    tiles = count_tiles(load.pairs_per_slot, tile_m) * load.num_slots
    time = SLOT_TIME * load.num_slots + TILE_TIME_PER_ROW * tile_m * tiles
    return time * (1 + 0.1 * distance(launch.gate_up) + 0.1 * distance(launch.down))


def test_descent_reaches_the_optimum() -> None:
    start = heuristic_launch("sm90", 16)
    found = improve(measure, start, 16, [Load(8, 4)], 256)
    assert (found.gate_up, found.down) == (BEST, BEST)


def test_neighbours_differ_in_one_field_and_are_valid() -> None:
    start = GemmConfig(block_n=16, block_k=32, num_warps=8, num_stages=1)
    found = list(neighbours(start, 128))
    assert found[0] == start
    assert len(set(found)) == len(found)
    for config in found[1:]:
        changed = [f for f in GemmConfig.__slots__ if getattr(config, f) != getattr(start, f)]
        assert len(changed) == 1
    assert {config.block_n for config in found} == {16, 32}
    assert max(c.block_n for c in neighbours(replace(start, block_n=128), 128)) == 128


def test_a_device_where_nothing_runs() -> None:
    start = heuristic_launch("sm90", 16)
    with pytest.raises(ConfigError, match="runs with tile_m 16"):
        improve(lambda *_: None, start, 16, [Load(8, 4)], 256)


def test_buckets_follow_the_fastest_tile() -> None:
    launches = {tile_m: LaunchConfig(gate_up=BEST, down=BEST) for tile_m in (16, 32, 64, 128)}

    def prefer(load: Load, tile_m: int, launch: LaunchConfig) -> float:
        wanted = 16 if load.pairs_per_slot <= 8 else 64
        # At a load of 128 a smaller tile looks faster again, as noise would make it.
        wanted = 32 if load.pairs_per_slot == 128 else wanted
        return 1.0 + abs(tile_m - wanted)

    buckets = choose_buckets(prefer, launches, 4)
    assert [tuple(bucket) for bucket in buckets] == [(8.0, 16), (None, 64)]
    assert LOADS[-1] > 128


def test_fit_recovers_planted_costs_under_noise() -> None:
    rng = np.random.default_rng(0)
    slots = rng.integers(1, 32, 200)
    tiles = slots + rng.integers(0, 64, 200)
    times = (3.0 * tiles + 20.0 * slots) * rng.normal(1.0, 0.02, 200)
    tile_time, slot_time = fit_ffn_time(tiles.tolist(), slots.tolist(), times.tolist())
    assert tile_time == pytest.approx(3.0, rel=0.05)
    assert slot_time == pytest.approx(20.0, rel=0.05)


def test_fit_never_goes_negative() -> None:
    # Times that fall with the number of slots: the unconstrained fit has a negative slot time.
    tile_time, slot_time = fit_ffn_time([4, 8, 16], [4, 6, 7], [4.0, 8.5, 18.0])
    assert slot_time == 0.0
    assert tile_time == pytest.approx(1.06, abs=0.06)


def test_table_of_a_tuned_device() -> None:
    start = TileTable.heuristic("sm90", LayerShape(4096, 1408))
    table = tune(measure, start, "Some GPU", 16)
    assert (table.device, table.source) == ("Some GPU", "measured")
    assert set(table.launches) == {16, 32, 64, 128}
    for tile_m, launch in table.launches.items():
        assert launch == LaunchConfig(gate_up=BEST, down=BEST)
        assert table.slot_time_us[tile_m] == pytest.approx(SLOT_TIME)
        assert table.tile_time_us[tile_m] == pytest.approx(TILE_TIME_PER_ROW * tile_m)
    # This formula has no cost per tile beside its rows, so the smallest tile always wins.
    assert [bucket.tile_m for bucket in table.buckets] == [16]


def test_blocks_of_fp8_stay_within_a_scale() -> None:
    start = TileTable.heuristic("sm90", LayerShape(4096, 1408, weight_format="fp8_block"))
    for launch in tune(measure, start, "Some GPU", 4).launches.values():
        assert launch.gate_up.block_k == 128  # the planted optimum of 256 is out of bounds


def test_command_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["tune", "--hidden-size", "64", "--intermediate-size", "32"]) == 2
    assert "torch sees none" in capsys.readouterr().err
