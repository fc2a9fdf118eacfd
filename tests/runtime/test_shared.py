from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore_kernels.runtime.shared import (
    CACHE_LINE,
    LINE_WORDS,
    READY,
    RUNNING,
    SLEEP_SLICE_NS,
    STOPPED,
    STOPPING,
    TIMED_OUT,
    Field,
    Segment,
    advance,
    bells,
    compiled,
    count,
    counters,
    fetch_add,
    get_word,
    layout_bytes,
    map_fields,
    monotonic_ns,
    ring_bell,
    set_word,
    sleep_on_bell,
    wait_at_least,
)

FIELDS = {
    "state": Field(np.int64, (8,)),
    "counters": counters(2),
    "bells": bells(1),
    "data": Field(np.int64, (1000,)),
}
NUM_TURNS = 300
REPOSITORY = Path(__file__).parents[2]


def new_arrays():
    return map_fields(Segment.create("afore-test", layout_bytes(FIELDS)), FIELDS)


def soon(seconds: float = 60.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@compiled
def take_turns(data, counters, bell, state, first_turn, deadline_ns):
    """Wait for each second turn, check every word of the turn before it, and write this one's.

    Returns NUM_TURNS, the turn whose data was torn, or -1 if the other side did not come.
    """
    for turn in range(first_turn, NUM_TURNS, 2):
        if wait_at_least(counters, 0, turn, bell, state, deadline_ns) != READY:
            return -1
        for i in range(data.size):
            if data[i] != turn:
                return turn
        for i in range(data.size):
            data[i] = turn + 1
        advance(counters, 0, turn + 1, bell)
    return NUM_TURNS


def play(arrays, first_turn):
    bell, state = arrays["bells"][0], arrays["state"]
    return take_turns(arrays["data"], arrays["counters"], bell, state, first_turn, soon())


@compiled
def add_many(words, num_times):
    for _ in range(num_times):
        fetch_add(words, 0, np.int64(1))


def test_counter_hands_data_over_between_threads(background):
    arrays = new_arrays()
    other = background(play, arrays, 1)
    assert play(arrays, 0) == NUM_TURNS
    assert other.result(60.0) == NUM_TURNS
    assert count(arrays["counters"], 0) == NUM_TURNS


def test_counter_hands_data_over_between_processes():
    segment = Segment.create("afore-test", layout_bytes(FIELDS))
    arrays = map_fields(segment, FIELDS)
    code = f"from tests.runtime.test_shared import *; play_in_process({segment.fd})"
    with subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[segment.fd], cwd=REPOSITORY
    ) as other:
        try:
            assert play(arrays, 0) == NUM_TURNS
            assert other.wait(60) == 0
        finally:
            other.kill()
            segment.close()


def play_in_process(fd: int) -> None:
    sys.exit(play(map_fields(Segment.open(fd), FIELDS), 1) != NUM_TURNS)


def test_fetch_add_loses_nothing_between_threads(background):
    words = np.zeros(8, np.int64)
    add_many(words, 1)
    others = [background(add_many, words, 500_000) for _ in range(2)]
    for other in others:
        other.result()
    assert words.tolist() == [1_000_001] + [0] * 7


def test_wait_is_ready_when_the_counter_has_reached_the_value():
    arrays = new_arrays()
    advance(arrays["counters"], 1, 5, arrays["bells"][0])

    def wait(index, value):
        bell, state = arrays["bells"][0], arrays["state"]
        return wait_at_least(arrays["counters"], index, value, bell, state, 0)

    assert [wait(1, 4), wait(1, 5), wait(1, 6), wait(0, 1)] == [READY, READY, TIMED_OUT, TIMED_OUT]


def test_wait_prefers_a_ready_counter_to_a_stopped_tier():
    arrays = new_arrays()
    set_word(arrays["state"], 0, np.int64(STOPPING))
    bell, state = arrays["bells"][0], arrays["state"]
    assert wait_at_least(arrays["counters"], 0, 0, bell, state, soon()) == READY
    assert wait_at_least(arrays["counters"], 0, 1, bell, state, soon()) == STOPPED


