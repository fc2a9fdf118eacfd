"""Buffers that show what a kernel should not have touched."""

from __future__ import annotations

import torch

GUARD_ELEMENTS = 64


class Guarded:
    """A poisoned tensor with canaries before and behind it.

    Floating point is poisoned with NaN, integers with a value no kernel writes, so that an element
    that a kernel leaves out, reads too early or writes out of bounds is seen.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: str) -> None:
        size = torch.Size(shape).numel()
        self.poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max - 1
        self._memory = torch.full(
            (size + 2 * GUARD_ELEMENTS,), self.poison, dtype=dtype, device=device
        )
        self.tensor = self._memory[GUARD_ELEMENTS:][:size].view(shape)

    def is_poison(self) -> torch.Tensor:
        """Where the tensor still holds the poison, bool, shape of the tensor."""
        return _is_equal(self.tensor, self.poison)

    def check_guards(self) -> None:
        """Fail if a canary was overwritten."""
        guards = torch.cat((self._memory[:GUARD_ELEMENTS], self._memory[-GUARD_ELEMENTS:]))
        assert _is_equal(guards, self.poison).all(), "a kernel wrote outside its buffer"


def _is_equal(values: torch.Tensor, poison: float) -> torch.Tensor:
    return values.isnan() if values.is_floating_point() else values == poison
