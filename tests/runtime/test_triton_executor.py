"""`TritonExecutor` beside its twin `HostExecutor`: bit-equal outputs on the same static buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from afore_kernels.config import Activation, MoEConfig
from afore_kernels.errors import InfeasiblePlanError
from afore_kernels.gemm.launch import architecture, heuristic_launch
from afore_kernels.partition.demand import count_demand
from afore_kernels.plan import Plan, PlanLayout, PrimaryPlacement
from afore_kernels.runtime.devices.cpu import CpuDevice
from afore_kernels.runtime.executors.graphs import GraphCache, Work
from afore_kernels.runtime.executors.host import HostExecutor
from afore_kernels.runtime.executors.triton import TritonExecutor
from afore_kernels.runtime.gather import Gathered
from afore_kernels.runtime.weights import ExpertSlots, RandomWeights
from afore_kernels.testing import make_routing, random_plan

pytestmark = pytest.mark.interpreter

NUM_EXPERTS, NUM_WORKERS, TOP_K, TILE_M, NUM_LANES = 6, 2, 2, 16, 2
MAX_TOKENS = 48
PLACEMENT = PrimaryPlacement(NUM_EXPERTS, NUM_WORKERS, 2)
LAYOUT = PlanLayout(PLACEMENT, num_ranks=1)
WORKER = 1


class RecordedCapture:
    """Replays exactly what was captured, with the tensors it saw then."""

    def __init__(self) -> None:
        self.num_captured = 0

    def __call__(self, work: Work) -> Work:
        self.num_captured += 1
        return work


@dataclass
class Scene:
    """Both executors over the same weights, and the static buffers of a worker."""

    moe: MoEConfig
    source: RandomWeights
    slots: ExpertSlots
    capture: RecordedCapture
    host: HostExecutor
    triton: TritonExecutor
    rows: Gathered
    out: torch.Tensor

    def load(self, seed: int, num_tokens: int) -> tuple[Plan, Gathered]:
        """Overwrite the inputs, and bind the slots of a plan for them."""
        ids, _ = make_routing(num_tokens, NUM_EXPERTS, TOP_K, skew=seed % 3, seed=seed)
        demand = count_demand(ids.numpy(), NUM_EXPERTS)
        plan = random_plan(demand, PLACEMENT, TILE_M, seed, rank_tokens=[num_tokens], sequence=seed)
        for slot, expert in enumerate(plan.slot_expert[WORKER]):
            if expert >= 0:
                self.bind(self.slots.num_primaries + slot, int(expert))
        num_rows = NUM_WORKERS * self.triton.rows_per_worker(num_tokens)
        generator = torch.Generator().manual_seed(seed)
        hidden, expert_ids, routing_weights, outcomes = self.rows
        hidden[:num_tokens] = torch.randint(
            -2, 3, (num_tokens, hidden.shape[1]), generator=generator
        ).to(hidden)
        expert_ids[:num_tokens], expert_ids[num_tokens:num_rows] = ids.int(), -1
        routing_weights[:num_tokens] = torch.randint(
            1, 4, (num_tokens, TOP_K), generator=generator
        ).to(routing_weights)
        rows = slice(num_rows)
        return plan, Gathered(hidden[rows], expert_ids[rows], routing_weights[rows], outcomes)

    def bind(self, slot: int, expert: int) -> None:
        for layer in range(self.moe.num_layers):
            tensors = self.source.expert(layer, expert)
            for name, tensor in tensors._asdict().items():
                if tensor is not None:
                    getattr(self.slots, name)[layer, slot] = tensor

    def run(self, executor, lane: int, layer: int, gathered: Gathered) -> torch.Tensor:
        out = self.out[: len(gathered.hidden)]
        out.fill_(torch.nan)
        executor.partition(lane, gathered)
        executor.run_experts(layer, gathered, out)
        return out.clone()


@pytest.fixture(params=["plain", "bias and shared expert"])
def scene(request: pytest.FixtureRequest, kernel_device: str) -> Scene:
    if kernel_device != "cpu":
        pytest.skip("the twin runs in host memory")
    has_more = request.param != "plain"
    moe = MoEConfig(
        num_layers=2,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=24,
        intermediate_size=20,
        shared_intermediate_size=12 if has_more else 0,
        tile_m=TILE_M,
        has_bias=has_more,
        activation=Activation(kind="none"),
    )
    source = RandomWeights(moe, integer=True)
    segment = ExpertSlots.create_segment(moe, PLACEMENT, WORKER)
    slots = ExpertSlots(moe, PLACEMENT, WORKER, segment)
    segment.close()
    slots.load_primaries(source)
    device = CpuDevice(20)
    capture = RecordedCapture()
    triton = TritonExecutor(
        WORKER,
        moe,
        LAYOUT,
        slots,
        device,
        MAX_TOKENS,
        NUM_LANES,
        launch=heuristic_launch(
            architecture(device.torch_device), TILE_M, dtype=torch.float32, has_bias=moe.has_bias
        ),
        graphs=GraphCache(capture),
    )
    max_rows = NUM_WORKERS * triton.rows_per_worker(MAX_TOKENS)
    return Scene(
        moe,
        source,
        slots,
        capture,
        HostExecutor(WORKER, moe, PLACEMENT, slots, NUM_LANES),
        triton,
        Gathered(
            torch.zeros(max_rows, moe.hidden_size),
            torch.zeros(max_rows, TOP_K, dtype=torch.int32),
            torch.zeros(max_rows, TOP_K),
            torch.zeros(NUM_WORKERS, 2, dtype=torch.int64),
        ),
        torch.zeros(max_rows, moe.hidden_size),
    )


def test_outputs_and_sizes_equal_the_twins_under_every_plan(scene: Scene) -> None:
    for seed in range(6):
        num_tokens, layer, lane = (MAX_TOKENS, 7, 1)[seed % 3], seed % 2, seed % NUM_LANES
        plan, gathered = scene.load(seed, num_tokens)
        assert scene.triton.stage(lane, plan) == scene.host.stage(lane, plan)
        expected = scene.run(scene.host, lane, layer, gathered)
        assert torch.equal(scene.run(scene.triton, lane, layer, gathered), expected)
        assert scene.triton.mismatched_expert(lane) == -1
    assert scene.capture.num_captured > 0, "later targets ran as graphs"


def test_a_target_without_tokens_runs(scene: Scene) -> None:
    plan, gathered = scene.load(0, 0)
    scene.triton.stage(0, plan)
    assert not scene.run(scene.triton, 0, 0, gathered)[:, :].nan_to_num(9.0).any()
    assert scene.triton.mismatched_expert(0) == -1


def test_lanes_keep_what_was_staged_until_their_target_runs(scene: Scene) -> None:
    first, _ = scene.load(3, 32)
    scene.triton.stage(0, first)
    second, gathered = scene.load(4, 32)
    scene.triton.stage(1, second)
    scene.host.stage(1, second)
    assert torch.equal(
        scene.run(scene.triton, 1, 0, gathered), scene.run(scene.host, 1, 0, gathered)
    )
    # The first plan's counts are not those of the second's routing.
    scene.triton.partition(0, gathered)
    assert scene.triton.mismatched_expert(0) >= 0
    assert scene.triton.mismatched_expert(1) == -1


def test_a_mismatch_is_named_as_by_the_twin_and_forgotten_by_the_next_target(
    scene: Scene,
) -> None:
    plan, gathered = scene.load(5, 32)
    for executor in (scene.triton, scene.host):
        executor.stage(0, plan)
    expert = int(gathered.expert_ids[9, 0])
    gathered.expert_ids[9, 0] = (expert + 1) % NUM_EXPERTS
    for executor in (scene.triton, scene.host):
        scene.run(executor, 0, 0, gathered)
        assert executor.mismatched_expert(0) == min(expert, (expert + 1) % NUM_EXPERTS)
    gathered.expert_ids[9, 0] = expert
    scene.triton.stage(0, plan)
    scene.run(scene.triton, 0, 0, gathered)
    assert scene.triton.mismatched_expert(0) == -1


def test_a_plan_the_device_refuses_is_an_error(scene: Scene) -> None:
    plan, gathered = scene.load(5, 32)
    scene.triton.stage(0, replace(plan, tile_m=2 * TILE_M))
    scene.triton.partition(0, gathered)
    with pytest.raises(InfeasiblePlanError, match="worker 1 cannot run the plan: OTHER_TILE_M"):
        scene.triton.mismatched_expert(0)
    scene.triton.stage(0, plan)
    scene.triton.partition(0, gathered)
    assert scene.triton.mismatched_expert(0) == -1


def test_shares_round_up_to_few_sizes(scene: Scene) -> None:
    shares = [scene.triton.rows_per_worker(n) for n in range(4096)]
    assert (np.diff(shares) >= 0).all(), "a larger target has no smaller share"
    for num_tokens, share in enumerate(shares):
        exact = max(1, -(-num_tokens // NUM_WORKERS))
        assert exact <= share <= exact * 9 / 8
    assert len(set(shares)) < 90
