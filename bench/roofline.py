"""The least time that the expert FFN of one worker can take on a device.

Below the ridge, where most decode batches are, reading the weights of the active slots decides;
above it the tensor cores do, at the bf16 rate also for fp8 and mxfp4 weights, which kernels decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afore_kernels.gemm.tiles import count_tiles
from bench.shapes import Device, Model

BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Work of one layer of one worker, against the limits of a device.

    Attributes:
        num_pairs: P_w, pairs of the worker.
        num_tiles: their tiles.
        tile_m: pairs per tile.
        flops: 6 P_w H I, padding not counted.
        num_bytes: weights of the active slots, and the activations each once.
        device: with its datasheet figures.
    """

    num_pairs: int
    num_tiles: int
    tile_m: int
    flops: float
    num_bytes: float
    device: Device

    @property
    def floor_us(self) -> float:
        """Time of the slower of memory and tensor cores, each at its datasheet rate."""
        memory_us = self.num_bytes / self.device.bytes_per_us
        return max(memory_us, self.flops / self.device.bf16_flops_per_us)

    @property
    def intensity(self) -> float:
        """FLOPs per byte; in bf16 about the tokens per active slot. 0 without pairs."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def is_memory_bound(self) -> bool:
        """Whether the intensity is below the device's ridge."""
        return self.intensity < ridge(self.device)

    @property
    def tile_efficiency(self) -> float:
        """Share of the tiles' rows that hold a pair: P_w / (tiles * tile_m); 1 without tiles."""
        return self.num_pairs / (self.num_tiles * self.tile_m) if self.num_tiles else 1.0


def ridge(device: Device) -> float:
    """Return the FLOPs per byte at which memory and the bf16 tensor cores take equally long."""
    return device.bf16_flops_per_us / device.bytes_per_us


def make_roofline(
    model: Model, pairs_per_slot: Sequence[int], tile_m: int, device: Device
) -> Roofline:
    """Return the limits of one layer.

    Args:
        model: shapes and weight format.
        pairs_per_slot: pairs of each slot of the worker; a slot without pairs is not read.
        tile_m: pairs per tile.
        device: that runs it.
    """
    config = model.config
    num_pairs = sum(pairs_per_slot)
    active_slots = sum(pairs > 0 for pairs in pairs_per_slot)
    # Per pair: a row in and out of each GEMM.
    activations = num_pairs * 2 * (config.hidden_size + config.intermediate_size) * BF16_BYTES
    return Roofline(
        num_pairs=num_pairs,
        num_tiles=sum(count_tiles(pairs, tile_m) for pairs in pairs_per_slot),
        tile_m=tile_m,
        flops=6.0 * num_pairs * config.hidden_size * config.intermediate_size,
        num_bytes=active_slots * model.expert_bytes + activations,
        device=device,
    )
