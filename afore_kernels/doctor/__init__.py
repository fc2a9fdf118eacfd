"""`afore doctor`: say what this machine has, what a tier will use, and what is missing.

::

    system, libraries, topology ─▶ Machine ─▶ describe_tier ─▶ HOST_CHECKS, GPU_CHECKS ─▶ Diagnosis
    read; what fails is unknown               choose_device    what is wrong, what to do

It runs without any library that the package needs, as that may be what is missing. With `--json` it
prints one object, whose fields are those of the classes named here; null is unknown, or what they
say.

- `system`: `doctor.system.System`
- `libraries`: by the library's name, `doctor.libraries.Library`
- `torch`: `doctor.libraries.TorchBuild`
- `compilers`: `doctor.libraries.Compilers`
- `topology`: `doctor.topology.Topology`, all GPUs that the driver sees
- `measured_gb_s`: bandwidth between torch's devices, [reader, owner], 10^9 bytes/s; null if not
  measured
- `tier`: `doctor.checks.TierUse`
- `findings`: `doctor.findings.Finding`, errors first
- `can_run`: whether a tier can run here: no finding is an error
"""

from __future__ import annotations

import argparse
import json

from afore_kernels.config import TierConfig
from afore_kernels.doctor.diagnosis import diagnose
from afore_kernels.doctor.machine import read_machine
from afore_kernels.doctor.table import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `afore doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--workers", type=int, help="size of the tier to check for; one per GPU, or 2 on CPUs"
    )
    parser.add_argument("--measure", action="store_true", help="measure copies between GPUs")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis.

    Returns:
        0 if a tier can run here, 1 if not.

    Raises:
        ConfigError: if a tier cannot have that many workers.
    """
    if args.workers is not None:
        TierConfig(num_workers=args.workers)
    diagnosis = diagnose(read_machine(), args.workers, measure=args.measure)
    print(json.dumps(diagnosis.to_json(), indent=2) if args.json else render(diagnosis))
    return 0 if diagnosis.can_run else 1
