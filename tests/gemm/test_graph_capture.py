"""One CUDA graph of expand, partition and FFN, replayed under changed plans and routings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afore_kernels import moe_ffn
from afore_kernels.config import Activation
from afore_kernels.gemm.device_tiles import DeviceTiles
from afore_kernels.gemm.launch import architecture, heuristic_launch
from afore_kernels.gemm.operand import is_interpreted
from afore_kernels.gemm.quant import ExpertWeight
from afore_kernels.gemm.reference import reference_moe_ffn
from afore_kernels.gemm.triton_executor import Workspace, run_expert_ffn
from afore_kernels.partition.demand import count_demand
from afore_kernels.partition.device_plan import DevicePlan, PlanStatus
from afore_kernels.partition.expand import PlanDefect
from afore_kernels.plan import PlanLayout, PrimaryPlacement
from afore_kernels.testing import assert_close, make_routing, make_weights, random_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        is_interpreted() or not torch.cuda.is_available(), reason="captures on a CUDA device"
    ),
]

NUM_EXPERTS, NUM_TOKENS, TOP_K, HIDDEN, INTERMEDIATE = 16, 96, 4, 256, 192
WORKER = 1
DTYPE = torch.bfloat16
LAYOUT = PlanLayout(PrimaryPlacement(NUM_EXPERTS, num_workers=4, redundant_slots=3), 1)
NUM_REPLAYS = 20


class Step:
    """One worker's step on static buffers: what a graph captures, and what a host writes first."""

    def __init__(self, tile_m: int, device: str) -> None:
        num_pairs = NUM_TOKENS * TOP_K
        self.tile_m = tile_m
        self.weights = make_weights(NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype=DTYPE)
        self.plan = DevicePlan.allocate(LAYOUT, WORKER, tile_m, num_pairs, device)
        self.tiles = DeviceTiles.allocate(self.plan.schedule, num_pairs)
        num_slots, max_rows = self.plan.schedule.num_slots, self.plan.schedule.max_rows
        self.slots = [
            torch.empty(num_slots, *weight.shape[1:], dtype=DTYPE, device=device)
            for weight in self.weights
        ]
        self.record = torch.empty(LAYOUT.record_bytes // 4, dtype=torch.int32, device=device)
        self.expert_ids = torch.empty(NUM_TOKENS, TOP_K, dtype=torch.int32, device=device)
        self.routing_weights = torch.empty(NUM_TOKENS, TOP_K, device=device)
        self.hidden = torch.empty(NUM_TOKENS, HIDDEN, dtype=DTYPE, device=device)
        self.workspace = Workspace.allocate(max_rows, HIDDEN, INTERMEDIATE, DTYPE, device)
        self.out = torch.empty(NUM_TOKENS, HIDDEN, device=device)

    def load(self, seed: int) -> None:
        """Overwrite the inputs: another routing, a plan for it, and the slots it binds."""
        expert_ids, routing_weights = make_routing(
            NUM_TOKENS, NUM_EXPERTS, TOP_K, skew=seed % 3, invalid_fraction=0.05, seed=seed
        )
        demand = count_demand(expert_ids.numpy(), NUM_EXPERTS)
        plan = random_plan(demand, LAYOUT.placement, self.tile_m, seed, sequence=seed)
        self.record.copy_(torch.from_numpy(LAYOUT.pack(plan).view(np.int32)))
        self.expert_ids.copy_(expert_ids)
        self.routing_weights.copy_(routing_weights)
        generator = torch.Generator().manual_seed(seed)
        self.hidden.copy_(torch.randn(NUM_TOKENS, HIDDEN, generator=generator))
        primaries = LAYOUT.placement.primaries(WORKER)
        experts = torch.tensor([*primaries, *plan.slot_expert[WORKER].tolist()])
        for slot, weight in zip(self.slots, self.weights):
            slot.copy_(weight[experts])
            slot[experts < 0] = torch.nan

    def run(self, num_tiles: int | None = None) -> None:
        """Launch the step, as a graph does unless the tile count is given."""
        self.plan.expand(self.record)
        self.plan.partition(self.expert_ids, self.tiles)
        gate_up, down, gate_up_bias, down_bias = self.slots
        run_expert_ffn(
            self.out,
            self.hidden,
            self.routing_weights,
            ExpertWeight.gate_up(gate_up),
            ExpertWeight.down(down),
            self.tiles,
            self.workspace,
            activation=Activation(),
            config=heuristic_launch(architecture(self.out.device), self.tile_m, has_bias=True),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            num_tiles=num_tiles,
            idle_sms=8,
        )

    def capture(self) -> torch.cuda.CUDAGraph:
        self.load(seed=0)
        self.run()  # compiles, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def check(self) -> None:
        """Compare `out` with an eager step, bit for bit, and with the oracle on the local pairs."""
        ids = self.expert_ids.cpu()
        num_invalid = int(((ids < 0) | (ids >= NUM_EXPERTS)).sum())
        assert self.plan.read_status() == PlanStatus(num_invalid, -1, PlanDefect.NONE)
        is_local = (self.tiles.pair_row >= 0).view_as(self.expert_ids).cpu()
        replayed = self.out.clone()
        self.out.fill_(torch.nan)
        self.run(num_tiles=int(self.plan.schedule.num_tiles))
        assert torch.equal(replayed, self.out)
        expected = reference_moe_ffn(
            self.hidden.cpu(),
            ids.where(is_local, -1),
            self.routing_weights.cpu(),
            self.weights.gate_up,
            self.weights.down,
            activation=Activation(),
            gate_up_bias=self.weights.gate_up_bias,
            down_bias=self.weights.down_bias,
        )
        assert_close(replayed.cpu(), expected, DTYPE)

    def replay(self, graph: torch.cuda.CUDAGraph, seed: int) -> None:
        self.load(seed)
        self.out.fill_(torch.nan)
        graph.replay()
        self.check()


@pytest.mark.parametrize("tile_m", [16, 64])
def test_replays_follow_plans_and_routings(tile_m: int) -> None:
    """DeepGEMM #444 and #451, vllm-exl3 #33: a host-built map or a flag frozen at capture."""
    step = Step(tile_m, "cuda")
    graph = step.capture()
    for seed in range(1, NUM_REPLAYS + 1):
        step.replay(graph, seed)


def test_larger_launch_between_replays() -> None:
    """triton #9259: scratch that was freed after the capture, then reused by a larger launch."""
    step = Step(16, "cuda")
    graph = step.capture()
    step.replay(graph, seed=1)
    torch.cuda.empty_cache()
    num_tokens = 64 * NUM_TOKENS
    expert_ids, routing_weights = make_routing(num_tokens, NUM_EXPERTS, TOP_K)
    moe_ffn(
        torch.ones(num_tokens, HIDDEN, dtype=DTYPE, device="cuda"),
        expert_ids.cuda(),
        routing_weights.cuda(),
        step.weights.gate_up.cuda(),
        step.weights.down.cuda(),
        activation=Activation(),
        tile_m=128,
    )
    dirt = torch.full((2**28,), torch.nan, device="cuda")
    for seed in range(2, 5):
        step.replay(graph, seed)
    assert dirt.isnan().all()
