"""The checking device: what orders accesses, and that whatever is not ordered is a race."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afore_kernels.runtime.devices import Buffer, Stream
from afore_kernels.runtime.devices.checking import CheckingDevice
from afore_kernels.runtime.devices.cpu import CpuEvent
from afore_kernels.runtime.devices.schedule import Deadlock

SEEDS = range(50)
SLOT, OTHER_SLOT = Buffer("slot", (0, 0, 1)), Buffer("slot", (0, 0, 2))


def nothing() -> None:
    """Work without effect."""


def site_of(scenario: Callable, mark: str) -> str:
    """The call site of the line of `scenario` that ends with `# mark`."""
    lines, start = inspect.getsourcelines(scenario)
    for number, line in enumerate(lines, start):
        if definition := re.match(r" *def (\w+)", line):
            function = definition[1]
        if line.rstrip().endswith(f"# {mark}"):
            return f"{Path(__file__).name}:{number} in {function}"
    raise AssertionError(f"no line is marked {mark}")


def every_seed(test: Callable[[CheckingDevice], None]) -> Callable[[], None]:
    """Run `test` with a device of each seed."""

    def run() -> None:
        for seed in SEEDS:
            test(CheckingDevice(seed))

    return run


# Every scenario makes two accesses and orders them only if asked to; A and B mark those that race.


def order_of_stream(device, is_ordered):
    first = device.stream("first")
    second = first if is_ordered else device.stream("second")

    def host():
        first.submit(nothing, writes=[SLOT])  # A
        second.submit(nothing, writes=[SLOT])  # B

    device.run({"host": host})


def order_of_host(device, is_ordered):
    def read():
        device.touch(reads=[SLOT])  # A

    def write():
        device.touch(writes=[SLOT])  # B

    def both():
        read()
        write()

    device.run({"both": both} if is_ordered else {"read": read, "write": write})


def order_of_submission(device, is_ordered):
    """Host run-ahead: the staging buffer is overwritten while queued work has yet to read it."""
    stream = device.stream("stream")

    def host():
        if is_ordered:
            device.touch(writes=[SLOT])
        stream.submit(nothing, reads=[SLOT])  # A
        if not is_ordered:
            device.touch(writes=[SLOT])  # B

    device.run({"host": host})


def order_of_stream_wait(device, is_ordered):
    copies, model = device.stream("copies"), device.stream("model")

    def host():
        copies.submit(nothing, writes=[SLOT])  # A
        event = copies.record_event()
        if is_ordered:
            model.wait_event(event)
        model.submit(nothing, reads=[SLOT])  # B

    device.run({"host": host})


def order_of_event_position(device, is_ordered):
    """An event covers the work submitted before it, and no later work."""
    copies, model = device.stream("copies"), device.stream("model")

    def host():
        event = device.event()
        if not is_ordered:
            copies.record_event(event)
        copies.submit(nothing, writes=[SLOT])  # A
        if is_ordered:
            copies.record_event(event)
        model.wait_event(event)
        model.submit(nothing, reads=[SLOT])  # B

    device.run({"host": host})


def order_of_wait_position(device, is_ordered):
    """A wait holds the work submitted after it, and no earlier work."""
    copies, model = device.stream("copies"), device.stream("model")

    def host():
        copies.submit(nothing, writes=[SLOT])  # A
        event = copies.record_event()
        if is_ordered:
            model.wait_event(event)
        model.submit(nothing, reads=[SLOT])  # B
        model.wait_event(event)

    device.run({"host": host})


def order_through_streams(device, is_ordered):
    """Order is transitive: two streams and the host of another stream's work."""
    streams = [device.stream(name) for name in "abc"]

    def host():
        streams[0].submit(nothing, reads=[SLOT])  # A
        streams[1].wait_event(streams[0].record_event())
        event = streams[1].record_event()
        if is_ordered:
            event.wait(1.0)
        streams[2].submit(nothing, writes=[SLOT])  # B

    device.run({"host": host})


def order_of_host_wait(device, is_ordered):
    """The staging buffer is overwritten after the host has waited for the work that reads it."""
    stream = device.stream("stream")

    def host():
        stream.submit(nothing, reads=[SLOT])  # A
        event = stream.record_event()
        if is_ordered:
            assert event.wait(1.0)
        device.touch(writes=[SLOT])  # B

    device.run({"host": host})


def order_of_host_poll(device, is_ordered):
    stream = device.stream("stream")

    def host():
        stream.submit(nothing, reads=[SLOT])  # A
        event = stream.record_event()
        while is_ordered and not event.is_done():
            pass
        device.touch(writes=[SLOT])  # B

    device.run({"host": host})


