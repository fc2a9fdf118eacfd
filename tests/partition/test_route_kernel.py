"""The routing kernel against its torch twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from afore_kernels.errors import ShapeError
from afore_kernels.partition import route
from afore_kernels.partition.demand_buffer import DemandBuffer
from afore_kernels.partition.route import CHUNK_H, MAX_COLUMNS, route_tokens
from afore_kernels.partition.router import RoutedTokens, Router, route_tokens_reference
from tests.guarded import Guarded

pytestmark = pytest.mark.interpreter

SOFTMAX = {"num_experts": 12, "top_k": 3}
SIGMOID = {"num_experts": 12, "top_k": 3, "score": "sigmoid", "has_correction_bias": True}
GROUPED = {**SIGMOID, "num_experts": 35, "num_groups": 5, "topk_groups": 2, "normalise": True}
FORMULAS = [
    pytest.param(SOFTMAX, id="softmax"),
    pytest.param({**SOFTMAX, "normalise": True}, id="softmax-normalised"),
    pytest.param({**SOFTMAX, "normalise": True, "has_logits_bias": True}, id="logits-bias"),
    pytest.param({**SIGMOID, "routed_scaling_factor": 2.5}, id="sigmoid"),
    pytest.param({**SIGMOID, "num_groups": 4, "topk_groups": 4}, id="all-groups"),
    pytest.param({**GROUPED, "routed_scaling_factor": 2.5}, id="some-groups"),
]


class Gate(NamedTuple):
    """Arguments of `route_tokens`."""

    hidden: torch.Tensor
    weight: torch.Tensor
    router: Router
    biases: dict[str, torch.Tensor]

    def route(self, **options: Any) -> RoutedTokens:
        return route_tokens(*self[:3], **self.biases, **options)

    def check(self, actual: RoutedTokens) -> None:
        expected = route_tokens_reference(*self[:3], **self.biases)
        assert torch.equal(actual.expert_ids, expected.expert_ids)
        assert torch.equal(actual.demand, expected.demand)
        assert actual.expert_ids.dtype == actual.demand.dtype == torch.int32
        torch.testing.assert_close(actual.routing_weights, expected.routing_weights)


def make_gate(
    num_tokens: int,
    hidden_size: int,
    options: dict[str, Any],
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    is_integer: bool = True,
) -> Gate:
    """Draw a gate; integers have the same logits in any order of summation, and many ties."""
    router = Router(**options)
    generator = torch.Generator().manual_seed(num_tokens + hidden_size)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        if is_integer:
            values = torch.randint(-1, 2, shape, generator=generator).float()
        else:
            values = torch.randn(*shape, generator=generator)
        return (values * scale).to(dtype).to(device)

    biases = {}
    if router.has_logits_bias:
        biases["logits_bias"] = draw(router.num_experts, scale=0.5)
    if router.has_correction_bias:
        biases["correction_bias"] = draw(router.num_experts, scale=0.125)
    return Gate(
        draw(num_tokens, hidden_size, scale=0.0625),
        draw(router.num_experts, hidden_size, scale=1.0),
        router,
        biases,
    )


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Poison what `route_tokens` allocates, put canaries around it and check them."""
    buffers: list[Guarded] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffers.append(Guarded(*shape, dtype=dtype, device=str(device)))
        return buffers[-1].tensor

    monkeypatch.setattr(route.torch, "empty", empty)
    yield
    assert buffers
    for buffer in buffers:
        buffer.check_guards()


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("num_tokens", [16, 37])
@pytest.mark.parametrize("options", FORMULAS)
def test_formula(kernel_device: str, options: dict[str, Any], num_tokens: int) -> None:
    gate = make_gate(num_tokens, 100, options, kernel_device)
    gate.check(gate.route())


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 1), (5, 5), (96, 1), (160, 6), (384, 8), (MAX_COLUMNS, 2)]
)
def test_number_of_experts(kernel_device: str, num_experts: int, top_k: int) -> None:
    options = {"num_experts": num_experts, "top_k": top_k}
    gate = make_gate(17, 40, options, kernel_device)
    gate.check(gate.route())


