"""Reading machine code: the instructions of a kernel, its loops, its tensor-core instructions.

`parse_sass` reads what `cuobjdump -sass` prints, `parse_amdgcn` the assembly Triton keeps. Both
raise on a line they do not know rather than skip it, so that a count of zero can be trusted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TENSOR_CORE_KINDS = {
    "tcgen05": re.compile(r"UTC\w*MMA"),
    "wgmma": re.compile(r"[A-Z]GMMA"),
    "mma": re.compile(r"[A-Z]MMA"),
    "mfma": re.compile(r"v_(mfma|smfmac)_"),
}
SASS_LOAD_BITS = {"8", "U8", "S8", "16", "U16", "S16", "64", "128", "256"}

_SASS_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*")
_SASS_TEXT = re.compile(r"(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.a-z]*)(?:\s+(.*))?")
_AMD_LABEL = re.compile(r"(\.?\w+):\s*(?:;.*)?")
_AMD_TEXT = re.compile(r"\s+([a-z]\w*)(?:\s+([^;]*?))?\s*(?:;.*)?")


class AssemblyError(ValueError):
    """The machine code has a form that this module does not understand."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a kernel.

    Attributes:
        opcode: with its modifiers, such as `HGMMA.64x128x16.F32.BF16`.
        target: index of the instruction that a branch may continue at, or None.
        falls_through: whether the next instruction may follow.
    """

    opcode: str
    target: int | None = None
    falls_through: bool = True


def parse_sass(text: str, name: str) -> list[Instruction]:
    """Return the instructions of the only kernel in `text`, the output of `cuobjdump -sass`.

    Raises:
        AssemblyError: if `name` is not the only function, a line or a branch is not understood.
    """
    functions = re.findall(r"^\s*Function : (\S+)$", text, re.MULTILINE)
    if functions != [name]:
        raise AssemblyError(f"expected the SASS of {name}, got that of {functions}")
    index_of: dict[str, int] = {}
    parts: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        # Every other line holds only the second half of an instruction's encoding.
        if not line.lstrip().startswith("/*") or line.lstrip().startswith("/* 0x"):
            continue
        match = _SASS_LINE.fullmatch(line)
        body = match and _SASS_TEXT.fullmatch(match[2])
        if not match or not body:
            raise AssemblyError(f"not a SASS instruction: {line.strip()!r}")
        index_of[f"{int(match[1], 16):#x}"] = len(parts)
        parts.append((body[1] or "", body[2], body[3] or ""))
    if not parts:
        raise AssemblyError(f"{name} has no SASS instruction")
    return [_read_sass(*part, index_of) for part in parts]


def _read_sass(guard: str, opcode: str, operands: str, index_of: dict[str, int]) -> Instruction:
    base = opcode.split(".")[0]
    if base in ("EXIT", "RET"):
        return Instruction(opcode, falls_through=bool(guard))
    if base in ("BRX", "BRXU", "JMX", "JMXU"):
        raise AssemblyError(f"indirect branch {opcode} {operands}")
    if base not in ("BRA", "JMP"):
        return Instruction(opcode)
    *conditions, address = operands.replace("`(", "").replace(")", "").split(", ")
    if address not in index_of:
        raise AssemblyError(f"{opcode} {operands} leaves the kernel")
    return Instruction(opcode, index_of[address], bool(guard or conditions))


def parse_amdgcn(text: str, name: str) -> list[Instruction]:
    """Return the instructions of kernel `name` in AMD assembly.

    Raises:
        AssemblyError: if the kernel is not there, a line or a branch is not understood.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(rf"{re.escape(name)}:(\s|$)", line)]
    if len(starts) != 1:
        raise AssemblyError(f"expected one kernel {name}, found {len(starts)}")
    index_of: dict[str, int] = {}
    parts: list[tuple[str, str]] = []
    for line in lines[starts[0] + 1 :]:
        if line.startswith(".Lfunc_end"):
            break
        if label := _AMD_LABEL.fullmatch(line):
            index_of[label[1]] = len(parts)
        elif line.strip() and not line.lstrip().startswith((".", ";")):
            match = _AMD_TEXT.fullmatch(line)
            if not match:
                raise AssemblyError(f"not an AMD instruction: {line.strip()!r}")
            parts.append((match[1], match[2] or ""))
    if not parts:
        raise AssemblyError(f"{name} has no AMD instruction")
    return [_read_amdgcn(*part, index_of) for part in parts]


def _read_amdgcn(opcode: str, operands: str, index_of: dict[str, int]) -> Instruction:
    if opcode == "s_endpgm":
        return Instruction(opcode, falls_through=False)
    if opcode == "s_setpc_b64":
        raise AssemblyError(f"indirect branch {opcode} {operands}")
    if opcode != "s_branch" and not opcode.startswith("s_cbranch"):
        return Instruction(opcode)
    if operands not in index_of:
        raise AssemblyError(f"{opcode} {operands} has no such label")
    return Instruction(opcode, index_of[operands], opcode != "s_branch")


