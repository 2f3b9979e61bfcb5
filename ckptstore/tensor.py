"""Tensor specs, boxes and shards: which elements of which tensor are meant.

Everything that plans, proves or copies speaks of boxes, so the algebra stands apart from all of it
and needs neither numpy nor torch. Offsets and shapes count elements, `nbytes` counts bytes. Why
boxes and halving, and what stays aligned when a degree doubles: docs/explanation/layouts.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from ckptstore.errors import InvalidInputError

Shape = tuple[int, ...]

# Names as torch and ml_dtypes write them. A packed float4 element is a byte that holds two numbers,
# and shapes count bytes, as in torch.
DTYPES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "uint16": 2,
        "int16": 2,
        "uint32": 4,
        "int32": 4,
        "uint64": 8,
        "int64": 8,
        "float4_e2m1fn_x2": 1,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
    }
)


def itemsize(dtype: str) -> int:
    """Bytes of one element; InvalidInputError for a dtype that ckptstore does not store."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise InvalidInputError(
            f"dtype {dtype!r} cannot be stored; convert the tensor to one of {', '.join(sorted(DTYPES))}",
            dtype=dtype,
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a whole tensor is: `shape` is the global one."""

    name: str
    dtype: str
    shape: Shape

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        if not self.name:
            raise InvalidInputError("a tensor has an empty name; give it one", shape=self.shape)
        if self.shape and min(self.shape) < 0:
            raise InvalidInputError(
                f"{self.name}: shape {self.shape} has a negative extent; pass the global shape",
                tensor=self.name,
                shape=self.shape,
            )

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of a tensor; an extent of zero is allowed, `()` is the box of a scalar."""

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise InvalidInputError(
                f"box offset {self.offset} and shape {self.shape} differ in length; make them equally long",
                offset=self.offset,
                shape=self.shape,
            )
        if self.shape and (min(self.offset) < 0 or min(self.shape) < 0):
            raise InvalidInputError(
                f"box offset {self.offset}, shape {self.shape} has a negative number; count from 0",
                offset=self.offset,
                shape=self.shape,
            )

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls(offset=(0,) * len(shape), shape=shape)

    @property
    def stop(self) -> Shape:
        """Offset plus shape: one past the last element in each dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """The elements in both; None when there are none. InvalidInputError if their ndim differs."""
        self._same_ndim(other)
        offset = tuple(map(max, self.offset, other.offset))
        stop = tuple(map(min, self.stop, other.stop))
        shape = tuple(b - a for a, b in zip(offset, stop, strict=True))
        if any(n <= 0 for n in shape):
            return None
        return Box(offset=offset, shape=shape)

    def contains(self, other: Box) -> bool:
        """Whether `other` lies within this box's bounds, also where `other` has no element."""
        self._same_ndim(other)
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def relative_to(self, outer: Box) -> Box:
        """This box in coordinates whose origin is `outer`'s first element; it must lie within `outer`."""
        self._within(outer)
        return Box(
            offset=tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), shape=self.shape
        )

    def start_in(self, outer: Box) -> int:
        """Row-major index, inside `outer`, of this box's first element (elements, not bytes)."""
        self._within(outer)
        index = 0
        for mine, origin, extent in zip(self.offset, outer.offset, outer.shape, strict=True):
            index = index * extent + mine - origin
        return index

    def is_contiguous_in(self, outer: Box) -> bool:
        """Whether this box's elements follow each other without a gap in `outer`'s row-major order."""
        self._within(outer)
        if self.numel == 0:
            return True
        extents = list(zip(self.shape, outer.shape, strict=True))
        while extents and extents[0][0] == 1:
            del extents[0]
        return all(mine == full for mine, full in extents[1:])

    def _same_ndim(self, other: Box) -> None:
        if len(self.shape) != len(other.shape):
            raise InvalidInputError(
                f"boxes of {len(self.shape)} and {len(other.shape)} dimensions cannot be compared; "
                f"use boxes of one tensor",
                left=self,
                right=other,
            )

    def _within(self, outer: Box) -> None:
        if not outer.contains(self):
            raise InvalidInputError(
                f"{self} does not lie in {outer}; use a box that the outer one holds", box=self, outer=outer
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The box of one tensor that one rank holds.

    `replicas` are the sorted ranks that hold this very box, this rank included; empty means this
    rank alone, which then writes it whole.
    """

    spec: TensorSpec
    box: Box
    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.box.shape) != len(self.spec.shape) or any(
            stop > extent for stop, extent in zip(self.box.stop, self.spec.shape, strict=True)
        ):
            raise InvalidInputError(
                f"{self.spec.name}: the shard at offset {self.box.offset} with shape {self.box.shape} leaves "
                f"the global shape {self.spec.shape}; correct its offset or the global shape",
                tensor=self.spec.name,
                box=self.box,
                shape=self.spec.shape,
            )
        if self.replicas and (
            self.replicas[0] < 0
            or any(a >= b for a, b in zip(self.replicas, self.replicas[1:], strict=False))
        ):
            raise InvalidInputError(
                f"{self.spec.name}: replicas {self.replicas} are not distinct rising ranks; sort them",
                tensor=self.spec.name,
                replicas=self.replicas,
            )

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPES[self.spec.dtype]


def cut_flat_range(shape: Shape, start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that hold elements `start` to `stop` of the flattened tensor.

    In row-major order, at most 2·ndim - 1 of them, none empty; an empty range has none.
    InvalidInputError if the range does not lie in the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise InvalidInputError(
            f"flat range {start} to {stop} does not lie in the {prod(shape)} elements of shape {shape}; "
            f"correct its start or length",
            start=start,
            stop=stop,
            shape=shape,
        )
    return _cut_range((), shape, start, stop)


def _cut_range(index: Shape, shape: Shape, start: int, stop: int) -> tuple[Box, ...]:
    """`cut_flat_range` inside the sub-tensor at the leading coordinates `index`."""
    if start == stop:
        return ()
    ones = (1,) * len(index)
    if not shape:
        return (Box(offset=index, shape=ones),)
    rest = shape[1:]
    row = prod(rest)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _cut_range((*index, first), rest, head, tail)
    boxes: tuple[Box, ...] = ()
    if head:
        boxes += _cut_range((*index, first), rest, head, row)
        first += 1
    if first < last:
        zeros = (0,) * len(rest)
        boxes += (Box(offset=(*index, first, *zeros), shape=(*ones, last - first, *rest)),)
    if tail:
        boxes += _cut_range((*index, last), rest, 0, tail)
    return boxes


def halve(box: Box, max_numel: int) -> tuple[Box, ...]:
    """Cut into pieces of at most `max_numel` elements, in row-major order, each contiguous in `box`.

    The first dimension longer than 1 is halved again and again, its longer half first as
    `torch.chunk` cuts, so the pieces of half a tensor are also pieces of the whole. A box without
    elements is one piece.
    """
    if max_numel < 1:
        raise InvalidInputError(
            f"a piece of at most {max_numel} elements cannot hold any; pass 1 or more", max_numel=max_numel
        )
    if box.numel <= max_numel:
        return (box,)
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    first = (box.shape[axis] + 1) // 2
    before, after = box.shape[:axis], box.shape[axis + 1 :]
    shifted = (*box.offset[:axis], box.offset[axis] + first, *box.offset[axis + 1 :])
    return (
        *halve(Box(offset=box.offset, shape=(*before, first, *after)), max_numel),
        *halve(Box(offset=shifted, shape=(*before, box.shape[axis] - first, *after)), max_numel),
    )
