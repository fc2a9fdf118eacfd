"""Starting a tier's processes and watching them: both ends of the control socket.

The parent passes a child its role, the configurations and the descriptors of the shared segments.
The socket's end of file is how each side learns that the other is gone, at once and without
polling.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import AforeError, PeerLost
from afore_kernels.runtime.memory import TierMemory, decode_error
from afore_kernels.runtime.shared import STOPPING, Segment

_MAX_MESSAGE = 1 << 20


class ChildContext(NamedTuple):
    """What a child process starts with."""

    memory: TierMemory
    worker: int
    weight_segments: list[Segment]
    store_port: int


class Child:
    """The parent's handle of one process of the tier."""

    def __init__(self, role: str, name: str) -> None:
        self.role = role
        self.name = name
        self.error: AforeError | None = None
        self.socket, child_end = socket.socketpair()
        self._child_end = child_end
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        moe: MoEConfig,
        tier: TierConfig,
        segment: Segment,
        *,
        worker: int = -1,
        weight_segments: list[Segment] | None = None,
        store_port: int = 0,
    ) -> None:
        """Start the process; it reports ready on the socket."""
        weight_fds = [s.fd for s in weight_segments or []]
        control_fd = self._child_end.fileno()
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "afore_kernels.runtime.entry", self.role, str(control_fd)],
            pass_fds=[control_fd, segment.fd, *weight_fds],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._child_end.close()
        message = {
            "moe": moe.to_json(),
            "tier": tier.to_json(),
            "segment_fd": segment.fd,
            "worker": worker,
            "weight_fds": weight_fds,
            "store_port": store_port,
        }
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def receive(self) -> dict[str, Any] | None:
        """Next message of the child, or None when it is gone."""
        try:
            text = _read_line(self.socket)
        except ConnectionError:
            return None
        return json.loads(text) if text else None

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, negative for a signal, or None if it still runs after `timeout_s`."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the process by SIGKILL and reap it."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()

    def lost(self) -> AforeError:
        """The error that describes how the child ended."""
        if self.error is not None:
            return self.error
        status = self.wait(1.0)
        how = f"exited with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return PeerLost(f"{self.name} {how}")


def run_child(
    name: str, control_fd: int, main: Callable[[ChildContext, Callable[[], None]], None]
) -> None:
    """Run a child's `main(context, report_ready)` and report how it ended.

    A stop of the tier ends `main` by `PeerLost`, which is a clean exit. The death of the parent
    fails the tier, so that clients are told, and ends the process.
    """
    control = socket.socket(fileno=control_fd)
    message = json.loads(_read_line(control))
    memory = TierMemory(
        MoEConfig.from_json(message["moe"]),
        TierConfig.from_json(message["tier"]),
        Segment.open(message["segment_fd"]),
    )
    context = ChildContext(
        memory,
        message["worker"],
        [Segment.open(fd) for fd in message["weight_fds"]],
        message["store_port"],
    )

    def watch_parent() -> None:
        try:
            with suppress(ConnectionError):
                _read_line(control)
            memory.fail(PeerLost("the process that started the tier is gone"))
        finally:
            os._exit(1)

    def report_ready() -> None:
        _send(control, {"ready": name})

    threading.Thread(target=watch_parent, name="watch-parent", daemon=True).start()
    try:
        main(context, report_ready)
    except AforeError as error:
        if int(memory.state[0]) == STOPPING:
            os._exit(0)
        _send(control, {"error": type(error).__name__, "message": str(error)})
        os._exit(1)
    except BaseException as error:
        _send(control, {"error": "PeerLost", "message": f"{name} failed: {error!r}"})
        raise


def reported_error(message: dict[str, Any]) -> AforeError | None:
    """The error in a child's message, if it is one."""
    return decode_error(json.dumps(message).encode()) if "error" in message else None


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the parent is gone: watch_parent ends the process
        control.sendall(json.dumps(message).encode() + b"\n")


def _read_line(connection: socket.socket) -> bytes:
    """Read up to a newline; b"" at the end of file."""
    parts = bytearray()
    while not parts.endswith(b"\n"):
        data = connection.recv(1)
        if not data or len(parts) > _MAX_MESSAGE:
            return b""
        parts += data
    return bytes(parts)
