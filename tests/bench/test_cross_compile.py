from __future__ import annotations

import multiprocessing
import subprocess
from typing import NamedTuple

import pytest
import triton
import triton.language as tl

from bench.cross_compile import (
    CompileError,
    CompileJob,
    Resources,
    compile_all,
    compile_kernel,
    parse_amd_metadata,
    parse_res_usage,
)
from bench.occupancy import ARCHITECTURES, GFX942, SM80, SM90, SM100


class Strides(NamedTuple):
    m: object
    k: object


@triton.jit
def _multiply_kernel(
    out_ptr,
    a_ptr,
    b_ptr,
    stride_out_m,
    a_strides,
    stride_b_n,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k_start in range(0, K, BLOCK_K):
        columns = (k_start + offs_k)[None, :]
        a = tl.load(a_ptr + offs_m[:, None] * a_strides.m + columns * a_strides.k)
        b = tl.load(b_ptr + offs_n[:, None] * stride_b_n + columns)
        product = tl.dot(a, tl.trans(b), product)
    tl.store(out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :], product)


@triton.jit
def _copy_kernel(out_ptr, x_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N), mask=offs < N)


@triton.jit
def _center_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x - tl.max(x))


@triton.jit
def _descriptor_kernel(out_ptr, x, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    block = x.load([1, 0, 0, 0]).reshape(BLOCK, BLOCK)
    tl.store(out_ptr + offs[:, None] * BLOCK + offs[None, :], block)


MULTIPLY_ARGUMENTS = {
    "out_ptr": "*fp32",
    "a_ptr": "*bf16",
    "b_ptr": "*bf16",
    "stride_out_m": "i32",
    "a_strides": Strides("i32", "1"),
    "stride_b_n": "i32",
    "K": "i32:16",
}
COPY_ARGUMENTS = {"out_ptr": "*fp32", "x_ptr": "*fp32", "N": "i32"}


@pytest.mark.parametrize(
    ("architecture", "kind", "load"),
    [
        (SM80, "mma", "LDGSTS.128"),
        (SM90, "wgmma", "LDGSTS.128"),
        (SM100, "tcgen05", "LDGSTS.128"),
        (GFX942, "mfma", "global_load_dwordx4"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_product_uses_tensor_cores_and_wide_loads(architecture, kind, load):
    constexprs = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
    report = compile_kernel(_multiply_kernel, MULTIPLY_ARGUMENTS, constexprs, architecture, 4, 3)
    assert set(report.tensor_core) == {kind}
    assert set(report.global_loads) == {load}
    assert not report.has_spills
    assert 16 < report.registers < 256
    # Two blocks of 64 x 64 bf16 are 16 KiB a stage.
    assert report.shared_bytes >= 16 * 1024
    assert report.threads_per_cta == 4 * architecture.warp_size
    assert report.ctas_per_sm >= 1
    assert 0 < report.main_loop_tensor_core <= report.tensor_core[kind]
    assert report.main_loop > report.main_loop_tensor_core
    assert report.instructions_per_tensor_core == report.main_loop / report.main_loop_tensor_core
    assert (report.tensor_memory_columns > 0) == (architecture is SM100)


@pytest.mark.parametrize("architecture", [SM80, GFX942], ids=lambda a: a.name)
def test_spills_are_reported(architecture):
    # Every thread keeps 128 values until their maximum is known. Beside 511 other threads (AMD:
    # 1023) it may have 128 registers, of which some hold addresses.
    block = 128 * 16 * architecture.warp_size
    arguments = {"out_ptr": "*fp32", "x_ptr": "*fp32"}
    report = compile_kernel(_center_kernel, arguments, {"BLOCK": block}, architecture, 16, 1)
    assert report.registers <= 128
    assert report.has_spills
    assert report.spill_bytes > 0
    assert (report.spilled_registers > 0) == (architecture is GFX942)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_copy_has_no_tensor_core_instructions(architecture):
    report = compile_kernel(_copy_kernel, COPY_ARGUMENTS, {"BLOCK": 1024}, architecture, 4, 1)
    assert report.tensor_core == {}
    assert (report.main_loop, report.instructions_per_tensor_core) == (0, None)
    assert sum(report.global_loads.values()) > 0
    assert not report.has_spills


def test_descriptor_argument_is_a_bulk_copy():
    arguments = {"out_ptr": "*bf16", "x": "tensordesc<bf16[1,1,64,64]>"}
    report = compile_kernel(_descriptor_kernel, arguments, {"BLOCK": 64}, SM90, 4, 1)
    assert report.global_loads == {"UTMALDG": 1}


def test_divisibility_widens_loads():
    unaligned = compile_kernel(_copy_kernel, COPY_ARGUMENTS, {"BLOCK": 1024}, SM80, 4, 1)
    aligned = compile_kernel(
        _copy_kernel, COPY_ARGUMENTS | {"N": "i32:16"}, {"BLOCK": 1024}, SM80, 4, 1
    )
    # Without it, the mask may end inside of a vector.
    assert set(unaligned.global_loads) == {"LDG.32"}
    assert set(aligned.global_loads) == {"LDG.128"}


def test_compile_all_keeps_the_order_and_leaves_no_process():
    jobs = [
        CompileJob(_copy_kernel, COPY_ARGUMENTS, {"BLOCK": block}, GFX942, 4, 1)
        for block in (1024, 2048)
    ]
    reports = compile_all(jobs)
    assert reports == [compile_kernel(*job) for job in jobs]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"out_ptr": "*fp32", "x_ptr": "*fp32"}, id="missing"),
        pytest.param(COPY_ARGUMENTS | {"M": "i32"}, id="unknown"),
        pytest.param(COPY_ARGUMENTS | {"BLOCK": "i32"}, id="both"),
        pytest.param(COPY_ARGUMENTS | {"N": "i32:8"}, id="divisor"),
        pytest.param(COPY_ARGUMENTS | {"x_ptr": "*float"}, id="type"),
    ],
)
def test_wrong_arguments_raise(arguments):
    with pytest.raises(CompileError):
        compile_kernel(_copy_kernel, arguments, {"BLOCK": 1024}, SM80, 4, 1)


