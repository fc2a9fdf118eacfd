"""The models and devices that benchmarks name.

Device figures are those of the vendors' datasheets, for dense products; what a device sustains is
measured, not looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from afore_kernels.config import Activation, MoEConfig
from afore_kernels.gemm.quant import MX_GROUP, SCALE_BLOCK, WeightFormat

GPT_OSS_ACTIVATION = Activation(alpha=1.702, limit=7.0, linear_offset=1.0, interleaved=True)
# The scale of fp8_channel, one per output row, is left out: it is 4 bytes in thousands.
BYTES_PER_WEIGHT: dict[WeightFormat, float] = {
    "plain": 2.0,
    "fp8_block": 1 + 4 / SCALE_BLOCK**2,
    "fp8_channel": 1.0,
    "mxfp4": 0.5 + 1 / MX_GROUP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The routed experts of a model.

    Attributes:
        name: as its publisher writes it.
        config: shapes, bf16 activations.
        weight_format: of the published checkpoint; `plain` is bf16.
    """

    name: str
    config: MoEConfig
    weight_format: WeightFormat = "plain"

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's weights, scales included."""
        config = self.config
        weights = 3 * config.hidden_size * config.intermediate_size
        return weights * BYTES_PER_WEIGHT[self.weight_format]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Datasheet figures of one GPU.

    Attributes:
        name: of the product.
        num_sms: streaming multiprocessors (AMD: compute units).
        bytes_per_us: memory bandwidth.
        bf16_flops_per_us: dense bf16 products with fp32 sums.
        fp8_flops_per_us: the same in fp8; None if the device has none.
    """

    name: str
    num_sms: int
    bytes_per_us: float
    bf16_flops_per_us: float
    fp8_flops_per_us: float | None


GLM_4_5_AIR = Model(
    name="GLM-4.5-Air",
    config=MoEConfig(
        num_layers=45,
        num_experts=128,
        top_k=8,
        hidden_size=4096,
        intermediate_size=1408,
        shared_intermediate_size=1408,
        dtype="bfloat16",
    ),
)
QWEN3_30B_A3B = Model(
    name="Qwen3-30B-A3B",
    config=MoEConfig(
        num_layers=48,
        num_experts=128,
        top_k=8,
        hidden_size=2048,
        intermediate_size=768,
        dtype="bfloat16",
    ),
)
DEEPSEEK_V3 = Model(
    name="DeepSeek-V3",
    config=MoEConfig(
        num_layers=58,
        num_experts=256,
        top_k=8,
        hidden_size=7168,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        dtype="bfloat16",
    ),
    weight_format="fp8_block",
)
GPT_OSS_20B = Model(
    name="gpt-oss-20b",
    config=MoEConfig(
        num_layers=24,
        num_experts=32,
        top_k=4,
        hidden_size=2880,
        intermediate_size=2880,
        dtype="bfloat16",
        activation=GPT_OSS_ACTIVATION,
        has_bias=True,
    ),
    weight_format="mxfp4",
)
MODELS = {m.name: m for m in (GLM_4_5_AIR, QWEN3_30B_A3B, DEEPSEEK_V3, GPT_OSS_20B)}

# 1e6 bytes per us are 1 TB/s, 1e6 FLOP per us are 1 TFLOP/s.
_TERA_PER_S = 1e6
A100 = Device(
    name="A100-80GB SXM",
    num_sms=108,
    bytes_per_us=2.039 * _TERA_PER_S,
    bf16_flops_per_us=312 * _TERA_PER_S,
    fp8_flops_per_us=None,
)
H100 = Device(
    name="H100 SXM",
    num_sms=132,
    bytes_per_us=3.35 * _TERA_PER_S,
    bf16_flops_per_us=989 * _TERA_PER_S,
    fp8_flops_per_us=1979 * _TERA_PER_S,
)
H200 = Device(
    name="H200",
    num_sms=132,
    bytes_per_us=4.8 * _TERA_PER_S,
    bf16_flops_per_us=989 * _TERA_PER_S,
    fp8_flops_per_us=1979 * _TERA_PER_S,
)
B200 = Device(
    name="B200",
    num_sms=148,
    bytes_per_us=8.0 * _TERA_PER_S,
    bf16_flops_per_us=2250 * _TERA_PER_S,
    fp8_flops_per_us=4500 * _TERA_PER_S,
)
MI300X = Device(
    name="MI300X",
    num_sms=304,
    bytes_per_us=5.3 * _TERA_PER_S,
    bf16_flops_per_us=1307.4 * _TERA_PER_S,
    fp8_flops_per_us=2614.9 * _TERA_PER_S,
)
DEVICES = {d.name: d for d in (A100, H100, H200, B200, MI300X)}
