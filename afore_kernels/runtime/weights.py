"""Expert weights: where they come from, and the slots they live in.

`ExpertSlots` is one worker's weight memory: per layer its primaries, then its redundant slots, and
its share of the shared expert. On the CPU it is shared memory, so other workers can pull their
replicas from its primaries.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch

from afore_kernels.config import MoEConfig
from afore_kernels.errors import ShapeError
from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.devices import TensorCopy
from afore_kernels.runtime.shared import Field, Segment, field_bytes, field_starts, layout_bytes
from afore_kernels.runtime.transports.local import torch_dtype


class ExpertTensors(NamedTuple):
    """Weights of one routed expert: gate_up [2I, H], down [H, I], biases [2I] and [H] or None."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class SharedTensors(NamedTuple):
    """Weights of a layer's shared expert: gate_up [2Is, H] (gates then ups), down [H, Is]."""

    gate_up: torch.Tensor
    down: torch.Tensor


class WeightSource(Protocol):
    """Anything that can produce the weights of a model's MoE layers."""

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Weights of one routed expert."""

    def shared(self, layer: int) -> SharedTensors | None:
        """Weights of a layer's shared expert, or None."""


class RandomWeights:
    """Reproducible random weights.

    Args:
        moe: shapes.
        seed: of the generator; every expert has its own stream.
        integer: small integers, so that sums are exact and results bit-comparable.
    """

    def __init__(self, moe: MoEConfig, seed: int = 0, *, integer: bool = False) -> None:
        self._moe = moe
        self._seed = seed
        self._integer = integer

    def _tensor(self, key: tuple[int, ...], shape: tuple[int, ...], scale: float) -> torch.Tensor:
        generator = np.random.default_rng((self._seed, *key))
        if self._integer:
            values = generator.integers(-1, 2, shape).astype(np.float32)
        else:
            values = generator.standard_normal(shape, np.float32) * np.float32(scale)
        return torch.from_numpy(values).to(torch_dtype(self._moe))

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        """Weights of one routed expert."""
        moe, key = self._moe, (layer, expert)
        hidden, width = moe.hidden_size, moe.intermediate_size
        return ExpertTensors(
            self._tensor((*key, 0), (2 * width, hidden), hidden**-0.5),
            self._tensor((*key, 1), (hidden, width), width**-0.5),
            self._tensor((*key, 2), (2 * width,), 0.1) if moe.has_bias else None,
            self._tensor((*key, 3), (hidden,), 0.1) if moe.has_bias else None,
        )

    def shared(self, layer: int) -> SharedTensors | None:
        """Weights of a layer's shared expert, or None."""
        hidden, width = self._moe.hidden_size, self._moe.shared_intermediate_size
        if not width:
            return None
        return SharedTensors(
            self._tensor((layer, self._moe.num_experts, 4), (2 * width, hidden), hidden**-0.5),
            self._tensor((layer, self._moe.num_experts, 5), (hidden, width), width**-0.5),
        )


