"""Traces are checked where they enter, and batched the way a server would."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.traces import ContinuousBatching, RoutingTrace, split_tokens

RECORDED = Path(__file__).parents[2] / "shared" / "traces" / "gpt_oss_20b_decode.npz"


def trace_arrays() -> dict[str, np.ndarray]:
    """Six requests of two layers and two choices; the first id of a token names its request."""
    lengths = [3, 1, 4, 2, 5, 2]
    request = np.repeat(np.arange(6, dtype=np.uint8), lengths)
    position = np.concatenate([np.arange(n, dtype=np.uint8) for n in lengths])
    layer = np.stack([request, position + 6], axis=1)
    return {
        "ids": np.stack([layer, layer], axis=1),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "domain": np.array([0, 0, 1, 1, 1, 2], np.uint8),
        "domain_names": np.array(["code", "maths", "prose"]),
        "num_experts": np.array(12),
    }


def save(path: Path, **changes: np.ndarray) -> Path:
    np.savez(path, **{**trace_arrays(), **changes})
    return path


@pytest.fixture
def trace(tmp_path: Path) -> RoutingTrace:
    return RoutingTrace.load(save(tmp_path / "trace.npz"))


def requests_of(batching: ContinuousBatching, num_steps: int) -> np.ndarray:
    """Request in each row, int [num_steps, concurrency]."""
    return np.stack([step[:, 0, 0] for step in itertools.islice(batching, num_steps)])


def test_load_keeps_every_array(trace: RoutingTrace) -> None:
    expected = trace_arrays()
    for name in ("ids", "offsets", "domain", "domain_names"):
        np.testing.assert_array_equal(getattr(trace, name), expected[name])
    assert (trace.num_layers, trace.top_k, trace.num_experts) == (2, 2, 12)


@pytest.mark.parametrize("name", ["ids", "offsets", "domain", "domain_names", "num_experts"])
def test_missing_array_is_named(tmp_path: Path, name: str) -> None:
    arrays = trace_arrays()
    del arrays[name]
    np.savez(tmp_path / "trace.npz", **arrays)
    with pytest.raises(ConfigError, match=f"lacks the array {name}"):
        RoutingTrace.load(tmp_path / "trace.npz")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", np.zeros((17, 4), np.uint8), "ids must be 3-dimensional"),
        ("ids", np.zeros((17, 2, 2), np.int64), "ids must be .* of dtype u1, got int64"),
        ("ids", np.zeros((17, 0, 2), np.uint8), "ids must not be empty"),
        ("ids", np.full((17, 2, 2), 12, np.uint8), "expert id 12 is outside the 12 experts"),
        ("offsets", np.zeros(0, np.int64), "at least one request"),
        ("offsets", np.array([1, 4, 8, 10, 12, 15, 17]), "rise strictly from 0 to 17"),
        ("offsets", np.array([0, 3, 4, 8, 10, 15, 18]), "rise strictly from 0 to 17"),
        ("offsets", np.array([0, 3, 3, 8, 10, 15, 17]), "smallest difference 0"),
        ("offsets", np.array([0, 8, 4, 8, 10, 15, 17]), "smallest difference -4"),
        ("domain", np.zeros(5, np.uint8), "domain has 5 entries for 6 requests"),
        ("domain", np.full(6, 3, np.uint8), "domain 3 is outside the 3 domain_names"),
        ("domain_names", np.zeros(3), "domain_names must be 1-dimensional of dtype U"),
        ("num_experts", np.array([12]), "num_experts must be 0-dimensional"),
    ],
)
def test_bad_array_is_named(tmp_path: Path, name: str, value: np.ndarray, message: str) -> None:
    path = save(tmp_path / "trace.npz", **{name: value})
    with pytest.raises(ShapeError, match=message):
        RoutingTrace.load(path)


def test_pickled_array_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "trace.npz", domain_names=np.array(["code", None, 1], object))
    with pytest.raises(ConfigError, match="allow_pickle=False"):
        RoutingTrace.load(path)


def test_damaged_file_is_a_config_error(tmp_path: Path) -> None:
    path = save(tmp_path / "trace.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot read trace"):
        RoutingTrace.load(path)
    flipped = bytearray(whole)
    flipped[whole.index(trace_arrays()["ids"].tobytes())] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ConfigError, match="CRC"):
        RoutingTrace.load(path)


def test_other_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read trace"):
        RoutingTrace.load(tmp_path / "absent.npz")
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="holds one array"):
        RoutingTrace.load(tmp_path / "single.npy")


def test_every_row_runs_whole_requests_token_by_token(trace: RoutingTrace) -> None:
    steps = np.stack(list(itertools.islice(ContinuousBatching(trace, concurrency=3, seed=1), 60)))
    assert steps.shape == (60, 3, 2, 2)
    lengths = np.diff(trace.offsets)
    for row in range(3):
        request, position = steps[:, row, 0, 0], steps[:, row, 0, 1] - 6
        for step in range(59):
            if position[step] + 1 < lengths[request[step]]:
                assert request[step + 1] == request[step]
                assert position[step + 1] == position[step] + 1
            else:
                assert position[step + 1] == 0


def test_all_requests_run_before_any_repeats(trace: RoutingTrace) -> None:
    batching = ContinuousBatching(trace, concurrency=1, seed=3)
    rows = list(itertools.islice(batching, 200))
    order = [int(step[0, 0, 0]) for step in rows if step[0, 0, 1] == 6]
    first = int(rows[0][0, 0, 0])
    if rows[0][0, 0, 1] != 6:  # the first request entered after its first token
        order.insert(0, first)
    for start in range(0, len(order) - 5, 6):
        assert sorted(order[start : start + 6]) == list(range(6))


def test_seed_fixes_the_steps(trace: RoutingTrace) -> None:
    def run(seed: int) -> np.ndarray:
        return requests_of(ContinuousBatching(trace, concurrency=4, seed=seed), 30)

    np.testing.assert_array_equal(run(5), run(5))
    assert (run(5) != run(6)).any()


def test_domain_filter(trace: RoutingTrace) -> None:
    seen = requests_of(ContinuousBatching(trace, concurrency=2, domain="maths"), 60)
    assert set(seen.ravel().tolist()) == {2, 3, 4}


def test_drift_moves_through_the_domains() -> None:
    arrays = trace_arrays()
    ids = arrays["ids"][np.arange(6)]  # six requests of one token: admitted and gone in one step
    ids[:, :, 0] = np.arange(6)[:, None]
    single = RoutingTrace(
        ids, np.arange(7), arrays["domain"], arrays["domain_names"], num_experts=12
    )
    batching = ContinuousBatching(single, concurrency=400, drift_steps=300)
    domain = arrays["domain"][requests_of(batching, 301)]
    share = np.stack([(domain == d).mean(axis=1) for d in range(3)], axis=1)
    np.testing.assert_array_equal(share[[0, 100, 200, 300]], np.eye(3)[[0, 1, 2, 0]])
    np.testing.assert_allclose(share[50], [0.5, 0.5, 0.0], atol=0.1)
    np.testing.assert_allclose(share[275], [0.75, 0.0, 0.25], atol=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"seed": -1}, "seed"),
        ({"drift_steps": 0}, "drift_steps"),
        ({"drift_steps": 5, "domain": "code"}, "excludes a single domain"),
        ({"domain": "poetry"}, "domain must be one of code, maths, prose, got 'poetry'"),
    ],
)
def test_bad_batching_is_named(trace: RoutingTrace, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContinuousBatching(trace, **{"concurrency": 2, **changes})


@pytest.mark.parametrize("shape", [(64, 2, 1), (7, 2, 2), (2, 3, 2), (1, 1, 1)])
def test_split_covers_every_row_once_and_evenly(shape: tuple[int, int, int]) -> None:
    num_tokens, num_microbatches, num_ranks = shape
    parts = split_tokens(num_tokens, num_microbatches, num_ranks)
    assert [len(ranks) for ranks in parts] == [num_ranks] * num_microbatches
    rows = [np.arange(num_tokens)[rank] for ranks in parts for rank in ranks]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(num_tokens))
    sizes = [len(r) for r in rows]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shape", [(0, 1, 1), (4, 0, 1), (4, 1, 0)])
def test_split_refuses_zero_parts(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot split"):
        split_tokens(*shape)


@pytest.mark.skipif(not RECORDED.exists(), reason="../shared/traces is not beside the repository")
def test_recorded_trace_loads() -> None:
    trace = RoutingTrace.load(RECORDED)
    assert (trace.num_layers, trace.top_k, trace.num_experts) == (24, 4, 32)
    assert list(trace.domain_names) == ["gpqa", "mmlu", "mmlu_pro", "sorry"]
    step = next(iter(ContinuousBatching(trace, concurrency=64)))
    assert step.shape == (64, 24, 4)
