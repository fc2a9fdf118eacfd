"""Operands: an expert weight, its scale and bias as the kernels' arguments, and the launch grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from afore_kernels.errors import ConfigError
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import GemmConfig
from afore_kernels.gemm.main_loop import GemmMode, PartStrides
from afore_kernels.gemm.quant import MX_GROUP, SCALE_BLOCK, ExpertWeight

# The interpreter has no multiprocessors; a few programs still make them stride over the products.
_INTERPRETED_SMS = 3


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return bool(triton.knobs.runtime.interpret)


def has_native_e4m3(device: torch.device) -> bool:
    """Whether Triton converts float8_e4m3fn on this device; else kernels decode the bits."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def dot_precision(dtype: torch.dtype, device: torch.device) -> str:
    """How `tl.dot` multiplies: fp32 by three TF32 products on NVIDIA tensor cores, else exactly."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return "tf32x3" if dtype == torch.float32 and is_nvidia else "ieee"


def can_use_descriptor(data: torch.Tensor) -> bool:
    """Whether a tensor descriptor can address `data`, [num_slots, num_parts, N, K]."""
    return (
        data.stride(3) == 1
        and data.data_ptr() % 16 == 0
        and all(stride * data.itemsize % 16 == 0 for stride in data.stride()[:3])
    )


def _check_blocks(weight: ExpertWeight, config: GemmConfig) -> None:
    if weight.format == "fp8_block" and max(config.block_n, config.block_k) > SCALE_BLOCK:
        raise ConfigError(f"fp8_block needs block_n and block_k <= {SCALE_BLOCK}, got {config}")
    if weight.format == "mxfp4" and config.block_k < MX_GROUP:
        raise ConfigError(f"mxfp4 needs block_k >= {MX_GROUP}, got {config}")


def _strides(tensor: torch.Tensor | None) -> PartStrides:
    strides = (0,) * 4 if tensor is None else tensor.stride()
    return PartStrides(*strides, *(0,) * (4 - len(strides)))


@dataclass(frozen=True, eq=False)
class WeightOperand:
    """Kernel arguments of one projection.

    Attributes:
        tensors: weight (pointer or descriptor over all slots), scale and bias, or None.
        strides: of the three.
        mode: what the kernel is compiled for.
    """

    tensors: tuple[Any, Any, Any]
    strides: tuple[PartStrides, PartStrides, PartStrides]
    mode: GemmMode

    @classmethod
    def build(
        cls,
        weight: ExpertWeight,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        tile_m: int,
        config: GemmConfig,
    ) -> Self:
        """Collect the arguments for multiplying rows of `a` [..., K] by `weight`.

        Args:
            weight: of every slot.
            bias: [num_slots, num_parts, N], any strides, or None.
            a: the other operand; its dtype is that of the product.
            tile_m: block M.
            config: block sizes.

        Raises:
            ConfigError: if the blocks do not fit the weight's format.
        """
        _check_blocks(weight, config)
        is_fp8 = weight.format in ("fp8_block", "fp8_channel")
        decode_fp8 = is_fp8 and not has_native_e4m3(a.device)
        data = weight.data.view(torch.uint8) if decode_fp8 else weight.data
        use_descriptor = config.use_descriptors and can_use_descriptor(data)
        w: Any = data
        if use_descriptor:
            stored_k = config.block_k // 2 if weight.format == "mxfp4" else config.block_k
            w = TensorDescriptor.from_tensor(data, [1, 1, config.block_n, stored_k])
        mode = GemmMode(
            FORMAT=weight.format,
            DECODE_FP8=decode_fp8,
            USE_DESCRIPTOR=use_descriptor,
            SWAP_AB=config.swap_ab,
            TILE_M=tile_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            EVEN_N=weight.num_outputs % config.block_n == 0,
            EVEN_K=weight.num_inputs % config.block_k == 0,
            UPCAST=is_interpreted() and a.dtype == torch.bfloat16,
            PRECISION=dot_precision(a.dtype, a.device),
        )
        return cls(
            (w, weight.scale, bias),
            (_strides(data), _strides(weight.scale), _strides(bias)),
            mode,
        )


def num_programs(
    tiles: DeviceTiles,
    num_outputs: int,
    config: GemmConfig,
    device: torch.device,
    num_tiles: int | None,
    idle_sms: int,
) -> int:
    """Return the grid: one program per product if the tile count is known, else a resident one.

    Args:
        tiles: of the launch.
        num_outputs: N.
        config: block sizes and resident programs per multiprocessor.
        device: of the launch.
        num_tiles: exact count, or None.
        idle_sms: multiprocessors that a resident grid leaves free.
    """
    blocks = -(-num_outputs // config.block_n)
    if num_tiles is not None:
        return num_tiles * blocks
    num_sms = _INTERPRETED_SMS
    if device.type == "cuda":
        num_sms = int(torch.cuda.get_device_properties(device).multi_processor_count)
    resident = max(1, num_sms - idle_sms) * config.programs_per_sm
    return min(resident, tiles.schedule.max_tiles * blocks)
