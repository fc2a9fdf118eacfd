"""Launch configurations: block sizes of both GEMMs, and which `tile_m` suits a load.

Nothing is tuned while serving: a table is either measured by `afore tune` (`tile_table`) or one of
the heuristics here, whose every row compiles without spills for its architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from afore_kernels.errors import ConfigError
from afore_kernels.gemm.quant import WeightFormat

Architecture = Literal["sm80", "sm90", "sm100", "gfx942"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)

# Triton 3.9 warns at a launch that leaves this to its default, which 3.10 will change.
LAUNCH_OPTIONS = {"enable_fp_fusion": True}

# Block M of the kernels. Tensor cores take at least 16 rows, and past 128 registers run out.
TILE_M_CHOICES = (16, 32, 64, 128)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Block sizes of one GEMM; block M is the plan's `tile_m`.

    Attributes:
        block_n: outputs per program, a power of two from 16 on.
        block_k: inputs per step of the main loop, a power of two from 16 on.
        num_warps: warps per program.
        num_stages: steps whose loads are in flight.
        swap_ab: give the weight's N the tensor core's M.
        use_descriptors: load weights through a tensor descriptor where layout and device allow.
        programs_per_sm: programs of a resident grid per multiprocessor.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    swap_ab: bool = False
    use_descriptors: bool = False
    programs_per_sm: int = 1

    def __post_init__(self) -> None:
        for name in ("block_n", "block_k"):
            if not _is_power_of_two(getattr(self, name)) or getattr(self, name) < 16:
                raise ConfigError(f"{name} must be a power of two >= 16, got {self}")
        if not _is_power_of_two(self.num_warps) or self.num_stages < 1 or self.programs_per_sm < 1:
            raise ConfigError(f"launch options must be positive, num_warps a power of two: {self}")

    @property
    def options(self) -> dict[str, Any]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **LAUNCH_OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Block sizes of both GEMMs for one `tile_m`."""

    gate_up: GemmConfig
    down: GemmConfig


def choose_tile_m(pairs_per_slot: float) -> int:
    """Return the tile size for a load, before planning.

    Tiles of 1.5 times the mean keep most experts in one tile; past 64 pairs the GEMM is bound by
    compute and takes the largest.

    Args:
        pairs_per_slot: pairs per non-empty (expert, worker).

    >>> [choose_tile_m(s) for s in (1, 10, 11, 30, 64, 65)]
    [16, 16, 32, 64, 64, 128]
    """
    if pairs_per_slot > 64:
        return 128
    tile_m = TILE_M_CHOICES[0]
    while tile_m < min(1.5 * pairs_per_slot, 64):
        tile_m *= 2
    return tile_m


def architecture(device: torch.device) -> Architecture:
    """Return the family of instructions a device is programmed by.

    Consumer GPUs from 9.0 on (capability 12) lack both wgmma and tcgen05 and count as sm80. The
    CPU, where the interpreter runs, counts as sm90.
    """
    if device.type != "cuda":
        return "sm90"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    families: dict[int, Architecture] = {9: "sm90", 10: "sm100"}
    return families.get(major, "sm80")


def _swapped(block_n: int, block_k: int, num_stages: int) -> GemmConfig:
    return GemmConfig(
        block_n=block_n,
        block_k=block_k,
        num_stages=num_stages,
        swap_ab=True,
        use_descriptors=True,
        programs_per_sm=2,
    )


def _wide(block_n: int, block_k: int, num_warps: int, num_stages: int) -> GemmConfig:
    return GemmConfig(
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        use_descriptors=True,
    )


def _pointers(
    block_n: int, block_k: int, num_warps: int, num_stages: int, programs_per_sm: int = 1
) -> GemmConfig:
    return GemmConfig(
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        programs_per_sm=programs_per_sm,
    )


def _pair(gate_up: GemmConfig, down: GemmConfig) -> LaunchConfig:
    return LaunchConfig(gate_up=gate_up, down=down)


