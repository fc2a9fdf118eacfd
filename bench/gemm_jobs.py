"""Compile jobs of both GEMMs, specialised as `run_gate_up` and `run_down` launch them for a model.

The launch arguments are built here from tensors without memory, so the model's real shapes and
strides decide what Triton knows of them: divisibility, descriptors, whether blocks divide N and K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from afore_kernels.gemm.down import _down_kernel
from afore_kernels.gemm.gate_up import _gate_up_kernel
from afore_kernels.gemm.launch import GemmConfig, LaunchConfig, heuristic_launch
from afore_kernels.gemm.main_loop import PartStrides
from afore_kernels.gemm.operand import WeightOperand
from afore_kernels.gemm.quant import MX_GROUP, SCALE_BLOCK, ExpertWeight, WeightFormat, split_parts
from bench.cross_compile import ArgumentType, CompileJob
from bench.occupancy import SM90, SM100, Architecture
from bench.shapes import Model

# What `operand.has_native_e4m3` and `operand.dot_precision` say on a device of the architecture.
NATIVE_E4M3 = (SM90, SM100)
FP32_PRECISION = {"cuda": "tf32x3", "hip": "ieee"}

# Sizes that change from launch to launch: nothing is known of them.
_NUM_SLOTS = 3
_NUM_PAIRS = 1001
_TRITON_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
}


class GemmJobs(NamedTuple):
    """The two kernels of one expert FFN."""

    gate_up: CompileJob
    down: CompileJob


def make_gemm_jobs(
    model: Model, architecture: Architecture, tile_m: int, launch: LaunchConfig | None = None
) -> GemmJobs:
    """Return the jobs of one row of a launch table.

    Args:
        model: shapes, dtype, activation, biases and weight format.
        architecture: to compile for.
        tile_m: block M.
        launch: block sizes; by default those that `moe_ffn` takes from the heuristics.
    """
    config = model.config
    dtype = getattr(torch, config.dtype)
    width, hidden_size = config.intermediate_size, config.hidden_size
    if launch is None:
        launch = heuristic_launch(
            architecture.name,  # type: ignore[arg-type]
            tile_m,
            dtype=dtype,
            weight_format=model.weight_format,
            has_bias=config.has_bias,
        )
    interleaved = config.activation.interleaved
    gate_up = ExpertWeight.gate_up(
        *_empty_weight(2, width, hidden_size, model.weight_format, dtype),
        format=model.weight_format,
        interleaved=interleaved,
    )
    down = ExpertWeight.down(
        *_empty_weight(1, hidden_size, width, model.weight_format, dtype),
        format=model.weight_format,
    )
    gate_up_bias = down_bias = None
    if config.has_bias:
        gate_up_bias = split_parts(_empty((_NUM_SLOTS, 2 * width), dtype), 2, interleaved)
        down_bias = split_parts(_empty((_NUM_SLOTS, hidden_size), dtype), 1, False)
    hidden, activated = _empty((1, hidden_size), dtype), _empty((1, width), dtype)
    rows = _empty((1,), torch.int32)
    tile_arguments = {"sorted_pair_ptr": rows, "tile_slot_ptr": rows, "num_tiles_ptr": rows}
    activation = {
        "TOP_K": config.top_k,
        "KIND": config.activation.kind,
        "ALPHA": config.activation.alpha,
        "LIMIT": config.activation.limit,
        "LINEAR_OFFSET": config.activation.linear_offset,
        "UNIT_COLUMNS": True,
    }
    return GemmJobs(
        gate_up=_make_job(
            _gate_up_kernel,
            {
                "activated_ptr": activated,
                "hidden_ptr": hidden,
                **tile_arguments,
                "stride_activated_m": width,
                "stride_hidden_m": hidden_size,
                "stride_hidden_k": 1,
                **_operand_arguments(
                    gate_up, gate_up_bias, hidden, tile_m, launch.gate_up, architecture
                ),
            },
            activation,
            launch.gate_up,
            architecture,
        ),
        down=_make_job(
            _down_kernel,
            {
                "weighted_ptr": _empty((1, hidden_size), torch.float32),
                "activated_ptr": activated,
                "routing_weights_ptr": _empty((1,), torch.float32),
                **tile_arguments,
                "stride_weighted_m": hidden_size,
                "stride_activated_m": width,
                **_operand_arguments(down, down_bias, activated, tile_m, launch.down, architecture),
            },
            {},
            launch.down,
            architecture,
        ),
    )


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _empty_weight(
    num_parts: int, num_outputs: int, num_inputs: int, format: WeightFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and scale as `ExpertWeight` takes them."""
    num_rows = num_parts * num_outputs
    rows = _NUM_SLOTS, num_rows
    match format:
        case "plain":
            return _empty((*rows, num_inputs), dtype), None
        case "mxfp4":
            scale = _empty((*rows, num_inputs // MX_GROUP), torch.uint8)
            return _empty((*rows, num_inputs // 2), torch.uint8), scale
        case "fp8_channel":
            scale = _empty(rows, torch.float32)
        case "fp8_block":
            blocks = num_parts * -(-num_outputs // SCALE_BLOCK), -(-num_inputs // SCALE_BLOCK)
            scale = _empty((_NUM_SLOTS, *blocks), torch.float32)
    return _empty((*rows, num_inputs), torch.float8_e4m3fn), scale


def _operand_arguments(
    weight: ExpertWeight,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    tile_m: int,
    config: GemmConfig,
    architecture: Architecture,
) -> dict[str, Any]:
    """Return the launch arguments of a projection, by name.

    `WeightOperand.build` asks the device what it can do, and a tensor without memory has none.
    """
    operand = WeightOperand.build(weight, bias, a, tile_m, config)
    w, scale, bias = operand.tensors
    mode = operand.mode
    if a.dtype == torch.float32:
        mode = mode._replace(PRECISION=FP32_PRECISION[architecture.backend])
    if weight.data.dtype == torch.float8_e4m3fn and architecture not in NATIVE_E4M3:
        mode = mode._replace(DECODE_FP8=True)
        w = w.view(torch.uint8)
    return {
        "w": w,
        "scale_ptr": scale,
        "bias_ptr": bias,
        **dict(zip(("w_strides", "scale_strides", "bias_strides"), operand.strides)),
        "num_pairs": _NUM_PAIRS,
        "N": weight.num_outputs,
        "K": weight.num_inputs,
        "MODE": mode,
    }


def _make_job(
    kernel: JITFunction[Any],
    values: dict[str, Any],
    constexprs: dict[str, Any],
    config: GemmConfig,
    architecture: Architecture,
) -> CompileJob:
    constexprs = constexprs | {
        name: value for name, value in values.items() if value is None or name == "MODE"
    }
    arguments = {name: _type_of(value) for name, value in values.items() if name not in constexprs}
    return CompileJob(
        kernel, arguments, constexprs, architecture, config.num_warps, config.num_stages
    )


def _type_of(value: Any) -> ArgumentType:
    """Return what the launcher makes of an argument, in the notation of `compile_kernel`."""
    if isinstance(value, PartStrides):
        return PartStrides(*map(_type_of, value))
    if isinstance(value, torch.Tensor):
        return f"*{_TRITON_TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        block = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_TRITON_TYPES[value.base.dtype]}[{block}]>"
    if value == 1:
        return "1"
    return "i32:16" if value % 16 == 0 else "i32"
