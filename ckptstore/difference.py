"""What differs between two checkpoints, of one run or of two: tensors, how much, and values that are no tensors.

What equal digests settle is not read. The rest streams through in units of chunks, so that checkpoints
larger than memory can be compared: chunks are dropped once nothing needs them, and what waits for a partner
of another tiling is bounded; beyond that bound it is read again.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ckptstore.catalog import Catalog, checkpoint_info, read_part
from ckptstore.chunktable import ChunkTable
from ckptstore.elements import Array, ElementDiff, carrier, compare_elements
from ckptstore.errors import InvalidInputError, MissingTensorError, NoCheckpointError, NotFoundError
from ckptstore.manifest import AttemptId, CheckpointInfo, Index
from ckptstore.plainvalue import value_leaves
from ckptstore.plan.diff import DiffPlan, plan_diff
from ckptstore.reader import read_leaves
from ckptstore.run import Run
from ckptstore.run import open as open_run
from ckptstore.skeleton import union
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store
from ckptstore.tensor import TensorSpec

UNIT_NBYTES = 32 << 20  # of chunks that are loaded together, at most one chunk more
HELD_NBYTES = 256 << 20  # of chunks that wait for a partner
COMPARERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor whose elements differ. `rows` gives the part of each changed row of dimension 0, where asked for."""

    spec: TensorSpec
    elements: ElementDiff
    rows: Mapping[int, ElementDiff]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A value that is no tensor: nodes as stored (`plainvalue.py` makes them plain); absent on one side: None there."""

    role: str
    name: str
    kind: str  # added, removed, changed
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """From `before` to `after`; tensors are named `role/name`.

    `altered` have another dtype or shape. Bytes of the tensors of equal dtype and shape, one side counted:
    `nbytes_settled` by equal digests, `nbytes_compared` by their data; `nbytes_read` is what both stores gave.
    """

    before: CheckpointInfo
    after: CheckpointInfo
    added: tuple[TensorSpec, ...]
    removed: tuple[TensorSpec, ...]
    altered: tuple[tuple[TensorSpec, TensorSpec], ...]
    changed: tuple[TensorDifference, ...]
    unchanged: tuple[TensorSpec, ...]
    values: tuple[ValueDifference, ...]
    values_unchanged: int
    nbytes_settled: int
    nbytes_compared: int
    nbytes_read: int

    @property
    def equal(self) -> bool:
        return not (self.added or self.removed or self.altered or self.changed or self.values)


def diff(
    before: Run | str | os.PathLike[str],
    after: Run | str | os.PathLike[str] | None = None,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    role: str | None = None,
    names: str | Sequence[str] = (),
    rows: str | Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Difference:
    """Compare two checkpoints of one run (`after` None) or of two, bit by bit; nothing is written.

    Without `steps`: the newest good one of each; of one run, the newest and the one before it. `names` are globs
    of dotted names; `rows` are globs of tensors that are also judged row by row of dimension 0 (stacked experts).
    `progress(done, total)` counts bytes of `before`. NoCheckpointError, NotFoundError (no such role),
    MissingTensorError (no name matches), CorruptError.
    """
    old = _run(before)
    new = old if after is None else _run(after)
    ids = _ids(old, new, steps)
    indexes = [run.catalog.index(id) for run, id in zip((old, new), ids, strict=True)]
    _check_role(role, indexes, ids)
    wanted = _wanted(role, _globs(names))
    plan = plan_diff(indexes[0].table, indexes[1].table, wanted)
    values = [_values(run.catalog, index, wanted) for run, index in zip((old, new), indexes, strict=True)]
    if names and not (plan.common or plan.added or plan.removed or plan.altered or values[0] or values[1]):
        raise MissingTensorError(
            f"no name in {ids[0]} or {ids[1]} matches {_globs(names)}: list them with ckptstore show --tensors",
            names=tuple(_globs(names)),
        )
    stores, tables = [old.catalog.store, new.catalog.store], [each.table for each in indexes]
    comparison = _Comparison(stores, tables, plan, _by_row(plan, _globs(rows)), progress)
    comparison.run()
    changed = comparison.differences()
    names_changed = {each.spec.name for each in changed}
    differing = _value_differences(*values)
    nbytes = sum(spec.nbytes for spec in plan.common)
    return Difference(
        before=checkpoint_info(old.catalog.history, ids[0]),
        after=checkpoint_info(new.catalog.history, ids[1]),
        added=plan.added,
        removed=plan.removed,
        altered=plan.altered,
        changed=changed,
        unchanged=tuple(spec for spec in plan.common if spec.name not in names_changed),
        values=differing,
        values_unchanged=len(values[0].keys() | values[1].keys()) - len(differing),
        nbytes_settled=int(plan.settled.sum()),
        nbytes_compared=nbytes - int(plan.settled.sum()),
        nbytes_read=comparison.nbytes_read,
    )


def _run(run: Run | str | os.PathLike[str]) -> Run:
    return run if isinstance(run, Run) else open_run(run)


def _globs(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _ids(old: Run, new: Run, steps: tuple[int | None, int | None]) -> tuple[AttemptId, AttemptId]:
    first, second = steps
    last = new.catalog.find(second)
    if old is not new or first is not None:
        found = old.catalog.find(first)
        if old is new and second is None and found == last:
            raise InvalidInputError(
                f"step {first} is the newest checkpoint of {old.url}: name another step to compare it with",
                step=first,
            )
        return found, last
    good = old.catalog.history.good()
    earlier = good[: good.index(last)] if last in good else good
    if not earlier:
        raise NoCheckpointError(
            f"{old.url} has no good checkpoint before step {last.step} to compare it with: name a step of each, "
            f"or a second run",
            url=old.url,
            step=last.step,
        )
    return earlier[-1], last


def _check_role(role: str | None, indexes: Sequence[Index], ids: Sequence[AttemptId]) -> None:
    known = list(dict.fromkeys(ref.member.role for index in indexes for ref in index.parts))
    if role is not None and role not in known:
        raise NotFoundError(
            f"checkpoints {ids[0]} and {ids[1]} have no role {role!r}: choose one of {', '.join(known)}",
            role=role,
        )


def _wanted(role: str | None, globs: Sequence[str]) -> Callable[[str], bool]:
    def wanted(full: str) -> bool:
        of, _, name = full.partition("/")
        return role in (None, of) and _matches(name, globs or ["*"])

    return wanted


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(glob == "*" or fnmatchcase(name.partition("#")[0], glob) for glob in globs)


def _by_row(plan: DiffPlan, globs: Sequence[str]) -> frozenset[int]:
    chosen = [n for n, spec in enumerate(plan.common) if _matches(spec.name.partition("/")[2], globs)]
    scalars = [plan.common[n].name for n in chosen if not plan.common[n].shape]
    if scalars:
        raise InvalidInputError(
            f"{', '.join(scalars[:5])} cannot be judged by row, having no dimension: leave them out of rows",
            tensors=tuple(scalars),
        )
    return frozenset(chosen)


# -- values that are no tensors


def _values(catalog: Catalog, index: Index, wanted: Callable[[str], bool]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for role in dict.fromkeys(ref.member.role for ref in index.parts):
        refs = sorted(index.part_of(role), key=lambda ref: ref.member.rank)
        node = union([read_part(catalog.store, ref).state for ref in refs], by_rank=True)
        found |= {(role, n): value for n, value in value_leaves(node) if wanted(f"{role}/{n}")}
    return found


def _value_differences(
    old: Mapping[tuple[str, str], Any], new: Mapping[tuple[str, str], Any]
) -> tuple[ValueDifference, ...]:
    found = []
    for key in dict.fromkeys([*old, *new]):
        if key in old and key in new and _same(old[key], new[key]):
            continue
        kind = "added" if key not in old else "removed" if key not in new else "changed"
        role, name = key
        found.append(
            ValueDifference(role=role, name=name, kind=kind, before=old.get(key), after=new.get(key))
        )
    return tuple(found)


def _same(old: Any, new: Any) -> bool:
    """Equal in type and value: Python takes True for 1 and 1 for 1.0."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    return type(old) is type(new) and bool(old == new)


