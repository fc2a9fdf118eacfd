from __future__ import annotations

import pytest

from bench.occupancy import GFX942, KIB, SM80, SM90, SM100


@pytest.mark.parametrize(
    ("architecture", "registers", "shared_kib", "num_warps", "ctas"),
    [
        # 128 registers: 512 / 128 = 4 warps a scheduler, 16 in all.
        pytest.param(SM80, 128, 0, 4, 4, id="registers"),
        # 129 are handed out as 136: 3 warps a scheduler, 12 in all.
        pytest.param(SM80, 129, 0, 4, 3, id="register-step"),
        # 12 warps hold one CTA of 8.
        pytest.param(SM80, 168, 0, 8, 1, id="whole-ctas"),
        pytest.param(SM80, 255, 0, 8, 1, id="most-registers"),
        # 16 warps a scheduler, 64 in all.
        pytest.param(SM90, 16, 0, 4, 16, id="warps"),
        pytest.param(SM90, 16, 0, 1, 32, id="ctas"),
        # 164 KiB hold three CTAs of 53 + 1 KiB and two of 54 + 1.
        pytest.param(SM80, 32, 53, 4, 3, id="shared"),
        pytest.param(SM80, 32, 54, 4, 2, id="reserved-shared"),
        pytest.param(SM80, 32, 163, 4, 1, id="all-shared"),
        pytest.param(SM80, 32, 164, 4, 0, id="too-much-shared"),
        pytest.param(SM90, 32, 227, 4, 1, id="all-shared-90"),
        # 140 registers are handed out as 144: 3 waves a SIMD, 12 in all.
        pytest.param(GFX942, 140, 0, 4, 3, id="amd-registers"),
        pytest.param(GFX942, 512, 0, 4, 1, id="amd-most-registers"),
        pytest.param(GFX942, 24, 0, 4, 8, id="amd-waves"),
        pytest.param(GFX942, 24, 32, 4, 2, id="amd-shared"),
        pytest.param(GFX942, 24, 65, 4, 0, id="amd-too-much-shared"),
    ],
)
def test_resident_ctas(architecture, registers, shared_kib, num_warps, ctas):
    assert (
        architecture.count_resident_ctas(
            registers=registers, shared_bytes=shared_kib * KIB, num_warps=num_warps
        )
        == ctas
    )


@pytest.mark.parametrize(("columns", "ctas"), [(0, 4), (128, 4), (256, 2), (512, 1), (1024, 0)])
def test_tensor_memory_limits_ctas(columns, ctas):
    assert (
        SM100.count_resident_ctas(
            registers=128, shared_bytes=0, num_warps=4, tensor_memory_columns=columns
        )
        == ctas
    )
