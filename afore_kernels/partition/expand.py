"""Expand: the kernel that reads a plan record for one worker; the twin of `pair_intervals`."""

from __future__ import annotations

import enum

import triton
import triton.language as tl

from afore_kernels.config import INT32_MAX
from afore_kernels.plan import PLAN_HEADER


class PlanDefect(enum.IntEnum):
    """Why a plan is not run: every slot is then empty."""

    NONE = 0
    REJECTED = 1
    OTHER_TILE_M = 2
    TOO_MANY_PAIRS = 3


def _word_of(name: str) -> tl.constexpr:
    """Return the 32-bit word of a plan record at which header field `name` starts."""
    fields = PLAN_HEADER.fields
    assert fields is not None
    return tl.constexpr(fields[name][1] // 4)


_REJECTION_WORD = _word_of("rejection")
_SEQUENCE_WORD = _word_of("sequence")
_TILE_M_WORD = _word_of("tile_m")
_NONE = tl.constexpr(int(PlanDefect.NONE))
_REJECTED = tl.constexpr(int(PlanDefect.REJECTED))
_OTHER_TILE_M = tl.constexpr(int(PlanDefect.OTHER_TILE_M))
_TOO_MANY_PAIRS = tl.constexpr(int(PlanDefect.TOO_MANY_PAIRS))
_NO_MISMATCH = tl.constexpr(INT32_MAX)


@triton.jit
def _find_defect(record_ptr, demand_word, num_experts, tile_m, max_pairs, BLOCK: tl.constexpr):
    """Return the record's `PlanDefect`; the same on every worker."""
    demand = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_experts, BLOCK):
        offs_e = start + tl.arange(0, BLOCK)
        demand += tl.load(
            record_ptr + demand_word + offs_e, mask=offs_e < num_experts, other=0
        )  # [BLOCK]
    defect = tl.where(tl.sum(demand, 0) > max_pairs, _TOO_MANY_PAIRS, _NONE)
    defect = tl.where(tl.load(record_ptr + _TILE_M_WORD) != tile_m, _OTHER_TILE_M, defect)
    return tl.where(tl.load(record_ptr + _REJECTION_WORD) != 0, _REJECTED, defect)


@triton.jit
def _expand_slot(
    expert_ptr,
    lo_ptr,
    hi_ptr,
    pairs_per_slot_ptr,
    record_ptr,
    slot,
    defect,
    first_primary,
    num_primaries,
    first_replica,
    num_replicas,
    demand_word,
    slot_expert_word,
    slot_pairs_word,
    BLOCK: tl.constexpr,
):
    """Write what one slot runs (Eq. 11)."""
    is_primary = slot < num_primaries
    replica = first_replica + slot - num_primaries
    is_replica = slot >= num_primaries
    held = tl.load(record_ptr + slot_expert_word + replica, mask=is_replica, other=-1)
    expert = tl.where(is_primary, first_primary + slot, held)
    # Replicas on lower workers come first; the primary comes after all replicas.
    num_earlier = tl.where(is_primary, num_replicas, first_replica)
    earlier_pairs = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_earlier, BLOCK):
        offs_r = start + tl.arange(0, BLOCK)
        mask_r = offs_r < num_earlier
        experts = tl.load(record_ptr + slot_expert_word + offs_r, mask=mask_r, other=-1)  # [BLOCK]
        pairs = tl.load(record_ptr + slot_pairs_word + offs_r, mask=mask_r, other=0)  # [BLOCK]
        earlier_pairs += tl.where((experts == expert) & (expert >= 0), pairs, 0)
    lo = tl.sum(earlier_pairs, 0)
    own_pairs = tl.load(record_ptr + slot_pairs_word + replica, mask=is_replica, other=0)
    demand = tl.load(record_ptr + demand_word + expert, mask=is_primary, other=0)
    hi = tl.where(is_primary, demand, lo + own_pairs)
    hi = tl.where(defect == _NONE, hi, lo)
    tl.store(expert_ptr + slot, expert)
    tl.store(lo_ptr + slot, lo)
    tl.store(hi_ptr + slot, hi)
    tl.store(pairs_per_slot_ptr + slot, hi - lo)


@triton.jit
def expand_plan_kernel(
    expert_ptr,  # int32 [num_slots]
    lo_ptr,  # int32 [num_slots]
    hi_ptr,  # int32 [num_slots]
    pairs_per_slot_ptr,  # int32 [num_slots]
    slot_of_expert_ptr,  # int32 [num_experts]
    demand_ptr,  # int32 [num_experts]
    sequence_ptr,  # int32 [2], the words of an int64
    status_ptr,  # int32 [3]
    record_ptr,  # int32 [record_bytes / 4]
    num_experts,
    first_primary,
    num_primaries,
    first_replica,
    redundant_slots,
    num_replicas,
    tile_m,
    max_pairs,
    demand_word,
    slot_expert_word,
    slot_pairs_word,
    BLOCK: tl.constexpr,
):
    """Expand one slot; the program past the last slot writes everything that is not per slot."""
    slot = tl.program_id(0)
    defect = _find_defect(record_ptr, demand_word, num_experts, tile_m, max_pairs, BLOCK)
    if slot < num_primaries + redundant_slots:
        _expand_slot(
            expert_ptr,
            lo_ptr,
            hi_ptr,
            pairs_per_slot_ptr,
            record_ptr,
            slot,
            defect,
            first_primary,
            num_primaries,
            first_replica,
            num_replicas,
            demand_word,
            slot_expert_word,
            slot_pairs_word,
            BLOCK,
        )
    else:
        for start in range(0, num_experts, BLOCK):
            offs_e = start + tl.arange(0, BLOCK)
            mask_e = offs_e < num_experts
            demand = tl.load(record_ptr + demand_word + offs_e, mask=mask_e, other=0)  # [BLOCK]
            tl.store(demand_ptr + offs_e, demand, mask=mask_e)
            slot_of_expert = offs_e - first_primary
            is_primary = (slot_of_expert >= 0) & (slot_of_expert < num_primaries)
            slot_of_expert = tl.where(is_primary, slot_of_expert, -1)
            for replica in range(redundant_slots):
                held = tl.load(record_ptr + slot_expert_word + first_replica + replica)
                slot_of_expert = tl.where(offs_e == held, num_primaries + replica, slot_of_expert)
            tl.store(slot_of_expert_ptr + offs_e, slot_of_expert, mask=mask_e)
        words = tl.arange(0, 2)
        tl.store(sequence_ptr + words, tl.load(record_ptr + _SEQUENCE_WORD + words))
        tl.store(status_ptr, 0)
        tl.store(status_ptr + 1, _NO_MISMATCH)
        tl.store(status_ptr + 2, defect)