@pytest.mark.parametrize("top_k", [1, 2, 7, 8, 16, 20])
def test_top_k(kernel_device: str, top_k: int) -> None:
    gate = make_gate(18, 40, {"num_experts": 20, "top_k": top_k}, kernel_device)
    gate.check(gate.route())


@pytest.mark.parametrize(("num_experts", "num_groups", "topk_groups"), [(36, 3, 1), (22, 11, 10)])
def test_group_sizes(
    kernel_device: str, num_experts: int, num_groups: int, topk_groups: int
) -> None:
    options = {**SIGMOID, "num_experts": num_experts}
    options |= {"num_groups": num_groups, "topk_groups": topk_groups}
    gate = make_gate(40, 64, options, kernel_device)
    gate.check(gate.route())


@pytest.mark.parametrize("hidden_size", [1, 577, CHUNK_H, 2 * CHUNK_H, 3 * CHUNK_H + 1])
def test_hidden_size(kernel_device: str, hidden_size: int) -> None:
    gate = make_gate(19, hidden_size, GROUPED, kernel_device)
    gate.check(gate.route())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(kernel_device: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    gate = make_gate(21, 600, GROUPED, kernel_device, dtype=dtype, is_integer=False)
    gate = gate._replace(weight=gate.weight.to(weight_dtype))
    gate.check(gate.route())


def test_strided_arguments(kernel_device: str) -> None:
    gate = make_gate(20, 100, {**GROUPED, "has_logits_bias": True}, kernel_device)

    def every_second(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*tensor.shape, 2), torch.nan, device=kernel_device)
        wide[..., 0] = tensor
        return wide[..., 0]

    strided = Gate(
        gate.hidden.T.contiguous().T,
        every_second(gate.weight),
        gate.router,
        {name: every_second(bias) for name, bias in gate.biases.items()},
    )
    gate.check(strided.route())
    sliced = every_second(gate.hidden)
    gate.check(strided._replace(hidden=sliced, weight=gate.weight.T.contiguous().T).route())


@pytest.mark.parametrize("is_transposed", [False, True])
def test_offsets_past_int32(kernel_device: str, is_transposed: bool) -> None:
    gate = make_gate(18, 18, {"num_experts": 18, "top_k": 2}, kernel_device, dtype=torch.float16)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        stride = 2**31 // 17 + 1
        memory = torch.empty(17 * stride + 18, dtype=torch.float16, device=kernel_device)
        rows = memory.as_strided((18, 18), (stride, 1))
        rows = rows.T if is_transposed else rows
        return rows.copy_(tensor)

    gate.check(gate._replace(hidden=spread(gate.hidden)).route())
    gate.check(gate._replace(weight=spread(gate.weight)).route())


@pytest.mark.usefixtures("poisoned_outputs")
def test_no_tokens_publish_zeros(kernel_device: str) -> None:
    buffer = DemandBuffer.allocate(12, 0, kernel_device)
    buffer.record.fill_(7)
    routed = make_gate(0, 100, SOFTMAX, kernel_device).route(demand=buffer)
    assert routed.expert_ids.shape == routed.routing_weights.shape == (0, 3)
    assert buffer.record.tolist() == [0] * 12 + [8]


@pytest.mark.parametrize("options", [SOFTMAX, GROUPED])
def test_equal_logits_choose_the_lowest_ids(kernel_device: str, options: dict[str, Any]) -> None:
    gate = make_gate(33, 100, options, kernel_device)
    gate.hidden.zero_()
    for bias in gate.biases.values():
        bias.zero_()
    routed = gate.route()
    assert (routed.expert_ids == torch.arange(3, device=kernel_device)).all()
    assert routed.demand.tolist() == [33] * 3 + [0] * (gate.router.num_experts - 3)


# The interpreter computes with numpy, which warns where a device does not.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("options", FORMULAS)
def test_token_with_a_bad_logit_has_no_experts(
    kernel_device: str, options: dict[str, Any], bad: float
) -> None:
    gate = make_gate(20, 100, options, kernel_device)
    gate.weight.fill_(1.0)  # infinite logits, whose sigmoid is finite
    gate.hidden[[0, 17]] = bad
    routed = gate.route()
    gate.check(routed)
    assert (routed.expert_ids[[0, 17]] == -1).all()
    assert (routed.routing_weights[[0, 17]] == 0).all()
    assert routed.demand.sum() == 18 * 3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["logits_bias", "correction_bias"])
