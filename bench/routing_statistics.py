"""Statistics of a routing trace: what the demand of an expert planner depends on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.traces import ContinuousBatching, RoutingTrace

FloatArray = npt.NDArray[np.floating]

LAGS = (1, 10, 50, 100)
# Few of the 522 recorded requests at once, or a batch could not differ much from their mean.
LAG_CONCURRENCY, LAG_STEPS = 64, 4000


def coefficient_of_variation(counts: npt.NDArray[np.number]) -> FloatArray:
    """Return standard deviation / mean along the last axis."""
    return np.asarray(counts.std(-1) / counts.mean(-1))


def gini(counts: npt.NDArray[np.number]) -> FloatArray:
    """Return the Gini coefficient along the last axis: 0 is equal, (n - 1) / n is all on one."""
    num = counts.shape[-1]
    ranks = 2 * np.arange(1, num + 1) - num - 1
    return np.asarray((ranks * np.sort(counts, -1)).sum(-1) / (num * counts.sum(-1)))


def mutual_information(joint: npt.NDArray[np.number]) -> float:
    """Return the mutual information in bits of a table of joint counts [rows, columns]."""
    joint = joint / joint.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / independent[seen])).sum())


def lag_correlation(
    trace: RoutingTrace,
    lags: Sequence[int] = LAGS,
    *,
    concurrency: int = LAG_CONCURRENCY,
    num_steps: int = LAG_STEPS,
) -> list[float]:
    """Correlate the demand of a continuous batch with that `lag` steps later.

    Deviations are from the trace's own mean: from the mean of the steps, slow changes would be
    subtracted and long lags come out too low. Products are summed over layers and experts.

    Returns:
        The correlation at each lag; nan where the demand never changes.

    Raises:
        ConfigError: if a lag does not fit into the steps, or a value is out of range.
    """
    if not all(0 < lag < num_steps for lag in lags):
        raise ConfigError(f"lags must be between 0 and num_steps={num_steps}, got {lags}")
    mean = concurrency * count_experts(trace.ids, trace.num_experts) / len(trace.ids)
    steps = itertools.islice(ContinuousBatching(trace, concurrency=concurrency), num_steps)
    deviation = np.stack([count_experts(step, trace.num_experts) - mean for step in steps])
    variance = (deviation**2).mean(0).sum()
    if variance == 0:
        return [float("nan")] * len(lags)
    return [float((deviation[:-lag] * deviation[lag:]).mean(0).sum() / variance) for lag in lags]


def count_experts(ids: npt.NDArray[np.uint8], num_experts: int) -> npt.NDArray[np.int64]:
    """Count the pairs of each expert.

    Args:
        ids: expert of each token, layer and choice, uint8 [num_tokens, num_layers, top_k].
        num_experts: experts per layer.

    Returns:
        int64 [num_layers, num_experts].
    """
    num_layers = ids.shape[1]
    flat = ids + num_experts * np.arange(num_layers)[:, None]
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, -1)


def domain_total_variation(trace: RoutingTrace) -> FloatArray:
    """Return the distance of each domain's expert popularity from that of the whole trace.

    Returns:
        Half the summed absolute difference, float64 [domains with requests, num_layers].
    """
    token_domain = np.repeat(trace.domain, np.diff(trace.offsets))
    counts = np.stack(
        [
            count_experts(trace.ids[token_domain == domain], trace.num_experts)
            for domain in np.unique(trace.domain)
        ]
    )
    overall = counts.sum(0)
    shares = counts / counts.sum(-1, keepdims=True)
    return np.asarray(np.abs(shares - overall / overall.sum(-1, keepdims=True)).sum(-1) / 2)


def measure_statistics(trace: RoutingTrace) -> dict[str, float]:
    """Measure what a scheduler sees of a trace; a value per layer is averaged over the layers.

    Returns:
        cv, gini: of the pairs per expert.
        consecutive_overlap: experts that a token shares with the next one of its request.
        independent_overlap: what that would be if tokens drew independently.
        lag_correlation_N: of the demand of a batch, see `lag_correlation`.
        domain_tv_min, _mean, _max: over domains and layers, see `domain_total_variation`.
        adjacent_layer_bits: mutual information of an expert of a token in one layer and one in the
            next, over all top_k^2 combinations, without a correction for the sample's size.

    Raises:
        ShapeError: if the trace has one layer only, or no request of two tokens.
    """
    is_inner = np.ones(len(trace.ids), np.bool_)
    is_inner[trace.offsets[1:] - 1] = False
    inner = np.flatnonzero(is_inner)
    if trace.num_layers < 2 or not len(inner):
        raise ShapeError("statistics need two layers and a request of two tokens")
    overlaps, bits = [], []
    previous: FloatArray | None = None
    for layer in range(trace.num_layers):
        chosen = np.zeros((len(trace.ids), trace.num_experts), np.float32)
        np.put_along_axis(chosen, trace.ids[:, layer].astype(np.intp), 1, axis=1)
        shared = chosen[inner] * chosen[inner + 1]
        overlaps.append(shared.sum(dtype=np.float64) / len(inner))
        if previous is not None:
            bits.append(mutual_information((previous.T @ chosen).astype(np.float64)))
        previous = chosen
    counts = count_experts(trace.ids, trace.num_experts)
    variation = domain_total_variation(trace)
    return {
        "cv": float(coefficient_of_variation(counts).mean()),
        "gini": float(gini(counts).mean()),
        "consecutive_overlap": float(np.mean(overlaps)),
        "independent_overlap": float(((counts / len(trace.ids)) ** 2).sum(-1).mean()),
        **{f"lag_correlation_{lag}": r for lag, r in zip(LAGS, lag_correlation(trace))},
        "domain_tv_min": float(variation.min()),
        "domain_tv_mean": float(variation.mean()),
        "domain_tv_max": float(variation.max()),
        "adjacent_layer_bits": float(np.mean(bits)),
    }
