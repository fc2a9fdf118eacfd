"""The host: cores, memory, limits, and what the runtime asks of the Linux kernel."""

from __future__ import annotations

import math
import mmap
import os
import platform
import re
import resource
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from afore_kernels import __version__
from afore_kernels.doctor.probe import attempt, failure_of

UNLIMITED = -1
"""A resource limit that is not one, as `resource.RLIM_INFINITY`."""

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The host, as far as a tier depends on it; None is unknown.

    Attributes:
        platform: as `sys.platform`.
        kernel: release of the Linux kernel.
        machine: instruction set.
        cpu: model.
        usable_cores: cores this process may run on.
        cpu_quota: cores' worth of time its control group grants, None for no quota.
        numa_nodes: memory nodes of the host.
        memory_bytes: memory of the host.
        available_bytes: memory that can be had without swapping.
        memory_limit_bytes: limit of the control group below the host's memory, None for no limit.
        dev_shm_bytes: size of /dev/shm, which NCCL uses; the tier's own memory is not there.
        open_files_limit: descriptors a process may hold, `UNLIMITED` for no limit.
        locked_memory_limit_bytes: memory a process may lock, `UNLIMITED` for no limit.
        rdma_devices: names of InfiniBand and RoCE devices.
        facilities: what the runtime asks of the kernel, and why it fails or None where it works.
        python: version.
        afore_kernels: version.
    """

    platform: str
    kernel: str
    machine: str
    cpu: str | None
    usable_cores: int
    cpu_quota: float | None
    numa_nodes: int | None
    memory_bytes: int | None
    available_bytes: int | None
    memory_limit_bytes: int | None
    dev_shm_bytes: int | None
    open_files_limit: int
    locked_memory_limit_bytes: int
    rdma_devices: list[str]
    facilities: dict[str, str | None]
    python: str
    afore_kernels: str

    @property
    def effective_cores(self) -> int:
        """Cores that can be busy at once: those usable, or the quota where that is less."""
        if self.cpu_quota is None:
            return self.usable_cores
        return max(1, min(self.usable_cores, math.floor(self.cpu_quota)))


def read_system(root: Path = Path("/")) -> System:
    """Read the host's description below `root`, and try each facility once."""
    memory_bytes = attempt(_memory_bytes, root, "MemTotal")
    return System(
        platform=sys.platform,
        kernel=platform.release(),
        machine=platform.machine(),
        cpu=attempt(_cpu_model, root),
        usable_cores=len(attempt(os.sched_getaffinity, 0) or ()) or os.cpu_count() or 1,
        cpu_quota=min(_cpu_quotas(root), default=None),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        memory_bytes=memory_bytes,
        available_bytes=attempt(_memory_bytes, root, "MemAvailable"),
        memory_limit_bytes=min(_memory_limits(root, memory_bytes), default=None),
        dev_shm_bytes=attempt(_file_system_bytes, root / "dev/shm"),
        open_files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory_limit_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma_devices=sorted(path.name for path in (root / "sys/class/infiniband").glob("*")),
        facilities={name: failure_of(use) for name, use in FACILITIES.items()},
        python=platform.python_version(),
        afore_kernels=__version__,
    )


def _cpu_model(root: Path) -> str | None:
    found = re.search(r"^model name\s*:\s*(.+)", (root / "proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else None


def _memory_bytes(root: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    assert found, field
    return int(found[1]) * 1024


def _file_system_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The groups this process is in, from its own to the top: of version 2, and of `controller`.

    Inside a container only the top may be visible, so a directory need not exist.
    """
    for line in (attempt((root / "proc/self/cgroup").read_text) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            top /= controller
        parts = [part for part in path.split("/") if part]
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _memory_limits(root: Path, memory_bytes: int | None) -> Iterator[int]:
    """Limits of the control groups that are below the host's memory, in bytes."""
    for group in _control_groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # ValueError: version 2 says "max" for no limit
                limit = int((group / name).read_text())
                if memory_bytes is None or limit < memory_bytes:
                    yield limit


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Quotas of the control groups, in cores."""
    for group in _control_groups(root, "cpu"):
        with suppress(OSError, ValueError):  # ValueError: "max 100000" for no quota
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota / period
        with suppress(OSError):
            quota = int((group / "cpu.cfs_quota_us").read_text())
            if quota > 0:
                yield quota / int((group / "cpu.cfs_period_us").read_text())


def _use_memory_file() -> None:
    fd = os.memfd_create("afore-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _PAGE)
        mmap.mmap(fd, _PAGE).close()
    finally:
        os.close(fd)


def _use_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0afore-doctor-{secrets.token_hex(8)}")
        listener.listen()


def _use_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def _use_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


FACILITIES = {
    "memory_files": _use_memory_file,
    "abstract_sockets": _use_abstract_socket,
    "loopback": _use_loopback,
    "process_descriptors": _use_pidfd,
}
"""What starting a tier calls, by name; each is tried and left as it was."""
