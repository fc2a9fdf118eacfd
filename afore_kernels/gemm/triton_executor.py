"""The expert FFN on a GPU: the Triton executor of `DeviceTiles`, twin of `torch_executor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.combine import run_combine
from afore_kernels.gemm.count import count_pairs_on_device
from afore_kernels.gemm.device_tiles import DeviceSchedule, DeviceTiles
from afore_kernels.gemm.down import run_down
from afore_kernels.gemm.gate_up import run_gate_up
from afore_kernels.gemm.launch import LaunchConfig
from afore_kernels.gemm.layout import lay_out_tiles
from afore_kernels.gemm.quant import ExpertWeight
from afore_kernels.gemm.select import select_pairs


@dataclass(frozen=True, eq=False)
class Workspace:
    """Row buffers between the kernels, at fixed addresses.

    Attributes:
        activated: [max_rows, I], dtype of the hidden states.
        weighted: float32 [max_rows, H].
    """

    activated: torch.Tensor
    weighted: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """Allocate for `max_rows`, usually `DeviceSchedule.max_rows`; the content is undefined."""
        return cls(
            torch.empty(max_rows, intermediate_size, dtype=dtype, device=device),
            torch.empty(max_rows, hidden_size, dtype=torch.float32, device=device),
        )


def tile_all_pairs(expert_ids: torch.Tensor, num_experts: int, tile_m: int) -> DeviceTiles:
    """Tile every valid pair on the device; expert e is slot e.

    The twin of `PairTiles.from_expert_ids`; does not wait for the device.

    Args:
        expert_ids: int32 or int64 [num_tokens, top_k]; ids outside [0, num_experts) get no row.
        num_experts: routed experts, and slots.
        tile_m: pairs per tile.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    schedule = DeviceSchedule.allocate(num_experts, num_pairs, tile_m, device)
    count_pairs_on_device(expert_ids, num_experts, out=schedule.pairs_per_slot)
    lay_out_tiles(schedule)
    tiles = DeviceTiles.allocate(schedule, num_pairs)
    slots = torch.arange(num_experts, dtype=torch.int32, device=device)
    select_pairs(tiles, expert_ids, slots, torch.zeros_like(slots))
    return tiles


def _check_fit(
    out: torch.Tensor,
    hidden: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    tiles: DeviceTiles,
    workspace: Workspace,
) -> None:
    num_tokens, hidden_size, width = len(routing_weights), gate_up.num_inputs, gate_up.num_outputs
    rows = tiles.schedule.max_rows
    for name, tensor, shape in (
        ("out", out, (num_tokens, hidden_size)),
        ("hidden", hidden, (num_tokens, hidden_size)),
        ("workspace.activated", workspace.activated[:rows], (rows, width)),
        ("workspace.weighted", workspace.weighted[:rows], (rows, hidden_size)),
    ):
        if tensor.shape != shape:
            raise ShapeError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if name != "hidden" and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ShapeError(f"{name} must have contiguous rows, got strides {tensor.stride()}")
    if not routing_weights.is_contiguous() or routing_weights.numel() != tiles.num_pairs:
        raise ShapeError(
            f"routing_weights must be contiguous with {tiles.num_pairs} pairs, got "
            f"{list(routing_weights.shape)} with strides {routing_weights.stride()}"
        )
    num_slots = tiles.schedule.num_slots
    for name, weight, expected in (
        ("gate_up", gate_up, (num_slots, 2, width, hidden_size)),
        ("down", down, (num_slots, 1, hidden_size, width)),
    ):
        found = weight.num_slots, weight.num_parts, weight.num_outputs, weight.num_inputs
        if found != expected:
            raise ShapeError(f"{name} is [slot, part, n, k] {list(found)}, not {list(expected)}")


def run_expert_ffn(
    out: torch.Tensor,
    hidden: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    tiles: DeviceTiles,
    workspace: Workspace,
    *,
    activation: Activation,
    config: LaunchConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    num_tiles: int | None = None,
    idle_sms: int = 0,
) -> None:
    """Run the pairs of `tiles` and combine them per token (section 6.2), without a host sync.

    With `num_tiles=None` the launch depends on capacities alone: captured in a CUDA graph it
    follows every later plan and routing.

    Args:
        out: [num_tokens, H], any floating point dtype, contiguous rows; every element is written,
            zeros for a token without a local pair.
        hidden: [num_tokens, H], float32, float16 or bfloat16, any strides.
        routing_weights: float32 [num_tokens, top_k], contiguous.
        gate_up: [num_slots, 2 * I, H].
        down: [num_slots, H, I].
        tiles: the local pairs of the flat routing.
        workspace: at least `tiles.schedule.max_rows` rows.
        activation: between the GEMMs, evaluated in fp32.
        config: block sizes of both GEMMs.
        gate_up_bias: [num_slots, 2 * I], layout as the rows of gate_up, or None.
        down_bias: [num_slots, H], or None.
        num_tiles: exact tile count for an eager launch, or None.
        idle_sms: multiprocessors that a graph's launch leaves to the copy stream.

    Raises:
        ShapeError: if an argument does not fit the others, or has strides that are not taken.
        ConfigError: if the block sizes do not fit the weight format.
    """
    _check_fit(out, hidden, routing_weights, gate_up, down, tiles, workspace)
    top_k = routing_weights.shape[1]
    run_gate_up(
        workspace.activated,
        hidden,
        gate_up,
        tiles,
        top_k=top_k,
        activation=activation,
        config=config.gate_up,
        bias=gate_up_bias,
        num_tiles=num_tiles,
        idle_sms=idle_sms,
    )
    run_down(
        workspace.weighted,
        workspace.activated,
        down,
        routing_weights,
        tiles,
        config=config.down,
        bias=down_bias,
        num_tiles=num_tiles,
        idle_sms=idle_sms,
    )
    run_combine(out, workspace.weighted, tiles.pair_row, top_k)
