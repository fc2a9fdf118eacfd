"""What a tier will use on a machine, and why."""

from __future__ import annotations

from dataclasses import dataclass

from afore_kernels.doctor.libraries import TorchBuild
from afore_kernels.doctor.machine import Machine
from afore_kernels.doctor.topology import Topology

_HOW_TO_ASK = "ask for it by TierConfig(device='cuda')"
_CPU_WORKERS = 2
"""Size of a tier on CPUs unless told: the fewest workers that have something to balance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The device class of a tier's workers, `cuda` or `cpu`, and the reasons for it."""

    device_class: str
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """What a tier will use.

    Attributes:
        num_workers: size of the tier that this describes.
        device_class: `cuda` or `cpu`.
        reasons: why that.
        executor: what computes the expert FFN: `triton` or `torch`.
        collectives: `nccl`, `gloo`, or `none` with one worker.
        copy_path: how a worker gets another worker's weights.
        cuda_graphs: whether steady-state decode can be captured.
    """

    num_workers: int
    device_class: str
    reasons: list[str]
    executor: str
    collectives: str
    copy_path: str
    cuda_graphs: bool


def choose_device(torch: TorchBuild, topology: Topology) -> DeviceChoice:
    """Choose `cuda` where torch can use a GPU, otherwise `cpu`, which is the default."""
    if torch.cuda_available:
        num_gpus = len(torch.devices)
        build = f"torch for CUDA {torch.cuda_build}" if torch.cuda_build else "torch"
        reason = f"{build} can use {num_gpus} GPU{'s' if num_gpus != 1 else ''}"
        return DeviceChoice(device_class="cuda", reasons=[reason, _HOW_TO_ASK])
    reasons = []
    if torch.error:
        reasons.append(f"torch cannot be imported ({torch.error})")
    elif not torch.cuda_build:
        reasons.append("torch is a CPU build")
    if topology.error:
        what = "no NVIDIA driver" if topology.has_driver is False else "NVML does not answer"
        reasons.append(f"{what} (NVML: {topology.error})")
    elif not topology.gpus:
        reasons.append("the NVIDIA driver sees no GPU")
    if not reasons:
        reasons.append(f"torch cannot use the GPUs ({why_unavailable(torch)})")
    return DeviceChoice(device_class="cpu", reasons=reasons)


def why_unavailable(torch: TorchBuild) -> str:
    """Say why a CUDA build of torch uses no GPU, as far as torch and the environment tell."""
    if torch.cuda_error:
        return torch.cuda_error
    if torch.visible_devices is not None:
        return f"CUDA_VISIBLE_DEVICES={torch.visible_devices!r}"
    return "torch does not say why"


def describe_tier(machine: Machine, num_workers: int | None = None) -> TierUse:
    """Say what a tier of that many workers uses; by default one per GPU, or two on CPUs."""
    choice = choose_device(machine.torch, machine.topology)
    is_cuda, num_devices = choice.device_class == "cuda", len(machine.torch.devices)
    if num_workers is None:
        num_workers = max(num_devices, 1) if is_cuda else _CPU_WORKERS
    # NCCL refuses two ranks on one GPU.
    has_nccl = is_cuda and machine.torch.has_nccl and num_workers <= num_devices
    return TierUse(
        num_workers=num_workers,
        device_class=choice.device_class,
        reasons=choice.reasons,
        executor="triton" if is_cuda else "torch",
        collectives="none" if num_workers == 1 else "nccl" if has_nccl else "gloo",
        copy_path=_gpu_copy_path(machine) if is_cuda else "shared memory",
        cuda_graphs=is_cuda,
    )


def _gpu_copy_path(machine: Machine) -> str:
    if len(machine.torch.devices) == 1:
        return "within the GPU"
    topology = machine.topology
    access = {(i, j): topology.peer_access[i][j] for i, j in machine.used_paths()}
    known = {path: has_access for path, has_access in access.items() if has_access is not None}
    if not known:
        return "unknown: NVML does not tell"
    peers = [path for path, has_access in known.items() if has_access]
    if not peers:
        return "staged by the host"
    links = {"NVLink" if topology.nvlinks[i][j] else "PCIe" for i, j in peers}
    copy_path = f"peer copies over {' and '.join(sorted(links))}"
    num_staged = len(known) - len(peers)
    if num_staged:
        copy_path += f", {num_staged} of {len(known)} directions staged by the host"
    return copy_path
