"""`afore doctor` on this machine, and on machines that a fake NVML and a fake torch describe."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from afore_kernels import cli, doctor
from afore_kernels.doctor import bandwidth, diagnosis, findings, gpu_findings
from afore_kernels.doctor.bandwidth import COPY_BYTES, measure_bandwidth
from afore_kernels.doctor.checks import TierUse, choose_device, describe_tier
from afore_kernels.doctor.diagnosis import Diagnosis, diagnose
from afore_kernels.doctor.findings import Finding
from afore_kernels.doctor.libraries import (
    Compilers,
    Library,
    TorchBuild,
    TorchDevice,
    read_compilers,
    read_libraries,
    read_torch,
    satisfies,
)
from afore_kernels.doctor.machine import Machine, read_machine
from afore_kernels.doctor.system import FACILITIES, System, read_system
from afore_kernels.doctor.table import WIDTH, render
from afore_kernels.doctor.topology import Gpu, NvLink, Topology, read_topology

LINK_MB_PER_S = 26562


def square(num_gpus: int, value: Any) -> list[list[Any]]:
    """The same value for every two of them."""
    return [[value] * num_gpus for _ in range(num_gpus)]


class FakeNvml:
    """The functions of `pynvml` for GPUs whose paths are given, [GPU, GPU].

    Args:
        num_gpus: GPUs; the handle of GPU i is 100 + i.
        direct: active NVLinks from one to the other.
        switched: active NVLinks of each GPU to four switches.
        peers: whether one may read the other.
        levels: common ancestors.
        mig: GPUs that are partitioned.
        unsupported: functions that raise NotSupported.
    """

    def __init__(
        self,
        num_gpus: int,
        *,
        direct: list[list[int]] | None = None,
        switched: list[int] | None = None,
        peers: list[list[bool]] | None = None,
        levels: list[list[int]] | None = None,
        mig: tuple[int, ...] = (),
        unsupported: tuple[str, ...] = (),
    ) -> None:
        self.num_gpus = num_gpus
        self.peers = peers or square(num_gpus, True)
        self.levels = levels or square(num_gpus, pynvml.NVML_TOPOLOGY_NODE)
        self.mig = mig
        self.num_open = 0
        direct, switched = direct or square(num_gpus, 0), switched or [0] * num_gpus
        self.remotes = [
            [self.bus_id(j) for j in range(num_gpus) for _ in range(direct[i][j])]
            + [f"00000000:F{link % 4}:00.0" for link in range(switched[i])]
            for i in range(num_gpus)
        ]
        for name in unsupported:
            assert hasattr(self, name)
            setattr(self, name, self.not_supported)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    @staticmethod
    def not_supported(*args: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    @staticmethod
    def bus_id(index: int) -> str:
        return f"00000000:{index:02X}:00.0"

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.num_open == 1
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return 100 + index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle - 100}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=self.bus_id(handle - 100))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=141 << 30, free=140 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return [9, 0]

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(handle - 100 in self.mig), 0]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetFieldValues(self, handle: int, fieldIds: list[int]) -> list[Any]:
        assert fieldIds == [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        speed = LINK_MB_PER_S + (handle - 100) * 1000  # every GPU's own, to see whose is used
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=speed))]

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        return int(link < len(self.remotes[device - 100]))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> Any:
        return SimpleNamespace(busId=self.remotes[device - 100][link])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        is_switch = ":F" in self.remotes[handle - 100][link]
        return getattr(pynvml, f"NVML_NVLINK_DEVICE_TYPE_{'SWITCH' if is_switch else 'GPU'}")

    def nvmlDeviceGetP2PStatus(self, device1: int, device2: int, p2pIndex: int) -> int:
        assert type(p2pIndex) is int, "ctypes takes no tuple"
        assert p2pIndex == 0
        has_access = self.peers[device1 - 100][device2 - 100]
        return pynvml.NVML_P2P_STATUS_OK if has_access else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: int, device2: int) -> int:
        return self.levels[device1 - 100][device2 - 100]


NVML_FUNCTIONS = [name for name in vars(FakeNvml) if name.startswith("nvml")]


def mesh(num_gpus: int, **changes: Any) -> FakeNvml:
    """GPUs that are all connected through switches, by 18 links each."""
    return FakeNvml(num_gpus, switched=[18] * num_gpus, **changes)


SYSTEM = System(
    platform="linux",
    kernel="6.8.0",
    machine="x86_64",
    cpu="INTEL(R) XEON(R) PLATINUM 8570, in a chassis whose vendor has a very long name " * 2,
    usable_cores=112,
    cpu_quota=None,
    numa_nodes=2,
    memory_bytes=2 << 40,
    available_bytes=1 << 40,
    memory_limit_bytes=None,
    dev_shm_bytes=1 << 40,
    open_files_limit=1024,
    locked_memory_limit_bytes=8 << 20,
    rdma_devices=[],
    facilities=dict.fromkeys(FACILITIES),
    python="3.12.0",
    afore_kernels="0.1.0",
)
LIBRARY = Library(
    version="3.0", requirement=">=2.0", is_supported=True, is_core=True, purpose="tests"
)
ABSENT = replace(LIBRARY, version=None, is_supported=None)
LIBRARIES = {
    **dict.fromkeys(("torch", "triton", "numba", "numpy", "nvidia-ml-py"), LIBRARY),
    "nixl": replace(ABSENT, is_core=False, requirement=None),
}
CPU_TORCH = TorchBuild(has_distributed=True, has_gloo=True)
COMPILERS = Compilers(
    numba_cache="/cache", numba_error=None, c_compiler="/usr/bin/gcc", python_headers=True
)
NO_DRIVER = SimpleNamespace(
    nvmlInit=lambda: (_ for _ in ()).throw(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)),
    NVML_ERROR_LIBRARY_NOT_FOUND=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    NVML_ERROR_DRIVER_NOT_LOADED=pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
)


def cuda_torch(num_gpus: int, **changes: Any) -> TorchBuild:
    """A CUDA build of torch that sees the first GPUs."""
    build = TorchBuild(
        cuda_build="13.0",
        cuda_available=True,
        devices=[TorchDevice(index=i, uuid=f"GPU-{i}", copy_engines=3) for i in range(num_gpus)],
        architectures=["sm_80", "sm_90", "compute_90"],
        has_distributed=True,
        has_gloo=True,
        has_nccl=True,
    )
    return replace(build, **changes)


def make_machine(nvml: Any, torch_build: TorchBuild, **changes: Any) -> Machine:
    """A machine on which nothing is wrong, but for what is given or changed.

    Args:
        nvml: as `pynvml`.
        torch_build: as read from torch.
        changes: fields of `Machine`, `System` or `Compilers`; a dict of libraries is merged.
    """
    own = {name: value for name, value in changes.items() if name in System.__slots__}
    compilers = {name: value for name, value in changes.items() if name in Compilers.__slots__}
    return Machine(
        system=replace(SYSTEM, **own),
        libraries=LIBRARIES | changes.get("libraries", {}),
        torch=torch_build,
        compilers=replace(COMPILERS, **compilers),
        topology=read_topology(nvml),
    )


def on_cpu(**changes: Any) -> Machine:
    return make_machine(NO_DRIVER, CPU_TORCH, **changes)


def on_gpu(nvml: FakeNvml, torch_changes: dict[str, Any] | None = None, **changes: Any):
    return make_machine(nvml, cuda_torch(nvml.num_gpus, **(torch_changes or {})), **changes)


# NVML


def test_fake_has_pynvmls_functions() -> None:
    for name in NVML_FUNCTIONS:
        real = inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters.values()
        required = [parameter for parameter in real if parameter.default is parameter.empty]
        assert len(inspect.signature(getattr(FakeNvml, name)).parameters) == len(required) + 1, name


def test_a_gpus_fields() -> None:
    topology = read_topology(FakeNvml(2, direct=[[0, 1], [1, 0]]))
    assert topology.gpus[1] == Gpu(
        name="NVIDIA H200",
        uuid="GPU-1",
        pci_bus_id="00000000:01:00.0",
        memory_bytes=141 << 30,
        free_bytes=140 << 30,
        compute_capability="9.0",
        power_limit_w=700.0,
        mig_enabled=False,
        pcie_generation=5,
        pcie_width=16,
        pcie_max_width=16,
        nvlink_link_gb_s=27.562,
        nvlinks=[NvLink(link=0, peer="GPU 0")],
    )
    assert (topology.driver, topology.driver_cuda) == ("580.95.05", "13.1")


def test_matrices_of_an_asymmetric_topology() -> None:
    """No two directions are alike, so a swapped index is seen in each of them."""
    topology = read_topology(
        FakeNvml(
            3,
            direct=[[0, 1, 2], [3, 0, 0], [4, 0, 0]],
            peers=[[True, True, False], [False, True, True], [True, False, True]],
            levels=[[0, 10, 20], [30, 0, 40], [50, 0, 0]],
        )
    )
    assert topology.peer_access == [[None, True, False], [False, None, True], [True, False, None]]
    assert topology.nvlinks == [[None, 1, 2], [3, None, 0], [4, 0, None]]
    assert topology.nvlink_gb_s == [[None, 26.6, 53.1], [82.7, None, 0.0], [114.2, 0.0, None]]
    assert topology.common_ancestor == [
        [None, "single", "multiple"],
        ["hostbridge", None, "node"],
        ["system", "internal", None],
    ]


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("unsupported", [(), ("nvmlDeviceGetNvLinkRemoteDeviceType",)])
def test_switches_connect_all_by_the_fewer_links(num_gpus: int, unsupported) -> None:
    """With the kind of the other end, and by the switches' bus ids without it."""
    links = [18] * num_gpus
    links[1] = 16
    topology = read_topology(FakeNvml(num_gpus, switched=links, unsupported=unsupported))
    peers = {link.peer for link in topology.gpus[0].nvlinks}
    assert peers == ({f"00000000:F{i}:00.0" for i in range(4)} if unsupported else {"switch"})
    assert topology.nvlinks == [
        [None if i == j else 16 if 1 in (i, j) else 18 for j in range(num_gpus)]
        for i in range(num_gpus)
    ]


