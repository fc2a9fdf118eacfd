"""Rows on the device against `PairTiles.select`, by both paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afore_kernels.config import INT32_MAX
from afore_kernels.errors import ShapeError
from afore_kernels.gemm import count, select
from afore_kernels.gemm.device_tiles import DeviceSchedule, DeviceTiles
from afore_kernels.gemm.layout import lay_out_tiles
from afore_kernels.gemm.select import SelectPath, select_pairs
from afore_kernels.gemm.tiles import Int32Array, PairTiles, TileSchedule, count_pairs
from afore_kernels.testing import make_routing
from tests.guarded import Guarded

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.parametrize("path", ["slot_major", "chunked"]),
]


def make_schedule(counts: Int32Array, tile_m: int, device: str, spare: int = 3) -> DeviceSchedule:
    """A schedule of `counts` pairs per slot with `spare` tiles behind them."""
    num_tiles = TileSchedule.from_pair_counts(counts, tile_m).num_tiles + spare
    sizes = (counts.size, counts.size + 1, num_tiles, num_tiles, 1)
    schedule = DeviceSchedule(
        tile_m, *(torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    )
    schedule.pairs_per_slot.copy_(torch.from_numpy(counts))
    lay_out_tiles(schedule)
    return schedule


def check_select(
    path: SelectPath,
    device: str,
    expert_ids: torch.Tensor,
    slot_of_expert: list[int],
    first_ordinal: list[int],
    pairs_per_slot: list[int],
    *,
    tile_m: int = 4,
    demand: Int32Array | None = None,
) -> PairTiles:
    """Compare every output with the host twin, and look for writes outside of them."""
    num_pairs = expert_ids.numel()
    counts = np.array(pairs_per_slot, np.int32)
    expected, routed = PairTiles.select(
        TileSchedule.from_pair_counts(counts, tile_m),
        expert_ids.numpy(),
        np.array(slot_of_expert, np.int32),
        np.array(first_ordinal, np.int32),
    )
    schedule = make_schedule(counts, tile_m, device)
    sorted_pair = Guarded(schedule.max_rows, dtype=torch.int32, device=device)
    pair_row = Guarded(num_pairs, dtype=torch.int32, device=device)
    status = Guarded(2, dtype=torch.int32, device=device)
    status.tensor[1] = INT32_MAX
    demand = routed if demand is None else demand
    select_pairs(
        DeviceTiles(schedule, sorted_pair.tensor, pair_row.tensor),
        expert_ids.to(device),
        torch.tensor(slot_of_expert, dtype=torch.int32, device=device),
        torch.tensor(first_ordinal, dtype=torch.int32, device=device),
        path=path,
        demand=torch.from_numpy(demand).to(device),
        status=status.tensor,
    )
    for guarded in (sorted_pair, pair_row, status):
        guarded.check_guards()
    rows = sorted_pair.tensor.tolist()
    assert rows[: expected.schedule.num_rows] == expected.sorted_pair.tolist()
    assert set(rows[expected.schedule.num_rows :]) == {num_pairs}
    assert pair_row.tensor.tolist() == expected.pair_row.tolist()
    differing = np.flatnonzero(routed != demand)
    assert status.tensor.tolist() == [
        num_pairs - routed.sum(),
        differing[0] if differing.size else INT32_MAX,
    ]
    return expected


def check_all_experts(
    path: SelectPath, device: str, expert_ids: torch.Tensor, num_experts: int, *, tile_m: int = 4
) -> PairTiles:
    """Expert e is slot e and runs all of its pairs."""
    counts = count_pairs(expert_ids.numpy(), num_experts).tolist()
    slots = list(range(num_experts))
    return check_select(path, device, expert_ids, slots, [0] * num_experts, counts, tile_m=tile_m)


def check_some_experts(path: SelectPath, device: str, num_experts: int, num_tokens: int) -> None:
    """Three slots, one of them the last expert's, run parts of their experts' pairs."""
    ids = make_routing(num_tokens, num_experts, 2, invalid_fraction=0.1, seed=num_experts)[0]
    ids[::3, 1] = num_experts - 1
    counts = count_pairs(ids.numpy(), num_experts)
    slot_of_expert = [-1] * num_experts
    held = [num_experts - 1, 0, num_experts // 2]
    for slot, expert in enumerate(held):
        slot_of_expert[expert] = slot
    first = [int(counts[e]) // 3 for e in held]
    check_select(path, device, ids, slot_of_expert, first, [int(counts[e]) // 2 for e in held])


def test_golden_list_of_one_expert(path: SelectPath, kernel_device: str) -> None:
    tiles = check_all_experts(
        path, kernel_device, torch.zeros((4, 1), dtype=torch.int32), 1, tile_m=16
    )
    assert tiles.sorted_pair.tolist() == [0, 1, 2, 3] + [4] * 12


@pytest.mark.parametrize("tile_m", [1, 4, 16])
@pytest.mark.parametrize("num_pairs", [0, 1, 15, 16, 17])
def test_pairs_around_a_tile(
    num_pairs: int, tile_m: int, path: SelectPath, kernel_device: str
) -> None:
    ids = torch.full((num_pairs, 1), 2, dtype=torch.int32)
    check_all_experts(path, kernel_device, ids, 5, tile_m=tile_m)


def test_no_tokens(path: SelectPath, kernel_device: str) -> None:
    check_all_experts(path, kernel_device, torch.empty((0, 4), dtype=torch.int32), 5)


def test_all_rows_padded_as_in_a_profile_run(path: SelectPath, kernel_device: str) -> None:
    ids = torch.full((30, 2), -1, dtype=torch.int32)
    check_all_experts(path, kernel_device, ids, 5)


def test_dropped_pairs_are_counted(path: SelectPath, kernel_device: str) -> None:
    ids = torch.tensor([[5, 0], [12, 1], [-5, -1], [4, 4]], dtype=torch.int32)
    check_all_experts(path, kernel_device, ids, 5)


def test_64_bit_ids_are_compared_before_they_are_narrowed(
    path: SelectPath, kernel_device: str
) -> None:
    check_all_experts(path, kernel_device, torch.tensor([[2**32 + 2, 2], [-(2**32), 1]]), 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strided_ids_with_duplicates_in_a_token(
    dtype: torch.dtype, path: SelectPath, kernel_device: str
) -> None:
    ids = torch.randint(0, 3, (20, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    check_all_experts(path, kernel_device, ids[:, ::3], 3)
    check_all_experts(path, kernel_device, ids.T, 3)


@pytest.mark.parametrize("num_experts", [5, 96, 160])
def test_expert_counts_that_are_no_powers_of_two(
    num_experts: int, path: SelectPath, kernel_device: str
) -> None:
    check_some_experts(path, kernel_device, num_experts, 40)


def test_all_pairs_on_one_expert_over_many_chunks(
    path: SelectPath, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_chunks(monkeypatch)
    check_all_experts(path, kernel_device, torch.full((700, 1), 1, dtype=torch.int32), 2)


def test_many_chunks(path: SelectPath, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_chunks(monkeypatch)
    check_some_experts(path, kernel_device, 7, 1200)


def test_many_blocks_of_experts(
    path: SelectPath, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count, "MAX_BINS", 8)
    monkeypatch.setattr(select, "MAX_BINS", 8)
    check_some_experts(path, kernel_device, 31, 60)
    check_some_experts(path, kernel_device, 32, 60)


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [1023, 1024, 1025, 4096])
def test_more_experts_than_threads(num_experts: int, path: SelectPath, kernel_device: str) -> None:
    check_some_experts(path, kernel_device, num_experts, 8)


def test_256_experts_and_more_than_65535_pairs(
    path: SelectPath, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default path for so many pairs is the chunked one; the other follows on a device."""
    if kernel_device == "cpu":
        monkeypatch.setattr(select, "STEP_PAIRS", 512)
    ids, _ = make_routing(8200, 256, 8, skew=0.5, invalid_fraction=0.05)
    host = DeviceTiles.from_host(PairTiles.from_expert_ids(ids.numpy(), 256, 16), kernel_device)
    tiles = DeviceTiles.allocate(host.schedule, ids.numel())
    slots = torch.arange(256, dtype=torch.int32, device=kernel_device)
    chosen = None if kernel_device == "cpu" else path
    select_pairs(tiles, ids.to(kernel_device), slots, torch.zeros_like(slots), path=chosen)
    assert torch.equal(tiles.sorted_pair, host.sorted_pair)
    assert torch.equal(tiles.pair_row, host.pair_row)


