from __future__ import annotations

import pytest

from bench.roofline import make_roofline, ridge
from bench.shapes import (
    A100,
    B200,
    DEEPSEEK_V3,
    DEVICES,
    GLM_4_5_AIR,
    GPT_OSS_20B,
    H100,
    H200,
    MI300X,
    MODELS,
    QWEN3_30B_A3B,
)


def test_glm_expert_is_34_6_megabytes():
    assert GLM_4_5_AIR.expert_bytes == 3 * 4096 * 1408 * 2
    assert GLM_4_5_AIR.expert_bytes / 1e6 == pytest.approx(34.6, abs=0.05)


@pytest.mark.parametrize(("device", "floor_us"), [(H200, 115), (A100, 272)])
def test_floor_of_16_active_slots(device, floor_us):
    # One pair per slot: the activations are 0.4 MB beside 554 MB of weights.
    roofline = make_roofline(GLM_4_5_AIR, [1] * 16 + [0] * 8, 16, device)
    assert roofline.floor_us == pytest.approx(floor_us, abs=0.6)
    assert roofline.is_memory_bound


@pytest.mark.parametrize(
    ("device", "flops_per_byte"),
    [(A100, 153), (H100, 295), (H200, 206), (B200, 281), (MI300X, 247)],
)
def test_ridge(device, flops_per_byte):
    assert ridge(device) == pytest.approx(flops_per_byte, abs=0.5)


def test_intensity_in_bf16_is_about_the_tokens_per_active_slot():
    roofline = make_roofline(GLM_4_5_AIR, [32] * 16, 32, H200)
    assert roofline.flops == 6 * 32 * 16 * 4096 * 1408
    assert 30 < roofline.intensity < 32


def test_many_pairs_are_bound_by_the_tensor_cores():
    roofline = make_roofline(QWEN3_30B_A3B, [4096] * 4, 128, H100)
    assert not roofline.is_memory_bound
    assert roofline.floor_us == pytest.approx(6 * 4 * 4096 * 2048 * 768 / 989e6)


def test_tile_efficiency_counts_padding():
    # 17 pairs take two tiles, 15 take one.
    roofline = make_roofline(QWEN3_30B_A3B, [17, 0, 15], 16, H200)
    assert roofline.num_tiles == 3
    assert roofline.tile_efficiency == 32 / 48


def test_no_pairs_take_no_time():
    roofline = make_roofline(QWEN3_30B_A3B, [0, 0], 16, H200)
    assert (roofline.floor_us, roofline.intensity, roofline.tile_efficiency) == (0.0, 0.0, 1.0)


def test_quantised_weights_count_their_scales():
    per_weight = DEEPSEEK_V3.expert_bytes / (3 * 7168 * 2048)
    assert per_weight == 1 + 4 / (128 * 128)
    # Groups of 32 values in 16 bytes and one exponent.
    assert GPT_OSS_20B.expert_bytes == 3 * 2880 * 2880 / 32 * 17


def test_named_shapes():
    shapes = {
        name: (
            model.config.hidden_size,
            model.config.intermediate_size,
            model.config.num_experts,
            model.config.top_k,
        )
        for name, model in MODELS.items()
    }
    assert shapes == {
        "GLM-4.5-Air": (4096, 1408, 128, 8),
        "Qwen3-30B-A3B": (2048, 768, 128, 8),
        "DeepSeek-V3": (7168, 2048, 256, 8),
        "gpt-oss-20b": (2880, 2880, 32, 4),
    }
    assert GPT_OSS_20B.config.has_bias
    assert GPT_OSS_20B.config.activation.interleaved
    assert len(DEVICES) == 5
