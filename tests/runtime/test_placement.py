"""The recorded state and the candidate's bookkeeping."""

from __future__ import annotations

import numpy as np

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.placement import (
    NONE,
    Candidate,
    LayerState,
    bind_replica,
    count_loads,
    find_replica,
    layer_state,
    load_candidate,
    move_tiles,
    redundant_range,
)

PLACEMENT = PrimaryPlacement(num_experts=4, num_workers=3, redundant_slots=2)  # primaries 0 0 1 2


def replicas_in_order(candidate: Candidate, expert: int) -> list[int]:
    replicas = []
    replica = candidate.first_replica[expert]
    while replica != NONE:
        replicas.append(int(replica))
        replica = candidate.next_replica[replica]
    return replicas


def test_initial_state_has_no_replica_and_no_assignment() -> None:
    state = LayerState.initial(PLACEMENT, num_layers=5)
    assert state.slot_expert.shape == (5, 3, 2)
    assert state.primary_tiles.shape == (5, 4)
    assert (state.slot_expert == -1).all()
    assert (state.slot_last_use == -1).all()
    assert not state.slot_tiles.any()
    assert not state.primary_tiles.any()


def test_one_layer_is_a_view_and_a_copy_is_not() -> None:
    states = LayerState.initial(PLACEMENT, num_layers=2)
    copy = states.copy()
    layer_state(states, 1).slot_tiles[2, 1] = 7
    assert states.slot_tiles[1, 2, 1] == 7
    assert not copy.slot_tiles.any()


def test_replicas_of_an_expert_are_listed_by_worker_through_every_rebinding() -> None:
    candidate = Candidate.allocate(PLACEMENT)
    state = LayerState.initial(PLACEMENT)
    state.slot_expert[0, 1] = 2  # replica 5
    load_candidate(candidate, state)
    assert redundant_range(candidate, 2) == (8, 10)
    assert replicas_in_order(candidate, 2) == [5, 2]

    bind_replica(candidate, 9, 2)
    assert replicas_in_order(candidate, 2) == [5, 2, 9]
    bind_replica(candidate, 5, 3)  # evicts the head of one list, becomes the head of another
    assert replicas_in_order(candidate, 2) == [2, 9]
    assert replicas_in_order(candidate, 3) == [5, 3]
    bind_replica(candidate, 9, NONE)
    assert replicas_in_order(candidate, 2) == [2]
    assert find_replica(candidate, 3, 0) == 5
    assert find_replica(candidate, 3, 1) == NONE

    load_candidate(candidate, state)
    assert replicas_in_order(candidate, 2) == [5, 2], "loading forgets the tentative bindings"
    assert replicas_in_order(candidate, 3) == [3]


def test_loads_active_slots_and_both_orders_follow_every_move() -> None:
    candidate = Candidate.allocate(PLACEMENT)
    state = LayerState.initial(PLACEMENT)
    state.slot_expert[1, 0] = 0  # replica 6
    state.primary_tiles[:] = (5, 1, 3, 3)
    load_candidate(candidate, state)
    count_loads(candidate)
    np.testing.assert_array_equal(candidate.tile_load, [6, 3, 3])
    np.testing.assert_array_equal(candidate.active_slots, [2, 1, 1])
    np.testing.assert_array_equal(candidate.heaviest_first, [0, 1, 2])
    np.testing.assert_array_equal(candidate.lightest_first, [1, 2, 0])

    move_tiles(candidate, 0, 6, 5)
    np.testing.assert_array_equal(candidate.tile_load, [1, 8, 3])
    np.testing.assert_array_equal(candidate.active_slots, [1, 2, 1])
    np.testing.assert_array_equal(candidate.heaviest_first, [1, 2, 0])
    np.testing.assert_array_equal(candidate.lightest_first, [0, 2, 1])
