"""Routings and plans that the partition tests share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from afore_kernels.partition.demand import count_demand
from afore_kernels.plan import Plan, PrimaryPlacement
from afore_kernels.testing import random_plan


class Case(NamedTuple):
    """A routing, and a random plan for exactly its demand."""

    expert_ids: npt.NDArray[np.int32]
    plan: Plan
    placement: PrimaryPlacement


@st.composite
def draw_case(draw: st.DrawFn, max_tokens: int = 24) -> Case:
    """Any routing: invalid ids, duplicates in a token, no tokens, one-hot, uneven placements."""
    num_experts = draw(st.sampled_from([1, 2, 5, 7, 12]))
    placement = PrimaryPlacement(
        num_experts, draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(0, 3))
    )
    shape = (draw(st.integers(0, max_tokens)), draw(st.sampled_from([1, 2, 4])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low, high = draw(
        st.sampled_from(
            [(0, num_experts), (-2, num_experts + 2), (num_experts - 1, num_experts), (-1, 0)]
        )
    )
    expert_ids = rng.integers(low, high, shape).astype(np.int32)
    demand = count_demand(expert_ids, num_experts)
    tile_m = draw(st.sampled_from([1, 4, 16]))
    return Case(
        expert_ids,
        random_plan(demand, placement, tile_m, draw(st.integers(0, 2**32 - 1))),
        placement,
    )
