"""Decide which byte ranges to read to fill the wanted boxes, from a chunk table alone.

Whole chunks are read, because their checksums are of whole chunks; a chunk that several targets
need is read once. Rows that nobody wants are never looked at one by one, so that one rank of a
thousand plans in milliseconds. Errors come before any target is touched, all of them together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import ChunkTable
from ckptstore.cut import find_untiled
from ckptstore.errors import CorruptError, InvalidInputError, LayoutMismatchError, MissingTensorError
from ckptstore.tensor import Box, Shard

GAP_NBYTES = 64 * 2**10
BATCH_NBYTES = 16 * 2**20

_SHOWN = 5

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements that chunk `row` gives to `wanted[target]`; `box` has global coordinates."""

    row: int
    target: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One ranged read of whole chunks: `nbytes` from byte `start` of `segment`.

    `rows` are the chunks that are wanted, by rising start; `pieces[n]` is what `rows[n]` gives, at
    least one piece. Bytes between the chunks are read and dropped.
    """

    segment: str
    start: int
    nbytes: int
    rows: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """All reads, by segment and start; `nbytes_wanted` counts the elements of the targets."""

    reads: tuple[Read, ...]
    nbytes_wanted: int
    nbytes_read: int


def plan_load(
    table: ChunkTable,
    wanted: Sequence[Shard],
    *,
    gap_nbytes: int = GAP_NBYTES,
    batch_nbytes: int = BATCH_NBYTES,
) -> LoadPlan:
    """The reads that give every element of every wanted box once.

    Names are those of the table (`role/name`); `replicas` are ignored. Chunks in one segment that
    lie at most `gap_nbytes` apart are read together, up to `batch_nbytes`; a larger chunk is read
    alone. Targets without elements need no read, but their tensor must exist.

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
    problems = _Problems()
    tensors = [problems.find(table, shard) for shard in wanted]
    targets = [n for n, shard in enumerate(wanted) if tensors[n] >= 0 and shard.box.numel]
    overlaps = _overlaps(table, wanted, targets, np.array([tensors[n] for n in targets], np.int64))
    problems.prove(wanted, targets, overlaps)
    problems.refuse()
    reads = _reads(table, overlaps, gap_nbytes, batch_nbytes)
    return LoadPlan(
        reads=reads,
        nbytes_wanted=sum(shard.nbytes for shard in wanted),
        nbytes_read=sum(read.nbytes for read in reads),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlaps:
    """Columns: chunk `row` shares the box `lo`, `n` (padded as in the table) with `wanted[target]`."""

    row: Ints
    target: Ints
    place: Ints  # index of the target in the list of targets that have elements
    lo: Ints
    n: Ints
    inner: Ints  # lo within the target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problems:
    """What does not fit, by name, collected so that one error lists all of it."""

    missing: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)

    def find(self, table: ChunkTable, shard: Shard) -> int:
        """Index of the shard's tensor in the table; -1, noted, if it is not the same tensor."""
        spec = shard.spec
        at = bisect_left(table.tensors, spec.name, key=lambda other: other.name)
        if at == len(table.tensors) or table.tensors[at].name != spec.name:
            self.missing[spec.name] = f"{spec.name} is not in the checkpoint"
            return -1
        stored = table.tensors[at]
        if stored != spec:
            self.mismatched[spec.name] = (
                f"{spec.name} is stored as {stored.dtype}{list(stored.shape)}, "
                f"not as {spec.dtype}{list(spec.shape)}"
            )
            return -1
        return at

    def prove(self, wanted: Sequence[Shard], targets: Sequence[int], overlaps: _Overlaps) -> None:
        """Note each target that the overlaps do not tile."""
        wholes = [wanted[n].box.shape for n in targets]
        for item in find_untiled(wholes, overlaps.place, overlaps.inner, overlaps.n):
            shard = wanted[targets[item.whole]]
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


def _overlaps(table: ChunkTable, wanted: Sequence[Shard], targets: Sequence[int], tensors: Ints) -> _Overlaps:
    depth = table.offset.shape[1]
    if any(len(wanted[n].box.shape) > depth for n in targets) or (table.tensor[1:] < table.tensor[:-1]).any():
        raise CorruptError("the chunk table is unsorted or lacks dimensions; read another copy of it")
    boxes = [wanted[n].box for n in targets]
    zeros, ones = (0,) * depth, (1,) * depth
    lo = np.array([b.offset + zeros[len(b.shape) :] for b in boxes], np.int64).reshape(-1, depth)
    hi = lo + np.array([b.shape + ones[len(b.shape) :] for b in boxes], np.int64).reshape(-1, depth)
    keys = tensors.astype(table.tensor.dtype)  # else numpy would convert the whole column for each search
    first = np.searchsorted(table.tensor, keys, side="left")
    count = np.searchsorted(table.tensor, keys, side="right") - first
    place = np.repeat(np.arange(len(targets)), count)
    row = np.arange(len(place)) + np.repeat(first - (np.cumsum(count) - count), count)
    start = np.maximum(table.offset[row], lo[place])
    extent = np.minimum(table.offset[row] + table.shape[row], hi[place]) - start
    kept = np.flatnonzero((extent > 0).all(axis=1))
    place, start = place[kept], start[kept]
    return _Overlaps(
        row=row[kept],
        target=np.array(targets, np.int64)[place],
        place=place,
        lo=start,
        n=extent[kept],
        inner=start - lo[place],
    )


def _reads(table: ChunkTable, overlaps: _Overlaps, gap_nbytes: int, batch_nbytes: int) -> tuple[Read, ...]:
    order = np.lexsort(
        (overlaps.target, overlaps.row, table.start[overlaps.row], table.segment[overlaps.row])
    )
    by_row: dict[int, list[Piece]] = {}  # in order of segment and start
    for row, target, lo, n in zip(
        overlaps.row[order].tolist(),
        overlaps.target[order].tolist(),
        overlaps.lo[order].tolist(),
        overlaps.n[order].tolist(),
        strict=True,
    ):
        ndim = len(table.spec(row).shape)
        box = Box(offset=tuple(lo[:ndim]), shape=tuple(n[:ndim]))
        by_row.setdefault(row, []).append(Piece(row=row, target=target, box=box))
    rows = np.fromiter(by_row, np.int64, len(by_row))
    where = table.segment[rows].tolist()
    starts = table.start[rows].tolist()
    stops = (table.start[rows] + table.nbytes[rows]).tolist()
    return tuple(
        Read(
            segment=table.segments[where[first]],
            start=starts[first],
            nbytes=stop - starts[first],
            rows=tuple(rows[first:last].tolist()),
            pieces=tuple(tuple(by_row[row]) for row in rows[first:last].tolist()),
        )
        for first, last, stop in _batches(where, starts, stops, gap_nbytes, batch_nbytes)
    )


def _batches(
    where: Sequence[int], starts: Sequence[int], stops: Sequence[int], gap_nbytes: int, batch_nbytes: int
) -> Iterator[tuple[int, int, int]]:
    """Runs of chunks to read at once: indices from first to last, and the byte where the run stops."""
    first, stop = 0, 0
    for n in range(len(where)):
        near = n > 0 and where[n] == where[first] and starts[n] - stop <= gap_nbytes
        if not near or max(stop, stops[n]) - starts[first] > batch_nbytes:
            if n > first:
                yield first, n, stop
            first, stop = n, stops[n]
        stop = max(stop, stops[n])
    if where:
        yield first, len(where), stop
