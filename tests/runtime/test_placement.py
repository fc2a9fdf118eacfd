"""The recorded state and the candidate's bookkeeping."""

from __future__ import annotations

import numpy as np

from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.placement import (
    NONE,
    Candidate,
    LayerState,
    bind_replica,
    count_active_slots,
    is_on_worker,
    layer_state,
    list_shared,
    load_placement,
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


def load(candidate: Candidate, state: LayerState) -> bool:
    has_replicas: bool = load_placement(
        state.slot_expert,
        state.slot_tiles,
        candidate.replica_worker,
        candidate.replica_expert,
        candidate.replica_tiles,
        candidate.first_replica,
        candidate.next_replica,
        candidate.first_shared,
        candidate.next_shared,
    )
    return has_replicas


def bind(candidate: Candidate, replica: int, expert: int) -> None:
    bind_replica(
        replica,
        expert,
        candidate.replica_worker,
        candidate.replica_expert,
        candidate.first_replica,
        candidate.next_replica,
    )


def is_on(candidate: Candidate, expert: int, worker: int) -> bool:
    found: bool = is_on_worker(
        expert,
        worker,
        candidate.replica_worker,
        candidate.first_replica,
        candidate.next_replica,
    )
    return found


def shared_in_order(candidate: Candidate, worker: int) -> list[int]:
    shared = []
    expert = candidate.first_shared[worker]
    while expert != NONE:
        shared.append(int(expert))
        expert = candidate.next_shared[expert]
    return sorted(shared)


def test_replicas_of_an_expert_are_listed_by_worker_through_every_rebinding() -> None:
    candidate = Candidate.allocate(PLACEMENT)
    state = LayerState.initial(PLACEMENT)
    state.slot_expert[0, 1] = 2  # replica 5
    load(candidate, state)
    assert replicas_in_order(candidate, 2) == [5, 2]

    bind(candidate, 9, 2)
    assert replicas_in_order(candidate, 2) == [5, 2, 9]
    bind(candidate, 5, 3)  # evicts the head of one list, becomes the head of another
    assert replicas_in_order(candidate, 2) == [2, 9]
    assert replicas_in_order(candidate, 3) == [5, 3]
    bind(candidate, 9, NONE)
    assert replicas_in_order(candidate, 2) == [2]
    assert is_on(candidate, 3, 0)
    assert not is_on(candidate, 3, 1)

    load(candidate, state)
    assert replicas_in_order(candidate, 2) == [5, 2], "loading forgets the tentative bindings"
    assert replicas_in_order(candidate, 3) == [3]


def test_active_slots_are_those_with_tiles() -> None:
    candidate = Candidate.allocate(PLACEMENT)
    candidate.replica_tiles[:] = (5, 0, 3, 3, 0, 2, 1, 0, 0, 0)
    count_active_slots(candidate.active_slots, candidate.replica_tiles, candidate.replica_worker)
    np.testing.assert_array_equal(candidate.active_slots, [2, 2, 1])


def test_workers_list_their_primaries_that_have_replicas() -> None:
    candidate = Candidate.allocate(PLACEMENT)
    state = LayerState.initial(PLACEMENT)
    assert not load(candidate, state)
    assert (candidate.first_shared == NONE).all()
    state.slot_expert[2] = (0, 1)
    state.slot_expert[0, 0] = 3
    state.slot_expert[1, 1] = 0
    assert load(candidate, state)
    assert shared_in_order(candidate, 0) == [0, 1]
    assert shared_in_order(candidate, 1) == []
    assert shared_in_order(candidate, 2) == [3]
    candidate.first_shared[:] = 99
    list_shared(
        candidate.replica_worker,
        candidate.first_replica,
        candidate.next_replica,
        candidate.first_shared,
        candidate.next_shared,
    )
    assert shared_in_order(candidate, 0) == [0, 1]
    assert shared_in_order(candidate, 2) == [3]
