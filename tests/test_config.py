"""MoEConfig, TierConfig, Activation: JSON round trip, and every check trips."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from afore_kernels.config import Activation, MoEConfig, TierConfig
from afore_kernels.errors import ConfigError

MOE = MoEConfig(num_layers=2, num_experts=8, top_k=2, hidden_size=32, intermediate_size=16)
GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0, interleaved=True)


@pytest.mark.parametrize(
    "record",
    [
        GPT_OSS,
        MOE,
        replace(MOE, activation=GPT_OSS, dtype="bfloat16", has_bias=True, tile_m=64),
        TierConfig(num_workers=3, copy_budget=0, policy="static", overlap_copies=False),
    ],
)
def test_json_round_trip(record: Any) -> None:
    assert type(record).from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("record", "values"),
    [
        (MoEConfig, {"num_expert": 8}),
        (TierConfig, {"num_workers": 1, "workers": 2}),
        (Activation, {"beta": 1.0}),
        (MoEConfig, {"activation": {"beta": 1.0}}),
    ],
)
def test_unknown_key_is_rejected(record: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no field"):
        record.from_dict(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 0),
        ("num_experts", 0),
        ("num_experts", 2**31),
        ("num_experts", 8.0),
        ("num_experts", True),
        ("top_k", 0),
        ("hidden_size", -1),
        ("intermediate_size", "64"),
        ("shared_intermediate_size", -1),
        ("dtype", "float64"),
        ("tile_m", 0),
        ("tile_m", 24),
        ("tile_m", 2048),
        ("activation", "silu"),
    ],
)
def test_moe_config_rejects(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(MOE, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_workers", 0),
        ("num_ranks", 0),
        ("max_tokens_per_rank", 0),
        ("redundant_slots", -1),
        ("copy_budget", -1),
        ("compactness_threshold", -1),
        ("policy", "best"),
        ("demand_source", "oracle"),
        ("refine_plans", 1),
        ("overlap_copies", 1),
        ("measure_window", None),
        ("targets_in_flight", 0),
        ("tile_time_us", -1.0),
        ("slot_time_us", math.nan),
        ("copy_time_us", math.inf),
        ("window_us", "2000"),
        ("demand_timeout_s", 0.0),
        ("reply_timeout_s", math.inf),
        ("startup_timeout_s", None),
        ("threads_per_worker", 0),
        ("timeline_events", 1),
    ],
)
def test_tier_config_rejects(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        TierConfig(**({"num_workers": 2} | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "gelu"),
        ("alpha", math.nan),
        ("alpha", -1.0),
        ("limit", -7.0),
        ("limit", math.inf),
        ("linear_offset", math.nan),
    ],
)
def test_activation_rejects(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Activation(**{name: value})


def test_copy_budget_defaults_to_two_per_worker() -> None:
    assert TierConfig(num_workers=3).effective_copy_budget == 6
    assert TierConfig(num_workers=3, copy_budget=0).effective_copy_budget == 0
