"""GPUs and the paths between them, as NVML describes them.

NVML counts every GPU of the machine, whatever `CUDA_VISIBLE_DEVICES` hides from torch. Matrices are
[GPU, GPU] in NVML's order; a row's GPU reads what a column's GPU holds, as a worker pulls its
copies. The diagonal, and whatever NVML cannot tell, is None.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from afore_kernels.doctor.probe import attempt, describe

T = TypeVar("T")
Matrix = list[list[T | None]]

_GPU = "GPU "
_SWITCH = "switch"
_P2P_READ = 0  # pynvml's own constant is a tuple, by a stray comma
_LEVELS = ("internal", "single", "multiple", "hostbridge", "node", "system")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """An active NVLink of a GPU.

    Attributes:
        link: its number on the GPU.
        peer: the other end: "GPU 3", "switch", another device's PCI bus id, or None.
    """

    link: int
    peer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of the machine; None is unknown, or not there.

    Attributes:
        name: model.
        uuid: its identity across restarts.
        pci_bus_id: where it sits.
        memory_bytes: size of its memory.
        free_bytes: memory that nobody uses.
        compute_capability: as "9.0".
        power_limit_w: power it may draw.
        mig_enabled: whether it is partitioned into instances.
        pcie_generation: highest that GPU and host can do; an idle link is slower.
        pcie_width: lanes in use.
        pcie_max_width: lanes that GPU and host can use.
        nvlink_link_gb_s: bandwidth of one NVLink and direction, in 10^9 bytes/s.
        nvlinks: its active NVLinks.
    """

    name: str | None
    uuid: str | None
    pci_bus_id: str | None
    memory_bytes: int | None
    free_bytes: int | None
    compute_capability: str | None
    power_limit_w: float | None
    mig_enabled: bool | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_width: int | None
    nvlink_link_gb_s: float | None
    nvlinks: list[NvLink]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All GPUs of the machine.

    Attributes:
        error: why NVML does not answer, None if it does.
        has_driver: whether there is an NVIDIA driver, None if nobody can tell.
        driver: version of the NVIDIA driver.
        driver_cuda: newest CUDA version that the driver supports, as "13.0".
        gpus: in NVML's order.
        peer_access: whether the row's GPU can read the column's memory.
        common_ancestor: how far apart in PCIe: "internal" (one board), "single" or "multiple" (PCIe
            switches), "hostbridge", "node" (of memory) or "system".
        nvlinks: active NVLinks that lead from the row's GPU to the column's, directly or through a
            switch.
        nvlink_gb_s: their theoretical bandwidth in one direction, in 10^9 bytes/s.
    """

    error: str | None = None
    has_driver: bool | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    gpus: list[Gpu] = field(default_factory=list)
    peer_access: Matrix[bool] = field(default_factory=list)
    common_ancestor: Matrix[str] = field(default_factory=list)
    nvlinks: Matrix[int] = field(default_factory=list)
    nvlink_gb_s: Matrix[float] = field(default_factory=list)


def read_topology(nvml: Any = None) -> Topology:
    """Ask NVML for the GPUs and the paths between them.

    Args:
        nvml: a module with the functions of `pynvml`, which is imported if it is not given.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except Exception as error:
        return Topology(error=describe(error))
    try:
        nvml.nvmlInit()
    except Exception as error:
        absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        has_driver = getattr(error, "value", None) not in absent
        return Topology(error=describe(error), has_driver=has_driver)
    try:
        return _Reader(nvml).topology()
    except Exception as error:
        return Topology(error=describe(error), has_driver=True)
    finally:
        attempt(nvml.nvmlShutdown)


