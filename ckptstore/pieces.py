"""The boxes of a global tensor that one rank holds, whatever way it holds them.

Of each kind of leaf come boxes with views of the rank's own memory, so nothing behind this module knows
how a tensor was held: planning, copying and reading see boxes. Argued in docs/explanation/layouts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ckptstore.errors import InvalidInputError
from ckptstore.experts import Experts
from ckptstore.held import FlatShard, Sharded, Where, integers, is_torch_tensor, ranks_of
from ckptstore.tensor import Box, Shape, TensorSpec, cut_flat_range
from ckptstore.values import numpy_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box that this rank holds. `replicas` is None for what every rank of the role holds."""

    box: Box
    data: Any  # torch.Tensor or numpy array: the elements of `box`
    replicas: tuple[int, ...] | None
    shard: int = 0  # which one of a list of shards it is of


def describe(
    value: Any, name: str, path: str, rank: int, where: Where
) -> tuple[TensorSpec, tuple[Piece, ...]]:
    """The global tensor that a leaf is of, and the boxes of it that this rank holds."""
    shards = value if isinstance(value, list) else [value]
    spec, pieces = _describe_one(shards[0], name, path, rank, where)
    for number, shard in enumerate(shards[1:], 1):
        other, more = _describe_one(shard, name, path, rank, where)
        if other != spec:
            raise InvalidInputError(
                f"{path} lists shards of {spec.dtype}{list(spec.shape)} and of {other.dtype}{list(other.shape)}: "
                f"shards of one list are boxes of one tensor",
                path=path,
            )
        pieces += tuple(replace(piece, shard=number) for piece in more)
    if where.per_rank:
        if any(piece.replicas is not None for piece in pieces) or not pieces:
            raise InvalidInputError(
                f"{path} is {type(shards[0]).__name__} within a PerRank: a shard already differs by rank, unwrap it",
                path=path,
            )
        return spec, tuple(replace(piece, replicas=()) for piece in pieces)
    return spec, pieces


def _describe_one(
    value: Any, name: str, path: str, rank: int, where: Where
) -> tuple[TensorSpec, tuple[Piece, ...]]:
    if isinstance(value, FlatShard):
        return _flat(value, name, path)
    if isinstance(value, Sharded):
        return _sharded(value, name, path, rank, where)
    dtype, shape, pieces = _whole(value, path, rank, where)
    if where.per_rank:
        pass  # the value of this rank alone, whoever holds what lies around it
    elif where.stacked is not None and shape:
        shape, pieces = _stacked(where.stacked, shape, pieces, path)
    elif where.holders is not None and pieces[0].replicas is None:
        pieces = (replace(pieces[0], replicas=where.holders),)
    return TensorSpec(name=name, dtype=dtype, shape=shape), pieces


def _whole(value: Any, path: str, rank: int, where: Where) -> tuple[str, Shape, tuple[Piece, ...]]:
    """(dtype, shape, pieces) of a plain tensor, an array or a DTensor."""
    if isinstance(value, np.ndarray):
        shape = tuple(value.shape)
        return numpy_dtype(value, path), shape, (Piece(box=Box.whole(shape), data=value, replicas=None),)
    from ckptstore.interop.torch_tensor import check_dense, dtype_name, is_dtensor, local_shards

    if is_dtensor(value):
        local = local_shards(value, rank, path, holders=where.holders)
        return (
            dtype_name(value.dtype, path),
            local.shape,
            tuple(Piece(box=box, data=view, replicas=local.replicas) for box, view in local.boxes),
        )
    check_dense(value, path)
    shape = tuple(value.shape)
    return dtype_name(value.dtype, path), shape, (Piece(box=Box.whole(shape), data=value, replicas=None),)


def _stacked(
    experts: Experts, shape: Shape, pieces: Sequence[Piece], path: str
) -> tuple[Shape, tuple[Piece, ...]]:
    """The same with a first dimension that counts all experts, not this rank's."""
    if shape[0] != len(experts.numbers):
        raise InvalidInputError(
            f"{path} has {shape[0]} rows where this rank holds {len(experts.numbers)} of the {experts.total} stacked "
            f"experts {experts.pattern!r}: correct experts=, or rank= and size=, or the pattern",
            path=path,
        )
    found = []
    for piece in pieces:
        replicas = experts.replicas if piece.replicas is None else piece.replicas
        low, rest = piece.box.offset[0], (piece.box.offset[1:], piece.box.shape[1:])
        for first, number, count in experts.runs():
            start, stop = max(low, first), min(piece.box.stop[0], first + count)
            if start < stop:
                box = Box(offset=(number + start - first, *rest[0]), shape=(stop - start, *rest[1]))
                found.append(Piece(box=box, data=piece.data[start - low : stop - low], replicas=replicas))
    if not found:  # no experts here: the tensor is known all the same
        known = pieces[0]
        empty = Box(offset=(0, *known.box.offset[1:]), shape=(0, *known.box.shape[1:]))
        found.append(Piece(box=empty, data=known.data[:0], replicas=()))
    return (experts.total, *shape[1:]), tuple(found)


