"""Compare the replicas of every box by the digests in the parts, and say which rank is the odd one.

Pure, so that a refusal seen in production replays from its parts. In the good case it compares one
combined digest a set and member; names and single digests are opened only for a set that differs. What
is equal here, and what it costs: docs/explanation/replicas.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptstore.errors import InconsistentCutError
from ckptstore.manifest import AttemptId, Part
from ckptstore.replicaset import KINDS, HeldBox, ReplicaSet

Ranks = tuple[int, ...]
Runs = tuple[tuple[int, int, int], ...]
_SHOWN = 5
_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One box whose replicas are not equal: `groups` are the ranks that are equal among themselves, most first."""

    held: HeldBox
    groups: tuple[Ranks, ...]

    @property
    def odd(self) -> Ranks:
        """The ranks that most others contradict; all of them where no content has more than half."""
        total = sum(map(len, self.groups))
        groups = self.groups[1:] if len(self.groups[0]) * 2 > total else self.groups
        return tuple(sorted(rank for group in groups for rank in group))

    def __str__(self) -> str:
        where = f"{self.held.tensor} at offset {self.held.offset}, shape {self.held.shape}"
        if len(self.odd) < sum(map(len, self.groups)):
            return f"{where}: {_ranks(self.odd)} against {_ranks(self.groups[0])}"
        return f"{where}: {' against '.join(_ranks(group) for group in self.groups[:_SHOWN])}"


def check_replicas(attempt: AttemptId, role: str, parts: Sequence[Part]) -> None:
    """Refuse parts of one role, all of one layout, whose replicas are not bitwise equal.

    InconsistentCutError lists every tensor and box with the ranks that differ (`problems`, `tensors`, `ranks`);
    so are digests that only some members took, or took in ways that cannot be compared.
    """
    without = [part.member for part in parts if part.replicas is None]
    if len(without) == len(parts):
        return
    if without:
        having = next(part.member for part in parts if part.replicas is not None)
        raise InconsistentCutError(
            f"{without[0]} saved step {attempt.step} without digests of its replicas and {having} with them: pass one "
            f"check_replicas on all ranks",
            step=attempt.step,
            role=role,
        )
    problems: list[str] = []
    found: list[Difference] = []
    for runs, held in sorted(_by_set(parts).items()):
        if len({replicas.combined for replicas in held.values()}) > 1 or len(held) != sum(
            n for _, n, _ in runs
        ):
            problems += _uncomparable(runs, held) or _unequal(held, found)
    if not problems and not found:
        return
    found.sort(key=lambda difference: difference.held)
    problems += map(str, found)
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise InconsistentCutError(
        f"replicas of role {role} differ at step {attempt.step}: {'; '.join(problems[:_SHOWN])}{more}; nothing was "
        f"committed: make them equal (broadcast a good one, or restore) and save again, or pass check_replicas=False",
        step=attempt.step,
        role=role,
        problems=tuple(problems),
        tensors=tuple(difference.held.tensor for difference in found),
        ranks=tuple(sorted({rank for difference in found for rank in difference.odd})),
    )


def _by_set(parts: Sequence[Part]) -> dict[Runs, dict[int, ReplicaSet]]:
    """For each set of ranks, what each member says of the boxes that it holds with just these."""
    sets: dict[Runs, dict[int, ReplicaSet]] = {}
    for part in sorted(parts, key=lambda part: part.member.rank):
        for replicas in part.replicas or ():
            sets.setdefault(replicas.ranks, {})[part.member.rank] = replicas
    return sets


def _uncomparable(runs: Runs, held: Mapping[int, ReplicaSet]) -> list[str]:
    """Why the digests of a set cannot be compared at all: members that lack it, other counts, other kinds."""
    first = next(iter(held.values()))
    ranks = first.members()
    if tuple(sorted(held)) != ranks:
        wrong = sorted(set(ranks) ^ set(held))
        return [
            f"what {_ranks(ranks)} hold together came from {_ranks(tuple(held))} (wrong: {_ranks(wrong)})"
        ]
    counts = _grouped({rank: replicas.count for rank, replicas in held.items()})
    if len(counts) > 1:
        return [f"{' and '.join(_ranks(group) for group in counts)} have digests of other numbers of boxes"]
    problems = []
    if len({replicas.kinds for replicas in held.values()}) > 1:
        names = _names(held)
        for n in range(first.count):
            kinds = {rank: replicas.kind(n) for rank, replicas in held.items()}
            groups = _grouped(kinds)
            if len(groups) > 1:
                ways = " and ".join(f"{KINDS.get(kinds[g[0]], kinds[g[0]])} on {_ranks(g)}" for g in groups)
                problems.append(
                    f"{names[n].tensor} at offset {names[n].offset} was digested {ways}, which cannot be compared: "
                    f"hold it on one kind of device"
                )
    return problems


def _unequal(held: Mapping[int, ReplicaSet], found: list[Difference]) -> list[str]:
    """Add the boxes that differ to `found`; a problem if none does although the combined digests do."""
    alike = _grouped({rank: replicas.combined for rank, replicas in held.items()})
    digests = np.stack([held[group[0]].short_digests() for group in alike])
    columns = np.flatnonzero((digests != digests[0]).any(axis=0)).tolist()
    names = _names(held) if columns else ()
    for n in columns:
        value = {rank: int(digests[g, n]) for g, group in enumerate(alike) for rank in group}
        found.append(Difference(held=names[n], groups=_grouped(value)))
    if columns:
        return []
    return [f"the digests of what {_ranks(tuple(held))} hold together differ, and those of no single box do"]


def _names(held: Mapping[int, ReplicaSet]) -> tuple[HeldBox, ...]:
    lowest = held[min(held)]
    return lowest.boxes() or tuple(
        HeldBox(tensor=f"replicated box {n}", offset=(), shape=()) for n in range(lowest.count)
    )


def _grouped(values: Mapping[int, object]) -> tuple[Ranks, ...]:
    """The ranks by equal value: the largest group first, then by the lowest rank."""
    groups: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return tuple(tuple(ranks) for ranks in sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks)))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
