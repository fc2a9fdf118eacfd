"""Starting a tier on one host, supervising it, and taking it down."""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import AforeError, PeerLost
from afore_kernels.runtime.admission import Admission
from afore_kernels.runtime.client import AttentionClient, socket_address
from afore_kernels.runtime.device_weights import note_loaded
from afore_kernels.runtime.memory import TierMemory
from afore_kernels.runtime.processes import Child, Launcher, reported_error
from afore_kernels.runtime.shared import RUNNING
from afore_kernels.runtime.timeline import Timeline
from afore_kernels.runtime.weights import ExpertSlots, WeightSource

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_BLAME_DELAY_S = 0.3


class Tier:
    """A running FFN tier: a scheduler process and `num_workers` worker processes.

    Use it as a context manager, or call `close`. If a process of the tier dies, every wait in the
    tier and in its clients ends with an error that names it, and the other processes are ended.
    """

    def __init__(self, moe: MoEConfig, tier: TierConfig) -> None:
        self.moe = moe
        self.tier = tier
        self._memory = TierMemory.create(moe, tier)
        self._admission = Admission(self._memory)
        self._weight_segments = [
            ExpertSlots.create_segment(moe, self._memory.placement, w)
            for w in range(tier.num_workers)
        ]
        self._scheduler = Child("scheduler", "scheduler")
        self._workers = [Child("worker", f"worker {w}", w) for w in range(tier.num_workers)]
        self.address = f"@afore-{secrets.token_hex(8)}"
        self._launcher: Launcher | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake, self._wake_end = socket.socketpair()
        self._supervisor = threading.Thread(
            target=self._supervise, name="afore-supervisor", daemon=True
        )
        self._close_lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def start(cls, moe: MoEConfig, tier: TierConfig, weights: WeightSource) -> Self:
        """Start a tier and wait until it can serve.

        Args:
            moe: shapes of the served layers.
            tier: size and policy.
            weights: source of the weights, read in this process.

        Raises:
            ShapeError: if a weight does not have the configured shape.
            PeerLost: if a process does not become ready within `startup_timeout_s`.
        """
        self = cls(moe, tier)
        try:
            self._start(weights)
        except BaseException:
            self.close()
            raise
        return self

    def client(self, rank: int = 0) -> AttentionClient:
        """Take attention rank `rank` in this process.

        Raises:
            ConfigError, PeerLost: as `Admission.admit`.
        """
        if self._memory.state[0] != RUNNING:
            raise self._memory.failure()
        first = self._admission.admit(rank)
        return AttentionClient(self._memory, rank, first, lambda: self._admission.release(rank))

    def timeline(self) -> Timeline:
        """What the tier has recorded so far."""
        return Timeline(self._memory)

    def close(self) -> None:
        """End all processes and release everything; may be called at any time, repeatedly."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._memory.stop()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for child in self._children:
            if self._launcher is not None:
                child.wait(max(deadline - time.monotonic(), 0.01))
            child.kill()
        if self._launcher is not None:
            self._launcher.close()
        self._wake.close()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        self._wake_end.close()
        self._listener.close()
        for child in self._children:
            child.socket.close()
        for segment in (self._memory.segment, *self._weight_segments):
            segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _children(self) -> list[Child]:
        return [self._scheduler, *self._workers]

    def _start(self, weights: WeightSource) -> None:
        moe, tier, segment = self.moe, self.tier, self._memory.segment
        store = TCPStore(
            "127.0.0.1",
            0,
            tier.num_workers,
            is_master=True,
            timeout=timedelta(seconds=tier.startup_timeout_s),
            wait_for_workers=False,
        )
        self._launcher = Launcher(
            self._children, moe, tier, segment, self._weight_segments, store.port
        )
        for worker, weight_segment in enumerate(self._weight_segments):
            slots = ExpertSlots(moe, self._memory.placement, worker, weight_segment)
            slots.load_primaries(weights)
        note_loaded(self._memory)
        deadline = time.monotonic() + tier.startup_timeout_s
        for child in self._children:
            child.socket.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                message = child.receive()
            except TimeoutError as error:
                raise PeerLost(
                    f"{child.name} was not ready within {tier.startup_timeout_s} s"
                ) from error
            child.socket.settimeout(None)
            if message is None:
                raise child.lost()
            if (reported := reported_error(message)) is not None:
                raise reported
        self._listener.bind(socket_address(self.address))
        self._listener.listen()
        self._supervisor.start()

    def _supervise(self) -> None:
        """Serve the control sockets until `close`: children that end, clients that come and go."""
        client_rank: dict[socket.socket, int] = {}
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.socket, selectors.EVENT_READ, child)
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_end:
                        for connection in client_rank:
                            connection.close()
                        return
                    if isinstance(key.data, Child):
                        selector.unregister(key.fileobj)
                        self._child_ended(key.data)
                    elif key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        rank = self._accept(connection)
                        if rank is not None:
                            client_rank[connection] = rank
                            selector.register(connection, selectors.EVENT_READ)
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        selector.unregister(key.fileobj)
                        rank = client_rank.pop(key.fileobj)
                        key.fileobj.close()
                        logger.info("the client of attention rank %d is gone", rank)
                        self._admission.release(rank)

    def _child_ended(self, child: Child) -> None:
        """Fail the tier, blaming a process that was killed before one that only noticed."""
        message = child.receive()
        if message is not None:
            child.error = reported_error(message)
        if self._memory.state[0] != RUNNING:
            return
        time.sleep(_BLAME_DELAY_S)
        killed = [c for c in self._children if c.error is None and (c.wait(0.001) or 0) < 0]
        error = (killed[0] if killed else child).lost()
        logger.error("the tier failed: %s", error)
        self._memory.fail(error)

    def _accept(self, connection: socket.socket) -> int | None:
        """Answer a client's hello with the tier's memory; returns its rank if it was admitted."""
        connection.settimeout(_CLOSE_TIMEOUT_S)
        try:
            _check_user(connection)
            rank = json.loads(connection.recv(4096))["rank"]
            if not isinstance(rank, int):
                raise PeerLost(f"attention rank must be an integer, got {rank!r}")
            first_sequence = self._admission.admit(rank)
        except (OSError, ValueError, KeyError, TypeError, AforeError) as error:
            name = type(error).__name__ if isinstance(error, AforeError) else "PeerLost"
            refusal = json.dumps({"error": name, "message": f"refused: {error}"})
            _try_send(connection, refusal.encode(), [])
            connection.close()
            return None
        hello = {
            "moe": self.moe.to_json(),
            "tier": self.tier.to_json(),
            "first_sequence": first_sequence,
        }
        _try_send(connection, json.dumps(hello).encode(), [self._memory.segment.fd])
        return rank


def _check_user(connection: socket.socket) -> None:
    """An abstract socket has no file permissions: admit the tier's own user only."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PeerLost(f"user {user} is not the user that started the tier")


def _try_send(connection: socket.socket, data: bytes, fds: list[int]) -> None:
    try:
        socket.send_fds(connection, [data], fds)
    except OSError as error:
        logger.info("a client went away while connecting: %s", error)
