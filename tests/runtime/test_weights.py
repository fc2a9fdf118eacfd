from __future__ import annotations

import os

import pytest
import torch

from afore_kernels.config import MoEConfig
from afore_kernels.errors import ShapeError
from afore_kernels.plan import PrimaryPlacement
from afore_kernels.runtime.devices.cpu import CpuDevice
from afore_kernels.runtime.shared import Segment
from afore_kernels.runtime.weights import (
    ExpertSlots,
    ExpertTensors,
    RandomWeights,
    SharedTensors,
    shared_columns,
)

NUM_LAYERS, NUM_EXPERTS, HIDDEN, WIDTH, SHARED_WIDTH = 2, 5, 6, 4, 7


def config(**changes) -> MoEConfig:
    shapes = {
        "num_layers": NUM_LAYERS,
        "num_experts": NUM_EXPERTS,
        "top_k": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "shared_intermediate_size": SHARED_WIDTH,
        "has_bias": True,
    }
    return MoEConfig(**shapes | changes)


def new_slots(moe: MoEConfig, num_workers: int = 2, source=None) -> list[ExpertSlots]:
    placement = PrimaryPlacement(moe.num_experts, num_workers, 1)
    workers = []
    for worker in range(num_workers):
        segment = ExpertSlots.create_segment(moe, placement, worker)
        workers.append(ExpertSlots(moe, placement, worker, segment))
        segment.close()
        workers[-1].load_primaries(source or RandomWeights(moe))
    return workers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_primaries_hold_their_experts_and_redundant_slots_are_empty(dtype):
    moe = config(dtype=dtype)
    source = RandomWeights(moe)
    first = 0
    for slots in new_slots(moe):
        assert slots.gate_up.dtype is getattr(torch, dtype)
        for layer in range(NUM_LAYERS):
            for slot in range(slots.num_primaries):
                expected = source.expert(layer, first + slot)
                for name in ExpertTensors._fields:
                    found = getattr(slots, name)[layer, slot]
                    assert torch.equal(found, getattr(expected, name)), name
        for name in ExpertTensors._fields:
            assert not getattr(slots, name)[:, slots.num_primaries :].any()
        first += slots.num_primaries
    assert first == NUM_EXPERTS


def test_copy_moves_every_tensor_of_one_expert_and_nothing_else():
    moe = config()
    receiver, donor = new_slots(moe)
    before = {name: getattr(receiver, name).clone() for name in ExpertTensors._fields}
    CpuDevice(20).copy(receiver.expert_copies(1, receiver.num_primaries, donor, 1))
    expected = RandomWeights(moe).expert(1, receiver.num_primaries + 1)
    for name in ExpertTensors._fields:
        after = getattr(receiver, name)
        assert torch.equal(after[1, receiver.num_primaries], getattr(expected, name))
        after[1, receiver.num_primaries] = before[name][1, receiver.num_primaries]
        assert torch.equal(after, before[name])


def test_biases_and_shared_expert_exist_only_where_configured():
    (slots,) = new_slots(config(has_bias=False, shared_intermediate_size=0), num_workers=1)
    assert (slots.gate_up_bias, slots.down_bias) == (None, None)
    assert (slots.shared_gate_up, slots.shared_down) == (None, None)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
def test_shares_of_the_shared_expert_add_up_to_all_of_it(num_workers):
    moe = config(num_experts=8)
    workers = new_slots(moe, num_workers)
    for layer in range(NUM_LAYERS):
        whole = RandomWeights(moe).shared(layer)
        gates, ups = zip(*(w.shared_gate_up[layer].chunk(2) for w in workers))
        assert torch.equal(torch.cat([*gates, *ups]), whole.gate_up)
        assert torch.equal(torch.cat([w.shared_down[layer] for w in workers], 1), whole.down)