# For 16-bit operands. Small tiles read weights: long rows of K, several programs per SM. Swapping
# saves padding where the tensor core's M is 64 (sm90, sm100).
_HEURISTICS: dict[Architecture, dict[int, LaunchConfig]] = {
    "sm80": {
        16: _pair(_pointers(64, 128, 4, 3, 2), _pointers(64, 128, 4, 3, 2)),
        32: _pair(_pointers(64, 128, 4, 3, 2), _pointers(64, 128, 4, 3, 2)),
        64: _pair(_pointers(64, 64, 4, 3), _pointers(128, 64, 8, 3)),
        128: _pair(_pointers(64, 64, 8, 3), _pointers(128, 64, 8, 3)),
    },
    "sm90": {
        16: _pair(_swapped(64, 128, 3), _swapped(64, 128, 4)),
        32: _pair(_swapped(64, 64, 4), _swapped(64, 128, 4)),
        64: _pair(_wide(128, 64, 8, 3), _wide(128, 64, 4, 4)),
        128: _pair(_wide(64, 64, 8, 4), _wide(128, 64, 8, 4)),
    },
    "sm100": {
        16: _pair(_swapped(64, 128, 3), _swapped(64, 128, 4)),
        32: _pair(_swapped(64, 64, 4), _swapped(64, 128, 3)),
        64: _pair(_wide(128, 64, 8, 4), _wide(128, 64, 4, 4)),
        128: _pair(_wide(64, 64, 8, 4), _wide(128, 64, 8, 4)),
    },
    "gfx942": {
        16: _pair(_pointers(64, 64, 4, 2, 2), _pointers(64, 64, 4, 2, 2)),
        32: _pair(_pointers(64, 64, 2, 2, 2), _pointers(64, 64, 2, 2, 2)),
        64: _pair(_pointers(64, 64, 4, 2), _pointers(128, 64, 4, 2)),
        128: _pair(_pointers(64, 64, 8, 2), _pointers(128, 64, 8, 2)),
    },
}

# Decoding takes registers in the main loop, mxfp4 the most: with the rows above these would spill.
_HEURISTICS_QUANTISED: dict[tuple[Architecture, int], LaunchConfig] = {
    ("sm80", 64): _pair(_pointers(32, 64, 4, 3), _pointers(128, 64, 8, 3)),
    ("sm80", 128): _pair(_pointers(32, 64, 8, 3), _pointers(64, 64, 8, 3)),
}
_HEURISTICS_MXFP4: dict[tuple[Architecture, int], LaunchConfig] = {
    ("sm100", 64): _pair(_wide(64, 64, 8, 4), _wide(128, 64, 4, 4)),
    ("sm100", 128): _pair(_wide(32, 64, 8, 4), _wide(64, 64, 8, 4)),
}


def heuristic_launch(
    architecture: Architecture,
    tile_m: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_format: WeightFormat = "plain",
    has_bias: bool = False,
) -> LaunchConfig:
    """Return block sizes for a device without a measured table.

    Args:
        architecture: of the device.
        tile_m: the plan's; one of `TILE_M_CHOICES`.
        dtype: of the hidden states.
        weight_format: of the weights.
        has_bias: whether the experts have biases.

    Raises:
        ConfigError: if the kernels have no block M of `tile_m`.
    """
    if tile_m not in TILE_M_CHOICES:
        raise ConfigError(f"the Triton kernels take tile_m in {TILE_M_CHOICES}, got {tile_m}")
    launch = _HEURISTICS[architecture][tile_m]
    if weight_format != "plain":
        launch = _HEURISTICS_QUANTISED.get((architecture, tile_m), launch)
    if weight_format == "mxfp4":
        launch = _HEURISTICS_MXFP4.get((architecture, tile_m), launch)
    if dtype == torch.float32:
        # The same bytes per step; 32-bit operands otherwise take twice the shared memory.
        return _pair(
            replace(launch.gate_up, block_k=launch.gate_up.block_k // 2),
            replace(launch.down, block_k=launch.down.block_k // 2),
        )
    return launch