def test_two_gpus_with_links_to_a_third_are_not_connected() -> None:
    topology = read_topology(FakeNvml(3, direct=[[0, 0, 2], [0, 0, 2], [2, 2, 0]]))
    assert topology.nvlinks == [[None, 0, 2], [0, None, 2], [2, 2, None]]


def differing(one: Any, other: Any) -> set[str]:
    """Names of the fields in which two records of the same class differ."""
    return {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}


UNKNOWN_GPU_FIELDS = {
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetUUID": {"uuid"},
    "nvmlDeviceGetPciInfo": {"pci_bus_id", "nvlinks"},
    "nvmlDeviceGetMemoryInfo": {"memory_bytes", "free_bytes"},
    "nvmlDeviceGetCudaComputeCapability": {"compute_capability"},
    "nvmlDeviceGetPowerManagementLimit": {"power_limit_w"},
    "nvmlDeviceGetMigMode": {"mig_enabled"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_max_width"},
    "nvmlDeviceGetFieldValues": {"nvlink_link_gb_s"},
    "nvmlDeviceGetNvLinkState": {"nvlinks"},
    "nvmlDeviceGetNvLinkRemotePciInfo": {"nvlinks"},
    "nvmlDeviceGetNvLinkRemoteDeviceType": set(),
    "nvmlDeviceGetP2PStatus": set(),
    "nvmlDeviceGetTopologyCommonAncestor": set(),
    "nvmlSystemGetDriverVersion": set(),
    "nvmlSystemGetCudaDriverVersion": set(),
}
UNKNOWN_TOPOLOGY_FIELDS = {
    "nvmlDeviceGetFieldValues": {"nvlink_gb_s"},
    "nvmlDeviceGetPciInfo": {"nvlinks", "nvlink_gb_s"},
    "nvmlDeviceGetNvLinkState": {"nvlinks", "nvlink_gb_s"},
    "nvmlDeviceGetNvLinkRemotePciInfo": {"nvlinks", "nvlink_gb_s"},
    "nvmlDeviceGetP2PStatus": {"peer_access"},
    "nvmlDeviceGetTopologyCommonAncestor": {"common_ancestor"},
    "nvmlSystemGetDriverVersion": {"driver"},
    "nvmlSystemGetCudaDriverVersion": {"driver_cuda"},
}


@pytest.mark.parametrize("function", UNKNOWN_GPU_FIELDS)
def test_what_nvml_does_not_support_is_unknown_alone(function: str) -> None:
    direct = [[0, 2], [2, 0]]
    healthy = read_topology(FakeNvml(2, direct=direct))
    machine = on_gpu(FakeNvml(2, direct=direct, unsupported=(function,)))
    found = machine.topology
    assert differing(found.gpus[0], healthy.gpus[0]) == UNKNOWN_GPU_FIELDS[function]
    others = {"gpus"} if UNKNOWN_GPU_FIELDS[function] else set()
    assert differing(found, healthy) == UNKNOWN_TOPOLOGY_FIELDS.get(function, set()) | others
    diagnosed = diagnose(machine)
    json.dumps(diagnosed.to_json())
    render(diagnosed)


def test_every_function_is_probed_for_being_unsupported() -> None:
    always = {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    assert set(UNKNOWN_GPU_FIELDS) == set(NVML_FUNCTIONS) - always


def test_a_speed_that_nvml_reports_as_failed_is_unknown() -> None:
    nvml = mesh(2)
    answer = SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=7))
    nvml.nvmlDeviceGetFieldValues = lambda handle, fields: [answer]
    assert read_topology(nvml).nvlink_gb_s == [[None, None], [None, None]]