def shrink_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 pairs: more of them than a block of chunks holds."""
    monkeypatch.setattr(count, "CHUNK_PAIRS", 64)
    monkeypatch.setattr(select, "CHUNK_PAIRS", 64)


@pytest.mark.parametrize("change", [-1, 3])
def test_counts_that_differ_from_the_demand(
    change: int, path: SelectPath, kernel_device: str
) -> None:
    """The lowest expert is reported, local or not; a row without its pair gets the sentinel."""
    ids, _ = make_routing(30, 6, 2, seed=3)
    planned = count_pairs(ids.numpy(), 6)
    demand = planned.copy()
    demand[[2, 4]] += change
    counts = np.maximum(demand[[4, 5, 0]], 0).tolist()
    slot_of_expert = [2, -1, -1, -1, 0, 1]
    check_select(path, kernel_device, ids, slot_of_expert, [0, 0, 0], counts, demand=demand)


def test_mismatch_is_sticky(path: SelectPath, kernel_device: str) -> None:
    schedule = make_schedule(np.zeros(1, np.int32), 4, kernel_device)
    slot_of_expert = torch.tensor([-1, 0], dtype=torch.int32, device=kernel_device)
    status = torch.tensor([0, INT32_MAX], dtype=torch.int32, device=kernel_device)
    first = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    reported = []
    for ids in ([0, 0, 9], [0, 1, 9], [0, 0, -1]):
        select_pairs(
            DeviceTiles.allocate(schedule, 3),
            torch.tensor(ids, device=kernel_device),
            slot_of_expert,
            first,
            path=path,
            demand=torch.tensor([2, 0], dtype=torch.int32, device=kernel_device),
            status=status,
        )
        reported.append(status.tolist())
    assert reported == [[1, INT32_MAX], [1, 0], [1, 0]]


@pytest.mark.parametrize("slot", [3, 4, INT32_MAX, -2])
def test_slot_beyond_the_local_slots_is_no_slot(
    slot: int, path: SelectPath, kernel_device: str
) -> None:
    """The last worker's map may name a slot that does not exist; nothing is read or written."""
    ids, _ = make_routing(20, 5, 2)
    counts = count_pairs(ids.numpy(), 5)
    schedule = make_schedule(counts[:3].copy(), 4, kernel_device)
    outputs = []
    for last in (slot, -1):
        tiles = DeviceTiles.allocate(schedule, 40)
        select_pairs(
            tiles,
            ids.to(kernel_device),
            torch.tensor([0, 1, 2, -1, last], dtype=torch.int32, device=kernel_device),
            torch.zeros(3, dtype=torch.int32, device=kernel_device),
            path=path,
        )
        outputs.append((tiles.sorted_pair.tolist(), tiles.pair_row.tolist()))
    assert outputs[0] == outputs[1]


