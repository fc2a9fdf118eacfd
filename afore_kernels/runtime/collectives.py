"""Collectives between the workers, over torch.distributed: gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from afore_kernels.errors import PeerLost
from afore_kernels.runtime.devices import Buffer, Stream

Names = Sequence[Buffer]

# torch 2.13 renamed it.
_reduce_scatter: Callable[..., object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class Collectives:
    """The workers' process group; with one worker every collective is the identity.

    Args:
        worker: this worker's rank in the group.
        num_workers: size of the group.
        port: of the rendezvous store on this host; unused with one worker.
        timeout_s: longest wait for the other workers.
        backend: of torch.distributed.
        scatters: reduce to the owners of the rows alone (reduce-scatter), not to all (all-reduce).
    """

    def __init__(
        self,
        worker: int,
        num_workers: int,
        port: int,
        timeout_s: float,
        *,
        backend: str = "gloo",
        scatters: bool = False,
    ) -> None:
        self._worker = worker
        self._num_workers = num_workers
        self._scatters = scatters
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
                backend,
                store=store,
                rank=worker,
                world_size=num_workers,
                timeout=timedelta(seconds=timeout_s),
            )

    def all_gather(
        self, stream: Stream, blocks: torch.Tensor, *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Queue on `stream`: give every worker the blocks of all, uint8 [num_workers, bytes].

        Row w is worker w's before; queued work raises `PeerLost` if a worker does not take part in
        time.
        """
        if self._num_workers > 1 and blocks.numel():
            mine = blocks[self._worker]
            work = partial(dist.all_gather, list(blocks.unbind(0)), mine)
            stream.submit(partial(self._call, "all-gather", work), reads=reads, writes=writes)

    def reduce(
        self, stream: Stream, output: torch.Tensor, *, reads: Names = (), writes: Names = ()
    ) -> None:
        """Queue on `stream`: sum `output` [num_workers * share, H] over the workers, in place.

        The rows of this worker's share then hold the sum; others too after an all-reduce, while a
        reduce-scatter leaves them undefined. Queued work raises `PeerLost` as in `all_gather`.
        """
        if self._num_workers > 1 and output.numel():
            work: Callable[[], object] = partial(dist.all_reduce, output)
            if self._scatters:
                share = len(output) // self._num_workers
                mine = output[self._worker * share : (self._worker + 1) * share]
                work = partial(_reduce_scatter, mine, output)
            stream.submit(partial(self._call, "reduction", work), reads=reads, writes=writes)

    def close(self) -> None:
        """Leave the group."""
        if self._num_workers > 1:
            dist.destroy_process_group()

    def _call(self, collective: str, work: Callable[[], object]) -> None:
        try:
            work()
        except RuntimeError as error:
            raise PeerLost(
                f"worker {self._worker} lost a peer in the {collective}: {error}"
            ) from error
