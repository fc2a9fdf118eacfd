"""The Python libraries: which are installed, which are supported, and how torch was built."""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
import os
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afore_kernels.doctor.probe import attempt, describe

PURPOSES = {
    "torch": "tensors, collectives, the CPU workers' expert FFN",
    "triton": "kernels of the GPU workers",
    "numba": "compiled scheduler and partition",
    "numpy": "shared-memory arrays",
    "safetensors": "checkpoints",
    "nvidia-ml-py": "what this command knows of GPUs",
    "transformers": "adapter, afore demo",
    "rich": "afore demo and replay",
    "ortools": "certificates of optimality in bench",
    "matplotlib": "figures of bench",
    "pyzmq": "queues that bench compares with",
    "nixl": "attention ranks on other hosts",
}
"""What each library is for, in the order they are listed."""

_DEVELOPMENT = "dev"
_RELATIONS = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that the package can use.

    Attributes:
        version: installed, None if it is not.
        requirement: supported versions as in the package's metadata, as ">=2.11"; None if the
            metadata does not name the library.
        is_supported: whether the version satisfies the requirement, None if either is missing.
        is_core: whether the package depends on it, on some platform; the others are extras.
        purpose: what it is for.
    """

    version: str | None
    requirement: str | None
    is_supported: bool | None
    is_core: bool
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """A CUDA device of torch.

    Attributes:
        index: as in `cuda:0`, among the visible ones.
        uuid: as NVML names it.
        copy_engines: copies that can run at the same time, None if torch does not say.
    """

    index: int
    uuid: str
    copy_engines: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """How torch was built and what it sees.

    Attributes:
        error: why torch cannot be imported, None if it can.
        cuda_build: CUDA version it was built for, None for a build without CUDA.
        cuda_available: whether it can use a GPU.
        cuda_error: why it cannot, in the words of torch, if it says so.
        visible_devices: CUDA_VISIBLE_DEVICES, which hides GPUs from it, or None.
        devices: the GPUs it can use.
        architectures: GPU architectures it has code for, as "sm_90" or "compute_90".
        has_distributed: whether torch.distributed is there.
        has_gloo: whether CPU workers have collectives.
        has_nccl: whether GPU workers have collectives.
    """

    error: str | None = None
    cuda_build: str | None = None
    cuda_available: bool = False
    cuda_error: str | None = None
    visible_devices: str | None = None
    devices: list[TorchDevice] = field(default_factory=list)
    architectures: list[str] = field(default_factory=list)
    has_distributed: bool = False
    has_gloo: bool = False
    has_nccl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilers:
    """What the compilers of kernels and of the scheduler need.

    Attributes:
        numba_cache: directory of numba's cache, None if there is none.
        numba_error: why there is none.
        c_compiler: path of the C compiler that Triton runs for its launcher, or None.
        python_headers: whether Python.h is there, which the launcher includes.
    """

    numba_cache: str | None
    numba_error: str | None
    c_compiler: str | None
    python_headers: bool


def read_libraries(requirements: Iterable[str] | None = None) -> dict[str, Library]:
    """Look up every library of `PURPOSES` and of the package's requirements.

    Args:
        requirements: as in a package's metadata; by default this package's, none if it is not
            installed.
    """
    if requirements is None:
        requirements = attempt(importlib.metadata.requires, "afore-kernels") or []
    needs: dict[str, tuple[str, bool]] = {}
    for requirement in requirements:
        specifier, _, marker = requirement.partition(";")
        found = re.match(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^)]*)", specifier)
        extra = re.search(r"extra == ['\"](.+?)['\"]", marker)
        if found and not (extra and extra[1] == _DEVELOPMENT):
            needs.setdefault(found[1], (found[2].strip(), extra is None))
    return {
        name: _library(name, *needs.get(name, (None, False)))
        for name in dict.fromkeys((*PURPOSES, *needs))
    }


def _library(name: str, requirement: str | None, is_core: bool) -> Library:
    version = attempt(importlib.metadata.version, name)
    known = version is not None and requirement is not None
    return Library(
        version=version,
        requirement=requirement,
        is_supported=satisfies(str(version), str(requirement)) if known else None,
        is_core=is_core,
        purpose=PURPOSES.get(name, ""),
    )


def satisfies(version: str, requirement: str) -> bool:
    """Return whether a version is in a range, by its numbers alone: 2.11.0a0+git counts as 2.11.

    Args:
        version: as installed.
        requirement: comma-separated bounds with `>=`, `<=`, `>`, `<`, `==` or `!=`; an empty one
            admits every version.

    >>> satisfies("2.11.0+cu130", ">=2.11,<3"), satisfies("2.9.1", ">=2.11")
    (True, False)
    """
    found = _numbers(version)
    bounds = re.findall(r"([<>=!]=|[<>])\s*([\w.]+)", requirement)
    return all(_RELATIONS[relation](found, _numbers(bound)) for relation, bound in bounds)


def _numbers(version: str) -> list[int]:
    """The release numbers without trailing zeros: [2, 11] for 2.11.0+cpu."""
    found = re.match(r"[\d.]+", version)
    numbers = [int(part) for part in found[0].split(".") if part] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def read_torch(torch: Any = None) -> TorchBuild:
    """Ask torch how it was built and what it sees.

    Args:
        torch: the module; imported if not given.
    """
    try:
        return _ask_torch(torch or importlib.import_module("torch"))
    except Exception as error:  # an import that fails, or one that finds the rest of an old torch
        return TorchBuild(error=describe(error))


def _ask_torch(torch: Any) -> TorchBuild:
    with warnings.catch_warnings(record=True) as caught:  # torch warns why it sees no GPU
        warnings.simplefilter("always")
        is_available: bool = torch.cuda.is_available()
    reason = describe(caught[0].message) if caught else None
    num_devices = torch.cuda.device_count() if is_available else 0
    has_distributed: bool = torch.distributed.is_available()
    return TorchBuild(
        cuda_build=torch.version.cuda,
        cuda_available=is_available,
        cuda_error=None if is_available else reason,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=[_torch_device(torch, index) for index in range(num_devices)],
        architectures=(attempt(torch.cuda.get_arch_list) or []) if is_available else [],
        has_distributed=has_distributed,
        has_gloo=has_distributed and torch.distributed.is_gloo_available(),
        has_nccl=has_distributed and torch.distributed.is_nccl_available(),
    )


def _torch_device(torch: Any, index: int) -> TorchDevice:
    properties = attempt(torch.cuda.get_device_properties, index)
    return TorchDevice(
        index=index,
        uuid=f"GPU-{getattr(properties, 'uuid', '')}",
        copy_engines=getattr(properties, "async_engine_count", None),
    )


def read_compilers() -> Compilers:
    """Look for what numba and Triton need beside themselves."""
    path, error = None, None
    try:
        import numba

        # Numba looks for a writable directory when it decorates, and fails if there is none.
        path = numba.njit(cache=True)(_cached).stats.cache_path
    except Exception as failure:
        error = describe(failure)
    compilers = (shutil.which(name) for name in ("gcc", "clang"))
    return Compilers(
        numba_cache=path,
        numba_error=error,
        c_compiler=os.environ.get("CC") or next(filter(None, compilers), None),
        python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    )


def _cached() -> None:
    """A function of this package for numba to find a cache directory for; never compiled."""
