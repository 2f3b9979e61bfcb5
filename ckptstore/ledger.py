"""Which prompt ordinals were issued, sealed, consumed or dropped, and which are still owed.

A prompt can be made again from its ordinal, so ordinals alone decide that each sample is trained
exactly once. It stands apart from the buffer (which holds the groups) and from the rules that join
the roles' ledgers (`agreement.py`). The trainer's ledger alone decides what is consumed, because it
is staged with the weights; the owner's record of it is a copy: docs/explanation/cuts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from operator import index
from typing import Any, Final, SupportsIndex, TypeVar

from .errors import CorruptError, InvalidInputError
from .intervals import Intervals

ISSUED: Final = "issued"
SEALED: Final = "sealed"
CONSUMED: Final = "consumed"
DROPPED: Final = "dropped"

Span = tuple[int, int, int]
"""First and last publication number that made a group, and the fence it was made under."""

V = TypeVar("V")

_NAMED_AT_MOST = 10
_FIELDS = frozenset(("seed", "next", ISSUED, SEALED, CONSUMED, DROPPED))


def name_ordinals(ordinals: Iterable[int]) -> str:
    """The first few ordinals, in order, and how many more there are."""
    found = sorted(set(ordinals))
    text = ", ".join(map(str, found[:_NAMED_AT_MOST]))
    return text if len(found) <= _NAMED_AT_MOST else f"{text} and {len(found) - _NAMED_AT_MOST} more"


class Ledger:
    """The accounting of prompt ordinals, a leaf of any state that is saved.

    A trainer calls `consume` (and `consumed_at`) alone; the owner of the prompts calls all. `seed` is
    that of the permutation of prompts. Not thread-safe. Every method that refuses (InvalidInputError)
    has changed nothing.
    """

    __slots__ = ("_consumed", "_dropped", "_frontier", "_issued", "_next", "_sealed", "seed")

    def __init__(self, seed: int = 0) -> None:
        self.seed = index(seed)
        self._next = 0
        self._frontier = 0  # a lower bound: what is settled stays settled, so it only grows
        self._issued: Intervals[None] = Intervals()
        self._sealed: dict[int, Span] = {}
        self._consumed: Intervals[int] = Intervals()
        self._dropped: Intervals[str] = Intervals()

    def __repr__(self) -> str:
        return f"Ledger(seed={self.seed}, frontier={self.frontier}, next={self._next}, {self.counts()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # it changes

    # -- what happened

    def issue(self, count: int) -> tuple[int, ...]:
        """The next `count` ordinals, in order, now issued."""
        if index(count) < 0:
            raise InvalidInputError(f"cannot issue {count} ordinals: ask for 0 or more", count=count)
        start, self._next = self._next, self._next + index(count)
        if self._next > start:
            self._issued.add(start, self._next, None)
        return tuple(range(start, self._next))

    def seal(self, ordinal: int, first_version: int, last_version: int, *, fence: int = 0) -> None:
        """Record that the whole group of an issued ordinal exists, made by these publication numbers.

        `fence` is that of the last version: numbers repeat after a rollback, (fence, number) does not.
        """
        span = (index(first_version), index(last_version), index(fence))
        if not 0 <= span[0] <= span[1] or span[2] < 0:
            raise InvalidInputError(
                f"ordinal {ordinal} cannot be sealed by versions {span[0]} to {span[1]} of fence {span[2]}; "
                "versions count up from 0",
                ordinal=ordinal,
                span=span,
            )
        self._need((ordinal,), "seal", (ISSUED,), "seal each issued ordinal once, and drop late answers")
        self._issued.discard(ordinal)
        self._sealed[index(ordinal)] = span

    def reissue(self, ordinals: Iterable[SupportsIndex]) -> None:
        """Give up the groups of sealed ordinals (stale, or lost); they count as issued. Issued ones stay."""
        chosen = [index(o) for o in ordinals]
        self._need(chosen, "issue again", (ISSUED, SEALED), "only what is owed can be issued again")
        for ordinal in chosen:
            if self._sealed.pop(ordinal, None) is not None:
                self._issued.add(ordinal, ordinal + 1, None)

    def consume(self, ordinals: Iterable[SupportsIndex], step: int) -> None:
        """Record that update `step` (N = the Nth applied) trains on `ordinals`, whoever issued them.

        Raises InvalidInputError, naming all, if any is consumed already, is dropped, or comes twice: the
        trainer must refuse those groups, whoever offers them.
        """
        chosen = sorted(index(o) for o in ordinals)
        if index(step) < 0 or (chosen and chosen[0] < 0):
            raise InvalidInputError(
                f"step {step} cannot consume ordinals {name_ordinals(chosen)}: both count up from 0",
                step=step,
            )
        again = {o for o in chosen if o in self._consumed}
        again.update(a for a, b in pairwise(chosen) if a == b)
        dropped = {o for o in chosen if o in self._dropped}
        if again or dropped:
            found = [f"{name_ordinals(again)} already consumed"] if again else []
            found += [f"{name_ordinals(dropped)} dropped"] if dropped else []
            raise InvalidInputError(
                f"step {step} cannot consume ordinals: {'; '.join(found)}; train each once: leave these out",
                step=step,
                consumed=tuple(sorted(again)),
                dropped=tuple(sorted(dropped)),
            )
        for start, stop in _runs(chosen):
            self._consumed.add(start, stop, index(step))
        for ordinal in chosen:
            self._issued.discard(ordinal)
            self._sealed.pop(ordinal, None)
        self._next = max(self._next, self._consumed.stop)

    def drop(self, ordinal: int, reason: str) -> None:
        """Record that an owed ordinal will never be trained on, and why."""
        if not isinstance(reason, str) or not reason:
            raise InvalidInputError(
                f"ordinal {ordinal} is dropped without a reason: say why", ordinal=ordinal
            )
        self._need((ordinal,), "drop", (ISSUED, SEALED), "only what is owed can be dropped")
        self._issued.discard(ordinal)
        self._sealed.pop(index(ordinal), None)
        self._dropped.add(index(ordinal), index(ordinal) + 1, reason)

    def _need(self, ordinals: Iterable[int], verb: str, states: tuple[str, ...], advice: str) -> None:
        found = {o: self.state(o) for o in ordinals}
        wrong = {o: state for o, state in found.items() if state is None or state not in states}
        if wrong:
            told = ", ".join(
                f"{o} is {state or 'not issued'}" for o, state in list(wrong.items())[:_NAMED_AT_MOST]
            )
            raise InvalidInputError(
                f"cannot {verb} ordinals {name_ordinals(wrong)}: {told}; {advice}",
                ordinals=tuple(sorted(wrong)),
            )

    # -- what is known

    @property
    def next_ordinal(self) -> int:
        """The next one that `issue` gives: above all that were issued or consumed."""
        return self._next

    @property
    def frontier(self) -> int:
        """The smallest ordinal that is neither consumed nor dropped."""
        at: int | None = 0
        while at is not None:
            settled: Intervals[int] | Intervals[str] = self._consumed
            at = settled.find(self._frontier)
            if at is None:
                settled = self._dropped
                at = settled.find(self._frontier)
            if at is not None:
                self._frontier = settled.stops[at]
        return self._frontier

    def state(self, ordinal: int) -> str | None:
        """`issued`, `sealed`, `consumed` or `dropped`; None for an ordinal of which nothing is recorded."""
        if ordinal in self._sealed:
            return SEALED
        for name, held in ((CONSUMED, self._consumed), (ISSUED, self._issued), (DROPPED, self._dropped)):
            if ordinal in held:
                return name
        return None

    def consumed_at(self, ordinal: int) -> int | None:
        """The step that trained on `ordinal`, or None."""
        at = self._consumed.find(ordinal)
        return None if at is None else self._consumed.values[at]

    def owed(self) -> tuple[int, ...]:
        """Issued or sealed, and neither consumed nor dropped, in order."""
        return tuple(sorted((*self._issued.ordinals(), *self._sealed)))

    def sealed(self) -> dict[int, Span]:
        """The span of versions of each sealed ordinal, in order."""
        return dict(sorted(self._sealed.items()))

    @property
    def consumed(self) -> Intervals[int]:
        """Consumed ordinals with their steps; a view, not to be changed."""
        return self._consumed

    @property
    def dropped(self) -> Intervals[str]:
        """Dropped ordinals with the reasons; a view, not to be changed."""
        return self._dropped

    def counts(self) -> dict[str, int]:
        """Number of ordinals in each state now."""
        held = (len(self._issued), len(self._sealed), len(self._consumed), len(self._dropped))
        return dict(zip((ISSUED, SEALED, CONSUMED, DROPPED), held, strict=True))

    # -- carried in a state

    def copy(self) -> Ledger:
        new = Ledger(self.seed)
        new._next, new._frontier, new._sealed = self._next, self._frontier, dict(self._sealed)
        new._issued, new._consumed, new._dropped = (
            self._issued.copy(),
            self._consumed.copy(),
            self._dropped.copy(),
        )
        return new

    def to_json(self) -> dict[str, Any]:
        """Intervals `[start, stop)` with their values, `sealed` as [ordinal, first, last version, fence].

        Shares nothing with the ledger. Equal ledgers give equal values.
        """
        return {
            "seed": self.seed,
            "next": self._next,
            ISSUED: [[start, stop] for start, stop, _ in self._issued],
            SEALED: [[ordinal, *span] for ordinal, span in sorted(self._sealed.items())],
            CONSUMED: [list(row) for row in self._consumed],
            DROPPED: [list(row) for row in self._dropped],
        }

    @classmethod
    def from_json(cls, value: Any) -> Ledger:
        """The ledger that `to_json` told. Raises CorruptError for anything that it cannot have told."""
        if not isinstance(value, dict) or set(value) != _FIELDS:
            raise _corrupt(f"it is not an object of {sorted(_FIELDS)}")
        if type(value["seed"]) is not int or not _is_count(value["next"]):
            raise _corrupt(f"seed {value['seed']!r} or next {value['next']!r} is not an integer")
        ledger = cls(value["seed"])
        ledger._next = value["next"]
        _fill(ledger._issued, value[ISSUED], ISSUED, lambda rest: rest == [], lambda rest: None)
        _fill(ledger._consumed, value[CONSUMED], CONSUMED, _is_step, lambda rest: int(rest[0]))
        _fill(ledger._dropped, value[DROPPED], DROPPED, _is_reason, lambda rest: str(rest[0]))
        ledger._sealed = _sealed_from(value[SEALED])
        ledger._check_disjoint()
        return ledger

    def load_json(self, value: Any) -> None:
        """Become the ledger that `to_json` told, in place. Raises CorruptError, having changed nothing."""
        told = Ledger.from_json(value)
        for name in self.__slots__:
            setattr(self, name, getattr(told, name))

    def _check_disjoint(self) -> None:
        rows = [
            *((start, stop) for start, stop, _ in self._issued),
            *((start, stop) for start, stop, _ in self._consumed),
            *((start, stop) for start, stop, _ in self._dropped),
            *((ordinal, ordinal + 1) for ordinal in self._sealed),
        ]
        rows.sort()
        for (_, stop), (start, _) in pairwise(rows):
            if start < stop:
                raise _corrupt(f"ordinal {start} is in two states")
        if rows and rows[-1][1] > self._next:
            raise _corrupt(f"ordinal {rows[-1][1] - 1} is not below the next ordinal {self._next}")


def _runs(ordinals: list[int]) -> Iterator[tuple[int, int]]:
    """Maximal [start, stop) of sorted, different ordinals."""
    at = 0
    while at < len(ordinals):
        start = at
        while at + 1 < len(ordinals) and ordinals[at + 1] == ordinals[at] + 1:
            at += 1
        yield ordinals[start], ordinals[at] + 1
        at += 1


def _corrupt(what: str) -> CorruptError:
    return CorruptError(f"this is not a ledger: {what}; read another copy or an older checkpoint", what=what)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # bool is an int to isinstance


def _is_step(rest: list[Any]) -> bool:
    return len(rest) == 1 and _is_count(rest[0])


def _is_reason(rest: list[Any]) -> bool:
    return len(rest) == 1 and isinstance(rest[0], str) and bool(rest[0])


def _fill(
    into: Intervals[V],
    rows: Any,
    name: str,
    fits: Callable[[list[Any]], bool],
    read: Callable[[list[Any]], V],
) -> None:
    """Read sorted, disjoint, merged intervals, the only form in which they are told."""
    if not isinstance(rows, list):
        raise _corrupt(f"{name} is not a list")
    for row in rows:
        if (
            not isinstance(row, list)
            or len(row) < 2
            or not all(map(_is_count, row[:2]))
            or not fits(row[2:])
            or row[0] >= row[1]
        ):
            raise _corrupt(f"{name} holds {row!r}, not an interval")
        before, count = into.stop, len(into.starts)
        if row[0] < before:
            raise _corrupt(f"{name} interval {row!r} begins below {before}, where the one before ends")
        into.add(row[0], row[1], read(row[2:]))
        if len(into.starts) == count:
            raise _corrupt(f"{name} interval {row!r} was not merged with the one before")


def _sealed_from(rows: Any) -> dict[int, Span]:
    sealed: dict[int, Span] = {}
    last = -1
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or len(row) != 4 or not all(map(_is_count, row)) or row[1] > row[2]:
            raise _corrupt(f"{SEALED} holds {row!r}, not [ordinal, first version, last version, fence]")
        if row[0] <= last:
            raise _corrupt(f"{SEALED} ordinal {row[0]} does not come after {last}")
        last = row[0]
        sealed[last] = (row[1], row[2], row[3])
    return sealed
