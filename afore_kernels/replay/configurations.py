"""One configuration of a tier over a workload, measured: what `afore replay` compares."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from afore_kernels.config import TierConfig
from afore_kernels.gemm.activation import gated_activation
from afore_kernels.plan import Target
from afore_kernels.replay.workload import Workload, drive_tier, plan_workload
from afore_kernels.report import RunSummary, summarise
from afore_kernels.runtime.launch import Tier
from afore_kernels.runtime.memory import primary_placement
from afore_kernels.runtime.timeline import per_target_dtype, worker_loads
from afore_kernels.runtime.weights import WeightSource
from afore_kernels.testing import assert_close

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "static": {"policy": "static"},
    "previous-step": {"demand_source": "previous_step"},
    "true-demand": {},
    "exposed-copies": {"overlap_copies": False},
}
DEFAULT_CONFIGURATIONS = ("static", "previous-step", "true-demand")

logger = logging.getLogger(__name__)

Advance = Callable[[], None]
Outputs = dict[Target, list[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What one configuration did. Means leave out step 0: it has no previous step.

    Attributes:
        configuration: its name.
        tier: the tier's configuration as a JSON object.
        summary: loads, copies and waits; the times say nothing if no tier ran.
        tile_floor: mean over targets of the least tile imbalance that whole tiles permit under any
            placement, ceil(tiles / workers) over the mean.
        targets_per_s: rate over the whole run; None if no tier ran.
        num_mismatched: targets, of all, whose output is not the reference's; None if not checked.
    """

    configuration: str
    tier: dict[str, Any]
    summary: RunSummary
    tile_floor: float
    targets_per_s: float | None = None
    num_mismatched: int | None = None


def replay_plans(
    configuration: str, workload: Workload, tier: TierConfig, advance: Advance
) -> ReplayResult:
    """Plan every target without processes; `advance` is called after each."""
    placement = primary_placement(workload.moe, tier)
    rows = np.zeros(workload.num_targets, per_target_dtype(tier.num_workers))
    for name in ("raw_copy_us", "lookahead_us", "exposed_us"):
        rows[name] = np.nan
    for row, plan in zip(rows, plan_workload(workload, tier)):
        row["step"], row["layer"], row["microbatch"] = plan.target
        row["pairs_per_worker"], row["tiles_per_worker"] = worker_loads(plan, placement)
        row["num_copies"] = plan.slot_copy.sum()
        advance()
    return _result(configuration, tier, rows)


def replay_tier(
    configuration: str,
    workload: Workload,
    tier: TierConfig,
    weights: WeightSource,
    advance: Advance,
    *,
    reference: Outputs | None = None,
    timeline: Path | None = None,
) -> ReplayResult:
    """Run every target through a tier of processes.

    Args:
        configuration: its name, for the result.
        workload: the targets.
        tier: the tier; its plan ring must hold every target.
        weights: of the served layers.
        advance: called after each target.
        reference: outputs to compare with, or None.
        timeline: file for a Perfetto timeline, or None.

    Raises:
        AforeError: if the tier reports a failure.
    """
    num_mismatched = 0
    with Tier.start(workload.moe, tier, weights) as running:
        clients = [running.client(rank) for rank in range(workload.num_ranks)]
        start = time.monotonic()
        for target, outputs in drive_tier(clients, workload, tier.targets_in_flight):
            if reference is not None:
                num_mismatched += not _is_close(target, outputs, reference[target])
            advance()
        elapsed_s = time.monotonic() - start
        recorded = running.timeline()
        if timeline is not None:
            recorded.write(timeline)
    return replace(
        _result(configuration, tier, recorded.per_target),
        targets_per_s=workload.num_targets / elapsed_s,
        num_mismatched=None if reference is None else num_mismatched,
    )


def dense_outputs(workload: Workload, weights: WeightSource, advance: Advance) -> Outputs:
    """Compute every target's output with every expert run on every token, in fp32.

    It knows no plan, no partition and no tiles.

    Args:
        workload: the targets, of experts without bias.
        weights: of the served layers.
        advance: called after each target.

    Returns:
        For each target, each rank's output fp32 [num_tokens, H].
    """
    outputs: Outputs = {}
    num_experts = workload.moe.num_experts
    for layer, targets in itertools.groupby(
        sorted(workload.targets(), key=lambda target: target.layer), lambda target: target.layer
    ):
        experts = [weights.expert(layer, expert) for expert in range(num_experts)]
        gate_up = torch.stack([expert.gate_up for expert in experts]).float()  # [E, 2I, H]
        down = torch.stack([expert.down for expert in experts]).float()  # [E, H, I]
        for target in targets:
            outputs[target] = []
            for ids, (hidden, routing_weights) in zip(
                workload.expert_ids(target), workload.inputs(target)
            ):
                up = torch.einsum("th,eih->tei", hidden.float(), gate_up)
                expert_output = torch.einsum(
                    "tei,ehi->teh", gated_activation(up, workload.moe.activation), down
                )
                share = torch.zeros(len(ids), num_experts)
                share.scatter_add_(1, ids.long(), routing_weights)
                outputs[target].append(torch.einsum("te,teh->th", share, expert_output))
            advance()
    return outputs


def _result(configuration: str, tier: TierConfig, rows: npt.NDArray[Any]) -> ReplayResult:
    """Average the rows of `timeline.per_target_dtype` from step 1 on."""
    rows = rows[rows["step"] > 0]
    num_tiles = rows["tiles_per_worker"].sum(axis=1)
    num_tiles = num_tiles[num_tiles > 0]
    least = -(-num_tiles // tier.num_workers)
    return ReplayResult(
        configuration=configuration,
        tier=asdict(tier),
        summary=summarise(rows),
        tile_floor=float((least * tier.num_workers / num_tiles).mean()),
    )


def _is_close(target: Target, outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    try:
        for output, reference in zip(outputs, expected, strict=True):
            assert_close(output, reference, output.dtype)
    except AssertionError as error:
        logger.warning("%s differs from the dense reference: %s", target, error)
        return False
    return True
