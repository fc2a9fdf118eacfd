"""Statistics by hand, each term of the score alone, and what the committed fit claims."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.traces import RoutingTrace
from bench.routing_statistics import (
    LAGS,
    coefficient_of_variation,
    count_experts,
    domain_total_variation,
    gini,
    lag_correlation,
    measure_statistics,
)
from bench.synthetic import FITTED_STATISTICS, START, STATED, draw_like, fit_scales, report_fit
from bench.synthetic_routing import (
    FITTED,
    WORKLOADS,
    ScoreScales,
    SyntheticRouting,
    autoregressive,
    make_workload,
)

FIT = Path(__file__).parents[2] / "bench" / "results" / "synthetic_128x8_fit.json"
NO_TERMS = ScoreScales(popularity=0, domain=0, request=0, hidden=0, hidden_size=4, memory_tokens=1)
# So much larger than the Gumbel noise that it alone decides.
DECISIVE = 1e6


def make_trace(requests, *, domain=None, num_experts=2):
    """Build a trace of requests given as [tokens][layers][top_k]."""
    domain = np.zeros(len(requests), np.uint8) if domain is None else np.array(domain, np.uint8)
    return RoutingTrace(
        ids=np.concatenate([np.array(request, np.uint8) for request in requests]),
        offsets=np.cumsum([0, *map(len, requests)]).astype(np.int64),
        domain=domain,
        domain_names=np.array([f"d{i}" for i in range(domain.max() + 1)]),
        num_experts=num_experts,
    )


def make_routing(scales=FITTED, **changes):
    shape = {"num_experts": 16, "top_k": 4, "num_layers": 3, "num_domains": 2, "seed": 1}
    return SyntheticRouting(**{**shape, **changes}, scales=scales)


def draw(scales, lengths=(40, 30, 20), domain=(0, 1, 0), **changes):
    return make_routing(scales, **changes).draw(np.array(domain), np.array(lengths))


def sets_of(trace):
    """Return the chosen experts in increasing order, [requests][tokens, layers, top_k]."""
    return np.split(np.sort(trace.ids, axis=2), trace.offsets[1:-1])


def test_spread_of_counts():
    counts = np.array([[1, 3], [2, 2], [0, 4]])
    np.testing.assert_allclose(coefficient_of_variation(counts), [0.5, 0, 1])
    np.testing.assert_allclose(gini(counts), [0.25, 0, 0.5])
    # Three quarters of all on one of four; order does not matter.
    np.testing.assert_allclose(gini(np.array([0, 6, 1, 1])), (3 * 6 + 1 - 1) / (4 * 8))


def test_pairs_are_counted_per_layer():
    # Two tokens: layer 0 chooses {0, 2} twice, layer 1 {1, 3} and {1, 0}.
    ids = np.array([[[0, 2], [1, 3]], [[2, 0], [1, 0]]], np.uint8)
    assert count_experts(ids, 4).tolist() == [[2, 0, 2, 0], [1, 2, 0, 1]]


def test_domain_total_variation():
    # Shares of expert 0: 1 in the one token of domain 0, 1/3 in domain 1, 1/2 overall.
    trace = make_trace([[[[0]]], [[[1]], [[1]], [[0]]]], domain=[0, 1])
    np.testing.assert_allclose(domain_total_variation(trace), [[1 / 2], [1 / 6]])


def test_demand_that_alternates_is_anticorrelated():
    trace = make_trace([[[[0]], [[1]]] * 50])
    assert lag_correlation(trace, (1, 2), concurrency=1, num_steps=101) == pytest.approx([-1, 1])


def test_deviations_are_from_the_mean_of_the_trace():
    # 20 steps lie within one of two long requests: the mean of the steps would leave nothing.
    trace = make_trace([[[[0]]] * 1000, [[[1]]] * 1000])
    assert lag_correlation(trace, (1, 9), concurrency=1, num_steps=20) == pytest.approx([1, 1])


def test_constant_demand_has_no_correlation():
    assert np.isnan(lag_correlation(make_trace([[[[0]]] * 3]), (1,), concurrency=2, num_steps=9))


@pytest.mark.parametrize("lag", [0, 9])
def test_lag_must_fit_into_the_steps(lag):
    with pytest.raises(ConfigError, match="num_steps=9"):
        lag_correlation(make_trace([[[[0]]] * 3]), (lag,), num_steps=9)


def test_statistics_of_a_small_trace():
    # Two layers alike; the overlap of 1 between the requests ({1, 2} and {0, 1}) is not counted.
    first = [[[0, 1], [0, 1]], [[1, 2], [1, 2]]]
    second = [[[0, 1], [1, 0]], [[1, 0], [0, 1]]]
    statistics = measure_statistics(make_trace([first, second], num_experts=3))
    assert statistics["consecutive_overlap"] == pytest.approx((1 + 2) / 2)
    # Pairs per expert are 3, 4 and 1 of 4 tokens.
    assert statistics["independent_overlap"] == pytest.approx((9 + 16 + 1) / 16)
    assert statistics["cv"] == pytest.approx(np.std([3, 4, 1]) / (8 / 3))
    assert statistics["gini"] == pytest.approx((2 * 4 - 2 * 1) / (3 * 8))
    assert statistics["domain_tv_max"] == 0
    assert set(STATED) | set(FITTED_STATISTICS) <= set(statistics)


def test_information_between_layers_is_in_bits():
    alike = [[[e], [e]] for e in (0, 1, 2, 3)]
    crossed = [[[a], [b]] for a in (0, 1) for b in (0, 1)]
    mostly = [[[0], [0]], [[0], [0]], [[0], [0]], [[0], [1]]]
    mostly += [[[1], [1]], [[1], [1]], [[1], [1]], [[1], [0]]]

    def bits(tokens):
        return measure_statistics(make_trace([tokens], num_experts=4))["adjacent_layer_bits"]

    assert bits(alike) == pytest.approx(2)
    assert bits(crossed) == pytest.approx(0, abs=1e-12)
    assert bits(mostly) == pytest.approx(1 + 0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))


@pytest.mark.parametrize("requests", [[[[[0]], [[1]]]], [[[[0], [1]]]]], ids=["layer", "token"])
def test_statistics_need_two_layers_and_two_tokens(requests):
    with pytest.raises(ShapeError, match="two layers"):
        measure_statistics(make_trace(requests))


def test_draw_has_distinct_experts_and_the_requests_given():
    trace = draw(FITTED)
    assert trace.ids.shape == (90, 3, 4)
    assert trace.offsets.tolist() == [0, 40, 70, 90]
    assert trace.domain.tolist() == [0, 1, 0]
    assert (np.diff(np.sort(trace.ids, axis=2).astype(int), axis=2) > 0).all()
    assert set(np.unique(trace.ids)) == set(range(16))


def test_draw_repeats_and_a_longer_one_begins_alike():
    trace = draw(FITTED)
    np.testing.assert_array_equal(draw(FITTED).ids, trace.ids)
    np.testing.assert_array_equal(draw(FITTED, (40, 30), (0, 1)).ids, trace.ids[:70])
    assert (draw(FITTED, seed=2).ids != trace.ids).mean() > 0.5


def test_every_expert_of_256_can_be_drawn():
    trace = draw(NO_TERMS, num_experts=256, top_k=256, num_layers=1)
    np.testing.assert_array_equal(np.sort(trace.ids[-1, 0]), np.arange(256))


def test_without_terms_experts_are_uniform():
    # 20,000 draws of 16: a share of 1/16 has a standard deviation of 0.0017.
    trace = draw(NO_TERMS, (20_000,), (0,), top_k=1, num_layers=1)
    np.testing.assert_allclose(count_experts(trace.ids, 16)[0] / 20_000, 1 / 16, atol=0.008)


def test_score_is_the_logarithm_of_a_weight():
    # So the log odds of any two experts are proportional to the scale, whatever the others are.
    def log_odds(scale):
        scales = replace(NO_TERMS, popularity=scale)
        trace = draw(scales, (40_000,), (0,), top_k=1, num_layers=1)
        counts = count_experts(trace.ids, 16)[0]
        return np.log(counts / counts.max())

    odds, doubled = log_odds(0.6), log_odds(1.2)
    frequent = doubled > -3
    assert odds[frequent].min() < -1
    np.testing.assert_allclose(doubled[frequent], 2 * odds[frequent], atol=0.2)


def test_scale_is_the_deviation_of_the_read_out_whatever_its_size():
    # An h that never changes is a request term.
    lengths, domain = [20] * 200, [0] * 200
    slow = replace(NO_TERMS, hidden=2, hidden_size=1000, memory_tokens=1e6)
    overlap = [
        measure_statistics(draw(scales, lengths, domain))["consecutive_overlap"]
        for scales in (slow, replace(NO_TERMS, request=2), replace(NO_TERMS, request=4))
    ]
    assert overlap[0] == pytest.approx(overlap[1], abs=0.1)
    assert overlap[2] > overlap[1] + 0.5


def test_popularity_is_one_choice_per_layer():
    first, second, third = sets_of(draw(replace(NO_TERMS, popularity=DECISIVE)))
    for request in (first, second, third):
        np.testing.assert_array_equal(request, np.broadcast_to(first[0], request.shape))
    assert (first[0, 0] != first[0, 1]).any()


def test_domain_term_is_shared_by_its_requests():
    first, second, third = sets_of(draw(replace(NO_TERMS, domain=DECISIVE)))
    np.testing.assert_array_equal(first[:20], third)
    np.testing.assert_array_equal(second, np.broadcast_to(second[0], second.shape))
    assert (first[0] != second[0]).any()


def test_request_term_lasts_for_the_request():
    first, _, third = sets_of(draw(replace(NO_TERMS, request=DECISIVE)))
    np.testing.assert_array_equal(first, np.broadcast_to(first[0], first.shape))
    assert (first[0] != third[0]).any()


def test_hidden_state_ties_tokens_and_layers():
    scales = replace(NO_TERMS, hidden=DECISIVE, hidden_size=1, memory_tokens=1e-3)
    (request,) = sets_of(draw(scales, (200,), (0,)))
    # One component: its sign alone decides, in all layers at once.
    positive = (request == request[0]).all((1, 2))
    assert len(np.unique(request.reshape(200, -1), axis=0)) == 2
    assert 70 < positive.sum() < 130
    # Without memory the sign changes about every second token, with it hardly ever.
    assert 70 < np.count_nonzero(np.diff(positive)) < 130
    (slow,) = sets_of(draw(replace(scales, memory_tokens=1e6), (200,), (0,)))
    assert len(np.unique(slow.reshape(200, -1), axis=0)) == 1


def test_hidden_state_is_stationary_and_forgets_exponentially():
    scales = replace(NO_TERMS, hidden_size=2000, memory_tokens=3)
    hidden = autoregressive(7, scales, np.random.default_rng(0))
    assert hidden.shape == (7, 2000)
    np.testing.assert_allclose(hidden.var(axis=1), 1, atol=0.15)
    correlation = [np.corrcoef(hidden[0], row)[0, 1] for row in hidden]
    np.testing.assert_allclose(correlation, np.exp(-np.arange(7) / 3), atol=0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"popularity": -1},
        {"request": float("nan")},
        {"domain": float("inf")},
        {"hidden_size": 0},
        {"memory_tokens": 0},
    ],
)
def test_scales_out_of_range(change):
    with pytest.raises(ConfigError, match=r"scales must be finite|must be positive"):
        replace(FITTED, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 0},
        {"top_k": 17},
        {"num_experts": 257},
        {"num_layers": 0},
        {"num_domains": 0},
        {"seed": -1},
    ],
)
def test_routing_out_of_range(change):
    with pytest.raises(ConfigError):
        make_routing(**change)


@pytest.mark.parametrize(
    ("lengths", "domain", "error"),
    [
        ((), (), ShapeError),
        ((3,), (0, 0), ShapeError),
        ((3, 0), (0, 0), ShapeError),
        ((3, 3), (0, 2), ConfigError),
        ((3, 3), (0, -1), ConfigError),
    ],
)
def test_requests_out_of_range(lengths, domain, error):
    with pytest.raises(error):
        draw(FITTED, lengths, domain)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_is_128_experts_top_8(name):
    batching = make_workload(name, concurrency=6, num_layers=2, num_requests=24)
    steps = list(itertools.islice(batching, 5))
    assert {step.shape for step in steps} == {(6, 2, 8)}
    assert batching.trace.num_experts == 128
    lengths = np.diff(batching.trace.offsets)
    assert lengths.min() >= 30
    assert lengths.max() <= 511


def test_workloads_admit_their_domains():
    def shares(name):
        trace = make_workload(name, concurrency=1, num_layers=1, num_requests=200).trace
        return np.bincount(trace.domain, minlength=4) / 200

    # The standard deviation of a share is at most 0.034.
    for name, mix in WORKLOADS.items():
        np.testing.assert_allclose(shares(name), mix.shares, atol=0.12)
    assert shares("synthetic-128x8-single")[0] == 1


def test_only_drift_drifts():
    drifting = [
        name
        for name in WORKLOADS
        if make_workload(name, concurrency=1, num_layers=1).drift_steps is not None
    ]
    assert drifting == ["synthetic-128x8-drift"]


def test_workload_errors():
    with pytest.raises(ConfigError, match="synthetic-128x8-even"):
        make_workload("glm-4.5-air", concurrency=1)
    with pytest.raises(ConfigError, match="num_requests"):
        make_workload("synthetic-128x8-even", concurrency=1, num_requests=0)
    with pytest.raises(ConfigError, match="seed"):
        make_workload("synthetic-128x8-even", concurrency=1, seed=-1)


def test_fit_comes_closer_to_a_trace_with_other_scales():
    known = replace(FITTED, popularity=0.4, request=3.0, memory_tokens=2.5)
    rng = np.random.default_rng(0)
    trace = draw(known, rng.integers(30, 60, 80), rng.integers(0, 2, 80), num_layers=2)
    target = measure_statistics(trace)

    def distance(scales):
        drawn = measure_statistics(draw_like(trace, scales, seed=0))
        return sum((drawn[name] / target[name] - 1) ** 2 for name in FITTED_STATISTICS[:2])

    fitted = fit_scales(trace, (2,), num_layers=2, num_rounds=1)
    assert distance(fitted) < 0.5 * distance(replace(FITTED, **START))


def test_report_has_a_row_per_statistic_and_a_range_per_shape():
    trace = draw(FITTED, (40,) * 8, (0, 1) * 4)
    report = report_fit(trace, FITTED, seeds=(1, 2))
    assert set(report) == set(measure_statistics(trace))
    for row in report.values():
        for shape in ("synthetic_16x4", "synthetic_128x8"):
            mean, low, high = row[shape]
            assert low <= mean <= high
    # Seed 1 has drawn the trace itself.
    recorded = report["cv"]["recorded"]
    assert recorded in report["cv"]["synthetic_16x4"][1:]


def test_constants_are_those_of_the_report():
    document = json.loads(FIT.read_text())
    assert document["scales"] == asdict(FITTED)
    for name in FITTED_STATISTICS:
        row = document["statistics"][name]
        assert row["is_fitted"]
        assert row["synthetic_32x4"][0] == pytest.approx(row["recorded"], rel=0.2)
    assert {f"lag_correlation_{lag}" for lag in LAGS} <= set(document["statistics"])
