"""Decide which byte ranges to read to fill the wanted boxes, from a chunk table alone.

Whole chunks are read, because their checksums are of whole chunks; a chunk that several targets
need is read once. The plan is columns like the table, so that one rank of a thousand, or twenty
thousand small tensors, plan in milliseconds. Errors come before any target is touched, all of them
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import ChunkTable
from ckptstore.cut import find_untiled_in
from ckptstore.errors import CorruptError, InvalidInputError, LayoutMismatchError, MissingTensorError
from ckptstore.tensor import Box, TensorSpec
from ckptstore.tensors import ABSENT

GAP_NBYTES = 64 * 2**10
BATCH_NBYTES = 16 * 2**20

_SHOWN = 5

Ints = npt.NDArray[np.int64]
T = TypeVar("T")


class Wanted(Protocol):
    """What a target is to a plan: a shard, or a leaf of a state. Its box lies within the spec's shape."""

    @property
    def spec(self) -> TensorSpec: ...
    @property
    def box(self) -> Box: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements that chunk `row` gives to `wanted[target]`; `box` has global coordinates."""

    row: int
    target: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Read:
    """One ranged read of whole chunks: `nbytes` from byte `start` of `segment`.

    `rows` are the chunks that are wanted, by rising start. Bytes between the chunks are read and
    dropped. In a load plan, `first` is the place of `rows[0]` among the plan's rows.
    """

    segment: str
    start: int
    nbytes: int
    rows: Ints
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Columns, by segment, start and target: chunk `row` gives the box `lo`, `n` to `wanted[target]`.

    `lo` is in global coordinates; both are padded as in the chunk table. `bounds[k]` to
    `bounds[k + 1]` are the pieces of the k-th row of the plan. `start` is where the piece begins in its
    target, a row-major index; -1 where its elements are not one run there.
    """

    row: Ints
    target: Ints
    lo: Ints
    n: Ints
    start: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.row)

    def piece(self, at: int, ndim: int) -> Piece:
        """One piece as an object; `ndim` is that of its tensor."""
        box = Box(offset=tuple(self.lo[at, :ndim].tolist()), shape=tuple(self.n[at, :ndim].tolist()))
        return Piece(row=int(self.row[at]), target=int(self.target[at]), box=box)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadPlan:
    """All reads, by segment and start; `nbytes_wanted` counts the elements of the targets, `target_nbytes` those
    of each."""

    reads: tuple[Read, ...]
    pieces: Pieces
    target_nbytes: Ints
    nbytes_wanted: int
    nbytes_read: int

    @property
    def rows(self) -> Ints:
        """The chunks that are read, by segment and start."""
        return self.pieces.row[self.pieces.bounds[:-1]]


def plan_load(
    table: ChunkTable,
    wanted: Sequence[Wanted],
    *,
    gap_nbytes: int = GAP_NBYTES,
    batch_nbytes: int = BATCH_NBYTES,
) -> LoadPlan:
    """The reads that give every element of every wanted box once.

    Names are those of the table (`role/name`). Chunks in one segment that lie at most `gap_nbytes`
    apart are read together, up to `batch_nbytes`; a larger chunk is read alone. Targets without
    elements need no read, but their tensor must exist.

    MissingTensorError if the table lacks a tensor, else LayoutMismatchError if one has another
    dtype or global shape, else CorruptError if the chunks leave a gap or overlap in a wanted box;
    each lists all three kinds (`missing`, `mismatched`, `uncovered`: names).
    """
    if gap_nbytes < 0 or batch_nbytes < 1:
        raise InvalidInputError(
            f"a gap of {gap_nbytes} and a batch of {batch_nbytes} bytes cannot be; pass at least 0 and 1",
            gap_nbytes=gap_nbytes,
            batch_nbytes=batch_nbytes,
        )
    if (table.tensor[1:] < table.tensor[:-1]).any() or table.offset.shape[1] < _depth(table):
        raise CorruptError("the chunk table is unsorted or lacks dimensions; read another copy of it")
    problems = _Problems()
    targets = _targets(table, wanted, problems)
    overlaps = _overlaps(table, targets)
    problems.prove(wanted, targets, overlaps)
    problems.refuse()
    target_nbytes = np.zeros(len(wanted), np.int64)
    target_nbytes[targets.number] = targets.nbytes
    reads, pieces = _reads(table, targets, overlaps, gap_nbytes, batch_nbytes)
    return LoadPlan(
        reads=reads,
        pieces=pieces,
        target_nbytes=target_nbytes,
        nbytes_wanted=int(targets.nbytes.sum()),
        nbytes_read=sum(read.nbytes for read in reads),
    )