@pytest.mark.parametrize("wait_ms", [0, 1, 30])
def test_wait_ends_at_its_deadline(wait_ms):
    arrays = new_arrays()
    bell, state = arrays["bells"][0], arrays["state"]
    deadline_ns = time.monotonic_ns() + wait_ms * 1_000_000
    assert wait_at_least(arrays["counters"], 0, 1, bell, state, deadline_ns) == TIMED_OUT
    assert 0 <= time.monotonic_ns() - deadline_ns < 500_000_000


def sleeper(background, arrays):
    """A thread asleep in `wait_at_least`, which returns its result and when it ended."""
    bell, state = arrays["bells"][0], arrays["state"]

    def wait():
        result = wait_at_least(arrays["counters"], 0, 1, bell, state, soon())
        return result, time.monotonic_ns()

    waiting = background(wait)
    while get_word(bell, 1) == 0:
        time.sleep(0.0005)
    return waiting


@pytest.mark.parametrize("result", [READY, STOPPED])
def test_bell_wakes_a_sleeping_waiter_before_its_slice_ends(background, result):
    delays_ns = []
    for _ in range(5):  # the best of five: the machine may be busy
        arrays = new_arrays()
        waiting = sleeper(background, arrays)
        start_ns = time.monotonic_ns()
        if result == READY:
            advance(arrays["counters"], 0, 1, arrays["bells"][0])
        else:
            set_word(arrays["state"], 0, np.int64(STOPPING))
            ring_bell(arrays["bells"][0])
        outcome, end_ns = waiting.result()
        assert outcome == result
        assert arrays["bells"][0, 1] == 0
        delays_ns.append(end_ns - start_ns)
    assert min(delays_ns) < SLEEP_SLICE_NS / 4


def test_sleep_does_not_miss_a_ring_that_came_before_it():
    bell = new_arrays()["bells"][0]
    seen = get_word(bell, 0)
    ring_bell(bell)
    start_ns = time.monotonic_ns()
    sleep_on_bell(bell, seen, 20_000_000_000)
    assert time.monotonic_ns() - start_ns < 5_000_000_000


def test_clock_is_that_of_python():
    @compiled
    def now():
        return monotonic_ns()

    now()
    before_ns = time.monotonic_ns()
    now_ns = now()
    assert before_ns <= now_ns <= time.monotonic_ns()


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([np.uint8, np.int32, np.int64, np.float32, np.uint16])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.builds(Field, dtypes, shapes), min_size=1, max_size=6))
def test_fields_are_aligned_and_do_not_overlap(declared):
    fields = {f"field {i}": field for i, field in enumerate(declared)}
    segment = Segment.create("afore-test", layout_bytes(fields))
    arrays = map_fields(segment, fields)
    for i, array in enumerate(arrays.values()):
        array[...] = i + 1
    for i, (name, field) in enumerate(fields.items()):
        array = arrays[name]
        assert array.shape == field.shape
        assert array.dtype == field.dtype
        assert array.ctypes.data % CACHE_LINE == 0
        assert (array == i + 1).all()
    segment.close()


def test_every_counter_and_bell_has_its_own_cache_line():
    arrays = map_fields(Segment.create("afore-test", 1024), {"c": counters(3), "b": bells(2)})
    for index in range(3):
        advance(arrays["c"], index, index + 1, arrays["b"][1])
    assert arrays["c"][::LINE_WORDS].tolist() == [1, 2, 3]
    assert LINE_WORDS * arrays["c"].itemsize == CACHE_LINE
    assert arrays["b"][0].nbytes == CACHE_LINE
    assert [int(bell[0]) for bell in arrays["b"]] == [0, 3]
    assert get_word(arrays["c"], 2 * LINE_WORDS) == 3


def shared_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "afore" in name}


def test_segment_is_shared_by_descriptor_and_leaves_nothing_behind():
    names, num_descriptors = shared_names(), len(os.listdir("/proc/self/fd"))
    segment = Segment.create("afore-test", 4096)
    other = Segment.open(os.dup(segment.fd))
    assert other.num_bytes == 4096
    assert bytes(segment.buffer) == bytes(4096)
    other.buffer[7] = 42
    assert shared_names() == names
    assert not os.get_inheritable(segment.fd)

    fd = segment.fd
    segment.close()
    segment.close()
    assert segment.buffer[7] == 42
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other.close()
    del segment, other
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_a_new_tier_is_running():
    assert new_arrays()["state"][0] == RUNNING
