"""Starting a tier's processes and watching them, from both sides.

The starting process runs one launcher, which imports the package once and forks the scheduler and
the
workers: importing torch takes seconds, forking milliseconds. Descriptors of the shared segments are
inherited. Each child has a control socket to the starting process; its end of file is how each side
learns that the other is gone, at once and without polling.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import AforeError, PeerLost
from afore_kernels.runtime.memory import TierMemory, decode_error
from afore_kernels.runtime.shared import STOPPING, Segment

_MAX_LINE = 1 << 20
_GRACE_S = 5.0
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # workers set their own thread count; forking wants none before
    "TORCH_CPP_LOG_LEVEL": "FATAL",  # the loss of a peer is reported by name, not by a stack trace
}

Message = dict[str, Any]


class ChildContext(NamedTuple):
    """What a child process starts with."""

    memory: TierMemory
    worker: int
    weight_segments: list[Segment]
    store_port: int


class Child:
    """The starting process's handle of one process of the tier."""

    def __init__(self, role: str, name: str, worker: int = -1) -> None:
        self.role = role
        self.name = name
        self.worker = worker
        self.pid = -1
        self.error: AforeError | None = None
        self.socket, self.child_end = socket.socketpair()
        self._status: int | None = None
        self._has_ended = threading.Event()

    def receive(self) -> Message | None:
        """Next message of the child, or None when it is gone."""
        return next(_messages(self.socket), None)

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, negative for a signal, or None if it still runs after `timeout_s`."""
        self._has_ended.wait(timeout_s)
        return self._status

    def ended(self, status: int | None) -> None:
        """Note how the process ended; None if nobody knows."""
        self._status = status
        self._has_ended.set()

    def kill(self) -> None:
        """End the process by SIGKILL, if it still runs, and wait until it is gone."""
        if self.pid > 0 and not self._has_ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._has_ended.wait(_GRACE_S)

    def lost(self) -> AforeError:
        """The error that describes how the child ended."""
        if self.error is not None:
            return self.error
        status = self.wait(1.0)
        how = f"exited with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return PeerLost(f"{self.name} {how}")


class Launcher:
    """The process that forks all children, and reaps them.

    Args:
        children: what to start.
        moe, tier: configurations.
        segment: the tier's shared memory.
        weight_segments: the workers' weight memory.
        store_port: of the workers' rendezvous store.
    """

    def __init__(
        self,
        children: list[Child],
        moe: MoEConfig,
        tier: TierConfig,
        segment: Segment,
        weight_segments: list[Segment],
        store_port: int,
    ) -> None:
        self._children = children
        self._socket, launcher_end = socket.socketpair()
        weight_fds = [s.fd for s in weight_segments]
        child_fds = [child.child_end.fileno() for child in children]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "afore_kernels.runtime.entry", str(launcher_end.fileno())],
            pass_fds=[launcher_end.fileno(), segment.fd, *weight_fds, *child_fds],
            stdin=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )
        launcher_end.close()
        for child in children:
            child.child_end.close()
        _send(
            self._socket,
            {
                "moe": moe.to_json(),
                "tier": tier.to_json(),
                "segment_fd": segment.fd,
                "weight_fds": weight_fds,
                "store_port": store_port,
                "children": [
                    {"role": c.role, "name": c.name, "worker": c.worker, "control_fd": fd}
                    for c, fd in zip(children, child_fds)
                ],
            },
        )
        self._reader = threading.Thread(target=self._read, name="afore-launcher", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the launcher, which ends whatever still runs, and reap it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(2 * _GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        by_name = {child.name: child for child in self._children}
        for message in _messages(self._socket):
            child = by_name[message["name"]]
            if "pid" in message:
                child.pid = message["pid"]
            else:
                child.ended(message["status"])
        for child in self._children:  # the launcher is gone, and with it whoever reaps them
            child.kill()
            child.ended(None)


def run_launcher(
    control_fd: int, mains: dict[str, Callable[[ChildContext, Callable[[], None]], None]]
) -> None:
    """Fork the children the starting process asks for, and report their ends.

    Args:
        control_fd: socket to the starting process; its end of file ends everything.
        mains: the `main(context, report_ready)` of each role.
    """
    control = socket.socket(fileno=control_fd)
    messages = _messages(control)
    message = next(messages, None)
    if message is None:
        return
    control_fds = [child["control_fd"] for child in message["children"]]
    running: dict[int, tuple[int, str]] = {}
    selector = selectors.DefaultSelector()
    for child in message["children"]:
        pid = os.fork()
        if pid == 0:
            selector.close()
            control.close()
            for fd in control_fds:
                if fd != child["control_fd"]:
                    os.close(fd)  # else its end of file would never come
            _run_child(child, message, mains[child["role"]])
        pidfd = os.pidfd_open(pid)
        running[pidfd] = pid, child["name"]
        selector.register(pidfd, selectors.EVENT_READ)
        _send(control, {"name": child["name"], "pid": pid})
    for fd in control_fds:
        os.close(fd)
    selector.register(control, selectors.EVENT_READ)
    is_ending = False
    while running:
        ready = selector.select(_GRACE_S if is_ending else None)
        if is_ending and not ready:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
        for key, _ in ready:
            if key.fileobj is control:
                selector.unregister(control)
                is_ending = True
                continue
            assert isinstance(key.fileobj, int)
            selector.unregister(key.fileobj)
            pid, name = running.pop(key.fileobj)
            os.close(key.fileobj)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _send(control, {"name": name, "status": status})


def _run_child(
    child: Message, message: Message, main: Callable[[ChildContext, Callable[[], None]], None]
) -> None:
    """Run a child's main in the forked process, report how it ended, and exit.

    A stop of the tier ends `main` by `PeerLost`, which is a clean exit. The death of the starting
    process fails the tier, so that clients are told, and ends this one.
    """
    name = child["name"]
    control = socket.socket(fileno=child["control_fd"])
    memory = TierMemory(
        MoEConfig.from_json(message["moe"]),
        TierConfig.from_json(message["tier"]),
        Segment.open(message["segment_fd"]),
    )

    def watch_parent() -> None:
        try:
            next(_messages(control), None)
            memory.fail(PeerLost("the process that started the tier is gone"))
        finally:
            os._exit(1)

    def report_ready() -> None:
        _send(control, {"ready": name})

    threading.Thread(target=watch_parent, name="watch-parent", daemon=True).start()
    try:
        segments = [Segment.open(fd) for fd in message["weight_fds"]]
        main(ChildContext(memory, child["worker"], segments, message["store_port"]), report_ready)
        os._exit(0)
    except AforeError as error:
        if int(memory.state[0]) == STOPPING:
            os._exit(0)
        _send(control, {"error": type(error).__name__, "message": str(error)})
        os._exit(1)
    except BaseException as error:
        _send(control, {"error": "PeerLost", "message": f"{name} failed: {error!r}"})
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def reported_error(message: Message) -> AforeError | None:
    """The error in a child's message, if it is one."""
    return decode_error(json.dumps(message).encode()) if "error" in message else None


def _send(connection: socket.socket, message: Message) -> None:
    with suppress(OSError):  # the other side is gone, which whoever watches the socket sees
        connection.sendall(json.dumps(message).encode() + b"\n")


def _messages(connection: socket.socket) -> Iterator[Message]:
    """JSON lines until the end of file; bytes are read one by one, so nothing is read ahead."""
    while True:
        line = bytearray()
        while not line.endswith(b"\n"):
            try:
                byte = connection.recv(1)
            except ConnectionError:
                return
            if not byte or len(line) > _MAX_LINE:
                return
            line += byte
        yield json.loads(line)
