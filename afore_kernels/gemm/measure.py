"""Measurement of the expert FFN on a GPU, for `tuner.tune`."""

from __future__ import annotations

import statistics

import numpy as np
import torch
import triton

from afore_kernels.config import Activation
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import LaunchConfig
from afore_kernels.gemm.quant import (
    ExpertWeight,
    WeightFormat,
    quantize_fp8_block,
    quantize_fp8_channel,
    quantize_mxfp4,
)
from afore_kernels.gemm.tile_table import LayerShape
from afore_kernels.gemm.tiles import PairTiles
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn
from afore_kernels.gemm.tuner import Load

_QUANTIZERS = {
    "fp8_block": quantize_fp8_block,
    "fp8_channel": quantize_fp8_channel,
    "mxfp4": quantize_mxfp4,
}


def draw_weight(
    num_slots: int,
    num_parts: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    weight_format: WeightFormat,
    device: torch.device | str,
) -> ExpertWeight:
    """Draw a random projection in `weight_format`; see `ExpertWeight` for the shapes.

    A slot at a time, so that the unquantised values of all slots never exist together.
    """
    build = ExpertWeight.gate_up if num_parts == 2 else ExpertWeight.down
    generator = torch.Generator(device=device).manual_seed(0)
    data, scales = [], []
    for _ in range(num_slots):
        values = torch.randn(
            num_parts, num_outputs, num_inputs, generator=generator, device=device
        ) * (num_inputs**-0.5)
        if weight_format == "plain":
            data.append(values.to(dtype).flatten(0, 1))
            continue
        stored, slot_scale = _QUANTIZERS[weight_format](values)
        data.append(stored.flatten(0, 1))
        scales.append(slot_scale.flatten(0, 1))
    scale = torch.stack(scales) if scales else None
    return build(torch.stack(data), scale, format=weight_format)


class GpuMeasure:
    """Times `run_expert_ffn` on the current CUDA device: the `tuner.Measure` of `afore tune`.

    Args:
        shape: of the layer.
        activation: between the GEMMs.
        max_slots: most active slots of a load.
        repeats: launches per measurement; the median counts.
    """

    def __init__(
        self, shape: LayerShape, activation: Activation, max_slots: int, repeats: int = 20
    ) -> None:
        self._shape = shape
        self._activation = activation
        self._repeats = repeats
        self._device = torch.device("cuda")
        dtype = getattr(torch, shape.dtype)
        hidden, width = shape.hidden_size, shape.intermediate_size
        common = (dtype, shape.weight_format, self._device)
        self._gate_up = draw_weight(max_slots, 2, width, hidden, *common)
        self._down = draw_weight(max_slots, 1, hidden, width, *common)
        self._biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if shape.has_bias:
            self._biases = (
                torch.zeros(max_slots, 2 * width, dtype=dtype, device=self._device),
                torch.zeros(max_slots, hidden, dtype=dtype, device=self._device),
            )
        # Larger than any L2, written between launches so that every one reads its weights anew.
        self._flush = torch.empty(512 << 20, dtype=torch.uint8, device=self._device)

    def __call__(self, load: Load, tile_m: int, launch: LaunchConfig) -> float | None:
        """Return the median time in microseconds, or None if the launch needs too much."""
        hidden, width = self._shape.hidden_size, self._shape.intermediate_size
        ids = np.repeat(np.arange(load.num_slots, dtype=np.int32), load.pairs_per_slot)[:, None]
        num_slots = self._gate_up.num_slots
        tiles = DeviceTiles.from_host(
            PairTiles.from_expert_ids(ids, num_slots, tile_m), self._device
        )
        x = torch.randn(
            len(ids), hidden, dtype=getattr(torch, self._shape.dtype), device=self._device
        )
        out = torch.empty(len(ids), hidden, device=self._device)
        weights = torch.ones(len(ids), 1, device=self._device)
        rows = tiles.schedule.max_rows
        workspace = Workspace.allocate(rows, hidden, width, x.dtype, self._device)
        times: list[float] = []
        try:
            for _ in range(self._repeats + 3):
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._flush.zero_()  # long enough for the host to launch all that follows
                start.record()
                run_expert_ffn(
                    out,
                    x,
                    weights,
                    self._gate_up,
                    self._down,
                    tiles,
                    workspace,
                    activation=self._activation,
                    config=launch,
                    gate_up_bias=self._biases[0],
                    down_bias=self._biases[1],
                    num_tiles=tiles.schedule.max_tiles,
                )
                end.record()
                end.synchronize()
                times.append(1e3 * start.elapsed_time(end))
        except triton.runtime.errors.OutOfResources:
            return None
        return statistics.median(times[3:])
