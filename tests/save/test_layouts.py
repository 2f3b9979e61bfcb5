"""Whatever layout saved a tensor, any other layout gets each of its elements, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import Sharded
from ckptstore.layout import Layout
from ckptstore.plan import save as plan_save_module
from ckptstore.tensor import DTYPES, Box, Shard, TensorSpec
from ckptstore.testing import strategies
from tests.save.runs import new_url, restore, save, tensor_bytes


def whole(spec: TensorSpec) -> torch.Tensor:
    """The global tensor: the first byte of each element is its number, the others depend on the name."""
    numbers = np.full((spec.numel, DTYPES[spec.dtype]), sum(spec.name.encode()) % 251, np.uint8)
    numbers[:, 0] = np.arange(spec.numel) % 2 if spec.dtype == "bool" else np.arange(spec.numel)
    if not numbers.size:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    return torch.from_numpy(numbers.reshape(-1)).view(getattr(torch, spec.dtype)).view(spec.shape)


def held(value: Any, box: Box, *, other_strides: bool) -> torch.Tensor:
    """A tensor of the box's elements, alone in its memory, whose strides may be reversed."""
    size = value.element_size()
    words = (
        value
        if size == 16
        else value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    )
    part = words[box.slices].clone() if box.shape else words.clone()
    if other_strides and part.dim() > 1:
        part = part.permute(*reversed(range(part.dim()))).contiguous().permute(*reversed(range(part.dim())))
    return part.view(value.dtype)


def state_of(layout: Layout, rank: int, odd: bool) -> dict[str, Any]:
    """The rank's state: plain where all ranks hold the whole tensor, else one Sharded or a list of them."""
    everyone = tuple(range(layout.size))
    held_shards: dict[str, list[Shard]] = {}
    for shard in layout.ranks[rank]:
        held_shards.setdefault(shard.spec.name, []).append(shard)
    state: dict[str, Any] = {}
    for name, shards in held_shards.items():
        values = [held(whole(shard.spec), shard.box, other_strides=odd) for shard in shards]
        first = shards[0]
        if (
            len(shards) == 1
            and first.box == Box.whole(first.spec.shape)
            and (first.replicas or (rank,)) == everyone
        ):
            state[name] = values[0]
            continue
        boxes = [
            Sharded(value, global_shape=s.spec.shape, offset=s.box.offset, replicas=s.replicas or None)
            for s, value in zip(shards, values, strict=True)
        ]
        state[name] = boxes[0] if odd and len(boxes) == 1 else boxes
    return state


@st.composite
def targets(draw: st.DrawFn, specs: list[TensorSpec], odd: bool) -> dict[str, Any]:
    """What one rank asks for: any boxes of any of the tensors, overlapping or not, filled with other bits."""
    state: dict[str, Any] = {}
    for spec in specs:
        blank = torch.zeros((), dtype=getattr(torch, spec.dtype)).expand(spec.shape)
        kind = draw(st.sampled_from(("plain", "one", "several", "none")))
        if kind == "plain":
            state[spec.name] = held(blank, Box.whole(spec.shape), other_strides=odd)
        elif kind != "none":
            boxes = draw(
                st.lists(strategies.boxes(spec.shape), min_size=1, max_size=3 if kind == "several" else 1)
            )
            shards = [
                Sharded(held(blank, box, other_strides=odd), global_shape=spec.shape, offset=box.offset)
                for box in boxes
            ]
            state[spec.name] = shards if kind == "several" else shards[0]
    return state


def check(state: dict[str, Any], specs: dict[str, TensorSpec]) -> None:
    for name, value in state.items():
        for shard in value if isinstance(value, list) else [value]:
            if isinstance(shard, Sharded):
                box, tensor = Box(offset=tuple(shard.offset), shape=tuple(shard.tensor.shape)), shard.tensor
            else:
                box, tensor = Box.whole(tuple(shard.shape)), shard
            assert tensor_bytes(tensor) == tensor_bytes(held(whole(specs[name]), box, other_strides=False)), (
                name,
                box,
            )


@settings(max_examples=60)
@given(data=st.data(), layout=strategies.layouts(), odd=st.booleans(), small=st.booleans())
def test_any_layout_is_restored_to_any_layout_bit_by_bit(
    data: st.DataObject, layout: Layout, odd: bool, small: bool
) -> None:
    specs = {shard.spec.name: shard.spec for shards in layout.ranks for shard in shards}
    url = new_url()
    with pytest.MonkeyPatch.context() as patch:
        if small:  # tensors as small as these are cut in many chunks, too
            patch.setattr(
                "ckptstore.exchange.plan_rank",
                lambda *given: plan_save_module.plan_rank(*given, chunk_nbytes=24, slice_nbytes_min=8),
            )
        save(url, *(state_of(layout, rank, odd) for rank in range(layout.size)))
    ranks = data.draw(
        st.lists(targets(list(specs.values()), not odd), min_size=1, max_size=4), label="targets"
    )
    if not any(ranks):
        return
    members = restore(url, *ranks)
    for member, state in zip(members, ranks, strict=True):
        check(state, specs)
        assert member.last_restore is not None
    read = ckptstore.open(url).read()
    check(read, specs)
    assert read.keys() == specs.keys()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_uneven_experts_are_spread_over_any_number_of_ranks(ranks: int) -> None:
    experts, saved_on = 7, 3

    def shard(rank: int, size: int, values: torch.Tensor) -> Sharded:
        start, stop = experts * rank // size, experts * (rank + 1) // size
        return Sharded.dim0(values[start:stop].clone(), start=start, size=experts)

    values = torch.arange(experts * 6, dtype=torch.bfloat16).reshape(experts, 2, 3)
    url = new_url()
    save(url, *({"experts": shard(rank, saved_on, values), "rest": values[0]} for rank in range(saved_on)))
    targets = [
        {"experts": shard(rank, ranks, torch.zeros_like(values)), "rest": torch.zeros_like(values[0])}
        for rank in range(ranks)
    ]
    restore(url, *targets)
    assert torch.equal(torch.cat([target["experts"].tensor for target in targets]), values)
    assert all(torch.equal(target["rest"], values[0]) for target in targets)
