"""An in-process double of the tier for tests of attention adapters: a loop over pairs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from afore_kernels.config import Activation, MoEConfig, TierConfig
from afore_kernels.plan import Target
from afore_kernels.runtime.weights import WeightSource


def activate(activation: Activation, gate_up: Tensor) -> Tensor:
    """The formula of `Activation`'s docstring."""
    gate, up = gate_up.chunk(2)
    if activation.interleaved:
        gate, up = gate_up[::2], gate_up[1::2]
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    activated = {
        "silu": lambda: gate * torch.sigmoid(activation.alpha * gate),
        "gelu_tanh": lambda: torch.nn.functional.gelu(gate, approximate="tanh"),
        "relu2": lambda: gate.relu() ** 2,
        "none": lambda: gate,
    }[activation.kind]()
    return activated * (up + activation.linear_offset)


class LocalTier:
    """Computes every target on the calling thread when it is submitted, and keeps a log of calls.

    Attributes:
        moe, tier: what it was started with.
        calls: `(method, target, num_tokens)` in call order.
    """

    def __init__(self, moe: MoEConfig, tier: TierConfig, weights: WeightSource) -> None:
        self.moe = moe
        self.tier = tier
        self.calls: list[tuple[str, Target, int]] = []
        self.is_closed = False
        self._weights = weights
        self._outputs: dict[Target, Tensor] = {}
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def start(cls, moe: MoEConfig, tier: TierConfig, weights: WeightSource) -> Iterator[LocalTier]:
        """Stand in for `Tier.start`."""
        running = cls(moe, tier, weights)
        try:
            yield running
        finally:
            running.is_closed = True

    def client(self, rank: int = 0) -> LocalTier:
        """Stand in for `Tier.client`."""
        assert rank == 0
        return self

    def send_demand(self, target: Target, expert_ids: Tensor) -> None:
        """Stand in for `AttentionClient.send_demand`."""
        assert expert_ids.shape[1] == self.moe.top_k
        assert len(expert_ids) <= self.tier.max_tokens_per_rank
        with self._lock:
            assert ("send_demand", target) not in [call[:2] for call in self.calls[-1000:]]
            self.calls.append(("send_demand", target, len(expert_ids)))

    def submit(
        self, target: Target, hidden: Tensor, expert_ids: Tensor, routing_weights: Tensor
    ) -> None:
        """Stand in for `AttentionClient.submit`."""
        assert str(hidden.dtype) == f"torch.{self.moe.dtype}"
        output = torch.zeros(hidden.shape)
        for token, (ids, weights) in enumerate(zip(expert_ids.tolist(), routing_weights)):
            for expert, weight in zip(ids, weights):
                output[token] += weight * self._expert(target.layer, expert, hidden[token])
        with self._lock:
            self.calls.append(("submit", target, len(hidden)))
            self._outputs[target] = output.to(hidden.dtype)

    def wait(self, target: Target, timeout_s: float | None = None) -> Tensor:
        """Stand in for `AttentionClient.wait`."""
        with self._lock:
            output = self._outputs.pop(target)
            self.calls.append(("wait", target, len(output)))
        return output

    def _expert(self, layer: int, expert: int, row: Tensor) -> Tensor:
        tensors = self._weights.expert(layer, expert)
        gate_up = tensors.gate_up.float() @ row.float()
        if tensors.gate_up_bias is not None:
            gate_up += tensors.gate_up_bias.float()
        output = tensors.down.float() @ activate(self.moe.activation, gate_up)
        if tensors.down_bias is not None:
            output += tensors.down_bias.float()
        return output