def order_of_close(device, is_ordered):
    stream = device.stream("stream")

    def host():
        stream.submit(nothing, writes=[SLOT])  # A
        if is_ordered:
            stream.close()
        device.touch(reads=[SLOT])  # B

    device.run({"host": host})


def order_of_flag(device, is_ordered):
    flags = set()

    def writer():
        device.touch(writes=[SLOT])  # A
        device.release("flag")
        flags.add("flag")

    def reader():
        device.wait_until(lambda: "flag" in flags, "the flag")
        if is_ordered:
            device.acquire("flag")
        device.touch(reads=[SLOT])  # B

    device.run({"writer": writer, "reader": reader})


def order_of_release(device, is_ordered):
    """A release covers what its host did before, and nothing later."""
    flags = set()

    def writer():
        if is_ordered:
            device.touch(writes=[SLOT])
        device.release("flag")
        flags.add("flag")
        if not is_ordered:
            device.touch(writes=[SLOT])  # A

    def reader():
        device.wait_until(lambda: "flag" in flags, "the flag")
        device.acquire("flag")
        device.touch(reads=[SLOT])  # B

    device.run({"writer": writer, "reader": reader})


def order_of_both_releases(device, is_ordered):
    """An acquire is ordered after every release of its key, and of no other key."""
    flags = set()

    def writer(name, key, buffer):
        device.touch(writes=[buffer])  # A
        device.release(key)
        flags.add(name)

    def reader():
        device.wait_until(lambda: len(flags) == 2, "both flags")
        device.acquire("flag")
        device.touch(reads=[SLOT, OTHER_SLOT])  # B

    other = "flag" if is_ordered else "other flag"
    device.run(
        {
            "one": functools.partial(writer, "one", "flag", SLOT),
            "two": functools.partial(writer, "two", other, OTHER_SLOT),
            "reader": reader,
        }
    )


def order_of_flag_set_by_work(device, is_ordered):
    """Work of a stream may release a key: for all that its stream did before."""
    stream = device.stream("stream")
    flags = set()

    def set_flag():
        device.release("flag")
        flags.add("flag")

    def host():
        stream.submit(nothing, writes=[SLOT])  # A
        stream.submit(set_flag)
        device.wait_until(lambda: "flag" in flags, "the flag")
        if is_ordered:
            device.acquire("flag")
        device.touch(reads=[SLOT])  # B

    device.run({"host": host})


def order_of_recording(device, is_ordered):
    """An event comes after the host recorded it, for streams that other hosts submit to, too."""
    ours, theirs = device.stream("ours"), device.stream("theirs")
    event = device.event()

    def recorder():
        device.touch(writes=[SLOT])  # A
        ours.record_event(event)

    def waiter():
        if is_ordered:
            theirs.wait_event(event)
        theirs.submit(nothing, reads=[SLOT])  # B

    device.run({"recorder": recorder, "waiter": waiter})


def order_of_run(device, is_ordered):
    """A run begins after what the main thread did before, which goes on after all that ran."""
    stream = device.stream("stream")

    def submit():
        stream.submit(nothing, writes=[SLOT])  # A

    def touch():
        device.touch(writes=[SLOT])  # B

    if is_ordered:
        touch()
        device.run({"submit": submit})
        touch()
        device.run({"submit": submit})
    else:
        submit()
        touch()
        stream.close()


SCENARIOS = [value for name, value in list(globals().items()) if name.startswith("order_")]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_orders_accesses(scenario):
    for seed in SEEDS:
        device = CheckingDevice(seed)
        scenario(device, True)
        device.assert_no_races()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_it_every_schedule_reports_the_race(scenario):
    sites = {site_of(scenario, "A"), site_of(scenario, "B")}
    for seed in SEEDS:
        device = CheckingDevice(seed)
        scenario(device, False)
        (race,) = device.races
        assert {race.first.call_site, race.second.call_site} == sites
        assert "writes" in {race.first.verb, race.second.verb}


