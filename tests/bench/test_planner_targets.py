"""The order of the targets, what they count, and that those that count are past the start."""

from __future__ import annotations

import numpy as np
import pytest

from afore_kernels.errors import ConfigError
from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.cost import CostModel
from afore_kernels.runtime.placement import LayerState
from afore_kernels.runtime.planner import Limits, plan_microbatch
from afore_kernels.traces import ContinuousBatching, RoutingTrace
from bench import planner_targets
from bench.planner_targets import SYNTHETIC, WARMUP_STEPS, TargetSequence, load_sequences
from bench.synthetic_routing import make_workload

NUM_EXPERTS = 7


def make_trace(num_layers=3):
    """Build one request of 7 tokens that repeats: token i takes experts i + layer and 3 after."""
    token, layer, choice = np.ogrid[:NUM_EXPERTS, :num_layers, :2]
    return RoutingTrace(
        ids=((token + layer + 3 * choice) % NUM_EXPERTS).astype(np.uint8),
        offsets=np.array([0, NUM_EXPERTS]),
        domain=np.zeros(1, np.uint8),
        domain_names=np.array(["d0"]),
        num_experts=NUM_EXPERTS,
    )


def make_sequence(*, num_layers, num_targets, concurrency=1):
    batches = ContinuousBatching(make_trace(), concurrency=concurrency)
    return TargetSequence.from_batches(
        "test", batches, num_layers=num_layers, num_targets=num_targets
    )


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_step_runs_all_layers_before_the_next(num_layers):
    sequence = make_sequence(num_layers=num_layers, num_targets=8)
    index = np.arange(len(sequence.demand))
    np.testing.assert_array_equal(sequence.layer, index % num_layers)
    first_step = next(iter(ContinuousBatching(make_trace(), concurrency=1)))
    expert = (first_step[0, 0, 0] + index // num_layers + index % num_layers) % NUM_EXPERTS
    expected = np.zeros_like(sequence.demand)
    expected[index, expert] = expected[index, (expert + 3) % NUM_EXPERTS] = 1
    np.testing.assert_array_equal(sequence.demand, expected)


@pytest.mark.parametrize("num_targets", [1, 8, 9])
def test_as_many_targets_count_as_asked_for(num_targets):
    sequence = make_sequence(num_layers=2, num_targets=num_targets, concurrency=4)
    assert sequence.num_warmup == 2 * WARMUP_STEPS
    assert sequence.demand.shape == (2 * WARMUP_STEPS + num_targets, NUM_EXPERTS)
    assert sequence.layer.shape == (2 * WARMUP_STEPS + num_targets,)
    assert sequence.demand.dtype == np.int32
    assert set(sequence.demand.sum(axis=1)) == {4 * 2}
    assert (sequence.num_layers, sequence.num_experts) == (2, NUM_EXPERTS)


def test_first_keeps_the_warm_up_and_the_order():
    sequence = make_sequence(num_layers=2, num_targets=9)
    first = sequence.first(3)
    assert (first.name, first.num_warmup) == ("test", 2 * WARMUP_STEPS)
    np.testing.assert_array_equal(first.demand, sequence.demand[: 2 * WARMUP_STEPS + 3])
    np.testing.assert_array_equal(first.layer, sequence.layer[: 2 * WARMUP_STEPS + 3])


def test_targets_that_count_start_from_a_steady_state():
    batches = make_workload(SYNTHETIC, concurrency=64, num_layers=2, num_requests=64)
    sequence = TargetSequence.from_batches("test", batches, num_layers=2, num_targets=48)
    placement = PrimaryPlacement(sequence.num_experts, 8, redundant_slots=2)
    limits, cost = Limits(16, 16, 0), CostModel(50.0, 0.0, 50.0, 2000.0)
    states = [LayerState.initial(placement) for _ in range(2)]
    replicas = []
    for index, (demand, layer) in enumerate(zip(sequence.demand, sequence.layer)):
        planned = plan_microbatch(demand, states[layer], placement, limits, cost, sequence=index)
        states[layer] = planned.state
        replicas.append(np.count_nonzero(planned.slot_expert >= 0))
    # The slots start empty and fill over many targets: to 14 or 15 of 16 in those that count.
    assert max(replicas[:2]) < 0.5 * replicas[-1]
    assert min(replicas[sequence.num_warmup :]) > 0.9 * replicas[-1]


@pytest.fixture
def small(monkeypatch):
    """Few tokens and layers, so that the workloads are drawn in milliseconds."""
    monkeypatch.setattr(planner_targets, "NUM_TOKENS", 4)
    monkeypatch.setattr(planner_targets, "NUM_LAYERS", 2)


@pytest.mark.usefixtures("small")
def test_the_synthetic_workload_is_always_there_and_always_the_same():
    (sequence,) = load_sequences(None, 5)
    assert sequence.name == SYNTHETIC
    assert sequence.demand.shape == (2 * WARMUP_STEPS + 5, 128)
    assert set(sequence.demand.sum(axis=1)) == {4 * 8}
    (again,) = load_sequences(None, 5)
    np.testing.assert_array_equal(again.demand, sequence.demand)


@pytest.mark.usefixtures("small")
def test_a_recorded_workload_comes_first_under_the_name_of_its_file(tmp_path):
    trace = make_trace()
    path = tmp_path / "recorded.npz"
    arrays = {name: getattr(trace, name) for name in ("ids", "offsets", "domain", "domain_names")}
    np.savez(path, **arrays, num_experts=np.int64(NUM_EXPERTS))
    recorded, synthetic = load_sequences(path, 5)
    assert (recorded.name, synthetic.name) == ("recorded", SYNTHETIC)
    assert recorded.demand.shape == (2 * WARMUP_STEPS + 5, NUM_EXPERTS)
    assert set(recorded.demand.sum(axis=1)) == {4 * 2}
    assert recorded.num_layers == synthetic.num_layers == 2


@pytest.mark.usefixtures("small")
def test_a_missing_trace_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read trace .*nothing\.npz"):
        load_sequences(tmp_path / "nothing.npz", 5)
