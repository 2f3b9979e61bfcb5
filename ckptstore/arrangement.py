"""Arrange tensors, by name, into one array: end to end, stacked, transposed.

Every tensor of an arrangement is a box of the array with its dimensions permuted, so two arrangements of
one array say which boxes of the one's tensors are which boxes of the other's, without touching an element.
`mapping.py` makes rules of such pairs; why this is enough: docs/explanation/layouts.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ckptstore.errors import InvalidInputError
from ckptstore.tensor import Box, Shape

FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")


class MisfitError(Exception):
    """Shapes that an arrangement cannot have; its text is told with the names by whoever asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Tensors by name: `{i}` stands for a number, `{rest*}` for any text."""

    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat:
    """Parts end to end along `dim`, of `sizes` elements each; equal sizes when that is None."""

    parts: tuple[Side, ...]
    dim: int
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One part for each number of the field `over`, from 0 without a hole, along a new dimension `dim`."""

    part: Side
    over: str
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transpose:
    """`part` with its dimensions in another order: dimension n is the part's dimension `order[n]`."""

    part: Side
    order: tuple[int, ...]


Side = Named | Concat | Stack | Transpose


def concat(*parts: Side | str, dim: int = 0, sizes: Sequence[int] | None = None) -> Concat:
    """The parts end to end along `dim`; `sizes`, in elements, where they are not equal."""
    if len(parts) < 2 or dim < 0 or (sizes is not None and (len(sizes) != len(parts) or min(sizes) < 0)):
        raise InvalidInputError(
            f"concat of {len(parts)} parts along dimension {dim} with sizes {sizes}: give at least two parts, a "
            f"dimension counted from 0, and no sizes or one for each part"
        )
    made = tuple(map(as_side, parts))
    if len({frozenset(bound_fields(part)) for part in made}) > 1:
        raise InvalidInputError(
            "the parts of a concat stack over different fields: stack all of them, or none"
        )
    return Concat(parts=made, dim=dim, sizes=None if sizes is None else tuple(map(int, sizes)))


def stack(part: Side | str, *, over: str, dim: int = 0) -> Stack:
    """The parts of all numbers of the field `over`, along a new dimension `dim`."""
    if dim < 0:
        raise InvalidInputError(f"stack over {over!r} along dimension {dim}: count dimensions from 0")
    return Stack(part=as_side(part), over=over, dim=dim)


def transpose(part: Side | str, order: Sequence[int] = (1, 0)) -> Transpose:
    """`part` with dimension `order[n]` as its n-th."""
    if sorted(order) != list(range(len(order))):
        raise InvalidInputError(f"transpose to {tuple(order)}: name each dimension once, counted from 0")
    return Transpose(part=as_side(part), order=tuple(order))


def as_side(value: Side | str) -> Side:
    return Named(pattern=value) if isinstance(value, str) else value


