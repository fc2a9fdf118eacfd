"""Vector clocks, and the races that they prove: conflicting accesses that nothing orders.

Every host and stream is an actor with a clock, which says how much of every actor's past is certain
to be over. Two accesses are ordered if the later one's clock covers the earlier one's tick; this
holds or not whichever of them happened to run first.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from os.path import basename, dirname, join
from types import CodeType
from typing import NamedTuple

from afore_kernels.runtime.devices import Buffer

Snapshot = tuple[str, dict[str, int]]
"""(actor, its clock's ticks at some moment)."""

_OWN_FOLDER = join(dirname(__file__), "")


class Clock:
    """What one actor knows: for every actor, how many of its ticks happened before.

    Every change ticks, so whoever knows an actor's tick knows all that the actor knew then.
    """

    __slots__ = ("_snapshot", "actor", "ticks")

    def __init__(self, actor: str) -> None:
        self.actor = actor
        self.ticks = {actor: 0}
        self._snapshot: Snapshot | None = None

    def tick(self) -> int:
        """Begin the actor's next step, which earlier snapshots do not cover; returns its tick."""
        self._snapshot = None
        self.ticks[self.actor] += 1
        return self.ticks[self.actor]

    def snapshot(self) -> Snapshot:
        """What the actor has done and known so far."""
        if self._snapshot is None:
            self._snapshot = (self.actor, self.ticks.copy())
        return self._snapshot

    def join(self, snapshot: Snapshot) -> None:
        """Order the actor's next steps after all that `snapshot` covers."""
        actor, ticks = snapshot
        mine = self.ticks
        if mine.get(actor, -1) >= ticks[actor]:
            return
        for other, tick in ticks.items():
            if mine.get(other, -1) < tick:
                mine[other] = tick
        self.tick()


class CallSite:
    """A place in the code; formatted only when it is reported."""

    __slots__ = ("_code", "_instruction")

    def __init__(self, code: CodeType, instruction: int) -> None:
        self._code = code
        self._instruction = instruction

    def __str__(self) -> str:
        line = next(
            line for start, stop, line in self._code.co_lines() if start <= self._instruction < stop
        )
        return f"{basename(self._code.co_filename)}:{line} in {self._code.co_name}"


class Access(NamedTuple):
    """One side of a race.

    Attributes:
        actor: name of the host or stream.
        verb: `"reads"` or `"writes"`.
        call_site: where the access was submitted, as `"file.py:123 in function"`.
    """

    actor: str
    verb: str
    call_site: str

    def __str__(self) -> str:
        return f"{self.actor} {self.verb} at {self.call_site}"


class Race(NamedTuple):
    """Two accesses to one buffer, at least one a write, that nothing orders.

    Attributes:
        buffer: what both access.
        first: the access that happened to run first.
        second: the other.
    """

    buffer: Buffer
    first: Access
    second: Access

    def __str__(self) -> str:
        kind, key = self.buffer
        return f"{kind}{list(key)}: {self.first}, {self.second}"


_Accesses = dict[tuple[str, CallSite], int]
"""(actor, call site) -> tick of its latest access."""


class _History:
    """All accesses to one buffer.

    Only the latest of each actor and call site is kept: who comes after it comes after the earlier.
    """

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: _Accesses = {}
        self.writes: _Accesses = {}


class AccessLog:
    """Every access so far, and the races among them: one per buffer and pair of call sites."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._reported: set[tuple[Buffer, frozenset[str]]] = set()
        self._histories: defaultdict[Buffer, _History] = defaultdict(_History)
        self._sites: dict[tuple[int, int], CallSite] = {}

    def call_site(self) -> CallSite:
        """Where the device was called: the nearest caller outside of its folder."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_OWN_FOLDER):
            assert frame.f_back is not None
            frame = frame.f_back
        # A code object's hash reads all of its constants; its id is safe while the site holds it.
        key = (id(frame.f_code), frame.f_lasti)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = CallSite(frame.f_code, frame.f_lasti)
        return site

    def record(
        self, clock: Clock, site: CallSite, reads: Iterable[Buffer], writes: Iterable[Buffer]
    ) -> None:
        """Note that the actor of `clock` accesses buffers now, as its next step."""
        tick, key = clock.tick(), (clock.actor, site)
        for buffer in reads:
            history = self._histories[buffer]
            self._check(buffer, history.writes, "writes", clock, "reads", site)
            history.reads[key] = tick
        for buffer in writes:
            history = self._histories[buffer]
            self._check(buffer, history.writes, "writes", clock, "writes", site)
            self._check(buffer, history.reads, "reads", clock, "writes", site)
            history.writes[key] = tick

    def _check(
        self,
        buffer: Buffer,
        earlier: _Accesses,
        earlier_verb: str,
        clock: Clock,
        verb: str,
        site: CallSite,
    ) -> None:
        known = clock.ticks
        for (actor, earlier_site), tick in earlier.items():
            if known.get(actor, 0) < tick:
                first = Access(actor, earlier_verb, str(earlier_site))
                second = Access(clock.actor, verb, str(site))
                key = (buffer, frozenset((first.call_site, second.call_site)))
                if key not in self._reported:
                    self._reported.add(key)
                    self.races.append(Race(buffer, first, second))