class ExpertSlots:
    """One worker's expert weights, all layers.

    Args:
        moe: shapes.
        placement: of the tier.
        worker: whose weights.
        memory: a segment, or memory of a device, uint8 of at least `weight_bytes`.

    Attributes:
        gate_up: [num_layers, num_slots, 2I, H].
        down: [num_layers, num_slots, H, I].
        gate_up_bias, down_bias: [num_layers, num_slots, 2I] and [..., H], or None.
        shared_gate_up, shared_down: this worker's columns of the shared expert,
            [num_layers, 2 * share, H] and [num_layers, H, share], or None.
        num_primaries: slots before this index are primaries, the others redundant.
    """

    def __init__(
        self,
        moe: MoEConfig,
        placement: PrimaryPlacement,
        worker: int,
        memory: Segment | torch.Tensor,
    ) -> None:
        self.worker = worker
        self.num_primaries = len(placement.primaries(worker))
        self._placement = placement
        self._moe = moe
        if isinstance(memory, Segment):
            memory = torch.frombuffer(memory.buffer, dtype=torch.uint8)
        fields = _fields(moe, placement, worker)
        dtype = torch_dtype(moe)
        tensors = {
            name: memory[start : start + field_bytes(fields[name])]
            .view(dtype)[: math.prod(fields[name].shape)]
            .view(fields[name].shape)
            for name, start in field_starts(fields).items()
        }
        self.gate_up = tensors["gate_up"]
        self.down = tensors["down"]
        self.gate_up_bias = tensors.get("gate_up_bias")
        self.down_bias = tensors.get("down_bias")
        self.shared_gate_up = tensors.get("shared_gate_up")
        self.shared_down = tensors.get("shared_down")

    @staticmethod
    def create_segment(moe: MoEConfig, placement: PrimaryPlacement, worker: int) -> Segment:
        """Create the zeroed weight memory of one worker."""
        return Segment.create(f"afore-weights-{worker}", weight_bytes(moe, placement, worker))

    def load_primaries(self, source: WeightSource) -> None:
        """Fill the primaries and the shared share of every layer from `source`.

        Raises:
            ShapeError: if a tensor does not have the configured shape.
        """
        for layer in range(self._moe.num_layers):
            for slot, expert in enumerate(self._placement.primaries(self.worker)):
                tensors = source.expert(layer, expert)
                for name in ExpertTensors._fields:
                    _fill(getattr(self, name), (layer, slot), getattr(tensors, name), name)
            if self.shared_gate_up is not None and self.shared_down is not None:
                self._load_shared(layer, source.shared(layer))

    def _load_shared(self, layer: int, shared: SharedTensors | None) -> None:
        width = self._moe.shared_intermediate_size
        hidden = self._moe.hidden_size
        expected = ((2 * width, hidden), (hidden, width))
        if shared is None or tuple(tuple(tensor.shape) for tensor in shared) != expected:
            raise ShapeError(f"layer {layer} needs a shared expert of width {width}")
        assert self.shared_gate_up is not None
        assert self.shared_down is not None
        columns = shared_columns(self._moe, self._placement, self.worker)
        gate, up = shared.gate_up.chunk(2)
        rows = torch.cat((gate[columns], up[columns]))
        _fill(self.shared_gate_up, (layer,), rows, "shared gate_up")
        _fill(self.shared_down, (layer,), shared.down[:, columns], "shared down")

    def expert_copies(
        self, layer: int, slot: int, donor: ExpertSlots, donor_slot: int
    ) -> list[TensorCopy]:
        """The copies that bring one expert's weights from `donor`'s slot into this worker's."""
        return [
            (tensor[layer, slot], getattr(donor, name)[layer, donor_slot])
            for name in ExpertTensors._fields
            if (tensor := getattr(self, name)) is not None
        ]


def weight_bytes(moe: MoEConfig, placement: PrimaryPlacement, worker: int) -> int:
    """Size of one worker's weight memory."""
    return layout_bytes(_fields(moe, placement, worker))


def shared_columns(moe: MoEConfig, placement: PrimaryPlacement, worker: int) -> slice:
    """The columns of the shared expert's intermediate width that `worker` computes."""
    width, num_workers = moe.shared_intermediate_size, placement.num_workers
    return slice(width * worker // num_workers, width * (worker + 1) // num_workers)


def _fill(
    destination: torch.Tensor | None,
    index: tuple[int, ...],
    value: torch.Tensor | None,
    name: str,
) -> None:
    if (destination is None) != (value is None):
        raise ShapeError(f"{name}: {'unexpected' if destination is None else 'missing'} tensor")
    if destination is None or value is None:
        return
    if destination[index].shape != value.shape:
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)}, expected {tuple(destination[index].shape)}"
        )
    destination[index].copy_(value)


def _fields(moe: MoEConfig, placement: PrimaryPlacement, worker: int) -> dict[str, Field]:
    element = np.float32 if moe.dtype == "float32" else np.uint16
    slots = (moe.num_layers, placement.num_slots(worker))
    hidden, width = moe.hidden_size, moe.intermediate_size
    fields = {
        "gate_up": Field(element, (*slots, 2 * width, hidden)),
        "down": Field(element, (*slots, hidden, width)),
    }
    if moe.has_bias:
        fields["gate_up_bias"] = Field(element, (*slots, 2 * width))
        fields["down_bias"] = Field(element, (*slots, hidden))
    if moe.shared_intermediate_size:
        columns = shared_columns(moe, placement, worker)
        share = columns.stop - columns.start
        fields["shared_gate_up"] = Field(element, (moe.num_layers, 2 * share, hidden))
        fields["shared_down"] = Field(element, (moe.num_layers, hidden, share))
    return fields