# -- names


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A compiled name: what it reads from a name it fills in again."""

    fields: frozenset[str]
    regex: re.Pattern[str]
    pieces: tuple[str, ...]  # text, field, text, field, ..., text

    def fill(self, values: Mapping[str, str]) -> str:
        return "".join(values[piece] if n % 2 else piece for n, piece in enumerate(self.pieces))

    def show(self, values: Mapping[str, str]) -> str:
        """As `fill`, with fields that have no value left as they are."""
        return self.fill({name: values.get(name, f"{{{name}}}") for name in self.fields})

    def read(self, name: str) -> dict[str, str] | None:
        found = self.regex.fullmatch(name)
        return None if found is None else found.groupdict()


@lru_cache(maxsize=4096)
def compile_name(pattern: str) -> Pattern:
    pieces, regex, seen, at = list[str](), "", set[str](), 0
    for found in FIELD.finditer(pattern):
        text, name = pattern[at : found.start()], found[1]
        kind = ".+" if found[2] else "0|[1-9][0-9]*"
        regex += re.escape(text) + (f"(?P={name})" if name in seen else f"(?P<{name}>{kind})")
        pieces += [text, name]
        seen.add(name)
        at = found.end()
    rest = pattern[at:]
    literal = "".join([*pieces[::2], rest])
    if not literal or "{" in literal or "}" in literal:
        raise InvalidInputError(
            f"{pattern!r} is no name: write text, with fields such as {{i}} (a number) or {{rest*}} (any text)",
            name=pattern,
        )
    return Pattern(
        fields=frozenset(seen),
        regex=re.compile(regex + re.escape(rest), re.DOTALL),
        pieces=(*pieces, rest),
    )


def patterns(side: Side) -> Iterator[str]:
    """The names of a side, in order."""
    if isinstance(side, Named):
        yield side.pattern
    elif isinstance(side, Concat):
        for part in side.parts:
            yield from patterns(part)
    else:
        yield from patterns(side.part)


def bound_fields(side: Side) -> Iterator[str]:
    """The fields that stacks of a side run over."""
    if isinstance(side, Stack):
        yield side.over
        yield from bound_fields(side.part)
    elif isinstance(side, Concat):
        yield from bound_fields(side.parts[0])  # equal for all parts
    elif isinstance(side, Transpose):
        yield from bound_fields(side.part)


# -- boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a tensor lies in the array: its `box` there, and for each array dimension the tensor's (-1: none)."""

    box: Box
    dims: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """The tensor's own shape."""
        known = sorted((dim, n) for dim, n in zip(self.dims, self.box.shape, strict=True) if dim >= 0)
        return tuple(n for _, n in known)

    def outward(self, box: Box) -> Box:
        """The array's box of a box of the tensor."""
        return Box(
            offset=tuple(
                at + (box.offset[dim] if dim >= 0 else 0)
                for at, dim in zip(self.box.offset, self.dims, strict=True)
            ),
            shape=tuple(box.shape[dim] if dim >= 0 else 1 for dim in self.dims),
        )

    def inward(self, box: Box) -> Box:
        """The tensor's box of a box of the array, which lies within this placement."""
        inner = sorted(
            (dim, start - at, n)
            for dim, start, at, n in zip(self.dims, box.offset, self.box.offset, box.shape, strict=True)
            if dim >= 0
        )
        return Box(offset=tuple(o for _, o, _ in inner), shape=tuple(n for _, _, n in inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Elements of a wanted tensor and where they are stored: `at` of the wanted tensor is `box` of `tensor`.

    Dimension n of the stored box is dimension `order[n]` of the wanted one, or a new one of extent 1 (-1); a wanted
    dimension that `order` lacks has extent 1 in `at`.
    """

    tensor: str
    box: Box
    at: Box
    order: tuple[int, ...]


def find_sources(wanted: Placement, box: Box, stored: Sequence[tuple[str, Placement]]) -> Iterator[Source]:
    """Where the elements of `box` of the wanted tensor are stored; each of them once if `stored` tiles the array."""
    area = wanted.outward(box)
    for tensor, placement in stored:
        common = area.intersection(placement.box)
        if common is None:
            continue
        order = sorted(
            (mine, theirs) for mine, theirs in zip(placement.dims, wanted.dims, strict=True) if mine >= 0
        )
        yield Source(
            tensor=tensor,
            box=placement.inward(common),
            at=wanted.inward(common),
            order=tuple(theirs for _, theirs in order),
        )


def through(first: Source, second: Source) -> Source:
    """`first` comes from `second.at` (a part of `first.box`) of a tensor that is itself made of `second.tensor`."""
    offset, shape = list(first.at.offset), list(first.at.shape)
    inner = second.at.relative_to(first.box)
    for middle, wanted in enumerate(first.order):
        if wanted >= 0:
            offset[wanted] += inner.offset[middle]
            shape[wanted] = inner.shape[middle]
    return Source(
        tensor=second.tensor,
        box=second.box,
        at=Box(offset=tuple(offset), shape=tuple(shape)),
        order=tuple(first.order[middle] if middle >= 0 else -1 for middle in second.order),
    )


def measure(side: Side, first: Shape, counts: Mapping[str, int]) -> Shape:
    """The array's shape, from that of a tensor of the side's first name and the parts that each stack has."""
    if isinstance(side, Named):
        return first
    if isinstance(side, Concat):
        shape = measure(side.parts[0], first, counts)
        _needs(side.dim < len(shape), f"a concat along dimension {side.dim}", shape)
        whole = len(side.parts) * shape[side.dim] if side.sizes is None else sum(side.sizes)
        return (*shape[: side.dim], whole, *shape[side.dim + 1 :])
    shape = measure(side.part, first, counts)
    if isinstance(side, Stack):
        _needs(side.dim <= len(shape), f"a stack along dimension {side.dim}", shape)
        return (*shape[: side.dim], counts[side.over], *shape[side.dim :])
    _needs(len(side.order) == len(shape), f"a transpose to {side.order}", shape)
    return tuple(shape[dim] for dim in side.order)


def place(side: Side, shape: Shape, fields: Mapping[str, str]) -> Iterator[tuple[str, Placement]]:
    """Every tensor of a side whose array has `shape`: its name and where it lies. They tile the array."""
    if isinstance(side, Named):
        yield (
            compile_name(side.pattern).fill(fields),
            Placement(box=Box.whole(shape), dims=tuple(range(len(shape)))),
        )
    elif isinstance(side, Concat):
        _needs(side.dim < len(shape), f"a split along dimension {side.dim}", shape)
        for part, start, n in _parts(side, shape):
            inner = (*shape[: side.dim], n, *shape[side.dim + 1 :])
            for name, placed in place(part, inner, fields):
                offset = list(placed.box.offset)
                offset[side.dim] += start
                yield (
                    name,
                    Placement(box=Box(offset=tuple(offset), shape=placed.box.shape), dims=placed.dims),
                )
    elif isinstance(side, Stack):
        _needs(side.dim < len(shape), f"an unstack along dimension {side.dim}", shape)
        inner, cut = (*shape[: side.dim], *shape[side.dim + 1 :]), side.dim
        for number in range(shape[cut]):
            for name, placed in place(side.part, inner, {**fields, side.over: str(number)}):
                at, extent, dims = placed.box.offset, placed.box.shape, placed.dims
                yield (
                    name,
                    Placement(
                        box=Box(
                            offset=(*at[:cut], number, *at[cut:]), shape=(*extent[:cut], 1, *extent[cut:])
                        ),
                        dims=(*dims[:cut], -1, *dims[cut:]),
                    ),
                )
    else:
        order = side.order
        _needs(len(order) == len(shape), f"a transpose to {order}", shape)
        inner = tuple(shape[order.index(dim)] for dim in range(len(order)))
        for name, placed in place(side.part, inner, fields):
            box = Box(
                offset=tuple(placed.box.offset[dim] for dim in order),
                shape=tuple(placed.box.shape[dim] for dim in order),
            )
            yield name, Placement(box=box, dims=tuple(placed.dims[dim] for dim in order))


def _parts(side: Concat, shape: Shape) -> Iterator[tuple[Side, int, int]]:
    whole, count = shape[side.dim], len(side.parts)
    sizes = side.sizes if side.sizes is not None else (whole // count,) * count
    if sum(sizes) != whole:
        told = f"sizes {list(sizes)}" if side.sizes is not None else f"{count} equal parts"
        raise MisfitError(f"{whole} along dimension {side.dim} of {list(shape)} are not {told}")
    yield from zip(side.parts, accumulate(sizes, initial=0), sizes, strict=False)


def _needs(holds: bool, what: str, shape: Shape) -> None:
    if not holds:
        raise MisfitError(f"{what} is not possible for shape {list(shape)}")
