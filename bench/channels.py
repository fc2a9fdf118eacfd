"""What engines commonly move small records between processes with, behind one interface.

Every channel carries fixed-size records (uint8 arrays) from one process to another and is created
before the processes fork.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import uuid
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Record = npt.NDArray[np.uint8]

TIMEOUT_S = 30


class Channel(Protocol):
    """One direction between two processes."""

    def send(self, record: Record) -> None:
        """Send a record."""

    def receive(self, record: Record) -> None:
        """Fill `record` with the next one, or raise within `TIMEOUT_S`."""

    def close(self) -> None:
        """Release this process's end or ends."""


class QueueChannel:
    """`multiprocessing.Queue`: a pipe, a lock, pickling and a feeder thread."""

    def __init__(self) -> None:
        self._queue: Any = multiprocessing.get_context("fork").Queue()

    def send(self, record: Record) -> None:
        """Send a record."""
        self._queue.put(record.tobytes())

    def receive(self, record: Record) -> None:
        """Fill `record` with the next one, or raise within `TIMEOUT_S`."""
        record[:] = np.frombuffer(self._queue.get(timeout=TIMEOUT_S), np.uint8)

    def close(self) -> None:
        """Release the queue without flushing it."""
        self._queue.cancel_join_thread()
        self._queue.close()


class SocketChannel:
    """A connected pair of stream sockets, read with one system call per record."""

    def __init__(self, sender: socket.socket, receiver: socket.socket) -> None:
        self._sender, self._receiver = sender, receiver
        # Python's own timeouts would add a poll() to every call.
        timeout = struct.pack("ll", TIMEOUT_S, 0)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    @classmethod
    def unix(cls) -> SocketChannel:
        """Connect over a Unix domain socket pair."""
        return cls(*socket.socketpair())

    @classmethod
    def tcp(cls) -> SocketChannel:
        """Connect over loopback TCP, without Nagle's delay."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = socket.create_connection(listener.getsockname())
            receiver, _ = listener.accept()
        sender.settimeout(None)
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sender, receiver)

    def send(self, record: Record) -> None:
        """Send a record."""
        self._sender.sendall(record)

    def receive(self, record: Record) -> None:
        """Fill `record` with the next one, or raise within `TIMEOUT_S`."""
        num_bytes = self._receiver.recv_into(record, record.size, socket.MSG_WAITALL)
        if num_bytes != record.size:
            raise ConnectionError(f"received {num_bytes} of {record.size} bytes")

    def close(self) -> None:
        """Close both ends."""
        self._sender.close()
        self._receiver.close()


class ZmqChannel:
    """ZeroMQ PUSH and PULL over ipc; each process opens its end, since contexts do not fork."""

    def __init__(self) -> None:
        self._address = f"ipc://@afore-bench-{uuid.uuid4()}"  # abstract: leaves no file

    def _open(self, kind: str) -> Any:
        import zmq

        end = zmq.Context.instance().socket(getattr(zmq, kind))
        end.linger = 0
        end.sndtimeo = end.rcvtimeo = 1000 * TIMEOUT_S
        return end

    @cached_property
    def _sender(self) -> Any:
        end = self._open("PUSH")
        end.connect(self._address)
        return end

    @cached_property
    def _receiver(self) -> Any:
        end = self._open("PULL")
        end.bind(self._address)
        return end

    def send(self, record: Record) -> None:
        """Send a record."""
        self._sender.send(record)

    def receive(self, record: Record) -> None:
        """Fill `record` with the next one, or raise within `TIMEOUT_S`."""
        record[:] = np.frombuffer(self._receiver.recv(), np.uint8)

    def close(self) -> None:
        """Close this process's end."""
        for end in ("_sender", "_receiver"):
            if end in self.__dict__:
                self.__dict__[end].close()


def available_channels() -> dict[str, Callable[[], Channel] | None]:
    """Every kind of channel by name, None where its package is not installed."""
    return {
        "multiprocessing.Queue": QueueChannel,
        "Unix socket": SocketChannel.unix,
        "TCP socket": SocketChannel.tcp,
        "pyzmq": ZmqChannel if find_spec("zmq") else None,
    }
