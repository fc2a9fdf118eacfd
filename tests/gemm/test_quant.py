"""Weight formats: validation, exact meaning and the quantisers that tests and benchmarks use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.quant import (
    E2M1,
    ExpertWeight,
    quantize_fp8_block,
    quantize_fp8_channel,
    quantize_mxfp4,
)

E4M3 = torch.float8_e4m3fn


def draw(*shape: int) -> torch.Tensor:
    """Draw rows whose magnitudes span several powers of two."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.randint(-6, 7, (*shape[:-1], 1), generator=generator)
    return torch.randn(*shape, generator=generator) * torch.exp2(exponent.float())


def test_gate_and_up_apart() -> None:
    rows = torch.arange(24.0).view(2, 4, 3)
    weight = ExpertWeight.gate_up(rows)
    assert torch.equal(weight.data[:, 0], rows[:, :2])
    assert torch.equal(weight.data[:, 1], rows[:, 2:])
    sizes = weight.num_slots, weight.num_parts, weight.num_outputs, weight.num_inputs
    assert sizes == (2, 2, 2, 3)


def test_interleaved_gate_and_up() -> None:
    rows = torch.arange(24.0).view(2, 4, 3)
    weight = ExpertWeight.gate_up(rows, interleaved=True)
    assert torch.equal(weight.data[:, 0], rows[:, 0::2])
    assert torch.equal(weight.data[:, 1], rows[:, 1::2])
    assert torch.equal(weight.as_rows(torch.float32), rows)


def test_down_has_one_part() -> None:
    weight = ExpertWeight.down(torch.arange(24.0).view(2, 4, 3))
    assert (weight.num_parts, weight.num_outputs) == (1, 4)


def test_plain_weights_are_not_copied() -> None:
    rows = draw(2, 4, 3)
    weight = ExpertWeight.gate_up(rows)
    assert weight.data.data_ptr() == rows.data_ptr()
    assert weight.as_rows(torch.float32).data_ptr() == rows.data_ptr()
    assert torch.equal(weight.as_rows(torch.float16), rows.half())


def test_fp8_block_scales_each_part_from_its_own_first_row() -> None:
    """130 rows of the gate end in a short block; up's first block is not the gate's second."""
    scale = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]])
    weight = ExpertWeight.gate_up(torch.ones(1, 260, 129).to(E4M3), scale, format="fp8_block")
    rows = weight.as_rows(torch.float32)[0]
    for part, first in ((rows[:130], 1.0), (rows[130:], 5.0)):
        assert (part[:128, :128] == first).all()
        assert (part[:128, 128:] == first + 1).all()
        assert (part[128:, :128] == first + 2).all()
        assert (part[128:, 128:] == first + 3).all()


def test_fp8_channel_scales_rows() -> None:
    data = torch.tensor([[[1.0, -2.0], [4.0, 0.5], [448.0, 0.0], [-1.0, 1.0]]]).to(E4M3)
    scale = torch.tensor([[1.0, 10.0, 0.5, -3.0]])
    rows = [[1.0, -2.0], [40.0, 5.0], [224.0, 0.0], [3.0, -3.0]]
    for interleaved in (False, True):
        weight = ExpertWeight.gate_up(data, scale, format="fp8_channel", interleaved=interleaved)
        assert weight.as_rows(torch.float32).tolist() == [rows]


def test_mxfp4_holds_the_even_column_in_the_low_half() -> None:
    data = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4]], dtype=torch.uint8)
    scale = torch.tensor([[[127, 129]]], dtype=torch.uint8)
    weight = ExpertWeight.down(data, scale, format="mxfp4")
    assert weight.num_inputs == 64
    expected = [value * factor for factor in (1, 1, 4, 4) for value in E2M1]
    assert weight.as_rows(torch.float32)[0, 0].tolist() == expected


def test_mxfp4_scales_at_both_ends() -> None:
    data = torch.full((1, 1, 32), 0x22, dtype=torch.uint8)  # ones
    scale = torch.tensor([[[0, 254]]], dtype=torch.uint8)
    values = ExpertWeight.down(data, scale, format="mxfp4").as_rows(torch.float32)[0, 0]
    assert values[0].item() == 2.0**-127
    assert values[-1].item() == 2.0**127


@pytest.mark.parametrize("quantizer", [quantize_fp8_block, quantize_fp8_channel])
def test_fp8_error(quantizer: Any) -> None:
    """At most half of the last of three mantissa bits, or of the subnormal step."""
    rows = draw(2, 200, 300)
    data, scale = quantizer(rows)
    format = "fp8_block" if quantizer is quantize_fp8_block else "fp8_channel"
    values, factor = (
        ExpertWeight.down(stored, scale, format=format).as_rows(torch.float32)
        for stored in (data, torch.ones_like(rows).to(E4M3))
    )
    # The division by the scale rounds too, in fp32.
    bound = torch.maximum(rows.abs() * 2**-4, factor * 2**-10) * (1 + 1e-6)
    assert ((values - rows).abs() <= bound).all()
    assert data.float().abs().amax() == 448
    assert scale.dtype == torch.float32


def test_fp8_block_finds_the_largest_of_each_block() -> None:
    rows = torch.zeros(200, 300)
    rows[130, 260] = 448.0
    data, scale = quantize_fp8_block(rows)
    assert scale.shape == (2, 3)
    assert scale[1, 2] == 1.0
    assert data[130, 260].float() == 448.0
    assert (scale.flatten()[:5] < 1e-12).all()


