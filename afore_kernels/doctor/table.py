"""The diagnosis as text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from afore_kernels.doctor.checks import TierUse
from afore_kernels.doctor.diagnosis import Diagnosis
from afore_kernels.doctor.libraries import Library, TorchBuild
from afore_kernels.doctor.machine import Machine
from afore_kernels.doctor.system import UNLIMITED, System
from afore_kernels.doctor.topology import Gpu, Topology

WIDTH = 100
_LABEL = 15
_CELL = 5
_GPUS_ACROSS = (WIDTH - _LABEL) // (_CELL + 1)
# As nvidia-smi topo -m abbreviates them.
_ANCESTORS = {
    "internal": "PSB",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
}


def render(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text."""
    machine = diagnosis.machine
    sections = {
        "system": _system(machine.system),
        "libraries": _libraries(machine),
        "GPUs": _gpus(machine.topology, machine.torch, diagnosis.measured_gb_s),
        "a tier here": _tier(diagnosis.tier),
        "findings": _findings(diagnosis),
    }
    return "\n\n".join("\n".join((title, *lines)) for title, lines in sections.items())


def _line(label: str, text: str) -> str:
    """A label and its text, with the text's continuation lines below its start."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"  {label:{_LABEL - 2}s}",
        subsequent_indent=" " * _LABEL,
        break_on_hyphens=False,
    )


def _or_unknown(value: object) -> str:
    return "unknown" if value is None else str(value)


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _limit(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == UNLIMITED else f"{value // unit}{name}"


def _system(system: System) -> Iterator[str]:
    yield _line("platform", f"{system.platform} {system.kernel}, {system.machine}")
    quota = "" if system.cpu_quota is None else f", quota {system.cpu_quota:g}"
    yield _line(
        "CPU",
        f"{_or_unknown(system.cpu)}, {system.usable_cores} usable cores{quota}, "
        f"{_or_unknown(system.numa_nodes)} NUMA nodes",
    )
    limit = system.memory_limit_bytes
    yield _line(
        "memory",
        f"{_gib(system.memory_bytes)}, {_gib(system.available_bytes)} available"
        + ("" if limit is None else f", limited to {_gib(limit)}"),
    )
    yield _line(
        "limits",
        f"open files {_limit(system.open_files_limit)}, "
        f"locked memory {_limit(system.locked_memory_limit_bytes, 2**20, ' MiB')}, "
        f"/dev/shm {_gib(system.dev_shm_bytes)}",
    )
    states = [
        f"{name.replace('_', ' ')} {'fail' if error else 'work'}"
        for name, error in system.facilities.items()
    ]
    yield _line("kernel", ", ".join(states))
    if system.rdma_devices:
        yield _line("RDMA", ", ".join(system.rdma_devices))
    yield _line("python", f"{system.python}, afore_kernels {system.afore_kernels}")


def _libraries(machine: Machine) -> Iterator[str]:
    for name, library in machine.libraries.items():
        text = f"{library.version or '-':18s} {_support(library):14s} {library.purpose}"
        yield _line(name, text)
    torch = machine.torch
    if not torch.error:
        build = f"CUDA {torch.cuda_build}" if torch.cuda_build else "CPU"
        backends = [
            name for name, has in (("gloo", torch.has_gloo), ("nccl", torch.has_nccl)) if has
        ]
        yield _line("torch build", f"{build}; collectives: {', '.join(backends) or 'none'}")
    compilers = machine.compilers
    yield _line("numba cache", compilers.numba_cache or f"none: {compilers.numba_error}")


def _support(library: Library) -> str:
    needs = library.requirement or ""
    if library.version is None:
        return f"needs {needs}" if library.is_core else f"optional {needs}"
    return (
        f"{needs} {'' if library.is_supported is None else 'ok' if library.is_supported else 'NO'}"
    )


def _gpus(
    topology: Topology, torch: TorchBuild, measured: list[list[float | None]] | None
) -> Iterator[str]:
    if topology.error or not topology.gpus:
        yield _line("none", f"NVML: {topology.error or 'the driver sees no GPU'}")
    else:
        yield _line(
            "driver",
            f"{_or_unknown(topology.driver)}, up to CUDA {_or_unknown(topology.driver_cuda)}",
        )
    device_of = {device.uuid: device for device in torch.devices}
    for index, gpu in enumerate(topology.gpus):
        yield from _gpu(index, gpu)
        if device := device_of.get(gpu.uuid or ""):
            engines = _or_unknown(device.copy_engines)
            yield _line("", f"cuda:{device.index} of torch, copy engines: {engines}")
    if len(topology.gpus) > 1:
        yield from _matrix(
            "PCIe path, as in nvidia-smi topo -m",
            "GPU",
            [[_ANCESTORS.get(cell or "", "?") for cell in row] for row in topology.common_ancestor],
        )
        yield from _matrix(
            "peer access: the row's GPU reads the column's memory",
            "GPU",
            [
                ["?" if cell is None else "yes" if cell else "no" for cell in row]
                for row in topology.peer_access
            ],
        )
        if any(gpu.nvlinks for gpu in topology.gpus):
            yield from _matrix("active NVLinks", "GPU", _numbers(topology.nvlinks))
            yield from _matrix(
                "NVLink GB/s in one direction, theoretical", "GPU", _numbers(topology.nvlink_gb_s)
            )
    if measured is None:
        yield _line("bandwidth", "not measured")
    else:
        title = "measured GB/s, from the column's to the row's GPU"
        yield from _matrix(title, "cuda:", _numbers(measured))


def _gpu(index: int, gpu: Gpu) -> Iterator[str]:
    mig = {None: "MIG unknown", True: "MIG on", False: "MIG off"}[gpu.mig_enabled]
    power = "unknown" if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W"
    yield _line(
        f"GPU {index}",
        f"{_or_unknown(gpu.name)}, {_gib(gpu.memory_bytes)} ({_gib(gpu.free_bytes)} free), "
        f"compute {_or_unknown(gpu.compute_capability)}, power limit {power}, {mig}",
    )
    yield _line("", f"{_or_unknown(gpu.uuid)} at {_or_unknown(gpu.pci_bus_id)}")
    links = Counter(_or_unknown(link.peer) for link in gpu.nvlinks)
    nvlink = ", ".join(f"{count} to {peer}" for peer, count in links.items()) or "none active"
    yield _line(
        "",
        f"PCIe generation {_or_unknown(gpu.pcie_generation)}, {_or_unknown(gpu.pcie_width)} of "
        f"{_or_unknown(gpu.pcie_max_width)} lanes; NVLink: {nvlink}",
    )


def _numbers(matrix: Sequence[Sequence[float | None]]) -> list[list[str]]:
    return [["?" if cell is None else f"{cell:.0f}" for cell in row] for row in matrix]


def _matrix(title: str, device: str, cells: list[list[str]]) -> Iterator[str]:
    """Lay out a square matrix without its diagonal, in blocks of columns that fit."""
    yield f"  {title}"
    for first in range(0, len(cells), _GPUS_ACROSS):
        columns = range(first, min(first + _GPUS_ACROSS, len(cells)))
        header = "".join(f" {column:>{_CELL}d}" for column in columns)
        yield f"{'':{_LABEL}s}{header}"
        for row, values in enumerate(cells):
            shown = ("-" if row == column else values[column] for column in columns)
            label = f"    {device} {row}"
            yield f"{label:{_LABEL}s}" + "".join(f" {cell:>{_CELL}s}" for cell in shown)


def _tier(tier: TierUse) -> Iterator[str]:
    yield _line("workers", str(tier.num_workers))
    yield _line("device", f"{tier.device_class}: {'; '.join(tier.reasons)}")
    yield _line("executor", tier.executor)
    yield _line("collectives", tier.collectives)
    yield _line("copy path", tier.copy_path)
    yield _line("CUDA graphs", "yes" if tier.cuda_graphs else "no")


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    for finding in diagnosis.findings:
        yield _line(finding.severity, finding.found)
        yield _line("", f"means: {finding.means}")
        yield _line("", f"do: {finding.remedy}")
    yield f"  a tier can{'' if diagnosis.can_run else 'not'} run here"
