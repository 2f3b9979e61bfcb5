"""Prove that boxes tile their tensors: no gap, no overlap, in any number of dimensions.

Each box puts +1 and -1 on its 2^d corners; the sum of these marks over all boxes equals the marks
of the whole tensor exactly when every element is covered once (summing the marks up again gives
the number of boxes over each element). Corners are one integer each, so the proof is to sort two
lists and compare them: O(n log n), no Python loop over rows. Why a commit needs it:
docs/explanation/cuts.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.chunkbase import ChunkBase
from ckptstore.chunktable import ChunkTable
from ckptstore.errors import CorruptError, InconsistentCutError, InvalidInputError
from ckptstore.manifest import AttemptId, Member, Part, part_key
from ckptstore.tensor import Box, Shape

Ints = npt.NDArray[np.int64]

_GRID_MAX = 2**63 - 1
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Untiled:
    """One place where boxes do not tile their whole: `whole` is its index, `covers` what lies over `box`."""

    whole: int
    covers: int  # 0 is a gap, 2 or more an overlap, -1 a box that leaves the whole or has no element
    box: Box

    def __str__(self) -> str:
        kind = {-1: "misplaced or empty box", 0: "gap"}.get(self.covers, f"{self.covers} chunks overlap")
        return f"{kind} at offset {self.box.offset}, shape {self.box.shape}"


def check_coverage(table: ChunkTable, parts: Sequence[tuple[str, ChunkTable]] = ()) -> None:
    """Prove that the rows of every tensor of `table` hold each of its elements once.

    A tensor without elements needs exactly one row. InconsistentCutError names the tensors that
    fail, in order, with one gap or overlap each (`problems`: names and places), and who wrote them if
    it is given the `parts` that the table was merged from, by member. CorruptError if rows name a
    tensor that the table lacks.
    """
    tensors = table.tensors
    if len(table) and not 0 <= int(table.tensor.min()) <= int(table.tensor.max()) < len(tensors):
        raise CorruptError(
            f"a chunk table of {len(tensors)} tensors has rows of tensors {int(table.tensor.min())} to "
            f"{int(table.tensor.max())}; read another copy of it"
        )
    depth = int(tensors.ndim.max()) if len(tensors) else 0
    if table.offset.shape[1] < depth or table.shape.shape != table.offset.shape:
        raise CorruptError(
            f"a chunk table has boxes of {table.offset.shape[1]} dimensions but a tensor of {depth}; "
            f"read another copy of it"
        )
    found = find_untiled_in(tensors.dims, tensors.ndim, table.tensor, table.offset, table.shape)
    if not found:
        return
    problems = tuple((table.tensors[item.whole].name, item.covers, item.box) for item in found)
    shown = "; ".join(
        f"{table.tensors[item.whole].name}: {item}{_written_by(table.tensors[item.whole].name, item, parts)}"
        for item in found[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise InconsistentCutError(
        f"the chunks do not cover every element once: {shown}{more}; "
        f"correct the shards, offsets or replicas that the ranks declare",
        tensors=tuple(name for name, _, _ in problems),
        problems=problems,
    )


def _written_by(name: str, where: Untiled, parts: Sequence[tuple[str, ChunkTable]]) -> str:
    """Who wrote what overlaps; of a gap, who wrote the rest of the tensor."""
    members = []
    for member, table in parts:
        rows = np.flatnonzero(table.tensor == table.tensors.find(name)).tolist()
        if any(where.covers < 1 or where.box.intersection(table.box(row)) is not None for row in rows):
            members.append(member)
    if not members:
        return ""
    more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
    what = "written by" if where.covers > 1 else "the rest of it by" if where.covers == 0 else "by"
    return f", {what} {', '.join(members[:_SHOWN])}{more}"


def find_untiled(wholes: Sequence[Shape], owner: Ints, offset: Ints, shape: Ints) -> list[Untiled]:
    """The wholes whose boxes do not tile them, in order, with the first bad place of each.

    `owner[n]` is the index in `wholes` of box n, whose `offset[n]` and `shape[n]` count elements;
    columns beyond a whole's number of dimensions are ignored. Boxes that leave their whole, or are
    empty although it is not, are reported before gaps and overlaps. A whole without elements needs
    exactly one box.
    """
    ndims = np.fromiter(map(len, wholes), np.int8, len(wholes))
    depth = int(ndims.max()) if len(wholes) else 0
    dims = np.array([(*whole, *(0,) * (depth - len(whole))) for whole in wholes], np.int64)
    return find_untiled_in(dims.reshape(len(wholes), depth), ndims, owner, offset, shape)


def find_untiled_in(
    dims: Ints, ndims: npt.NDArray[np.int8], owner: npt.NDArray[Any], offset: Ints, shape: Ints
) -> list[Untiled]:
    """`find_untiled` of wholes that are columns: `dims[n, : ndims[n]]` is the shape of whole n."""
    depth_of = ndims[owner]
    found: list[Untiled] = []
    for depth in np.unique(ndims).tolist():
        members = np.flatnonzero(ndims == depth)
        rows = np.flatnonzero(depth_of == depth)
        local = np.zeros(len(ndims), np.int64)
        local[members] = np.arange(len(members))
        group = _Group(
            extents=dims[members, :depth],
            owner=local[owner[rows]],
            lo=offset[rows, :depth],
            n=shape[rows, :depth],
        )
        found += [
            Untiled(whole=int(members[item.whole]), covers=item.covers, box=item.box)
            for item in group.untiled()
        ]
    return sorted(found, key=lambda item: item.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Wholes of one number of dimensions with their boxes."""

    extents: Ints  # [wholes, ndim]
    owner: Ints  # [boxes]
    lo: Ints  # [boxes, ndim]
    n: Ints  # [boxes, ndim]

    def untiled(self) -> list[Untiled]:
        misplaced = self._misplaced()
        if misplaced:
            bad = np.array([item.whole for item in misplaced], np.int64)
            good_rows = ~np.isin(self.owner, bad)
            rest = _Group(
                extents=self.extents, owner=self.owner[good_rows], lo=self.lo[good_rows], n=self.n[good_rows]
            )
            seen = set(bad.tolist())
            return misplaced + [item for item in rest.untiled() if item.whole not in seen]
        empty = (self.extents == 0).any(axis=1)
        counts = np.bincount(self.owner[empty[self.owner]], minlength=len(self.extents))
        found = [
            Untiled(whole=n, covers=int(counts[n]), box=Box.whole(tuple(self.extents[n].tolist())))
            for n in np.flatnonzero(empty & (counts != 1)).tolist()
        ]
        return found + self._miscovered(empty)

    def _misplaced(self) -> list[Untiled]:
        """The first box of each whole that leaves it, or is empty though the whole is not."""
        extents = self.extents[self.owner]
        # Compared without a sum, which could overflow in a damaged table.
        bad = ((self.lo < 0) | (self.n < 0) | (self.lo > extents) | (self.n > extents - self.lo)).any(axis=1)
        bad |= (self.n == 0).any(axis=1) & (extents != 0).all(axis=1)
        rows = np.flatnonzero(bad)
        owners, first = np.unique(self.owner[rows], return_index=True)
        return [
            Untiled(whole=whole, covers=-1, box=_clipped(self.lo[row], self.n[row]))
            for whole, row in zip(owners.tolist(), rows[first].tolist(), strict=True)
        ]

    def _miscovered(self, empty: npt.NDArray[np.bool_]) -> list[Untiled]:
        """Gaps and overlaps by the sorted corners; `empty` wholes have no elements and so no corners."""
        grid = self.extents + 1
        if grid.astype(np.float64).prod(axis=1).sum() > _GRID_MAX / 2:  # only near the limit exactly
            total = sum(prod(row) for row in grid.tolist())
            if total > _GRID_MAX:
                raise InvalidInputError(
                    f"{len(grid)} tensors have {total} corners in all, more than {_GRID_MAX}; "
                    f"save fewer tensors in one checkpoint"
                )
        base = np.concatenate([np.zeros(1, np.int64), np.cumsum(grid.prod(axis=1))])
        rows = ~empty[self.owner]
        wholes = np.flatnonzero(~empty)
        plus, minus = _corners(base, grid, self.owner[rows], self.lo[rows], self.n[rows])
        whole_plus, whole_minus = _corners(
            base, grid, wholes, np.zeros_like(grid[wholes]), self.extents[wholes]
        )
        left = np.sort(np.concatenate([plus, whole_minus]))
        right = np.sort(np.concatenate([minus, whole_plus]))
        if len(left) == len(right) and np.array_equal(left, right):
            return []
        keys, inverse = np.unique(np.concatenate([left, right]), return_inverse=True)
        net = np.bincount(inverse[: len(left)], minlength=len(keys)) - np.bincount(
            inverse[len(left) :], minlength=len(keys)
        )
        keys, net = keys[net != 0], net[net != 0]
        owners, first = np.unique(np.searchsorted(base, keys, side="right") - 1, return_index=True)
        return [
            self._place(whole, int(keys[at] - base[whole]), int(net[at]) + 1)
            for whole, at in zip(owners.tolist(), first.tolist(), strict=True)
        ]

    def _place(self, whole: int, corner: int, covers: int) -> Untiled:
        """A box around the first corner whose marks do not cancel.

        Every corner before it in row-major order cancels, and only such corners count towards the
        number of boxes over that element: that number is therefore `covers`, exactly.
        """
        grid = tuple((self.extents[whole] + 1).tolist())
        point = np.array(np.unravel_index(corner, grid) if grid else (), np.int64)
        rows = self.owner == whole
        lo, hi = self.lo[rows], self.lo[rows] + self.n[rows]
        if covers > 0:
            over = ((lo <= point) & (point < hi)).all(axis=1)
            return Untiled(
                whole=whole,
                covers=covers,
                box=_clipped(lo[over].max(axis=0), hi[over].min(axis=0) - lo[over].max(axis=0)),
            )
        stop = point + 1
        for axis in reversed(range(len(point))):
            # Grow along one axis up to the next box that the grown gap would meet.
            others = np.arange(len(point)) != axis
            ahead = ((lo < stop) & (hi > point))[:, others].all(axis=1) & (lo[:, axis] >= stop[axis])
            stop[axis] = min([int(self.extents[whole][axis]), *lo[ahead, axis].tolist()])
        return Untiled(whole=whole, covers=0, box=_clipped(point, stop - point))