def test_bad_bias_leaves_no_token_an_expert(kernel_device: str, name: str) -> None:
    gate = make_gate(20, 100, {**GROUPED, "has_logits_bias": True}, kernel_device)
    gate.biases[name][34] = torch.nan
    routed = gate.route()
    gate.check(routed)
    assert (routed.expert_ids == -1).all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_sigmoids_that_underflow_have_weight_zero(kernel_device: str) -> None:
    gate = make_gate(3, 100, {**SIGMOID, "normalise": True}, kernel_device)
    gate.hidden.fill_(-2.0)
    gate.weight.fill_(1.0)
    routed = gate.route()
    gate.check(routed)
    assert not routed.routing_weights.any()


def test_launches_share_a_buffer(kernel_device: str) -> None:
    buffer = DemandBuffer.allocate(35, 40, kernel_device)
    for launch, num_tokens in enumerate([40, 0, 1, 17], start=1):
        gate = make_gate(num_tokens, 600, GROUPED, kernel_device)
        routed = gate.route(demand=buffer)
        gate.check(routed)
        assert routed.demand.data_ptr() == buffer.record.data_ptr()
        assert buffer.record[-1] == launch
        assert not buffer.totals.any()
        assert not buffer.arrivals.any()


def test_demand_stays_within_its_buffers(kernel_device: str) -> None:
    parts = [Guarded(size, dtype=torch.int32, device=kernel_device) for size in (36, 35, 3)]
    for part in parts:
        part.tensor.zero_()
    gate = make_gate(20, 600, GROUPED, kernel_device)
    gate.check(gate.route(demand=DemandBuffer(*(part.tensor for part in parts))))
    for part in parts:
        part.check_guards()


def test_other_tokens_do_not_change_a_token(kernel_device: str) -> None:
    gate = make_gate(37, 1100, SOFTMAX, kernel_device, is_integer=False)
    together = gate.route()
    for token in (0, 16, 36):
        alone = gate._replace(hidden=gate.hidden[token:][:1]).route()
        assert torch.equal(alone.expert_ids[0], together.expert_ids[token])
        assert torch.equal(alone.routing_weights[0], together.routing_weights[token])


def test_calls_repeat_bit_for_bit(kernel_device: str) -> None:
    gate = make_gate(20, 1100, GROUPED, kernel_device, is_integer=False)
    first, second = gate.route(), gate.route()
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.gpu
def test_captured_launch_follows_its_inputs(kernel_device: str) -> None:
    if kernel_device == "cpu":
        pytest.skip("needs a CUDA device")
    gate = make_gate(100, 1100, GROUPED, kernel_device)
    buffer = DemandBuffer.allocate(35, 100, kernel_device)
    gate.route(demand=buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = gate.route(demand=buffer)
    for _ in range(20):
        gate.hidden.copy_(gate.hidden.roll(1, dims=1))
        graph.replay()
        gate.check(routed)


def test_bad_gate_is_rejected(kernel_device: str) -> None:
    gate = make_gate(3, 8, SOFTMAX, kernel_device)
    with pytest.raises(ShapeError, match="weight must be"):
        gate._replace(weight=gate.weight[:, 1:]).route()


def test_buffer_of_another_router_is_rejected(kernel_device: str) -> None:
    gate = make_gate(3, 8, SOFTMAX, kernel_device)
    with pytest.raises(ShapeError, match="demand is for 13 experts"):
        gate.route(demand=DemandBuffer.allocate(13, 3, kernel_device))


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": MAX_COLUMNS + 1},
        # 17 groups of 17 pad to 32 groups of 32.
        {"num_experts": 289, "score": "sigmoid", "num_groups": 17, "topk_groups": 2},
    ],
)
def test_too_many_experts_are_rejected(kernel_device: str, options: dict[str, Any]) -> None:
    gate = make_gate(3, 8, {"top_k": 1, **options}, kernel_device)
    with pytest.raises(ShapeError, match="experts need 1024 columns"):
        gate.route()
