"""The nouns that cross process boundaries: targets, placements, plans and the plan record.

A plan (paper section 5.2, Pi_t) says, for one target, which experts the redundant slots hold and
how many pairs each of those replicas runs; the primary of an expert runs the remainder.
`PlanLayout` is the byte layout of its fixed-size record, normative in `docs/wire.md`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from afore_kernels.errors import InfeasiblePlanError, PlanError, ShapeError

Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]

PLAN_MAGIC = 0x4C504641  # b"AFPL"
PLAN_VERSION = 1
PLAN_HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        ("record_bytes", "<u4"),
        ("rejection", "<i4"),
        ("sequence", "<i8"),
        ("step", "<i8"),
        ("layer", "<i4"),
        ("microbatch", "<i4"),
        ("tile_m", "<i4"),
        ("num_copies", "<i4"),
        ("rejected_rank", "<i4"),
        ("reserved", "<u4"),
        ("reserved2", "<u4"),
        ("checksum", "<u4"),
    ]
)
HEADER_WORDS = PLAN_HEADER.itemsize // 4
CHECKSUM_WORD = HEADER_WORDS - 1
RECORD_ALIGNMENT = 64


class Target(NamedTuple):
    """One microbatch at one MoE layer of one serving step (the paper's m_t)."""

    step: int
    layer: int
    microbatch: int


class ReplicaCopy(NamedTuple):
    """One expert weight transfer from the expert's primary into a redundant slot."""

    expert: int
    worker: int
    slot: int


class Rejection(enum.IntEnum):
    """Why the scheduler published a target as rejected: no worker executes it."""

    NONE = 0
    DEMAND_TIMEOUT = 1
    TARGET_MISMATCH = 2
    BAD_DEMAND = 3


_REJECTIONS = frozenset(map(int, Rejection))


@dataclass(frozen=True)
class PrimaryPlacement:
    """Fixed primaries: expert e lives on one worker, in contiguous blocks of near-equal size.

    The first `num_experts % num_workers` workers hold one primary more than the others, so any
    expert count fits any worker count.
    """

    num_experts: int
    num_workers: int
    redundant_slots: int

    @cached_property
    def primary_starts(self) -> Int32Array:
        """First expert of each worker, int32 [num_workers + 1]."""
        each, extra = divmod(self.num_experts, self.num_workers)
        worker = np.arange(self.num_workers + 1, dtype=np.int32)
        return (worker * each + np.minimum(worker, extra)).astype(np.int32)

    @cached_property
    def primary_worker(self) -> Int32Array:
        """Worker of each expert's primary, int32 [num_experts]."""
        counts = np.diff(self.primary_starts)
        return np.repeat(np.arange(self.num_workers, dtype=np.int32), counts)

    def primaries(self, worker: int) -> range:
        """Experts whose primary is on `worker`; expert `primaries(w)[s]` is in local slot s."""
        return range(int(self.primary_starts[worker]), int(self.primary_starts[worker + 1]))

    def num_slots(self, worker: int) -> int:
        """Slots of `worker` per layer: primaries first, then redundant (the paper's K_w)."""
        return len(self.primaries(worker)) + self.redundant_slots


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One published plan (the paper's Pi_t), or a published rejection.

    Attributes:
        target: what it plans.
        sequence: its position in the tier's single order of targets.
        tile_m: pairs per tile (Eq. 4), the kernels' block M.
        demand: pairs per expert d_t, int32 [num_experts].
        rank_tokens: tokens of each attention rank, int32 [num_ranks]; the gathered order is rank
            order.
        slot_expert: projected slot table C_t, int32 [num_workers, redundant_slots], -1 = empty.
        slot_pairs: pairs each replica runs, int32 [num_workers, redundant_slots].
        slot_copy: 1 where the replica must first be copied (Delta_t), uint8, same shape.
        rejection: why no worker executes this target, or `Rejection.NONE`.
        rejected_rank: the attention rank the rejection is about, or -1.
    """

    target: Target
    sequence: int
    tile_m: int
    demand: Int32Array
    rank_tokens: Int32Array
    slot_expert: Int32Array
    slot_pairs: Int32Array
    slot_copy: UInt8Array
    rejection: Rejection = Rejection.NONE
    rejected_rank: int = -1

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks."""
        return int(self.rank_tokens.sum())

    @property
    def copies(self) -> list[ReplicaCopy]:
        """The new weight copies Delta_t in worker, slot order."""
        workers, slots = np.nonzero(self.slot_copy)
        return [
            ReplicaCopy(int(self.slot_expert[w, r]), int(w), int(r)) for w, r in zip(workers, slots)
        ]

    def without_replicas(self) -> Plan:
        """The same target with every pair on its primary, as a static placement runs it."""
        return replace(
            self,
            slot_expert=np.full_like(self.slot_expert, -1),
            slot_pairs=np.zeros_like(self.slot_pairs),
            slot_copy=np.zeros_like(self.slot_copy),
        )

    def validate(self, placement: PrimaryPlacement) -> None:
        """Check every constraint a plan must satisfy on its own.

        Raises:
            InfeasiblePlanError: naming the constraint, the worker and the slot.
        """
        violation, worker, slot, count = _find_violation(
            self.tile_m,
            self.demand,
            self.rank_tokens,
            self.slot_expert,
            self.slot_pairs,
            self.slot_copy,
            placement.primary_worker,
        )
        if violation != _VALID:
            what = _VIOLATIONS[violation].format(worker=worker, slot=slot, count=count)
            raise InfeasiblePlanError(f"plan {self.sequence} for {self.target}: {what}")

    def validate_after(self, previous: Plan) -> None:
        """Check that no copy goes into a slot that the preceding plan `previous` uses (U_t).

        Raises:
            InfeasiblePlanError: naming the worker and the slot.
        """
        if previous.target.layer != self.target.layer:
            return
        unsafe = (self.slot_copy == 1) & (previous.slot_pairs > 0)
        if unsafe.any():
            worker, slot = np.argwhere(unsafe)[0]
            raise InfeasiblePlanError(
                f"plan {self.sequence} for {self.target} copies into worker {worker}, redundant "
                f"slot {slot}, which plan {previous.sequence} for {previous.target} uses"
            )


_SLOT = "at worker {worker}, redundant slot {slot}"
_VIOLATIONS = (
    "",
    "tile_m {count} is not a power of two",
    "negative demand {count} for expert {slot}",
    "negative token count {count} of rank {slot}",
    f"expert id out of range {_SLOT}",
    f"negative pair count {_SLOT}",
    f"pairs in an empty slot {_SLOT}",
    f"copy flag is neither 0 nor 1 {_SLOT}",
    f"copy into a slot without an expert {_SLOT}",
    f"replica of an expert beside its primary {_SLOT}",
    f"an expert holds two slots of worker {{worker}}, the second {_SLOT}",
    f"replicas of expert {{count}} run more pairs than its demand, the last {_SLOT}",
)
(
    _VALID,
    _BAD_TILE_M,
    _NEGATIVE_DEMAND,
    _NEGATIVE_TOKENS,
    _BAD_EXPERT,
    _NEGATIVE_PAIRS,
    _PAIRS_WITHOUT_EXPERT,
    _BAD_COPY_FLAG,
    _COPY_WITHOUT_EXPERT,
    _BESIDE_PRIMARY,
    _TWO_SLOTS,
    _OVER_DEMAND,
) = range(len(_VIOLATIONS))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find_violation(
    tile_m: int,
    demand: Int32Array,
    rank_tokens: Int32Array,
    slot_expert: Int32Array,
    slot_pairs: Int32Array,
    slot_copy: UInt8Array,
    primary_worker: Int32Array,
) -> tuple[int, int, int, int]:
    """Find the first broken constraint of a plan: (violation, worker, slot, count).

    Compiled, because every worker checks every plan: 3 us instead of 100.
    """
    if tile_m < 1 or tile_m & (tile_m - 1) != 0:
        return _BAD_TILE_M, -1, -1, tile_m
    for expert in range(demand.size):
        if demand[expert] < 0:
            return _NEGATIVE_DEMAND, -1, expert, demand[expert]
    for rank in range(rank_tokens.size):
        if rank_tokens[rank] < 0:
            return _NEGATIVE_TOKENS, -1, rank, rank_tokens[rank]
    primary_pairs = demand.astype(np.int64)
    for worker in range(slot_expert.shape[0]):
        for slot in range(slot_expert.shape[1]):
            expert, pairs = slot_expert[worker, slot], slot_pairs[worker, slot]
            if not -1 <= expert < demand.size:
                return _BAD_EXPERT, worker, slot, expert
            if pairs < 0:
                return _NEGATIVE_PAIRS, worker, slot, pairs
            if slot_copy[worker, slot] > 1:
                return _BAD_COPY_FLAG, worker, slot, 0
            if expert == -1:
                if pairs > 0:
                    return _PAIRS_WITHOUT_EXPERT, worker, slot, pairs
                if slot_copy[worker, slot] == 1:
                    return _COPY_WITHOUT_EXPERT, worker, slot, 0
                continue
            if primary_worker[expert] == worker:
                return _BESIDE_PRIMARY, worker, slot, expert
            for earlier in range(slot):
                if slot_expert[worker, earlier] == expert:
                    return _TWO_SLOTS, worker, slot, expert
            primary_pairs[expert] -= pairs
            if primary_pairs[expert] < 0:
                return _OVER_DEMAND, worker, slot, expert
    return _VALID, -1, -1, 0


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def record_checksum(words: Int32Array, checksum_word: int) -> np.uint32:
    """FNV-1a over a record's 32-bit words, taking the checksum word itself as 0.

    Each step is a bijection of the running hash, so every single-word change is detected.
    """
    value = np.uint32(2166136261)
    for i in range(words.size):
        word = np.uint32(0) if i == checksum_word else np.uint32(words[i])
        value = np.uint32((value ^ word) * np.uint32(16777619))
    return value


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


@dataclass(frozen=True)
class PlanLayout:
    """Byte layout of a plan record for one tier; see `docs/wire.md`.

    All offsets are in 32-bit words from the start of the record.
    """

    placement: PrimaryPlacement
    num_ranks: int

    @cached_property
    def _num_replica_slots(self) -> int:
        return self.placement.num_workers * self.placement.redundant_slots

    @cached_property
    def demand_word(self) -> int:
        """Start of `demand`."""
        return HEADER_WORDS

    @cached_property
    def rank_tokens_word(self) -> int:
        """Start of `rank_tokens`."""
        return self.demand_word + self.placement.num_experts

    @cached_property
    def slot_expert_word(self) -> int:
        """Start of `slot_expert`."""
        return self.rank_tokens_word + self.num_ranks

    @cached_property
    def slot_pairs_word(self) -> int:
        """Start of `slot_pairs`."""
        return self.slot_expert_word + self._num_replica_slots

    @cached_property
    def slot_copy_word(self) -> int:
        """Start of `slot_copy`, one byte per slot."""
        return self.slot_pairs_word + self._num_replica_slots

    @cached_property
    def record_bytes(self) -> int:
        """Size of one record, a multiple of 64."""
        return _aligned(4 * self.slot_copy_word + self._num_replica_slots)

    def _body(
        self, record: UInt8Array
    ) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, UInt8Array]:
        words = record.view(np.int32)
        shape = (self.placement.num_workers, self.placement.redundant_slots)
        copy_byte = 4 * self.slot_copy_word
        return (
            words[self.demand_word : self.rank_tokens_word],
            words[self.rank_tokens_word : self.slot_expert_word],
            words[self.slot_expert_word : self.slot_pairs_word].reshape(shape),
            words[self.slot_pairs_word : self.slot_copy_word].reshape(shape),
            record[copy_byte : copy_byte + self._num_replica_slots].reshape(shape),
        )

    def pack(self, plan: Plan) -> UInt8Array:
        """Serialise `plan` into a new record, uint8 [record_bytes].

        Raises:
            ShapeError: if an array of the plan does not have the tier's shape.
        """
        record = np.zeros(self.record_bytes, np.uint8)
        values: list[npt.NDArray[Any]] = [
            plan.demand,
            plan.rank_tokens,
            plan.slot_expert,
            plan.slot_pairs,
            plan.slot_copy,
        ]
        fields: list[npt.NDArray[Any]] = list(self._body(record))
        for field, value in zip(fields, values):
            if field.shape != value.shape or field.dtype != value.dtype:
                raise ShapeError(
                    f"plan field is {value.dtype} {value.shape}, the record holds "
                    f"{field.dtype} {field.shape}"
                )
            field[...] = value
        header = record[: PLAN_HEADER.itemsize].view(PLAN_HEADER)
        header[0] = (
            PLAN_MAGIC,
            PLAN_VERSION,
            self.record_bytes,
            int(plan.rejection),
            plan.sequence,
            *plan.target,
            plan.tile_m,
            int(plan.slot_copy.sum()),
            plan.rejected_rank,
            0,
            0,
            0,
        )
        header["checksum"] = record_checksum(record.view(np.int32), CHECKSUM_WORD)
        return record

    def unpack(self, record: UInt8Array) -> Plan:
        """Read and validate a record; the plan owns copies of its arrays.

        Args:
            record: uint8 [record_bytes], contiguous.

        Raises:
            PlanError: if size, magic, version, checksum or header fields are not valid.
            InfeasiblePlanError: if the plan breaks a constraint.
        """
        if record.size != self.record_bytes:
            raise PlanError(f"plan record has {record.size} bytes, expected {self.record_bytes}")
        record = record.copy()
        values = record[: PLAN_HEADER.itemsize].view(PLAN_HEADER)[0].item()
        header: dict[str, int] = dict(zip(PLAN_HEADER.names or (), values))
        expected = {
            "magic": PLAN_MAGIC,
            "version": PLAN_VERSION,
            "record_bytes": self.record_bytes,
            "checksum": int(record_checksum(record.view(np.int32), CHECKSUM_WORD)),
        }
        for name, value in expected.items():
            if header[name] != value:
                raise PlanError(f"plan record has {name} {header[name]:#x}, expected {value:#x}")
        if header["rejection"] not in _REJECTIONS:
            raise PlanError(f"plan record has unknown rejection {header['rejection']}")
        plan = Plan(
            Target(header["step"], header["layer"], header["microbatch"]),
            header["sequence"],
            header["tile_m"],
            *self._body(record),
            Rejection(header["rejection"]),
            header["rejected_rank"],
        )
        num_copies = np.count_nonzero(plan.slot_copy)
        if header["num_copies"] != num_copies:
            raise PlanError(
                f"plan record announces {header['num_copies']} copies, flags {num_copies}"
            )
        plan.validate(self.placement)
        return plan
