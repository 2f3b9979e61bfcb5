"""What a rank writes of a DCP save plan: chunks of tensors, and values as tagged JSON.

A value is taken from the planner before torch pickles it, and what has no tag is refused by its name: nothing
that would run code at load is ever stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as pl

from ckptstore.errors import InvalidInputError
from ckptstore.interop.dcp_names import is_terminal, tags_in
from ckptstore.interop.torch_tensor import byte_view, check_dense, copy_to_bytes, dtype_name
from ckptstore.plan.save import CHUNK_NBYTES
from ckptstore.skeleton import WRAPPERS, escape
from ckptstore.sources import Bytes, copy_range
from ckptstore.state import TensorLeaf, flatten
from ckptstore.tensor import Box, TensorSpec, halve, itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemChunk:
    """One box of one tensor in host memory, row-major."""

    spec: TensorSpec
    box: Box
    data: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of a plan, resolved. `value` holds the skeleton of a value under "value"; None for a tensor."""

    index: md.MetadataIndex
    chunks: tuple[ItemChunk, ...]
    value: dict[str, Any] | None

    @property
    def nbytes(self) -> int:
        return sum(chunk.data.nbytes for chunk in self.chunks)


def resolve(plan: pl.SavePlan, planner: pl.SavePlanner, *, role: str, rank: int) -> list[Item]:
    """All items of this rank's plan. InvalidInputError names what cannot be stored.

    CPU tensors that are contiguous are not copied: they must not change before they are written.
    """
    items = []
    for item in plan.items:
        if item.type == pl.WriteItemType.BYTE_IO:
            items.append(_value(item, planner, role=role, rank=rank))
        else:
            items.append(_tensor(item, planner, role=role))
    return items


def _tensor(item: pl.WriteItem, planner: pl.SavePlanner, *, role: str) -> Item:
    fqn, wanted = item.index.fqn, item.tensor_data
    data = planner.resolve_data(item)
    if wanted is None or not isinstance(data, torch.Tensor):
        raise InvalidInputError(
            f"{fqn} is planned as a tensor, but the planner gives a {type(data).__name__} for it", name=fqn
        )
    tensor = data.detach()
    check_dense(tensor, fqn)
    box = Box(offset=tuple(wanted.chunk.offsets), shape=tuple(wanted.chunk.sizes))
    if tuple(tensor.shape) != box.shape:
        raise InvalidInputError(
            f"{fqn} is planned with shape {box.shape}, but the planner gives {tuple(tensor.shape)} for it",
            name=fqn,
        )
    spec = TensorSpec(
        name=f"{role}/{escape(fqn)}", dtype=dtype_name(tensor.dtype, fqn), shape=tuple(wanted.size)
    )
    return Item(index=item.index, chunks=tuple(_chunks(spec, box, tensor)), value=None)


def _chunks(spec: TensorSpec, box: Box, tensor: torch.Tensor) -> Iterator[ItemChunk]:
    if not box.numel and (spec.numel or any(box.offset)):
        return  # an empty shard; of a tensor without elements one chunk is kept, so that it is known
    data = byte_view(tensor)
    if data is None:
        data = np.empty(tensor.numel() * tensor.element_size(), np.uint8)
        copy_to_bytes(tensor, data)
    yield from _cut(spec, box, data)


def _cut(spec: TensorSpec, whole: Box, data: Bytes) -> Iterator[ItemChunk]:
    size = itemsize(spec.dtype)
    for box in halve(whole, max(1, CHUNK_NBYTES // size)):
        start = box.start_in(whole) * size if box.numel else 0
        yield ItemChunk(spec=spec, box=box, data=data[start : start + box.numel * size])


def _value(item: pl.WriteItem, planner: pl.SavePlanner, *, role: str, rank: int) -> Item:
    fqn = item.index.fqn
    find = getattr(planner, "lookup_object", None)
    if find is None:
        raise InvalidInputError(
            f"{fqn} is no tensor, and {type(planner).__name__} gives it only as pickled bytes, which are never "
            f"stored: derive the planner from DefaultSavePlanner, or give it lookup_object",
            name=fqn,
        )
    value = find(item.index)
    flat = flatten({fqn: value}, role=role, rank=rank)
    ((_, node),) = flat.skeleton["d"]
    if tags_in(node) & {"p", *WRAPPERS} or any(
        leaf.box != Box.whole(leaf.spec.shape) for leaf in flat.leaves
    ):
        raise InvalidInputError(
            f"{fqn} holds an object with a state_dict, a shard or a wrapper of ckptstore's: in a DCP state put "
            f"it at the top, or save its state_dict()",
            name=fqn,
        )
    if not is_terminal(node, True):  # the planner did not flatten it: it is to be given back as one item
        node = {"o": node}
    chunks = tuple(chunk for leaf in flat.leaves for chunk in _leaf_chunks(leaf))
    return Item(index=item.index, chunks=chunks, value={"value": node})


def _leaf_chunks(leaf: TensorLeaf) -> Iterator[ItemChunk]:
    data = np.empty(leaf.nbytes, np.uint8)
    copy_range(leaf.data, leaf.box.shape, 0, data)
    yield from _cut(leaf.spec, leaf.box, data)
