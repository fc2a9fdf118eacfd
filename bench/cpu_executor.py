"""The torch executor against the experts implementations of transformers, on the same inputs.

The ratio is ours over the faster of `eager` and `grouped_mm`, the median of paired rounds. For
small inputs `batched_mm`, which copies the weights of every pair, is shown too.

Run: python -m bench.cpu_executor [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from afore_kernels.config import Activation
from afore_kernels.gemm.ffn import moe_ffn
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.testing import ExpertWeights, assert_close, make_routing, make_weights
from bench.harness import hardware_line, paired_ratio, time_paired, write_json

BASELINES = ("eager", "grouped_mm", "batched_mm")
# batched_mm copies the weights of every pair; beyond this it would need gigabytes.
BATCHED_MM_MAX_BYTES = 1 << 28
# The oracle takes one token at a time.
CHECKED_TOKENS = 16


class Shape(NamedTuple):
    """One model's experts and the tokens of a microbatch."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_tokens: int


TINY = ("tiny-glm-moe", 128, 64, 32, 4)
QWEN = ("qwen3-30b-a3b", 2048, 768, 128, 8)
SHAPES = [Shape(*TINY, n) for n in (1, 16, 64)] + [Shape(*QWEN, n) for n in (16, 64, 256)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_experts(shape: Shape, weights: ExpertWeights) -> Any:
    """Wrap the weights in transformers' experts module, sharing their memory."""
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(weights.gate_up, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(weights.down, requires_grad=False)
    return experts


def measure(
    shape: Shape, dtype: torch.dtype, weights: ExpertWeights, rounds: int
) -> dict[str, Any]:
    """Time ours and the baselines on one shape; check ours against the fp32 oracle."""
    hidden = torch.randn(shape.num_tokens, shape.hidden_size).to(dtype)
    expert_ids, routing_weights = make_routing(
        shape.num_tokens, shape.num_experts, shape.top_k, skew=0.5, seed=shape.num_tokens
    )
    expert_ids = expert_ids.long()
    experts = build_experts(shape, weights)

    def baseline(name: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            experts.config._experts_implementation = name
            return experts(hidden, expert_ids, routing_weights)

        return call

    pair_bytes = 3 * shape.hidden_size * shape.intermediate_size * dtype.itemsize
    skip_batched = shape.num_tokens * shape.top_k * pair_bytes > BATCHED_MM_MAX_BYTES
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        name: baseline(name) for name in BASELINES if not (name == "batched_mm" and skip_batched)
    }
    candidates["ours"] = lambda: moe_ffn(
        hidden,
        expert_ids,
        routing_weights,
        weights.gate_up,
        weights.down,
        activation=Activation(),
    )
    checked = slice(CHECKED_TOKENS)
    expected = reference_moe_ffn(
        hidden[checked],
        expert_ids[checked],
        routing_weights[checked],
        weights.gate_up,
        weights.down,
        activation=Activation(),
        dtype=torch.float32,
    )
    outputs = {name: call()[checked].float() for name, call in candidates.items()}
    assert_close(outputs["ours"], expected, dtype)
    errors = {name: float((out - expected).abs().max()) for name, out in outputs.items()}
    samples = time_paired(candidates, rounds=rounds)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    best = min(("eager", "grouped_mm"), key=medians.__getitem__)
    return {
        **shape._asdict(),
        "dtype": str(dtype).removeprefix("torch."),
        "median_us": medians,
        "max_error": errors,
        "best_baseline": best,
        "ratio": paired_ratio(samples["ours"], samples[best]),
    }


def print_row(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    times = "  ".join(
        f"{row['median_us'][name]:>10.0f}" if name in row["median_us"] else " " * 9 + "-"
        for name in (*BASELINES, "ours")
    )
    best = row["best_baseline"]
    print(
        f"{row['name']:<14} {row['num_tokens']:>6} {row['dtype']:<8}  {times}  "
        f"{row['ratio']:>5.2f} {best:<10}  "
        f"{row['max_error']['ours']:.1e} / {row['max_error'][best]:.1e}",
        flush=True,
    )


def main() -> None:
    """Measure every shape and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="the tiny model only, fewer rounds")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)

    print(hardware_line())
    print(
        f"{'model':<14} {'tokens':>6} {'dtype':<8}  "
        + "  ".join(f"{name:>10}" for name in (*BASELINES, "ours"))
        + "  ratio to best       max error ours / best    (median us, paired)"
    )
    rows = []
    for model in (TINY,) if arguments.quick else (TINY, QWEN):
        name, hidden_size, intermediate_size, num_experts, _ = model
        for dtype in DTYPES.values():
            weights = make_weights(num_experts, hidden_size, intermediate_size, dtype=dtype)
            for shape in (shape for shape in SHAPES if shape.name == name):
                rounds = (100 if arguments.quick else 300) if model is TINY else 7
                rows.append(measure(shape, dtype, weights, rounds))
                print_row(rows[-1])
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