class _Reader:
    """Questions to an initialised NVML; each answer is None where NVML has none."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            self._ask("nvmlDeviceGetHandleByIndex", index)
            for index in range(nvml.nvmlDeviceGetCount())
        ]
        bus_ids = [self._bus_id("nvmlDeviceGetPciInfo", handle) for handle in self._handles]
        self._index_of = {bus_id: i for i, bus_id in enumerate(bus_ids) if bus_id}

    def topology(self) -> Topology:
        """Read everything."""
        gpus = [self._gpu(handle) for handle in self._handles]
        count = self._matrix(lambda i, j: _count_nvlinks(gpus[i], gpus[j], j))
        cuda = self._ask("nvmlSystemGetCudaDriverVersion")
        return Topology(
            has_driver=True,
            driver=self._ask("nvmlSystemGetDriverVersion"),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            gpus=gpus,
            peer_access=self._matrix(self._has_peer_access),
            common_ancestor=self._matrix(self._common_ancestor),
            nvlinks=count,
            nvlink_gb_s=self._matrix(lambda i, j: _total_gb_s(count[i][j], gpus[i])),
        )

    def _ask(self, function: str, *args: Any) -> Any:
        """Call a function that this NVML, this driver or this GPU may not have."""
        return attempt(lambda: getattr(self._nvml, function)(*args))

    def _bus_id(self, function: str, *args: Any) -> str | None:
        return getattr(self._ask(function, *args), "busId", None)

    def _matrix(self, cell: Callable[[int, int], T | None]) -> Matrix[T]:
        num_gpus = len(self._handles)
        return [[None if i == j else cell(i, j) for j in range(num_gpus)] for i in range(num_gpus)]

    def _gpu(self, handle: Any) -> Gpu:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        power_mw = self._ask("nvmlDeviceGetPowerManagementLimit", handle)
        mig = self._ask("nvmlDeviceGetMigMode", handle)
        return Gpu(
            name=self._ask("nvmlDeviceGetName", handle),
            uuid=self._ask("nvmlDeviceGetUUID", handle),
            pci_bus_id=self._bus_id("nvmlDeviceGetPciInfo", handle),
            memory_bytes=getattr(memory, "total", None),
            free_bytes=getattr(memory, "free", None),
            compute_capability=".".join(map(str, capability)) if capability else None,
            power_limit_w=power_mw / 1000 if power_mw else None,
            mig_enabled=bool(mig[0]) if mig else None,
            pcie_generation=self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            pcie_max_width=self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            nvlink_link_gb_s=attempt(self._nvlink_gb_s, handle),
            nvlinks=[
                NvLink(link=link, peer=self._nvlink_peer(handle, link))
                for link in range(self._nvml.NVML_NVLINK_MAX_LINKS)
                if self._ask("nvmlDeviceGetNvLinkState", handle, link)
            ],
        )

    def _nvlink_gb_s(self, handle: Any) -> float | None:
        speed = self._nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
        (answer,) = self._nvml.nvmlDeviceGetFieldValues(handle, [speed])
        mb_per_s: int = answer.value.uiVal
        return mb_per_s / 1000 if answer.nvmlReturn == 0 and mb_per_s else None

    def _nvlink_peer(self, handle: Any, link: int) -> str | None:
        bus_id = self._bus_id("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        if bus_id in self._index_of:
            return f"{_GPU}{self._index_of[bus_id]}"
        kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        is_switch = kind is not None and kind == self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        return _SWITCH if is_switch else bus_id

    def _has_peer_access(self, reader: int, owner: int) -> bool | None:
        handles = self._handles[reader], self._handles[owner]
        status = self._ask("nvmlDeviceGetP2PStatus", *handles, _P2P_READ)
        return None if status is None else status == self._nvml.NVML_P2P_STATUS_OK

    def _common_ancestor(self, reader: int, owner: int) -> str | None:
        handles = self._handles[reader], self._handles[owner]
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", *handles)
        return None if level is None else attempt(lambda: _LEVELS[level // 10])


def _count_nvlinks(reader: Gpu, owner: Gpu, owner_index: int) -> int:
    """Direct links, and what the switches that both are connected to can carry."""
    peers, owner_peers = (
        Counter(link.peer for link in gpu.nvlinks if link.peer) for gpu in (reader, owner)
    )
    shared = peers & owner_peers
    through_switch = sum(n for peer, n in shared.items() if not peer.startswith(_GPU))
    return peers[f"{_GPU}{owner_index}"] + through_switch


def _total_gb_s(num_links: int | None, gpu: Gpu) -> float | None:
    if not num_links:
        return 0.0
    return None if gpu.nvlink_link_gb_s is None else round(num_links * gpu.nvlink_link_gb_s, 1)
