"""The tier's shared memory: one segment that every process of the tier, and every client, maps.

Each component declares the fields it owns; this module lays them out from the two configurations,
so that every process derives the same layout.
"""

from __future__ import annotations

import json
import time
from functools import cached_property

import numpy as np

from afore_kernels import errors
from afore_kernels.config import MoEConfig, TierConfig
from afore_kernels.errors import AforeError, PeerLost
from afore_kernels.plan import PlanLayout, PrimaryPlacement
from afore_kernels.runtime.shared import (
    FAILED,
    FOREVER_NS,
    READY,
    RUNNING,
    STOPPED,
    STOPPING,
    Array,
    Field,
    Segment,
    bells,
    counters,
    layout_bytes,
    map_fields,
    ring_bell,
    set_word,
    wait_at_least,
)

DEMAND_BELL, PLAN_BELL, ACK_BELL, INPUT_BELL, REPLY_BELL, WEIGHTS_BELL = range(6)
NUM_BELLS = 6

AWAITED, CONNECTED, LOST = 0, 1, 2
"""States of an attention rank: no client yet, served, or its client is gone (counts as empty)."""

_FAILURE_BYTES = 10_240  # 800 characters, of at most 12 bytes each in JSON


def deadline_after(seconds: float) -> int:
    """Deadline on the `monotonic_ns` clock."""
    return time.monotonic_ns() + int(min(seconds * 1e9, FOREVER_NS))


class TierMemory:
    """The mapped segment with all fields of all components, by name in `arrays`."""

    def __init__(self, moe: MoEConfig, tier: TierConfig, segment: Segment) -> None:
        self.moe = moe
        self.tier = tier
        self.segment = segment
        self.arrays = map_fields(segment, _all_fields(moe, tier))

    @classmethod
    def create(cls, moe: MoEConfig, tier: TierConfig) -> TierMemory:
        """Create the segment of a new tier."""
        num_bytes = layout_bytes(_all_fields(moe, tier))
        return cls(moe, tier, Segment.create("afore-tier", num_bytes))

    @cached_property
    def placement(self) -> PrimaryPlacement:
        """Where the primaries are."""
        return primary_placement(self.moe, self.tier)

    @cached_property
    def plan_layout(self) -> PlanLayout:
        """Layout of this tier's plan records."""
        return PlanLayout(self.placement, self.tier.num_ranks)

    @property
    def state(self) -> Array:
        """The state word, int64 [8]: RUNNING, STOPPING or FAILED in element 0."""
        return self.arrays["state"]

    def bell(self, bell: int) -> Array:
        """One doorbell, int32 [16]."""
        return self.arrays["bells"][bell]  # type: ignore[no-any-return]

    def wait(self, field: str, index: int, value: int, bell: int, deadline_ns: int) -> bool:
        """Wait until counter `index` of `field` is at least `value`; False at the deadline.

        Raises:
            PeerLost: or the tier's own failure, if the tier stops meanwhile.
        """
        result = wait_at_least(
            self.arrays[field], index, value, self.bell(bell), self.state, deadline_ns
        )
        if result == STOPPED:
            raise self.failure()
        return bool(result == READY)

    def stop(self) -> None:
        """Tell every process and client that the tier is going down, unless it failed before."""
        if self.state[0] == RUNNING:
            self._set_state(STOPPING)

    def fail(self, error: AforeError) -> None:
        """Record the tier's first failure and wake every wait; it is raised by all of them."""
        if self.state[0] == FAILED:
            return
        text = json.dumps({"error": type(error).__name__, "message": str(error)[:800]}).encode()
        field = self.arrays["failure"]
        field[: len(text)] = np.frombuffer(text, np.uint8)
        self._set_state(FAILED)

    def failure(self) -> AforeError:
        """The error that every wait raises once the tier no longer runs."""
        if self.state[0] != FAILED:
            return PeerLost("the tier was closed")
        return decode_error(bytes(self.arrays["failure"]).rstrip(b"\0"))

    def _set_state(self, value: int) -> None:
        set_word(self.state, 0, np.int64(value))
        for bell in range(NUM_BELLS):
            ring_bell(self.bell(bell))


def decode_error(text: bytes) -> AforeError:
    """Rebuild a named error from the JSON `{"error": class name, "message": text}`."""
    try:
        record = json.loads(text)
        error_class = getattr(errors, str(record["error"]), AforeError)
        if not (isinstance(error_class, type) and issubclass(error_class, AforeError)):
            error_class = AforeError
        return error_class(str(record["message"]))
    except (ValueError, KeyError, TypeError):
        return PeerLost(f"the tier failed: {text[:200]!r}")


def primary_placement(moe: MoEConfig, tier: TierConfig) -> PrimaryPlacement:
    """Primary placement of a tier."""
    return PrimaryPlacement(moe.num_experts, tier.num_workers, tier.redundant_slots)


def _all_fields(moe: MoEConfig, tier: TierConfig) -> dict[str, Field]:
    from afore_kernels.runtime import device_weights, mailbox, plan_ring, timeline, window
    from afore_kernels.runtime.transports import local

    return {
        "state": Field(np.int64, (8,)),
        "failure": Field(np.uint8, (_FAILURE_BYTES,)),
        "bells": bells(NUM_BELLS),
        "rank_state": counters(tier.num_ranks),
        **mailbox.fields(moe, tier),
        **plan_ring.fields(moe, tier),
        **local.fields(moe, tier),
        **timeline.fields(tier),
        **window.fields(tier),
        **device_weights.fields(tier),
    }
