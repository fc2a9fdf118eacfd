"""The demand of an attention rank in device memory, for `route.route_tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from afore_kernels.errors import ShapeError

# Tokens that one program routes; it counts as one arrival.
TOKENS_PER_BLOCK = 16


def count_token_blocks(num_tokens: int) -> int:
    """Return the token blocks of a launch: at least one, which publishes a demand of zeros.

    >>> [count_token_blocks(n) for n in (0, 16, 17)]
    [1, 1, 2]
    """
    return max(1, -(-num_tokens // TOKENS_PER_BLOCK))


@dataclass(frozen=True, eq=False)
class DemandBuffer:
    """Where launches leave their demand: fixed addresses and no memset, so graphs can capture it.

    `record` is what an attention rank copies to its mailbox entry, on the launch's stream and
    before the next launch with this buffer. Launches that may overlap need a buffer each.

    Attributes:
        record: int32 [num_experts + 1], the last launch's demand, then the number of launches so
            far modulo 2^32: the tag that tells one launch's demand from the next's.
        totals: int32 [num_experts], zero between launches.
        arrivals: int32 [1 + token blocks], programs that finished, zero between launches.
    """

    record: torch.Tensor
    totals: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, num_experts: int, max_tokens: int, device: torch.device | str) -> Self:
        """Allocate a buffer for launches of up to `max_tokens` tokens."""

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            zeros(num_experts + 1), zeros(num_experts), zeros(1 + count_token_blocks(max_tokens))
        )

    @property
    def demand(self) -> torch.Tensor:
        """Demand of the last launch, int32 [num_experts]."""
        return self.record[:-1]

    def check(self, num_experts: int, num_tokens: int, device: torch.device) -> None:
        """Check that a launch fits.

        Raises:
            ShapeError: if the buffer is for other experts, another device or fewer tokens.
        """
        if self.totals.numel() != num_experts or self.totals.device != device:
            raise ShapeError(
                f"demand is for {self.totals.numel()} experts on {self.totals.device}, "
                f"the router has {num_experts} on {device}"
            )
        if self.arrivals.numel() < 1 + count_token_blocks(num_tokens):
            raise ShapeError(f"demand is too small for {num_tokens} tokens")
