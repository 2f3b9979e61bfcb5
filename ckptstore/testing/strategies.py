"""Hypothesis strategies for shapes, boxes, tilings, layouts and chunk tables.

Public, so that stores and launchers written elsewhere can be tested with the same inputs. They
shrink towards one rank, one tensor, one box. Needs the `test` extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from hypothesis import strategies as st

from ckptstore.chunktable import DIGEST_NBYTES, ChunkTable, make_table
from ckptstore.layout import Layout
from ckptstore.tensor import DTYPES, Box, Shape, Shard, TensorSpec, cut_flat_range

_DEPTH_MAX = 5


@st.composite
def shapes(
    draw: st.DrawFn, *, max_elements: int = 512, max_ndim: int = 4, max_side: int = 9, min_side: int = 1
) -> Shape:
    """Shapes of 0 to `max_ndim` dimensions; `min_side=0` also gives tensors without elements."""
    shape: Shape = ()
    for _ in range(draw(st.integers(0, max_ndim))):
        most = min(max_side, max_elements // max(1, prod(shape)))
        shape += (draw(st.integers(min_side, max(min_side, most))),)
    return shape


@st.composite
def boxes(draw: st.DrawFn, shape: Shape, *, min_side: int = 0) -> Box:
    """Boxes within `shape`, whose extents are at least `min_side` where the shape allows it."""
    offset, extent = [], []
    for size in shape:
        least = min(min_side, size)
        start = draw(st.integers(0, size - least))
        offset.append(start)
        extent.append(draw(st.integers(least, size - start)))
    return Box(offset=tuple(offset), shape=tuple(extent))


def tilings(shape: Shape) -> st.SearchStrategy[tuple[Box, ...]]:
    """Boxes, in any order, that hold each element of `shape` once.

    Recursive straight cuts, pinwheels (which no straight cut takes apart) and flat ranges; a shape
    without elements has its whole box.
    """
    if prod(shape) == 0:
        return st.just((Box.whole(shape),))
    ways = [_cut(Box.whole(shape), _DEPTH_MAX), _flat_ranges(shape)]
    if sum(size >= 3 for size in shape) >= 2:
        ways.append(_pinwheel(shape))
    return st.one_of(*ways).flatmap(lambda tiles: st.permutations(tiles).map(tuple))


@st.composite
def _cut(draw: st.DrawFn, box: Box, depth: int) -> tuple[Box, ...]:
    axes = [axis for axis, size in enumerate(box.shape) if size > 1]
    if not axes or not depth or not draw(st.booleans()):
        return (box,)
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.shape[axis] - 1))
    halves = _split(box, axis, at)
    return tuple(piece for half in halves for piece in draw(_cut(half, depth - 1)))


@st.composite
def _flat_ranges(draw: st.DrawFn, shape: Shape) -> tuple[Box, ...]:
    numel = prod(shape)
    inner = draw(st.sets(st.integers(1, numel - 1), max_size=3)) if numel > 1 else set()
    ends = [0, *sorted(inner), numel]
    return tuple(box for start, stop in pairwise(ends) for box in cut_flat_range(shape, start, stop))


@st.composite
def _pinwheel(draw: st.DrawFn, shape: Shape) -> tuple[Box, ...]:
    """Four arms around a middle, over two axes."""
    first, second = [axis for axis, size in enumerate(shape) if size >= 3][:2]
    low, high = (draw(st.integers(1, shape[axis] - 2)) for axis in (first, second))
    ends = {first: (low, shape[first] - 1), second: (high, shape[second] - 1)}
    (a, b), (c, d) = ends[first], ends[second]
    rows, columns = shape[first], shape[second]
    tiles = []
    for lo, hi in (
        ((0, 0), (a, d)),
        ((0, d), (b, columns)),
        ((b, c), (rows, columns)),
        ((a, 0), (rows, c)),
        ((a, c), (b, d)),
    ):
        offset, extent = [0] * len(shape), list(shape)
        for axis, start, stop in zip((first, second), lo, hi, strict=True):
            offset[axis], extent[axis] = start, stop - start
        tiles.append(Box(offset=tuple(offset), shape=tuple(extent)))
    return tuple(tiles)


def _split(box: Box, axis: int, at: int) -> tuple[Box, Box]:
    before, after = box.shape[:axis], box.shape[axis + 1 :]
    offset = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
    return (
        Box(offset=box.offset, shape=(*before, at, *after)),
        Box(offset=offset, shape=(*before, box.shape[axis] - at, *after)),
    )


def specs(
    *, max_tensors: int = 4, min_side: int = 0, prefix: str = ""
) -> st.SearchStrategy[list[TensorSpec]]:
    """One to `max_tensors` tensors with distinct names that begin with `prefix`."""
    one = st.builds(
        lambda name, dtype, shape: TensorSpec(name=prefix + name, dtype=dtype, shape=shape),
        st.text("abc.", min_size=1, max_size=4),
        st.sampled_from(sorted(DTYPES)),
        shapes(min_side=min_side, max_elements=128),
    )
    return st.lists(one, min_size=1, max_size=max_tensors, unique_by=lambda spec: spec.name)


@st.composite
def layouts(draw: st.DrawFn, *, max_ranks: int = 5, max_tensors: int = 4) -> Layout:
    """Layouts whose distinct boxes tile every tensor, each held by one rank or by replicas.

    Some ranks also hold empty shards, and shards lie in any order.
    """
    size = draw(st.integers(1, max_ranks))
    ranks: list[list[Shard]] = [[] for _ in range(size)]
    for spec in draw(specs(max_tensors=max_tensors)):
        for box in draw(tilings(spec.shape)):
            holders = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
            alone = len(holders) == 1 and draw(st.booleans())
            replicas = () if alone else tuple(holders)
            for rank in holders:
                ranks[rank].append(Shard(spec=spec, box=box, replicas=replicas))
        if draw(st.booleans()) and spec.shape:
            empty = Box(offset=spec.shape, shape=(0,) * len(spec.shape))
            ranks[draw(st.integers(0, size - 1))].append(Shard(spec=spec, box=empty))
    return Layout(role="trainer", ranks=tuple(tuple(draw(st.permutations(shards))) for shards in ranks))


def chunk_table(tiles: Mapping[TensorSpec, Sequence[Box]], *, gap_nbytes: int = 0) -> ChunkTable:
    """A table of raw chunks in one segment, in the mapping's order, `gap_nbytes` apart."""
    rows = [(spec, box, "segment") for spec, boxes in tiles.items() for box in boxes]
    return _table(rows, [gap_nbytes] * len(rows))


@st.composite
def chunk_tables(draw: st.DrawFn, tiles: Mapping[TensorSpec, Sequence[Box]]) -> ChunkTable:
    """The same chunks in up to three segments, in any order, with gaps between some."""
    pairs = draw(st.permutations([(spec, box) for spec, boxes in tiles.items() for box in boxes]))
    rows = [(spec, box, f"segment{draw(st.integers(0, 2))}") for spec, box in pairs]
    return _table(rows, [draw(st.sampled_from((0, 0, 1, 40, 400))) for _ in rows])


def _table(rows: Sequence[tuple[TensorSpec, Box, str]], gaps: Sequence[int]) -> ChunkTable:
    ends: dict[str, int] = {}
    starts, sizes = [], []
    for (spec, box, segment), gap in zip(rows, gaps, strict=True):
        start = ends.get(segment, 0) + gap
        starts.append(start)
        sizes.append(box.numel * DTYPES[spec.dtype])
        ends[segment] = start + sizes[-1]
    return make_table(
        specs=[spec for spec, _, _ in rows],
        boxes=[box for _, box, _ in rows],
        segments=[segment for _, _, segment in rows],
        starts=starts,
        nbytes=sizes,
        digests=[bytes(DIGEST_NBYTES)] * len(rows),
    )