@pytest.mark.parametrize("fails", ["nvmlDeviceGetCount", "nvmlSystemGetDriverVersion", "nothing"])
def test_init_is_paired_with_shutdown(fails: str) -> None:
    nvml = mesh(2, unsupported=(fails,) if fails != "nothing" else ())
    topology = read_topology(nvml)
    assert nvml.num_open == 0
    assert (topology.error is None) == (fails != "nvmlDeviceGetCount")


def test_without_a_driver_nothing_is_shut_down() -> None:
    nvml = mesh(2, unsupported=("nvmlInit",))
    topology = read_topology(nvml)
    assert nvml.num_open == 0
    assert topology == Topology(error="Not Supported", has_driver=True)


# what a tier uses


@pytest.mark.parametrize(
    ("build", "nvml", "device", "reason"),
    [
        (CPU_TORCH, NO_DRIVER, "cpu", "torch is a CPU build; no NVIDIA driver (NVML: NVML Shared"),
        (CPU_TORCH, mesh(2), "cpu", "torch is a CPU build"),
        (cuda_torch(0, cuda_available=False), NO_DRIVER, "cpu", "no NVIDIA driver (NVML: NVML"),
        (cuda_torch(0, cuda_available=False), FakeNvml(0), "cpu", "the NVIDIA driver sees no GPU"),
        (
            cuda_torch(0, cuda_available=False),
            mesh(2, unsupported=("nvmlInit",)),
            "cpu",
            "NVML does not answer (NVML: Not Supported)",
        ),
        (
            cuda_torch(0, cuda_available=False, cuda_error="Error 802: system not initialized"),
            mesh(2),
            "cpu",
            "torch cannot use the GPUs (Error 802: system not initialized)",
        ),
        (
            cuda_torch(0, cuda_available=False, visible_devices=""),
            mesh(2),
            "cpu",
            "torch cannot use the GPUs (CUDA_VISIBLE_DEVICES='')",
        ),
        (
            cuda_torch(0, cuda_available=False),
            mesh(2),
            "cpu",
            "torch cannot use the GPUs (torch does not say why)",
        ),
        (TorchBuild(error="no libc"), FakeNvml(0), "cpu", "torch cannot be imported (no libc); "),
        (cuda_torch(1), NO_DRIVER, "cuda", "torch for CUDA 13.0 can use 1 GPU"),
        (cuda_torch(8), mesh(8), "cuda", "torch for CUDA 13.0 can use 8 GPUs"),
        (cuda_torch(8, cuda_build=None), mesh(8), "cuda", "torch can use 8 GPUs"),
    ],
)
def test_device_and_its_reasons(build, nvml, device: str, reason: str) -> None:
    choice = choose_device(build, read_topology(nvml))
    assert choice.device_class == device
    assert "; ".join(choice.reasons).startswith(reason)


