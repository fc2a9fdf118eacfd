"""The executor against the dense oracle: values, precision, untouched memory, determinism."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afore_kernels.config import Activation
from afore_kernels.errors import ShapeError
from afore_kernels.gemm import torch_executor
from afore_kernels.gemm.reference import reference_gated_ffn, reference_moe_ffn
from afore_kernels.gemm.tiles import PairTiles, TileSchedule
from afore_kernels.gemm.torch_executor import run_dense_ffn, run_expert_ffn
from afore_kernels.testing import assert_close, make_routing, make_weights

SILU = Activation()
GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0, interleaved=True)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_hidden(
    num_tokens: int, hidden_size: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)


def tile(expert_ids: torch.Tensor, num_experts: int, tile_m: int = 16) -> PairTiles:
    return PairTiles.from_expert_ids(expert_ids.numpy(), num_experts, tile_m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SILU, GPT_OSS])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "intermediate_size"),
    [
        (1, 5, 1, 32, 16),
        (17, 5, 3, 100, 37),  # nothing divisible, rows of weights not 16-byte aligned
        (40, 4, 2, 96, 64),  # many rows per expert
        (33, 96, 4, 48, 24),
        (6, 2, 2, 512, 300),  # weights above the small size
        (24, 2, 2, 512, 300),
    ],
)
def test_matches_oracle(
    dtype: torch.dtype,
    activation: Activation,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
) -> None:
    weights = make_weights(num_experts, hidden_size, intermediate_size, dtype=dtype)
    hidden = make_hidden(num_tokens, hidden_size, dtype)
    ids, routing = make_routing(num_tokens, num_experts, top_k, invalid_fraction=0.1, seed=3)
    biases = {"gate_up_bias": weights.gate_up_bias, "down_bias": weights.down_bias}
    arguments = (weights.gate_up, weights.down)
    actual = run_expert_ffn(
        hidden, routing, *arguments, tile(ids, num_experts), activation=activation, **biases
    )
    expected = reference_moe_ffn(hidden, ids, routing, *arguments, activation=activation, **biases)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 130])
@pytest.mark.parametrize("shape", [(64, 48), (900, 300)])
def test_every_way_to_multiply_is_exact(
    dtype: torch.dtype, num_rows: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Integers within the dtype's exact range in every path; small blocks, to cross their borders.
    monkeypatch.setattr(torch_executor, "_WIDEN_BLOCK_WEIGHTS", 10_000)
    generator = torch.Generator().manual_seed(1)
    exact_weight = torch.randint(-1, 2, (3, *shape), generator=generator).double()
    exact_x = torch.randint(-1, 2, (num_rows + 1, shape[1]), generator=generator).double()
    weight, x = exact_weight.to(dtype), exact_x.to(dtype)
    row_counts = np.array([1, 0, num_rows])
    for fast in (True, False):
        monkeypatch.setattr(torch_executor, "_has_fast_gemm", lambda _, fast=fast: fast)
        actual = torch_executor._multiply_slots(x, weight, row_counts)
        exact = torch.cat(
            [x[:1].double() @ weight[0].double().t(), x[1:].double() @ weight[2].double().t()]
        )
        assert torch.equal(actual, exact.to(dtype))


def test_slots_without_pairs_and_padding_are_never_read() -> None:
    weights = make_weights(6, 32, 16)
    hidden = make_hidden(9, 32, torch.float32)
    ids, routing = make_routing(9, 3, 2, seed=5)
    ids[4] = -1  # a token without a pair
    expected = reference_moe_ffn(
        hidden, ids, routing, weights.gate_up, weights.down, activation=SILU
    )
    hidden[4] = torch.nan
    routing[4] = torch.nan
    for tensor in weights:
        tensor[3:] = torch.nan
    for _ in range(2):  # the second call reuses memory the first left dirty
        torch.full((1 << 16,), torch.nan)
        actual = run_expert_ffn(
            hidden, routing, weights.gate_up, weights.down, tile(ids, 6), activation=SILU
        )
        assert_close(actual, expected, torch.float32)
        assert torch.equal(actual[4], torch.zeros(32))


def test_rows_the_plan_promised_but_the_routing_lacks_are_padding() -> None:
    # A routing with fewer pairs than the schedule: sentinels lie between valid rows.
    schedule = TileSchedule.from_pair_counts(np.array([20, 3], np.int32), 16)
    ids = torch.tensor([[0, 1], [0, 1]])
    slots = np.arange(2, dtype=np.int32)
    tiles, counts = PairTiles.select(schedule, ids.numpy(), slots, np.zeros_like(slots))
    assert counts.tolist() == [2, 2]
    weights = make_weights(2, 32, 16)
    hidden = make_hidden(2, 32, torch.float32)
    routing = torch.tensor([[0.3, 0.7], [0.5, 0.5]])
    actual = run_expert_ffn(hidden, routing, weights.gate_up, weights.down, tiles, activation=SILU)
    expected = reference_moe_ffn(
        hidden, ids, routing, weights.gate_up, weights.down, activation=SILU
    )
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("top_k", range(1, 17))
def test_cancelling_pairs_are_summed_in_fp32_in_the_order_of_k(top_k: int) -> None:
    # Expert e multiplies by 2^e or -2^e: partial sums cancel and need more than 16 bits.
    num_experts = 16
    scale = torch.tensor([(-1.0) ** e * 2.0**e for e in range(num_experts)])
    gate_up = torch.stack([torch.eye(8), torch.eye(8)]).flatten(0, 1).expand(num_experts, 16, 8)
    down = scale[:, None, None] * torch.eye(8)
    hidden = torch.ones(4, 8, dtype=torch.bfloat16)
    ids, _ = make_routing(4, num_experts, top_k, seed=top_k)
    routing = torch.full((4, top_k), 1.0) + 2.0**-12
    actual = run_expert_ffn(
        hidden,
        routing,
        gate_up.to(torch.bfloat16),
        down.to(torch.bfloat16),
        tile(ids, num_experts),
        activation=Activation(kind="none"),
    )
    expected = torch.zeros(4, 8)
    for k in range(top_k):
        expected += (routing[:, k] * scale[ids[:, k].long()])[:, None]
    assert torch.equal(actual, expected)


def test_repeated_calls_are_bitwise_equal() -> None:
    weights = make_weights(8, 64, 32, dtype=torch.bfloat16)
    hidden = make_hidden(50, 64, torch.bfloat16)
    ids, routing = make_routing(50, 8, 4, skew=1.0)
    runs = [
        run_expert_ffn(
            hidden, routing, weights.gate_up, weights.down, tile(ids, 8, tile_m), activation=SILU
        )
        for tile_m in (16, 16, 1, 64)
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_tiles_of_another_routing_are_rejected() -> None:
    weights = make_weights(4, 32, 16)
    ids, routing = make_routing(3, 4, 2)
    hidden = make_hidden(3, 32, torch.float32)
    for tiles in (tile(ids[:2], 4), tile(ids, 5)):
        with pytest.raises(ShapeError, match="tiles hold"):
            run_expert_ffn(hidden, routing, weights.gate_up, weights.down, tiles, activation=SILU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_dense_ffn_matches_oracle(dtype: torch.dtype, num_tokens: int) -> None:
    weights = make_weights(1, 96, 40, dtype=dtype)
    hidden = make_hidden(num_tokens, 96, dtype)
    actual = run_dense_ffn(hidden, weights.gate_up[0], weights.down[0], activation=SILU)
    expected = reference_gated_ffn(hidden, weights.gate_up[0], weights.down[0], activation=SILU)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, dtype)
