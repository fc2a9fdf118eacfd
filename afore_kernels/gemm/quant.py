"""Weight formats: how the weights of all slots are stored, and their exact meaning in torch.

A projection is seen as [num_slots, num_parts, N, K]: gate_up has the parts gate and up, down has
one. Whether gate and up rows alternate in memory is a matter of strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch

from afore_kernels.errors import ShapeError

WeightFormat = Literal["plain", "fp8_block", "fp8_channel", "mxfp4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

SCALE_BLOCK = 128
MX_GROUP = 32
# Values of the e2m1 codes 0 to 15.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def split_parts(rows: torch.Tensor, num_parts: int, interleaved: bool) -> torch.Tensor:
    """View [num_slots, num_parts * N, ...] as [num_slots, num_parts, N, ...]."""
    if interleaved:
        return torch.unflatten(rows, 1, (-1, num_parts)).transpose(1, 2)
    return torch.unflatten(rows, 1, (num_parts, -1))


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """One projection of every slot; build it with `gate_up` or `down`.

    Attributes:
        data: [num_slots, num_parts, N, K], or [..., K // 2] for `mxfp4`; any strides.
        scale: None, or by format: `fp8_block` fp32 [num_slots, num_parts, ceil(N / 128),
            ceil(K / 128)]; `fp8_channel` fp32 [num_slots, num_parts, N, 1]; `mxfp4` uint8
            [num_slots, num_parts, N, K // 32], exponents with a bias of 127.
        format: of the stored values.
        interleaved: the rows of the parts alternate in memory.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    format: WeightFormat
    interleaved: bool = False

    @classmethod
    def gate_up(
        cls,
        data: torch.Tensor,
        scale: torch.Tensor | None = None,
        *,
        format: WeightFormat = "plain",
        interleaved: bool = False,
    ) -> Self:
        """Wrap the first projection.

        Args:
            data: [num_slots, 2 * I, H]: a floating point dtype, float8_e4m3fn for the fp8 formats,
                or uint8 [num_slots, 2 * I, H // 2] with the even column in a byte's low half.
            scale: `fp8_block`: fp32 [num_slots, 2 * ceil(I / 128), ceil(H / 128)], the gate's
                blocks, then up's. `fp8_channel`: fp32 [num_slots, 2 * I]. `mxfp4`: uint8
                [num_slots, 2 * I, H // 32].
            format: of the stored values.
            interleaved: rows alternate gate, up, gate, ...

        Raises:
            ShapeError: naming the tensor, what was expected and what came.
        """
        _require(
            not (interleaved and format == "fp8_block"),
            "interleaved rows share no 128-row scale block: store gate and up apart",
        )
        return cls._split(data, scale, format, 2, interleaved)

    @classmethod
    def down(
        cls,
        data: torch.Tensor,
        scale: torch.Tensor | None = None,
        *,
        format: WeightFormat = "plain",
    ) -> Self:
        """Wrap the second projection, [num_slots, H, I]; the rest as in `gate_up`.

        Raises:
            ShapeError: naming the tensor, what was expected and what came.
        """
        return cls._split(data, scale, format, 1, False)

    @classmethod
    def _split(
        cls,
        data: torch.Tensor,
        scale: torch.Tensor | None,
        format: WeightFormat,
        num_parts: int,
        interleaved: bool,
    ) -> Self:
        _require(format in WEIGHT_FORMATS, f"weight format must be one of {WEIGHT_FORMATS}")
        _require(data.dim() == 3, f"weights must have 3 dimensions, got {list(data.shape)}")
        _require(data.shape[1] % num_parts == 0, f"weights must have {num_parts} * N rows")
        dtypes = {"plain": (torch.float32, torch.float16, torch.bfloat16), "mxfp4": (torch.uint8,)}
        expected = dtypes.get(format, (torch.float8_e4m3fn,))
        _require(data.dtype in expected, f"{format} weights must be {expected}, got {data.dtype}")
        _require((scale is None) == (format == "plain"), f"{format}: scale {type(scale).__name__}")
        parts = split_parts(data, num_parts, interleaved)
        if scale is None:
            return cls(parts, None, format, interleaved)
        num_slots, _, num_rows, num_columns = parts.shape
        shape: tuple[int, ...]
        if format == "fp8_block":
            blocks = -(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK)
            shape = num_slots, num_parts * blocks[0], blocks[1]
        elif format == "fp8_channel":
            shape = num_slots, num_parts * num_rows
        else:
            _require(num_columns % (MX_GROUP // 2) == 0, "mxfp4 needs a multiple of 32 columns")
            shape = num_slots, num_parts * num_rows, num_columns // (MX_GROUP // 2)
        dtype = torch.uint8 if format == "mxfp4" else torch.float32
        _require(
            scale.shape == shape and scale.dtype == dtype,
            f"{format} scale must be {dtype} {list(shape)}, got {scale.dtype} {list(scale.shape)}",
        )
        scale_parts = split_parts(scale, num_parts, interleaved)
        if format == "fp8_channel":
            scale_parts = scale_parts[..., None]
        return cls(parts, scale_parts, format, interleaved)

    @property
    def num_slots(self) -> int:
        """Slots."""
        return self.data.shape[0]

    @property
    def num_parts(self) -> int:
        """2 for gate_up, 1 for down."""
        return self.data.shape[1]

    @property
    def num_outputs(self) -> int:
        """N: outputs of one part."""
        return self.data.shape[2]

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.data.shape[3] * (2 if self.format == "mxfp4" else 1)

    def as_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as they were given, [num_slots, num_parts * N, K], dequantised.

        Plain weights of `dtype` are returned as a view.
        """
        match self.format:
            case "plain":
                values = self.data
            case "fp8_block":
                assert self.scale is not None
                scale = self.scale.repeat_interleave(SCALE_BLOCK, 2).repeat_interleave(
                    SCALE_BLOCK, 3
                )
                values = self.data.float() * scale[:, :, : self.num_outputs, : self.num_inputs]
            case "fp8_channel":
                assert self.scale is not None
                values = self.data.float() * self.scale
            case "mxfp4":
                assert self.scale is not None
                codes = torch.stack((self.data & 0xF, self.data >> 4), -1).flatten(-2)
                table = torch.tensor(E2M1, device=self.data.device)
                exponent = self.scale.int() - 127
                factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
                values = table[codes.int()] * factor.repeat_interleave(MX_GROUP, 3)
        rows = values.transpose(1, 2) if self.interleaved else values
        return rows.flatten(1, 2).to(dtype)


def quantize_fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., N, K] to float8_e4m3fn with one fp32 scale per 128 x 128 block.

    Returns:
        float8_e4m3fn [..., N, K] and fp32 [..., ceil(N / 128), ceil(K / 128)].
    """
    num_rows, num_columns = weight.shape[-2:]
    blocks = -(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK)
    padding = blocks[1] * SCALE_BLOCK - num_columns, blocks[0] * SCALE_BLOCK - num_rows
    padded = torch.nn.functional.pad(weight.float(), (0, padding[0], 0, padding[1]))
    columns = torch.unflatten(padded, -1, (blocks[1], SCALE_BLOCK))
    tiles = torch.unflatten(columns, -3, (blocks[0], SCALE_BLOCK))
    scale = tiles.abs().amax((-3, -1), keepdim=True).clamp(min=1e-12) / _E4M3_MAX
    values = (tiles / scale).flatten(-4, -3).flatten(-2, -1)[..., :num_rows, :num_columns]
    return values.to(torch.float8_e4m3fn), scale.squeeze((-3, -1))


def quantize_fp8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., N, K] to float8_e4m3fn with one fp32 scale per row, [..., N]."""
    scale = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / _E4M3_MAX
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., N, K] to e2m1 pairs, uint8 [..., N, K // 2], and uint8 [..., N, K // 32].

    The scale is the smallest power of two that keeps a group of 32 below 6.
    """
    groups = torch.unflatten(weight.float(), -1, (-1, MX_GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.ceil(torch.log2(largest / max(E2M1)))
    scaled = groups / torch.exp2(exponent)
    magnitudes = torch.tensor(E2M1[:8], device=weight.device)
    codes = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.flatten(-2).to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed, (exponent.squeeze(-1) + 127).to(torch.uint8)


_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
