"""Device plan: what one worker derives from a plan record, on the device.

The twin of `pair_intervals`, `SlotIntervals.tile_schedule` and `partition_pairs`, with fixed
addresses: a captured graph follows every record that is copied into the same place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from afore_kernels.config import INT32_MAX
from afore_kernels.errors import ShapeError
from afore_kernels.gemm.count import require_vector
from afore_kernels.gemm.device_tiles import DeviceSchedule, DeviceTiles
from afore_kernels.gemm.launch import LAUNCH_OPTIONS
from afore_kernels.gemm.layout import lay_out_tiles
from afore_kernels.gemm.select import SelectPath, select_pairs
from afore_kernels.partition.expand import PlanDefect, expand_plan_kernel
from afore_kernels.plan import PlanLayout

STATUS_WORDS = 3


class PlanStatus(NamedTuple):
    """What the device found; the result is the target's only if the last two say so.

    Attributes:
        num_invalid: pairs of the last routing with an id outside [0, num_experts).
        mismatched_expert: first expert whose pairs differed from the plan's demand in a routing
            since the plan was expanded, or -1.
        defect: why the plan is not run, or `PlanDefect.NONE`.
    """

    num_invalid: int
    mismatched_expert: int
    defect: PlanDefect

    @classmethod
    def from_words(cls, words: torch.Tensor) -> Self:
        """Read `DevicePlan.status`, int32 [STATUS_WORDS]; waits for a device that holds it."""
        num_invalid, mismatched_expert, defect = words.tolist()
        if mismatched_expert == INT32_MAX:
            mismatched_expert = -1
        return cls(num_invalid, mismatched_expert, PlanDefect(defect))


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """One worker's view of a plan, in device memory; undefined until a record was expanded.

    Slots are the worker's primaries in expert order, then its redundant slots.

    Attributes:
        layout: of the records.
        worker: whose view.
        max_pairs: most pairs a plan may have.
        schedule: rows and tiles of the slots.
        expert: expert of each slot, int32 [num_slots], -1 for an empty slot.
        lo: first ordinal of each slot, int32 [num_slots].
        hi: one past the last ordinal of each slot, int32 [num_slots].
        slot_of_expert: slot of each expert, int32 [num_experts], -1 for an expert without one.
        demand: pairs of each expert under the plan, int32 [num_experts].
        sequence: of the plan, int64 [1].
        status: what `read_status` reads, int32 [STATUS_WORDS].
    """

    layout: PlanLayout
    worker: int
    max_pairs: int
    schedule: DeviceSchedule
    expert: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    slot_of_expert: torch.Tensor
    demand: torch.Tensor
    sequence: torch.Tensor
    status: torch.Tensor

    @classmethod
    def allocate(
        cls,
        layout: PlanLayout,
        worker: int,
        tile_m: int,
        max_pairs: int,
        device: torch.device | str,
    ) -> Self:
        """Allocate the view of `worker` for plans of at most `max_pairs` pairs in all.

        Raises:
            ShapeError: if the rows exceed int32.
        """
        num_slots = layout.placement.num_slots(worker)
        num_experts = layout.placement.num_experts

        def empty(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls(
            layout,
            worker,
            max_pairs,
            DeviceSchedule.allocate(num_slots, max_pairs, tile_m, device),
            expert=empty(num_slots),
            lo=empty(num_slots),
            hi=empty(num_slots),
            slot_of_expert=empty(num_experts),
            demand=empty(num_experts),
            sequence=empty(1, torch.int64),
            status=empty(STATUS_WORDS),
        )

    def expand(self, record: torch.Tensor) -> None:
        """Derive everything from a plan record that was validated on the host.

        Does not wait for the device. A plan that must not be run here (see `PlanDefect`) leaves
        every slot empty and says so in `status`.

        Args:
            record: the record's 32-bit words, int32 [record_bytes / 4], on the device.

        Raises:
            ShapeError: if the record has another dtype or size.
        """
        layout, placement = self.layout, self.layout.placement
        require_vector("record", record, layout.record_bytes // 4)
        primaries = placement.primaries(self.worker)
        expand_plan_kernel[(self.schedule.num_slots + 1,)](
            self.expert,
            self.lo,
            self.hi,
            self.schedule.pairs_per_slot,
            self.slot_of_expert,
            self.demand,
            self.sequence.view(torch.int32),
            self.status,
            record,
            placement.num_experts,
            primaries.start,
            len(primaries),
            self.worker * placement.redundant_slots,
            placement.redundant_slots,
            placement.num_workers * placement.redundant_slots,
            self.schedule.tile_m,
            self.max_pairs,
            layout.demand_word,
            layout.slot_expert_word,
            layout.slot_pairs_word,
            BLOCK=256,
            **LAUNCH_OPTIONS,
        )
        lay_out_tiles(self.schedule)

    def partition(
        self, expert_ids: torch.Tensor, tiles: DeviceTiles, path: SelectPath | None = None
    ) -> None:
        """Fill `tiles` with this worker's pairs, and check the routing's counts into `status`.

        Every worker checks every expert, so all come to the same verdict. Does not wait for the
        device.

        Args:
            expert_ids: gathered ids in rank order, as `select_pairs` takes them.
            tiles: of this plan's schedule.
            path: see `select_pairs`.

        Raises:
            ShapeError: if an argument does not fit.
        """
        if tiles.schedule is not self.schedule:
            raise ShapeError("the tiles must be allocated for this plan's schedule")
        select_pairs(
            tiles,
            expert_ids,
            self.slot_of_expert,
            self.lo,
            path=path,
            demand=self.demand,
            status=self.status,
        )

    def read_status(self) -> PlanStatus:
        """Copy the status to the host; waits for the device."""
        return PlanStatus.from_words(self.status)
