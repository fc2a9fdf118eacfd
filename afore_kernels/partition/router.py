"""The router of an MoE layer: what it is configured with, and its formula in torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

import torch

from afore_kernels.config import INT32_MAX
from afore_kernels.errors import ConfigError, ShapeError

ScoreKind = Literal["softmax", "sigmoid"]
# Keeps the sum of sigmoids that all underflowed from dividing by zero.
SIGMOID_EPSILON = 1e-20

_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token's gate logits become its experts and their weights.

    Logits are `hidden @ weight.T`, plus a bias with `has_logits_bias`. A score is a logit's
    sigmoid, or its softmax over all experts. The `top_k` experts with the largest choice value win,
    the lowest id among equals; that value is the logit under softmax, the score plus the correction
    bias under sigmoid. A weight is the expert's score, without the correction bias, divided by the
    sum of the chosen scores with `normalise`, times `routed_scaling_factor`.

    Softmax over the chosen experts alone, as in gpt_oss, is softmax with `normalise`.

    Attributes:
        num_experts: routed experts E.
        top_k: experts per token.
        score: `softmax` or `sigmoid`.
        normalise: divide by the sum of the chosen scores.
        routed_scaling_factor: factor of every weight, positive.
        num_groups: equal groups of consecutive experts; only of sigmoid routers.
        topk_groups: groups that may be chosen from: those with the largest sum of their two largest
            choice values. `num_groups` for no limit.
        has_logits_bias: the gate has a bias.
        has_correction_bias: the choice has a bias; only of sigmoid routers.
    """

    num_experts: int
    top_k: int
    score: ScoreKind = "softmax"
    normalise: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    has_logits_bias: bool = False
    has_correction_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "topk_groups"):
            value = getattr(self, name)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            _require(is_integer and value >= 1, f"{name} must be a positive integer, got {value!r}")
        for name in ("normalise", "has_logits_bias", "has_correction_bias"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        _require(
            self.score in get_args(ScoreKind),
            f"score must be one of {', '.join(get_args(ScoreKind))}, got {self.score!r}",
        )
        factor = self.routed_scaling_factor
        _require(
            isinstance(factor, int | float) and math.isfinite(factor) and factor > 0,
            f"routed_scaling_factor must be positive, got {factor!r}",
        )
        _require(
            self.score == "sigmoid" or (self.num_groups == 1 and not self.has_correction_bias),
            "only a sigmoid router has groups or a correction bias",
        )
        _require(
            self.num_experts % self.num_groups == 0,
            f"{self.num_experts} experts do not divide into {self.num_groups} groups",
        )
        _require(
            self.topk_groups <= self.num_groups,
            f"topk_groups {self.topk_groups} exceeds num_groups {self.num_groups}",
        )
        _require(
            not self.has_group_limit or self.experts_per_group >= 2,
            "a group is scored by its two largest experts, and has one",
        )
        eligible = self.topk_groups * self.experts_per_group
        _require(
            self.top_k <= eligible, f"top_k {self.top_k} exceeds the {eligible} eligible experts"
        )

    @property
    def experts_per_group(self) -> int:
        """Experts of each group."""
        return self.num_experts // self.num_groups

    @property
    def has_group_limit(self) -> bool:
        """Whether some groups are left out."""
        return self.topk_groups < self.num_groups

    @classmethod
    def from_model_config(cls, values: Mapping[str, Any]) -> Self:
        """Read the router of a model from its Hugging Face configuration.

        Args:
            values: content of `config.json`, or `to_dict()` of a transformers configuration.

        Raises:
            ConfigError: if the family is unknown, a key is missing or a value is not valid.

        >>> Router.from_model_config(
        ...     {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
        ... ).normalise
        True
        """

        def read(*keys: str) -> Any:
            found = [values[key] for key in keys if values.get(key) is not None]
            _require(bool(found), f"the model's configuration has no {' or '.join(keys)}")
            return found[0]

        family = read("model_type")
        options: dict[str, Any]
        match family:
            case "glm4_moe" | "deepseek_v3":
                options = {
                    "score": "sigmoid",
                    "normalise": read("norm_topk_prob"),
                    "routed_scaling_factor": read("routed_scaling_factor"),
                    "num_groups": read("n_group"),
                    "topk_groups": read("topk_group"),
                    "has_correction_bias": True,
                }
            case "qwen3_moe" | "olmoe":
                options = {"normalise": read("norm_topk_prob")}
            case "mixtral":
                options = {"normalise": True}
            case "gpt_oss":
                options = {"normalise": True, "has_logits_bias": True}
            case _:
                raise ConfigError(f"the router of model_type {family!r} is not known")
        return cls(num_experts=read(*_EXPERT_KEYS), top_k=read("num_experts_per_tok"), **options)


class RoutedTokens(NamedTuple):
    """The routing of one attention rank's tokens.

    Attributes:
        expert_ids: int32 [num_tokens, top_k], distinct within a token, largest choice first; a
            token with a logit or choice value that is not finite has -1 throughout.
        routing_weights: float32 [num_tokens, top_k]; 0 beside id -1.
        demand: pairs of each expert, int32 [num_experts].
    """

    expert_ids: torch.Tensor
    routing_weights: torch.Tensor
    demand: torch.Tensor


def check_gate(
    router: Router,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    logits_bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
) -> None:
    """Check the tensors of a gate against its router.

    Raises:
        ShapeError: if a shape or dtype is wrong, tensors are on different devices, a bias is
            missing or not the router's, or the pairs exceed int32.
    """

    def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ShapeError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
        if tensor.device != hidden.device:
            raise ShapeError(f"{name} is on {tensor.device}, hidden on {hidden.device}")

    if hidden.dim() != 2 or hidden.shape[1] == 0:
        raise ShapeError(f"hidden must be [num_tokens, hidden_size], got {list(hidden.shape)}")
    num_tokens, hidden_size = hidden.shape
    check("hidden", hidden, (num_tokens, hidden_size))
    check("weight", weight, (router.num_experts, hidden_size))
    if num_tokens * router.top_k > INT32_MAX:
        raise ShapeError(f"{num_tokens} tokens times top_k {router.top_k} exceed int32")
    for name, bias, is_expected in (
        ("logits_bias", logits_bias, router.has_logits_bias),
        ("correction_bias", correction_bias, router.has_correction_bias),
    ):
        if (bias is not None) != is_expected:
            raise ShapeError(f"the router {'needs a' if is_expected else 'has no'} {name}")
        if bias is not None:
            check(name, bias, (router.num_experts,))


def route_tokens_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    router: Router,
    *,
    logits_bias: torch.Tensor | None = None,
    correction_bias: torch.Tensor | None = None,
) -> RoutedTokens:
    """Return what `route.route_tokens` must return, in fp32 torch operations.

    Arguments and errors are those of `route_tokens`.
    """
    check_gate(router, hidden, weight, logits_bias, correction_bias)
    logits = hidden.float() @ weight.float().T
    if logits_bias is not None:
        logits = logits + logits_bias.float()
    if router.score == "softmax":
        scores, choice = logits.softmax(dim=1), logits
    else:
        scores = choice = logits.sigmoid()
    if correction_bias is not None:
        choice = choice + correction_bias.float()
    is_routed = (logits.isfinite() & choice.isfinite()).all(dim=1, keepdim=True)
    if router.has_group_limit:
        grouped = choice.view(-1, router.num_groups, router.experts_per_group)
        group_scores = grouped.topk(2, dim=2).values.sum(dim=2)
        kept = _largest(group_scores, router.topk_groups)
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, kept, True)
        choice = grouped.where(is_kept[:, :, None], -torch.inf).flatten(1)
    chosen = _largest(choice, router.top_k)
    weights = scores.gather(1, chosen)
    if router.normalise:
        epsilon = SIGMOID_EPSILON if router.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(dim=1, keepdim=True) + epsilon)
    return RoutedTokens(
        chosen.where(is_routed, -1).int(),
        (weights * router.routed_scaling_factor).where(is_routed, 0.0),
        torch.bincount(chosen[is_routed[:, 0]].flatten(), minlength=router.num_experts).int(),
    )


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the `k` largest values of each row, the lowest column first among equals."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]
