"""A tier of real processes: equal results in every configuration, a named error for every fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from afore_kernels import Activation, AttentionClient, MoEConfig, Target, Tier, TierConfig
from afore_kernels.errors import (
    AforeError,
    ConfigError,
    CountMismatchError,
    MailboxTimeout,
    PeerLost,
    PlanError,
    PlanOrderError,
    ReplyTimeout,
    ShapeError,
)
from afore_kernels.runtime.weights import RandomWeights
from tests.runtime.dense_reference import reference_layer

pytestmark = pytest.mark.multiprocess

MOE = MoEConfig(
    num_layers=2,
    num_experts=11,
    top_k=3,
    hidden_size=16,
    intermediate_size=12,
    shared_intermediate_size=10,
    tile_m=4,
    activation=Activation(kind="none"),
    has_bias=True,
)
WEIGHTS = RandomWeights(MOE, seed=5, integer=True)
Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def children() -> set[int]:
    """Processes below this one, zombies included."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(status.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a process; memory and sockets have no names that could be left."""
    before = children()
    yield
    assert children() == before


def routing(num_tokens: int, seed: int) -> Routing:
    """Skewed integer-valued input of one rank: hidden, ids with a few -1, weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (num_tokens, MOE.hidden_size), generator=generator).float()
    scores = torch.rand(num_tokens, MOE.num_experts, generator=generator)
    scores *= torch.linspace(1.0, 0.3, MOE.num_experts).roll(seed % 3)
    expert_ids = scores.topk(MOE.top_k).indices
    expert_ids[torch.rand(expert_ids.shape, generator=generator) < 0.05] = -1
    weights = torch.randint(1, 4, expert_ids.shape, generator=generator).float()
    return hidden, expert_ids, weights


def reference(layer: int, inputs: Routing) -> torch.Tensor:
    """Dense reference of one layer, routed and shared experts."""
    return reference_layer(MOE, WEIGHTS, layer, inputs)


def tier_config(num_workers: int, **options: object) -> TierConfig:
    """Small and impatient, but not so impatient that a busy machine fails."""
    defaults = {
        "num_workers": num_workers,
        "max_tokens_per_rank": 64,
        "demand_timeout_s": 20.0,
        "reply_timeout_s": 20.0,
    }
    return TierConfig.from_dict(defaults | options)


def run_target(clients: list[AttentionClient], target: Target, tokens: list[int]) -> None:
    """Run one target on all ranks and compare every rank's rows, bit for bit."""
    inputs = [routing(n, hash((target, rank)) % 10**6) for rank, n in enumerate(tokens)]
    for client, (_, expert_ids, _) in zip(clients, inputs):
        client.send_demand(target, expert_ids)
    for client, rank_inputs in zip(clients, inputs):
        client.submit(target, *rank_inputs)
    for client, rank_inputs in zip(clients, inputs):
        assert torch.equal(client.wait(target), reference(target.layer, rank_inputs)), target


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {"copy_budget": 1}),
        (4, {}),
        (4, {"policy": "static"}),
        (4, {"demand_source": "previous_step"}),
        (4, {"overlap_copies": False, "redundant_slots": 1}),
        (3, {"reduction": "reduce_scatter"}),
        (8, {"compactness_threshold": 1, "redundant_slots": 3}),
    ],
)
def test_output_is_bit_equal_under_every_tier(num_workers: int, options: dict[str, object]) -> None:
    """Rules 1 and 9: integers make any lost, doubled or misplaced pair visible."""
    config = tier_config(num_workers, num_ranks=3, **options)
    tokens = [[7, 0, 13], [0, 1, 40], [5, 5, 5], [0, 0, 0]]
    with Tier.start(MOE, config, WEIGHTS) as tier:
        clients = [tier.client(rank) for rank in range(3)]
        for step in range(6):
            for layer in range(MOE.num_layers):
                for microbatch in range(2):
                    target = Target(step, layer, microbatch)
                    run_target(clients, target, tokens[(step + microbatch) % 4])
        rows = tier.timeline().per_target
    assert len(rows) == 6 * 2 * 2
    assert (rows["pairs_per_worker"].sum(1) == rows["static_pairs_per_worker"].sum(1)).all()
    replicas_expected = num_workers > 1 and options.get("policy") != "static"
    assert (rows["num_copies"].sum() > 0) == replicas_expected
    moved = (rows["pairs_per_worker"] != rows["static_pairs_per_worker"]).any()
    assert moved == replicas_expected


