"""Device memory that other processes can open, and copies between peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from afore_kernels.config import CopyPath
from afore_kernels.errors import ShapeError
from afore_kernels.runtime.devices import TensorCopy
from afore_kernels.runtime.devices.cudart import CudaError

if TYPE_CHECKING:
    from afore_kernels.runtime.devices.cuda import CudaDevice

_BLOCK_BYTES = 2 << 20


class DeviceMemory:
    """Memory of a device, allocated by this process or opened from the one that did.

    A context manager; or call `close`. Close the streams that use it first, and every opener before
    the process that allocated it.

    Attributes:
        num_bytes: its size.
    """

    def __init__(
        self, address: int, num_bytes: int, device: CudaDevice, release: Callable[[int], None]
    ) -> None:
        self.num_bytes = num_bytes
        self._address: int | None = address
        self._device = device
        self._release = release

    @classmethod
    def allocate(cls, num_bytes: int, device: CudaDevice) -> DeviceMemory:
        """Allocate uninitialised memory that other processes can open."""
        # A handle shares whole blocks of 2 MiB, into which cudaMalloc packs small allocations.
        num_blocks = -(-num_bytes // _BLOCK_BYTES)
        with device.cuda.device(device.torch_device):
            address = device.runtime.malloc(num_blocks * _BLOCK_BYTES)
        return cls(address, num_bytes, device, device.runtime.free)

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, device: CudaDevice) -> DeviceMemory:
        """Map memory of another process into `device`, which has it or is a peer of its device.

        Args:
            handle: what `share` returned there.
            num_bytes: the size there.
            device: the device whose work here uses the memory.

        Raises:
            CudaError: if the handle is not valid here, or its device is no peer.
        """
        with device.cuda.device(device.torch_device):
            address = device.runtime.mem_open_handle(handle)
        return cls(address, num_bytes, device, device.runtime.mem_close_handle)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as uint8 [num_bytes] on the device it was opened for; ends with the memory."""
        # Not by __cuda_array_interface__: it names no device, torch takes the one where the memory
        # resides, and `as_tensor` for another device returns a copy.
        device = self._device.torch_device
        storage = torch._C._construct_storage_from_data_pointer(
            self._open_address(), device, self.num_bytes
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def share(self) -> bytes:
        """The handle, 64 bytes, by which other processes open the memory."""
        with self._device.cuda.device(self._device.torch_device):
            return self._device.runtime.mem_get_handle(self._open_address())

    def close(self) -> None:
        """Free or unmap the memory, once."""
        if self._address is None:
            return
        address, self._address = self._address, None
        with self._device.cuda.device(self._device.torch_device):
            self._release(address)

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_address(self) -> int:
        if self._address is None:
            raise CudaError("the device memory is closed")
        return self._address


def copy_batch(
    device: CudaDevice, copies: Sequence[TensorCopy], path: CopyPath = "copy_engine"
) -> None:
    """Queue copies on the device's current stream, in no order among themselves.

    Args:
        device: the destinations'; it pulls from its peers.
        copies: pairs of contiguous tensors.
        path: `copy_engine` leaves the SMs to the model wherever the driver can; `sm` copies by
            kernels, and needs the sources opened for this device.

    Raises:
        ShapeError: if two tensors differ in shape or dtype (`sm`: or device), or one is not
            contiguous; then nothing is queued.
    """
    for destination, source in copies:
        _check_copy(destination, source, path)
    # The driver refuses a batch with an empty copy.
    copies = [copy for copy in copies if copy[0].numel()]
    if not copies:
        return
    destinations, sources = zip(*copies)
    if path == "sm":
        # `Tensor.copy_` of contiguous tensors is a cudaMemcpyAsync; these are kernels over many
        # copies each, as long as all have one dtype: bytes.
        torch._foreach_copy_(_bytes(destinations), _bytes(sources))
        return
    device.runtime.memcpy_batch_async(
        [destination.data_ptr() for destination in destinations],
        [source.data_ptr() for source in sources],
        [destination.nbytes for destination in destinations],
        device.cuda.current_stream(device.torch_device).cuda_stream,
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]


def _check_copy(destination: torch.Tensor, source: torch.Tensor, path: CopyPath) -> None:
    if (destination.shape, destination.dtype) != (source.shape, source.dtype):
        raise ShapeError(
            f"copy of {source.dtype} {tuple(source.shape)} "
            f"into {destination.dtype} {tuple(destination.shape)}"
        )
    if not (destination.is_contiguous() and source.is_contiguous()):
        raise ShapeError(f"copy of {tuple(source.shape)} between tensors not both contiguous")
    if path == "sm" and destination.device != source.device:
        raise ShapeError(f"copy by a kernel from {source.device} to {destination.device}")
