"""The routed experts of a transformers model as a tier's weight source.

Reads the experts modules that transformers' `use_experts_implementation` has marked: their layout
flags, shapes and activation. Weights that are stored transposed are turned; interleaved gate and up
rows stay interleaved, which the activation knows.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from afore_kernels.config import Activation, ActivationKind, Dtype, MoEConfig
from afore_kernels.errors import ConfigError
from afore_kernels.gemm.activation import gated_activation
from afore_kernels.runtime.weights import ExpertTensors

_LAYOUT_FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate", "has_post_expert_norm")


class ModelExperts:
    """Experts modules of a model in layer order; a `WeightSource`.

    Args:
        model: any transformers model.
        tile_m: pairs per tile.

    Attributes:
        modules: experts module of each MoE layer by its name in the model, in layer order.
        config: shapes of the MoE layers. Shared experts stay in the model, so it has none.

    Raises:
        ConfigError: if the experts cannot be served; the message names the module and the reason.
    """

    def __init__(self, model: PreTrainedModel, *, tile_m: int) -> None:
        self.modules: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if all(hasattr(module, flag) for flag in _LAYOUT_FLAGS)
        }
        if not self.modules:
            raise ConfigError(
                f"{type(model).__name__} has no experts module that transformers can dispatch"
            )
        configs = {
            name: dataclasses.replace(
                _layer_config(name, module), num_layers=len(self.modules), tile_m=tile_m
            )
            for name, module in self.modules.items()
        }
        (first, self.config), *others = configs.items()
        for name, config in others:
            if config != self.config:
                raise ConfigError(f"{name}: differs from {first}: {config} != {self.config}")

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Weights of one routed expert."""
        module = list(self.modules.values())[layer]
        gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
        if module.is_transposed:
            gate_up, down = gate_up.T, down.T
        biases: tuple[Tensor, ...] = ()
        if module.has_bias:
            biases = (module.gate_up_proj_bias[expert], module.down_proj_bias[expert])
        return ExpertTensors(*(t.detach().cpu().contiguous() for t in (gate_up, down, *biases)))

    def shared(self, layer: int) -> None:
        """No layer has a shared expert in the tier: the model runs it."""


def _layer_config(name: str, module: Any) -> MoEConfig:
    """Shapes of one experts module, as a config of one layer."""

    def require(condition: bool, reason: str) -> None:
        if not condition:
            raise ConfigError(f"{name} ({type(module).__name__}): {reason}")

    require(module.has_gate, "experts without a gate are not supported")
    require(not module.has_post_expert_norm, "a norm behind each expert is not supported")
    require(not module._is_expert_parallel, "its experts are split over processes already")
    weight = module.gate_up_proj
    dtype = str(weight.dtype).removeprefix("torch.")
    require(dtype in get_args(Dtype), f"weights of dtype {dtype} are not supported")
    require(weight.device.type != "meta", "its weights are not loaded")
    has_top_k = hasattr(module.config, "num_experts_per_tok")
    require(has_top_k, f"{type(module.config).__name__} has no num_experts_per_tok")
    activation = _find_activation(module)
    require(activation is not None, "its activation is not one the tier computes")
    num_experts, double_width, hidden_size = (
        weight.transpose(1, 2).shape if module.is_transposed else weight.shape
    )
    return MoEConfig(
        num_layers=1,
        num_experts=num_experts,
        top_k=module.config.num_experts_per_tok,
        hidden_size=hidden_size,
        intermediate_size=double_width // 2,
        dtype=dtype,  # type: ignore[arg-type]
        activation=activation,  # type: ignore[arg-type]
        has_bias=module.has_bias,
    )


def _find_activation(module: nn.Module) -> Activation | None:
    """The tier's activation that computes what the module's `_apply_gate` does, if there is one.

    Judged by behaviour rather than by the names of classes: both are evaluated on gates and ups of
    both signs from 1e-2 to 1e3, dense enough to tell GELU from its tanh approximation (at most
    4.7e-4 apart) and wide enough to see clamps.
    """
    magnitudes = torch.logspace(-2, 3, 251)
    gate = torch.cat((-magnitudes.flip(0), magnitudes))
    up = gate.roll(len(gate) // 3)
    interleaved = not module.is_concatenated
    probe = torch.stack((gate, up), 1).flatten() if interleaved else torch.cat((gate, up))
    expected = module._apply_gate(probe[None])  # type: ignore[operator]
    numbers = [
        [default, *(getattr(module, name) for name in names if hasattr(module, name))]
        for default, names in ((1.0, ("alpha", "swiglu_alpha")), (None, ("limit", "swiglu_limit")))
    ]
    for kind, alpha, limit, offset in itertools.product(
        get_args(ActivationKind), *numbers, (0.0, 1.0)
    ):
        candidate = Activation(
            kind=kind, alpha=alpha, limit=limit, linear_offset=offset, interleaved=interleaved
        )
        found = gated_activation(probe[None], candidate)
        if torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return candidate
    return None