@pytest.mark.parametrize("num_workers", [1, 3, 9])
def test_shared_columns_are_contiguous_and_of_near_equal_size(num_workers):
    placement = PrimaryPlacement(NUM_EXPERTS, num_workers, 1)
    columns = [shared_columns(config(), placement, w) for w in range(num_workers)]
    assert [c.start for c in columns] == [0, *(c.stop for c in columns[:-1])]
    assert columns[-1].stop == SHARED_WIDTH
    sizes = [c.stop - c.start for c in columns]
    assert max(sizes) - min(sizes) <= 1


class Altered(RandomWeights):
    """Random weights with one tensor replaced."""

    def __init__(self, moe: MoEConfig, name: str, change) -> None:
        super().__init__(moe)
        self._name = name
        self._change = change

    def expert(self, layer: int, expert: int) -> ExpertTensors:
        tensors = super().expert(layer, expert)
        if self._name not in ExpertTensors._fields:
            return tensors
        return tensors._replace(**{self._name: self._change(getattr(tensors, self._name))})

    def shared(self, layer: int) -> SharedTensors | None:
        tensors = super().shared(layer)
        if self._name == "shared":
            return None
        if not self._name.startswith("shared_"):
            return tensors
        name = self._name.removeprefix("shared_")
        return tensors._replace(**{name: self._change(getattr(tensors, name))})


@pytest.mark.parametrize("name", [*ExpertTensors._fields, "shared_gate_up", "shared_down"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dimension", [0, -1])
def test_tensor_of_another_shape_is_refused(name, num_workers, dimension):
    moe = config()
    longer = Altered(moe, name, lambda t: torch.cat([t, t], dimension))
    with pytest.raises(ShapeError, match=name.removeprefix("shared_") + "|shared expert"):
        new_slots(moe, num_workers, longer)
    shorter = Altered(moe, name, lambda t: t.narrow(dimension, 0, t.shape[dimension] - 1))
    with pytest.raises(ShapeError):
        new_slots(moe, num_workers, shorter)


@pytest.mark.parametrize("name", ExpertTensors._fields)
def test_missing_tensor_is_refused(name):
    with pytest.raises(ShapeError, match=f"{name}: missing tensor"):
        new_slots(config(), source=Altered(config(), name, lambda t: None))


def test_unexpected_bias_is_refused():
    with pytest.raises(ShapeError, match="gate_up_bias: unexpected tensor"):
        new_slots(config(has_bias=False), source=RandomWeights(config()))


def test_missing_shared_expert_is_refused():
    with pytest.raises(ShapeError, match=r"layer 0 needs a shared expert of width 7"):
        new_slots(config(), source=Altered(config(), "shared", None))


def test_another_mapping_of_the_segment_sees_the_weights():
    moe = config()
    placement = PrimaryPlacement(NUM_EXPERTS, 2, 1)
    segment = ExpertSlots.create_segment(moe, placement, 1)
    ExpertSlots(moe, placement, 1, segment).load_primaries(RandomWeights(moe))
    other = ExpertSlots(moe, placement, 1, Segment.open(os.dup(segment.fd)))
    assert torch.equal(other.down[1, 0], RandomWeights(moe).expert(1, 3).down)
    segment.close()


def test_random_weights_are_reproducible_and_all_different():
    moe = config()
    tensors = [
        tensor
        for layer in range(NUM_LAYERS)
        for expert in range(NUM_EXPERTS)
        for tensor in RandomWeights(moe, seed=3).expert(layer, expert)
    ] + [tensor for layer in range(NUM_LAYERS) for tensor in RandomWeights(moe, 3).shared(layer)]
    firsts = [float(tensor.flatten()[0]) for tensor in tensors]
    assert len(set(firsts)) == len(firsts)
    again = RandomWeights(moe, seed=3).expert(0, 0)
    assert torch.equal(again.gate_up, tensors[0])
    assert not torch.equal(RandomWeights(moe, seed=4).expert(0, 0).gate_up, tensors[0])


def test_integer_weights_are_small_integers():
    gate_up = RandomWeights(config(), integer=True).expert(0, 0).gate_up
    assert set(gate_up.unique().tolist()) == {-1.0, 0.0, 1.0}
