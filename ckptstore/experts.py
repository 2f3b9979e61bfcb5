"""Which tensors belong to experts, and what number each expert has over all ranks.

A rank numbers its experts from 0; names in a checkpoint must not depend on who held what, so they carry
global numbers. Pure: names in, names out; and the proof that every expert of a declared family is in
some rank's state, which coverage cannot give, since an expert that no rank has has no name at all.
Argued in docs/explanation/layouts.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import InconsistentCutError, InvalidInputError
from ckptstore.manifest import AttemptId, Member
from ckptstore.skeleton import WRAPPERS, inner, tag_of, tensor_names

EXPERT = "{expert}"
_SHOWN = 5

Families = tuple[
    tuple[tuple[str, int], tuple[str, ...]], ...
]  # ((pattern, experts), names below the declaration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """One family of experts as one rank holds it: the pattern of its names, and the global numbers of its experts.

    `pattern` is a dotted name in which `*` stands for any one part. It ends with `{expert}` where each
    expert is a module of its own; without it the tensors of that name are stacked, `[experts, ...]`.
    `numbers[n]` is the global number of the rank's expert n; `replicas` the sorted ranks that hold the
    same experts, empty for this rank alone.
    """

    pattern: str
    total: int
    numbers: tuple[int, ...]
    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parts = self.pattern.split(".")
        if "" in parts or EXPERT in parts[:-1] or parts == [EXPERT]:
            raise InvalidInputError(
                f"pattern {self.pattern!r} is no dotted name that ends with {EXPERT} or has none: write "
                f"'layers.*.mlp.experts.{EXPERT}', or 'layers.*.mlp.experts.w1' for stacked experts",
                pattern=self.pattern,
            )
        bad = [n for n in self.numbers if not 0 <= n < self.total]
        if bad or len(set(self.numbers)) != len(self.numbers):
            raise InvalidInputError(
                f"experts {list(self.numbers)} of {self.pattern!r} are not distinct numbers from 0 to "
                f"{self.total - 1}: give each expert of this rank its own global number",
                pattern=self.pattern,
                experts=self.numbers,
            )

    @property
    def stacked(self) -> bool:
        return not self.pattern.endswith(EXPERT)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a name that the pattern matches, without that of the expert's number."""
        return tuple(part for part in self.pattern.split(".") if part != EXPERT)

    def find(self, parts: Sequence[str], first: int) -> int | None:
        """The place right behind the first match that ends at or behind place `first` of a name's parts."""
        return find_after(self.parts, parts, first)

    def rename(self, parts: Sequence[str], first: int) -> tuple[int, str] | None:
        """(place, global number) of an expert's number at or behind place `first`; None if there is none.

        InvalidInputError for a number that this rank does not have.
        """
        at = self.find(parts, first)
        while at is not None and at < len(parts):
            if at >= first and is_number(parts[at]):
                local = int(parts[at])
                if local >= len(self.numbers):
                    raise InvalidInputError(
                        f"{'.'.join(parts)} is expert {local} of a rank that holds {len(self.numbers)} of the "
                        f"{self.total} experts {self.pattern!r}: correct experts=, or rank= and size=",
                        path=".".join(parts),
                    )
                return at, str(self.numbers[local])
            at = self.find(parts, at + 1)
        return None

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first local expert, its global number, count) of each run of experts that follow each other."""
        start = 0
        for n in range(1, len(self.numbers) + 1):
            if n == len(self.numbers) or self.numbers[n] != self.numbers[n - 1] + 1:
                yield start, self.numbers[start], n - start
                start = n


def find_after(pattern: Sequence[str], parts: Sequence[str], first: int) -> int | None:
    """The smallest place >= `first` of `parts` right before which `pattern` matches."""
    for stop in range(max(first, len(pattern)), len(parts) + 1):
        window = parts[stop - len(pattern) : stop]
        if all(want in ("*", part) for want, part in zip(pattern, window, strict=True)):
            return stop
    return None


def is_number(part: str) -> bool:
    """Is it a number as `str` writes it?"""
    return part.isascii() and part.isdecimal() and str(int(part)) == part


def deal_experts(total: int, *, rank: int, size: int) -> tuple[int, ...]:
    """The experts of one rank of `size`, as torch.chunk deals them: equally many, the last ranks fewer or none."""
    if not 0 <= rank < size:
        raise InvalidInputError(
            f"rank {rank} is not among {size} ranks of experts: give a rank from 0 to {size - 1}",
            rank=rank,
            size=size,
        )
    each = -(-total // size)
    return tuple(range(min(each * rank, total), min(each * (rank + 1), total)))


# -- the proof at commit


def check_experts(attempt: AttemptId, role: str, states: Sequence[tuple[Member, Families]]) -> None:
    """Refuse the states of a role unless every family of experts that they declare is whole.

    Each name below an expert of a family must be there for all its experts, in whatever rank's state.
    InconsistentCutError names the experts that no rank has, and who has the others.
    """
    names_of: dict[tuple[str, int], set[str]] = {}
    for _, families in states:
        for family, names in families:
            names_of.setdefault(family, set()).update(names)
    problems: list[str] = []
    for (pattern, total), names_below in names_of.items():
        sites = _sites(pattern, names_below)
        if not sites and total:
            problems.append(f"no rank of {role!r} has a tensor that is named as {pattern!r}")
        for site, rests in sorted(sites.items()):
            for rest, numbers in sorted(rests.items()):
                missing = sorted(set(range(total)) - numbers)
                if missing:
                    holders = _holders(states, (pattern, total), site, rest)
                    problems.append(
                        f"{_numbers(missing)} of {site}.{EXPERT}{rest} are in no rank's state ({_who(holders)})"
                    )
                    break  # the other tensors of these experts are missing as well
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise InconsistentCutError(
            f"step {attempt.step} lacks experts: {'; '.join(problems[:_SHOWN])}{more}: correct rank=, size= or "
            f"experts= of the ExpertParallel of those ranks, or num_experts",
            step=attempt.step,
            role=role,
            problems=tuple(problems),
        )


def _sites(pattern: str, names: Iterable[str]) -> dict[str, dict[str, set[int]]]:
    """The numbers of the experts that are there, by where the family stands and what follows the number."""
    match = _matcher(pattern).match
    sites: dict[str, dict[str, set[int]]] = {}
    for name in names:
        found = match(name)
        if found is not None:
            site, number, rest = found.groups()
            sites.setdefault(site, {}).setdefault(rest, set()).add(int(number))
    return sites


def _holders(
    states: Sequence[tuple[Member, Families]], family: tuple[str, int], site: str, rest: str
) -> dict[int, Member]:
    """Who has the experts of one place, the first of those that have the same."""
    holders: dict[int, Member] = {}
    for member, families in states:
        for number in (
            number
            for declaration, names in families
            if declaration == family
            for number in _sites(family[0], names).get(site, {}).get(rest, ())
        ):
            holders.setdefault(number, member)
    return holders


def _matcher(pattern: str) -> re.Pattern[str]:
    """Splits an expert's tensor: name of the family, global number, what follows up to the first `#`.

    The family is the shortest that is followed by a number as `str` writes it.
    """
    wanted = pattern.split(".")[:-1]
    family = r"\.".join("[^.#]*" if part == "*" else re.escape(part) for part in wanted)
    return re.compile(rf"((?:[^.#]*\.)*?{family})\.(0|[1-9][0-9]*)((?:\.[^#]*)?)(?=#|\Z)")


def declared(node: Any) -> Iterator[tuple[tuple[str, int], Iterator[str]]]:
    """((pattern, number of experts), names of the tensors below) of every declaration in a skeleton."""
    tag = tag_of(node)
    if tag == "x":
        for pattern, total in node["x"][0]:
            yield (pattern, total), tensor_names(node["x"][1])
    if tag == "d":
        for _, child in node["d"]:
            yield from declared(child)
    elif tag in ("l", "t"):
        for child in node[tag]:
            yield from declared(child)
    elif tag == "p" or tag in WRAPPERS:
        yield from declared(inner(node))


def _numbers(numbers: Sequence[int]) -> str:
    return f"expert{'s' if len(numbers) > 1 else ''} {_spans(numbers)}"


def _spans(numbers: Sequence[int]) -> str:
    """Rising numbers as text: `0 to 3, 7`."""
    told: list[tuple[int, int]] = []
    for number in numbers:
        if told and told[-1][1] == number - 1:
            told[-1] = (told[-1][0], number)
        else:
            told.append((number, number))
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in told)


def _who(members: Mapping[int, Member]) -> str:
    by_member: dict[Member, list[int]] = {}
    for number, member in sorted(members.items()):
        by_member.setdefault(member, []).append(number)
    told = [f"{member} has {_spans(numbers)}" for member, numbers in sorted(by_member.items())]
    more = f", and {len(told) - _SHOWN} more ranks" if len(told) > _SHOWN else ""
    return ", ".join(told[:_SHOWN]) + more
