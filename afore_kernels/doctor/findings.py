"""What is wrong or missing on the host and in its libraries, what it means, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from afore_kernels.doctor.checks import TierUse
from afore_kernels.doctor.machine import Machine
from afore_kernels.doctor.system import UNLIMITED

Severity = Literal["error", "warning", "note"]

_MACHINES = ("x86_64", "aarch64")
_NOT_NEEDED = ("triton", "nvidia-ml-py")
"""Core dependencies without which a tier on CPUs runs."""

_FILES_PER_WORKER = 4
_FILES_BESIDE = 64
"""Descriptors of the process that starts a tier: weights, sockets and rendezvous of a worker; and
what Python, its libraries and the clients have open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know about the machine.

    Attributes:
        severity: `error` keeps a tier from running, `warning` makes it slower or its results
            untested, `note` is good to know.
        name: stable name.
        found: what was found.
        means: what follows for a tier.
        remedy: what to do.
    """

    severity: Severity
    name: str
    found: str
    means: str
    remedy: str


Check = Callable[[Machine, TierUse], Iterator[Finding]]

_FACILITIES = {
    "memory_files": (
        "the tier's shared memory cannot be created",
        "set /proc/sys/vm/memfd_noexec below 2, or let the container call memfd_create",
    ),
    "abstract_sockets": (
        "clients in other processes cannot connect to the tier",
        "let the container or its security profile use abstract Unix sockets",
    ),
    "loopback": ("the workers cannot find each other", "bring the interface up: ip link set lo up"),
    "process_descriptors": (
        "the launcher cannot watch its children",
        "use Linux 5.3 or later, and let the container call pidfd_open",
    ),
}


def check_platform(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """The runtime's futexes are Linux system calls, by number."""
    system = machine.system
    if not system.platform.startswith("linux") or system.machine not in _MACHINES:
        yield Finding(
            severity="error",
            name="platform",
            found=f"{system.platform} on {system.machine}",
            means="the runtime waits on Linux futexes, on x86-64 or arm64",
            remedy="run the tier on such a host",
        )


def check_facilities(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """What starting a tier calls must work."""
    for name, error in machine.system.facilities.items():
        if error is not None:
            means, remedy = _FACILITIES[name]
            yield Finding(
                severity="error",
                name=name,
                found=f"{name.replace('_', ' ')}: {error}",
                means=means,
                remedy=remedy,
            )


def check_open_files(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """The process that starts a tier holds descriptors for every worker."""
    limit = machine.system.open_files_limit
    needed = _FILES_PER_WORKER * tier.num_workers + _FILES_BESIDE
    if limit != UNLIMITED and limit < needed:
        yield Finding(
            severity="error",
            name="open_files",
            found=f"a process may open {limit} files",
            means=f"starting {tier.num_workers} workers takes about {needed}",
            remedy=f"ulimit -n {max(needed, 1024)}",
        )


def check_cores(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Scheduler and workers poll, so each wants a core."""
    cores, needed = machine.system.effective_cores, tier.num_workers + 1
    if cores < needed:
        quota = machine.system.cpu_quota
        by = f" (quota {quota:g})" if quota is not None else ""
        yield Finding(
            severity="warning",
            name="cores",
            found=f"{cores} usable cores{by}",
            means=f"{tier.num_workers} workers and the scheduler share them, so plans come late",
            remedy="give it more cores, or start fewer workers",
        )


def check_memory_limit(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """A control group kills the tier before the host runs out of memory."""
    limit = machine.system.memory_limit_bytes
    if limit is not None:
        yield Finding(
            severity="note",
            name="memory_limit",
            found=f"memory is limited to {limit / 2**30:.1f} GiB by a control group",
            means="the tier's segments, and the weights of CPU workers, count against it",
            remedy="raise it if the weights do not fit",
        )


def check_locked_memory(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """RDMA registers memory by locking it."""
    system = machine.system
    if system.rdma_devices and system.locked_memory_limit_bytes != UNLIMITED:
        yield Finding(
            severity="note",
            name="locked_memory",
            found=f"a process may lock {system.locked_memory_limit_bytes / 2**20:.0f} MiB",
            means=f"{', '.join(system.rdma_devices)} may fail to register buffers above that",
            remedy="ulimit -l unlimited",
        )


def check_installed(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Core dependencies must be there, and torch must load."""
    for name, library in machine.libraries.items():
        is_needed = name not in _NOT_NEEDED or (name == "triton" and tier.device_class == "cuda")
        if library.is_core and library.version is None:
            yield Finding(
                severity="error" if is_needed else "note",
                name="missing_library",
                found=f"{name} is not installed",
                means=f"it is for: {library.purpose}",
                remedy=f"pip install '{name}{library.requirement}'",
            )
    if machine.torch.error and machine.libraries["torch"].version is not None:
        yield Finding(
            severity="error",
            name="torch_import",
            found=f"torch is installed, but importing it fails: {machine.torch.error}",
            means="nothing of a tier runs",
            remedy="reinstall torch for this Python and this machine",
        )


def check_versions(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Versions should be in the ranges of the package's metadata."""
    for name, library in machine.libraries.items():
        if library.is_supported is False:
            yield Finding(
                severity="warning",
                name="library_version",
                found=f"{name} {library.version} is installed, supported is {library.requirement}",
                means="the package is not tested with it",
                remedy=f"pip install '{name}{library.requirement}'",
            )
    if machine.libraries["torch"].requirement is None:
        yield Finding(
            severity="note",
            name="metadata",
            found="the package's metadata is not installed",
            means="supported versions are unknown",
            remedy=f"{sys.executable} -m pip install afore-kernels, or of its source tree",
        )


def check_collectives(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Workers exchange rows and results through torch.distributed."""
    torch = machine.torch
    lacks_gloo = tier.collectives == "gloo" and not torch.has_gloo
    if not torch.error and (not torch.has_distributed or lacks_gloo):
        what = "gloo" if torch.has_distributed else "torch.distributed"
        yield Finding(
            severity="error",
            name="collectives",
            found=f"this build of torch lacks {what}",
            means="the workers cannot exchange rows and results",
            remedy="install a build of torch that has it",
        )


def check_numba_cache(machine: Machine, tier: TierUse) -> Iterator[Finding]:
    """Numba refuses to load a cached function when it finds no directory for it."""
    if machine.compilers.numba_error and machine.libraries["numba"].version is not None:
        yield Finding(
            severity="error",
            name="numba_cache",
            found=f"numba: {machine.compilers.numba_error}",
            means="the compiled scheduler does not load",
            remedy="set NUMBA_CACHE_DIR to a directory that can be written",
        )


HOST_CHECKS: tuple[Check, ...] = (
    check_platform,
    check_facilities,
    check_open_files,
    check_cores,
    check_memory_limit,
    check_locked_memory,
    check_installed,
    check_versions,
    check_collectives,
    check_numba_cache,
)