# -- elements

Chunk = tuple[int, int]  # side (0 before, 1 after) and row


class _Comparison:
    """Loads units of pairs in order, compares them in a pool, and adds up what it finds. Used once."""

    def __init__(
        self,
        stores: Sequence[Store],
        tables: Sequence[ChunkTable],
        plan: DiffPlan,
        by_row: frozenset[int],
        progress: Callable[[int, int], None],
    ) -> None:
        self.stores = stores
        self.tables = tables
        self.plan = plan
        self.by_row = by_row
        self.progress = progress
        self.found: dict[int, ElementDiff] = {}
        self.rows: dict[int, dict[int, ElementDiff]] = {}
        self.nbytes_read = 0
        self._held: OrderedDict[Chunk, Array] = OrderedDict()
        self._uses: Counter[Chunk] = Counter()

    def differences(self) -> tuple[TensorDifference, ...]:
        return tuple(
            TensorDifference(
                spec=self.plan.common[tensor],
                elements=ElementDiff(elements=self.plan.common[tensor].numel) + found,
                rows=self.rows.get(tensor, {}),
            )
            for tensor, found in sorted(self.found.items())
        )

    def run(self) -> None:
        sizes = np.array([carrier(spec.dtype).itemsize for spec in self.plan.common] or [0], np.int64)
        nbytes = self.plan.shape.prod(axis=1) * sizes[self.plan.tensor]
        done, total = 0, int(nbytes.sum())
        for unit in self._units():
            self._uses.update(self._chunks(unit))
        waiting: deque[tuple[int, Future[Any]]] = deque()
        with ThreadPoolExecutor(max_workers=COMPARERS, thread_name_prefix="ckptstore-diff") as pool:
            for unit in self._units():
                waiting.append(
                    (
                        int(nbytes[unit.start : unit.stop].sum()),
                        pool.submit(self._compare, unit, self._load(unit)),
                    )
                )
                while len(waiting) > COMPARERS:
                    done += self._take(*waiting.popleft())
                    self.progress(done, total)
            while waiting:
                done += self._take(*waiting.popleft())
                self.progress(done, total)

    def _take(self, nbytes: int, future: Future[list[tuple[int, int | None, ElementDiff]]]) -> int:
        for tensor, row, found in future.result():
            if row is None:
                self.found[tensor] = self.found.get(tensor, ElementDiff()) + found
            else:
                rows = self.rows.setdefault(tensor, {})
                rows[row] = rows.get(row, ElementDiff()) + found
        return nbytes

    def _chunks(self, unit: range) -> list[Chunk]:
        """The distinct chunks of these pairs."""
        pairs = zip(
            self.plan.before[unit.start : unit.stop].tolist(),
            self.plan.after[unit.start : unit.stop].tolist(),
            strict=True,
        )
        return list(dict.fromkeys(chunk for a, b in pairs for chunk in ((0, a), (1, b))))

    def _units(self) -> Iterator[range]:
        """Runs of pairs whose distinct chunks have about UNIT_NBYTES."""
        seen: set[Chunk] = set()
        start = nbytes = 0
        pairs = zip(self.plan.before.tolist(), self.plan.after.tolist(), strict=True)
        for n, (a, b) in enumerate(pairs):
            for side, row in ((0, a), (1, b)):
                if (side, row) not in seen:
                    seen.add((side, row))
                    nbytes += int(self.tables[side].nbytes[row])
            if nbytes >= UNIT_NBYTES:
                yield range(start, n + 1)
                start, nbytes, seen = n + 1, 0, set()
        if start < len(self.plan.before):
            yield range(start, len(self.plan.before))

    def _load(self, unit: range) -> dict[Chunk, Array]:
        """The chunks of a unit, from what is held or from the stores; what later units need is held on to."""
        chunks = self._chunks(unit)
        loaded = {chunk: self._held[chunk] for chunk in chunks if chunk in self._held}
        for side in (0, 1):
            leaves, keys = [], [chunk for chunk in chunks if chunk[0] == side and chunk not in loaded]
            for key in keys:
                spec, box = self.tables[side].spec(key[1]), self.tables[side].box(key[1])
                loaded[key] = np.empty(box.shape, carrier(spec.dtype))
                leaves.append(TensorLeaf(spec=spec, box=box, data=loaded[key], replicas=None, frozen=False))
            if leaves:
                self.nbytes_read += read_leaves(self.stores[side], self.tables[side], leaves).nbytes_read
        for chunk in chunks:
            self._uses[chunk] -= 1
            self._held.pop(chunk, None)
            if self._uses[chunk]:
                self._held[chunk] = loaded[chunk]
        while sum(array.nbytes for array in self._held.values()) > HELD_NBYTES:
            self._held.popitem(last=False)
        return loaded

    def _compare(
        self, unit: range, loaded: Mapping[Chunk, Array]
    ) -> list[tuple[int, int | None, ElementDiff]]:
        """(tensor, None or row of dimension 0, what differs) of each pair that differs."""
        found: list[tuple[int, int | None, ElementDiff]] = []
        for n in unit:
            tensor, box = int(self.plan.tensor[n]), self.plan.box(n)
            dtype = self.plan.common[tensor].dtype
            sides = []
            for side, row in ((0, int(self.plan.before[n])), (1, int(self.plan.after[n]))):
                sides.append(loaded[side, row][box.relative_to(self.tables[side].box(row)).slices])
            whole = _changes(sides[0], sides[1], dtype)
            if not whole.changed:
                continue
            found.append((tensor, None, whole))
            if tensor in self.by_row:
                each = ((r, _changes(a, b, dtype)) for r, (a, b) in enumerate(zip(*sides, strict=True)))
                found += [(tensor, box.offset[0] + r, change) for r, change in each if change.changed]
        return found


def _changes(before: Array, after: Array, dtype: str) -> ElementDiff:
    """Without the number of elements: whoever adds these up knows how many there are."""
    found = compare_elements(np.asarray(before), np.asarray(after), dtype)
    return ElementDiff(changed=found.changed, largest=found.largest, nan=found.nan)