def all_reads(
    table: ChunkTable, *, gap_nbytes: int = GAP_NBYTES, batch_nbytes: int = BATCH_NBYTES
) -> tuple[Read, ...]:
    """Every chunk once, in ranges of neighbours."""
    return reads_of(table, range(len(table)), gap_nbytes=gap_nbytes, batch_nbytes=batch_nbytes)


def reads_of(
    table: ChunkTable,
    rows: Sequence[int],
    *,
    gap_nbytes: int = GAP_NBYTES,
    batch_nbytes: int = BATCH_NBYTES,
) -> tuple[Read, ...]:
    """These chunks once, in ranges of neighbours."""
    which = np.array(rows, np.int64)
    order = np.lexsort((table.start[which], table.segment[which]))
    return _batched(table, which[order], gap_nbytes, batch_nbytes)


def _depth(table: ChunkTable) -> int:
    return int(table.tensors.ndim.max()) if len(table.tensors) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problems:
    """What does not fit, by name, collected so that one error lists all of it."""

    missing: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)

    def prove(self, wanted: Sequence[Wanted], targets: _Targets, overlaps: _Overlaps) -> None:
        """Note each target that the overlaps do not tile."""
        inner = overlaps.lo - targets.lo[overlaps.place]
        for item in find_untiled_in(targets.n, targets.ndim, overlaps.place, inner, overlaps.n):
            shard = wanted[int(targets.number[item.whole])]
            self.uncovered.setdefault(
                shard.spec.name, f"{shard.spec.name} has, within offset {shard.box.offset}, a {item}"
            )

    def refuse(self) -> None:
        kinds = (self.missing, self.mismatched, self.uncovered)
        texts = [text for kind in kinds for text in kind.values()]
        if not texts:
            return
        more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        if self.missing or self.mismatched:
            error: type[MissingTensorError | LayoutMismatchError | CorruptError] = (
                MissingTensorError if self.missing else LayoutMismatchError
            )
            advice = "compare the names, dtypes and shapes with those that `ckptstore show` lists"
        else:
            error, advice = CorruptError, "run `ckptstore verify`, and load an older checkpoint"
        raise error(
            f"cannot load: {'; '.join(texts[:_SHOWN])}{more}; {advice}",
            missing=tuple(self.missing),
            mismatched=tuple(self.mismatched),
            uncovered=tuple(self.uncovered),
            problems=tuple(texts),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Targets:
    """Columns of the targets that have elements and are in the table."""

    number: Ints  # index in `wanted`
    tensor: Ints
    ndim: npt.NDArray[np.int8]
    lo: Ints  # [targets, depth of the table], 0 beyond ndim
    n: Ints  # 1 beyond ndim
    nbytes: Ints


def _targets(table: ChunkTable, wanted: Sequence[Wanted], problems: _Problems) -> _Targets:
    tensors, depth = table.tensors, table.offset.shape[1]
    specs, spec_of = _distinct([target.spec for target in wanted])
    boxes, box_of = _distinct([target.box for target in wanted])
    at = _find(table, specs, problems)[spec_of]
    columns = _extents(boxes, depth)[box_of]
    numel = columns[:, depth:].prod(axis=1)
    number = np.flatnonzero((at >= 0) & (numel > 0))
    tensor = at[number]
    return _Targets(
        number=number,
        tensor=tensor,
        ndim=tensors.ndim[tensor],
        lo=columns[number, :depth],
        n=columns[number, depth:],
        nbytes=numel[number] * tensors.itemsizes_of(tensor),
    )


def _distinct(items: Sequence[T]) -> tuple[list[T], Ints]:
    """The different objects among the items, and which each is: boxes of a tensor share its spec, tensors of a shape
    often their box, and identity is cheaper than a hash."""
    number: dict[int, int] = {}
    which = np.array([number.setdefault(id(item), len(number)) for item in items], np.int64)
    return list({id(item): item for item in items}.values()), which


def _extents(boxes: Sequence[Box], depth: int) -> Ints:
    """[boxes, 2 · depth]: offsets, then shapes, padded as in the table. Deeper boxes are not in it, and noted later."""
    zeros, ones = (0,) * depth, (1,) * depth
    flat = chain.from_iterable(
        box.offset[:depth] + zeros[len(box.shape) :] + box.shape[:depth] + ones[len(box.shape) :]
        for box in boxes
    )
    return np.fromiter(flat, np.int64, 2 * depth * len(boxes)).reshape(len(boxes), 2 * depth)


def _find(table: ChunkTable, specs: Sequence[TensorSpec], problems: _Problems) -> Ints:
    """Index of each spec in the table; less than 0, noted, if it is not there or is another."""
    at = table.tensors.match(specs)
    for n in np.flatnonzero(at < 0).tolist():
        spec = specs[n]
        if at[n] == ABSENT:
            problems.missing[spec.name] = f"{spec.name} is not in the checkpoint"
            continue
        stored = table.tensors.by_name[spec.name]
        problems.mismatched[spec.name] = (
            f"{spec.name} is stored as {stored.dtype}{list(stored.shape)}, "
            f"not as {spec.dtype}{list(spec.shape)}"
        )
    return at


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Overlaps:
    """Columns: chunk `row` shares the box `lo`, `n` (padded as in the table) with target `place`."""

    row: Ints
    place: Ints  # index into the columns of _Targets
    target: Ints  # index into `wanted`
    lo: Ints
    n: Ints


def _overlaps(table: ChunkTable, targets: _Targets) -> _Overlaps:
    keys = targets.tensor.astype(table.tensor.dtype)  # else the whole column would be converted to search it
    first = np.searchsorted(table.tensor, keys, side="left")
    count = np.searchsorted(table.tensor, keys, side="right") - first
    place = np.repeat(np.arange(len(keys)), count)
    row = np.arange(len(place)) + np.repeat(first - (np.cumsum(count) - count), count)
    offset = table.offset[row]
    lo = np.maximum(offset, targets.lo[place])
    extent = np.minimum(offset + table.shape[row], targets.lo[place] + targets.n[place]) - lo
    kept = np.flatnonzero((extent > 0).all(axis=1))
    return _Overlaps(
        row=row[kept],
        place=place[kept],
        target=targets.number[place[kept]],
        lo=lo[kept],
        n=extent[kept],
    )


def _run_starts(targets: _Targets, overlaps: _Overlaps) -> Ints:
    """`Pieces.start` of each overlap: it is one run if, after the first extent above 1, all are the target's."""
    outer = targets.n[overlaps.place]
    broad = np.cumsum(overlaps.n > 1, axis=1)
    broken = (broad - (overlaps.n > 1) > 0) & (overlaps.n != outer)
    step = np.ones_like(outer)
    step[:, :-1] = np.cumprod(outer[:, :0:-1], axis=1)[:, ::-1]
    start = ((overlaps.lo - targets.lo[overlaps.place]) * step).sum(axis=1)
    return np.where(broken.any(axis=1), -1, start)


def _reads(
    table: ChunkTable, targets: _Targets, overlaps: _Overlaps, gap_nbytes: int, batch_nbytes: int
) -> tuple[tuple[Read, ...], Pieces]:
    row, target = overlaps.row, overlaps.target
    order = np.lexsort((target, row, table.start[row], table.segment[row]))
    row = row[order]
    new = np.ones(len(row), np.bool_)
    new[1:] = row[1:] != row[:-1]
    firsts = np.flatnonzero(new)
    pieces = Pieces(
        row=row,
        target=target[order],
        lo=overlaps.lo[order],
        n=overlaps.n[order],
        start=_run_starts(targets, overlaps)[order],
        bounds=np.append(firsts, len(row)),
    )
    return _batched(table, row[firsts], gap_nbytes, batch_nbytes), pieces


def _batched(table: ChunkTable, rows: Ints, gap_nbytes: int, batch_nbytes: int) -> tuple[Read, ...]:
    """Reads of these rows, which are in order of segment and start."""
    starts = table.start[rows]
    stops = starts + table.nbytes[rows]
    segments = table.segment[rows]
    cuts = _cuts(segments, starts, stops, gap_nbytes, batch_nbytes)
    reads = []
    for first, last in pairwise(cuts):
        start = int(starts[first])
        reads.append(
            Read(
                segment=table.segments[segments[first]],
                start=start,
                nbytes=int(stops[first:last].max()) - start,
                rows=rows[first:last],
                first=first,
            )
        )
    return tuple(reads)


def _cuts(
    segments: npt.NDArray[np.int32], starts: Ints, stops: Ints, gap_nbytes: int, batch_nbytes: int
) -> list[int]:
    """Where one read ends and the next begins: indices from 0 to the number of chunks, both included.

    Found a read at a time, not a chunk: how far a batch reaches is a binary search.
    """
    edges = [0, *(np.flatnonzero(segments[1:] != segments[:-1]) + 1).tolist(), len(starts)]
    cuts = [0]
    for low, high in pairwise(edges):
        begins = starts[low:high]
        ends = np.maximum.accumulate(
            stops[low:high]
        )  # in a damaged table chunks may overlap: each alone then
        gaps = begins[1:] - ends[:-1]
        far = np.flatnonzero((gaps > gap_nbytes) | (gaps < 0)) + 1
        first = 0
        for limit in [*far.tolist(), high - low]:
            while first < limit:
                most = int(begins[first]) + batch_nbytes
                reach = first + int(np.searchsorted(ends[first:limit], most, side="right"))
                first = max(reach, first + 1)
                cuts.append(low + first)
    return cuts
