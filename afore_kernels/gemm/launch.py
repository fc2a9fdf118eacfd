"""Launch configurations: the block sizes of both GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from afore_kernels.errors import ConfigError


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Block sizes of both GEMMs for one `tile_m`."""

    gate_up: GemmConfig
    down: GemmConfig
