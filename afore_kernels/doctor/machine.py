"""Everything that is read of a machine, before it is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from afore_kernels.doctor.libraries import (
    Compilers,
    Library,
    TorchBuild,
    read_compilers,
    read_libraries,
    read_torch,
)
from afore_kernels.doctor.system import System, read_system
from afore_kernels.doctor.topology import Topology, read_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine; see the classes of its fields."""

    system: System
    libraries: dict[str, Library]
    torch: TorchBuild
    compilers: Compilers
    topology: Topology

    def used_gpus(self) -> list[int]:
        """NVML's indices of the GPUs that torch uses, in torch's order.

        An instance of a partitioned GPU has a UUID of its own, which NVML does not list.
        """
        index_of = {gpu.uuid: index for index, gpu in enumerate(self.topology.gpus)}
        return [index_of[d.uuid] for d in self.torch.devices if d.uuid in index_of]

    def used_paths(self) -> list[tuple[int, int]]:
        """NVML's (reader, owner) for every two GPUs that torch uses."""
        gpus = self.used_gpus()
        return [(reader, owner) for reader in gpus for owner in gpus if reader != owner]


def read_machine(nvml: Any = None, torch: Any = None) -> Machine:
    """Read everything; `nvml` and `torch` take the place of the modules `pynvml` and `torch`."""
    return Machine(
        system=read_system(),
        libraries=read_libraries(),
        torch=read_torch(torch),
        compilers=read_compilers(),
        topology=read_topology(nvml),
    )
