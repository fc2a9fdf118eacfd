"""The limits of one SM or CU, and how many CTAs of a kernel it holds."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
# Every target below has four schedulers with 512 registers a lane, handed out in steps of 8.
SCHEDULERS = 4
REGISTERS_PER_LANE = 512
REGISTER_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A compilation target and the limits of its SM (AMD: CU).

    Attributes:
        name: as printed.
        backend, arch, warp_size: of Triton's `GPUTarget`.
        warps_per_scheduler: most resident warps (AMD: waves) of one scheduler.
        ctas_per_sm: most resident CTAs (AMD: workgroups).
        shared_bytes_per_sm: shared memory (AMD: LDS).
        shared_bytes_per_cta: most that one CTA may have.
        reserved_shared_bytes: what the driver takes for itself from every CTA's share.
        tensor_memory_columns: 128-lane columns of tensor memory, 0 without one.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    warps_per_scheduler: int
    ctas_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_cta: int
    reserved_shared_bytes: int
    tensor_memory_columns: int = 0

    def count_resident_ctas(
        self,
        *,
        registers: int,
        shared_bytes: int,
        num_warps: int,
        tensor_memory_columns: int = 0,
    ) -> int:
        """Return the CTAs of a kernel that one SM holds at a time; 0 if not even one fits.

        Args:
            registers: per thread.
            shared_bytes: per CTA, without what the driver reserves.
            num_warps: per CTA.
            tensor_memory_columns: per CTA.

        >>> SM90.count_resident_ctas(registers=128, shared_bytes=100 * 1024, num_warps=4)
        2
        """
        if shared_bytes > self.shared_bytes_per_cta:
            return 0
        allocated = max(1, -(-registers // REGISTER_STEP)) * REGISTER_STEP
        warps = min(REGISTERS_PER_LANE // allocated, self.warps_per_scheduler) * SCHEDULERS
        limits = [self.ctas_per_sm, warps // num_warps]
        if shared_bytes + self.reserved_shared_bytes:
            limits.append(self.shared_bytes_per_sm // (shared_bytes + self.reserved_shared_bytes))
        if tensor_memory_columns:
            limits.append(self.tensor_memory_columns // tensor_memory_columns)
        return min(limits)


def _cuda(arch: int, shared_kib: int, tensor_memory_columns: int = 0) -> Architecture:
    return Architecture(
        name=f"sm{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        warps_per_scheduler=16,
        ctas_per_sm=32,
        shared_bytes_per_sm=shared_kib * KIB,
        shared_bytes_per_cta=(shared_kib - 1) * KIB,
        reserved_shared_bytes=KIB,
        tensor_memory_columns=tensor_memory_columns,
    )


SM80 = _cuda(80, shared_kib=164)
SM90 = _cuda(90, shared_kib=228)
SM100 = _cuda(100, shared_kib=228, tensor_memory_columns=512)
GFX942 = Architecture(
    name="gfx942",
    backend="hip",
    arch="gfx942",
    warp_size=64,
    warps_per_scheduler=8,
    ctas_per_sm=32,
    shared_bytes_per_sm=64 * KIB,
    shared_bytes_per_cta=64 * KIB,
    reserved_shared_bytes=0,
)
ARCHITECTURES = (SM80, SM90, SM100, GFX942)
