"""Recorded expert routing, and the steps a serving engine would have made of it.

A trace holds the expert ids of whole requests, one after another. `ContinuousBatching` turns it
back into decode steps: C requests in flight, one token of each per step, a finished request
replaced by the next one. `split_tokens` cuts a step into the microbatches of the attention ranks.
"""

from __future__ import annotations

import itertools
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from afore_kernels.errors import ConfigError, ShapeError

IdArray = npt.NDArray[np.uint8]
_ARRAYS = ("ids", "offsets", "domain", "domain_names", "num_experts")


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """Expert ids of recorded requests, checked when built.

    Attributes:
        ids: expert of each token, layer and choice, uint8 [num_tokens, num_layers, top_k].
        offsets: first token of each request, int64 [num_requests + 1]; no request is empty.
        domain: index into `domain_names` of each request, uint8 [num_requests].
        domain_names: unicode [num_domains].
        num_experts: routed experts per layer; every id is below it.

    Raises:
        ShapeError: if an array does not have that shape, dtype or range.
    """

    ids: IdArray
    offsets: npt.NDArray[np.int64]
    domain: npt.NDArray[np.uint8]
    domain_names: npt.NDArray[np.str_]
    num_experts: int

    def __post_init__(self) -> None:
        _require_array("ids", self.ids, "u1", 3)
        _require_array("offsets", self.offsets, "i8", 1)
        _require_array("domain", self.domain, "u1", 1)
        _require_array("domain_names", self.domain_names, "U", 1)
        if min(self.ids.shape) < 1:
            raise ShapeError(f"ids must not be empty, got shape {self.ids.shape}")
        lengths = np.diff(self.offsets)
        if not len(lengths):
            raise ShapeError("offsets must hold the start and the end of at least one request")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.ids) or lengths.min() < 1:
            raise ShapeError(
                f"offsets must rise strictly from 0 to {len(self.ids)} tokens, got "
                f"{self.offsets[0]} to {self.offsets[-1]}, smallest difference {lengths.min()}"
            )
        if len(self.domain) != len(lengths):
            raise ShapeError(f"domain has {len(self.domain)} entries for {len(lengths)} requests")
        if self.domain.max() >= len(self.domain_names):
            raise ShapeError(
                f"domain {self.domain.max()} is outside the {len(self.domain_names)} domain_names"
            )
        if self.ids.max() >= self.num_experts:
            raise ShapeError(
                f"expert id {self.ids.max()} is outside the {self.num_experts} experts"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingTrace:
        """Read an `.npz` of the arrays named like the attributes; nothing is unpickled.

        Raises:
            ConfigError: if the file is missing, is not a whole `.npz`, or lacks an array.
            ShapeError: if an array does not have the agreed shape, dtype or range.
        """
        try:
            with open(path, "rb") as file:
                archive = np.load(file, allow_pickle=False)
                if not isinstance(archive, np.lib.npyio.NpzFile):
                    raise ConfigError(f"{path} holds one array, a trace is an .npz archive")
                missing = [name for name in _ARRAYS if name not in archive.files]
                if missing:
                    raise ConfigError(f"trace {path} lacks the array {', '.join(missing)}")
                arrays: dict[str, Any] = {name: archive[name] for name in _ARRAYS}
        except ConfigError:
            raise
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ConfigError(f"cannot read trace {path}: {error}") from error
        _require_array("num_experts", arrays["num_experts"], "i8", 0)
        num_experts = int(arrays.pop("num_experts"))
        return cls(**arrays, num_experts=num_experts)

    @property
    def num_layers(self) -> int:
        """Recorded MoE layers."""
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return int(self.ids.shape[2])


def _require_array(name: str, array: npt.NDArray[np.generic], kind: str, num_dims: int) -> None:
    is_dtype = array.dtype.kind == "U" if kind == "U" else array.dtype == np.dtype(kind)
    if not is_dtype or array.ndim != num_dims:
        raise ShapeError(
            f"{name} must be {num_dims}-dimensional of dtype {kind}, got {array.dtype} "
            f"{array.shape}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class ContinuousBatching:
    """Endless decode steps over a trace: iterate for uint8 [concurrency, num_layers, top_k].

    The requests come in a random order, and again in another one when all have run. The first ones
    start at a random token, so that step 0 already has the churn of a server that has been running.
    A request keeps its row until it ends: a row range is a stable set of requests.

    Attributes:
        trace: the recorded routing.
        concurrency: requests in flight C, the tokens of one step.
        seed: of the order and the first tokens.
        domain: take only this domain's requests, or None for all in their recorded proportions.
        drift_steps: steps in which the mix of admitted requests moves once through the domains, at
            every moment a blend of two neighbours; None keeps the recorded proportions.

    Raises:
        ConfigError: if a value is out of range, the domain is not in the trace, or both a domain
            and a drift are asked for.
    """

    trace: RoutingTrace
    _: KW_ONLY
    concurrency: int
    seed: int = 0
    domain: str | None = None
    drift_steps: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")
        if self.drift_steps is not None and self.drift_steps < 1:
            raise ConfigError(f"drift_steps must be at least 1, got {self.drift_steps}")
        if self.drift_steps is not None and self.domain is not None:
            raise ConfigError("a drift goes through all domains, it excludes a single domain")
        present = self._domain_requests()
        if self.domain is not None and self.domain not in present:
            raise ConfigError(f"domain must be one of {', '.join(present)}, got {self.domain!r}")

    def __iter__(self) -> Iterator[IdArray]:
        rng = np.random.default_rng(self.seed)
        offsets = self.trace.offsets
        queues = [_endless_shuffle(requests, rng) for requests in self._groups()]

        def admit(step: int) -> int:
            if len(queues) == 1:
                return next(queues[0])
            return next(queues[rng.choice(len(queues), p=self._mix(step, len(queues)))])

        request = np.array([admit(0) for _ in range(self.concurrency)])
        end = offsets[request + 1]
        token = rng.integers(offsets[request], end)
        for step in itertools.count(1):
            yield self.trace.ids[token]
            token += 1
            for row in np.flatnonzero(token == end):
                following = admit(step)
                token[row], end[row] = offsets[following], offsets[following + 1]

    def _domain_requests(self) -> dict[str, npt.NDArray[np.intp]]:
        """Requests of each domain that has any."""
        by_name = {
            str(name): np.flatnonzero(self.trace.domain == index)
            for index, name in enumerate(self.trace.domain_names)
        }
        return {name: requests for name, requests in by_name.items() if len(requests)}

    def _groups(self) -> list[npt.NDArray[np.intp]]:
        """Sets of requests that are shuffled apart from each other."""
        if self.drift_steps is not None:
            return list(self._domain_requests().values())
        if self.domain is not None:
            return [self._domain_requests()[self.domain]]
        return [np.arange(len(self.trace.domain))]

    def _mix(self, step: int, num_groups: int) -> npt.NDArray[np.float64]:
        """Probability of each group for a request admitted at `step`, float64 [num_groups >= 2]."""
        assert self.drift_steps is not None
        position = (step / self.drift_steps * num_groups) % num_groups
        ahead = np.abs(np.arange(num_groups) - position)
        mix: npt.NDArray[np.float64] = np.maximum(0.0, 1.0 - np.minimum(ahead, num_groups - ahead))
        return mix


def _endless_shuffle(requests: npt.NDArray[np.intp], rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(requests).tolist()


def split_tokens(num_tokens: int, num_microbatches: int, num_ranks: int) -> list[list[slice]]:
    """Cut a step's rows into near-equal contiguous parts, one per microbatch and attention rank.

    Args:
        num_tokens: rows of the step; parts differ by at most one, and may be empty.
        num_microbatches: microbatches of a step.
        num_ranks: attention ranks.

    Returns:
        The rows of [microbatch][rank].

    Raises:
        ConfigError: if a count is below 1.

    >>> split_tokens(5, 2, 2)
    [[slice(0, 1, None), slice(1, 2, None)], [slice(2, 3, None), slice(3, 5, None)]]
    """
    if min(num_tokens, num_microbatches, num_ranks) < 1:
        raise ConfigError(
            f"cannot split {num_tokens} tokens over {num_microbatches} microbatches and "
            f"{num_ranks} ranks"
        )
    num_parts = num_microbatches * num_ranks
    starts = [part * num_tokens // num_parts for part in range(num_parts + 1)]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    return [parts[first : first + num_ranks] for first in range(0, num_parts, num_ranks)]
