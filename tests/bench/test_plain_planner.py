"""The plain transcription plans what the planner plans: the latencies compare like with like."""

from __future__ import annotations

import numpy as np
import pytest

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, plan_microbatch
from bench.plain_planner import PlainState, plain_plan


@pytest.mark.parametrize("threshold", [0, 1])
@pytest.mark.parametrize(("num_experts", "num_workers"), [(16, 1), (16, 4), (20, 8), (16, 16)])
def test_same_plans_over_a_sequence(num_experts: int, num_workers: int, threshold: int) -> None:
    placement = PrimaryPlacement(num_experts, num_workers, redundant_slots=2)
    limits = Limits(tile_m=4, copy_budget=num_workers, compactness_threshold=threshold)
    cost = CostModel(10.0, 3.0, 25.0, 40.0)
    state, plain = LayerState.initial(placement), PlainState.initial(placement)
    slot_pairs = np.empty_like(state.slot_expert)
    slot_copy = np.empty(slot_pairs.shape, np.uint8)
    rng = np.random.default_rng(num_workers)
    copies = 0
    for sequence in range(12):
        demand = rng.multinomial(400, rng.dirichlet(np.full(num_experts, 0.5))).astype(np.int32)
        is_protected = (state.slot_tiles > 0).astype(np.uint8)
        copies += plain_plan(
            slot_pairs, slot_copy, plain, demand, is_protected, limits, cost, sequence
        )
        planned = plan_microbatch(
            demand, state, placement, limits, cost, sequence=sequence, is_protected=is_protected
        )
        state = planned.state
        np.testing.assert_array_equal(slot_pairs, planned.slot_pairs)
        np.testing.assert_array_equal(slot_copy, planned.slot_copy)
        np.testing.assert_array_equal(plain.slot_expert, planned.slot_expert)
    assert copies > 0 or num_workers == 1
