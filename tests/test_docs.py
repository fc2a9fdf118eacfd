"""The documents cannot drift: the tables of `docs/wire.md` decode what the code writes."""

from __future__ import annotations

import json
import re
import socket
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afore_kernels import errors
from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.plan import Plan, Rejection, Target
from afore_kernels.runtime import memory as tier_memory
from afore_kernels.runtime import shared
from afore_kernels.runtime.client import AttentionClient
from afore_kernels.runtime.mailbox import DemandWriter
from afore_kernels.runtime.memory import TierMemory
from afore_kernels.runtime.timeline import Stage, Track
from afore_kernels.runtime.transports.local import LocalTransport, Outcome, ReplyStatus

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
WIRE = (ROOT / "docs" / "wire.md").read_text()

MOE = MoEConfig(num_layers=3, num_experts=7, top_k=2, hidden_size=10, intermediate_size=4)
TIER = TierConfig(
    num_workers=3,
    num_ranks=2,
    max_tokens_per_rank=5,
    redundant_slots=2,
    targets_in_flight=3,
    plan_ring_depth=4,
    timeline_events=16,
)
SIZES = {
    **{name: getattr(MOE, name) for name in ("num_experts", "top_k", "hidden_size")},
    **{name: getattr(TIER, name) for name in TIER.__slots__ if name.startswith(("num_", "max_"))},
    "targets_in_flight": TIER.targets_in_flight,
    "plan_ring_depth": TIER.plan_ring_depth,
    "timeline_events": TIER.timeline_events,
    "num_slots": TIER.num_workers * TIER.redundant_slots,
    "dtype_bytes": 4,
    "ceil": lambda a, b: -(-a // b),
}


@pytest.fixture
def memory() -> TierMemory:
    """The shared memory of a tier without processes."""
    return TierMemory.create(MOE, TIER)


def section(title: str) -> str:
    """Text of one section of the page."""
    return re.split(r"^## ", WIRE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def rows_of(text: str, first_column: str) -> list[list[str]]:
    """Cells of the table whose header starts with `first_column`."""
    header = rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\n"
    table = re.search(rf"{header}((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"no table of {first_column}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def evaluate(expression: str) -> Any:
    """Value of an offset, a size or a shape for the configurations above."""
    return eval(expression.strip("`"), {"__builtins__": {}}, SIZES)


def record_dtype(title: str, num_bytes: int) -> np.dtype[Any]:
    """Structured dtype of a byte table; its fields must follow each other without a gap."""
    fields, end = {}, 0
    for offset, size, kind, name, *_ in rows_of(section(title), "offset"):
        assert evaluate(offset) == end, name
        end += evaluate(size)
        element = np.dtype("u1" if kind == "bytes" else kind).newbyteorder("<")
        fields[name.strip("`")] = (element, evaluate(size) // element.itemsize, evaluate(offset))
    return np.dtype(
        {
            "names": list(fields),
            "formats": [(kind, (n,)) if n != 1 else kind for kind, n, _ in fields.values()],
            "offsets": [offset for *_, offset in fields.values()],
            "itemsize": num_bytes,
        }
    )


def decode(title: str, data: np.ndarray) -> dict[str, Any]:
    """Read bytes by the byte table of a section."""
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    record = raw.view(record_dtype(title, raw.size))[0]
    return {name: record[name].tolist() for name in record.dtype.names}


def fnv1a(data: np.ndarray, checksum_offset: int) -> int:
    """The checksum as the page states it."""
    start, factor = re.findall(r"start with (\d+);.*?\* (\d+)`", section("Checksum"), re.DOTALL)[0]
    words = np.ascontiguousarray(data).reshape(-1).view(np.uint32).tolist()
    words[checksum_offset // 4] = 0
    value = int(start)
    for word in words:
        value = (value ^ word) * int(factor) % 2**32
    return value


def test_segment_fields_are_the_tables(memory: TierMemory) -> None:
    SIZES["record_bytes"] = memory.plan_layout.record_bytes
    documented = {
        name.strip("`"): (np.dtype(kind), tuple(evaluate(shape)))
        for name, kind, shape, _ in rows_of(section("The segment"), "field")
    }
    actual = {name: (field.dtype, field.shape) for name, field in memory.arrays.items()}
    assert list(documented.items()) == list(actual.items())


def test_fields_follow_each_other_on_cache_lines(memory: TierMemory) -> None:
    start = memory.arrays["state"].ctypes.data
    for name, field in memory.arrays.items():
        assert field.ctypes.data == start, name
        start += max(-(-field.nbytes // 64), 1) * 64


def test_demand_entry(memory: TierMemory) -> None:
    writer = DemandWriter(memory, rank=1)
    demand = np.array([1, 0, 2, 0, 3, 0, 4], np.int32)
    writer.post(2, Target(1 << 40, 2, 5), 5, demand, shared.FOREVER_NS)
    entry = memory.arrays["demand_entries"][1, 2]
    decoded = decode("Demand entry", entry)
    expected_magic = int.from_bytes(b"AFDM", "little")
    assert decoded == {
        "magic": expected_magic,
        "rank": 1,
        "layer": 2,
        "microbatch": 5,
        "num_tokens": 5,
        "num_experts": 7,
        "sequence": 2,
        "step": 1 << 40,
        "reserved": [0] * 20,
        "checksum": fnv1a(entry, 60),
        "demand": demand.tolist(),
    }
    assert f"{expected_magic:#x}".upper()[2:] in section("Demand entry")


def test_plan_record(memory: TierMemory) -> None:
    plan = Plan(
        target=Target(1 << 40, 2, 5),
        sequence=1 << 33,
        tile_m=8,
        demand=np.arange(10, 17, dtype=np.int32),
        rank_tokens=np.array([5, 4], np.int32),
        slot_expert=np.array([[4, -1], [6, 0], [1, 2]], np.int32),
        slot_pairs=np.array([[3, 0], [0, 5], [6, 7]], np.int32),
        slot_copy=np.array([[1, 0], [0, 1], [0, 1]], np.uint8),
        rejection=Rejection.BAD_DEMAND,
        rejected_rank=1,
    )
    record = memory.plan_layout.pack(plan)
    expected_magic = int.from_bytes(b"AFPL", "little")
    assert decode("Plan record", record) == {
        "magic": expected_magic,
        "version": 1,
        "record_bytes": record.size,
        "rejection": 3,
        "sequence": 1 << 33,
        "step": 1 << 40,
        "layer": 2,
        "microbatch": 5,
        "tile_m": 8,
        "num_copies": 3,
        "rejected_rank": 1,
        "reserved": 0,
        "reserved2": 0,
        "checksum": fnv1a(record, 60),
        "demand": plan.demand.tolist(),
        "rank_tokens": [5, 4],
        "slot_expert": plan.slot_expert.flatten().tolist(),
        "slot_pairs": plan.slot_pairs.flatten().tolist(),
        "slot_copy": plan.slot_copy.flatten().tolist(),
    }
    body = record_dtype("Plan record", record.size)
    end = body.fields["slot_copy"][1] + body["slot_copy"].itemsize
    assert record.size == -(-end // 64) * 64
    assert f"{expected_magic:#x}".upper()[2:] in section("Plan record")


def test_input_header(memory: TierMemory) -> None:
    LocalTransport(memory).send(1, 5, Target(7, 2, 3), 4)
    decoded = decode("Input slot", memory.arrays["input_header"][1, 5 % 3])
    expected = {"sequence": 5, "step": 7, "layer": 2, "microbatch": 3, "num_tokens": 4}
    assert decoded == expected


def test_reply_status(memory: TierMemory) -> None:
    LocalTransport(memory).reply(2, 1, 5, Outcome(ReplyStatus.RANK_LOST, 1))
    assert decode("Reply slot", memory.arrays["reply_status"][1, 5 % 3, 2]) == {
        "status": int(ReplyStatus.RANK_LOST),
        "rank": 1,
    }


def test_timeline_event(memory: TierMemory) -> None:
    Track(memory, "worker 0 model").record(Stage.GEMM, 5, 100, 250, 9)
    assert decode("Timeline event", memory.arrays["events"][1, 0]) == {
        "stage": int(Stage.GEMM),
        "sequence": 5,
        "start_ns": 100,
        "end_ns": 250,
        "value": 9,
    }


def test_doorbell(memory: TierMemory) -> None:
    bell = memory.bell(tier_memory.REPLY_BELL)
    sleeper = threading.Thread(
        target=shared.sleep_on_bell, args=(bell, np.int32(0), np.int64(60_000_000_000))
    )
    sleeper.start()
    while bell[1] == 0:
        assert sleeper.is_alive()
    assert decode("Counters and doorbells", memory.arrays["bells"][4])["sleepers"] == 1
    shared.ring_bell(bell)
    sleeper.join(60)
    assert not sleeper.is_alive()
    assert decode("Counters and doorbells", memory.arrays["bells"][4]) == {
        "rings": 1,
        "sleepers": 0,
        "unused": [0] * 56,
    }


def test_every_counter_is_listed(memory: TierMemory) -> None:
    listed = {row[0].strip("`"): row[3] for row in rows_of(WIRE, "counter")}
    assert set(listed) <= set(memory.arrays)
    before = {name: memory.arrays[name].copy() for name in listed}
    DemandWriter(memory, 1).post(0, Target(0, 0, 0), 0, np.zeros(7, np.int32), shared.FOREVER_NS)
    LocalTransport(memory).send(1, 4, Target(0, 0, 0), 0)
    LocalTransport(memory).reply(2, 1, 0, Outcome(ReplyStatus.OK))
    changed = {
        name: np.flatnonzero(memory.arrays[name] != before[name]).tolist() for name in listed
    }
    # Counter i is element 8 * i: rank 1; rank 1 with slot 4 % 3; rank 1 with worker 2.
    expected = {"demand_posted": [8], "input_ready": [8 * 4], "reply_ready": [8 * 5]}
    assert changed == {name: expected.get(name, []) for name in listed}
    rung = np.flatnonzero(memory.arrays["bells"][:, 0]).tolist()
    assert rung == [int(listed[name].split()[0]) for name in expected]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("`rejection`", dict(Rejection.__members__)),
        ("`status`", dict(ReplyStatus.__members__)),
        ("`stage`", dict(Stage.__members__)),
        ("`state[0]`", {name: getattr(shared, name) for name in ("RUNNING", "STOPPING", "FAILED")}),
        (
            "`rank_state`",
            {name: getattr(tier_memory, name) for name in ("AWAITED", "CONNECTED", "LOST")},
        ),
    ],
)
def test_enumerations_are_complete(column: str, values: dict[str, int]) -> None:
    rows = rows_of(WIRE, column)
    documented = {meaning.split("`")[1]: int(value) for value, meaning, *_ in rows}
    assert documented == values


def hello_examples() -> list[dict[str, Any]]:
    """The three JSON examples: hello, admission, refusal."""
    blocks = re.findall(r"^```json\n(.*?)^```$", section("Client hello"), re.DOTALL | re.MULTILINE)
    return [json.loads(block) for block in blocks]


def answer_once(address: str, answer: bytes, fds: list[int], received: list[bytes]) -> Any:
    """Play the tier for one client that connects to `address`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(60)
    listener.bind("\0" + address[1:])
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            received.append(connection.recv(4096))
            socket.send_fds(connection, [answer], fds)
            received.append(connection.recv(4096))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_admitted_client(memory: TierMemory) -> None:
    hello, admission, _ = hello_examples()
    assert set(admission) == {"moe", "tier", "first_sequence"}
    admission |= {"moe": MOE.to_json(), "tier": TIER.to_json()}
    address, received = f"@afore-test-{uuid.uuid4()}", []
    tier = answer_once(address, json.dumps(admission).encode(), [memory.segment.fd], received)
    client = AttentionClient.connect(address, rank=hello["rank"])
    client.close()
    tier.join(60)
    assert json.loads(received[0]) == hello
    assert received[0].endswith(b"\n")
    assert received[1] == b""
    assert (client.moe, client.tier) == (MOE, TIER)


def test_refused_client() -> None:
    *_, refusal = hello_examples()
    address, received = f"@afore-test-{uuid.uuid4()}", []
    tier = answer_once(address, json.dumps(refusal).encode(), [], received)
    with pytest.raises(getattr(errors, refusal["error"]), match=re.escape(refusal["message"])):
        AttentionClient.connect(address)
    tier.join(60)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#]+)\)", text) if ":" not in link]
    named = re.findall(r"`((?:afore_kernels|tests|bench|docs)/[\w/.]+)`", text)
    missing = [path for path in [*links, *(ROOT / name for name in named)] if not path.exists()]
    assert missing == []


def test_tests_named_for_public_faults_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 40
    missing = [
        f"{path}::{test}" for path, test in named if f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_modules_and_names_exist(page: Path) -> None:
    """A file of the package by its path, a name by its module or class: `mailbox.write_entry`."""
    text = page.read_text()
    package = ROOT / "afore_kernels"
    files = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    assert [name for name in files if not any((r / name).exists() for r in (package, ROOT))] == []

    source_of = {}
    for path in package.rglob("*.py"):
        source = path.read_text()
        source_of[path.stem] = source
        source_of |= dict.fromkeys(re.findall(r"^class (\w+)", source, re.MULTILINE), source)
    unknown = [
        f"{owner}.{name}"
        for owner, name in re.findall(r"`(\w+)\.(\w+)`", text)
        if name != "py" and not re.search(rf"\b{name}\b", source_of.get(owner, ""))
    ]
    assert unknown == []
