"""Recorded routing is planned and driven exactly as recorded, and measured by the book."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import ConfigError, ShapeError
from afore_kernels.plan import Plan, PrimaryPlacement, Target
from afore_kernels.replay import add_arguments, run
from afore_kernels.replay.command import build_workload
from afore_kernels.replay.configurations import (
    CONFIGURATIONS,
    dense_outputs,
    replay_plans,
    replay_tier,
)
from afore_kernels.replay.workload import Workload, drive_tier, plan_workload
from afore_kernels.runtime.weights import RandomWeights
from afore_kernels.traces import split_tokens

RECORDED = Path(__file__).parents[2] / "shared" / "traces" / "gpt_oss_20b_decode.npz"
needs_recorded = pytest.mark.skipif(
    not RECORDED.exists(), reason="../shared/traces is not beside the repository"
)


def make_workload(ids: np.ndarray, *, tile_m: int = 2, parts: tuple[int, int] = (1, 1)) -> Workload:
    _, num_rows, num_layers, top_k = ids.shape
    moe = MoEConfig(
        num_layers=num_layers,
        num_experts=8,
        top_k=top_k,
        hidden_size=8,
        intermediate_size=12,
        tile_m=tile_m,
    )
    return Workload(moe, ids.astype(np.uint8), split_tokens(num_rows, *parts), seed=3)


def make_tier(workload: Workload, configuration: str, num_workers: int = 4) -> TierConfig:
    return TierConfig(
        num_workers=num_workers,
        num_ranks=workload.num_ranks,
        max_tokens_per_rank=workload.max_tokens_per_rank,
        redundant_slots=1,
        targets_in_flight=len(workload.parts),
        plan_ring_depth=workload.num_targets,
        **CONFIGURATIONS[configuration],
    )


@pytest.fixture
def skewed() -> Workload:
    """Four steps of ten tokens, two layers, two microbatches of two ranks, low experts hot."""
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=(4, 10, 2, 8)) - 0.5 * np.arange(8)
    return make_workload(np.argsort(-scores, axis=3)[..., :2], parts=(2, 2))


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Four requests of five tokens, three layers, two of eight experts."""
    rng = np.random.default_rng(1)
    path = tmp_path / "trace.npz"
    np.savez(
        path,
        ids=np.argsort(rng.random((20, 3, 8)), axis=2)[..., :2].astype(np.uint8),
        offsets=np.arange(0, 21, 5),
        domain=np.zeros(4, np.uint8),
        domain_names=np.array(["any"]),
        num_experts=np.array(8),
    )
    return path


def parse(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def test_targets_keep_the_recorded_routing(skewed: Workload) -> None:
    targets = list(skewed.targets())
    assert targets == sorted(targets)
    assert len(targets) == skewed.num_targets == 4 * 2 * 2
    for target in targets:
        rows = slice(5 * target.microbatch, 5 * target.microbatch + 5)
        recorded = skewed.ids[target.step, rows, target.layer]
        np.testing.assert_array_equal(torch.cat(skewed.expert_ids(target)).numpy(), recorded)
        np.testing.assert_array_equal(
            skewed.demand(target), [(recorded == e).sum() for e in range(8)]
        )
        assert skewed.rank_tokens(target).tolist() == [2, 3]
    assert skewed.max_tokens_per_rank == 3


def test_inputs_are_a_function_of_seed_and_target(skewed: Workload) -> None:
    first, again = (skewed.inputs(Target(1, 1, 0)) for _ in range(2))
    other = skewed.inputs(Target(1, 0, 1))
    for (hidden, weights), same, different in zip(first, again, other):
        assert torch.equal(hidden, same[0])
        assert torch.equal(weights, same[1])
        assert not torch.equal(hidden, different[0])
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))
        assert weights.dtype == torch.float32


def test_workload_refuses_ids_of_another_model(skewed: Workload) -> None:
    with pytest.raises(ShapeError, match="ids must be"):
        Workload(skewed.moe, skewed.ids[..., :1], skewed.parts)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_offline_plans_are_valid_and_serve_the_actual_demand(
    skewed: Workload, configuration: str
) -> None:
    tier = make_tier(skewed, configuration)
    placement = PrimaryPlacement(8, 4, 1)
    previous: Plan | None = None
    for sequence, (target, plan) in enumerate(zip(skewed.targets(), plan_workload(skewed, tier))):
        assert (plan.target, plan.sequence) == (target, sequence)
        np.testing.assert_array_equal(plan.demand, skewed.demand(target))
        plan.validate(placement)
        if previous is not None:
            plan.validate_after(previous)
        previous = plan


