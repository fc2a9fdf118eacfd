"""What is wrong or missing with the GPUs, what it means, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from afore_kernels.doctor.checks import TierUse, why_unavailable
from afore_kernels.doctor.findings import Check, Finding
from afore_kernels.doctor.machine import Machine

_OLDEST_CAPABILITY = (8, 0)
_NCCL_SHM_BYTES = 1 << 30
"""Size of /dev/shm that NCCL's documentation asks of containers."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _gpu_list(indices: Sequence[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def check_nvml(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """A driver that is there should answer."""
    topology = machine.topology
    if topology.error and topology.has_driver:
        yield Finding(
            severity="warning",
            name="nvml",
            found=f"the NVIDIA driver does not answer: {topology.error}",
            means="nothing is known of the GPUs, and torch may fail to use them",
            remedy="after an update of the driver reload its kernel modules, or restart",
        )


def check_torch_uses_gpus(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """GPUs that the driver sees should be GPUs that torch can use."""
    torch, topology = machine.torch, machine.topology
    if not topology.gpus or torch.cuda_available or torch.error:
        return
    driver_cuda = topology.driver_cuda
    if not torch.cuda_build:
        yield _unused(
            "cpu_build",
            f"torch is a CPU build, and the driver sees {len(topology.gpus)} GPUs",
            f"install torch for CUDA {driver_cuda or 'as the driver has it'} or earlier",
        )
    elif driver_cuda and _numbers(driver_cuda)[0] < _numbers(torch.cuda_build)[0]:
        yield _unused(
            "driver_too_old",
            f"driver {topology.driver} supports CUDA {driver_cuda}, "
            f"and torch is built for {torch.cuda_build}",
            f"update the driver, or install torch for CUDA {_numbers(driver_cuda)[0]}",
        )
    else:
        yield _unused(
            "cuda_unavailable",
            f"torch cannot use the GPUs: {why_unavailable(torch)}",
            "see what torch.cuda.init() says, and which devices the container was given",
        )


def _unused(name: str, found: str, remedy: str) -> Finding:
    return Finding(
        severity="warning",
        name=name,
        found=found,
        means="workers run on the CPU and leave the GPUs idle",
        remedy=remedy,
    )


def check_gpus_readable(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """A GPU that does not even tell its name has fallen off the bus."""
    lost = [i for i, gpu in enumerate(machine.topology.gpus) if gpu.uuid is None]
    if lost:
        yield Finding(
            severity="warning",
            name="gpu_lost",
            found=f"{_gpu_list(lost)} does not answer",
            means="a worker there would fail",
            remedy="look for Xid errors in the kernel log, and reset the GPU",
        )


def check_hidden(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Torch may be shown fewer GPUs than there are."""
    num_gpus, num_used = len(machine.topology.gpus), len(machine.torch.devices)
    if machine.torch.cuda_available and num_used < num_gpus:
        yield Finding(
            severity="note",
            name="hidden_gpus",
            found=f"torch sees {num_used} of {num_gpus} GPUs",
            means="a tier has no workers on the others",
            remedy="see CUDA_VISIBLE_DEVICES, and which devices the container was given",
        )


def check_architecture(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Torch must have code for the GPU, and so must Triton."""
    for index in machine.used_gpus():
        capability = machine.topology.gpus[index].compute_capability
        if capability is None:
            continue
        if not _has_code(machine.torch.architectures, *_numbers(capability)):
            yield Finding(
                severity="error",
                name="architecture",
                found=f"GPU {index} is sm_{capability.replace('.', '')}, and torch has code for "
                f"{', '.join(machine.torch.architectures)}",
                means="its kernels do not start",
                remedy="install a build of torch for this GPU",
            )
        if _numbers(capability) < _OLDEST_CAPABILITY:
            yield Finding(
                severity="warning",
                name="old_gpu",
                found=f"GPU {index} has compute capability {capability}",
                means="Triton supports 8.0 and later",
                remedy="hide it by CUDA_VISIBLE_DEVICES, or hide all to run on the CPU",
            )


def _has_code(architectures: list[str], major: int, minor: int) -> bool:
    """Whether torch has machine code of this generation, or older code that can be compiled."""
    if not architectures:  # torch does not tell
        return True
    for kind, old_major, old_minor in re.findall(
        r"(sm|compute)_(\d+)(\d)", " ".join(architectures)
    ):
        code = int(old_major), int(old_minor)
        if code <= (major, minor) and (kind == "compute" or code[0] == major):
            return True
    return False


def check_peer_access(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Without peer access a copy takes two steps, through host memory."""
    access = machine.topology.peer_access
    lacking = [f"{i}<-{j}" for i, j in machine.used_paths() if access[i][j] is False]
    if lacking:
        shown = ", ".join(lacking[:8]) + (", ..." if len(lacking) > 8 else "")
        yield Finding(
            severity="warning",
            name="no_peer_access",
            found=f"no peer access in {len(lacking)} directions (reader<-owner): {shown}",
            means="expert copies there are staged by the host, and slower",
            remedy="see nvidia-smi topo -p2p r; in a virtual machine or with an IOMMU, ACS blocks "
            "it",
        )


def check_mig(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Instances of a GPU cannot reach each other's memory."""
    partitioned = [i for i, gpu in enumerate(machine.topology.gpus) if gpu.mig_enabled]
    if partitioned:
        yield Finding(
            severity="warning",
            name="mig",
            found=f"MIG is on for {_gpu_list(partitioned)}",
            means="no peer access and no NCCL between instances; a process uses one of them",
            remedy="let an administrator turn MIG off where a tier shall run",
        )


def check_nvlinks(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """GPUs of one model should have equally many active links."""
    gpus = machine.topology.gpus
    for index, gpu in enumerate(gpus):
        most = max(len(other.nvlinks) for other in gpus if other.name == gpu.name)
        if len(gpu.nvlinks) < most and gpu.uuid is not None:
            yield Finding(
                severity="warning",
                name="nvlinks_down",
                found=f"GPU {index} has {len(gpu.nvlinks)} active NVLinks, its like have {most}",
                means="copies from and to it are slower",
                remedy="see nvidia-smi nvlink --status, and the fabric manager's log",
            )


def check_pcie_width(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """A GPU should have all the lanes that it and the host can use."""
    for index, gpu in enumerate(machine.topology.gpus):
        if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width:
            yield Finding(
                severity="warning",
                name="pcie_width",
                found=f"GPU {index} uses {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes",
                means="its copies from and to the host are slower",
                remedy="reseat the card or its riser",
            )


def check_nccl(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """GPU workers should exchange rows without the host."""
    if tier.device_class != "cuda" or tier.num_workers == 1:
        return
    shm_bytes, num_gpus = machine.system.dev_shm_bytes, len(machine.torch.devices)
    if tier.num_workers > num_gpus:
        yield Finding(
            severity="note",
            name="shared_gpus",
            found=f"{tier.num_workers} workers share {num_gpus} GPUs",
            means="collectives go through the host, as NCCL wants a GPU per worker",
            remedy="for development only; otherwise one worker per GPU",
        )
    elif not machine.torch.has_nccl:
        yield Finding(
            severity="warning",
            name="no_nccl",
            found="this build of torch lacks NCCL",
            means="collectives go through the host",
            remedy="install a build of torch with NCCL",
        )
    elif shm_bytes is not None and shm_bytes < _NCCL_SHM_BYTES:
        yield Finding(
            severity="warning",
            name="dev_shm",
            found=f"/dev/shm has {shm_bytes / 2**20:.0f} MiB",
            means="NCCL may fail between GPUs without peer access",
            remedy="start the container with --shm-size=1g",
        )


def check_triton_build(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Triton compiles its launcher on first use."""
    compilers = machine.compilers
    missing = [
        *([] if compilers.c_compiler else ["C compiler"]),
        *([] if compilers.python_headers else ["Python.h"]),
    ]
    if tier.executor == "triton" and missing:
        yield Finding(
            severity="warning",
            name="triton_build",
            found=f"no {' and no '.join(missing)}",
            means="the first kernel fails, unless Triton has cached its launcher",
            remedy="install gcc and Python's development headers",
        )


GPU_CHECKS: tuple[Check, ...] = (
    check_nvml,
    check_torch_uses_gpus,
    check_gpus_readable,
    check_hidden,
    check_architecture,
    check_peer_access,
    check_mig,
    check_nvlinks,
    check_pcie_width,
    check_nccl,
    check_triton_build,
)