def tensor_core_kind(opcode: str) -> str | None:
    """Return the key of `TENSOR_CORE_KINDS` an opcode belongs to, or None.

    >>> [tensor_core_kind(op) for op in ("HMMA.16816.F32.BF16", "UTCHMMA.2CTA", "UTCBAR", "FFMA")]
    ['mma', 'tcgen05', None, None]
    """
    base = opcode.split(".")[0]
    for kind, pattern in TENSOR_CORE_KINDS.items():
        if pattern.match(base):
            return kind
    return None


def count_tensor_core(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Count tensor-core instructions by kind."""
    kinds = (tensor_core_kind(instruction.opcode) for instruction in instructions)
    return dict(Counter(kind for kind in kinds if kind))


def count_global_loads(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Count loads from global memory by instruction and width.

    NVIDIA loads are named with their bits (`LDG.128`, `LDGSTS.128`) except the bulk copies
    (`UTMALDG`, whose box is in the descriptor); AMD loads by opcode (`global_load_dwordx4`).
    """
    return dict(Counter(load for i in instructions if (load := _global_load(i.opcode))))


def _global_load(opcode: str) -> str | None:
    base, *modifiers = opcode.split(".")
    if base in ("LDG", "LDGSTS"):
        bits = next((m for m in modifiers if m in SASS_LOAD_BITS), "32")
        return f"{base}.{bits.lstrip('US')}"
    if base in ("UTMALDG", "UBLKCP"):
        return base
    return opcode if re.match(r"(buffer|global|flat)_load_", opcode) else None


def find_loops(instructions: Sequence[Instruction]) -> list[set[int]]:
    """Return the natural loops of a kernel, each as the indices of its instructions.

    Dominance decides, not the direction of a branch: compilers move the slow path of a barrier wait
    behind the kernel, from where it branches back without being a loop.
    """
    blocks, successors = _build_flow_graph(instructions)
    predecessors: list[list[int]] = [[] for _ in blocks]
    reached, stack = {0}, [0]
    while stack:
        block = stack.pop()
        for successor in successors[block]:
            predecessors[successor].append(block)
            if successor not in reached:
                reached.add(successor)
                stack.append(successor)

    dominators = _find_dominators(predecessors)
    bodies: dict[int, set[int]] = {}
    for header, sources in enumerate(predecessors):
        for source in sources:
            if not dominators[source] >> header & 1:
                continue
            body, stack = bodies.setdefault(header, {header}), [source]
            while stack:
                block = stack.pop()
                if block not in body:
                    body.add(block)
                    stack.extend(predecessors[block])
    return [{i for block in body for i in blocks[block]} for body in bodies.values()]


def _build_flow_graph(
    instructions: Sequence[Instruction],
) -> tuple[list[range], list[list[int]]]:
    """Return the basic blocks, as ranges of instructions, and the successors of each."""
    leaders = {0}
    for i, instruction in enumerate(instructions):
        if instruction.target is not None:
            leaders |= {instruction.target, i + 1}
        elif not instruction.falls_through:
            leaders.add(i + 1)
    starts = sorted(leaders - {len(instructions)})
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(instructions)])]
    block_of = {block.start: number for number, block in enumerate(blocks)}
    successors: list[list[int]] = []
    for number, block in enumerate(blocks):
        last = instructions[block[-1]]
        successors.append([] if last.target is None else [block_of[last.target]])
        # The last block is padding that is never reached.
        if last.falls_through and number + 1 < len(blocks):
            successors[number].append(number + 1)
    return blocks, successors


def _find_dominators(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Return the dominators of every block as a bit set; block 0 is the entry."""
    everything = (1 << len(predecessors)) - 1
    dominators = [1] + [everything] * (len(predecessors) - 1)
    changed = True
    while changed:
        changed = False
        for block in range(1, len(predecessors)):
            common = everything
            for source in predecessors[block]:
                common &= dominators[source]
            common |= 1 << block
            if common != dominators[block]:
                dominators[block], changed = common, True
    return dominators


def find_main_loop(instructions: Sequence[Instruction]) -> list[Instruction] | None:
    """Return the loop that does the work, or None if no loop has a tensor-core instruction.

    That is, of the innermost loops with tensor-core instructions, the one with most of them:
    pipelining peels iterations off into loops and straight code of their own.
    """
    work = {i for i, instr in enumerate(instructions) if tensor_core_kind(instr.opcode)}
    loops = [loop for loop in find_loops(instructions) if loop & work]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    if not innermost:
        return None
    busiest = max(innermost, key=lambda loop: len(loop & work))
    return [instructions[i] for i in sorted(busiest)]
