"""The gated activation against its formulas, element by element."""

from __future__ import annotations

import math

import pytest
import torch

from afore_kernels.config import Activation
from afore_kernels.gemm.activation import gated_activation

VALUES = [-30.0, -7.5, -7.0, -1.0, 0.0, 0.5, 6.5, 7.0, 7.5, 30.0]


def by_formula(gate: float, up: float, activation: Activation) -> float:
    if activation.limit is not None:
        gate = min(gate, activation.limit)
        up = max(-activation.limit, min(up, activation.limit))
    acted = {
        "silu": lambda g: g / (1 + math.exp(-activation.alpha * g)),
        "gelu_tanh": lambda g: (
            0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        ),
        "relu2": lambda g: max(g, 0.0) ** 2,
        "none": lambda g: g,
    }[activation.kind](gate)
    return acted * (up + activation.linear_offset)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize(
    ("kind", "alpha", "linear_offset"),
    [
        ("silu", 1.0, 0.0),
        ("silu", 1.702, 1.0),
        ("gelu_tanh", 1.0, 0.0),
        ("relu2", 1.0, 0.5),
        ("none", 1.0, 0.0),
    ],
)
def test_formula(
    kind: str, alpha: float, linear_offset: float, limit: float | None, interleaved: bool
) -> None:
    activation = Activation(
        kind=kind,  # type: ignore[arg-type]
        alpha=alpha,
        limit=limit,
        linear_offset=linear_offset,
        interleaved=interleaved,
    )
    pairs = torch.tensor([[(g, u) for u in VALUES] for g in VALUES], dtype=torch.float64)
    gate, up = pairs.unbind(-1)
    gate_up = pairs.flatten(1) if interleaved else torch.cat([gate, up], dim=1)
    before = gate_up.clone()
    expected = [[by_formula(g, u, activation) for u in VALUES] for g in VALUES]
    actual = gated_activation(gate_up, activation)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(gate_up, before)


def test_clamp_matters_beyond_the_limit() -> None:
    gate_up = torch.tensor([[8.0, -9.0]])
    limited = gated_activation(gate_up, Activation(kind="none", limit=7.0))
    assert limited.item() == -49.0
    # Only an upper bound on the gate.
    assert gated_activation(-gate_up, Activation(kind="none", limit=7.0)).item() == -56.0
