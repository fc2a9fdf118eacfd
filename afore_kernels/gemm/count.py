"""Count: the pairs of each expert, on the device; the twin of `tiles.count_pairs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afore_kernels.errors import ShapeError
from afore_kernels.gemm.launch import LAUNCH_OPTIONS

# A block that starts at the last pair must not pass int32.
MAX_PAIRS = 2**30
CHUNK_PAIRS = 2048
MAX_BINS = 1024
_PAIRS_PER_PROGRAM = 4096


@triton.jit
def load_experts(ids_ptr, offs, num_pairs, num_experts):
    """Load the experts of the pairs `offs`, int32.

    An id outside [0, num_experts) becomes `num_experts`, so that invalid pairs count as one more
    expert; a pair past the end becomes `num_experts + 1`. Compares before narrowing int64.
    """
    ids = tl.load(ids_ptr + offs, mask=offs < num_pairs, other=-1)
    experts = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
    return tl.where(offs < num_pairs, experts, num_experts + 1)


# A count of 1 or a multiple of 16 must not compile another kernel while serving.
@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs_kernel(
    counts_ptr,  # int32 [num_chunks, num_bins], or [num_bins] with IS_SHARED
    ids_ptr,  # int32 or int64 [num_pairs]
    stride_counts_c,
    num_pairs,
    num_experts,
    num_bins,
    IS_SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Count one chunk of pairs in one block of bins."""
    tl.static_assert(CHUNK % BLOCK_P == 0)
    chunk = tl.program_id(0)
    first_bin = tl.program_id(1) * BLOCK_E
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, CHUNK, BLOCK_P):
        offs_p = chunk * CHUNK + start + tl.arange(0, BLOCK_P)
        bins = load_experts(ids_ptr, offs_p, num_pairs, num_experts) - first_bin  # [BLOCK_P]
        counts += tl.histogram(bins, BLOCK_E, mask=(bins >= 0) & (bins < BLOCK_E))
    offs_e = first_bin + tl.arange(0, BLOCK_E)
    if IS_SHARED:
        # Integers: the order of the additions does not show.
        tl.atomic_add(counts_ptr + offs_e, counts, mask=offs_e < num_bins, sem="relaxed")
    else:
        counts_ptr += chunk.to(tl.int64) * stride_counts_c
        tl.store(counts_ptr + offs_e, counts, mask=offs_e < num_bins)


def flatten_ids(expert_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the ids in gathered order, contiguous; strided ids are copied.

    Args:
        expert_ids: int32 or int64, any shape and strides.
        num_experts: routed experts E.

    Raises:
        ShapeError: if the dtype is another, there are too many pairs, or no experts.
    """
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(f"expert_ids must be int32 or int64, got {expert_ids.dtype}")
    if expert_ids.numel() > MAX_PAIRS:
        raise ShapeError(f"expert_ids hold {expert_ids.numel()} pairs, at most {MAX_PAIRS} fit")
    if num_experts < 1:
        raise ShapeError(f"num_experts must be positive, got {num_experts}")
    return expert_ids.contiguous().view(-1)


def require_vector(name: str, values: torch.Tensor, size: int) -> None:
    """Check that `values` is a contiguous int32 [size], as the kernels address it.

    Raises:
        ShapeError: naming the tensor, what was expected and what came.
    """
    is_int32 = values.dtype == torch.int32
    if not is_int32 or values.shape != (size,) or not values.is_contiguous():
        raise ShapeError(
            f"{name} must be contiguous int32 [{size}], got {values.dtype} {list(values.shape)} "
            f"with strides {list(values.stride())}"
        )


def count_pairs_on_device(
    expert_ids: torch.Tensor, num_experts: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the pairs of each expert; ids outside [0, num_experts) are not counted.

    Does not wait for the device.

    Args:
        expert_ids: int32 or int64, any shape and strides; strided ids are copied.
        num_experts: routed experts E.
        out: int32 [num_experts], contiguous, overwritten; allocated if None.

    Returns:
        int32 [num_experts], `out` if given.

    Raises:
        ShapeError: if an argument has another dtype, shape or range.
    """
    ids = flatten_ids(expert_ids, num_experts)
    if out is None:
        out = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    require_vector("out", out, num_experts)
    num_programs = max(1, triton.cdiv(ids.numel(), _PAIRS_PER_PROGRAM))
    if num_programs > 1:
        out.zero_()
    block_e = min(triton.next_power_of_2(num_experts), MAX_BINS)
    _count_pairs_kernel[(num_programs, triton.cdiv(num_experts, block_e))](
        out,
        ids,
        0,
        ids.numel(),
        num_experts,
        num_experts,
        IS_SHARED=num_programs > 1,
        CHUNK=_PAIRS_PER_PROGRAM,
        BLOCK_P=1024,
        BLOCK_E=block_e,
        **LAUNCH_OPTIONS,
    )
    return out


def count_chunks(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the pairs of each expert in every chunk of `CHUNK_PAIRS` pairs.

    Args:
        ids: of `flatten_ids`.
        num_experts: routed experts E.

    Returns:
        int32 [num_chunks, num_experts + 1]; the last column counts the invalid ids.
    """
    num_chunks = triton.cdiv(ids.numel(), CHUNK_PAIRS)
    num_bins = num_experts + 1
    counts = torch.empty((num_chunks, num_bins), dtype=torch.int32, device=ids.device)
    block_e = min(triton.next_power_of_2(num_bins), MAX_BINS)
    _count_pairs_kernel[(num_chunks, triton.cdiv(num_bins, block_e))](
        counts,
        ids,
        counts.stride(0),
        ids.numel(),
        num_experts,
        num_bins,
        IS_SHARED=False,
        CHUNK=CHUNK_PAIRS,
        BLOCK_P=CHUNK_PAIRS,
        BLOCK_E=block_e,
        **LAUNCH_OPTIONS,
    )
    return counts
