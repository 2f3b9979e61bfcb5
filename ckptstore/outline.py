"""Outlines: what a rank holds, in a few numbers, so that a thousand ranks can plan without each other's tensors.

An outline names each distinct set of ranks that its rank holds boxes with, how many bytes those are, and a
digest of the list of them. All members of a set must say the same of it; then each of them knows exactly what
the others hold with it, and nobody else needs to know. Why this is enough to plan: docs/design/0004.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn

from ckptstore.errors import CorruptError, InvalidInputError, LayoutMismatchError
from ckptstore.tensor import Box, Shape, Shard, TensorSpec

Ranks = tuple[int, ...]
Run = tuple[int, int, int]

_DIGEST_NBYTES = 16
_SHOWN = 5
_RANKS_SHOWN = 8
_OPINIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOutline:
    """What the sorted `ranks` all hold, box by box: `nbytes` in all, and a digest of specs and boxes.

    One rank alone is a set, too: of what it shares with nobody.
    """

    ranks: Ranks
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The sets of one rank, by size and then ranks; and the tensors without elements that it holds, by name."""

    sets: tuple[SetOutline, ...]
    empty: tuple[TensorSpec, ...] = ()

    @property
    def digest(self) -> str:
        """Hex digest; equal outlines have equal ones in every process and version."""
        return _digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """A value for `json.dumps`; `from_json` gives an equal outline back."""
        return {
            "empty": [[spec.name, spec.dtype, list(spec.shape)] for spec in self.empty],
            "sets": [[list(map(list, runs(each.ranks))), each.nbytes, each.digest] for each in self.sets],
        }

    @classmethod
    def from_json(cls, value: Any, *, rank: int, size: int) -> Outline:
        """The outline of `rank`, one of `size`, that another process wrote: what is malformed is CorruptError."""
        try:
            empty = tuple(
                TensorSpec(name=name, dtype=dtype, shape=_whole(shape))
                for name, dtype, shape in value["empty"]
            )
            sets = tuple(
                SetOutline(ranks=_ranks(given, rank, size), nbytes=_whole([n])[0], digest=_text(digest))
                for given, n, digest in value["sets"]
            )
        except (TypeError, ValueError, KeyError, InvalidInputError) as error:
            raise CorruptError(
                f"the outline of rank {rank} is malformed ({error}); exchange the layouts again", rank=rank
            ) from error
        return cls(sets=sets, empty=empty)


def layout_digest(role: str, outlines: Sequence[Outline]) -> str:
    """The digest of a role's layout, from the outlines of all its ranks in order."""
    return _digest([role, [outline.digest for outline in outlines]])


def runs(ranks: Sequence[int]) -> tuple[Run, ...]:
    """Rising ranks as arithmetic progressions `(first, last + 1, step)`, each as long as can be."""
    found: list[Run] = []
    at = 0
    while at < len(ranks):
        last = at + 1
        step = ranks[last] - ranks[at] if last < len(ranks) else 1
        while last + 1 < len(ranks) and ranks[last + 1] - ranks[last] == step:
            last += 1
        last = min(last, len(ranks) - 1)
        found.append((ranks[at], ranks[last] + 1, step))
        at = last + 1
    return tuple(found)


@lru_cache(maxsize=4096)  # one tuple a set: the sets of a thousand ranks are then compared by identity
def _expand(given: tuple[Run, ...]) -> Ranks:
    return tuple(rank for run in given for rank in range(*run))


def _ranks(given: Any, rank: int, size: int) -> Ranks:
    found = tuple(tuple(_whole(run)) for run in given)
    if any(len(run) != 3 or run[1] > size or run[2] < 1 for run in found):
        raise ValueError(f"ranks {given!r} are not runs of {size} ranks")
    ranks = _expand(found)
    if any(a >= b for a, b in pairwise(ranks)) or rank not in ranks:
        raise ValueError(f"ranks {given!r} do not rise or leave rank {rank} out")
    return ranks


def _whole(value: Any) -> Shape:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r} is not a list of whole numbers from 0 up")
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def outline(shards: Sequence[Shard], *, rank: int, size: int) -> Outline:
    """The outline of `rank`'s shards; their order does not matter.

    Empty boxes of tensors that have elements are left out: nobody writes them. LayoutMismatchError lists
    every name with two specs, every box that is held twice, and replicas that leave `rank` out or are not
    among the `size` ranks.
    """
    problems: list[str] = []
    specs: dict[str, TensorSpec] = {}
    seen: set[tuple[str, Box]] = set()
    groups: dict[Ranks, list[Shard]] = {}
    of_id: dict[
        int, list[Shard]
    ] = {}  # the shards of one rank share their tuples, which `shards` keeps alive
    for shard in shards:
        spec = specs.setdefault(shard.spec.name, shard.spec)
        if spec is not shard.spec and spec != shard.spec:
            problems.append(f"{spec.name} is both {_kind(spec)} and {_kind(shard.spec)} on rank {rank}")
        if shard.replicas and shard.replicas[-1] >= size:
            problems.append(f"{spec.name} on rank {rank} names replica {shard.replicas[-1]}")
        if not shard.box.numel:
            continue
        if shard.replicas and rank not in shard.replicas:
            problems.append(f"{_place(shard)} on rank {rank} names replicas {_listed(shard.replicas)}")
        if (spec.name, shard.box) in seen:
            problems.append(f"{_place(shard)} is held twice by rank {rank}")
        seen.add((spec.name, shard.box))
        group = of_id.get(id(shard.replicas))
        if group is None:
            group = of_id[id(shard.replicas)] = groups.setdefault(shard.replicas or (rank,), [])
        group.append(shard)
    if problems:
        refuse(f"rank {rank}", sorted(problems))
    return Outline(
        sets=tuple(
            SetOutline(ranks=ranks, nbytes=sum(s.nbytes for s in groups[ranks]), digest=_held(groups[ranks]))
            for ranks in sorted(groups, key=lambda ranks: (len(ranks), ranks))
        ),
        empty=tuple(specs[name] for name in sorted(specs) if not specs[name].numel),
    )


