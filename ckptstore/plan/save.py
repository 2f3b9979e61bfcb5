"""Decide which chunks a rank writes, from its own shards and the outlines of all ranks.

Every rank computes its part of one plan without the others, so nothing here may depend on the order of a
rank's shards, on hashes or on the machine. What a rank alone holds it writes whole; what a set of ranks holds
is written once, cut and shared so that all write about equally much. First bytes alone decide how much of
each set each of its members takes; then the members of a set, who know all that it holds, deal out the
pieces. Why that is one plan: docs/design/0004; the rules: docs/explanation/layouts.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckptstore.errors import InvalidInputError, LayoutMismatchError
from ckptstore.layout import Layout
from ckptstore.outline import Outline, Ranks, explain, find_disputes, order, outline, refuse, unequal_empties
from ckptstore.tensor import Box, Shape, Shard, halve, itemsize

CHUNK_NBYTES = 32 * 2**20
SLICE_NBYTES_MIN = 64 * 2**10

_TOLERANCE = 100  # a rank may write this part (a hundredth) more than the largest of its fair shares


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """One chunk that a rank writes: `shard` indexes that rank's shards, `box` has global coordinates."""

    shard: int
    box: Box


Plan = tuple[tuple[PlannedChunk, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How many bytes each rank writes in a plan that could cut anywhere: `loads` in all, `of` each shared set.

    `of[ranks]` is in the order of the set's ranks. `shared` counts the shared sets of each rank.
    """

    loads: tuple[int, ...]
    of: Mapping[Ranks, tuple[int, ...]]
    shared: tuple[int, ...]


def fair_shares(outlines: Sequence[Outline]) -> Shares:
    """Pour what each set holds over its members, the least loaded first, until all is dealt out.

    Small sets first: their bytes have the fewest takers, and larger sets can level what they leave. Where
    every two sets are disjoint or one within the other, as on any mesh, no other sharing has a smaller
    largest load. Linear in the number of sets and of their members.
    """
    loads, shared = [0] * len(outlines), [0] * len(outlines)
    nbytes: dict[Ranks, int] = {}
    for rank, each in enumerate(outlines):
        for held in each.sets:
            if len(held.ranks) == 1:
                loads[rank] += held.nbytes
            else:
                nbytes[held.ranks] = held.nbytes
                shared[rank] += 1
    of: dict[Ranks, tuple[int, ...]] = {}
    for ranks in sorted(nbytes, key=lambda ranks: (len(ranks), ranks)):
        of[ranks] = _pour(nbytes[ranks], [loads[rank] for rank in ranks])
        for rank, share in zip(ranks, of[ranks], strict=True):
            loads[rank] += share
    return Shares(loads=tuple(loads), of=of, shared=tuple(shared))


def _pour(nbytes: int, loads: Sequence[int]) -> tuple[int, ...]:
    """How much each load rises when `nbytes` are poured over them as water; whole bytes, all of them."""
    rising = sorted(range(len(loads)), key=lambda n: loads[n])
    wet, volume = 0, nbytes
    while wet < len(rising) and (wet == 0 or volume > loads[rising[wet]] * wet):
        volume += loads[rising[wet]]
        wet += 1
    level, left = divmod(volume, wet)
    shares = [0] * len(loads)
    for n, place in enumerate(rising[:wet]):
        shares[place] = level - loads[place] + (n < left)
    return tuple(shares)


def plan_rank(
    outlines: Sequence[Outline],
    rank: int,
    shards: Sequence[Shard],
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    slice_nbytes_min: int = SLICE_NBYTES_MIN,
) -> tuple[PlannedChunk, ...]:
    """The chunks that `rank` writes of its `shards`, in their order and, within one, row-major.

    `outlines` are those of all ranks, without disputes (`find_disputes`); `outlines[rank]` is of `shards`.
    Then the plans of all ranks together write every element that some rank holds once, in chunks of at most
    `chunk_nbytes`, each contiguous in its shard's box. Pieces go, largest first, to the member whose share has
    most room; they are cut finer, down to `slice_nbytes_min`, until no rank writes more than 1 % above the
    largest fair share. A tensor without elements has one empty chunk, from the lowest rank that holds it.
    """
    return _plan(fair_shares(outlines), outlines, rank, shards, _Cut.of(chunk_nbytes, slice_nbytes_min))


def plan_save(
    layout: Layout, *, chunk_nbytes: int = CHUNK_NBYTES, slice_nbytes_min: int = SLICE_NBYTES_MIN
) -> Plan:
    """`plan_rank` of every rank of a layout, for who has the shards of all in one place (tools, tests).

    LayoutMismatchError lists what does not fit together, by name and rank. Gaps and overlaps between unequal
    boxes, and unequal specs of ranks that share nothing, are left to the commit, which sees what was written.
    """
    cut = _Cut.of(chunk_nbytes, slice_nbytes_min)
    outlines = outlines_of(layout)
    shares = fair_shares(outlines)
    return tuple(_plan(shares, outlines, rank, shards, cut) for rank, shards in enumerate(layout.ranks))


def outlines_of(layout: Layout) -> tuple[Outline, ...]:
    """The outlines of all ranks; LayoutMismatchError lists what does not fit together, by name and rank."""
    found: list[Outline] = []
    problems: list[str] = []
    for rank, shards in enumerate(layout.ranks):
        try:
            found.append(outline(shards, rank=rank, size=layout.size))
        except LayoutMismatchError as error:
            problems += error.problems
    if not problems:
        problems = unequal_empties(found) + explain(find_disputes(found), dict(enumerate(layout.ranks)))
    if problems:
        refuse(f"role {layout.role!r} with {layout.size} ranks", problems)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The largest chunk and the smallest slice, in bytes."""

    chunk: int
    least: int

    @classmethod
    def of(cls, chunk_nbytes: int, slice_nbytes_min: int) -> _Cut:
        if chunk_nbytes < 1 or slice_nbytes_min < 1:
            raise InvalidInputError(
                f"chunks of {chunk_nbytes} bytes and slices of {slice_nbytes_min} are too small; "
                f"pass 1 or more",
                chunk_nbytes=chunk_nbytes,
                slice_nbytes_min=slice_nbytes_min,
            )
        return cls(chunk=chunk_nbytes, least=slice_nbytes_min)


def _plan(
    shares: Shares, outlines: Sequence[Outline], rank: int, shards: Sequence[Shard], cut: _Cut
) -> tuple[PlannedChunk, ...]:
    mine: list[PlannedChunk] = []
    groups: dict[Ranks, list[int]] = {}
    of_id: dict[int, list[int]] = {}
    for index, shard in enumerate(shards):
        if not shard.box.numel:
            continue
        group = of_id.get(id(shard.replicas))
        if group is None:
            group = of_id[id(shard.replicas)] = groups.setdefault(shard.replicas or (rank,), [])
        group.append(index)
    for ranks, held in groups.items():
        if len(ranks) == 1:
            pieces: Iterator[tuple[int, Box]] = _pieces(shards, held, cut.chunk)
        else:
            held.sort(key=lambda index: order(shards[index]))
            pieces = _deal(shards, held, rank, _rooms(shares, ranks), cut)
        mine += [
            PlannedChunk(shard=index, box=_moved(piece, shards[index].box.offset)) for index, piece in pieces
        ]
    mine += _placeholders(outlines, rank, shards)
    return tuple(sorted(mine, key=lambda chunk: (chunk.shard, chunk.box.offset)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What one rank takes of a set: its fair `share` and, above it, at most `slack` bytes."""

    rank: int
    share: int
    slack: int


def _rooms(shares: Shares, ranks: Ranks) -> list[_Room]:
    """A rank's slack is divided among its sets, so that it stays within the tolerance over all of them."""
    most = max(shares.loads[rank] for rank in ranks)
    return [
        _Room(
            rank=rank,
            share=share,
            slack=(most + most // _TOLERANCE - shares.loads[rank]) // shares.shared[rank],
        )
        for rank, share in zip(ranks, shares.of[ranks], strict=True)
    ]


def _deal(
    shards: Sequence[Shard], held: Sequence[int], rank: int, rooms: Sequence[_Room], cut: _Cut
) -> Iterator[tuple[int, Box]]:
    """What `rank` writes of the shards `held`, which are in the order that all members know: as `_pieces`."""
    slack = {room.rank: room.slack for room in rooms}
    most = cut.chunk
    while True:
        pieces = [
            (box.numel * itemsize(shards[index].spec.dtype), index, box)
            for index, box in _pieces(shards, held, most)
        ]
        pieces.sort(key=lambda piece: -piece[0])  # stable: then by name and box
        heap = [(-room.share, room.rank) for room in rooms]
        heapq.heapify(heap)
        mine = []
        for nbytes, index, box in pieces:
            over, taker = heap[0]
            heapq.heapreplace(heap, (over + nbytes, taker))
            if taker == rank:
                mine.append((index, box))
        if most <= cut.least or all(over <= slack[taker] for over, taker in heap):
            return iter(mine)
        most = max(most // 2, cut.least)


def _pieces(shards: Sequence[Shard], held: Sequence[int], nbytes: int) -> Iterator[tuple[int, Box]]:
    """The shards `held`, cut: index of the shard, and a box with coordinates relative to the shard's."""
    for index in held:
        shard = shards[index]
        for box in _cut(shard.box.shape, max(1, nbytes // itemsize(shard.spec.dtype))):
            yield index, box


@lru_cache(maxsize=4096)  # the thousand experts of a rank have a handful of shapes
def _cut(shape: Shape, max_numel: int) -> tuple[Box, ...]:
    return halve(Box.whole(shape), max_numel)


def _moved(box: Box, by: Shape) -> Box:
    if not any(by):
        return box
    return Box(offset=tuple(a + b for a, b in zip(box.offset, by, strict=True)), shape=box.shape)


def _placeholders(outlines: Sequence[Outline], rank: int, shards: Sequence[Shard]) -> list[PlannedChunk]:
    """An empty chunk of each tensor without elements that no lower rank holds."""
    mine = {spec.name for spec in outlines[rank].empty}
    if not mine:
        return []
    mine -= {spec.name for each in outlines[:rank] for spec in each.empty}
    # One rank may hold several such boxes of one tensor; the first of them in the common order is stored.
    held = sorted(
        (n for n, shard in enumerate(shards) if shard.spec.name in mine), key=lambda n: order(shards[n])
    )
    first = {shards[index].spec.name: index for index in reversed(held)}
    return [PlannedChunk(shard=first[name], box=shards[first[name]].box) for name in sorted(mine)]
