"""The attention side: what any attention tier calls, once per MoE layer and microbatch.

::

    client.send_demand(target, expert_ids)          # as soon as the gate has run
    client.submit(target, hidden, expert_ids, routing_weights)
    output = client.wait(target)                    # [num_tokens, H]
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from afore_kernels.config import INT32_MAX, MoEConfig, TierConfig
from afore_kernels.errors import (
    AforeError,
    CountMismatchError,
    MailboxTimeout,
    PeerLost,
    PlanError,
    PlanOrderError,
    ReplyTimeout,
    ShapeError,
)
from afore_kernels.partition.demand import count_demand
from afore_kernels.plan import Target
from afore_kernels.runtime.mailbox import DemandWriter
from afore_kernels.runtime.memory import TierMemory, deadline_after, decode_error
from afore_kernels.runtime.shared import RUNNING, Segment, count
from afore_kernels.runtime.timeline import Stage, Track
from afore_kernels.runtime.transports.local import (
    OK,
    LocalTransport,
    Outcome,
    ReplyStatus,
    torch_dtype,
)

_MAX_HELLO = 1 << 20
_CHECK_INTERVAL_S = 0.05


@dataclass(slots=True)
class _InFlight:
    sequence: int
    num_tokens: int
    submitted_ns: int = 0


class AttentionClient:
    """One attention rank's connection to a tier.

    Get one from `Tier.client` in the process that started the tier, or from `connect` in any other.
    Threads may drive different microbatches through one client; with several ranks, all ranks must
    post the same targets in the same order.

    Args:
        memory: the tier's shared memory.
        rank: this attention rank.
        first_sequence: sequence of the first target.
        on_close: called once when the client closes.
    """

    def __init__(
        self, memory: TierMemory, rank: int, first_sequence: int, on_close: Callable[[], None]
    ) -> None:
        self.rank = rank
        self._memory = memory
        self._transport = LocalTransport(memory)
        self._demand = DemandWriter(memory, rank)
        self._track = Track(memory, f"attention rank {rank}")
        self._depth = memory.tier.targets_in_flight
        self._next_sequence = first_sequence
        self._in_flight: dict[Target, _InFlight] = {}
        self._changed = threading.Condition()
        self._post_lock = threading.Lock()
        self._on_close = on_close
        self._is_closed = False

    @classmethod
    def connect(cls, address: str, rank: int = 0, timeout_s: float = 30.0) -> Self:
        """Connect to a tier of this host by its `Tier.address`.

        Raises:
            PeerLost: if no tier listens there, or it does not admit this rank.
            ConfigError: if the rank does not exist.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(socket_address(address))
            connection.sendall(json.dumps({"rank": rank}).encode() + b"\n")
            data, fds, _, _ = socket.recv_fds(connection, _MAX_HELLO, 1)
        except OSError as error:
            connection.close()
            raise PeerLost(f"no tier answers at {address}: {error}") from error
        if not fds:
            connection.close()
            raise decode_error(data)
        hello = json.loads(data)
        memory = TierMemory(
            MoEConfig.from_json(hello["moe"]),
            TierConfig.from_json(hello["tier"]),
            Segment.open(fds[0]),
        )
        return cls(memory, rank, hello["first_sequence"], connection.close)

    @property
    def moe(self) -> MoEConfig:
        """Shapes of the served layers."""
        return self._memory.moe

    @property
    def tier(self) -> TierConfig:
        """Configuration of the tier."""
        return self._memory.tier

    def send_demand(self, target: Target, expert_ids: torch.Tensor) -> None:
        """Post a target's demand, ahead of its hidden states (paper section 6.1).

        Args:
            target: (step, layer, microbatch), not in flight.
            expert_ids: this rank's ids, int [num_tokens, top_k], -1 for padding. num_tokens may be
                0.

        Raises:
            ShapeError: if the ids have the wrong shape or range, or the layer does not exist.
            PlanOrderError: if the target is already in flight.
            MailboxTimeout: if `targets_in_flight` targets stay in flight, or the scheduler does not
                collect, for `demand_timeout_s`.
            PeerLost: or the tier's failure, if the tier is down.
        """
        start_ns = time.monotonic_ns()
        target = Target(*target)
        num_tokens = self._check_ids(target, expert_ids)
        demand = count_demand(expert_ids.numpy(), self.moe.num_experts)
        deadline_ns = deadline_after(self.tier.demand_timeout_s)
        with self._post_lock:
            sequence = self._next_sequence
            self._claim(target, sequence, num_tokens)
            try:
                self._demand.post(sequence, target, num_tokens, demand, deadline_ns)
            except AforeError:
                self._forget(target)
                raise
            self._next_sequence += 1
            self._record(Stage.DEMAND_POSTED, sequence, start_ns, num_tokens)

    def submit(
        self,
        target: Target,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        routing_weights: torch.Tensor,
    ) -> None:
        """Send a target's execution input to the workers.

        Args:
            target: a target whose demand was sent.
            hidden: [num_tokens, H] of the tier's dtype.
            expert_ids: the ids whose demand was sent, int [num_tokens, top_k].
            routing_weights: [num_tokens, top_k], finite where the id is not -1.

        Raises:
            ShapeError: if a tensor does not have the agreed shape, dtype or range.
            PlanOrderError: if the target's demand was not sent, or it was submitted before.
        """
        in_flight = self._find(target)
        if in_flight.submitted_ns:
            raise PlanOrderError(f"{target} was submitted before")
        num_tokens = self._check_ids(target, expert_ids)
        if num_tokens != in_flight.num_tokens:
            raise ShapeError(
                f"{target} was announced with {in_flight.num_tokens} tokens, submitted with "
                f"{num_tokens}"
            )
        _check_tensor("hidden", hidden, (num_tokens, self.moe.hidden_size))
        if hidden.dtype != torch_dtype(self.moe):
            raise ShapeError(f"hidden is {hidden.dtype}, the tier runs {self.moe.dtype}")
        _check_tensor("routing_weights", routing_weights, (num_tokens, self.moe.top_k))
        if not (routing_weights.isfinite() | (expert_ids < 0)).all():
            raise ShapeError(f"{target} has routing weights that are not finite")
        in_flight.submitted_ns = time.monotonic_ns()
        rows = self._transport.input_rows(self.rank, in_flight.sequence, num_tokens)
        for row, tensor in zip(rows, (hidden, expert_ids, routing_weights)):
            row.copy_(tensor)
        self._transport.send(self.rank, in_flight.sequence, target, num_tokens)

    def wait(self, target: Target, timeout_s: float | None = None) -> torch.Tensor:
        """Wait for a target's result; whatever the tier reports about it is raised and ends it.

        Args:
            target: a target whose demand was sent.
            timeout_s: by default the tier's `demand_timeout_s + reply_timeout_s`.

        Returns:
            This rank's rows, [num_tokens, H] of the tier's dtype.

        Raises:
            ReplyTimeout: if no result came in time; the target stays in flight and can be waited
                for.
            MailboxTimeout: if a rank's demand or input did not reach the tier in time.
            CountMismatchError: if the submitted ids are not those whose demand was sent.
            PlanOrderError: if the ranks posted different targets, or this one is not in flight.
            PeerLost: or the tier's failure, if a rank or the tier is down.
        """
        in_flight = self._find(target)
        if timeout_s is None:
            timeout_s = self.tier.demand_timeout_s + self.tier.reply_timeout_s
        outcome = self._transport.wait_reply(
            self.rank, in_flight.sequence, deadline_after(timeout_s)
        )
        if outcome is None:
            raise ReplyTimeout(
                f"no result for {target} within {timeout_s} s; waiting for "
                f"{self._culprit(in_flight.sequence)}"
            )
        rows = self._transport.output_rows(self.rank, in_flight.sequence, in_flight.num_tokens)
        output = rows.clone()
        self._forget(target)
        if outcome != OK:
            raise self._error(target, outcome)
        self._record(
            Stage.RECEIVED, in_flight.sequence, in_flight.submitted_ns, in_flight.num_tokens
        )
        return output

    def close(self) -> None:
        """Give the rank back to the tier."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_ids(self, target: Target, expert_ids: torch.Tensor) -> int:
        step, layer, microbatch = target
        if not 0 <= layer < self.moe.num_layers or not 0 <= microbatch <= INT32_MAX or step < 0:
            raise ShapeError(f"{target} is not a target of {self.moe.num_layers} layers")
        self._check_open()
        is_integer = not (expert_ids.is_floating_point() or expert_ids.dtype == torch.bool)
        if not is_integer or expert_ids.ndim != 2 or expert_ids.shape[1] != self.moe.top_k:
            raise ShapeError(
                f"expert_ids is {expert_ids.dtype} {tuple(expert_ids.shape)}, expected integers "
                f"[num_tokens, {self.moe.top_k}]"
            )
        num_tokens = int(expert_ids.shape[0])
        if num_tokens > self.tier.max_tokens_per_rank:
            raise ShapeError(
                f"{num_tokens} tokens, the tier takes {self.tier.max_tokens_per_rank} per rank"
            )
        if num_tokens:
            low, high = (int(bound) for bound in expert_ids.aminmax())
            if low < -1 or high >= self.moe.num_experts:
                raise ShapeError(
                    f"expert ids range over [{low}, {high}], expected "
                    f"[-1, {self.moe.num_experts - 1}]"
                )
        return num_tokens

    def _claim(self, target: Target, sequence: int, num_tokens: int) -> None:
        """Take the slot of `sequence`, free once the target `depth` before it was taken."""

        deadline = time.monotonic() + self.tier.demand_timeout_s
        with self._changed:
            if target in self._in_flight:
                raise PlanOrderError(f"{target} is already in flight")
            while any(t.sequence == sequence - self._depth for t in self._in_flight.values()):
                self._check_open()
                if time.monotonic() >= deadline:
                    raise MailboxTimeout(
                        f"{target} cannot be posted: {self._depth} targets are in flight and the "
                        f"oldest was not waited for"
                    )
                self._changed.wait(_CHECK_INTERVAL_S)
            self._in_flight[target] = _InFlight(sequence, num_tokens)

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerLost("the client was closed")
        if self._memory.state[0] != RUNNING:
            raise self._memory.failure()

    def _forget(self, target: Target) -> None:
        with self._changed:
            self._in_flight.pop(target, None)
            self._changed.notify_all()

    def _record(self, stage: Stage, sequence: int, start_ns: int, num_tokens: int) -> None:
        """Record an event that ends now; a track has one writer, and threads share this one."""
        with self._changed:
            self._track.record(stage, sequence, start_ns, time.monotonic_ns(), num_tokens)

    def _find(self, target: Target) -> _InFlight:
        with self._changed:
            in_flight = self._in_flight.get(target)
        if in_flight is None:
            raise PlanOrderError(f"{target} is not in flight: its demand was not sent")
        return in_flight

    def _culprit(self, sequence: int) -> str:
        arrays, tier = self._memory.arrays, self.tier
        if count(arrays["plans_published"], 0) <= sequence:
            posted = arrays["demand_posted"]
            late = [
                f"attention rank {r}" for r in range(tier.num_ranks) if count(posted, r) <= sequence
            ]
            return ", ".join(late) or "the scheduler"
        first = self.rank * tier.num_workers
        ready = arrays["reply_ready"]
        return ", ".join(
            f"worker {w}" for w in range(tier.num_workers) if count(ready, first + w) <= sequence
        )

    def _error(self, target: Target, outcome: Outcome) -> AforeError:
        rank = f"attention rank {outcome.rank}"
        match outcome.status:
            case ReplyStatus.DEMAND_TIMEOUT:
                waited = self.tier.demand_timeout_s
                return MailboxTimeout(f"{target}: no demand of {rank} within {waited} s")
            case ReplyStatus.TARGET_MISMATCH:
                return PlanOrderError(f"{target}: {rank} posted another target in its place")
            case ReplyStatus.BAD_DEMAND:
                return PlanError(f"{target}: the demand record of {rank} is not valid")
            case ReplyStatus.INPUT_TIMEOUT:
                waited = self.tier.reply_timeout_s
                return MailboxTimeout(f"{target}: no input of {rank} within {waited} s")
            case ReplyStatus.BAD_INPUT:
                return ShapeError(f"{target}: the input of {rank} is not what it announced")
            case ReplyStatus.RANK_LOST:
                return PeerLost(f"{target}: the client of {rank} is gone")
            case _:
                return CountMismatchError(
                    f"{target}: the submitted expert ids are not those whose demand was sent"
                )


def socket_address(address: str) -> str:
    """The Unix socket behind a tier's address; "@" stands for Linux's abstract namespace.

    An abstract socket has no file, so nothing is left behind however the tier ends.
    """
    return "\0" + address[1:] if address.startswith("@") else address


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise ShapeError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected floating point {shape}"
        )