ONE_WAY = [[True, True], [False, True]]


@pytest.mark.parametrize(
    ("machine", "workers", "expected"),
    [
        (on_cpu(), None, (2, "cpu", "torch", "gloo", "shared memory", False)),
        (on_cpu(), 1, (1, "cpu", "torch", "none", "shared memory", False)),
        (on_gpu(mesh(1)), None, (1, "cuda", "triton", "none", "within the GPU", True)),
        (on_gpu(mesh(1)), 2, (2, "cuda", "triton", "gloo", "within the GPU", True)),
        (
            on_gpu(mesh(8)),
            None,
            (8, "cuda", "triton", "nccl", "peer copies over NVLink", True),
        ),
        (
            on_gpu(mesh(8), {"has_nccl": False}),
            None,
            (8, "cuda", "triton", "gloo", "peer copies over NVLink", True),
        ),
    ],
)
def test_what_a_tier_uses(machine: Machine, workers: int | None, expected) -> None:
    tier = asdict(describe_tier(machine, workers))
    del tier["reasons"]
    assert tuple(tier.values()) == expected


@pytest.mark.parametrize(
    ("nvml", "path"),
    [
        (FakeNvml(4), "peer copies over PCIe"),
        (
            FakeNvml(4, direct=[[0, 1, 0, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]),
            "peer copies over NVLink and PCIe",
        ),
        (FakeNvml(4, peers=square(4, False)), "staged by the host"),
        (FakeNvml(2, peers=ONE_WAY), "peer copies over PCIe, 1 of 2 directions staged by the host"),
        (FakeNvml(2, unsupported=("nvmlDeviceGetP2PStatus",)), "unknown: NVML does not tell"),
        (FakeNvml(2, unsupported=("nvmlDeviceGetUUID",)), "unknown: NVML does not tell"),
    ],
)
def test_copy_path(nvml: FakeNvml, path: str) -> None:
    assert describe_tier(on_gpu(nvml)).copy_path == path


def test_copy_path_is_that_of_the_gpus_torch_uses() -> None:
    """Torch has GPUs 3 and 1, as its cuda:0 and cuda:1; the others have no peer access."""
    peers = square(4, False)
    peers[1][3] = peers[3][1] = True
    devices = [TorchDevice(index=i, uuid=f"GPU-{n}", copy_engines=3) for i, n in enumerate((3, 1))]
    machine = on_gpu(FakeNvml(4, peers=peers), {"devices": devices})
    assert machine.used_gpus() == [3, 1]
    assert describe_tier(machine).copy_path == "peer copies over PCIe"


# findings

TWO_MODELS = FakeNvml(2, switched=[18, 0])
TWO_MODELS.nvmlDeviceGetName = lambda handle: f"model {handle}"


@pytest.mark.parametrize(
    "machine",
    [
        on_cpu(),
        *(on_gpu(mesh(num_gpus)) for num_gpus in (1, 2, 8)),
        on_gpu(FakeNvml(4)),
        on_gpu(TWO_MODELS),
        on_cpu(usable_cores=3, cpu_quota=3.5, open_files_limit=4 * 2 + 64),
        on_gpu(mesh(2), dev_shm_bytes=1 << 30),
        on_cpu(dev_shm_bytes=0, c_compiler=None, python_headers=False),
        on_cpu(rdma_devices=["mlx5_0"], locked_memory_limit_bytes=-1, open_files_limit=-1),
        on_gpu(mesh(2), {"architectures": ["sm_90"]}),
        on_gpu(mesh(2), {"architectures": ["compute_80"]}),
        on_gpu(mesh(2), {"architectures": []}),
    ],
)
def test_nothing_is_wrong(machine: Machine) -> None:
    diagnosed = diagnose(machine)
    assert diagnosed.findings == []
    assert diagnosed.can_run


def without_gpu(nvml: FakeNvml, **torch_changes: Any) -> Machine:
    """A machine on which torch uses no GPU."""
    return make_machine(nvml, cuda_torch(0, cuda_available=False, **torch_changes))


def with_answer(function: str, answer: Any) -> FakeNvml:
    """Two connected GPUs, the second of which answers one question differently."""
    nvml = mesh(2)
    usual = getattr(nvml, function)
    setattr(nvml, function, lambda handle: answer if handle == 101 else usual(handle))
    return nvml


OLD = replace(LIBRARY, version="1.0", is_supported=False)
FACILITY = {name: dict.fromkeys(FACILITIES) | {name: "blocked"} for name in FACILITIES}


def trip(kind: str, found: str, machine: Machine, workers: int | None = None) -> Any:
    """A case: severity and name, part of what was found, where, in a tier of that size."""
    return pytest.param(*kind.split(), found, machine, workers, id=f"{kind}-{found}")


CAPABILITY = "nvmlDeviceGetCudaComputeCapability"
SM120 = with_answer(CAPABILITY, [12, 0])
SM89, NEWER = with_answer(CAPABILITY, [8, 9]), ["sm_90", "compute_100"]
SM75 = with_answer(CAPABILITY, [7, 5])
LOST = mesh(2)
LOST.nvmlDeviceGetHandleByIndex = lambda index: 100 if index == 0 else LOST.not_supported()
NO_METADATA = replace(LIBRARY, requirement=None, is_supported=None)
TRIPPED = [
    trip("error platform", "darwin on x86_64", on_cpu(platform="darwin")),
    trip("error platform", "linux on riscv64", on_cpu(machine="riscv64")),
    *(trip(f"error {name}", "blocked", on_cpu(facilities=FACILITY[name])) for name in FACILITIES),
    trip("error open_files", "72 files", on_cpu(open_files_limit=72), 3),
    trip("warning cores", "2 usable cores", on_cpu(usable_cores=2)),
    trip("warning cores", "2 usable cores (quota 2.5)", on_cpu(cpu_quota=2.5)),
    trip("warning cores", "112 usable cores", on_cpu(), 112),
    trip("note memory_limit", "4.0 GiB", on_cpu(memory_limit_bytes=4 << 30)),
    trip("note locked_memory", "8 MiB", on_cpu(rdma_devices=["mlx5_0"])),
    trip("error missing_library", "numba is", on_cpu(libraries={"numba": ABSENT})),
    trip("note missing_library", "triton is", on_cpu(libraries={"triton": ABSENT})),
    trip("error missing_library", "triton is", on_gpu(mesh(2), libraries={"triton": ABSENT})),
    trip("error torch_import", "libc", make_machine(NO_DRIVER, TorchBuild(error="no libc"))),
    trip("warning library_version", "torch 1.0 is ins", on_cpu(libraries={"torch": OLD})),
    trip("note metadata", "metadata is not", on_cpu(libraries={"torch": NO_METADATA})),
    trip("error collectives", "lacks torch.distr", make_machine(NO_DRIVER, TorchBuild()), 1),
    trip("error collectives", "gloo", make_machine(NO_DRIVER, TorchBuild(has_distributed=True))),
    trip("error numba_cache", "no locator", on_cpu(numba_error="no locator")),
    trip("warning nvml", "Not Supported", without_gpu(mesh(2, unsupported=("nvmlInit",)))),
    trip("warning cpu_build", "driver sees 2 GPUs", without_gpu(mesh(2), cuda_build=None)),
    trip("warning driver_too_old", "built for 14.0", without_gpu(mesh(2), cuda_build="14.0")),
    trip("warning cuda_unavailable", "802", without_gpu(mesh(2), cuda_error="code 802")),
    trip("warning gpu_lost", "GPU 1", on_gpu(with_answer("nvmlDeviceGetUUID", None))),
    trip("warning gpu_lost", "GPU 1", on_gpu(LOST)),
    trip("note hidden_gpus", "2 of 4", make_machine(mesh(4), cuda_torch(2))),
    trip("error architecture", "1 is sm_120", on_gpu(SM120, {"architectures": ["sm_90"]})),
    trip("error architecture", "1 is sm_89", on_gpu(SM89, {"architectures": NEWER})),
    trip("warning old_gpu", "GPU 1 has", on_gpu(SM75, {"architectures": ["sm_75", "sm_90"]})),
    trip("warning no_peer_access", "1 directions (r", on_gpu(FakeNvml(2, peers=ONE_WAY))),
    trip("warning no_peer_access", "<-owner): 1<-0", on_gpu(FakeNvml(2, peers=ONE_WAY))),
    trip("warning no_peer_access", "...", on_gpu(FakeNvml(4, peers=square(4, False)))),
    trip("warning mig", "on for GPU 1", on_gpu(mesh(2, mig=(1,)))),
    trip("warning mig", "on for GPUs 0, 1", on_gpu(mesh(2, mig=(0, 1)))),
    trip("warning nvlinks_down", "1 has 17 active", on_gpu(FakeNvml(2, switched=[18, 17]))),
    trip("warning pcie_width", "8 of 16", on_gpu(with_answer("nvmlDeviceGetCurrPcieLinkWidth", 8))),
    trip("note shared_gpus", "3 workers share 2 GPUs", on_gpu(mesh(2)), 3),
    trip("warning no_nccl", "lacks NCCL", on_gpu(mesh(2), {"has_nccl": False})),
    trip("warning dev_shm", "64 MiB", on_gpu(mesh(2), dev_shm_bytes=64 << 20)),
    trip("warning triton_build", "no C compiler", on_gpu(mesh(1), c_compiler=None)),
    trip("warning triton_build", "no Python.h", on_gpu(mesh(1), python_headers=False)),
]


@pytest.mark.parametrize(("severity", "name", "found", "machine", "workers"), TRIPPED)
def test_finding(severity, name, found, machine: Machine, workers: int | None) -> None:
    diagnosed = diagnose(machine, workers)
    assert [finding.name for finding in diagnosed.findings] == [name]
    (finding,) = diagnosed.findings
    assert finding.severity == severity
    assert found in finding.found
    assert diagnosed.can_run == (severity != "error")
    assert finding.found in re.sub(r"\s+", " ", render(diagnosed))


def test_every_finding_is_tripped() -> None:
    source = inspect.getsource(findings) + inspect.getsource(gpu_findings)
    named = set(re.findall(r'_unused\(\s+"(\w+)"|name="(\w+)"', source))
    names = {name for pair in named for name in pair if name} | set(FACILITIES)
    assert names == {case.values[1] for case in TRIPPED}


def test_errors_come_first() -> None:
    machine = on_cpu(memory_limit_bytes=1, usable_cores=1, open_files_limit=1)
    severities = [finding.severity for finding in diagnose(machine).findings]
    assert severities == ["error", "warning", "note"]


# system and libraries


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_system_is_read_from_its_files(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/cpuinfo": "processor : 0\nmodel name\t: AMD EPYC 9654\n",
            "proc/meminfo": "MemTotal:       2048 kB\nMemAvailable:   1024 kB\n",
            "sys/devices/system/node/node0/cpulist": "0-1",
            "sys/devices/system/node/node1/cpulist": "2-3",
            "sys/class/infiniband/mlx5_1/node_type": "",
            "sys/class/infiniband/mlx5_0/node_type": "",
        },
    )
    system = read_system(root)
    assert (system.cpu, system.numa_nodes) == ("AMD EPYC 9654", 2)
    assert (system.memory_bytes, system.available_bytes) == (2 << 20, 1 << 20)
    assert system.rdma_devices == ["mlx5_0", "mlx5_1"]
    assert (system.memory_limit_bytes, system.cpu_quota, system.dev_shm_bytes) == (None,) * 3


