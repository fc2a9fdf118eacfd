"""From what was read of a machine to what a tier will use there and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from afore_kernels.doctor.bandwidth import measure_bandwidth
from afore_kernels.doctor.checks import TierUse, describe_tier
from afore_kernels.doctor.findings import HOST_CHECKS, Finding
from afore_kernels.doctor.gpu_findings import GPU_CHECKS
from afore_kernels.doctor.machine import Machine

_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What `afore doctor` reports.

    Attributes:
        machine: what was read.
        measured_gb_s: bandwidth between torch's devices, as `measure_bandwidth`, or None.
        tier: what a tier will use.
        findings: what is wrong or missing, errors first.
    """

    machine: Machine
    measured_gb_s: list[list[float | None]] | None
    tier: TierUse
    findings: list[Finding]

    @property
    def can_run(self) -> bool:
        """Whether a tier can run: no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `afore doctor --json` prints."""
        fields = asdict(self)
        return {**fields.pop("machine"), **fields, "can_run": self.can_run}


def diagnose(
    machine: Machine, num_workers: int | None = None, *, measure: bool = False
) -> Diagnosis:
    """Judge a machine for a tier of that many workers.

    Args:
        machine: what was read.
        num_workers: as `describe_tier`.
        measure: also measure the bandwidth between GPUs, where torch can use them.
    """
    tier = describe_tier(machine, num_workers)
    found = [f for check in (*HOST_CHECKS, *GPU_CHECKS) for f in check(machine, tier)]
    is_measured = measure and machine.torch.cuda_available
    return Diagnosis(
        machine=machine,
        measured_gb_s=measure_bandwidth(len(machine.torch.devices)) if is_measured else None,
        tier=tier,
        findings=sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)),
    )
