"""Collectives between the workers, over torch.distributed (gloo on CPUs)."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from afore_kernels.errors import PeerLost


class Collectives:
    """The workers' process group; with one worker every collective is the identity.

    Args:
        worker: this worker's rank in the group.
        num_workers: size of the group.
        port: of the rendezvous store on this host; unused with one worker.
        timeout_s: longest wait for the other workers.
    """

    def __init__(self, worker: int, num_workers: int, port: int, timeout_s: float) -> None:
        self._worker = worker
        self._num_workers = num_workers
        if num_workers > 1:
            store = TCPStore(
                "127.0.0.1",
                port,
                num_workers,
                is_master=False,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
            dist.init_process_group(
                "gloo",
                store=store,
                rank=worker,
                world_size=num_workers,
                timeout=timedelta(seconds=timeout_s),
            )

    def all_gather(self, block: torch.Tensor) -> torch.Tensor:
        """Stack every worker's equally sized uint8 block, [num_workers, block bytes].

        Raises:
            PeerLost: if a worker is gone or does not take part in time.
        """
        if self._num_workers == 1:
            return block[None]
        gathered = block.new_empty((self._num_workers, block.numel()))
        try:
            dist.all_gather(list(gathered.unbind(0)), block)
        except RuntimeError as error:
            raise self._lost("all-gather", error) from error
        return gathered

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum `partial` over the workers in place and return it.

        Raises:
            PeerLost: if a worker is gone or does not take part in time.
        """
        if self._num_workers > 1 and partial.numel():
            try:
                dist.all_reduce(partial)
            except RuntimeError as error:
                raise self._lost("all-reduce", error) from error
        return partial

    def close(self) -> None:
        """Leave the group."""
        if self._num_workers > 1:
            dist.destroy_process_group()

    def _lost(self, collective: str, error: RuntimeError) -> PeerLost:
        return PeerLost(f"worker {self._worker} lost a peer in the {collective}: {error}")