@pytest.mark.parametrize(
    ("files", "memory", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "4096"}, 4096, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/memory.max": "4096"}, 4096, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max"}, None, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "9" * 18}, None, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, None, 2.5),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None, None),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
                "sys/fs/cgroup/cpu.max": "200000 100000",
            },
            None,
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n1:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            4096,
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
            None,
        ),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, files, memory, quota) -> None:
    meminfo = {"proc/meminfo": "MemTotal: 1048576 kB\n"}
    system = read_system(write_files(tmp_path, files | meminfo))
    assert (system.memory_limit_bytes, system.cpu_quota) == (memory, quota)


def test_a_machine_without_files_is_unknown(tmp_path: Path) -> None:
    system = read_system(tmp_path)
    unknown = ("cpu", "numa_nodes", "memory_bytes", "available_bytes", "dev_shm_bytes")
    assert [getattr(system, name) for name in unknown] == [None] * len(unknown)
    render(diagnose(replace(on_cpu(), system=system)))


@pytest.mark.parametrize(
    ("facility", "owner", "function"),
    [
        ("memory_files", os, "memfd_create"),
        ("memory_files", os, "ftruncate"),
        ("abstract_sockets", socket.socket, "bind"),
        ("loopback", socket, "create_connection"),
        ("process_descriptors", os, "pidfd_open"),
    ],
)
def test_a_blocked_facility_says_why(monkeypatch, facility: str, owner, function: str) -> None:
    def blocked(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(owner, function, blocked)
    assert read_system().facilities[facility] == "[Errno 1] Operation not permitted"


def test_requirements_come_from_the_metadata() -> None:
    libraries = read_libraries(
        [
            "numpy<1.0,>=0.5",
            "pytest>=1",
            "triton>=3.6; platform_system == 'Linux'",
            "no-such-library[extra]>=2; extra == 'bench'",
            "hypothesis>=6; extra == 'dev'",
        ]
    )
    assert libraries["numpy"].requirement == "<1.0,>=0.5"
    assert libraries["numpy"].is_supported is False
    assert (libraries["pytest"].is_supported, libraries["pytest"].is_core) == (True, True)
    assert (libraries["triton"].requirement, libraries["triton"].is_core) == (">=3.6", True)
    extra = libraries["no-such-library"]
    assert (extra.requirement, extra.is_core, extra.version) == (">=2", False, None)
    assert libraries["torch"].requirement is None
    assert "hypothesis" not in libraries


def test_every_library_of_the_package_has_a_purpose() -> None:
    libraries = read_libraries()
    assert [name for name, library in libraries.items() if not library.purpose] == []
    for name in ("torch", "numba", "numpy", "safetensors", "nvidia-ml-py"):
        assert libraries[name].is_core, name
        assert libraries[name].is_supported, name
    assert libraries["triton"].is_core


@pytest.mark.parametrize(
    ("version", "requirement", "expected"),
    [
        ("2.11.0+cpu", ">=2.11", True),
        ("2.11.0a0+git1", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.0", ">=2.11,<3", False),
        ("2.99", ">=2.11,<3", True),
        ("1.0.0", "==1", True),
        ("1.0.1", "==1", False),
        ("1.2", "!=1.2", False),
        ("1.2", "<=1.2", True),
        ("1.2", ">1.2", False),
        ("1.2", "", True),
    ],
)
def test_satisfies(version: str, requirement: str, expected: bool) -> None:
    assert satisfies(version, requirement) is expected


def fake_torch(**cuda: Any) -> Any:
    """A torch module that sees one GPU, unless told otherwise."""
    properties = SimpleNamespace(uuid="0", async_engine_count=4)
    usual = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_arch_list": lambda: ["sm_90"],
        "get_device_properties": lambda index: properties,
    }
    distributed = {"is_available": True, "is_gloo_available": True, "is_nccl_available": True}
    return SimpleNamespace(
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(**usual | cuda),
        distributed=SimpleNamespace(**{k: lambda v=v: v for k, v in distributed.items()}),
    )


def test_torch_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert read_torch(fake_torch()) == TorchBuild(
        cuda_build="13.0",
        cuda_available=True,
        visible_devices="0",
        devices=[TorchDevice(index=0, uuid="GPU-0", copy_engines=4)],
        architectures=["sm_90"],
        has_distributed=True,
        has_gloo=True,
        has_nccl=True,
    )


def test_torch_warns_why_it_has_no_gpu() -> None:
    def warn() -> bool:
        warnings.warn("CUDA initialization: Error 802\nmore", stacklevel=1)
        return False

    build = read_torch(fake_torch(is_available=warn))
    assert (build.cuda_available, build.devices) == (False, [])
    assert build.cuda_error == "CUDA initialization: Error 802"


def test_a_torch_device_that_fails_is_unknown() -> None:
    build = read_torch(fake_torch(get_device_properties=FakeNvml.not_supported))
    assert build.devices == [TorchDevice(index=0, uuid="GPU-", copy_engines=None)]


def test_remains_of_a_torch_are_an_error() -> None:
    assert "has no attribute 'cuda'" in str(read_torch(SimpleNamespace()).error)


def test_numba_says_why_it_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_compilers().numba_error is None

    def read_only(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)  # how numba tries a directory
    found = read_compilers()
    assert found.numba_cache is None
    assert "no locator available" in str(found.numba_error)


def test_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_compilers().c_compiler is None
    clang = write_files(tmp_path, {"clang": "#!/bin/sh\n"}) / "clang"
    clang.chmod(0o755)
    assert read_compilers().c_compiler == str(clang)
    monkeypatch.setenv("CC", "/opt/cc")
    assert read_compilers().c_compiler == "/opt/cc"


# bandwidth


def test_bandwidth_is_the_median_of_each_direction() -> None:
    """A copy to reader r from owner o takes 10 r + o ms, and ten times that the first four times.

    So the slow ones are most of the timed ones if the first is not left out, or the mean counts.
    """
    now = 0.0

    def make_copy(reader: int, owner: int) -> Any:
        slow = iter([10] * 4)

        def copy() -> None:
            nonlocal now
            now += (10 * reader + owner) * next(slow, 1) * 1e-3

        if (reader, owner) == (2, 1):
            raise RuntimeError("out of memory")
        return copy

    gb = COPY_BYTES / 1e9
    expected = [[None, gb / 1, gb / 2], [gb / 10, None, gb / 12], [gb / 20, None, None]]
    found = measure_bandwidth(3, make_copy, lambda: now)
    assert found == [[x and round(x * 1e3, 1) for x in row] for row in expected]


def test_bandwidth_is_measured_where_torch_has_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        diagnosis, "measure_bandwidth", lambda num_devices: square(num_devices, 400.4)
    )
    measured = diagnose(on_gpu(mesh(2)), measure=True)
    assert measured.to_json()["measured_gb_s"] == square(2, 400.4)
    assert "    cuda: 1       400     -" in render(measured).splitlines()
    for unmeasured in (diagnose(on_gpu(mesh(2))), diagnose(on_cpu(), measure=True)):
        assert unmeasured.to_json()["measured_gb_s"] is None
        assert "  bandwidth    not measured" in render(unmeasured).splitlines()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_gpus_are_nvmls_and_can_be_copied_between() -> None:
    machine = read_machine()
    assert len(machine.used_gpus()) == len(machine.torch.devices) > 0
    bandwidth._cuda_copy(0, 0)()


