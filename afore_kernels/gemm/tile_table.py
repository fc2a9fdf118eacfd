"""Tile tables: for one device and layer shape, which `tile_m` and which block sizes to run.

`afore tune` writes them as JSON; without one, `TileTable.heuristic` holds the rules of `launch`. A
load between two measured ones takes the bucket it lies in, never the nearest measurement.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch

from afore_kernels.errors import ConfigError
from afore_kernels.gemm.launch import (
    TILE_M_CHOICES,
    Architecture,
    GemmConfig,
    LaunchConfig,
    choose_tile_m,
    heuristic_launch,
)
from afore_kernels.gemm.quant import WeightFormat

Source = Literal["heuristic", "measured"]


class LayerShape(NamedTuple):
    """What a table is for, beside the device.

    Attributes:
        hidden_size: H.
        intermediate_size: I.
        dtype: of the hidden states, as in `MoEConfig.dtype`.
        weight_format: of the weights.
        has_bias: whether the experts have biases.
    """

    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"
    weight_format: WeightFormat = "plain"
    has_bias: bool = False


class Bucket(NamedTuple):
    """Loads up to `max_pairs_per_slot` (inclusive; None for the rest) run with `tile_m`."""

    max_pairs_per_slot: float | None
    tile_m: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """The launch table of one device and layer shape.

    Attributes:
        device: name of the device, or the architecture of a heuristic table.
        shape: of the layer.
        source: where the numbers come from.
        buckets: by ascending load; the last has no bound.
        launches: block sizes of each `tile_m` in use.
        tile_time_us: time of one tile on one worker, by `tile_m` (the paper's beta_tile).
        slot_time_us: time per active slot, by `tile_m`.
    """

    device: str
    shape: LayerShape
    source: Source
    buckets: tuple[Bucket, ...]
    launches: dict[int, LaunchConfig]
    tile_time_us: dict[int, float]
    slot_time_us: dict[int, float]

    def __post_init__(self) -> None:
        bounds = [bucket.max_pairs_per_slot for bucket in self.buckets]
        if not bounds or bounds[-1] is not None or None in bounds[:-1]:
            raise ConfigError("the last bucket of a tile table, and only it, has no bound")
        finite = [bound for bound in bounds if bound is not None]
        if finite != sorted(set(finite)):
            raise ConfigError(f"bounds of a tile table must ascend, got {finite}")
        for bucket in self.buckets:
            if bucket.tile_m not in TILE_M_CHOICES or bucket.tile_m not in self.launches:
                raise ConfigError(f"a tile table has no launch for tile_m {bucket.tile_m}")

    @classmethod
    def heuristic(cls, architecture: Architecture, shape: LayerShape) -> Self:
        """Build the table that stands in for a measured one; it has no times."""
        loads = range(1, 65)
        buckets = [
            Bucket(float(max(s for s in loads if choose_tile_m(s) == tile_m)), tile_m)
            for tile_m in TILE_M_CHOICES
            if any(choose_tile_m(s) == tile_m for s in loads)
        ]
        return cls(
            device=architecture,
            shape=shape,
            source="heuristic",
            buckets=(*buckets, Bucket(None, choose_tile_m(65))),
            launches={
                tile_m: heuristic_launch(
                    architecture,
                    tile_m,
                    dtype=getattr(torch, shape.dtype),
                    weight_format=shape.weight_format,
                    has_bias=shape.has_bias,
                )
                for tile_m in TILE_M_CHOICES
            },
            tile_time_us={},
            slot_time_us={},
        )

    def tile_m(self, pairs_per_slot: float) -> int:
        """Return the tile size for a load of pairs per non-empty (expert, worker)."""
        for bucket in self.buckets[:-1]:
            assert bucket.max_pairs_per_slot is not None
            if pairs_per_slot <= bucket.max_pairs_per_slot:
                return bucket.tile_m
        return self.buckets[-1].tile_m

    def launch(self, tile_m: int) -> LaunchConfig:
        """Return the block sizes for the plan's `tile_m`.

        Raises:
            ConfigError: if the table has none.
        """
        if tile_m not in self.launches:
            raise ConfigError(f"the tile table has tile_m {sorted(self.launches)}, not {tile_m}")
        return self.launches[tile_m]

    def to_json(self) -> str:
        """Serialise as a JSON object."""
        document = asdict(self) | {"shape": self.shape._asdict()}
        document["buckets"] = [bucket._asdict() for bucket in self.buckets]
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`.

        Raises:
            ConfigError: if the text is not a tile table.
        """
        try:
            document: dict[str, Any] = json.loads(text)
            document["shape"] = LayerShape(**document["shape"])
            document["buckets"] = tuple(Bucket(**bucket) for bucket in document["buckets"])
            document["launches"] = {
                int(tile_m): LaunchConfig(
                    gate_up=GemmConfig(**launch["gate_up"]), down=GemmConfig(**launch["down"])
                )
                for tile_m, launch in document["launches"].items()
            }
            for name in ("tile_time_us", "slot_time_us"):
                document[name] = {int(tile_m): t for tile_m, t in document[name].items()}
            return cls(**document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a tile table: {type(error).__name__}: {error}") from error

    def save(self, directory: Path) -> Path:
        """Write the table into `directory` under the name `find_table` looks for."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / table_name(self.device, self.shape)
        path.write_text(self.to_json() + "\n")
        return path


def table_name(device: str, shape: LayerShape) -> str:
    """Return the file name of a table.

    >>> table_name("NVIDIA H200", LayerShape(4096, 1408))
    'nvidia-h200_h4096_i1408_bfloat16_plain.json'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    bias = "_bias" if shape.has_bias else ""
    size = f"h{shape.hidden_size}_i{shape.intermediate_size}"
    return f"{slug}_{size}_{shape.dtype}_{shape.weight_format}{bias}.json"


def find_table(directory: Path, device: str, shape: LayerShape) -> TileTable | None:
    """Read the table measured for `device` and `shape`, or return None if there is none.

    Raises:
        ConfigError: if the file is not a tile table, or was written for something else.
    """
    path = directory / table_name(device, shape)
    if not path.exists():
        return None
    table = TileTable.from_json(path.read_text())
    if (table.device, table.shape) != (device, shape):
        raise ConfigError(f"{path} was written for {table.device}, {table.shape}")
    return table
