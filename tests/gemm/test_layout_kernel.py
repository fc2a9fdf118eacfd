"""Schedules on the device against `TileSchedule`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.device_tiles import DeviceSchedule, max_tiles
from afore_kernels.gemm.layout import lay_out_tiles
from afore_kernels.gemm.tiles import TileSchedule
from tests.guarded import Guarded

pytestmark = pytest.mark.interpreter


class GuardedSchedule:
    """A device schedule whose arrays lie between canaries."""

    def __init__(self, counts: list[int], capacity: int, tile_m: int, device: str) -> None:
        sizes = (len(counts), len(counts) + 1, capacity, capacity, 1)
        self.arrays = [Guarded(size, dtype=torch.int32, device=device) for size in sizes]
        self.schedule = DeviceSchedule(tile_m, *(array.tensor for array in self.arrays))
        self.schedule.pairs_per_slot.copy_(torch.tensor(counts, dtype=torch.int32))

    def lay_out(self) -> DeviceSchedule:
        lay_out_tiles(self.schedule)
        for array in self.arrays:
            array.check_guards()
            assert not array.is_poison().any()
        return self.schedule


def check_schedule(counts: list[int], tile_m: int, device: str, *, spare_tiles: int = 0) -> None:
    expected = TileSchedule.from_pair_counts(np.array(counts, np.int32), tile_m)
    capacity = expected.num_tiles + spare_tiles
    actual = GuardedSchedule(counts, capacity, tile_m, device).lay_out()
    assert actual.num_tiles.tolist() == [expected.num_tiles]
    assert actual.row_starts.tolist() == expected.row_starts.tolist()
    padding = [-1] * spare_tiles
    assert actual.tile_slot.tolist() == expected.tile_slot.tolist() + padding
    assert actual.tile_m_index.tolist() == expected.tile_m_index.tolist() + padding


@pytest.mark.parametrize("tile_m", [1, 16, 128])
@pytest.mark.parametrize(
    "counts",
    [
        [],
        [0],
        [0, 0, 0],
        [1],
        [15, 16, 17],
        [0, 3, 0, 40, 0],
        [300],
        [0, 0, 290, 0],
    ],
    ids=str,
)
def test_equals_the_host_twin(counts: list[int], tile_m: int, kernel_device: str) -> None:
    check_schedule(counts, tile_m, kernel_device)
    check_schedule(counts, tile_m, kernel_device, spare_tiles=5)


@pytest.mark.parametrize("num_slots", [64, 65])
def test_no_slot_reads_what_another_stored(num_slots: int, kernel_device: str) -> None:
    counts = np.random.default_rng(num_slots).integers(0, 5, num_slots).tolist()
    check_schedule(counts, 2, kernel_device, spare_tiles=260)


def test_allocated_capacity_holds_the_worst_case(kernel_device: str) -> None:
    counts = [17, 1, 1, 1]
    schedule = DeviceSchedule.allocate(4, sum(counts), 16, kernel_device)
    schedule.pairs_per_slot.copy_(torch.tensor(counts, dtype=torch.int32))
    lay_out_tiles(schedule)
    assert schedule.max_tiles == max_tiles(20, 4, 16) == schedule.num_tiles == 5


@pytest.mark.parametrize("counts", [[5, 1], [2**31 - 1, 2**31 - 1, 2**31 - 1]], ids=str)
def test_counts_beyond_the_capacity_give_no_tiles(counts: list[int], kernel_device: str) -> None:
    schedule = GuardedSchedule(counts, 2, 4, kernel_device).lay_out()
    assert schedule.num_tiles.tolist() == [0]
    assert schedule.row_starts.tolist() == [0] * (len(counts) + 1)
    assert schedule.tile_slot.tolist() == schedule.tile_m_index.tolist() == [-1, -1]


def test_negative_counts_give_no_tiles(kernel_device: str) -> None:
    schedule = GuardedSchedule([3, -(2**31), 4], 4, 4, kernel_device).lay_out()
    assert schedule.row_starts.tolist() == [0, 4, 4, 8]
    assert schedule.tile_slot.tolist() == [0, 2, -1, -1]


@pytest.mark.parametrize(
    ("max_pairs", "tile_m", "message"),
    [(2**31 - 16, 16, "exceed int32"), (8, 0, "tile_m must be positive")],
)
def test_rows_beyond_int32_are_rejected(max_pairs: int, tile_m: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        DeviceSchedule.allocate(4, max_pairs, tile_m, "meta")