def test_previous_step_plans_for_the_step_before() -> None:
    """Expert 0 takes every pair in even steps, expert 1, of the same worker, in odd ones."""
    hot = np.arange(4) % 2
    ids = np.broadcast_to(hot[:, None, None, None], (4, 16, 1, 1))
    workload = make_workload(ids)

    def replicated(configuration: str) -> list[set[int]]:
        plans = plan_workload(workload, make_tier(workload, configuration))
        return [set(plan.slot_expert[plan.slot_copy == 1].tolist()) for plan in plans]

    assert replicated("true-demand")[0] == {0}
    assert replicated("true-demand")[1] == set(), "all slots are in use by the preceding target"
    assert replicated("previous-step")[:2] == [{0}, set()]
    static = replay_plans("static", workload, make_tier(workload, "static"), lambda: None)
    assert static.summary.pair_imbalance == static.summary.tile_imbalance == 4.0
    assert static.summary.num_copies == 0


def test_previous_step_equals_true_demand_where_nothing_changes() -> None:
    rng = np.random.default_rng(5)
    ids = np.broadcast_to(rng.integers(0, 4, (1, 24, 2, 2)), (3, 24, 2, 2))
    workload = make_workload(ids)
    plans = [
        list(plan_workload(workload, make_tier(workload, name)))
        for name in ("previous-step", "true-demand")
    ]
    for previous_step, true_demand in zip(*plans):
        np.testing.assert_array_equal(previous_step.slot_pairs, true_demand.slot_pairs)
        np.testing.assert_array_equal(previous_step.slot_copy, true_demand.slot_copy)


def test_result_by_hand() -> None:
    """Step 1 has 5, 1, 0, 0 pairs on the workers; at tile_m 2 that is 3, 1, 0, 0 tiles."""
    ids = np.full((2, 6, 1, 1), 0)
    ids[1, 5] = 2
    workload = make_workload(ids)
    calls: list[None] = []
    result = replay_plans(
        "static", workload, make_tier(workload, "static"), lambda: calls.append(None)
    )
    assert len(calls) == 2
    assert result.summary.num_targets == 1, "step 0 is left out"
    assert result.summary.pair_imbalance == 5 / 1.5
    assert result.summary.tile_imbalance == 3.0
    assert result.tile_floor == 1.0
    assert result.targets_per_s is None


def test_tile_floor_is_not_beaten(skewed: Workload) -> None:
    for name in CONFIGURATIONS:
        result = replay_plans(name, skewed, make_tier(skewed, name), lambda: None)
        assert 1.0 < result.tile_floor <= result.summary.tile_imbalance


class FakeClient:
    """Records the calls; its output is its hidden states."""

    def __init__(self, rank: int, log: list[tuple[str, int, Target]]) -> None:
        self.rank, self.log = rank, log
        self.hidden: dict[Target, torch.Tensor] = {}

    def send_demand(self, target: Target, expert_ids: torch.Tensor) -> None:
        self.log.append(("demand", self.rank, target))

    def submit(self, target, hidden, expert_ids, routing_weights) -> None:  # type: ignore[no-untyped-def]
        assert len(hidden) == len(expert_ids) == len(routing_weights)
        self.log.append(("submit", self.rank, target))
        self.hidden[target] = hidden

    def wait(self, target: Target) -> torch.Tensor:
        self.log.append(("wait", self.rank, target))
        return self.hidden.pop(target)


@pytest.mark.parametrize("targets_in_flight", [1, 2, 5])
def test_drive_keeps_the_queue_full_and_in_order(skewed: Workload, targets_in_flight: int) -> None:
    log: list[tuple[str, int, Target]] = []
    clients = [FakeClient(rank, log) for rank in range(2)]
    driven = list(drive_tier(clients, skewed, targets_in_flight))
    targets = list(skewed.targets())
    assert [target for target, _ in driven] == targets
    for target, outputs in driven:
        for output, (hidden, _) in zip(outputs, skewed.inputs(target)):
            assert torch.equal(output, hidden)
    for rank in range(2):
        calls = [(what, target) for what, of, target in log if of == rank]
        for what in ("demand", "submit", "wait"):
            assert [target for name, target in calls if name == what] == targets
        posted = np.cumsum([(what == "demand") - (what == "wait") for what, _ in calls])
        assert posted.max() == targets_in_flight
    for target in targets:
        steps = [what for what, _, of in log if of == target]
        assert steps == ["demand"] * 2 + ["submit"] * 2 + ["wait"] * 2


def test_dense_outputs_equal_a_loop_over_pairs(skewed: Workload) -> None:
    weights = RandomWeights(skewed.moe, seed=2)
    reference = dense_outputs(skewed, weights, lambda: None)
    assert set(reference) == set(skewed.targets())
    target = Target(2, 1, 1)
    for ids, (hidden, routing_weights), output in zip(
        skewed.expert_ids(target), skewed.inputs(target), reference[target]
    ):
        expected = torch.zeros_like(hidden)
        for token, choice in np.ndindex(*ids.shape):
            expert = weights.expert(target.layer, int(ids[token, choice]))
            gate, up = (expert.gate_up @ hidden[token]).chunk(2)
            row = expert.down @ (gate * torch.sigmoid(gate) * up)
            expected[token] += routing_weights[token, choice] * row
        torch.testing.assert_close(output, expected)