def test_schedule_that_did_not_fit_gets_no_pairs(path: SelectPath, kernel_device: str) -> None:
    schedule = make_schedule(np.array([4, 4], np.int32), 4, kernel_device, spare=0)
    schedule.pairs_per_slot.fill_(400)
    lay_out_tiles(schedule)
    sorted_pair = Guarded(schedule.max_rows, dtype=torch.int32, device=kernel_device)
    tiles = DeviceTiles(
        schedule, sorted_pair.tensor, torch.empty(8, dtype=torch.int32, device=kernel_device)
    )
    slots = torch.tensor([0, 1], dtype=torch.int32, device=kernel_device)
    ids = torch.tensor([0, 1] * 4, device=kernel_device)
    select_pairs(tiles, ids, slots, torch.zeros_like(slots), path=path)
    sorted_pair.check_guards()
    assert tiles.sorted_pair.tolist() == [8] * 8
    assert tiles.pair_row.tolist() == [-1] * 8


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("expert_ids", torch.zeros(4, dtype=torch.int16), "int32 or int64"),
        ("expert_ids", torch.zeros(5, dtype=torch.int32), "hold 5 pairs"),
        ("expert_ids", torch.zeros(1, dtype=torch.int32).expand(2**31), "at most"),
        ("slot_of_expert", torch.zeros(2, dtype=torch.int64), "slot_of_expert must be"),
        ("slot_of_expert", torch.zeros(0, dtype=torch.int32), "num_experts"),
        ("first_ordinal", torch.zeros(3, dtype=torch.int32), "first_ordinal must be"),
        ("demand", torch.zeros(4, dtype=torch.int32)[::2], "demand must be"),
        ("status", torch.zeros(1, dtype=torch.int32), "status must be"),
        ("status", None, "demand needs a status"),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(
    name: str, values: torch.Tensor | None, message: str, path: SelectPath
) -> None:
    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    tiles = DeviceTiles.allocate(DeviceSchedule.allocate(1, 4, 4, "cpu"), 4)
    arguments: dict[str, torch.Tensor | None] = {
        "expert_ids": zeros(4),
        "slot_of_expert": zeros(2),
        "first_ordinal": zeros(1),
        "demand": zeros(2),
        "status": zeros(2),
    }
    with pytest.raises(ShapeError, match=message):
        select_pairs(tiles, path=path, **{**arguments, name: values})  # type: ignore[arg-type]