class Exchange:
    """Workers that sum their partial outputs: each publishes its own, then reads everybody's.

    Args:
        device: where they run.
        num_workers: hosts, with a stream each.
        forgets: the pair (worker, other) whose event the worker does not wait for.
    """

    def __init__(
        self, device: CheckingDevice, num_workers: int, forgets: tuple[int, int] | None = None
    ) -> None:
        self.device = device
        self.num_workers = num_workers
        self.forgets = forgets
        self.streams = [device.stream(f"model {worker}") for worker in range(num_workers)]
        self.events = [device.event() for _ in range(num_workers)]
        self.partials = torch.zeros(num_workers, 4)
        self.sums = torch.zeros(num_workers, 4)

    def run(self) -> None:
        self.device.run(
            {f"worker {w}": functools.partial(self.work, w) for w in range(self.num_workers)}
        )

    def work(self, worker: int) -> None:
        stream, partial = self.streams[worker], Buffer("partial", (worker,))
        stream.submit(lambda: self.partials[worker].fill_(2.0**worker), writes=[partial])  # A
        stream.record_event(self.events[worker])
        for other, event in enumerate(self.events):
            if (worker, other) != self.forgets:
                stream.wait_event(event)
        reads = [Buffer("partial", (other,)) for other in range(self.num_workers)]
        stream.submit(lambda: self.sums[worker].copy_(self.partials.sum(0)), reads=reads)  # B


@every_seed
def test_three_streams_meet_at_events_recorded_later(device):
    exchange = Exchange(device, num_workers=3)
    exchange.run()
    device.assert_no_races()
    assert exchange.sums.eq(7.0).all()


def test_a_forgotten_event_is_one_race_between_the_two_workers():
    sums = set()
    for seed in SEEDS:
        exchange = Exchange(CheckingDevice(seed), num_workers=3, forgets=(2, 0))
        exchange.run()
        (race,) = exchange.device.races
        assert race.buffer == Buffer("partial", (0,))
        assert {race.first[:2], race.second[:2]} == {("model 0", "writes"), ("model 2", "reads")}
        sums.add(float(exchange.sums[2, 0]))
    assert sums == {6.0, 7.0}, "the read must really run before the write, and after it"


def test_the_report_names_buffer_actors_and_call_sites():
    device = CheckingDevice(0)
    order_of_stream_wait(device, False)
    first, second = device.races[0].first, device.races[0].second
    with pytest.raises(AssertionError) as failure:
        device.assert_no_races()
    assert str(failure.value) == (
        f"1 races\n  slot[0, 0, 1]: {first.actor} {first.verb} at {first.call_site}, "
        f"{second.actor} {second.verb} at {second.call_site}"
    )
    assert {first.actor, second.actor} == {"copies", "model"}


def test_a_pair_of_call_sites_is_reported_once_per_buffer():
    device = CheckingDevice(0)
    streams = [device.stream(name) for name in "abc"]

    def host():
        for stream in streams:
            for _ in range(3):
                stream.submit(nothing, writes=[SLOT, OTHER_SLOT])

    device.run({"host": host})
    assert sorted(race.buffer for race in device.races) == [SLOT, OTHER_SLOT]


@every_seed
def test_reads_and_other_buffers_do_not_conflict(device):
    streams = [device.stream(name) for name in "ab"]

    def host():
        for index, stream in enumerate(streams):
            stream.submit(nothing, reads=[SLOT], writes=[Buffer("slot", (1, 0, index))])

    device.run({"host": host})
    device.assert_no_races()


@every_seed
def test_an_access_races_with_every_other_one_not_only_the_last(device):
    """An ordered write in between hides nothing: both earlier call sites are reported."""
    stream, other = device.stream("stream"), device.stream("other")

    def host():
        stream.submit(nothing, reads=[SLOT])
        stream.submit(nothing, writes=[SLOT])
        other.submit(nothing, writes=[SLOT])

    device.run({"host": host})
    assert len(device.races) == 2


def trace_of(seed: int) -> list[str]:
    """The order of all that three hosts and their streams do."""
    device = CheckingDevice(seed)
    trace = []

    def host(name: str, stream: Stream) -> None:
        for step in range(6):
            device.touch()
            trace.append(f"host {name} {step}")
            stream.submit(lambda step=step: trace.append(f"stream {name} {step}"))

    device.run({name: functools.partial(host, name, device.stream(name * 2)) for name in "abc"})
    assert len(trace) == 36
    return trace


def test_a_seed_repeats_its_schedule():
    for seed in range(10):
        assert trace_of(seed) == trace_of(seed)


def test_seeds_give_different_schedules():
    assert len({tuple(trace_of(seed)) for seed in SEEDS}) == len(SEEDS)


