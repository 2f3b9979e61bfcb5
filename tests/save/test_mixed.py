"""Tensors held in every way at once, with moments beside them, go to any other way bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore import ExpertParallel, FlatShard, HeldBy, Sharded
from ckptstore.tensor import TensorSpec
from ckptstore.testing.strategies import tilings
from tests.save.runs import new_url, restore, save, tensor_bytes
from tests.save.test_dtensor_boxes import being
from tests.save.test_layouts import held, whole

DTYPES = ("bool", "bfloat16", "int64", "complex64", "float8_e4m3fnuz", "float8_e5m2", "uint16", "complex128")
OF_DTENSORS = ("bool", "bfloat16", "int64", "complex64")
SLOTS = ("weight", "exp_avg", "exp_avg_sq")


def words(value: torch.Tensor) -> torch.Tensor:
    """As integers of the same size: some dtypes have no copies of their own."""
    size = value.element_size()
    return (
        value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        if size < 16
        else value
    )


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way for `size` ranks to hold a tensor: `leaf(value, rank)` gives the rank's leaf, or None."""

    kind: str
    leaf: Callable[[torch.Tensor, int], Any]


@st.composite
def ways(draw: st.DrawFn, spec: TensorSpec, size: int) -> Way:
    kinds = ["plain", "stage", "flat", "boxes"] + ["rows", "dtensor", "replicas"] * bool(spec.shape)
    kind = draw(st.sampled_from(kinds))
    if kind == "dtensor" and spec.dtype not in OF_DTENSORS:
        kind = "rows"
    maker: dict[str, Callable[[], Callable[[torch.Tensor, int], Any]]] = {
        "plain": lambda: lambda value, rank: value,
        "stage": lambda: _stage(draw(st.sets(st.integers(0, size - 1), min_size=1))),
        "flat": lambda: _flat(
            draw(st.lists(st.integers(0, spec.numel), max_size=2 * size - 1)), size, draw(st.booleans())
        ),
        "boxes": lambda: _boxes(draw(tilings(spec.shape)), size),
        "rows": lambda: lambda value, rank: _rows(value, rank, size, None),
        "replicas": lambda: (
            lambda value, rank: _rows(
                value, rank % 2, 2 if size > 1 else 1, [r for r in range(size) if r % 2 == rank % 2]
            )
        ),
        "dtensor": lambda: _dtensor(draw, spec, size),
    }
    return Way(kind=kind, leaf=maker[kind]())


def _stage(ranks: set[int]) -> Callable[[torch.Tensor, int], Any]:
    return lambda value, rank: HeldBy(value, ranks=sorted(ranks)) if rank in ranks else None


