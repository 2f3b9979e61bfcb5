"""Decide which rank writes which chunks, from the layouts of all ranks alone.

Every rank computes the same plan without talking to the others, so nothing here may depend on the
order of a rank's shards, on hashes or on the machine. What a rank alone holds it writes whole;
what replicas hold is written once, cut and shared so that all write about equally much. The rules
are argued in docs/explanation/layouts.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ckptstore.errors import InvalidInputError, LayoutMismatchError
from ckptstore.layout import Layout
from ckptstore.tensor import Box, Shape, Shard, TensorSpec, halve, itemsize

CHUNK_NBYTES = 32 * 2**20
SLICE_NBYTES_MIN = 64 * 2**10

# Each replica set may end this far above its water level; sets that share ranks add up, hence half
# of the 2 % that a save may be out of balance.
_TOLERANCE = 0.01
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """One chunk that a rank writes: `shard` indexes that rank's shards, `box` has global coordinates."""

    shard: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """One box of one tensor, and at which index each rank that holds it has it."""

    spec: TensorSpec
    box: Box
    holders: Mapping[int, int]

    @property
    def order(self) -> tuple[str, Shape, Shape]:
        return (self.spec.name, self.box.offset, self.box.shape)


Plan = tuple[tuple[PlannedChunk, ...], ...]


def plan_save(
    layout: Layout, *, chunk_nbytes: int = CHUNK_NBYTES, slice_nbytes_min: int = SLICE_NBYTES_MIN
) -> Plan:
    """The chunks of each rank, in the order of its shards and, within one, row-major.

    Every element that some rank holds is written once, in chunks of at most `chunk_nbytes`, each
    contiguous in its shard's box. Replicas share the work: pieces go, largest first, to the least
    loaded; they are cut finer, down to `slice_nbytes_min`, until the largest load is within 2 % of
    the least that the layout allows. A tensor without elements has one empty chunk, so that it is
    known; empty shards of other tensors have none.

    LayoutMismatchError lists every name with two specs, every box whose holders do not name each
    other as replicas, and every rank that the layout lacks. Gaps and overlaps between unequal boxes
    are left to the commit, which sees what was really written.
    """
    if chunk_nbytes < 1 or slice_nbytes_min < 1:
        raise InvalidInputError(
            f"chunks of {chunk_nbytes} bytes and slices of {slice_nbytes_min} are too small; pass 1 or more",
            chunk_nbytes=chunk_nbytes,
            slice_nbytes_min=slice_nbytes_min,
        )
    plan: list[list[PlannedChunk]] = [[] for _ in layout.ranks]
    loads = [0] * layout.size
    shared: dict[tuple[int, ...], list[_Holding]] = {}
    placeholders: set[str] = set()
    for holding in sorted(_holdings(layout), key=lambda h: h.order):
        ranks = tuple(sorted(holding.holders))
        if holding.box.numel and len(ranks) > 1:
            shared.setdefault(ranks, []).append(holding)
            continue
        if not holding.box.numel:
            if holding.spec.numel or holding.spec.name in placeholders:
                continue
            placeholders.add(holding.spec.name)
        rank = ranks[0]
        for box in halve(holding.box, _numel(chunk_nbytes, holding.spec)):
            plan[rank].append(PlannedChunk(shard=holding.holders[rank], box=box))
            loads[rank] += _nbytes(holding.spec, box)
    # Small sets first: their work has the fewest takers, and larger sets can level what they leave.
    for ranks in sorted(shared, key=lambda ranks: (len(ranks), ranks)):
        for rank, holding, box in _share(shared[ranks], ranks, loads, chunk_nbytes, slice_nbytes_min):
            plan[rank].append(PlannedChunk(shard=holding.holders[rank], box=box))
            loads[rank] += _nbytes(holding.spec, box)
    return tuple(tuple(sorted(chunks, key=lambda c: (c.shard, c.box.offset))) for chunks in plan)


