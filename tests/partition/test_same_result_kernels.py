"""Rules 1 and 9 through the kernels: a plan's record to the workers' sum, under every plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from afore_kernels.config import Activation
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import GemmConfig, LaunchConfig
from afore_kernels.gemm.quant import ExpertWeight
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.gemm.select import SelectPath
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn
from afore_kernels.partition.demand import count_demand
from afore_kernels.partition.device_plan import DevicePlan, PlanStatus
from afore_kernels.partition.expand import PlanDefect
from afore_kernels.plan import Plan, PlanLayout, PrimaryPlacement
from afore_kernels.testing import (
    ExpertWeights,
    assert_close,
    make_routing,
    make_weights,
    random_plan,
)

pytestmark = pytest.mark.interpreter

IDENTITY = Activation(kind="none")
NUM_EXPERTS, NUM_TOKENS, TOP_K, HIDDEN, INTERMEDIATE, TILE_M = 7, 20, 3, 24, 12, 16
BLOCKS = GemmConfig(block_n=32, block_k=32, num_stages=2)
LAUNCH = LaunchConfig(gate_up=BLOCKS, down=BLOCKS)
PATHS: tuple[SelectPath, ...] = ("slot_major", "chunked")


class Inputs(NamedTuple):
    """One target on a fixed routing, with invalid ids and duplicates in a token."""

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    routing_weights: torch.Tensor
    weights: ExpertWeights
    activation: Activation

    @property
    def is_valid(self) -> torch.Tensor:
        """Which pairs some worker runs, bool [num_pairs]."""
        return ((self.expert_ids >= 0) & (self.expert_ids < NUM_EXPERTS)).flatten()

    def reference(self) -> torch.Tensor:
        return reference_moe_ffn(
            *self[:3],
            *self.weights[:2],
            activation=self.activation,
            gate_up_bias=self.weights.gate_up_bias,
            down_bias=self.weights.down_bias,
        )


def make_inputs(
    dtype: torch.dtype = torch.float32,
    activation: Activation = IDENTITY,
    *,
    is_integer: bool = True,
) -> Inputs:
    expert_ids, routing_weights = make_routing(
        NUM_TOKENS, NUM_EXPERTS, TOP_K, skew=1.0, invalid_fraction=0.1, seed=11
    )
    expert_ids[3] = expert_ids[3, 0]
    generator = torch.Generator().manual_seed(12)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    if is_integer:
        hidden = torch.randint(-2, 3, hidden.shape, generator=generator)
        routing_weights = torch.randint(-2, 3, expert_ids.shape, generator=generator).float()
    weights = make_weights(NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype, is_integer=is_integer)
    return Inputs(hidden.to(dtype), expert_ids, routing_weights, weights, activation)


def make_plan(inputs: Inputs, num_workers: int, seed: int) -> tuple[Plan, PlanLayout]:
    placement = PrimaryPlacement(NUM_EXPERTS, num_workers, redundant_slots=2)
    demand = count_demand(inputs.expert_ids.numpy(), NUM_EXPERTS)
    plan = random_plan(demand, placement, TILE_M, seed)
    return plan, PlanLayout(placement, plan.rank_tokens.size)


class Share(NamedTuple):
    """What one worker contributes, and whether it runs each pair, bool [num_pairs]."""

    out: torch.Tensor
    is_local: torch.Tensor


def run_worker(
    device: str, plan: Plan, layout: PlanLayout, worker: int, inputs: Inputs, path: SelectPath
) -> Share:
    """Expand, partition and run on the device; what the worker must not read is NaN.

    vLLM #41412: that is every slot without pairs. Hidden rows of foreign tokens are never gathered.
    """
    device_plan = DevicePlan.allocate(layout, worker, TILE_M, inputs.expert_ids.numel(), device)
    device_plan.expand(torch.from_numpy(layout.pack(plan).view(np.int32)).to(device))
    tiles = DeviceTiles.allocate(device_plan.schedule, inputs.expert_ids.numel())
    device_plan.partition(inputs.expert_ids.to(device), tiles, path)
    num_invalid = int((~inputs.is_valid).sum())
    assert device_plan.read_status() == PlanStatus(num_invalid, -1, PlanDefect.NONE)

    is_local = tiles.pair_row.cpu() >= 0
    is_foreign = ~is_local.view(inputs.expert_ids.shape).any(1)
    slots = [w[device_plan.expert.cpu()].clone() for w in inputs.weights]
    for slot in slots:
        slot[(device_plan.hi <= device_plan.lo).cpu()] = torch.nan
    gate_up, down, gate_up_bias, down_bias = (slot.to(device) for slot in slots)
    rows = tiles.schedule.max_rows
    out = torch.full((NUM_TOKENS, HIDDEN), torch.nan, device=device)
    run_expert_ffn(
        out,
        inputs.hidden.masked_fill(is_foreign[:, None], torch.nan).to(device),
        inputs.routing_weights.to(device),
        ExpertWeight.gate_up(gate_up),
        ExpertWeight.down(down),
        tiles,
        Workspace(
            torch.full((rows, INTERMEDIATE), torch.nan, dtype=inputs.hidden.dtype, device=device),
            torch.full((rows, HIDDEN), torch.nan, device=device),
        ),
        activation=inputs.activation,
        config=LAUNCH,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    assert not out[is_foreign].any()
    return Share(out.cpu(), is_local)


def total_output(
    device: str, inputs: Inputs, num_workers: int, seed: int, path: SelectPath = "slot_major"
) -> torch.Tensor:
    """Sum the workers' outputs under a random plan; every valid pair was run exactly once."""
    plan, layout = make_plan(inputs, num_workers, seed)
    shares = [run_worker(device, plan, layout, w, inputs, path) for w in range(num_workers)]
    times = torch.stack([share.is_local for share in shares]).sum(0)
    assert torch.equal(times, inputs.is_valid.long())
    return torch.stack([share.out for share in shares]).sum(0)