def test_kernel_that_does_not_compile_raises():
    with pytest.raises(CompileError, match="_copy_kernel does not compile for sm80"):
        compile_kernel(_copy_kernel, COPY_ARGUMENTS, {"BLOCK": 1000}, SM80, 4, 1)


def test_plain_function_is_refused():
    with pytest.raises(CompileError, match="TRITON_INTERPRET"):
        compile_kernel(_copy_kernel.fn, COPY_ARGUMENTS, {"BLOCK": 1024}, SM80, 4, 1)


def test_failing_tool_raises(monkeypatch):
    def fail(command, **options):
        raise subprocess.CalledProcessError(255, command)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(CompileError, match="cuobjdump -sass failed"):
        compile_kernel(_copy_kernel, COPY_ARGUMENTS, {"BLOCK": 1024}, SM80, 4, 1)


RES_USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function kernel:
  REG:80 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:952 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_stack_and_local_memory_are_spills():
    assert parse_res_usage(RES_USAGE, "kernel") == Resources(80, 24, 0, 0)


@pytest.mark.parametrize(
    "text",
    ["", RES_USAGE * 2, RES_USAGE.replace("STACK", "FRAME"), RES_USAGE.replace("kernel", "other")],
    ids=["empty", "two", "no-stack", "other"],
)
def test_resources_that_are_not_understood_raise(text):
    with pytest.raises(CompileError):
        parse_res_usage(text, "kernel")


AMD_METADATA = """\
  - .agpr_count:     32
    .group_segment_fixed_size: 512
    .name:           kernel
    .private_segment_fixed_size: 16
    .sgpr_spill_count: 1
    .vgpr_count:     140
    .vgpr_spill_count: 4
"""


def test_amd_metadata():
    assert parse_amd_metadata(AMD_METADATA, "kernel") == Resources(140, 16, 5, 512)


@pytest.mark.parametrize(
    "text",
    [
        "",
        AMD_METADATA * 2,
        AMD_METADATA.replace("vgpr_spill_count", "vgpr_spills"),
        AMD_METADATA.replace("kernel", "other"),
    ],
    ids=["empty", "two", "no-spills", "other"],
)
def test_amd_metadata_that_is_not_understood_raises(text):
    with pytest.raises(CompileError):
        parse_amd_metadata(text, "kernel")
