"""Latency from demand written to plan visible: the mailbox and plan ring against message passing.

One poster (this process), one scheduler and `--workers` readers; all alternatives take turns in one
run, with the same processes. A sample runs from just before the last rank's demand is posted until
every reader has copied and validated the plan. In `paced` mode every process has been idle for 1 ms
before the post; in `back-to-back` mode the next post follows the last reader at once.

On a machine that others use, run it under `chrt -r 5` (root), or their load is what it measures.

Run: python -m bench.mailbox [--workers 4] [--experts 128] [--ranks 2] [--targets 2000]
    [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.plan import Int32Array, Target
from afore_kernels.runtime.memory import TierMemory
from afore_kernels.runtime.timeline import Stage, read_events
from bench.board import Board
from bench.channels import available_channels
from bench.harness import hardware_line, write_json
from bench.links import (
    CLOSE_TIMEOUT_S,
    Link,
    MessageLink,
    SharedMemoryLink,
    running_scheduler,
)

OURS = "shared memory (afore)"
PAUSE_S = {"paced": 1e-3, "back-to-back": 0.0}
SETTLE_S = 1e-3
NUM_LAYERS, TOP_K, TOKENS_PER_RANK = 4, 8, 128
TARGETS_PER_BATCH = 50


class Batch(NamedTuple):
    """Consecutive targets over one link in one mode."""

    link: int
    mode: str
    sequences: range
    is_warmup: bool


def make_schedule(num_links: int, num_targets: int) -> list[Batch]:
    """Let the links take turns, in rotated order, in batches of each mode, after a warm-up."""
    size = min(TARGETS_PER_BATCH, num_targets)
    schedule, first = [], 0
    for turn in range(-1, num_targets // size):
        for mode in PAUSE_S:
            sequences = range(first, first + size)
            for position in range(num_links):
                link = (turn + position) % num_links
                schedule.append(Batch(link, mode, sequences, turn < 0))
            first += size
    return schedule


def draw_demand(num_experts: int, num_ranks: int, num_targets: int) -> Int32Array:
    """Draw skewed demand that drifts from target to target, int32 [targets, ranks, experts]."""
    rng = np.random.default_rng(0)
    zipf = 1.0 / (1.0 + np.arange(num_experts))
    popularity = [rng.permutation(zipf) for _ in range(NUM_LAYERS)]
    demand = np.zeros((num_targets, num_ranks, num_experts), np.int32)
    for index in range(num_targets):
        drifted = popularity[index % NUM_LAYERS] * rng.uniform(0.5, 1.5, num_experts)
        demand[index] = rng.multinomial(TOKENS_PER_RANK * TOP_K, drifted / drifted.sum(), num_ranks)
    return demand


def run_planner(links: list[Link], schedule: list[Batch], board: Board) -> None:
    """Plan for the message links, in turn."""
    plan = {i: link.planner() for i, link in enumerate(links) if isinstance(link, MessageLink)}
    for batch in schedule:
        if batch.link in plan:
            for sequence in batch.sequences:
                board.planned_ns[batch.link, sequence] = plan[batch.link](sequence)
    # A ZeroMQ context that ends drops what it has not sent yet.
    board.wait_until_read(sum(len(batch.sequences) for batch in schedule))


def run_worker(links: list[Link], schedule: list[Batch], board: Board, worker: int) -> None:
    """Read every plan of every link, in turn."""
    read = [link.reader(worker) for link in links]
    for batch in schedule:
        for sequence in batch.sequences:
            plan = read[batch.link]()
            board.read_ns[batch.link, worker, sequence] = time.monotonic_ns()
            digest = zlib.crc32(plan.slot_pairs, zlib.crc32(plan.slot_expert))
            board.digest[batch.link, worker, sequence] = digest
            board.count_read()


def run_poster(
    links: list[Link], schedule: list[Batch], board: Board, demand: Int32Array
) -> npt.NDArray[np.int64]:
    """Post every target over every link; returns the times, ns [links, sequences]."""
    posted_ns = np.zeros((len(links), len(demand)), np.int64)
    post = [link.poster() for link in links]
    num_posted = 0
    for batch in schedule:
        time.sleep(SETTLE_S)  # until the planner and the workers wait on this link
        for sequence in batch.sequences:
            if PAUSE_S[batch.mode]:
                time.sleep(PAUSE_S[batch.mode])
            target = Target(sequence // NUM_LAYERS, sequence % NUM_LAYERS, 0)
            for rank, rank_demand in enumerate(demand[sequence]):
                posted_ns[batch.link, sequence] = time.monotonic_ns()
                post[batch.link](rank, sequence, target, TOKENS_PER_RANK, rank_demand)
            num_posted += 1
            board.wait_until_read(num_posted)
    return posted_ns


@contextmanager
def running_processes(calls: list[tuple[Any, ...]]) -> Iterator[None]:
    """Fork a process for each (function, *arguments) and leave none behind."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=call[0], args=call[1:], daemon=True) for call in calls]
    try:
        for process in processes:
            process.start()
        yield
        for process in processes:
            process.join(CLOSE_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(moe: MoEConfig, tier: TierConfig, num_targets: int) -> dict[str, Any]:
    """Measure every link in every mode.

    Returns:
        `rows`, one per mode and link, and `validation_us`, what a reader that runs alone needs to
        check one plan: the part of every sample that no link can avoid. All times in us.
    """
    channels = available_channels()
    memory = TierMemory.create(moe, tier)
    names = [OURS, *(name for name, channel in channels.items() if channel)]
    messages = [MessageLink(moe, tier, channel) for channel in channels.values() if channel]
    messages[0].planner()  # compiled here, before the fork
    links: list[Link] = [SharedMemoryLink(memory), *messages]
    schedule = make_schedule(len(links), num_targets)
    num_sequences = schedule[-1].sequences.stop
    demand = draw_demand(moe.num_experts, tier.num_ranks, num_sequences)
    board = Board(len(links), tier.num_workers, num_sequences)
    common = (links, schedule, board)
    workers = [(run_worker, *common, worker) for worker in range(tier.num_workers)]
    with running_scheduler(memory), running_processes([(run_planner, *common), *workers]):
        posted_ns = run_poster(*common, demand)
    for event in read_events(memory):
        if event.stage is Stage.PLANNED:
            board.planned_ns[0, event.sequence] = event.end_ns - event.start_ns
    if (board.digest != board.digest[0, 0]).any():
        raise RuntimeError("the links did not carry the same plans")

    visible_us = (board.read_ns.max(axis=1) - posted_ns) / 1e3
    rows = []
    for mode in PAUSE_S:
        turns = [b.sequences for b in schedule if (b.link, b.mode, b.is_warmup) == (0, mode, False)]
        timed = [sequence for sequences in turns for sequence in sequences]
        for link, name in enumerate(names):
            samples = visible_us[link, timed]
            rows.append(
                {
                    "mode": mode,
                    "link": name,
                    "samples": len(timed),
                    "reads": int((board.read_ns[link] > posted_ns[link])[:, timed].sum()),
                    "median_us": float(np.median(samples)),
                    "p99_us": float(np.percentile(samples, 99)),
                    "planning_us": float(np.median(board.planned_ns[link, timed])) / 1e3,
                    "ratio": float(np.median(samples) / np.median(visible_us[0, timed])),
                }
            )
    for message_link in messages:
        message_link.close()
    return {"rows": rows, "validation_us": time_validation(memory, num_sequences)}


def time_validation(memory: TierMemory, num_published: int) -> float:
    """Median time to check one of the published plans, us."""
    times_ns = []
    for record in memory.arrays["plan_records"][:num_published][-TARGETS_PER_BATCH:]:
        start_ns = time.perf_counter_ns()
        memory.plan_layout.unpack(record)
        times_ns.append(time.perf_counter_ns() - start_ns)
    return float(np.median(times_ns)) / 1e3


def commit() -> str:
    """Describe the checkout's commit, `unknown` outside one."""
    command = ["git", "describe", "--always", "--dirty"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--targets", type=int, default=2000, help="samples per row; beyond 50 a multiple of it"
    )
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    arguments = parser.parse_args()
    num_targets = arguments.targets // 10 if arguments.quick else arguments.targets
    if num_targets < 1:
        parser.error("too few targets")
    moe = MoEConfig(
        num_layers=NUM_LAYERS,
        num_experts=arguments.experts,
        top_k=TOP_K,
        hidden_size=1,
        intermediate_size=1,
    )
    tier = TierConfig(
        num_workers=arguments.workers,
        num_ranks=arguments.ranks,
        max_tokens_per_rank=TOKENS_PER_RANK,
    )
    is_real_time = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    priority = "real-time" if is_real_time else "normal"
    load = [os.getloadavg()[0]]
    result = measure(moe, tier, num_targets)
    load.append(os.getloadavg()[0])
    command = shlex.join(["python", "-m", "bench.mailbox", *sys.argv[1:]])
    print(hardware_line())
    print(
        f"{os.cpu_count()} CPUs, load average {load[0]:.1f} before, {load[1]:.1f} after, "
        f"{priority} priority"
    )
    print(f"commit {commit()}: {command}")
    print(f"a reader alone validates a plan in {result['validation_us']:.0f} us, in every row")
    header = ("median us", "p99 us", "planning us", "ratio to ours")
    print(f"{'mode':<14}{'link':<24}" + "".join(f"{title:>14}" for title in header))
    for row in result["rows"]:
        times = (row["median_us"], row["p99_us"], row["planning_us"])
        print(
            f"{row['mode']:<14}{row['link']:<24}"
            + "".join(f"{time_us:>14.0f}" for time_us in times)
            + f"{row['ratio']:>14.2f}"
        )
    for name, channel in available_channels().items():
        if channel is None:
            print(f"{'':<14}{name:<24}{'not installed':>14}")
    if arguments.json:
        source = {
            "command": command,
            "commit": commit(),
            "priority": priority,
            "load_average": load,
        }
        write_json(arguments.json, source | result)


if __name__ == "__main__":
    main()
