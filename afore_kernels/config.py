"""Configuration of the model's FFN side and of the tier that runs it.

Both classes are plain frozen records that travel between processes as JSON objects
(`to_json` / `from_json`); unknown keys are rejected.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from afore_kernels.errors import ConfigError

ActivationKind = Literal["silu", "gelu_tanh", "relu2", "none"]
Dtype = Literal["float32", "float16", "bfloat16"]
PolicyName = Literal["afore", "static"]
DemandSource = Literal["target", "previous_step"]
DeviceName = Literal["cpu", "cuda"]
CopyPath = Literal["copy_engine", "sm"]
Reduction = Literal["all_reduce", "reduce_scatter"]

INT32_MAX = 2**31 - 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_int(name: str, value: object, low: int, high: int = INT32_MAX) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(f"{name} must be an integer in [{low}, {high}], got {value!r}")


def _require_finite(name: str, value: object, low: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < low:  # type: ignore[arg-type,operator]
        raise ConfigError(f"{name} must be a finite number >= {low}, got {value!r}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


class _JsonRecord:
    """Conversion of a flat dataclass to and from a JSON object."""

    __slots__ = ()

    def to_json(self) -> str:
        """Serialise as a JSON object."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from a mapping of field names; an unknown name raises `ConfigError`."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - known)
        _require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`."""
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(_JsonRecord):
    """The gated activation between the two GEMMs: `act(gate) * (up + linear_offset)`.

    With `limit` set, `gate` is clamped to at most `limit` and `up` to `[-limit, limit]` before the
    activation (gpt-oss: `alpha=1.702, limit=7.0, linear_offset=1.0, interleaved=True`).

    Attributes:
        kind: `silu` is `g * sigmoid(alpha * g)`; `relu2` is `relu(g) ** 2`; `none` is `g` itself.
        alpha: factor inside the sigmoid of `silu`.
        limit: clamp bound, or None.
        linear_offset: added to `up`.
        interleaved: rows of gate_up alternate gate, up, gate, ... instead of all gates then all
            ups.
    """

    kind: ActivationKind = "silu"
    alpha: float = 1.0
    limit: float | None = None
    linear_offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        _require_choice("activation.kind", self.kind, get_args(ActivationKind))
        _require_finite("activation.alpha", self.alpha, 0.0)
        _require_finite("activation.linear_offset", self.linear_offset, -math.inf)
        if self.limit is not None:
            _require_finite("activation.limit", self.limit, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(_JsonRecord):
    """Shapes of the MoE layers served by a tier.

    `tile_m` is owned here alone: the planner's Eq. 4, the tile metadata and the kernels' block M
    all take it from the plan, which takes it from this record (paper section 5.1).

    Attributes:
        num_layers: number of MoE layers, numbered from 0.
        num_experts: routed experts per layer.
        top_k: experts per token.
        hidden_size: width H of a hidden-state row.
        intermediate_size: width I of one routed expert.
        shared_intermediate_size: total width of the shared experts, 0 for none.
        dtype: of weights and hidden states.
        tile_m: pairs per tile, a power of two.
        activation: see `Activation`.
        has_bias: routed experts carry a bias on both GEMMs.
    """

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    dtype: Dtype = "float32"
    tile_m: int = 16
    activation: Activation = field(default_factory=Activation)
    has_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "top_k", "hidden_size", "intermediate_size"):
            _require_int(name, getattr(self, name), 1)
        _require_int("shared_intermediate_size", self.shared_intermediate_size, 0)
        _require_choice("dtype", self.dtype, get_args(Dtype))
        _require_int("tile_m", self.tile_m, 1, 1024)
        _require(
            self.tile_m & (self.tile_m - 1) == 0,
            f"tile_m must be a power of two, got {self.tile_m}",
        )
        _require(isinstance(self.activation, Activation), "activation must be an Activation")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from a mapping; a nested `activation` mapping is converted too."""
        values = dict(values)
        if isinstance(values.get("activation"), dict):
            values["activation"] = Activation.from_dict(values["activation"])
        return super(MoEConfig, cls).from_dict(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig(_JsonRecord):
    """Size, policy and limits of one FFN tier.

    Attributes:
        num_workers: FFN workers N.
        device: `cpu`, or `cuda`: worker w on GPU `w % num_gpus`.
        num_ranks: attention ranks that feed the tier.
        max_tokens_per_rank: most tokens of one rank in one microbatch.
        redundant_slots: replica slots R per worker and layer, beside its primaries.
        copy_budget: B, most new replicas per target; None means 2 * num_workers.
        compactness_threshold: theta, a move must carry more tiles than this.
        refine_plans: look for better moves where Algorithm 1 leaves a worker above the mean (beyond
            the paper; costs microseconds, see docs/paper.md).
        policy: `afore`, or `static` (every pair on its primary, no copies).
        demand_source: plan from the target's demand, or from the previous step's (ablation).
        overlap_copies: submit copies when the plan is read; False puts them on the critical path
            (ablation).
        reduction: `all_reduce` the workers' outputs, or `reduce_scatter` them to the rows' owners.
        copy_path: on GPUs, `copy_engine`, or `sm`: a kernel, which needs idle multiprocessors.
        idle_sms: on GPUs, multiprocessors that the GEMMs leave to copies.
        cuda_graphs: on GPUs, replay a target's kernels as CUDA graphs.
        targets_in_flight: depth of every per-rank queue; a rank may be this far ahead of its
            replies.
        plan_ring_depth: plans kept in the ring; recent ones stay readable for reports.
        tile_time_us: beta_tile, time of one tile (Eq. 8).
        slot_time_us: time per active slot; 0 gives the paper's Eq. 8.
        copy_time_us: time of one expert copy.
        window_us: lookahead window W_t that hides copies (Eq. 7).
        measure_window: plan with the median of the lookaheads measured so far, and with `window_us`
            only until there are any.
        demand_timeout_s: longest wait for a rank's demand once another rank has posted the target.
        reply_timeout_s: longest wait for an input, a collective, a copy or a reply.
        startup_timeout_s: longest wait for a process to become ready.
        threads_per_worker: compute threads of one CPU worker.
        timeline_events: recorded events per process before the oldest are dropped.
    """

    num_workers: int
    device: DeviceName = "cpu"
    num_ranks: int = 1
    max_tokens_per_rank: int = 1024
    redundant_slots: int = 2
    copy_budget: int | None = None
    compactness_threshold: int = 0
    refine_plans: bool = True
    policy: PolicyName = "afore"
    demand_source: DemandSource = "target"
    overlap_copies: bool = True
    reduction: Reduction = "all_reduce"
    copy_path: CopyPath = "copy_engine"
    idle_sms: int = 0
    cuda_graphs: bool = True
    targets_in_flight: int = 4
    plan_ring_depth: int = 4096
    tile_time_us: float = 50.0
    slot_time_us: float = 0.0
    copy_time_us: float = 50.0
    window_us: float = 2000.0
    measure_window: bool = False
    demand_timeout_s: float = 10.0
    reply_timeout_s: float = 30.0
    startup_timeout_s: float = 120.0
    threads_per_worker: int = 1
    timeline_events: int = 65536

    def __post_init__(self) -> None:
        _require_int("num_workers", self.num_workers, 1, 4096)
        _require_int("num_ranks", self.num_ranks, 1, 4096)
        _require_int("max_tokens_per_rank", self.max_tokens_per_rank, 1)
        _require_int("redundant_slots", self.redundant_slots, 0, 4096)
        if self.copy_budget is not None:
            _require_int("copy_budget", self.copy_budget, 0)
        _require_int("compactness_threshold", self.compactness_threshold, 0)
        _require_choice("policy", self.policy, get_args(PolicyName))
        _require_choice("demand_source", self.demand_source, get_args(DemandSource))
        _require_choice("reduction", self.reduction, get_args(Reduction))
        _require_choice("device", self.device, get_args(DeviceName))
        _require_choice("copy_path", self.copy_path, get_args(CopyPath))
        _require_int("idle_sms", self.idle_sms, 0, 1024)
        for name in ("refine_plans", "overlap_copies", "measure_window", "cuda_graphs"):
            _require(isinstance(getattr(self, name), bool), f"{name} must be true or false")
        _require_int("targets_in_flight", self.targets_in_flight, 1, 1024)
        _require_int("plan_ring_depth", self.plan_ring_depth, 1, 2**20)
        for name in ("tile_time_us", "slot_time_us", "copy_time_us", "window_us"):
            _require_finite(name, getattr(self, name), 0.0)
        for name in ("demand_timeout_s", "reply_timeout_s", "startup_timeout_s"):
            _require_finite(name, getattr(self, name), 0.001)
        _require_int("threads_per_worker", self.threads_per_worker, 1, 1024)
        _require_int("timeline_events", self.timeline_events, 16, 2**24)

    @property
    def effective_copy_budget(self) -> int:
        """The copy budget B with its default resolved."""
        return 2 * self.num_workers if self.copy_budget is None else self.copy_budget
