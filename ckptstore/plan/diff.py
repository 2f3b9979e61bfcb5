"""Decide what must be read to compare two checkpoints, from their chunk tables alone.

Two chunks with one box and one digest are equal, so they are settled without their data. What is left
is paired: each pair of chunks that share elements, with the box that they share. Tilings may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import ChunkTable
from ckptstore.tensor import DTYPES, Box, TensorSpec

CANDIDATES = 1 << 21  # pairs looked at in one go

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffPlan:
    """Tensors by what became of their names, and the pairs of chunks to compare, as columns.

    `altered` have another dtype or shape and are not compared further. `settled` is, for each tensor of
    `common`, how many of its bytes equal digests settle. Pair n: `tensor[n]` of `common`, rows `before[n]` and
    `after[n]` of the tables, and the box that they share, in elements of the tensor; sorted by rows.
    """

    added: tuple[TensorSpec, ...]
    removed: tuple[TensorSpec, ...]
    altered: tuple[tuple[TensorSpec, TensorSpec], ...]
    common: tuple[TensorSpec, ...]
    settled: Ints
    tensor: Ints
    before: Ints
    after: Ints
    offset: Ints
    shape: Ints

    def box(self, pair: int) -> Box:
        ndim = len(self.common[int(self.tensor[pair])].shape)
        return Box(
            offset=tuple(self.offset[pair, :ndim].tolist()), shape=tuple(self.shape[pair, :ndim].tolist())
        )


def plan_diff(before: ChunkTable, after: ChunkTable, wanted: Callable[[str], bool]) -> DiffPlan:
    """What to compare of the tensors whose names (`role/name`) are wanted."""
    old = {spec.name: (n, spec) for n, spec in enumerate(before.tensors) if wanted(spec.name)}
    new = {spec.name: (n, spec) for n, spec in enumerate(after.tensors) if wanted(spec.name)}
    both = [name for name in old if name in new]
    common = tuple(old[name][1] for name in both if old[name][1] == new[name][1])
    a = _side(before, [old[spec.name][0] for spec in common], after.offset.shape[1])
    b = _side(after, [new[spec.name][0] for spec in common], before.offset.shape[1])
    partner = _equal_boxes(a, b)
    matched = partner >= 0
    mine, theirs = np.flatnonzero(matched), partner[matched]
    equal = (before.digest[a.row[mine]] == after.digest[b.row[theirs]]).all(axis=1)
    sizes = np.array([DTYPES[spec.dtype] for spec in common], np.int64)
    nbytes = a.shape.prod(axis=1) * sizes[a.tensor] if len(a.tensor) else np.zeros(0, np.int64)
    settled = np.bincount(a.tensor[mine[equal]], nbytes[mine[equal]], minlength=len(common)).astype(np.int64)
    alone = np.ones(len(b.row), bool)
    alone[theirs] = False
    i, j = _overlaps(a, b, np.flatnonzero(~matched), np.flatnonzero(alone))
    i, j = np.concatenate([mine[~equal], i]), np.concatenate([theirs[~equal], j])
    order = np.lexsort((b.row[j], a.row[i]))
    i, j = i[order], j[order]
    lo = np.maximum(a.offset[i], b.offset[j])
    return DiffPlan(
        added=tuple(spec for name, (_, spec) in new.items() if name not in old),
        removed=tuple(spec for name, (_, spec) in old.items() if name not in new),
        altered=tuple((old[n][1], new[n][1]) for n in both if old[n][1] != new[n][1]),
        common=common,
        settled=settled,
        tensor=a.tensor[i],
        before=a.row[i],
        after=b.row[j],
        offset=lo,
        shape=np.minimum(a.offset[i] + a.shape[i], b.offset[j] + b.shape[j]) - lo,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """The rows of common tensors that hold elements; `tensor` numbers the common ones."""

    row: Ints
    tensor: Ints
    offset: Ints
    shape: Ints


def _side(table: ChunkTable, tensors: list[int], depth: int) -> _Side:
    place = np.full(len(table.tensors) + 1, -1, np.int64)
    place[tensors] = np.arange(len(tensors))
    tensor = place[table.tensor]
    row = np.flatnonzero((tensor >= 0) & (table.shape > 0).all(axis=1))
    more = ((0, 0), (0, max(0, depth - table.offset.shape[1])))
    return _Side(
        row=row,
        tensor=tensor[row],
        offset=np.pad(table.offset[row], more),
        shape=np.pad(table.shape[row], more, constant_values=1),
    )


def _equal_boxes(a: _Side, b: _Side) -> Ints:
    """For each row of `a` the row of `b` with the same box; -1 where none is found."""
    if not len(a.row) or not len(b.row):
        return np.full(len(a.row), -1, np.int64)
    ours, others = _keys(a), _keys(b)
    # Found by a hash of the columns and then compared. Of two that collide one may be missed, which costs
    # reading it.
    hashes = _hashes(others)
    order = np.argsort(hashes, kind="stable")
    at = np.minimum(np.searchsorted(hashes[order], _hashes(ours)), len(order) - 1)
    found = order[at]
    return np.where((others[found] == ours).all(axis=1), found, -1)


def _keys(side: _Side) -> Ints:
    return np.concatenate([side.tensor[:, None], side.offset, side.shape], axis=1)


def _hashes(keys: Ints) -> npt.NDArray[np.uint64]:
    mixed = np.zeros(len(keys), np.uint64)
    for column in keys.T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _overlaps(
    a: _Side, b: _Side, mine: npt.NDArray[np.intp], theirs: npt.NDArray[np.intp]
) -> tuple[Ints, Ints]:
    """All pairs of these rows that share elements."""
    first = np.searchsorted(b.tensor[theirs], a.tensor[mine], side="left")
    count = np.searchsorted(b.tensor[theirs], a.tensor[mine], side="right") - first
    ends = np.cumsum(count)
    found: list[tuple[Ints, Ints]] = []
    start = 0
    while start < len(mine):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + CANDIDATES, side="right")))
        n = count[start:stop]
        i = np.repeat(mine[start:stop], n)
        j = theirs[np.arange(len(i)) + np.repeat(first[start:stop] - (np.cumsum(n) - n), n)]
        lo = np.maximum(a.offset[i], b.offset[j])
        hi = np.minimum(a.offset[i] + a.shape[i], b.offset[j] + b.shape[j])
        kept = (hi > lo).all(axis=1)
        found.append((i[kept], j[kept]))
        start = stop
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *(i for i, _ in found)]), np.concatenate([none, *(j for _, j in found)])
