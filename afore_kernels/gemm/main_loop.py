"""What the main loops of both GEMMs share: addresses, weight formats, the product.

A weight is a 4-D tensor [slot, part, n, k]: gate_up has the parts gate and up, whose rows may
alternate in memory (strides say so), down has one part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

SCALE_BLOCK = tl.constexpr(128)
MX_GROUP = tl.constexpr(32)


class PartStrides(NamedTuple):
    """Element strides of a weight, its scale or its bias, [slot, part, n, k]."""

    slot: Any
    part: Any
    n: Any
    k: Any


class GemmMode(NamedTuple):
    """What a GEMM kernel is compiled for, beside its tile: one constexpr.

    Attributes:
        FORMAT: `quant.WeightFormat` of the weight.
        DECODE_FP8: fp8 weights come as uint8 bits.
        USE_DESCRIPTOR: the weight comes as a descriptor [slot, part, n, k].
        SWAP_AB: the weight's N takes the tensor core's M.
        TILE_M, BLOCK_N, BLOCK_K: block sizes.
        EVEN_N, EVEN_K: the blocks divide N and K.
        UPCAST: multiply in fp32; the interpreter's bf16 product is wrong (triton #11584).
        PRECISION: of products of fp32.
    """

    FORMAT: str
    DECODE_FP8: bool
    USE_DESCRIPTOR: bool
    SWAP_AB: bool
    TILE_M: int
    BLOCK_N: int
    BLOCK_K: int
    EVEN_N: bool
    EVEN_K: bool
    UPCAST: bool
    PRECISION: str


@triton.jit
def wide_offset(index, stride):
    """Return `index * stride` in int64: a loaded index times a row is often past 2^31."""
    return tl.cast(index, tl.int64) * stride


@triton.jit
def part_base(pointer, strides, slot, part, n_start, k_start):
    """Return the address of element [slot, part, n_start, k_start].

    One 64-bit scalar per tile: the offsets inside a tile then fit 32 bits.
    """
    base = pointer + wide_offset(slot, strides.slot) + part * strides.part
    return base + wide_offset(n_start, strides.n) + wide_offset(k_start, strides.k)


@triton.jit
def decode_e4m3(bits, DTYPE: tl.constexpr):
    """Decode float8_e4m3fn bits, uint8, exactly; for GPUs whose Triton lacks the type.

    The bits are moved to where fp16 has its exponent, which is off by 2^8. Subnormals come out
    right; the two NaN codes give +-480.
    """
    wide = bits.to(tl.uint16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return (moved.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)


@triton.jit
def decode_mxfp4(packed, scale, DTYPE: tl.constexpr):
    """Decode e2m1 values and apply their e8m0 scales.

    Args:
        packed: uint8 [BLOCK_N, BLOCK_K // 2], the even k in the low half of a byte.
        scale: uint8 [BLOCK_N, BLOCK_K // 32]; stands for 2 ** (scale - 127).
    """
    BLOCK_N: tl.constexpr = packed.shape[0]
    BLOCK_K: tl.constexpr = packed.shape[1] * 2
    codes = tl.join(packed & 0xF, packed >> 4).to(tl.uint16)  # [BLOCK_N, BLOCK_K // 2, 2]
    moved = ((codes & 0x8) << 12) | ((codes & 0x7) << 9)
    # The bits lie where fp16 has its exponent, off by 2^14.
    values = (moved.to(tl.float16, bitcast=True) * 16384.0).to(tl.float32)
    values = values.reshape(BLOCK_N, BLOCK_K // MX_GROUP, MX_GROUP)
    # 2^-127 is subnormal in fp32.
    bits = tl.where(scale == 0, 0x00400000, scale.to(tl.int32) << 23)
    factor = bits.to(tl.float32, bitcast=True)  # [BLOCK_N, BLOCK_K // 32]
    return (values * factor[:, :, None]).reshape(BLOCK_N, BLOCK_K).to(DTYPE)


@triton.jit
def load_block(
    pointer,
    strides,
    slot,
    part,
    n_start,
    k_start,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Load [BLOCK_N, BLOCK_K] stored elements by pointer; zeros past N and K."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    base = part_base(pointer, strides, slot, part, n_start, k_start)
    pointers = base + (offs_n[:, None] * strides.n + offs_k[None, :] * strides.k)
    if EVEN_N and EVEN_K:
        return tl.load(pointers)
    else:
        mask = tl.full((BLOCK_N, BLOCK_K), True, tl.int1)
        if not EVEN_N:
            mask &= (offs_n + n_start)[:, None] < N
        if not EVEN_K:
            mask &= (offs_k + k_start)[None, :] < K
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_weight(
    w,
    w_strides,
    scale_ptr,
    scale_strides,
    slot,
    part,
    n_start,
    k_start,
    N,
    K,
    DTYPE: tl.constexpr,
    MODE: tl.constexpr,
):
    """Load one weight tile [BLOCK_N, BLOCK_K] in DTYPE; zeros past N and K.

    `w` is a descriptor over all slots, or a pointer. mxfp4 stores two values per element.
    """
    BLOCK_N: tl.constexpr = MODE.BLOCK_N
    PACK: tl.constexpr = 2 if MODE.FORMAT == "mxfp4" else 1
    STORED_K: tl.constexpr = MODE.BLOCK_K // PACK
    if MODE.USE_DESCRIPTOR:
        stored = w.load([slot, part, n_start, k_start // PACK]).reshape(BLOCK_N, STORED_K)
    else:
        stored = load_block(
            w,
            w_strides,
            slot,
            part,
            n_start,
            k_start // PACK,
            N,
            K // PACK,
            BLOCK_N,
            STORED_K,
            MODE.EVEN_N,
            MODE.EVEN_K,
        )
    if MODE.FORMAT == "plain":
        return stored
    elif MODE.FORMAT == "mxfp4":
        scale = load_block(
            scale_ptr,
            scale_strides,
            slot,
            part,
            n_start,
            k_start // MX_GROUP,
            N,
            K // MX_GROUP,
            BLOCK_N,
            MODE.BLOCK_K // MX_GROUP,
            MODE.EVEN_N,
            MODE.EVEN_K,
        )
        return decode_mxfp4(stored, scale, DTYPE)
    elif MODE.DECODE_FP8:
        return decode_e4m3(stored, DTYPE)
    else:
        return stored.to(DTYPE)


@triton.jit
def zero_accumulator(MODE: tl.constexpr):
    """Return fp32 zeros [TILE_M, BLOCK_N], or [BLOCK_N, TILE_M] under SWAP_AB."""
    TILE_M: tl.constexpr = MODE.TILE_M
    BLOCK_N: tl.constexpr = MODE.BLOCK_N
    if MODE.SWAP_AB:
        return tl.zeros((BLOCK_N, TILE_M), tl.float32)
    else:
        return tl.zeros((TILE_M, BLOCK_N), tl.float32)


@triton.jit
def multiply_add(accumulator, a, w, MODE: tl.constexpr):
    """Return `accumulator + a @ w.T`, both transposed under SWAP_AB.

    Swapped, the weight's N takes the tensor core's M, whose granule of 64 would be mostly padding
    for a small tile.

    Args:
        accumulator: see `zero_accumulator`.
        a: [TILE_M, BLOCK_K].
        w: [BLOCK_N, BLOCK_K].
    """
    if MODE.UPCAST:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    if MODE.SWAP_AB:
        return tl.dot(w, tl.trans(a), accumulator, input_precision=MODE.PRECISION)
    else:
        return tl.dot(a, tl.trans(w), accumulator, input_precision=MODE.PRECISION)


@triton.jit
def accumulate(
    accumulator,
    a,
    w,
    w_strides,
    scale_ptr,
    scale_strides,
    slot,
    part,
    n_start,
    k_start,
    N,
    K,
    MODE: tl.constexpr,
):
    """Load one weight tile and add its product with `a` [TILE_M, BLOCK_K].

    An fp8_block tile lies in one 128 x 128 block, because BLOCK_N and BLOCK_K divide 128.
    """
    w_tile = load_weight(
        w,
        w_strides,
        scale_ptr,
        scale_strides,
        slot,
        part,
        n_start,
        k_start,
        N,
        K,
        a.dtype,
        MODE,
    )
    if MODE.FORMAT == "fp8_block":
        n_block, k_block = n_start // SCALE_BLOCK, k_start // SCALE_BLOCK
        scale = tl.load(part_base(scale_ptr, scale_strides, slot, part, n_block, k_block))
        zeros = tl.zeros_like(accumulator)
        return accumulator + scale * multiply_add(zeros, a, w_tile, MODE)
    else:
        return multiply_add(accumulator, a, w_tile, MODE)


@triton.jit
def finish_rows(
    accumulator,
    scale_ptr,
    scale_strides,
    bias_ptr,
    bias_strides,
    slot,
    part,
    n_start,
    N,
    MODE: tl.constexpr,
):
    """Turn an accumulator into fp32 rows [TILE_M, BLOCK_N]: channel scale, then bias."""
    rows = tl.trans(accumulator) if MODE.SWAP_AB else accumulator
    offs_n = tl.arange(0, MODE.BLOCK_N)
    mask_n = n_start + offs_n < N
    if MODE.FORMAT == "fp8_channel":
        pointers = part_base(scale_ptr, scale_strides, slot, part, n_start, 0)
        scale = tl.load(pointers + offs_n * scale_strides.n, mask=mask_n, other=0.0)  # [BLOCK_N]
        rows = rows * scale[None, :]
    if bias_ptr is not None:
        pointers = part_base(bias_ptr, bias_strides, slot, part, n_start, 0)
        bias = tl.load(pointers + offs_n * bias_strides.n, mask=mask_n, other=0.0)  # [BLOCK_N]
        rows = rows + bias.to(tl.float32)[None, :]
    return rows