def order(shard: Shard) -> tuple[str, Shape, Shape]:
    """By name and box: the order that all holders of a list of shards agree on."""
    return (shard.spec.name, shard.box.offset, shard.box.shape)


def _held(shards: Iterable[Shard]) -> str:
    rows = [
        (s.spec.name, s.spec.dtype, s.spec.shape, s.box.offset, s.box.shape)
        for s in sorted(shards, key=order)
    ]
    return _digest(rows)


# -- disagreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """Ranks of one set that say different things of it.

    `said` has the digest that each rank gave, in order of rank; None: it names no such set.
    """

    ranks: Ranks
    said: Mapping[int, str | None] = field(hash=False)

    @property
    def speakers(self) -> tuple[int, ...]:
        """A few ranks, of every opinion if there are few: their shards tell what the dispute is about."""
        first: dict[str, int] = {}
        for rank, digest in self.said.items():
            if digest is not None:
                first.setdefault(digest, rank)
        silent = [rank for rank, digest in self.said.items() if digest is None]
        return tuple(sorted([*list(first.values())[:_OPINIONS], *silent[:_OPINIONS]]))


def find_disputes(outlines: Sequence[Outline]) -> tuple[Dispute, ...]:
    """The sets of which not all members say the same, by size and ranks."""
    said: dict[Ranks, dict[int, SetOutline]] = {}
    for rank, each in enumerate(outlines):
        for held in each.sets:
            said.setdefault(held.ranks, {})[rank] = held
    found = []
    for ranks, by_rank in said.items():
        first = next(iter(by_rank.values()))
        same = all(held.digest == first.digest and held.nbytes == first.nbytes for held in by_rank.values())
        if not same or len(by_rank) != len(ranks):
            told = {r: f"{by_rank[r].digest} {by_rank[r].nbytes}" if r in by_rank else None for r in ranks}
            found.append(Dispute(ranks=ranks, said=told))
    return tuple(sorted(found, key=lambda dispute: (len(dispute.ranks), dispute.ranks)))


def unequal_empties(outlines: Sequence[Outline]) -> list[str]:
    """What ranks say differently of tensors without elements, as text."""
    problems: dict[str, str] = {}
    first: dict[str, tuple[TensorSpec, int]] = {}
    for rank, each in enumerate(outlines):
        for spec in each.empty:
            other, other_rank = first.setdefault(spec.name, (spec, rank))
            if other != spec:
                problems.setdefault(
                    spec.name,
                    f"{spec.name} is {_kind(other)} on rank {other_rank} but {_kind(spec)} on rank {rank}",
                )
    return [problems[name] for name in sorted(problems)]


def explain(disputes: Sequence[Dispute], shards: Mapping[int, Sequence[Shard]]) -> list[str]:
    """What the disputes are about, tensor by tensor, from the shards of their speakers, as sorted text."""
    return sorted({problem for dispute in disputes for problem in _explain(dispute, shards)})


def _explain(dispute: Dispute, shards: Mapping[int, Sequence[Shard]]) -> Iterable[str]:
    speakers = [rank for rank in dispute.speakers if rank in shards]
    by_box = {rank: {(s.spec.name, s.box): s for s in shards[rank] if s.box.numel} for rank in speakers}
    meant = {
        key: shard
        for rank in speakers
        for key, shard in by_box[rank].items()
        if (shard.replicas or (rank,)) == dispute.ranks
    }
    told = False
    for key in sorted(meant, key=lambda key: order(meant[key])):
        views: dict[str, list[int]] = {}
        for rank in speakers:
            views.setdefault(_view(by_box[rank].get(key), rank, dispute.ranks), []).append(rank)
        if len(views) > 1:
            told = True
            said = ", ".join(f"{text} on {_who(dispute, ranks)}" for text, ranks in views.items())
            yield f"{_place(meant[key])}: {said}"
    if not told:
        yield f"what ranks {_listed(dispute.ranks)} hold together differs between them"


def _view(shard: Shard | None, rank: int, ranks: Ranks) -> str:
    if shard is None:
        return "absent"
    if (shard.replicas or (rank,)) != ranks:
        return f"with replicas {_listed(shard.replicas)}" if shard.replicas else "with no replicas"
    return f"{_kind(shard.spec)} with replicas {_listed(ranks)}"


def _who(dispute: Dispute, speakers: Sequence[int]) -> str:
    """The speakers and those who say the same as one of them."""
    digests = {dispute.said[rank] for rank in speakers} - {None}
    ranks = [rank for rank, digest in dispute.said.items() if rank in speakers or digest in digests]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def refuse(who: str, problems: Sequence[str]) -> NoReturn:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise LayoutMismatchError(
        f"the layouts of {who} do not fit together: {'; '.join(problems[:_SHOWN])}{more}; "
        f"correct the shards or their replicas",
        problems=tuple(problems),
    )


def _place(shard: Shard) -> str:
    return f"{shard.spec.name} at offset {shard.box.offset}, shape {shard.box.shape}"


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= _RANKS_SHOWN:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, …, {ranks[-1]}] ({len(ranks)} ranks)"


def _digest(value: Any) -> str:
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False, sort_keys=True)
    except TypeError as error:
        raise InvalidInputError(
            f"a layout holds a value that is not a plain Python int or str ({error}); convert it first"
        ) from error
    return hashlib.blake2b(text.encode("ascii"), digest_size=_DIGEST_NBYTES).hexdigest()