def _rows(value: torch.Tensor, rank: int, parts: int, replicas: Sequence[int] | None) -> Sharded:
    each = -(-len(value) // parts)
    start, stop = min(each * rank, len(value)), min(each * (rank + 1), len(value))
    shard = Sharded.dim0(value[start:stop], start=start, size=len(value))
    shard.replicas = replicas if shard.tensor.numel() else None
    return shard


def _flat(cuts: Sequence[int], size: int, strided: bool) -> Callable[[torch.Tensor, int], Any]:
    """Ranges of the flattened tensor, dealt in turn; each rank's are slices of one memory, perhaps with steps."""

    def leaf(value: torch.Tensor, rank: int) -> Any:
        ends = [0, *sorted(cuts), value.numel()]
        ranges = [pair for n, pair in enumerate(pairwise(ends)) if n % size == rank]
        if not ranges:
            return None
        flat = words(value.reshape(-1))
        if strided:
            flat = torch.stack([flat, flat], 1)[:, 0]
        return [FlatShard(flat[a:b].view(value.dtype), tuple(value.shape), a) for a, b in ranges]

    return leaf


def _boxes(boxes: Sequence[Any], size: int) -> Callable[[torch.Tensor, int], Any]:
    def leaf(value: torch.Tensor, rank: int) -> Any:
        mine = [box for n, box in enumerate(boxes) if n % size == rank]
        return [
            Sharded(held(value, box, other_strides=True), tuple(value.shape), box.offset) for box in mine
        ] or None

    return leaf


def _dtensor(draw: st.DrawFn, spec: TensorSpec, size: int) -> Callable[[torch.Tensor, int], Any]:
    mesh = draw(
        st.sampled_from([(size,), (1, size), (2, size // 2)] if size % 2 == 0 else [(size,), (size, 1)])
    )
    placements = [
        draw(
            st.sampled_from(
                [Replicate()]
                + [
                    kind
                    for dim in range(len(spec.shape))
                    for kind in (Shard(dim), _StridedShard(dim, split_factor=2))
                ]
            )
        )
        for _ in mesh
    ]

    def leaf(value: torch.Tensor, rank: int) -> DTensor:
        with being(rank, size):
            world = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
            return distribute_tensor(value, world, placements, src_data_rank=None)

    return leaf


# -- experts: a family as modules or as stacks, with a count of its own for each parameter


@st.composite
def deals(draw: st.DrawFn, total: int, size: int) -> list[list[int]]:
    order = draw(st.permutations(range(total)))
    owners = [draw(st.integers(0, size - 1)) for _ in order]
    return [[n for n, owner in zip(order, owners, strict=True) if owner == rank] for rank in range(size)]


def family(numbers: Sequence[int], total: int, blank: bool) -> ExpertParallel:
    def value(name: str, number: int) -> torch.Tensor:
        spec = TensorSpec(name=f"{name}{number}", dtype="bfloat16", shape=(2, 3))
        return torch.zeros(2, 3, dtype=torch.bfloat16) if blank else whole(spec)

    names = {f"experts.{k}.w": n for k, n in enumerate(numbers)}
    count = {n: torch.tensor(-1.0 if blank else float(n)) for n in numbers}
    stacks = {
        slot: torch.stack([value(f"s{slot}", n) for n in numbers])
        if numbers
        else torch.zeros(0, 2, 3).bfloat16()
        for slot in SLOTS
    }
    state = {
        "model": {name: value("weight", n) for name, n in names.items()} | {"stack": stacks["weight"]},
        "state": {
            name: {"step": count[n], **{slot: value(slot, n) for slot in SLOTS[1:]}}
            for name, n in names.items()
        }
        | {
            "stack": {slot: stacks[slot] for slot in SLOTS[1:]}
            | {"step": torch.tensor(-1.0 if blank else 9.0)}
        },
    }
    return ExpertParallel(state, ["experts.{expert}", "stack"], total, experts=numbers)


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (Sharded, FlatShard)):
        return [value.tensor]
    if isinstance(value, (HeldBy, ExpertParallel)):
        return leaves(value.tree if isinstance(value, HeldBy) else value.state)
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in leaves(item)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), total=st.integers(0, 5))
def test_any_mix_of_ways_goes_to_any_other(data: st.DataObject, sizes: tuple[int, int], total: int) -> None:
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3), label="shapes"
    )
    specs = [
        TensorSpec(name=f"t{n}", dtype=data.draw(st.sampled_from(DTYPES)), shape=s)
        for n, s in enumerate(shapes)
    ]
    drawn = [[data.draw(ways(spec, size), label=spec.name) for spec in specs] for size in sizes]
    dealt = [data.draw(deals(total, size), label="experts") for size in sizes]

    def states(which: int, blank: bool) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for rank in range(sizes[which]):
            state: dict[str, Any] = {}
            if total:
                state["moe"] = family(dealt[which][rank], total, blank)
            for spec, way in zip(specs, drawn[which], strict=True):
                for slot in SLOTS:
                    value = whole(TensorSpec(name=spec.name + slot, dtype=spec.dtype, shape=spec.shape))
                    if blank:
                        words(value).zero_()
                    leaf = way.leaf(value, rank)
                    if leaf is not None:
                        state.setdefault(slot, {})[spec.name] = leaf
            made.append(state)
        return made

    url = new_url()
    save(url, *states(0, blank=False))
    targets, expected = states(1, blank=True), states(1, blank=False)
    restore(url, *targets)
    for target, wanted in zip(targets, expected, strict=True):
        assert [tensor_bytes(leaf) for leaf in leaves(target)] == [
            tensor_bytes(leaf) for leaf in leaves(wanted)
        ]
    read = ckptstore.open(url).read()
    for spec in specs:
        for slot in SLOTS:
            value = whole(TensorSpec(name=spec.name + slot, dtype=spec.dtype, shape=spec.shape))
            assert tensor_bytes(read[slot][spec.name]) == tensor_bytes(value)
    assert math.prod(sizes) > 0