# output

CLASSES = (System, Library, TorchBuild, TorchDevice, Compilers, Topology, Gpu, NvLink, TierUse)
KEYS = {
    "system": "platform kernel machine cpu usable_cores cpu_quota numa_nodes memory_bytes "
    "available_bytes memory_limit_bytes dev_shm_bytes open_files_limit locked_memory_limit_bytes "
    "rdma_devices facilities python afore_kernels",
    "libraries": "version requirement is_supported is_core purpose",
    "torch": "error cuda_build cuda_available cuda_error visible_devices devices architectures "
    "has_distributed has_gloo has_nccl",
    "compilers": "numba_cache numba_error c_compiler python_headers",
    "topology": "error has_driver driver driver_cuda gpus peer_access common_ancestor nvlinks "
    "nvlink_gb_s",
    "measured_gb_s": "",
    "tier": "num_workers device_class reasons executor collectives copy_path cuda_graphs",
    "findings": "severity name found means remedy",
    "can_run": "",
}
DEVICE_KEYS = "index uuid copy_engines"
GPU_KEYS = (
    "name uuid pci_bus_id memory_bytes free_bytes compute_capability power_limit_w mig_enabled "
    "pcie_generation pcie_width pcie_max_width nvlink_link_gb_s nvlinks"
)
NVLINK_KEYS = "link peer"


