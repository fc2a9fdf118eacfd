"""Compile a kernel for a GPU that is not there and report what it became.

Registers, spills, shared memory, occupancy, tensor-core instructions, the length of the main loop
and the width of global loads are facts of the machine code, so a launch table can be checked
without the device. Triton's own package has the tools for NVIDIA; AMD's assembly carries its own
metadata. Kernels are compiled, so TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import importlib
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bench.assembly import (
    Instruction,
    count_global_loads,
    count_tensor_core,
    find_main_loop,
    parse_amdgcn,
    parse_sass,
)
from bench.occupancy import Architecture

TIMEOUT_S = 60
# Types of an argument, nested as the argument is if it is a tuple.
ArgumentType: TypeAlias = "str | tuple[ArgumentType, ...]"


class CompileError(RuntimeError):
    """A kernel did not compile, a tool failed or what it said of resources cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What a kernel became on one architecture.

    Attributes:
        name: of the kernel.
        architecture: it was compiled for.
        registers: per thread; on AMD vector registers, accumulation registers included.
        spill_bytes: local memory of one thread (AMD: scratch).
        spilled_registers: AMD's count of vector and scalar registers that were spilled, to memory
            or to other registers; 0 on NVIDIA, which reports bytes only.
        shared_bytes: static and dynamic shared memory of a CTA.
        tensor_memory_columns: of a CTA, on architectures that have them.
        threads_per_cta: warp specialisation included.
        ctas_per_sm: that fit one SM or CU; 0 means that the kernel cannot be launched.
        tensor_core: instructions by kind: `mma`, `wgmma`, `tcgen05`, `mfma`.
        global_loads: load instructions by name and width.
        main_loop: instructions of the busiest loop with tensor-core instructions, 0 without one.
        main_loop_tensor_core: tensor-core instructions among them.
    """

    name: str
    architecture: Architecture
    registers: int
    spill_bytes: int
    spilled_registers: int
    shared_bytes: int
    tensor_memory_columns: int
    threads_per_cta: int
    ctas_per_sm: int
    tensor_core: dict[str, int]
    global_loads: dict[str, int]
    main_loop: int
    main_loop_tensor_core: int

    @property
    def has_spills(self) -> bool:
        """Whether any register was spilled."""
        return self.spill_bytes > 0 or self.spilled_registers > 0

    @property
    def instructions_per_tensor_core(self) -> float | None:
        """Instructions of the main loop per tensor-core instruction, or None without the loop."""
        return self.main_loop / self.main_loop_tensor_core if self.main_loop else None


class CompileJob(NamedTuple):
    """The arguments of `compile_kernel`; the kernel must be a global name of its module."""

    kernel: JITFunction[Any]
    arguments: Mapping[str, ArgumentType]
    constexprs: Mapping[str, Any]
    architecture: Architecture
    num_warps: int
    num_stages: int


def compile_kernel(
    kernel: JITFunction[Any],
    arguments: Mapping[str, ArgumentType],
    constexprs: Mapping[str, Any],
    architecture: Architecture,
    num_warps: int,
    num_stages: int,
) -> KernelReport:
    """Compile a kernel with the specialisation it has at run time and read the result.

    Args:
        kernel: decorated by `triton.jit`, not interpreted.
        arguments: argument name -> type: `*bf16`, `i32`, `fp32`, `tensordesc<bf16[1,1,64,64]>`, or
            a tuple of types. As the launcher specialises: pointers and strides (`stride_...`,
            `..._strides`) count as divisible by 16, `:16` marks another integer as such
            (`i32:16`) and `1` is an integer that is one.
        constexprs: argument name -> value; also of an argument that is None.
        architecture: to compile for.
        num_warps: per CTA.
        num_stages: of the software pipeline.

    Raises:
        CompileError: if the arguments are not the kernel's, compilation fails, a tool is missing or
            the resources cannot be read.
        AssemblyError: if the machine code is not understood.
    """
    if not isinstance(kernel, JITFunction):
        raise CompileError(f"{kernel!r} is not a compiled kernel: is TRITON_INTERPRET set?")
    source = _make_source(kernel, arguments, constexprs)
    target = GPUTarget(architecture.backend, architecture.arch, architecture.warp_size)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        raise CompileError(
            f"{source.name} does not compile for {architecture.name} with {dict(constexprs)}, "
            f"{num_warps} warps, {num_stages} stages: {error}"
        ) from error
    metadata = compiled.metadata
    read = _read_amdgcn if architecture.backend == "hip" else _read_cubin
    instructions, resources = read(compiled.asm, metadata.name)
    main_loop = find_main_loop(instructions) or []
    shared_bytes = metadata.shared + resources.static_shared_bytes
    tensor_memory_columns = getattr(metadata, "tmem_size", 0)
    return KernelReport(
        name=metadata.name,
        architecture=architecture,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        spilled_registers=resources.spilled_registers,
        shared_bytes=shared_bytes,
        tensor_memory_columns=tensor_memory_columns,
        threads_per_cta=metadata.num_warps * architecture.warp_size,
        ctas_per_sm=architecture.count_resident_ctas(
            registers=resources.registers,
            shared_bytes=shared_bytes,
            num_warps=metadata.num_warps,
            tensor_memory_columns=tensor_memory_columns,
        ),
        tensor_core=count_tensor_core(instructions),
        global_loads=count_global_loads(instructions),
        main_loop=len(main_loop),
        main_loop_tensor_core=sum(count_tensor_core(main_loop).values()),
    )


def compile_all(jobs: Sequence[CompileJob], num_processes: int = 2) -> list[KernelReport]:
    """Compile jobs in parallel and return their reports in order; the first error is raised."""
    # A fork of a process with threads may deadlock, and LLVM has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        calls = [
            pool.submit(_compile_by_name, job.kernel.__module__, job.kernel.__name__, *job[1:])
            for job in jobs
        ]
        return [call.result() for call in calls]


def _compile_by_name(module: str, name: str, *arguments: Any) -> KernelReport:
    """Compile in another process: a kernel cannot be pickled, its name can."""
    return compile_kernel(getattr(importlib.import_module(module), name), *arguments)


def _make_source(
    kernel: JITFunction[Any],
    arguments: Mapping[str, ArgumentType],
    constexprs: Mapping[str, Any],
) -> ASTSource:
    given = [*arguments, *constexprs]
    if sorted(given) != sorted(kernel.arg_names):
        wrong = sorted(set(given) ^ set(kernel.arg_names))
        raise CompileError(f"{kernel.__name__}: missing, unknown or repeated arguments: {wrong}")
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def specialise(kind: ArgumentType, path: tuple[int, ...], is_stride: bool) -> ArgumentType:
        if isinstance(kind, tuple):
            kinds = [specialise(part, (*path, i), is_stride) for i, part in enumerate(kind)]
            return type(kind)(*kinds) if hasattr(kind, "_fields") else tuple(kinds)
        if kind == "1":
            constants[path] = 1
            return "constexpr"
        base, _, divisor = kind.partition(":")
        if divisor not in ("", "16"):
            raise CompileError(f"{kernel.__name__}: {kind} is marked with something else than 16")
        if divisor or is_stride or base.startswith("*"):
            attributes[path] = [["tt.divisibility", 16]]
        return base

    signature: dict[str, ArgumentType] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constexprs:
            constants[(index,)] = constexprs[name]
            signature[name] = "constexpr"
        else:
            is_stride = name.startswith("stride_") or name.endswith("_strides")
            signature[name] = specialise(arguments[name], (index,), is_stride)
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


class Resources(NamedTuple):
    """What the machine code says it needs; see `KernelReport`."""

    registers: int
    spill_bytes: int
    spilled_registers: int
    static_shared_bytes: int


def _read_cubin(asm: Mapping[str, Any], name: str) -> tuple[list[Instruction], Resources]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        instructions = parse_sass(_run_cuobjdump("-sass", file.name), name)
        resources = parse_res_usage(_run_cuobjdump("-res-usage", file.name), name)
        # A stack frame that nothing loads or stores holds no register.
        if not any(i.opcode.startswith(("LDL", "STL")) for i in instructions):
            resources = resources._replace(spill_bytes=0)
        return instructions, resources


def _run_cuobjdump(option: str, path: str) -> str:
    try:
        command = [knobs.nvidia.cuobjdump.path, option, path]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S
        ).stdout
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise CompileError(f"cuobjdump {option} failed: {error}") from error


def parse_res_usage(text: str, name: str) -> Resources:
    """Read the output of `cuobjdump -res-usage` on a cubin with one kernel.

    Raises:
        CompileError: if it is not about `name` alone.
    """
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+) ", text)
    if len(rows) != 1 or rows[0][0] != name:
        raise CompileError(f"cannot read the resources of {name}: {text!r}")
    registers, stack, local = map(int, rows[0][1:])
    # Triton's shared memory is all dynamic; SHARED is what the driver reserves.
    return Resources(registers, stack + local, 0, 0)


def _read_amdgcn(asm: Mapping[str, Any], name: str) -> tuple[list[Instruction], Resources]:
    return parse_amdgcn(asm["amdgcn"], name), parse_amd_metadata(asm["amdgcn"], name)


def parse_amd_metadata(text: str, name: str) -> Resources:
    """Read the metadata at the end of AMD assembly.

    Raises:
        CompileError: if it is not about `name` alone or lacks a field.
    """
    if re.findall(r"^ +\.name: +(\S+)$", text, re.MULTILINE).count(name) != 1:
        raise CompileError(f"the assembly has no metadata of {name} alone")

    def read(field: str) -> int:
        values = re.findall(rf"^ .*\.{field}: +(\d+)$", text, re.MULTILINE)
        if len(values) != 1:
            raise CompileError(f"the metadata of {name} has {len(values)} values of {field}")
        return int(values[0])

    return Resources(
        read("vgpr_count"),
        read("private_segment_fixed_size"),
        read("vgpr_spill_count") + read("sgpr_spill_count"),
        read("group_segment_fixed_size"),
    )