@pytest.mark.parametrize("measure_window", [False, True])
def test_measured_window_ends_copies_that_it_does_not_hide(measure_window: bool) -> None:
    """A copy is said to take an hour and the window to hide two; the measured one does not."""
    hour_us = 3.6e9
    config = tier_config(
        2, copy_time_us=hour_us, window_us=2 * hour_us, measure_window=measure_window
    )
    with Tier.start(MOE, config, WEIGHTS) as tier:
        client = tier.client(0)
        for step in range(8):
            for layer in range(MOE.num_layers):
                run_target([client], Target(step, layer, 0), [40])
        copies = tier.timeline().per_target["num_copies"]
    assert copies[0] > 0
    # One target is on its way through the workers while the next one is planned.
    assert (copies[2:].sum() == 0) == measure_window


def test_many_targets_in_flight_from_several_processes_and_threads() -> None:
    """Two ranks, one of them another process, three microbatches in flight each."""
    config = tier_config(2, num_ranks=2, targets_in_flight=3)
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.runtime.test_tier import *
with AttentionClient.connect(sys.argv[1], 1) as client:
    run_pipelined(client, 1)
print("done")
"""
    with Tier.start(MOE, config, WEIGHTS) as tier:
        other = subprocess.Popen(
            [sys.executable, "-c", script, tier.address], stdout=subprocess.PIPE, text=True
        )
        with tier.client(0) as client:
            run_pipelined(client, 0)
            output, _ = other.communicate(timeout=60)
    assert output == "done\n"


def run_pipelined(client: AttentionClient, rank: int) -> None:
    """Run 8 steps of 2 layers and 3 microbatches, waiting for the oldest only."""
    waiting: list[tuple[Target, Routing]] = []
    for step in range(8):
        for layer in range(2):
            for microbatch in range(3):
                target = Target(step, layer, microbatch)
                inputs = routing((step + 5 * rank + microbatch) % 9, step + microbatch)
                if len(waiting) == 3:
                    oldest, oldest_inputs = waiting.pop(0)
                    assert torch.equal(client.wait(oldest), reference(oldest.layer, oldest_inputs))
                client.send_demand(target, inputs[1])
                client.submit(target, *inputs)
                waiting.append((target, inputs))
    for target, inputs in waiting:
        assert torch.equal(client.wait(target), reference(target.layer, inputs))


def test_faults_of_a_client_are_named_and_the_tier_keeps_serving() -> None:
    config = tier_config(2, num_ranks=2, demand_timeout_s=0.5, reply_timeout_s=3.0)
    with Tier.start(MOE, config, WEIGHTS) as tier:
        first, second = clients = [tier.client(0), tier.client(1)]
        step = iter(range(1000))

        def expect(error: type[AforeError], text: str, fault: Callable[[Target], None]) -> None:
            target = Target(next(step), 0, 0)
            with pytest.raises(error, match=text):
                fault(target)
            run_target(clients, Target(next(step), 1, 0), [5, 6])  # nothing is lost

        hidden, expert_ids, weights = routing(4, 1)
        empty = expert_ids[:0]

        def other_ids(target: Target) -> None:
            second.send_demand(target, empty)
            first.send_demand(target, expert_ids)
            first.submit(target, hidden, (expert_ids + 1).clamp(max=10), weights)
            with pytest.raises(CountMismatchError):
                second.wait(target)
            first.wait(target)

        def never_submitted(target: Target) -> None:
            first.send_demand(target, expert_ids)
            second.send_demand(target, expert_ids)
            second.submit(target, hidden, expert_ids, weights)
            with pytest.raises(MailboxTimeout, match="no input of attention rank 0"):
                second.wait(target)
            first.wait(target)

        def never_posted(target: Target) -> None:
            first.send_demand(target, expert_ids)
            with pytest.raises(MailboxTimeout, match="no demand of attention rank 1"):
                first.wait(target)
            second.send_demand(target, expert_ids)  # too late
            second.wait(target)

        def another_target(target: Target) -> None:
            first.send_demand(target, expert_ids)
            second.send_demand(target._replace(microbatch=9), expert_ids)
            with pytest.raises(PlanOrderError, match="attention rank 1 posted another"):
                second.wait(target._replace(microbatch=9))
            first.wait(target)

        def corrupt_record(target: Target) -> None:
            first.send_demand(target, expert_ids)
            entries = tier._memory.arrays["demand_entries"]
            sequence = first._next_sequence - 1
            entries[0, sequence % config.targets_in_flight, 20] ^= 1
            second.send_demand(target, expert_ids)
            with pytest.raises(PlanError, match="demand record of attention rank 0"):
                second.wait(target)
            first.wait(target)

        def wrong_size(target: Target) -> None:
            second.send_demand(target, empty)
            first.send_demand(target, expert_ids)
            try:
                first.submit(target, hidden[:3], expert_ids[:3], weights[:3])
            finally:
                first.submit(target, hidden, expert_ids, weights)
                first.wait(target)
                second.wait(target)

        expect(CountMismatchError, "not those whose demand", other_ids)
        expect(MailboxTimeout, "no input of attention rank 0", never_submitted)
        expect(MailboxTimeout, "no demand of attention rank 1", never_posted)
        expect(PlanOrderError, "attention rank 1 posted another", another_target)
        expect(PlanError, "demand record of attention rank 0", corrupt_record)
        expect(ShapeError, "announced with 4 tokens", wrong_size)


def test_rank_of_a_killed_client_counts_as_empty_and_can_be_taken_again() -> None:
    config = tier_config(2, num_ranks=2)
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.runtime.test_tier import *
client = AttentionClient.connect(sys.argv[1], 1)
client.send_demand(Target(0, 0, 0), routing(4, 1)[1])
print("posted", flush=True)
time.sleep(60)
"""
    with Tier.start(MOE, config, WEIGHTS) as tier:
        client = tier.client(0)
        other = subprocess.Popen(
            [sys.executable, "-c", script, tier.address], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        with other.stdout:
            assert other.stdout.readline() == "posted\n"
        hidden, expert_ids, weights = routing(6, 2)
        client.send_demand(Target(0, 0, 0), expert_ids)
        client.submit(Target(0, 0, 0), hidden, expert_ids, weights)
        with pytest.raises(PeerLost, match="already has a client"):
            AttentionClient.connect(tier.address, 1)
        other.kill()
        other.wait()
        with pytest.raises(PeerLost, match="client of attention rank 1 is gone"):
            client.wait(Target(0, 0, 0))
        run_target([client], Target(1, 0, 0), [9])
        with pytest.raises(PeerLost, match="was lost"):
            AttentionClient.connect(tier.address, 1)
        with pytest.raises(ConfigError, match="rank must be in"):
            AttentionClient.connect(tier.address, 2)
        client.close()
        with pytest.raises(PeerLost, match="client was closed"):
            client.send_demand(Target(2, 0, 0), expert_ids)
        again = [tier.client(0), AttentionClient.connect(tier.address, 1)]
        run_target(again, Target(2, 1, 0), [3, 4])
        for one in again:
            one.close()
    with pytest.raises(PeerLost, match="no tier answers"):
        AttentionClient.connect(tier.address, 1)


@pytest.mark.parametrize("victim", ["worker 1", "scheduler"])
def test_killed_process_is_named_to_every_client(victim: str) -> None:
    with Tier.start(MOE, tier_config(2), WEIGHTS) as tier:
        client = tier.client()
        run_target([client], Target(0, 0, 0), [5])
        process = next(child for child in tier._children if child.name == victim)
        expert_ids = routing(4, 1)[1]
        client.send_demand(Target(1, 0, 0), expert_ids)
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(PeerLost, match=f"{victim} was killed by SIGKILL"):
            client.wait(Target(1, 0, 0))
        with pytest.raises(PeerLost, match=f"{victim} was killed by SIGKILL"):
            client.send_demand(Target(2, 0, 0), expert_ids)
        with pytest.raises(PeerLost, match=f"{victim} was killed by SIGKILL"):
            tier.client()
        assert time.monotonic() - started < 10


def test_stopped_worker_is_named_and_its_target_is_not_lost() -> None:
    with Tier.start(MOE, tier_config(3), WEIGHTS) as tier:
        client = tier.client()
        run_target([client], Target(0, 0, 0), [5])
        pid = tier._workers[2].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            inputs = routing(8, 3)
            client.send_demand(Target(1, 0, 0), inputs[1])
            client.submit(Target(1, 0, 0), *inputs)
            with pytest.raises(ReplyTimeout, match="worker 2"):
                client.wait(Target(1, 0, 0), timeout_s=1.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert torch.equal(client.wait(Target(1, 0, 0)), reference(0, inputs))


def test_corrupt_plan_record_ends_the_tier_with_a_named_error() -> None:
    with Tier.start(MOE, tier_config(2), WEIGHTS) as tier:
        client = tier.client()
        run_target([client], Target(0, 0, 0), [5])
        pid = tier._workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            inputs = routing(8, 3)
            client.send_demand(Target(1, 0, 0), inputs[1])
            while int(tier._memory.arrays["plans_published"][0]) < 2:
                time.sleep(0.001)
            tier._memory.arrays["plan_records"][1, 100] ^= 1
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(PlanError, match="checksum"):
            client.wait(Target(1, 0, 0))


def test_tier_goes_down_with_the_process_that_started_it() -> None:
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.runtime.test_tier import *
tier = Tier.start(MOE, tier_config(2), WEIGHTS)
print(tier.address, *(child.pid for child in tier._children), flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        address, *pids = parent.stdout.readline().split()
    client = AttentionClient.connect(address)
    client.send_demand(Target(0, 0, 0), routing(4, 1)[1])
    parent.kill()
    parent.wait()
    with pytest.raises(PeerLost, match="the process that started the tier is gone"):
        client.wait(Target(0, 0, 0))
    client.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process outlived its tier"
        time.sleep(0.05)


def test_failed_start_leaves_nothing_behind() -> None:
    class Misshapen(RandomWeights):
        def expert(self, layer: int, expert: int):  # type: ignore[no-untyped-def]
            tensors = super().expert(layer, expert)
            return tensors._replace(down=tensors.down[:, :-1])

    with pytest.raises(ShapeError, match="down has shape"):
        Tier.start(MOE, tier_config(2), Misshapen(MOE, integer=True))
    with pytest.raises(PeerLost, match="not ready within"):
        Tier.start(MOE, tier_config(1, startup_timeout_s=0.05), WEIGHTS)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device 'cuda' needs a CUDA build of torch"):
            Tier.start(MOE, tier_config(2, device="cuda"), WEIGHTS)


def test_timeline_holds_every_stage_of_every_target(tmp_path: Path) -> None:
    with Tier.start(MOE, tier_config(2), WEIGHTS) as tier:
        client = tier.client()
        for step in range(3):
            run_target([client], Target(step, 0, 0), [20])
        timeline = tier.timeline()
        timeline.write(tmp_path / "timeline.json")
    rows = timeline.per_target
    copied = rows[rows["num_copies"] > 0]
    assert len(copied)
    for name in ("raw_copy_us", "lookahead_us", "exposed_us", "planned_us"):
        assert (copied[name] >= 0).all(), name
    stages = {(e.sequence, e.stage.name) for e in timeline.events}
    for sequence in range(3):
        for stage in ("DEMAND_POSTED", "PLANNED", "INPUT", "GATHER", "COPIES_SUBMITTED"):
            assert (sequence, stage) in stages
        for stage in ("COPY_WAIT", "PARTITION", "GEMM", "REDUCE", "REPLY", "RECEIVED"):
            assert (sequence, stage) in stages
    assert np.isin(
        copied["sequence"], [e.sequence for e in timeline.events if e.stage.name == "COPY"]
    ).all()
    assert (tmp_path / "timeline.json").stat().st_size > 1000