def check_keys(report: dict[str, Any]) -> None:
    """Fail unless the object has exactly these keys, in order, everywhere."""
    assert list(report) == list(KEYS)
    gpus = report["topology"]["gpus"]
    for keys, records in (
        *((KEYS[name], [report[name]]) for name in ("system", "torch", "compilers", "topology")),
        (KEYS["tier"], [report["tier"]]),
        (KEYS["libraries"], report["libraries"].values()),
        (KEYS["findings"], report["findings"]),
        (DEVICE_KEYS, report["torch"]["devices"]),
        (GPU_KEYS, gpus),
        (NVLINK_KEYS, [link for gpu in gpus for link in gpu["nvlinks"]]),
    ):
        assert [list(record) for record in records] == [keys.split()] * len(records)


MACHINES = [
    on_cpu(usable_cores=1),
    *(on_gpu(mesh(num_gpus)) for num_gpus in (1, 2, 4, 8)),
    on_gpu(FakeNvml(20, peers=square(20, False), direct=square(20, 1))),
    on_gpu(FakeNvml(8, mig=(0, 3))),
    make_machine(mesh(4, unsupported=("nvmlDeviceGetHandleByIndex",)), CPU_TORCH),
    on_gpu(mesh(2, unsupported=tuple(UNKNOWN_GPU_FIELDS))),
    *(case.values[3] for case in TRIPPED),
]


