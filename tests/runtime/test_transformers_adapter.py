from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from afore_kernels import TierConfig
from afore_kernels.config import Activation
from afore_kernels.errors import ConfigError
from afore_kernels.plan import Target
from afore_kernels.runtime.adapters import transformers as adapter
from afore_kernels.runtime.adapters.transformers_experts import ModelExperts
from tests.runtime.local_tier import LocalTier

TIER = TierConfig(num_workers=2)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES = {
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 16},
}


def make_model(family: str, dtype: torch.dtype = torch.float32, **changes):
    """A random model of a family in transformers' eager form."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # the default initialisation leaves experts too small to matter
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices: a second thread only adds waiting."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def tiers(monkeypatch) -> list[LocalTier]:
    """Replaces `Tier`; the tiers that were started."""
    started: list[LocalTier] = []

    class RecordedTier(LocalTier):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(adapter, "Tier", RecordedTier)
    return started


@torch.no_grad()
def logits(model, num_tokens: int = 12) -> torch.Tensor:
    ids = torch.arange(2 * num_tokens).reshape(2, num_tokens) * 7 % model.config.vocab_size
    return model(ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager(family, dtype, tiers):
    model = make_model(family, dtype)
    expected = logits(model)
    with adapter.attach(model, TIER):
        found = logits(model)
    # fp16: eager adds expert outputs in fp16, the tier in fp32.
    atol = {torch.float32: 1e-5, torch.float16: 1e-2}[dtype] * expected.abs().max()
    torch.testing.assert_close(found, expected, rtol=0, atol=float(atol))
    layers = {target.layer for _, target, _ in tiers[0].calls}
    assert layers == set(range(3 - getattr(model.config, "first_k_dense_replace", 0)))


@pytest.mark.multiprocess
def test_tier_of_processes_serves_transposed_interleaved_experts_with_bias():
    model = make_model("gpt_oss", torch.float16)
    expected = logits(model)
    tier = TierConfig(num_workers=2, redundant_slots=1, max_tokens_per_rank=16)
    with adapter.attach(model, tier, tile_m=2) as attached:
        found = logits(model)
        rows = attached.tier.timeline().per_target
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 * float(expected.abs().max()))
    assert rows["num_tokens"].tolist() == [16, 8] * 3
    assert rows["pairs_per_worker"].sum(axis=1).tolist() == [32, 16] * 3


def test_experts_of_the_model_are_not_used(tiers):
    model = make_model("mixtral")
    expected = logits(model)
    with adapter.attach(model, TIER):
        weights = tiers[0]._weights
        tensors = {
            (layer, e): [t.clone() for t in weights.expert(layer, e)[:2]]
            for layer in range(3)
            for e in range(8)
        }
        weights.expert = lambda layer, expert: SimpleNamespace(
            gate_up=tensors[layer, expert][0],
            down=tensors[layer, expert][1],
            gate_up_bias=None,
            down_bias=None,
        )
        for module in ModelExperts(model, tile_m=4).modules.values():
            module.gate_up_proj.data.fill_(torch.nan)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_exit_restores_the_model(tiers):
    model = make_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    expected = logits(model)
    with adapter.attach(model, TIER) as attached:
        assert attached.tier is tiers[0]
        assert model.get_experts_implementation()[""] == "afore"
    assert tiers[0].is_closed
    assert model.get_experts_implementation()[""] == "grouped_mm"
    assert torch.equal(logits(model), expected)


def test_each_target_is_posted_submitted_and_awaited_in_order(tiers):
    model = make_model("mixtral")
    with adapter.attach(model, TIER, tile_m=4):
        logits(model)
        logits(model, num_tokens=1)
    calls = ("send_demand", "submit", "wait")
    assert tiers[0].moe.tile_m == 4
    assert tiers[0].calls == [
        (call, Target(step, layer, 0), num_tokens)
        for step, num_tokens in enumerate((24, 2))
        for layer in range(3)
        for call in calls
    ]


def test_large_prefill_is_cut_into_chunks(tiers):
    model = make_model("mixtral")
    expected = logits(model)
    with adapter.attach(model, TierConfig(num_workers=2, max_tokens_per_rank=10)):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    waited = [call[1:] for call in tiers[0].calls if call[0] == "wait"]
    assert waited[:3] == [(Target(0, 0, 0), 10), (Target(1, 0, 0), 10), (Target(2, 0, 0), 4)]


def test_no_tokens_still_post_a_target(tiers):
    model = make_model("mixtral")
    with adapter.attach(model, TIER) as attached:
        hidden = torch.empty(0, 32)
        output = attached.run_experts(
            1, hidden, torch.empty(0, 2, dtype=torch.int64), hidden[:, :2]
        )
    assert output.shape == (0, 32)
    assert tiers[0].calls[0] == ("send_demand", Target(0, 1, 0), 0)


def test_threads_drive_their_own_microbatches(tiers):
    model = make_model("mixtral")
    expected = {n: logits(model, n) for n in (3, 5)}
    found = {}

    def drive(microbatch, num_tokens):
        with attached.microbatch(microbatch):
            found[num_tokens] = logits(model, num_tokens)

    with adapter.attach(model, TIER) as attached:
        threads = [threading.Thread(target=drive, args=pair) for pair in ((0, 3), (1, 5))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    tokens = {(target.microbatch, n) for _, target, n in tiers[0].calls}
    assert tokens == {(0, 6), (1, 10)}


def test_microbatch_ends_with_its_block(tiers):
    model = make_model("mixtral")
    with adapter.attach(model, TIER) as attached:
        with attached.microbatch(3):
            logits(model, 1)
        logits(model, 1)
        with pytest.raises(ConfigError, match="must not be negative"), attached.microbatch(-1):
            pass
    assert [t.microbatch for _, t, _ in tiers[0].calls] == [3] * 9 + [0] * 9


def test_generate_makes_the_same_tokens(tiers):
    model = make_model("glm4_moe")
    ids = torch.arange(8).reshape(2, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    with adapter.attach(model, TIER):
        found = model.generate(ids, **options)
    assert torch.equal(found, expected)
    assert len({target.step for _, target, _ in tiers[0].calls}) == 6


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [
        ("silu", Activation()),
        ("gelu_pytorch_tanh", Activation(kind="gelu_tanh")),
        ("gelu_new", Activation(kind="gelu_tanh")),
        ("relu2", Activation(kind="relu2")),
        ("linear", Activation(kind="none")),
    ],
)
def test_activation_is_recognised(hidden_act, activation):
    model = make_model("mixtral", hidden_act=hidden_act)
    assert ModelExperts(model, tile_m=4).config.activation == activation


def test_config_of_gpt_oss():
    model = make_model("gpt_oss", torch.bfloat16, swiglu_limit=5.0)
    config = ModelExperts(model, tile_m=8).config
    assert config.activation == Activation(
        alpha=1.702, limit=5.0, linear_offset=1.0, interleaved=True
    )
    assert (config.num_layers, config.num_experts, config.top_k) == (3, 8, 2)
    assert (config.hidden_size, config.intermediate_size, config.has_bias) == (32, 24, True)
    assert (config.dtype, config.tile_m, config.shared_intermediate_size) == ("bfloat16", 8, 0)


def _spoil(name, value):
    return lambda experts: setattr(experts, name, value)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_spoil("has_gate", False), "without a gate"),
        (_spoil("has_post_expert_norm", True), "norm behind each expert"),
        (_spoil("_is_expert_parallel", True), "split over processes"),
        (_spoil("act_fn", nn.GELU()), "activation is not one"),
        (_spoil("_apply_gate", lambda x: x.chunk(2, -1)[0]), "activation is not one"),
        (_spoil("config", transformers.PretrainedConfig()), "no num_experts_per_tok"),
        (lambda experts: experts.to(torch.float64), "dtype float64"),
        (lambda experts: experts.to("meta"), "not loaded"),
        (_spoil("act_fn", nn.Identity()), "differs from model.layers.0.mlp.experts"),
    ],
)
def test_unsupported_experts_are_named(spoil, reason, tiers):
    model = make_model("mixtral")
    spoil(model.model.layers[1].mlp.experts)
    with (
        pytest.raises(ConfigError, match=rf"model\.layers\.1\.mlp\.experts.*{reason}"),
        adapter.attach(model, TIER),
    ):
        pass
    assert not tiers


def test_dense_model_is_rejected():
    dense = make_model("glm4_moe", first_k_dense_replace=3)
    with pytest.raises(ConfigError, match="no experts module"):
        ModelExperts(dense, tile_m=4)


class UndispatchedMixtral(transformers.MixtralForCausalLM):
    """A model whose experts transformers does not dispatch, as with code from elsewhere."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return False


def test_model_without_dispatch_is_rejected(tiers):
    torch.manual_seed(0)
    model = UndispatchedMixtral(make_model("mixtral").config).eval()
    with pytest.raises(ConfigError, match="does not dispatch"), adapter.attach(model, TIER):
        pass
    assert not tiers


def test_misuse_is_rejected(tiers):
    model = make_model("mixtral")
    with (
        pytest.raises(ConfigError, match="one attention rank"),
        adapter.attach(model, TierConfig(num_workers=1, num_ranks=2)),
    ):
        pass
    with (
        adapter.attach(model, TIER),
        pytest.raises(ConfigError, match="already"),
        adapter.attach(model, TIER),
    ):
        pass
    model.set_experts_implementation("afore")
    with pytest.raises(ConfigError, match="not attached"):
        logits(model)
    with pytest.raises(ConfigError, match="eval"), adapter.attach(model.train(), TIER):
        pass
