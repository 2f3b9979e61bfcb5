"""The boxes that are read off a DTensor are those that torch itself gave to each rank.

A process group that sends nothing lets one process be every rank in turn; torch splits, element ids tell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptstore import HeldBy, InvalidInputError
from ckptstore.interop.torch_tensor import LocalShards, local_shards
from ckptstore.layout import Layout
from ckptstore.plan.save import plan_save
from ckptstore.state import flatten
from ckptstore.tensor import Box
from ckptstore.tensor import Shard as Shard_
from tests.save.runs import ids

NAMES = ("a", "b", "c", "d")


@contextmanager
def being(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of a world that does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """(shape of the mesh, shape of the tensor, placements): uneven, empty, strided, several on one dimension."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    while math.prod(mesh) > 12:
        mesh = mesh[1:]
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    placements: list[Any] = []
    for _ in mesh:
        kind = draw(st.sampled_from(("replicate", "shard", "strided"))) if shape else "replicate"
        if kind == "replicate":
            placements.append(Replicate())
            continue
        dim = draw(st.integers(-len(shape) if kind == "shard" else 0, len(shape) - 1))
        split = draw(st.integers(2, 4))
        placements.append(Shard(dim) if kind == "shard" else _StridedShard(dim, split_factor=split))
    return mesh, shape, tuple(placements)


def held(mesh_shape: tuple[int, ...], value: torch.Tensor, placements: tuple[Any, ...]) -> list[LocalShards]:
    """What each rank holds, its views checked against the global tensor's elements."""
    size, found = math.prod(mesh_shape), []
    for rank in range(size):
        with being(rank, size):
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=NAMES[: len(mesh_shape)])
            tensor = distribute_tensor(value, mesh, placements, src_data_rank=None)
            local = local_shards(tensor, rank, "w")
            assert local.shape == tuple(value.shape)
            assert sum(box.numel for box, _ in local.boxes) == tensor.to_local().numel()
            for box, view in local.boxes:
                assert torch.equal(view, value[box.slices] if box.shape else value), (rank, box)
            found.append(local)
    return found


@settings(max_examples=80, deadline=None)
@given(world=worlds())
def test_boxes_hold_what_torch_gave_each_rank(
    world: tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]],
) -> None:
    mesh_shape, shape, placements = world
    value = ids(shape)
    ranks = held(mesh_shape, value, placements)
    holders: dict[Box, list[int]] = {}
    for rank, local in enumerate(ranks):
        for box, _ in local.boxes:
            if box.numel:
                holders.setdefault(box, []).append(rank)
    for rank, local in enumerate(ranks):
        for box, _ in local.boxes:
            if box.numel:
                assert list(local.replicas or (rank,)) == holders[box]
    count: Counter[int] = Counter()
    for box in holders:
        count.update(value[box.slices].flatten().tolist() if box.shape else [0])
    assert count == Counter(range(math.prod(shape)))  # each element in one box, whoever holds it


def test_the_order_of_fsdp_and_tensor_parallelism() -> None:
    """FSDP2 over TP splits a dimension by TP first: several boxes where rows do not divide."""
    ranks = held((2, 2), ids((10, 3)), (_StridedShard(0, split_factor=2), Shard(0)))
    assert [[box.offset[0] for box, _ in local.boxes] for local in ranks] == [[0], [5], [3], [8]]
    ranks = held((2,), ids((10, 3)), (_StridedShard(0, split_factor=2),))
    assert [[(box.offset[0], box.shape[0]) for box, _ in local.boxes] for local in ranks] == [
        [(0, 3), (5, 3)],
        [(3, 2), (8, 2)],
    ]


def test_an_order_of_splits_that_the_tensor_states() -> None:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    value, starts = ids((8,)), []
    for rank in range(4):
        with being(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            row, column = divmod(rank, 2)
            local = value.chunk(2)[column].chunk(2)[row]  # the second mesh dimension first
            meta = TensorMeta(value.shape, value.stride(), value.dtype)
            order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
            spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
            tensor = DTensor(local, spec, requires_grad=False)
            ((box, view),) = local_shards(tensor, rank, "w").boxes
            assert torch.equal(view, value[box.slices])
            starts.append(box.offset[0])
    assert starts == [0, 4, 2, 6]


def test_slices_of_a_mesh() -> None:
    for rank in range(8):
        with being(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            value = ids((6, 4))
            tensor = distribute_tensor(value, mesh["dp", "tp"], (Replicate(), Shard(1)), src_data_rank=None)
            local = local_shards(tensor, rank, "w")
            ((box, view),) = local.boxes
            assert torch.equal(view, value[box.slices]) and box.offset == (0, 2 * (rank % 2))
            first = rank // 4 * 4 + rank % 2
            assert local.replicas == (first, first + 2)
            flat = mesh["dp", "tp"]._flatten("world")
            ((box, _),) = local_shards(
                distribute_tensor(value, flat, (Shard(0),), src_data_rank=None), rank, "w"
            ).boxes
            assert box.offset == (min(2 * (rank % 4), 6), 0)


def test_every_slice_of_a_mesh_may_hold_the_same_tensor() -> None:
    """Tensor parallelism on mesh["tp"] with data parallelism around it: all eight ranks have every weight."""
    ranks, value = list[tuple[Shard_, ...]](), ids((6, 4))
    for rank in range(8):
        with being(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            tensor = distribute_tensor(value, mesh["tp"], (Shard(1),), src_data_rank=None)
            assert local_shards(tensor, rank, "w").replicas == ()
            stage = range(rank // 4 * 4, rank // 4 * 4 + 4)
            state = {f"stage{rank // 4}": HeldBy({"w": tensor}, ranks=stage)}
            leaves = flatten(state, role="trainer", rank=rank).leaves
            assert [leaf.replicas for leaf in leaves] == [tuple(r for r in stage if r % 2 == rank % 2)]
            ranks.append(tuple(Shard_(spec=e.spec, box=e.box, replicas=e.replicas or ()) for e in leaves))
    plan = plan_save(Layout(role="trainer", ranks=tuple(ranks)))  # refuses two claims to one box
    written = sum(chunk.box.numel for chunks in plan for chunk in chunks)
    assert written == 2 * value.numel()  # each stage's once


@pytest.mark.parametrize(
    "placement", [Partial(), Partial("max"), _MaskPartial(offset_shape=torch.Size((2,)), offset_dim=0)]
)
def test_sums_that_are_not_added_up_are_refused(placement: Any) -> None:
    with being(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.ones(2), mesh, (placement,), run_check=False)
        with pytest.raises(
            InvalidInputError, match=r"inner.w is a DTensor .* not added up yet .* redistribute"
        ):
            local_shards(tensor, 0, "inner.w")
