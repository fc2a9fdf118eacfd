"""Generators and comparisons shared by the tests and the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from afore_kernels.gemm.tiles import Int32Array
from afore_kernels.plan import Plan, PrimaryPlacement, Target

# Largest error by the dtype of the weights, as a fraction of the expected root mean square.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class ExpertWeights(NamedTuple):
    """Weights of one layer's routed experts, as `moe_ffn` takes them."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor


def make_routing(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    skew: float = 0.0,
    invalid_fraction: float = 0.0,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a routing: distinct experts per token, popularity by Zipf's law.

    Args:
        num_tokens: tokens T.
        num_experts: experts E, at least `top_k`.
        top_k: experts per token.
        skew: Zipf exponent; 0 is uniform, 1 and more is heavily skewed.
        invalid_fraction: share of ids replaced by -1 or by ids from num_experts on.
        seed: of the draw.

    Returns:
        expert_ids int32 [T, top_k]; routing_weights float32 [T, top_k], positive, rows sum to 1.
    """
    rng = np.random.default_rng(seed)
    popularity = -skew * np.log(1.0 + rng.permutation(num_experts))
    # Gumbel top-k draws without replacement in proportion to exp(popularity).
    scores = popularity + rng.gumbel(size=(num_tokens, num_experts))
    expert_ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    invalid = rng.random(expert_ids.shape) < invalid_fraction
    bad_ids = rng.choice([-1, num_experts, num_experts + 7], expert_ids.shape)
    expert_ids[invalid] = bad_ids[invalid]
    weights = torch.from_numpy(rng.random(expert_ids.shape)) + 0.1
    weights = (weights / weights.sum(1, keepdim=True)).float()
    return torch.from_numpy(expert_ids), weights


def make_weights(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    is_integer: bool = False,
    seed: int = 0,
) -> ExpertWeights:
    """Draw expert weights that keep activations near unit scale, or small integers.

    With `is_integer` every value is in {-1, 0, 1}: sums over small integer inputs are then exact in
    any order, and the output is bit-equal under every plan.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        if is_integer:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return ExpertWeights(
        gate_up=draw(num_experts, 2 * intermediate_size, hidden_size, scale=hidden_size**-0.5),
        down=draw(num_experts, hidden_size, intermediate_size, scale=intermediate_size**-0.5),
        gate_up_bias=draw(num_experts, 2 * intermediate_size, scale=0.5),
        down_bias=draw(num_experts, hidden_size, scale=0.5),
    )


def random_plan(
    demand: Int32Array,
    placement: PrimaryPlacement,
    tile_m: int,
    seed: int,
    *,
    rank_tokens: Sequence[int] = (0,),
    sequence: int = 0,
) -> Plan:
    """Draw a valid plan for `demand` int32 [num_experts]: random replicas, counts and copies."""
    rng = np.random.default_rng(seed)
    shape = (placement.num_workers, placement.redundant_slots)
    slot_expert = np.full(shape, -1, np.int32)
    slot_pairs = np.zeros(shape, np.int32)
    remaining = demand.copy()
    for worker in rng.permutation(placement.num_workers):
        candidates = np.setdiff1d(
            np.arange(placement.num_experts), np.array(placement.primaries(worker))
        )
        num_bound = rng.integers(min(placement.redundant_slots, candidates.size) + 1)
        slots = rng.permutation(placement.redundant_slots)[:num_bound]
        # Busy experts first half of the time: uniform draws rarely hit them.
        order = rng.permutation(candidates)
        if rng.random() < 0.5:
            order = order[np.argsort(-demand[order], kind="stable")]
        for slot, expert in zip(slots, order):
            slot_expert[worker, slot] = expert
            slot_pairs[worker, slot] = rng.integers(remaining[expert] + 1)
            remaining[expert] -= slot_pairs[worker, slot]
    plan = Plan(
        Target(0, 0, 0),
        sequence,
        tile_m,
        demand,
        np.array(rank_tokens, np.int32),
        slot_expert,
        slot_pairs,
        ((slot_expert >= 0) & (rng.random(shape) < 0.5)).astype(np.uint8),
    )
    plan.validate(placement)
    return plan


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Check `actual` against an oracle within the tolerance of the weight dtype.

    Args:
        actual: computed with weights of `dtype`.
        expected: same shape, from the fp64 or fp32 reference.
        dtype: of the weights.

    Raises:
        AssertionError: if shapes differ, a value is not finite or an error exceeds the tolerance.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if expected.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs()
    bound = TOLERANCES[dtype] * expected.double().square().mean().sqrt()
    is_bad = ~(error <= bound)  # true for NaN
    assert not is_bad.any(), (
        f"{int(is_bad.sum())} of {is_bad.numel()} values are off by up to {error.max():.3g}, "
        f"allowed {bound:.3g}; first at {is_bad.nonzero()[0].tolist()}"
    )
