"""Tile tables: look-up by bucket, JSON, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afore_kernels.errors import ConfigError
from afore_kernels.gemm.launch import (
    ARCHITECTURES,
    TILE_M_CHOICES,
    GemmConfig,
    choose_tile_m,
    heuristic_launch,
)
from afore_kernels.gemm.tile_table import Bucket, LayerShape, TileTable, find_table

SHAPE = LayerShape(4096, 1408)


def make_table(**changes: Any) -> TileTable:
    table = TileTable.heuristic("sm90", SHAPE)
    return replace(
        table,
        device="Some GPU",
        source="measured",
        tile_time_us={16: 3.5},
        slot_time_us={16: 7.0},
        **changes,
    )


def test_heuristic_table_agrees_with_the_rule() -> None:
    for architecture in ARCHITECTURES:
        table = TileTable.heuristic(architecture, SHAPE)
        for pairs_per_slot in range(1, 200):
            assert table.tile_m(pairs_per_slot) == choose_tile_m(pairs_per_slot)
        for tile_m in TILE_M_CHOICES:
            assert table.launch(tile_m) == heuristic_launch(architecture, tile_m)


def test_a_load_takes_its_bucket_not_the_nearest_measurement() -> None:
    """vLLM #52192: 17 is nearer to 16 than to 256, and belongs to the latter's bucket."""
    table = make_table(buckets=(Bucket(16.0, 16), Bucket(256.0, 64), Bucket(None, 128)))
    assert [table.tile_m(s) for s in (1, 16, 16.5, 17, 256, 257, 1e9)] == [
        16,
        16,
        64,
        64,
        64,
        128,
        128,
    ]


def test_json_round_trip() -> None:
    table = make_table()
    assert TileTable.from_json(table.to_json()) == table


def test_saved_table_is_found_for_its_device_and_shape_alone(tmp_path: Path) -> None:
    table = make_table()
    path = table.save(tmp_path)
    assert find_table(tmp_path, "Some GPU", SHAPE) == table
    assert find_table(tmp_path, "Other GPU", SHAPE) is None
    assert find_table(tmp_path, "Some GPU", SHAPE._replace(has_bias=True)) is None
    document = json.loads(path.read_text())
    document["shape"]["hidden_size"] = 2048
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="was written for"):
        find_table(tmp_path, "Some GPU", SHAPE)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"device": "x"}', "null", '{"shape": 1}'], ids=range(6)
)
def test_text_that_is_no_table(text: str) -> None:
    with pytest.raises(ConfigError, match="not a tile table"):
        TileTable.from_json(text)


def test_unknown_field_is_rejected() -> None:
    document = json.loads(make_table().to_json()) | {"extra": 1}
    with pytest.raises(ConfigError, match="extra"):
        TileTable.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ((), "the last bucket"),
        ((Bucket(16.0, 16),), "the last bucket"),
        ((Bucket(None, 16), Bucket(None, 32)), "the last bucket"),
        ((Bucket(32.0, 16), Bucket(16.0, 32), Bucket(None, 64)), "must ascend"),
        ((Bucket(16.0, 16), Bucket(16.0, 32), Bucket(None, 64)), "must ascend"),
        ((Bucket(None, 8),), "no launch for tile_m 8"),
    ],
)
def test_bad_buckets(buckets: tuple[Bucket, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_table(buckets=buckets)


def test_missing_launch_is_named() -> None:
    table = make_table(launches={16: heuristic_launch("sm90", 16)}, buckets=(Bucket(None, 16),))
    with pytest.raises(ConfigError, match=r"tile_m \[16\], not 32"):
        table.launch(32)


@pytest.mark.parametrize("tile_m", [1, 8, 24, 256])
def test_tile_m_the_kernels_lack(tile_m: int) -> None:
    with pytest.raises(ConfigError, match=f"got {tile_m}"):
        heuristic_launch("sm90", tile_m)


@pytest.mark.parametrize(
    "fields",
    [{"block_n": 8}, {"block_n": 48}, {"block_k": 0}, {"num_warps": 3}, {"num_stages": 0}],
)
def test_bad_gemm_config(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        GemmConfig(**({"block_n": 64, "block_k": 64} | fields))