@pytest.mark.parametrize("num_workers", range(1, 9))
def test_integers_are_bit_equal_under_every_plan(kernel_device: str, num_workers: int) -> None:
    """SGLang #32962: replicas must neither be summed twice nor leave a pair out."""
    inputs = make_inputs()
    for seed, path in enumerate(PATHS):
        total = total_output(kernel_device, inputs, num_workers, seed, path)
        assert torch.equal(total, inputs.reference().float())


@pytest.mark.parametrize("num_workers", range(2, 9))
def test_plans_of_these_tests_use_replicas(num_workers: int) -> None:
    inputs = make_inputs()
    plans = [make_plan(inputs, num_workers, seed)[0] for seed in range(len(PATHS))]
    assert sum(int(plan.slot_pairs.sum()) for plan in plans) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_integers_are_bit_equal_under_every_plan(
    kernel_device: str, dtype: torch.dtype
) -> None:
    # Products past the dtype's integers are rounded, but alike whatever the plan.
    inputs = make_inputs(dtype)
    first = total_output(kernel_device, inputs, 1, 0)
    for num_workers in (2, 5):
        assert torch.equal(total_output(kernel_device, inputs, num_workers, num_workers), first)


@pytest.mark.parametrize(
    ("num_workers", "dtype"), [(8, torch.float32), (4, torch.float16), (3, torch.bfloat16)]
)
def test_real_inputs_match_the_dense_reference(
    kernel_device: str, num_workers: int, dtype: torch.dtype
) -> None:
    inputs = make_inputs(dtype, Activation(), is_integer=False)
    total = total_output(kernel_device, inputs, num_workers, num_workers)
    assert_close(total, inputs.reference(), dtype)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_bias_counts_once_per_pair(kernel_device: str, num_workers: int) -> None:
    """torchtitan #4245, TGI #1036: a bias that every worker adds grows with the workers."""
    inputs = make_inputs()
    for weight in inputs.weights[:3]:
        weight.zero_()
    ids = inputs.expert_ids.where(inputs.is_valid.view(-1, TOP_K), 0).long()
    rows = inputs.weights.down_bias[ids] * inputs.is_valid.view(-1, TOP_K, 1)
    expected = (rows * inputs.routing_weights[..., None]).sum(1)
    assert expected.any()
    assert torch.equal(total_output(kernel_device, inputs, num_workers, seed=3), expected)


def test_replicas_summed_twice_are_seen(kernel_device: str) -> None:
    """The fault of a tier in which a worker's primaries run what its replicas run too."""
    inputs = make_inputs()
    plan, layout = make_plan(inputs, 4, seed=1)
    bare = plan.without_replicas()
    shares = [
        run_worker(kernel_device, bare if w == 0 else plan, layout, w, inputs, "slot_major")
        for w in range(4)
    ]
    total = torch.stack([share.out for share in shares]).sum(0)
    assert not torch.equal(total, inputs.reference().float())