def _share(
    holdings: Sequence[_Holding],
    ranks: tuple[int, ...],
    loads: Sequence[int],
    chunk_nbytes: int,
    slice_nbytes_min: int,
) -> list[tuple[int, _Holding, Box]]:
    """Who of `ranks` writes which piece of what all of them hold, in the coarsest cut that balances."""
    start = sorted(loads[rank] for rank in ranks)
    allowed = _level(start, sum(_nbytes(h.spec, h.box) for h in holdings)) * (1 + _TOLERANCE)
    cap = chunk_nbytes
    while True:
        pieces = [(h, box) for h in holdings for box in halve(h.box, _numel(cap, h.spec))]
        pieces.sort(key=lambda piece: -_nbytes(piece[0].spec, piece[1]))  # stable: then by name and box
        heap = [(loads[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        given: list[tuple[int, _Holding, Box]] = []
        for holding, box in pieces:
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + _nbytes(holding.spec, box), rank))
            given.append((rank, holding, box))
        if cap <= slice_nbytes_min or max(heap)[0] <= allowed:
            return given
        cap = max(cap // 2, slice_nbytes_min)


def _level(start: Sequence[int], nbytes: int) -> float:
    """The least that the largest load can be when `nbytes` are poured over the rising loads `start`."""
    poured = nbytes
    for count, load in enumerate(start, 1):
        poured += load
        if count == len(start) or poured <= start[count] * count:
            return max(poured / count, start[-1])
    return float(nbytes)


def _holdings(layout: Layout) -> Iterator[_Holding]:
    """Each distinct box with its holders, after everything that does not fit together was refused."""
    specs: dict[str, tuple[TensorSpec, int]] = {}
    groups: dict[tuple[str, Box], list[tuple[int, int, Shard]]] = {}
    problems: list[str] = []
    unequal: set[str] = set()
    for rank, shards in enumerate(layout.ranks):
        for index, shard in enumerate(shards):
            spec, first = specs.setdefault(shard.spec.name, (shard.spec, rank))
            if spec != shard.spec and spec.name not in unequal:
                unequal.add(spec.name)
                problems.append(
                    f"{spec.name} is {_text(spec)} on rank {first} but {_text(shard.spec)} on rank {rank}"
                )
            if shard.replicas and shard.replicas[-1] >= layout.size:
                problems.append(f"{spec.name} on rank {rank} names replica {shard.replicas[-1]}")
            groups.setdefault((spec.name, shard.box), []).append((rank, index, shard))
    equal = _SameRanks()
    for (name, box), group in groups.items():
        problem = _disagreement(group, equal) if box.numel else None
        if problem:
            problems.append(f"{name} at offset {box.offset}, shape {box.shape}, {problem}")
    if problems:
        _refuse(layout, sorted(problems))
    for (_, box), group in groups.items():
        # Only an empty box can occur twice on one rank here; its first index stands for it.
        holders = {rank: index for rank, index, _ in reversed(group)}
        yield _Holding(spec=group[0][2].spec, box=box, holders=holders)


def _refuse(layout: Layout, problems: Sequence[str]) -> NoReturn:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise LayoutMismatchError(
        f"the layouts of role {layout.role!r} with {layout.size} ranks do not fit together: "
        f"{'; '.join(problems[:_SHOWN])}{more}; correct the shards or their replicas",
        role=layout.role,
        problems=tuple(problems),
    )


class _SameRanks:
    """Compare replica sets by identity: a thousand ranks that name a thousand each are a million numbers
    a tensor, but the tensors of one rank share the tuple. The layout keeps the tuples alive meanwhile."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[int, ...]] = {}
        self._by_value: dict[tuple[int, ...], tuple[int, ...]] = {}

    def one(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The one object that stands for all sets equal to `ranks`."""
        found = self._by_id.get(id(ranks))
        if found is None:
            found = self._by_id[id(ranks)] = self._by_value.setdefault(ranks, ranks)
        return found


def _disagreement(group: Sequence[tuple[int, int, Shard]], equal: _SameRanks) -> str | None:
    """Why the holders of one box do not agree on who holds it; None if they do."""
    holders = tuple(rank for rank, _, _ in group)
    if len(set(holders)) != len(holders):
        return f"is held twice by one of the ranks {list(holders)}"
    first = group[0][2]
    if (first.replicas or holders[:1]) == holders:
        wanted = equal.one(first.replicas)
        group = [item for item in group if equal.one(item[2].replicas) is not wanted]
    if not group:
        return None
    rank, _, shard = group[0]
    return f"is held by ranks {list(holders)} but rank {rank} names replicas {list(shard.replicas)}"


def _text(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _numel(nbytes: int, spec: TensorSpec) -> int:
    return max(1, nbytes // itemsize(spec.dtype))


def _nbytes(spec: TensorSpec, box: Box) -> int:
    return box.numel * itemsize(spec.dtype)
