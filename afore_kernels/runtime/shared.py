"""Shared memory without names, and the atomics, clock and waits that compiled code uses on it.

A `Segment` is an anonymous memory file: its descriptor is inherited by, or sent to, the processes
that may map it, and the kernel frees it when the last of them is gone. So nothing has a name to
collide, and nothing is left behind however a process ends.

Every hand-over in the runtime is a counter that only grows: the producer writes its data, then
stores the counter with release order and rings a doorbell; the consumer waits until the counter has
reached a value. `wait_at_least` is the only wait: it spins briefly, then sleeps on the doorbell's
futex, and ends at a deadline or when the tier stops.
"""

from __future__ import annotations

import itertools
import mmap
import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

Array = npt.NDArray[Any]

CACHE_LINE = 64
LINE_WORDS = CACHE_LINE // 8

READY, TIMED_OUT, STOPPED = 0, 1, 2
"""Results of a wait."""

RUNNING, STOPPING, FAILED = 0, 1, 2
"""Values of the tier's state word."""

SPIN_NS = 20_000
SLEEP_SLICE_NS = 50_000_000
FOREVER_NS = 2**62

_CLOCK_MONOTONIC = 1
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_WAKE_ALL = 2**31 - 1


class Segment:
    """An anonymous shared-memory file mapped into this process."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, label: str, num_bytes: int) -> Segment:
        """Create a zeroed segment; `label` only shows up in `/proc/<pid>/maps`."""
        fd = os.memfd_create(label, os.MFD_CLOEXEC)
        os.ftruncate(fd, max(num_bytes, 1))
        return cls(fd, max(num_bytes, 1))

    @classmethod
    def open(cls, fd: int) -> Segment:
        """Map the segment behind an inherited or received descriptor, taking ownership of it."""
        return cls(fd, os.fstat(fd).st_size)

    @property
    def buffer(self) -> mmap.mmap:
        """The mapped bytes."""
        return self._map

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last array that views it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Field(NamedTuple):
    """One array of a segment."""

    dtype: npt.DTypeLike
    shape: tuple[int, ...]


def layout_bytes(fields: dict[str, Field]) -> int:
    """Bytes that `map_fields` needs for `fields`."""
    return sum(field_bytes(field) for field in fields.values())


def field_starts(fields: dict[str, Field]) -> dict[str, int]:
    """The byte at which each field begins: in order, each on its own cache line."""
    ends = itertools.accumulate(field_bytes(field) for field in fields.values())
    return dict(zip(fields, (0, *ends)))


def map_fields(segment: Segment, fields: dict[str, Field]) -> dict[str, Array]:
    """View a segment as the given arrays."""
    arrays = {}
    for name, start in field_starts(fields).items():
        field = fields[name]
        count = int(np.prod(field.shape, dtype=np.int64))
        flat = np.frombuffer(segment.buffer, np.dtype(field.dtype), count, start)
        arrays[name] = flat.reshape(field.shape)
    return arrays


def field_bytes(field: Field) -> int:
    """Bytes of a field, whole cache lines."""
    num_bytes = np.dtype(field.dtype).itemsize * int(np.prod(field.shape, dtype=np.int64))
    return max(-(-num_bytes // CACHE_LINE), 1) * CACHE_LINE


def counters(num_counters: int) -> Field:
    """A field of counters, each on its own cache line; index i lives at word `i * LINE_WORDS`."""
    return Field(np.int64, (num_counters * LINE_WORDS,))


def bells(num_bells: int) -> Field:
    """A field of doorbells (ring count, number of sleepers), each on its own cache line."""
    return Field(np.int32, (num_bells, CACHE_LINE // 4))


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index])


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(typingctx: Any, array: Any, index: Any) -> Any:
    """Atomically load `array[index]` with acquire order (1-D integer array)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], *args)
        width = context.get_abi_sizeof(context.get_value_type(signature.return_type))
        return builder.load_atomic(pointer, "acquire", width)

    return array.dtype(array, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_release(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Atomically store `array[index] = value` with release order (1-D integer array)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        width = context.get_abi_sizeof(context.get_value_type(signature.args[2]))
        builder.store_atomic(args[2], pointer, "release", width)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Atomically add to `array[index]`, sequentially consistent; returns the old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return array.dtype(array, types.intp, array.dtype), codegen


@intrinsic  # type: ignore[untyped-decorator]
def monotonic_ns(typingctx: Any) -> Any:
    """CLOCK_MONOTONIC in ns, the clock of `time.monotonic_ns`, common to all processes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int64, int32 = ir.IntType(64), ir.IntType(32)
        timespec = cgutils.alloca_once(builder, ir.ArrayType(int64, 2))
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(int32, [int32, timespec.type]), "clock_gettime"
        )
        builder.call(function, [int32(_CLOCK_MONOTONIC), timespec])
        seconds, nanoseconds = (
            builder.load(builder.gep(timespec, [int32(0), int32(i)])) for i in range(2)
        )
        return builder.add(builder.mul(seconds, int64(1_000_000_000)), nanoseconds)

    return types.int64(), codegen


def _call_futex(builder: Any, word: Any, operation: int, value: Any, timeout: Any) -> Any:
    int64 = ir.IntType(64)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(int64, [int64], var_arg=True), "syscall"
    )
    arguments = [int64(_FUTEX_SYSCALL), word, int64(operation), value, timeout]
    return builder.call(function, arguments)


@intrinsic  # type: ignore[untyped-decorator]
def _futex_wait(typingctx: Any, array: Any, index: Any, expected: Any, timeout_ns: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int64, int32 = ir.IntType(64), ir.IntType(32)
        timespec = cgutils.alloca_once(builder, ir.ArrayType(int64, 2))
        billion = int64(1_000_000_000)
        parts = (builder.sdiv(args[3], billion), builder.srem(args[3], billion))
        for i, part in enumerate(parts):
            builder.store(part, builder.gep(timespec, [int32(0), int32(i)]))
        word = _element(context, builder, signature.args[0], args[0], args[1])
        expected = builder.zext(args[2], int64)
        return _call_futex(builder, word, _FUTEX_WAIT, expected, timespec)

    return types.int64(array, types.intp, types.int32, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _futex_wake_all(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int64 = ir.IntType(64)
        word = _element(context, builder, signature.args[0], *args)
        return _call_futex(builder, word, _FUTEX_WAKE, int64(_WAKE_ALL), int64(0))

    return types.int64(array, types.intp), codegen


def compiled(function: Callable[..., Any]) -> Any:
    """Compile without the GIL, cached on disk."""
    return numba.njit(nogil=True, cache=True)(function)


@compiled
def ring_bell(bell):  # type: ignore[no-untyped-def]
    """Wake every sleeper of a doorbell, int32 [16]; the caller has stored its counter before."""
    fetch_add(bell, 0, np.int32(1))
    if load_acquire(bell, 1) > 0:
        _futex_wake_all(bell, 0)


@compiled
def sleep_on_bell(bell, seen, timeout_ns):  # type: ignore[no-untyped-def]
    """Sleep until the doorbell has rung since its count was `seen`, or `timeout_ns` has passed."""
    fetch_add(bell, 1, np.int32(1))
    _futex_wait(bell, 0, seen, timeout_ns)
    fetch_add(bell, 1, np.int32(-1))


@compiled
def advance(counters, index, value, bell):  # type: ignore[no-untyped-def]
    """Publish `value` in counter `index` (release) and ring `bell`."""
    store_release(counters, index * LINE_WORDS, np.int64(value))
    ring_bell(bell)


@compiled
def set_word(words, index, value):  # type: ignore[no-untyped-def]
    """`store_release` for Python callers."""
    store_release(words, index, value)


@compiled
def get_word(words, index):  # type: ignore[no-untyped-def]
    """`load_acquire` for Python callers."""
    return load_acquire(words, index)


@compiled
def count(counters, index):  # type: ignore[no-untyped-def]
    """Value of counter `index` (acquire)."""
    return load_acquire(counters, index * LINE_WORDS)


@compiled
def wait_at_least(counters, index, value, bell, state, deadline_ns):  # type: ignore[no-untyped-def]
    """Wait until counter `index` is at least `value`.

    Args:
        counters: int64 counters of one field.
        index: which counter.
        value: what it must reach.
        bell: int32 [16], rung after every change of these counters.
        state: int64 [>=1], the tier's state word; anything but RUNNING ends the wait.
        deadline_ns: on the `monotonic_ns` clock.

    Returns:
        READY, TIMED_OUT or STOPPED.
    """
    start_ns = monotonic_ns()
    while True:
        seen = load_acquire(bell, 0)
        if load_acquire(counters, index * LINE_WORDS) >= value:
            return READY
        if load_acquire(state, 0) != RUNNING:
            return STOPPED
        now_ns = monotonic_ns()
        if now_ns >= deadline_ns:
            return TIMED_OUT
        if now_ns - start_ns > SPIN_NS:
            sleep_on_bell(bell, seen, min(deadline_ns - now_ns, SLEEP_SLICE_NS))
