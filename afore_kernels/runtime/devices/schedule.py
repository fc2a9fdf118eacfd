"""Random schedules: which of several hosts and streams goes on next.

Hosts are threads that pass a baton, so exactly one runs at any time, and a seed repeats its
schedule. Whoever holds the baton runs the work of streams as well; the baton changes hands only
from host to host.
"""

from __future__ import annotations

import math
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from afore_kernels.runtime.devices.clocks import Clock

_SPREADS = (0.0, 1.5, 6.0)
"""Standard deviations of an actor's log weight: from equal turns to almost strict priorities."""

_REDRAW_PROBABILITY = 1 / 64
"""How often, per step, the weight of some actor changes; it also ends a host's polling loop."""


class Deadlock(AssertionError):
    """No host and no stream can go on."""


class _Stopped(BaseException):
    """Ends a host after another one has failed."""


class Actor(ABC):
    """Something that runs in program order: a host or a stream.

    Attributes:
        name: of this actor alone.
        clock: what it knows of the others.
        weight: its share of the turns.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Clock(name)
        self.weight = 1.0

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it has something to run that waits for nothing."""

    @abstractmethod
    def awaited(self) -> str:
        """What it waits for; empty if it has nothing to run."""


class StreamActor(Actor):
    """A stream, whose work the holder of the baton runs."""

    @abstractmethod
    def step(self) -> None:
        """Run the head of the queue."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether its queue is."""


class Host(Actor):
    """A thread of a program that uses the device.

    Attributes:
        baton: held while the host may not run.
        condition: what the host needs to go on, if anything.
        awaiting: the condition in words: what, and perhaps where.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.condition: Callable[[], bool] | None = None
        self.awaiting: tuple[object, ...] = ()

    def is_ready(self) -> bool:
        """Whether its condition holds."""
        return self.condition is None or self.condition()

    def awaited(self) -> str:
        """Its condition."""
        return ", at ".join(map(str, self.awaiting))


class Schedule:
    """Picks, step by step, who goes on.

    Args:
        seed: of every choice.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._spread = self._random.choice(_SPREADS)
        self._main = Host("main")
        self._hosts: list[Host] = []  # of the run in progress, until they return
        self._streams: list[StreamActor] = []
        self._current: Actor | None = self._main
        self._failure: BaseException | None = None
        self._draw_weight(self._main)

    def add_stream(self, stream: StreamActor) -> None:
        """Let `stream` take part.

        Raises:
            ValueError: if its name is in use.
        """
        self._admit(stream)
        self._streams.append(stream)

    def current(self) -> Actor:
        """Who is running: a host, or the stream whose work runs.

        Raises:
            RuntimeError: if nobody is, as a waiting host's condition is being evaluated.
        """
        if self._current is None:
            raise RuntimeError("a condition that a host waits for must not use the device")
        return self._current

    def point(self) -> Actor:
        """Let others go on before the caller does, who is returned.

        The work of a stream goes on at once, and so does the thread outside of `run`.
        """
        actor = self.current()
        if isinstance(actor, Host) and actor is not self._main:
            self._pass_on(actor)
        return actor

    def wait_until(self, condition: Callable[[], bool], *awaiting: object) -> Actor:
        """Let others go on until `condition` holds; returns the caller.

        Args:
            condition: must not use the device.
            awaiting: the condition in words: what, and perhaps where.

        Raises:
            Deadlock: if it never will.
            RuntimeError: if the caller is the work of a stream.
        """
        host = self.current()
        if not isinstance(host, Host):
            raise RuntimeError(f"work of stream {host.name} waits for {awaiting[0]}")
        host.condition, host.awaiting = condition, awaiting
        try:
            self._pass_on(host)
        finally:
            host.condition = None
        return host

    def run(self, bodies: Mapping[str, Callable[[], None]]) -> None:
        """Run hosts and streams until every host has returned and every queue is empty.

        Hosts begin after what the caller did before, who goes on after all that ran.

        Raises:
            Deadlock: if that never happens.
            BaseException: what the first host to fail raised.
        """
        threads, hosts = [], []
        for name, body in bodies.items():
            host = Host(name)
            self._admit(host)
            host.clock.join(self._main.clock.snapshot())
            hosts.append(host)
            threads.append(threading.Thread(target=self._live, args=(host, body), name=name))
        self._hosts = hosts.copy()
        for thread in threads:
            thread.start()
        try:
            self.wait_until(self._is_over, "the hosts and streams to end")
        except _Stopped:
            failure, self._failure = self._failure, None
            assert failure is not None
            raise failure from None
        finally:
            for thread in threads:
                thread.join()
            for actor in (*hosts, *self._streams):
                self._main.clock.join(actor.clock.snapshot())

    def _is_over(self) -> bool:
        return not self._hosts and all(stream.is_empty() for stream in self._streams)

    def _live(self, host: Host, body: Callable[[], None]) -> None:
        """The life of a host's thread."""
        host.baton.acquire()
        try:
            if self._failure is None:
                body()
        except _Stopped:
            pass
        except BaseException as error:
            if self._failure is None:
                self._failure = error
        self._hosts.remove(host)
        self._wake(self._successor())

    def _successor(self) -> Host:
        """Who goes on after a host has ended: after a failure, every host in turn, to end too."""
        if self._failure is None:
            try:
                return self._next_host()
            except BaseException as error:  # a deadlock, or a condition failed
                self._failure = error
        return self._hosts[0] if self._hosts else self._main

    def _pass_on(self, host: Host) -> None:
        """Let others go on until it is the turn of `host`, which is running."""
        if self._failure is None:
            try:
                successor = self._next_host()
            except BaseException:
                self._current = host
                raise
            if successor is not host:
                self._wake(successor)
                host.baton.acquire()
        if self._failure is not None:
            raise _Stopped

    def _wake(self, host: Host) -> None:
        self._current = host
        host.baton.release()

    def _next_host(self) -> Host:
        """Run streams until it is a host's turn."""
        while True:
            self._current = None
            self._current = actor = self._pick()
            if isinstance(actor, Host):
                return actor
            assert isinstance(actor, StreamActor)
            actor.step()

    def _actors(self) -> list[Actor]:
        return [self._main, *self._hosts, *self._streams]

    def _pick(self) -> Actor:
        actors = self._actors()
        ready = [actor for actor in actors if actor.is_ready()]
        if not ready:
            waits = [
                f"{actor.name} waits for {what}" for actor in actors if (what := actor.awaited())
            ]
            raise Deadlock("\n  ".join(["nothing can go on", *waits]))
        if self._random.random() < _REDRAW_PROBABILITY:
            self._draw_weight(self._random.choice(actors))
        turn = self._random.random() * sum([actor.weight for actor in ready])
        for actor in ready:
            turn -= actor.weight
            if turn < 0.0:
                break
        return actor

    def _admit(self, actor: Actor) -> None:
        if any(actor.name == other.name for other in self._actors()):
            raise ValueError(f"the name {actor.name!r} is taken")
        self._draw_weight(actor)

    def _draw_weight(self, actor: Actor) -> None:
        actor.weight = math.exp(self._spread * self._random.gauss(0.0, 1.0))
