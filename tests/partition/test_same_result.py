"""Rule 9: the sum of the workers' partial outputs is the same under every plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afore_kernels.config import Activation
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.gemm.torch_executor import run_expert_ffn
from afore_kernels.partition import intervals as intervals_module
from afore_kernels.partition.demand import count_demand
from afore_kernels.partition.intervals import pair_intervals
from afore_kernels.partition.pack import partition_pairs
from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.testing import (
    ExpertWeights,
    assert_close,
    make_routing,
    make_weights,
    random_plan,
)

IDENTITY = Activation(kind="none")
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 7, 24, 12


def partial_output(
    plan: Plan,
    placement: PrimaryPlacement,
    worker: int,
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    """What `worker` contributes. Slots it does not use hold NaN, as do rows of foreign tokens."""
    intervals = pair_intervals(plan, placement, worker)
    part = partition_pairs(expert_ids.numpy(), intervals, intervals.tile_schedule(plan.tile_m))
    slots = [w[torch.from_numpy(intervals.expert)].clone() for w in weights]
    for slot in slots:
        slot[torch.from_numpy(intervals.hi <= intervals.lo)] = torch.nan
    is_foreign = torch.from_numpy(part.tiles.pair_row < 0).view(expert_ids.shape).all(1)
    poisoned = hidden.masked_fill(is_foreign[:, None], torch.nan)
    return run_expert_ffn(
        poisoned,
        routing_weights,
        slots[0],
        slots[1],
        part.tiles,
        activation=activation,
        gate_up_bias=slots[2],
        down_bias=slots[3],
    )


def total_output(
    num_workers: int,
    seed: int,
    dtype: torch.dtype,
    is_integer: bool,
    activation: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The workers' sum and the dense reference, for a random plan on a fixed routing."""
    expert_ids, routing_weights = make_routing(
        30, NUM_EXPERTS, 3, skew=1.0, invalid_fraction=0.1, seed=11
    )
    expert_ids[3] = expert_ids[3, 0]  # duplicates in a token
    generator = torch.Generator().manual_seed(12)
    hidden = torch.randn(30, HIDDEN, generator=generator).to(dtype)
    if is_integer:
        hidden = torch.randint(-2, 3, hidden.shape, generator=generator).to(dtype)
        routing_weights = torch.randint(-2, 3, expert_ids.shape, generator=generator).float()
    weights = make_weights(NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype, is_integer=is_integer)
    placement = PrimaryPlacement(NUM_EXPERTS, num_workers, redundant_slots=2)
    demand = count_demand(expert_ids.numpy(), NUM_EXPERTS)
    plan = random_plan(demand, placement, 4, seed)
    arguments = (hidden, expert_ids, routing_weights, weights, activation)
    total = sum(
        (partial_output(plan, placement, w, *arguments) for w in range(num_workers)),
        torch.zeros(30, HIDDEN),
    )
    expected = reference_moe_ffn(
        hidden,
        expert_ids,
        routing_weights,
        weights.gate_up,
        weights.down,
        activation=activation,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
    )
    return total, expected


@given(num_workers=st.sampled_from([1, 2, 3, 4, 8]), seed=st.integers(0, 2**32 - 1))
def test_integers_are_bit_equal_under_every_plan(num_workers: int, seed: int) -> None:
    total, expected = total_output(num_workers, seed, torch.float32, True, IDENTITY)
    assert torch.equal(total, expected.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_integers_are_bit_equal_under_every_plan(dtype: torch.dtype) -> None:
    # Products past the dtype's integers are rounded, but alike whatever the plan.
    first, _ = total_output(1, 0, dtype, True, IDENTITY)
    for num_workers in (1, 2, 3, 4, 8):
        for seed in range(3):
            total, _ = total_output(num_workers, seed, dtype, True, IDENTITY)
            assert torch.equal(total, first)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_real_inputs_match_the_dense_reference(num_workers: int, dtype: torch.dtype) -> None:
    total, expected = total_output(num_workers, num_workers, dtype, False, Activation())
    assert_close(total, expected, dtype)


def test_replicas_summed_twice_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fault of a worker that lets its primaries run what replicas run too.
    monkeypatch.setattr(
        intervals_module, "_replica_pairs", lambda plan, num_workers: np.zeros_like(plan.demand)
    )
    total, expected = total_output(4, 1, torch.float32, True, IDENTITY)
    assert not torch.equal(total, expected.float())
