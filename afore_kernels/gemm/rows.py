"""Rows: how a kernel writes the rows of `DeviceTiles`, whichever path numbered the pairs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_interval(
    slot_of_expert_ptr,
    first_ordinal_ptr,
    pairs_per_slot_ptr,
    row_starts_ptr,
    expert,
    num_experts,
    num_slots,
):
    """Return first ordinal, pairs, first row and end row of the slots of `expert`, any shape.

    An expert without a slot has no pairs and no rows. Pairs never exceed the slot's rows.
    """
    slot = tl.load(slot_of_expert_ptr + expert, mask=expert < num_experts, other=-1)
    is_local = (slot >= 0) & (slot < num_slots)
    lo = tl.load(first_ordinal_ptr + slot, mask=is_local, other=0)
    pairs = tl.load(pairs_per_slot_ptr + slot, mask=is_local, other=0)
    row = tl.load(row_starts_ptr + slot, mask=is_local, other=0)
    end_row = tl.load(row_starts_ptr + slot + 1, mask=is_local, other=0)
    return lo, tl.maximum(tl.minimum(pairs, end_row - row), 0), row, end_row


@triton.jit
def place_pairs(sorted_pair_ptr, pair_row_ptr, pair, ordinal, lo, num_local, row, mask):
    """Store the row of each pair, and the pair in its row if its slot runs that ordinal."""
    index = ordinal - lo
    is_local = mask & (index >= 0) & (index < num_local)
    tl.store(sorted_pair_ptr + row + index, pair, mask=is_local)
    tl.store(pair_row_ptr + pair, tl.where(is_local, row + index, -1), mask=mask)


@triton.jit
def _fill_rows(sorted_pair_ptr, sentinel, begin, end, step, BLOCK: tl.constexpr):
    """Store the sentinel in every `step`-th block of the rows [begin, end)."""
    for start in range(begin, end, step):
        offs_m = start + tl.arange(0, BLOCK)
        tl.store(sorted_pair_ptr + offs_m, sentinel, mask=offs_m < end)


@triton.jit
def close_expert(
    sorted_pair_ptr,
    status_ptr,
    slot_of_expert_ptr,
    first_ordinal_ptr,
    pairs_per_slot_ptr,
    row_starts_ptr,
    demand_ptr,
    expert,
    count,
    num_pairs,
    num_experts,
    num_slots,
    max_rows,
    BLOCK: tl.constexpr,
):
    """Report the expert's count; fill its rows that got no pair, and a share of the tail."""
    if status_ptr is not None:
        if expert == num_experts:
            tl.store(status_ptr, count)
        elif demand_ptr is not None:
            is_wrong = count != tl.load(demand_ptr + expert)
            tl.atomic_min(status_ptr + 1, expert, mask=is_wrong, sem="relaxed")
    lo, num_local, row, end_row = load_interval(
        slot_of_expert_ptr,
        first_ordinal_ptr,
        pairs_per_slot_ptr,
        row_starts_ptr,
        expert,
        num_experts,
        num_slots,
    )
    num_filled = tl.minimum(tl.maximum(count - lo, 0), num_local)
    _fill_rows(sorted_pair_ptr, num_pairs, row + num_filled, end_row, BLOCK, BLOCK)
    tail = tl.load(row_starts_ptr + num_slots) + expert * BLOCK
    _fill_rows(sorted_pair_ptr, num_pairs, tail, max_rows, (num_experts + 1) * BLOCK, BLOCK)