def test_plan_only_command(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = tmp_path / "report.json"
    args = parse(
        trace_file, "--plan-only", "--steps", 4, "--concurrency", 6, "--layers", "0,2",
        "--workers", 4, "--tile-m", 1, "--json", report,
    )  # fmt: skip
    assert run(args) == 0
    table = capsys.readouterr().out
    document = json.loads(report.read_text())
    assert [result["configuration"] for result in document["results"]] == args.configurations
    assert document["trace"] == "trace.npz"
    assert document["moe"]["num_layers"] == 2
    for result in document["results"]:
        assert result["summary"]["num_targets"] == 3 * 2 * 2
        assert result["tier"]["num_workers"] == 4
        assert f"{result['summary']['pair_imbalance']:.3f}" in table


def test_layers_select_from_the_trace(trace_file: Path) -> None:
    def ids(layers: str | None) -> np.ndarray:
        arguments = [] if layers is None else ["--layers", layers]
        return build_workload(parse(trace_file, "--concurrency", 3, *arguments)).ids

    np.testing.assert_array_equal(ids("2"), ids(None)[:, :, :2])
    np.testing.assert_array_equal(ids("2,0"), ids(None)[:, :, [2, 0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", 1], "steps must be at least 2"),
        (["--layers", "x"], "layers must be N or I,J"),
        (["--layers", "0"], "layers 0 are not among the trace's 3 layers"),
        (["--layers", "4"], "layers 4 are not among"),
        (["--layers", "0,3"], "layers 0,3 are not among"),
        (["--layers=-1,0"], "layers -1,0 are not among"),
        (["--tile-m", 3], "tile_m must be a power of two"),
        (["--domain", "other"], "domain must be one of any"),
    ],
)
def test_bad_arguments_are_named(trace_file: Path, arguments: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_workload(parse(trace_file, *arguments))


@needs_recorded
@pytest.mark.parametrize(
    ("concurrency", "tile_m", "expected"),
    [(64, 4, (1.49, 1.28, 1.14)), (256, 16, (1.44, 1.18, 1.14))],
)
def test_recorded_trace_is_near_an_independent_rewrite(
    concurrency: int, tile_m: int, expected: tuple[float, float, float]
) -> None:
    """Pair imbalance at EP8, R = 2, B = 2N, the whole step as one microbatch; 24 steps here."""
    workload = build_workload(
        parse(
            RECORDED, "--steps", 24, "--microbatches", 1,
            "--concurrency", concurrency, "--tile-m", tile_m,
        )
    )  # fmt: skip
    for name, imbalance in zip(("static", "previous-step", "true-demand"), expected):
        tier = TierConfig(num_workers=8, **CONFIGURATIONS[name])
        result = replay_plans(name, workload, tier, lambda: None)
        assert result.summary.pair_imbalance == pytest.approx(imbalance, abs=0.05)


@pytest.mark.multiprocess
def test_live_tier_runs_the_offline_plans_and_matches_the_reference(
    skewed: Workload, tmp_path: Path
) -> None:
    weights = RandomWeights(skewed.moe, seed=4)
    reference = dense_outputs(skewed, weights, lambda: None)
    wrong = Target(3, 0, 1)
    reference[wrong][1][0, 0] += 0.01  # the check must see one element of one target
    tier = make_tier(skewed, "true-demand", num_workers=3)
    timeline = tmp_path / "timeline.json"
    live = replay_tier(
        "true-demand", skewed, tier, weights, lambda: None, reference=reference, timeline=timeline
    )
    offline = replay_plans("true-demand", skewed, tier, lambda: None)
    assert live.num_mismatched == 1
    for field in ("num_targets", "num_copies", "pair_imbalance", "tile_imbalance"):
        assert getattr(live.summary, field) == getattr(offline.summary, field), field
    assert live.tile_floor == offline.tile_floor
    assert live.summary.num_copies > 0
    assert live.summary.raw_copy_us is not None
    assert live.targets_per_s is not None
    assert live.targets_per_s > 0
    assert json.loads(timeline.read_text())["traceEvents"]


@needs_recorded
@pytest.mark.multiprocess
def test_command_drives_a_tier_with_the_recorded_trace(tmp_path: Path) -> None:
    report, timeline = tmp_path / "report.json", tmp_path / "timeline.json"
    args = parse(
        RECORDED, "--steps", 2, "--layers", 3, "--concurrency", 16, "--workers", 2,
        "--configurations", "static", "exposed-copies", "--json", report, "--timeline", timeline,
    )  # fmt: skip
    assert run(args) == 0
    static, exposed = json.loads(report.read_text())["results"]
    assert static["num_mismatched"] == exposed["num_mismatched"] == 0
    assert static["summary"]["tile_imbalance"] > exposed["summary"]["tile_imbalance"]
    for name in args.configurations:
        assert (tmp_path / f"timeline-{name}.json").exists()
