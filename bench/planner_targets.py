"""Sequences of targets for the planner's benches: the demand of decode steps, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from afore_kernels.plan import Int32Array
from afore_kernels.traces import ContinuousBatching, RoutingTrace
from bench.synthetic_routing import make_workload

NUM_TOKENS, NUM_LAYERS, WARMUP_STEPS = 256, 8, 12
SYNTHETIC = "synthetic-128x8-even"


@dataclass(frozen=True, slots=True, eq=False)
class TargetSequence:
    """Targets in execution order; the first ones only bring the slots to a steady state.

    Attributes:
        name: of the workload.
        demand: pairs per expert, int32 [num_targets, num_experts].
        layer: of each target, int64 [num_targets].
        num_warmup: targets before those that count.
    """

    name: str
    demand: Int32Array
    layer: npt.NDArray[np.int64]
    num_warmup: int

    @classmethod
    def from_batches(
        cls, name: str, batches: ContinuousBatching, *, num_layers: int, num_targets: int
    ) -> Self:
        """Count the demand of decode steps, layer by layer.

        Args:
            name: of the workload.
            batches: the steps.
            num_layers: the first layers of the trace, which are served in turn.
            num_targets: targets that count, after `WARMUP_STEPS` steps of all layers.
        """
        num_steps = WARMUP_STEPS + -(-num_targets // num_layers)
        counts = [
            np.bincount(step[:, layer].ravel(), minlength=batches.trace.num_experts)
            for step in islice(batches, num_steps)
            for layer in range(num_layers)
        ]
        num_warmup = WARMUP_STEPS * num_layers
        demand = np.array(counts[: num_warmup + num_targets], np.int32)
        return cls(name, demand, np.arange(len(demand)) % num_layers, num_warmup)

    @property
    def num_layers(self) -> int:
        """Layers that take turns."""
        return int(self.layer.max()) + 1

    @property
    def num_experts(self) -> int:
        """Experts per layer."""
        return int(self.demand.shape[1])

    def first(self, num_targets: int) -> Self:
        """Return the sequence up to the first `num_targets` that count."""
        stop = self.num_warmup + num_targets
        return replace(self, demand=self.demand[:stop], layer=self.layer[:stop])


def load_sequences(trace: Path | None, num_targets: int) -> list[TargetSequence]:
    """Return the recorded workload, if its file is given, and the synthetic one.

    Args:
        trace: file of a `RoutingTrace`.
        num_targets: targets of each that count.
    """
    batches = {SYNTHETIC: make_workload(SYNTHETIC, concurrency=NUM_TOKENS, num_layers=NUM_LAYERS)}
    if trace is not None:
        recorded = ContinuousBatching(RoutingTrace.load(trace), concurrency=NUM_TOKENS)
        batches = {trace.stem: recorded, **batches}
    return [
        TargetSequence.from_batches(name, steps, num_layers=NUM_LAYERS, num_targets=num_targets)
        for name, steps in batches.items()
    ]