def largest_lead_of_host(seed: int) -> int:
    """How far a host that submits 20 pieces of work gets ahead of the stream."""
    device = CheckingDevice(seed)
    stream = device.stream("stream")
    num_run, leads = [], []

    def host():
        for num_submitted in range(1, 21):
            stream.submit(lambda: num_run.append(1))
            device.touch()
            leads.append(num_submitted - len(num_run))

    device.run({"host": host})
    return max(leads)


def test_schedules_reach_both_extremes():
    """The host submits everything before any work runs; every work runs before the next submit."""
    leads = [largest_lead_of_host(seed) for seed in range(200)]
    assert sum(lead == 20 for lead in leads) >= 10
    assert sum(lead <= 1 for lead in leads) >= 10


def num_polls(seed: int) -> int:
    """How often a host asks whether the stream has passed an event."""
    device = CheckingDevice(seed)
    stream = device.stream("stream")
    polls = []

    def host():
        event = stream.record_event()
        while not event.is_done():
            polls.append(1)

    device.run({"host": host})
    return len(polls)


def test_no_priority_lasts_so_polling_ends():
    assert 100 < max(num_polls(seed) for seed in range(200)) < 2000


def test_a_condition_has_to_hold_only_once():
    device = CheckingDevice(0)
    flags = ["initial"]

    def host():
        device.wait_until(lambda: bool(flags), "a flag")
        flags.clear()
        device.touch()

    device.run({"host": host})


@every_seed
def test_work_of_main_runs_only_while_it_waits(device):
    stream = device.stream("stream")
    source, target = torch.arange(4.0), torch.zeros(4)
    stream.submit(lambda: target.copy_(source))
    event = stream.record_event()
    assert not event.is_done()
    assert target.eq(0.0).all()
    assert event.wait(0.0)
    assert event.is_done()
    assert torch.equal(target, source)


def test_a_wait_of_main_runs_some_of_the_unrelated_work():
    assert {unrelated_work_of_wait(seed) for seed in SEEDS} == {0, 1, 2, 3}


def unrelated_work_of_wait(seed: int) -> int:
    """How many of three pieces of another stream's work run while the main thread waits."""
    device = CheckingDevice(seed)
    waited, other = device.stream("waited"), device.stream("other")
    ran = []
    for index in range(3):
        other.submit(functools.partial(ran.append, index))
    waited.record_event().wait(1.0)
    num_run = len(ran)
    other.close()
    assert ran == [0, 1, 2]
    return num_run


def deadlock_of(device: CheckingDevice, **hosts: Callable[[], None]) -> str:
    """The report of a run that cannot go on."""
    num_threads = threading.active_count()
    with pytest.raises(Deadlock) as deadlock:
        device.run(hosts)
    assert threading.active_count() == num_threads
    return str(deadlock.value)


def test_a_deadlock_names_who_waits_for_what():
    device = CheckingDevice(0)
    a, b = device.stream("stream a"), device.stream("stream b")
    device.stream("idle")
    never = device.event()

    def cross():
        event_a, event_b = device.event(), device.event()
        a.wait_event(event_b)  # A
        b.wait_event(event_a)  # B
        a.record_event(event_a)  # recorded A
        b.record_event(event_b)  # recorded B

    def wait():
        never.wait(1.0)  # never

    def poll():
        device.wait_until(lambda: False, "the reply of target 3")  # polled

    site = functools.partial(site_of, test_a_deadlock_names_who_waits_for_what)
    assert deadlock_of(device, cross=cross, wait=wait, poll=poll).split("\n  ") == [
        "nothing can go on",
        "main waits for the hosts and streams to end",
        f"wait waits for an event that nobody has recorded, at {site('never')}",
        f"poll waits for the reply of target 3, at {site('polled')}",
        f"stream a waits for the event of stream b (recorded at {site('recorded B')}), "
        f"at {site('A')}",
        f"stream b waits for the event of stream a (recorded at {site('recorded A')}), "
        f"at {site('B')}",
    ]


@every_seed
def test_streams_that_cannot_be_drained_are_a_deadlock(device):
    stream = device.stream("stream")
    report = deadlock_of(device, host=lambda: stream.wait_event(device.event()))
    assert "stream waits for an event that nobody has recorded" in report


def test_main_notices_a_deadlock_and_can_go_on():
    device = CheckingDevice(0)
    stream = device.stream("stream")
    event = device.event()
    with pytest.raises(Deadlock, match="main waits for an event that nobody has recorded"):
        event.wait(1.0)
    stream.record_event(event)
    assert event.wait(1.0)