def _corners(base: Ints, grid: Ints, owner: Ints, lo: Ints, n: Ints) -> tuple[Ints, Ints]:
    """The positive and the negative corners of all boxes, each as one integer that no other whole shares."""
    depth = grid.shape[1]
    hi = lo + n
    strides = np.ones_like(grid)
    for axis in reversed(range(depth - 1)):
        strides[:, axis] = strides[:, axis + 1] * grid[:, axis + 1]
    stride = strides[owner]
    start, stop = lo * stride, hi * stride
    signs: tuple[list[Ints], list[Ints]] = ([], [])
    for side in product((0, 1), repeat=depth):
        key = base[owner].copy()
        for axis, end in enumerate(side):
            key += (stop if end else start)[:, axis]
        signs[sum(side) % 2].append(key)
    return _joined(signs[0]), _joined(signs[1])


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _clipped(offset: npt.NDArray[Any], shape: npt.NDArray[Any]) -> Box:
    """A box for a message; the negative numbers of a damaged table become 0."""
    return Box(offset=tuple(np.maximum(offset, 0).tolist()), shape=tuple(np.maximum(shape, 0).tolist()))


def check_part(attempt: AttemptId, member: Member, part: Part, run: str | None) -> None:
    """Refuse a part that is another's (CorruptError), or that lost chunks or misplaces them (InconsistentCutError)."""
    key = part_key(attempt, member)
    if part.id != attempt or part.member != member or part.run != run:
        raise CorruptError(
            f"{key} is the part of {part.member} for {part.id} of run {part.run}: it was put in the wrong place",
            key=key,
        )
    if len(part.table) != part.planned:
        raise InconsistentCutError(
            f"{member} planned {part.planned} chunks for step {attempt.step} and wrote {len(part.table)}: chunks "
            f"were lost, save again",
            step=attempt.step,
            member=str(member),
        )
    sizes = {ref.key: ref.nbytes for ref in part.segments}
    unknown = [name for name in part.table.segments if name not in sizes]
    if unknown:
        raise InconsistentCutError(
            f"{member} names chunks in {unknown[0]}, which its part does not list: save again",
            member=str(member),
        )
    limit = np.array([sizes[name] for name in part.table.segments] or [0], np.int64)
    if len(part.table) and (part.table.start + part.table.nbytes > limit[part.table.segment]).any():
        raise InconsistentCutError(
            f"{member} names chunks beyond the end of a segment: save again", member=str(member)
        )
    for text in filter(None, part.table.base):
        base = ChunkBase.parse(text)
        if base.segment not in part.witnesses or base.start + base.nbytes > sizes.get(base.segment, 0):
            raise InconsistentCutError(
                f"{member} has a delta on bytes of {base.segment}, which its part does not list with a witness: "
                f"save again",
                member=str(member),
                segment=base.segment,
            )


