"""What a worker process builds on a GPU."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from afore_kernels.errors import ConfigError
from afore_kernels.gemm.launch import architecture, heuristic_launch
from afore_kernels.runtime.devices.cuda import CudaDevice
from afore_kernels.runtime.devices.cudart import CudaError, CudaRuntime
from afore_kernels.runtime.executors.graphs import CudaCapture, GraphCache
from afore_kernels.runtime.executors.triton import TritonExecutor
from afore_kernels.runtime.lanes import NUM_LANES
from afore_kernels.runtime.memory import TierMemory
from afore_kernels.runtime.transports.local import torch_dtype
from afore_kernels.runtime.weights import ExpertSlots

logger = logging.getLogger(__name__)


def choose_devices(num_workers: int, cuda: Any = torch.cuda) -> list[int]:
    """The GPU of every worker: one each, or in turns where there are fewer.

    Raises:
        ConfigError: if there is none.
    """
    if not cuda.is_available():
        raise ConfigError("device 'cuda' needs a CUDA build of torch and a GPU; see `afore doctor`")
    return [worker % cuda.device_count() for worker in range(num_workers)]


def open_device(
    memory: TierMemory, index: int, runtime: CudaRuntime | None = None, cuda: Any = torch.cuda
) -> CudaDevice:
    """Make GPU `index` current, and let its copies reach the tier's memory without staging."""
    tier = memory.tier
    cuda.set_device(index)
    device = CudaDevice(
        torch.device("cuda", index),
        tier.reply_timeout_s,
        copy_path=tier.copy_path,
        runtime=runtime,
        cuda=cuda,
    )
    segment = memory.segment
    address = ctypes.addressof(ctypes.c_char.from_buffer(segment.buffer))
    try:
        device.runtime.host_register(address, segment.num_bytes)
    except CudaError as error:
        logger.warning("replies are staged by the driver: %s", error)
    return device


def make_executor(
    memory: TierMemory, worker: int, slots: ExpertSlots, device: CudaDevice
) -> TritonExecutor:
    """The worker's executor, with graphs unless the configuration says otherwise.

    Raises:
        ConfigError: if the kernels do not take the configured `tile_m`.
    """
    moe, tier = memory.moe, memory.tier
    return TritonExecutor(
        worker,
        moe,
        memory.plan_layout,
        slots,
        device,
        tier.num_ranks * tier.max_tokens_per_rank,
        NUM_LANES,
        launch=heuristic_launch(
            architecture(device.torch_device),
            moe.tile_m,
            dtype=torch_dtype(moe),
            has_bias=moe.has_bias,
        ),
        graphs=GraphCache(CudaCapture() if tier.cuda_graphs else None),
        idle_sms=tier.idle_sms,
    )