@pytest.mark.parametrize("machine", MACHINES, ids=range(len(MACHINES)))
def test_json_has_the_same_keys_and_text_fits(machine: Machine) -> None:
    diagnosed = diagnose(machine)
    check_keys(json.loads(json.dumps(diagnosed.to_json(), allow_nan=False)))
    text = render(diagnosed)
    assert max(map(len, text.splitlines())) <= WIDTH == 100
    assert text.endswith(f"a tier can{'' if diagnosed.can_run else 'not'} run here")


@pytest.mark.parametrize("record", [*CLASSES, Finding, Diagnosis])
def test_every_field_is_described(record: type) -> None:
    assert is_dataclass(record)
    described = re.findall(r"^        (\w+): ", inspect.getdoc(record) or "", re.MULTILINE) or (
        re.findall(r"^    (\w+): ", inspect.getdoc(record) or "", re.MULTILINE)
    )
    assert described == [field.name for field in fields(record)]


def test_every_top_level_key_is_described() -> None:
    assert re.findall(r"^- `(\w+)`: ", doctor.__doc__ or "", re.MULTILINE) == list(KEYS)


def test_matrices_of_the_text() -> None:
    nvml = FakeNvml(2, direct=[[0, 2], [3, 0]], peers=ONE_WAY, levels=[[0, 10], [50, 0]])
    lines = render(diagnose(on_gpu(nvml))).splitlines()

    def rows_below(title: str) -> list[list[str]]:
        first = next(i for i, line in enumerate(lines) if line.strip().startswith(title))
        return [line.split() for line in lines[first + 2 : first + 4]]

    assert rows_below("PCIe path") == [["GPU", "0", "-", "PIX"], ["GPU", "1", "SYS", "-"]]
    assert rows_below("peer access:") == [["GPU", "0", "-", "yes"], ["GPU", "1", "no", "-"]]
    assert rows_below("active NVLinks") == [["GPU", "0", "-", "2"], ["GPU", "1", "3", "-"]]
    assert rows_below("NVLink GB/s") == [["GPU", "0", "-", "53"], ["GPU", "1", "83", "-"]]


def run_doctor(*argv: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, after some code."""
    code += "\nimport sys; from afore_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_prints_json_of_this_machine() -> None:
    done = run_doctor("--json", "--measure")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check_keys(report)
    assert report["can_run"]
    assert report["system"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert report["system"]["facilities"] == dict.fromkeys(FACILITIES)
    assert report["torch"]["cuda_available"] == torch.cuda.is_available()
    assert report["tier"]["device_class"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_command_runs_without_any_library() -> None:
    blocked = ("torch", "triton", "numba", "numpy", "pynvml", "safetensors", "rich")
    done = run_doctor("--json", code=f"import sys; sys.modules |= dict.fromkeys({blocked})")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    check_keys(report)
    errors = [found["name"] for found in report["findings"] if found["severity"] == "error"]
    assert errors == ["torch_import", "numba_cache"]


def test_command_prints_text(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(doctor, "read_machine", on_cpu)
    assert cli.main(["doctor", "--workers", "112"]) == 0
    out = capsys.readouterr().out
    assert "  workers      112\n" in out
    assert "  device       cpu: torch is a CPU build; no NVIDIA driver (NVML: " in out
    assert "112 workers and the scheduler share them" in out
    monkeypatch.setattr(doctor, "read_machine", lambda: on_cpu(platform="darwin"))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("a tier cannot run here\n")


def test_command_rejects_a_tier_without_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--workers", "0"]) == 2
    assert "num_workers" in capsys.readouterr().err
