"""Attention tier no. 1: a transformers model whose routed experts run in an FFN tier.

transformers dispatches every experts module to a registered implementation. This one posts the
histogram of the module's expert ids, submits its hidden states and waits for the tier's reply, so
any MoE model of transformers is served without changing its code. Attention, router, shared experts
and dense layers stay in the model::

    with attach(model, TierConfig(num_workers=4)) as attached:
        model.generate(...)

Inference only: no gradient flows through the tier.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from afore_kernels.config import TierConfig
from afore_kernels.errors import ConfigError
from afore_kernels.plan import Target
from afore_kernels.runtime.adapters.transformers_experts import ModelExperts
from afore_kernels.runtime.client import AttentionClient
from afore_kernels.runtime.launch import Tier

IMPLEMENTATION = "afore"

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]

_microbatch: ContextVar[int] = ContextVar("afore_microbatch", default=0)
_attached: WeakKeyDictionary[nn.Module, ExpertsForward] = WeakKeyDictionary()


class AttachedModel:
    """The attention side of one attached model.

    Attributes:
        tier: the running tier.
    """

    def __init__(self, tier: Tier, chunk_tokens: int) -> None:
        self.tier = tier
        self._client: AttentionClient = tier.client()
        self._chunk_tokens = chunk_tokens
        self._steps: dict[tuple[int, int], Iterator[int]] = {}

    @contextmanager
    def microbatch(self, microbatch: int) -> Iterator[None]:
        """Run the forward passes of this thread (or asyncio task) as microbatch `microbatch`.

        Threads that use different microbatches keep several targets in flight; the default is 0.
        """
        if microbatch < 0:
            raise ConfigError(f"microbatch must not be negative, got {microbatch}")
        token = _microbatch.set(microbatch)
        try:
            yield
        finally:
            _microbatch.reset(token)

    def run_experts(
        self, layer: int, hidden: Tensor, expert_ids: Tensor, routing_weights: Tensor
    ) -> Tensor:
        """Execute one MoE layer in the tier.

        A prefill larger than a target may be is cut into chunks of tokens, each its own target.

        Args:
            layer: index among the model's MoE layers.
            hidden: [num_tokens, hidden_size].
            expert_ids: integer [num_tokens, top_k].
            routing_weights: [num_tokens, top_k].

        Returns:
            [num_tokens, hidden_size], dtype and device of `hidden`.
        """
        inputs = (hidden.detach(), expert_ids, routing_weights.detach().float())
        chunks = zip(*(torch.split(tensor, self._chunk_tokens) for tensor in inputs), strict=True)
        outputs = [self._run_target(layer, *chunk) for chunk in chunks]
        return torch.cat(outputs).to(hidden)

    def _run_target(
        self, layer: int, hidden: Tensor, expert_ids: Tensor, routing_weights: Tensor
    ) -> Tensor:
        microbatch = _microbatch.get()
        # setdefault and next are atomic, so threads that share a microbatch get distinct steps.
        steps = self._steps.setdefault((layer, microbatch), itertools.count())
        target = Target(next(steps), layer, microbatch)
        self._client.send_demand(target, expert_ids)
        self._client.submit(target, hidden, expert_ids, routing_weights)
        return self._client.wait(target)


@contextmanager
def attach(
    model: PreTrainedModel, tier: TierConfig, *, tile_m: int = 16
) -> Iterator[AttachedModel]:
    """Start a tier with the routed experts of `model` and let the model use it until exit.

    On exit, the model's experts run where they ran before and the tier is closed.

    Args:
        model: in eval mode; one attention rank drives it.
        tier: size, policy and limits of the tier.
        tile_m: pairs per tile.

    Raises:
        ConfigError: if the model's experts cannot be served; the message names the module.
    """
    if model.training:
        raise ConfigError("the tier has no backward pass: call model.eval() before attach")
    if tier.num_ranks != 1:
        raise ConfigError(f"a model is one attention rank, got num_ranks {tier.num_ranks}")
    experts = ModelExperts(model, tile_m=tile_m)
    with ExitStack() as stack:
        stack.callback(model.set_experts_implementation, model.get_experts_implementation())
        model.set_experts_implementation(IMPLEMENTATION)
        for name, module in experts.modules.items():
            if module.config._experts_implementation != IMPLEMENTATION:
                raise ConfigError(f"{name}: {type(model).__name__} does not dispatch its experts")
            if module in _attached:
                raise ConfigError(f"{name}: is attached to a tier already")
        running = stack.enter_context(Tier.start(experts.config, tier, experts))
        attached = AttachedModel(running, tier.max_tokens_per_rank)
        for layer, module in enumerate(experts.modules.values()):
            _attached[module] = lambda *inputs, layer=layer: attached.run_experts(layer, *inputs)
            stack.callback(_attached.pop, module)
        yield attached


def _experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts implementation `afore`, see transformers' `ExpertsInterface`."""
    forward = _attached.get(experts)
    if forward is None:
        raise ConfigError(
            f"{type(experts).__name__} uses the experts implementation {IMPLEMENTATION!r} but is "
            "not attached to a tier"
        )
    return forward(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