@every_seed
def test_an_error_of_a_host_ends_every_host(device):
    event, started, unwound = device.event(), [], []

    def fail():
        device.wait_until(lambda: len(started) == 2, "the others to start")
        raise KeyError("the error")

    def wait():
        started.append("wait")
        try:
            event.wait(1.0)
        finally:
            unwound.append("wait")

    def run_on():
        started.append("run on")
        try:
            while True:
                device.touch()
        finally:
            unwound.append("run on")
            device.touch()  # ends, too

    num_threads = threading.active_count()
    with pytest.raises(KeyError, match="the error"):
        device.run({"wait": wait, "fail": fail, "run on": run_on})
    assert threading.active_count() == num_threads
    assert sorted(unwound) == ["run on", "wait"]
    device.run({"after": device.touch})


@every_seed
def test_the_first_error_of_hosts_is_raised(device):
    """A host that has not started by then never does."""
    event = device.event()
    failed, started_after = [], []

    def fail():
        failed.append(True)
        raise KeyError("first")

    def wait():
        started_after.extend(failed)
        try:
            event.wait(1.0)
        finally:
            raise ValueError("second")

    num_threads = threading.active_count()
    with pytest.raises(KeyError, match="first"):
        device.run({"wait": wait, "fail": fail})
    assert threading.active_count() == num_threads
    assert not started_after


def test_an_error_of_a_condition_ends_the_run():
    device = CheckingDevice(0)

    def wait():
        device.wait_until(lambda: 1 // 0 == 0, "a fault")

    num_threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        device.run({"wait": wait, "other": device.touch})
    assert threading.active_count() == num_threads


@every_seed
def test_a_host_of_a_later_run_is_another_one(device):
    """What others know of the first host with a name does not order them after the second."""

    def fail():
        for _ in range(3):
            device.touch(writes=[OTHER_SLOT])
        raise KeyError

    def write():
        device.touch(writes=[SLOT])

    def write_too():
        device.touch(writes=[SLOT])

    with pytest.raises(KeyError):
        device.run({"host": fail})
    device.run({"host": write, "other": write_too})
    assert len(device.races) == 1


@every_seed
def test_an_error_of_work_is_raised_by_later_events_of_every_stream_behind_it(device):
    stream, behind = device.stream("stream"), device.stream("behind")
    ran = []

    def fail():
        raise KeyError("the error")

    def host():
        stream.submit(lambda: ran.append("before"))
        before = stream.record_event()
        stream.submit(fail)
        stream.wait_event(device.event())  # skipped, too
        after = stream.record_event()
        stream.submit(lambda: ran.append("after"))
        behind.wait_event(after)
        behind.submit(lambda: ran.append("behind"))
        assert before.wait(1.0)
        for event in (after, behind.record_event()):
            with pytest.raises(KeyError, match="the error"):
                event.wait(1.0)

    device.run({"host": host})
    assert ran == ["before"]


def test_an_error_of_work_that_no_event_raised_ends_the_run():
    device = CheckingDevice(0)
    stream = device.stream("stream")
    flags = []

    def fail():
        raise KeyError("the error")

    def submit():
        stream.submit(fail)
        stream.submit(lambda: flags.append("set"))
        stream.close()

    with pytest.raises(KeyError, match="the error"):
        device.run({"submit": submit})
    device.run({})  # raised once

    def submit_and_wait():
        device.stream("other").submit(fail)
        device.wait_until(lambda: bool(flags), "the flag that skipped work would set")

    with pytest.raises(KeyError, match="the error"):
        device.run({"host": submit_and_wait})


def test_misuse_is_refused():
    device = CheckingDevice(0)
    stream = device.stream("stream")
    event = stream.record_event()
    with pytest.raises(
        ValueError, match=r"the event of stream \(recorded at .*\) is recorded again"
    ):
        stream.record_event(event)
    with pytest.raises(TypeError, match="cannot wait for"):
        stream.wait_event(CpuEvent())
    with pytest.raises(AssertionError, match="'flag' was acquired before it was released"):
        device.acquire("flag")
    with pytest.raises(RuntimeError, match="must not use the device"):
        device.wait_until(event.is_done, "an event")
    for name in ("stream", "main"):
        with pytest.raises(ValueError, match="is taken"):
            device.stream(name)
        with pytest.raises(ValueError, match="is taken"):
            device.run({name: nothing})
    with pytest.raises(ValueError, match="is taken"):
        device.run({"host": lambda: device.stream("host")})
    stream.submit(lambda: device.event().wait(1.0))
    with pytest.raises(RuntimeError, match="work of stream stream waits for an event"):
        stream.record_event().wait(1.0)