def check_role(attempt: AttemptId, role: str, parts: Sequence[Part], common: Sequence[str]) -> None:
    """Refuse parts of one role with other layouts, policy versions or common values, naming members and path.

    `common` is what `StateFacts` has of each part's state.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.layout != first.layout:
            raise InconsistentCutError(
                f"{part.member} and {first.member} planned step {attempt.step} from different layouts "
                f"({part.layout[:8]}, {first.layout[:8]}): their tensors changed at different saves; save again",
                step=attempt.step,
                role=role,
            )
        if part.policy_version != first.policy_version:
            raise InconsistentCutError(
                f"{part.member} saved step {attempt.step} at policy version {part.policy_version}, {first.member} "
                f"at {first.policy_version}: pass one policy_version on all ranks",
                step=attempt.step,
                role=role,
            )
    if len(set(common)) > 1:
        values: dict[str, tuple[Member, str]] = {}
        for part, text in zip(parts, common, strict=True):
            for path, value in json.loads(text):
                member, other = values.setdefault(path, (part.member, _text(value)))
                if _text(value) != other:
                    raise InconsistentCutError(
                        f"{path} differs between {member} ({other[:80]}) and {part.member} "
                        f"({_text(value)[:80]}): make it equal on all ranks or wrap it in PerRank",
                        step=attempt.step,
                        role=role,
                        path=path,
                    )


def _text(value: Any) -> str:
    """JSON, since in Python 1, 1.0 and True are equal and here they are not."""
    return json.dumps(value, sort_keys=True)
