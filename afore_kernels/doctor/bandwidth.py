"""Bandwidth between GPUs, measured as a worker copies experts: by the copy engines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from afore_kernels.doctor.probe import attempt

COPY_BYTES = 256 << 20
_ROUNDS = 7

MakeCopy = Callable[[int, int], Callable[[], None]]


def measure_bandwidth(
    num_devices: int,
    make_copy: MakeCopy | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float | None]]:
    """Measure the copy from every device to every other, one at a time.

    Args:
        num_devices: CUDA devices of torch.
        make_copy: given reader and owner, returns a function that copies `COPY_BYTES` and waits; by
            default a copy between CUDA devices.
        clock: seconds.

    Returns:
        [reader, owner], 10^9 bytes/s, medians after one untimed copy; None on the diagonal and for
        a copy that cannot be measured.
    """
    make_copy = make_copy or _cuda_copy

    def measure(reader: int, owner: int) -> float:
        copy = make_copy(reader, owner)
        copy()
        times = []
        for _ in range(_ROUNDS):
            start = clock()
            copy()
            times.append(clock() - start)
        return round(COPY_BYTES / statistics.median(times) / 1e9, 1)

    devices = range(num_devices)
    return [
        [None if reader == owner else attempt(measure, reader, owner) for owner in devices]
        for reader in devices
    ]


def _cuda_copy(reader: int, owner: int) -> Callable[[], None]:
    import torch  # here, as on other machines it may be missing or broken

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{owner}")
    destination = torch.empty_like(source, device=f"cuda:{reader}")

    def copy() -> None:
        destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize(owner)
        torch.cuda.synchronize(reader)

    return copy
