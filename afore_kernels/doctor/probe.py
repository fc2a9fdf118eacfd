"""Asking a machine that may be broken: what cannot be read is unknown, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def attempt(call: Callable[..., T], *args: Any) -> T | None:
    """Return what `call` finds, or None if it fails in any way."""
    try:
        return call(*args)
    except Exception:
        return None


def failure_of(call: Callable[[], object]) -> str | None:
    """Return why `call` fails, or None if it succeeds."""
    try:
        call()
    except Exception as error:
        return describe(error)
    return None


def describe(error: object) -> str:
    """Return the first line of an error or a warning, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
