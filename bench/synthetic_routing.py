"""Synthetic routing for shapes without recorded routing, and the named workloads made of it.

The score of an expert is the sum of a popularity that is fixed per layer, a term of the request's
domain, a term of the request, a linear read-out of a hidden state that all layers share and that
changes from token to token, and Gumbel noise; a token takes the `top_k` largest. Decode steps are
made of it by `ContinuousBatching`. `bench.synthetic` fits the scales of the terms.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.traces import ContinuousBatching, RoutingTrace

IntArray = npt.NDArray[np.integer]
Float32Array = npt.NDArray[np.float32]

# Lognormal and cut at both ends, as the recorded lengths are: 30 to 511 tokens, median 298.
MEDIAN_TOKENS, LOG_TOKENS_SCALE, MIN_TOKENS, MAX_TOKENS = 298, 1.3, 30, 511


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreScales:
    """Standard deviations of the terms of a score; Gumbel noise has the unit scale.

    A token takes an expert with a weight of exp(score), so a normal popularity is a lognormal one.

    Attributes:
        popularity: of the term of each (layer, expert).
        domain: of the term of each (domain, layer, expert).
        request: of the term of each (request, layer, expert).
        hidden: of the read-out <W[layer, expert], h>.
        hidden_size: components of h; fewer tie the layers closer together.
        memory_tokens: h is an AR(1) vector whose correlation falls to 1/e in this many tokens.

    Raises:
        ConfigError: if a value is out of range.
    """

    popularity: float
    domain: float
    request: float
    hidden: float
    hidden_size: int
    memory_tokens: float

    def __post_init__(self) -> None:
        scales = (self.popularity, self.domain, self.request, self.hidden)
        if not all(0 <= scale < np.inf for scale in scales):
            raise ConfigError(f"scales must be finite and not negative, got {self}")
        if self.hidden_size < 1 or not self.memory_tokens > 0:
            raise ConfigError(f"hidden_size and memory_tokens must be positive, got {self}")


# From `python -m bench.synthetic`, on the 24 layers and 522 requests of the recorded trace. What it
# misses: one scale for all domains makes them differ too evenly, one memory of h leaves lag 10 low.
FITTED = ScoreScales(
    popularity=1.26, domain=1.28, request=2.26, hidden=5.22, hidden_size=2, memory_tokens=1.1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticRouting:
    """A model's routing: the same object and seed give the same experts for the same request.

    Attributes:
        num_experts: routed experts per layer, at most 256.
        top_k: experts per token.
        num_layers: MoE layers.
        num_domains: kinds of requests.
        scales: of the terms of the score.
        seed: of everything that is drawn.

    Raises:
        ConfigError: if a value is out of range.
    """

    num_experts: int
    top_k: int
    num_layers: int
    num_domains: int
    scales: ScoreScales
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts <= 256:
            raise ConfigError(
                f"1 <= top_k <= num_experts <= 256 must hold, got {self.top_k}, {self.num_experts}"
            )
        if self.num_layers < 1 or not 1 <= self.num_domains <= 256 or self.seed < 0:
            raise ConfigError(f"num_layers, num_domains or seed is out of range in {self}")

    def draw(self, domain: IntArray, lengths: IntArray) -> RoutingTrace:
        """Draw the experts of whole requests; request i does not depend on the number of others.

        Args:
            domain: of each request, below num_domains, [num_requests].
            lengths: tokens of each request, [num_requests].

        Returns:
            The trace; the ids of a token are distinct, the best score first.

        Raises:
            ShapeError: if the arrays do not describe at least one token each.
            ConfigError: if a domain is outside num_domains.
        """
        if domain.shape != lengths.shape or domain.ndim != 1 or not len(lengths):
            raise ShapeError(f"one domain per length, got {domain.shape} and {lengths.shape}")
        if lengths.min() < 1:
            raise ShapeError(f"every request needs a token, got a length of {lengths.min()}")
        if domain.min() < 0 or domain.max() >= self.num_domains:
            raise ConfigError(f"domains must be in [0, {self.num_domains})")
        scales, shape = self.scales, (self.num_layers, self.num_experts)
        rng = np.random.default_rng((self.seed, 0))
        popularity = scales.popularity * rng.standard_normal(shape, np.float32)
        by_domain = scales.domain * rng.standard_normal((self.num_domains, *shape), np.float32)
        readout = rng.standard_normal((scales.hidden_size, shape[0] * shape[1]), np.float32)
        readout *= scales.hidden / np.sqrt(scales.hidden_size)

        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = np.empty((offsets[-1], self.num_layers, self.top_k), np.uint8)
        for request, (start, stop) in enumerate(itertools.pairwise(offsets)):
            rng = np.random.default_rng((self.seed, 1, request))
            constant = popularity + by_domain[domain[request]]
            constant += scales.request * rng.standard_normal(shape, np.float32)
            hidden = autoregressive(int(stop - start), scales, rng)
            scores = (hidden @ readout).reshape(-1, *shape)
            scores += constant
            # The negative logarithm of an exponential variate is a Gumbel one; of 0, the winner.
            noise = rng.standard_exponential(scores.shape, np.float32)
            with np.errstate(divide="ignore"):
                scores -= np.log(noise, out=noise)
            ids[start:stop] = _top_k(scores, self.top_k)
        return RoutingTrace(
            ids=ids,
            offsets=offsets,
            domain=domain.astype(np.uint8),
            domain_names=np.array([f"domain-{d}" for d in range(self.num_domains)]),
            num_experts=self.num_experts,
        )


def autoregressive(length: int, scales: ScoreScales, rng: np.random.Generator) -> Float32Array:
    """Draw the hidden state h of a request, a stationary AR(1) vector of unit variance.

    Returns:
        float32 [length, hidden_size].
    """
    decay = np.float32(np.exp(-1 / scales.memory_tokens))
    hidden = rng.standard_normal((length, scales.hidden_size), np.float32)
    hidden[1:] *= np.sqrt(1 - decay**2)
    for previous, current in itertools.pairwise(hidden):
        current += decay * previous
    return hidden


def _top_k(scores: Float32Array, top_k: int) -> npt.NDArray[np.uint8]:
    """Return the indices of the largest scores along the last axis, which are overwritten."""
    flat = scores.reshape(-1, scores.shape[-1])
    rows = np.arange(len(flat))
    best = np.empty((len(flat), top_k), np.uint8)
    # A few passes over short rows: three times as fast as argpartition for 4 of 32 experts.
    for choice in range(top_k):
        best[:, choice] = flat.argmax(1)
        flat[rows, best[:, choice]] = -np.inf
    return best.reshape(*scores.shape[:-1], top_k)


class DomainMix(NamedTuple):
    """Which requests a workload admits.

    Attributes:
        shares: probability of each domain.
        drift_steps: see `ContinuousBatching`; None keeps the shares.
    """

    shares: tuple[float, ...]
    drift_steps: int | None = None


# One model under four mixes of four domains; `skewed` has the recorded trace's shares.
WORKLOADS = {
    "synthetic-128x8-even": DomainMix((0.25, 0.25, 0.25, 0.25)),
    "synthetic-128x8-skewed": DomainMix((0.64, 0.12, 0.12, 0.12)),
    "synthetic-128x8-single": DomainMix((1.0, 0.0, 0.0, 0.0)),
    "synthetic-128x8-drift": DomainMix((0.25, 0.25, 0.25, 0.25), drift_steps=2000),
}


def make_workload(
    name: str,
    *,
    concurrency: int,
    num_layers: int = 24,
    num_requests: int | None = None,
    seed: int = 0,
) -> ContinuousBatching:
    """Draw a named workload of 128 experts and top-8.

    A request of 24 layers takes about 25 ms and 60 kB.

    Args:
        name: a key of `WORKLOADS`; with one seed they are requests to the same model.
        concurrency: requests in flight.
        num_layers: MoE layers.
        num_requests: drawn before they repeat; by default four for each in flight, so that the
            batch is a small part of them.
        seed: of the model, the requests and their order.

    Raises:
        ConfigError: if the name is unknown or a value is out of range.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    mix = WORKLOADS[name]
    num_requests = 4 * concurrency if num_requests is None else num_requests
    if num_requests < 1:
        raise ConfigError(f"num_requests must be at least 1, got {num_requests}")
    routing = SyntheticRouting(
        num_experts=128,
        top_k=8,
        num_layers=num_layers,
        num_domains=len(mix.shares),
        scales=FITTED,
        seed=seed,
    )
    rng = np.random.default_rng((seed, 2))
    domain = rng.choice(len(mix.shares), num_requests, p=mix.shares)
    lengths = MEDIAN_TOKENS * np.exp(LOG_TOKENS_SCALE * rng.standard_normal(num_requests))
    lengths = lengths.clip(MIN_TOKENS, MAX_TOKENS).astype(np.int64)
    return ContinuousBatching(
        routing.draw(domain, lengths),
        concurrency=concurrency,
        seed=seed,
        drift_steps=mix.drift_steps,
    )
