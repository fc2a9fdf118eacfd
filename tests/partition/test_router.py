"""The router's formula against transformers' own routers, and what it rejects."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.partition.router import Router, route_tokens_reference

SIGMOID = {"n_routed_experts": 12, "n_group": 1, "topk_group": 1}
FAMILIES = [
    pytest.param("glm4_moe", "Glm4MoeTopkRouter", {**SIGMOID}, id="glm4_moe"),
    pytest.param(
        "glm4_moe", "Glm4MoeTopkRouter", {**SIGMOID, "norm_topk_prob": False}, id="glm4_moe-raw"
    ),
    pytest.param(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {**SIGMOID, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        id="deepseek_v3",
    ),
    pytest.param("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": 12}, id="qwen3_moe"),
    pytest.param(
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        {"num_experts": 12, "norm_topk_prob": True},
        id="qwen3_moe-normalised",
    ),
    pytest.param("olmoe", "OlmoeTopKRouter", {"num_experts": 12}, id="olmoe"),
    pytest.param("mixtral", "MixtralTopKRouter", {"num_local_experts": 12}, id="mixtral"),
    pytest.param("gpt_oss", "GptOssTopKRouter", {"num_local_experts": 12}, id="gpt_oss"),
]


@pytest.mark.parametrize(("family", "class_name", "options"), FAMILIES)
def test_same_routing_as_transformers(
    family: str, class_name: str, options: dict[str, Any]
) -> None:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = transformers.AutoConfig.for_model(
        family, hidden_size=20, num_experts_per_tok=4, **options
    )
    torch.manual_seed(0)
    module = getattr(modeling, class_name)(config)
    for tensor in (*module.parameters(), *module.buffers()):
        torch.nn.init.normal_(tensor, std=0.4)
    hidden = torch.randn(64, 20)
    with torch.no_grad():
        _, expected_weights, expected_ids = module(hidden)
        routed = route_tokens_reference(
            hidden,
            module.weight,
            Router.from_model_config(config.to_dict()),
            logits_bias=getattr(module, "bias", None),
            correction_bias=getattr(module, "e_score_correction_bias", None),
        )

    def by_expert(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.full((64, 12), -1.0).scatter(1, ids.long(), weights)

    torch.testing.assert_close(
        by_expert(routed.expert_ids, routed.routing_weights),
        by_expert(expected_ids, expected_weights),
    )
    assert routed.demand.tolist() == torch.bincount(expected_ids.flatten(), minlength=12).tolist()


def route_logits(router: Router, logits: list[float], correction: list[float] | None = None):
    """Route one token that has these logits."""
    bias = None if correction is None else torch.tensor(correction)
    weight = torch.tensor(logits)[:, None]
    return route_tokens_reference(torch.ones(1, 1), weight, router, correction_bias=bias)


def test_correction_bias_changes_the_choice_and_not_the_weight() -> None:
    router = Router(num_experts=3, top_k=1, score="sigmoid", has_correction_bias=True)
    routed = route_logits(router, [0.0, 1.0, 0.0], [0.0, 0.0, 5.0])
    assert routed.expert_ids.tolist() == [[2]]
    assert routed.routing_weights.tolist() == [[0.5]]


def test_group_is_scored_by_its_two_largest_experts() -> None:
    router = Router(num_experts=6, top_k=2, score="sigmoid", num_groups=2, topk_groups=1)
    # The single largest expert is in the group whose second is smaller.
    routed = route_logits(router, [2.0, -9.0, -9.0, 1.0, 1.5, -9.0])
    assert routed.expert_ids.tolist() == [[4, 3]]


def test_lowest_id_wins_among_equals() -> None:
    router = Router(num_experts=8, top_k=3, score="sigmoid", num_groups=4, topk_groups=2)
    assert route_logits(router, [1.0] * 8).expert_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_token_with_a_bad_logit_has_no_experts(score: Any, bad: float) -> None:
    routed = route_logits(Router(num_experts=3, top_k=2, score=score), [0.0, bad, 1.0])
    assert routed.expert_ids.tolist() == [[-1, -1]]
    assert routed.routing_weights.tolist() == [[0.0, 0.0]]
    assert routed.demand.tolist() == [0, 0, 0]


def test_sigmoids_that_underflow_have_weight_zero() -> None:
    router = Router(num_experts=2, top_k=2, score="sigmoid", normalise=True)
    assert route_logits(router, [-200.0, -200.0]).routing_weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "num_experts must be"),
        ({"top_k": True}, "top_k must be"),
        ({"top_k": 9}, "top_k 9 exceeds the 8 eligible"),
        ({"num_groups": 1.0}, "num_groups must be"),
        ({"topk_groups": 0}, "topk_groups must be"),
        ({"score": "relu"}, "score must be one of softmax, sigmoid"),
        ({"normalise": 1}, "normalise must be"),
        ({"has_logits_bias": None}, "has_logits_bias must be"),
        ({"has_correction_bias": "yes"}, "has_correction_bias must be"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor must be"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor must be"),
        ({"num_groups": 2}, "only a sigmoid router"),
        ({"has_correction_bias": True}, "only a sigmoid router"),
        ({"score": "sigmoid", "num_groups": 3}, "do not divide into 3 groups"),
        ({"score": "sigmoid", "num_groups": 2, "topk_groups": 3}, "exceeds num_groups 2"),
        ({"score": "sigmoid", "num_groups": 8, "topk_groups": 4}, "and has one"),
        ({"score": "sigmoid", "num_groups": 4, "top_k": 3}, "exceeds the 2 eligible"),
    ],
)
def test_bad_router_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Router(**{"num_experts": 8, "top_k": 2, **options})


def test_unknown_family_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'bert' is not known"):
        Router.from_model_config({"model_type": "bert"})


@pytest.mark.parametrize(
    "missing", ["model_type", "n_routed_experts", "num_experts_per_tok", "n_group"]
)
def test_model_without_a_key_is_rejected(missing: str) -> None:
    values = {
        "model_type": "deepseek_v3",
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        **SIGMOID,
    }
    Router.from_model_config(values)
    del values[missing]
    with pytest.raises(ConfigError, match=f"has no {missing}"):
        Router.from_model_config(values)


ROUTER = Router(num_experts=4, top_k=2)
HIDDEN, WEIGHT, BIAS = torch.zeros(3, 6), torch.zeros(4, 6), torch.zeros(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(6)}, "hidden must be"),
        ({"hidden": torch.zeros(3, 0)}, "hidden must be"),
        ({"hidden": HIDDEN.double()}, "hidden must be float32"),
        ({"hidden": torch.zeros(1, 1).expand(2**30, 6)}, "exceed int32"),
        ({"weight": WEIGHT.T}, r"weight must be \[4, 6\]"),
        ({"weight": WEIGHT.int()}, "weight must be float32"),
        ({"weight": WEIGHT.to("meta")}, "weight is on meta"),
        ({"logits_bias": BIAS}, "has no logits_bias"),
        ({"correction_bias": BIAS}, "has no correction_bias"),
        ({"router": Router(num_experts=4, top_k=2, has_logits_bias=True)}, "needs a logits_bias"),
        (
            {
                "router": Router(num_experts=4, top_k=2, has_logits_bias=True),
                "logits_bias": BIAS[1:],
            },
            r"logits_bias must be \[4\]",
        ),
    ],
)
def test_bad_tensor_is_rejected(changes: dict[str, Any], message: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "router": ROUTER}
    with pytest.raises(ShapeError, match=message):
        route_tokens_reference(**{**arguments, **changes})


def test_no_tokens_have_no_demand() -> None:
    routed = route_tokens_reference(HIDDEN[:0], WEIGHT, ROUTER)
    assert routed.expert_ids.shape == routed.routing_weights.shape == (0, 2)
    assert routed.demand.tolist() == [0] * 4