def test_mxfp4_error() -> None:
    """At most half of the one mantissa bit, or of the subnormal step of 0.5."""
    rows = draw(2, 40, 96)
    data, scale = quantize_mxfp4(rows)
    values = ExpertWeight.down(data, scale, format="mxfp4").as_rows(torch.float32)
    factor = torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    assert ((values - rows).abs() <= torch.maximum(rows.abs() * 0.25, factor * 0.25)).all()
    largest = (rows.abs() / factor).unflatten(-1, (-1, 32)).amax(-1)
    assert ((largest > 3) & (largest <= 6)).all()


@pytest.mark.parametrize("exponent", [-100, -1, 0, 5, 120])
def test_mxfp4_represents_its_values_exactly(exponent: int) -> None:
    rows = (torch.tensor(E2M1).repeat(2) * 2.0**exponent).view(1, 1, 32)
    data, scale = quantize_mxfp4(rows)
    assert scale.item() == 127 + exponent
    assert torch.equal(ExpertWeight.down(data, scale, format="mxfp4").as_rows(torch.float32), rows)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel", "mxfp4"])
def test_zero_weights_stay_zero(format: Any) -> None:
    quantizers = {
        "fp8_block": quantize_fp8_block,
        "fp8_channel": quantize_fp8_channel,
        "mxfp4": quantize_mxfp4,
    }
    data, scale = quantizers[format](torch.zeros(1, 3, 64))
    weight = ExpertWeight.down(data, scale, format=format)
    assert torch.equal(weight.as_rows(torch.float32), torch.zeros(1, 3, 64))


@pytest.mark.parametrize("format", ["plain", "fp8_block", "fp8_channel", "mxfp4"])
def test_strided_weights_mean_the_same(format: Any) -> None:
    """aiter #5292, TRT-LLM #17332: the strides of weights and scales alike."""
    if format == "plain":
        data, scale = draw(2, 128, 64), None
    elif format == "fp8_block":
        data, scale = quantize_fp8_block(draw(2, 128, 64))
    elif format == "fp8_channel":
        data, scale = quantize_fp8_channel(draw(2, 128, 64))
    else:
        data, scale = quantize_mxfp4(draw(2, 128, 64))

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.ones(*tensor.shape, 2).to(tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]

    expected = ExpertWeight.down(data, scale, format=format).as_rows(torch.float32)
    strided = ExpertWeight.down(
        spread(data), None if scale is None else spread(scale), format=format
    )
    assert torch.equal(strided.as_rows(torch.float32), expected)


FP8 = torch.zeros(2, 4, 64).to(E4M3)
FP4 = torch.zeros(2, 4, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "scale", "options", "message"),
    [
        (
            FP8,
            torch.ones(2, 2, 1),
            {"format": "fp8_block", "interleaved": True},
            "gate and up apart",
        ),
        (FP8, torch.ones(2, 4), {"format": "int8"}, "format must be one of"),
        (torch.zeros(4, 8), None, {}, "3 dimensions"),
        (torch.zeros(2, 5, 8), None, {}, "2 \\* N rows"),
        (FP8, None, {}, "plain weights must be .* got torch.float8_e4m3fn"),
        (torch.zeros(2, 4, 8).double(), None, {}, "plain weights must be .* got torch.float64"),
        (FP8.float(), torch.ones(2, 2, 1), {"format": "fp8_block"}, "fp8_block weights must be"),
        (
            torch.zeros(2, 4, 64).to(torch.float8_e5m2),
            torch.ones(2, 4),
            {"format": "fp8_channel"},
            "fp8_channel weights must be",
        ),
        (FP8, torch.ones(2, 4, 1), {"format": "mxfp4"}, "mxfp4 weights must be"),
        (FP8, None, {"format": "fp8_channel"}, "fp8_channel: scale NoneType"),
        (torch.zeros(2, 4, 8), torch.ones(2, 4), {}, "plain: scale Tensor"),
        (FP8, torch.ones(2, 1, 1), {"format": "fp8_block"}, "scale must be .* \\[2, 2, 1\\]"),
        (FP8, torch.ones(2, 2, 2), {"format": "fp8_block"}, "scale must be .* \\[2, 2, 1\\]"),
        (FP8, torch.ones(2, 2), {"format": "fp8_channel"}, "scale must be .* \\[2, 4\\]"),
        (FP8, torch.ones(2, 4).half(), {"format": "fp8_channel"}, "got torch.float16"),
        (FP4, torch.ones(2, 4, 2), {"format": "mxfp4"}, "scale must be torch.uint8"),
        (
            FP4,
            torch.ones(2, 4, 1, dtype=torch.uint8),
            {"format": "mxfp4"},
            "scale must be .* \\[2, 4, 2\\]",
        ),
        (
            torch.zeros(2, 4, 24, dtype=torch.uint8),
            torch.ones(2, 4, 1, dtype=torch.uint8),
            {"format": "mxfp4"},
            "multiple of 32 columns",
        ),
    ],
)
def test_bad_weight_is_named(
    data: torch.Tensor, scale: torch.Tensor | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        ExpertWeight.gate_up(data, scale, **options)
