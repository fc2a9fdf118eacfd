"""Targets with recorded routing: planned offline, or driven through a live tier and checked.

Every configuration sees the same targets, routing and inputs, so results can be compared target by
target. The recorded routing comes from `traces`; hidden states and routing weights are drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import ShapeError
from afore_kernels.partition.demand import count_demand
from afore_kernels.plan import Int32Array, Plan, Target
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.memory import primary_placement
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, plan_microbatch


class Client(Protocol):
    """What driving a tier needs of an `AttentionClient`."""

    def send_demand(self, target: Target, expert_ids: torch.Tensor) -> None:
        """Post the target's demand."""

    def submit(
        self,
        target: Target,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        routing_weights: torch.Tensor,
    ) -> None:
        """Send the target's inputs."""

    def wait(self, target: Target) -> torch.Tensor:
        """Return the rank's rows of the output."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The targets of a run in execution order: for each step, layer and microbatch.

    Attributes:
        moe: shapes of the served layers.
        ids: recorded experts, uint8 [num_steps, num_rows, num_layers, top_k].
        parts: rows of [microbatch][rank], see `traces.split_tokens`.
        seed: of hidden states and routing weights.

    Raises:
        ShapeError: if `ids` does not fit `moe`.
    """

    moe: MoEConfig
    ids: npt.NDArray[np.uint8]
    parts: list[list[slice]]
    seed: int = 0

    def __post_init__(self) -> None:
        expected = (self.moe.num_layers, self.moe.top_k)
        if self.ids.ndim != 4 or self.ids.shape[2:] != expected:
            raise ShapeError(f"ids must be [steps, rows, {expected}], got {self.ids.shape}")

    @property
    def num_targets(self) -> int:
        """Number of targets."""
        return len(self.ids) * self.moe.num_layers * len(self.parts)

    @property
    def num_ranks(self) -> int:
        """Attention ranks."""
        return len(self.parts[0])

    @property
    def max_tokens_per_rank(self) -> int:
        """Most tokens of one rank in one microbatch."""
        return max(int(rows.stop - rows.start) for ranks in self.parts for rows in ranks)

    def targets(self) -> Iterator[Target]:
        """Iterate over the targets in execution order."""
        for step in range(len(self.ids)):
            for layer in range(self.moe.num_layers):
                for microbatch in range(len(self.parts)):
                    yield Target(step, layer, microbatch)

    def expert_ids(self, target: Target) -> list[torch.Tensor]:
        """Return each rank's expert ids, int32 [num_tokens, top_k]."""
        routing = self.ids[target.step, :, target.layer]
        return [
            torch.from_numpy(routing[rows].astype(np.int32))
            for rows in self.parts[target.microbatch]
        ]

    def rank_tokens(self, target: Target) -> Int32Array:
        """Count the tokens of each rank, int32 [num_ranks]."""
        parts = self.parts[target.microbatch]
        return np.array([rows.stop - rows.start for rows in parts], np.int32)

    def demand(self, target: Target) -> Int32Array:
        """Count the pairs per expert d_t over all ranks, int32 [num_experts]."""
        ids = torch.cat(self.expert_ids(target)).numpy()
        return count_demand(ids, self.moe.num_experts)

    def inputs(self, target: Target) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Draw each rank's hidden states [num_tokens, H] and fp32 weights [num_tokens, top_k].

        The routing weights are a softmax of normal scores, as the recorded routing has none.
        """
        rng = np.random.default_rng((self.seed, *target))
        dtype = getattr(torch, self.moe.dtype)
        inputs = []
        for num_tokens in self.rank_tokens(target):
            hidden = rng.standard_normal((num_tokens, self.moe.hidden_size), np.float32)
            scores = rng.standard_normal((num_tokens, self.moe.top_k), np.float32)
            inputs.append((torch.from_numpy(hidden).to(dtype), torch.from_numpy(scores).softmax(1)))
        return inputs


def plan_workload(workload: Workload, tier: TierConfig) -> Iterator[Plan]:
    """Plan every target with the scheduler's planner, without processes.

    With previous-step demand (section 3) the placement is chosen for the demand of the same layer
    and microbatch in the preceding step, and then serves the target's own demand in the same
    proportions. The first step has none before it and is planned from its own.

    Args:
        workload: the targets.
        tier: workers, slots, policy, demand source and cost estimates.

    Yields:
        The plan of each target, in execution order.
    """
    moe = workload.moe
    placement = primary_placement(moe, tier)
    limits, cost = Limits.from_config(moe, tier), CostModel.from_config(tier)
    states = [LayerState.initial(placement) for _ in range(moe.num_layers)]
    previous_step_demand: dict[tuple[int, int], Int32Array] = {}
    for sequence, target in enumerate(workload.targets()):
        demand = workload.demand(target)
        position = target.layer, target.microbatch
        planning_demand = demand
        if tier.demand_source == "previous_step":
            planning_demand = previous_step_demand.get(position, demand)
        previous_step_demand[position] = demand
        state = states[target.layer]
        # U_t is what the preceding target uses; the slots of another layer are other memory.
        is_protected = (state.slot_tiles > 0) & (state.slot_last_use == sequence - 1)
        planned = plan_microbatch(
            demand,
            state,
            placement,
            limits,
            cost,
            sequence=sequence,
            is_protected=is_protected.astype(np.uint8),
            planning_demand=planning_demand,
        )
        states[target.layer] = planned.state
        yield Plan(
            target,
            sequence,
            moe.tile_m,
            demand,
            workload.rank_tokens(target),
            planned.slot_expert,
            planned.slot_pairs,
            planned.slot_copy,
        )


def drive_tier(
    clients: Sequence[Client], workload: Workload, targets_in_flight: int
) -> Iterator[tuple[Target, list[torch.Tensor]]]:
    """Send every target through a tier, with up to `targets_in_flight` of them unanswered.

    All ranks' demand goes ahead of their inputs, as a gate's does (section 6.1).

    Args:
        clients: one per attention rank, in rank order.
        workload: the targets.
        targets_in_flight: at most the tier's.

    Yields:
        Each target and its ranks' outputs [num_tokens, H], in execution order.
    """
    in_flight: deque[Target] = deque()

    def receive() -> tuple[Target, list[torch.Tensor]]:
        target = in_flight.popleft()
        return target, [client.wait(target) for client in clients]

    for target in workload.targets():
        if len(in_flight) == targets_in_flight:
            yield receive()
        expert_ids = workload.expert_ids(target)
        for client, ids in zip(clients, expert_ids):
            client.send_demand(target, ids)
        for client, ids, (hidden, weights) in zip(clients, expert_ids, workload.inputs(target)):
            client.submit(target, hidden, ids, weights)
        in_flight.append(target)
    while in_flight:
        yield receive()