def _sharded(
    value: Sharded, name: str, path: str, rank: int, where: Where
) -> tuple[TensorSpec, tuple[Piece, ...]]:
    if not is_torch_tensor(value.tensor):
        raise InvalidInputError(
            f"{path} is Sharded over a {type(value.tensor).__name__}: give it the local torch tensor",
            path=path,
        )
    dtype, shape, pieces = _whole(value.tensor, path, rank, where)
    whole, offset = integers(value.global_shape, path), integers(value.offset, path)
    fits = len(shape) == len(whole) == len(offset) and all(
        o >= 0 and o + n <= total for o, n, total in zip(offset, shape, whole, strict=True)
    )
    if not fits:
        raise InvalidInputError(
            f"{path}: a shard of shape {shape} at offset {offset} does not lie within global shape {whole}: "
            f"correct offset= or global_shape=",
            path=path,
        )
    if value.replicas is not None and pieces[0].replicas is not None:
        raise InvalidInputError(
            f"{path} is Sharded over a DTensor and names replicas: its mesh says who holds it, leave replicas= out",
            path=path,
        )
    given = ranks_of(value.replicas or (), path)
    return TensorSpec(name=name, dtype=dtype, shape=whole), tuple(
        Piece(
            box=Box(
                offset=tuple(a + b for a, b in zip(offset, piece.box.offset, strict=True)),
                shape=piece.box.shape,
            ),
            data=piece.data,
            replicas=given if piece.replicas is None else piece.replicas,
        )
        for piece in pieces
    )


def _flat(value: FlatShard, name: str, path: str) -> tuple[TensorSpec, tuple[Piece, ...]]:
    from ckptstore.interop.torch_tensor import check_dense, dtype_name, is_dtensor

    if not is_torch_tensor(value.tensor) or is_dtensor(value.tensor) or value.tensor.dim() != 1:
        raise InvalidInputError(
            f"{path} is a FlatShard over {type(value.tensor).__name__} of {getattr(value.tensor, 'ndim', 'no')} "
            f"dimensions: give it the local torch tensor of one dimension",
            path=path,
        )
    check_dense(value.tensor, path)
    whole, local = integers(value.global_shape, path), value.tensor.detach()
    (start,) = integers((value.start,), path)
    if not 0 <= start <= start + len(local) <= prod(whole):
        raise InvalidInputError(
            f"{path}: a flat shard of elements {start} to {start + len(local)} does not lie within the {prod(whole)} "
            f"elements of global shape {whole}: correct start= or global_shape=",
            path=path,
        )
    replicas, pieces, at = ranks_of(value.replicas or (), path), list[Piece](), 0
    for box in cut_flat_range(whole, start, start + len(local)):
        data = local[at : at + box.numel].view(box.shape)
        pieces.append(Piece(box=box, data=data, replicas=replicas))
        at += box.numel
    if not pieces and whole:  # an empty box, so that the tensor is known; a scalar has no empty box
        empty = Box(offset=(0,) * len(whole), shape=whole if 0 in whole else (0,) * len(whole))
        pieces.append(Piece(box=empty, data=local.view(empty.shape), replicas=()))
    return TensorSpec(name=name, dtype=dtype_name(local.dtype, path), shape=whole), tuple(pieces)


def memory_of(data: Any) -> tuple[Any, ...]:
    """Equal for tensors or arrays that are the same elements in the same memory, while they live; else unequal."""
    return _place_of(data), *_looks(data)


def address_of(data: Any) -> int:
    """Of the first element, on whatever device."""
    if isinstance(data, np.ndarray):
        return int(data.__array_interface__["data"][0])
    return int(data.data_ptr())


def is_host_run(data: Any) -> bool:
    """Are the elements, row-major, one run of host memory?"""
    if isinstance(data, np.ndarray):
        return bool(data.flags.c_contiguous)
    return bool(
        data.device.type == "cpu" and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    )


def _place_of(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return address_of(data) if data.size else id(data)
    # Without elements (or memory) there is no address: the storage is known by its own.
    address = address_of(data) if data.numel() else 0
    return address or (data.untyped_storage()._cdata, data.storage_offset())


def _looks(data: Any) -> tuple[Any, ...]:
    """How the elements follow from the memory."""
    if isinstance(data, np.ndarray):
        return "numpy", data.shape, data.strides, data.dtype.str
    return data.device, tuple(data.shape), data.stride(), data.dtype, data.is_conj(), data.is_neg()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Equal for leaves that are one tensor under two names (tied weights): both what they are and where they lie.

    `places` are by memory or by object: slices without elements of one bucket share memory and yet are of
    different tensors, so only a DTensor, which says what it is of, is known by its memory there.
    """

    kind: tuple[Any, ...]
    places: tuple[Any, ...]
    by_memory: bool


def tie_of(value: Any, spec: TensorSpec, where: Where, pieces: Sequence[Piece]) -> Tie | None:
    """None where no other tensor can be the same."""
    if not pieces:
        return None
    by_memory = any(piece.box.numel for piece in pieces) or type(value).__name__ == "DTensor"
    looks = tuple([(piece.box, piece.replicas, _looks(piece.data)) for piece in pieces])
    return Tie(
        kind=(spec.dtype, spec.shape, where.frozen, where.per_rank, looks),
        places=tuple([_place_of(piece.data) if by_memory else id(piece.data) for piece in pieces]),
        by_memory=by_memory,
    )
