"""Sets of integers as sorted half-open intervals, each with a value.

The ledger keeps ordinals this way, so a million settled samples cost what their intervals cost, and
the agreement of two ledgers is a sweep over both. It knows nothing of what the integers mean. Plain
lists and bisection, because nearly every change is at the end, where a numpy column would be copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")
A = TypeVar("A")
B = TypeVar("B")


class Intervals(Generic[V]):
    """Disjoint half-open intervals, sorted, each with a value; neighbours of one value are merged.

    So a million ordinals cost what their intervals cost, and equal contents are equal lists.
    """

    __slots__ = ("starts", "stops", "values")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.values: list[V] = []

    def __iter__(self) -> Iterator[tuple[int, int, V]]:
        return zip(self.starts, self.stops, self.values, strict=True)

    def __len__(self) -> int:
        """Number of ordinals, not of intervals."""
        return sum(self.stops) - sum(self.starts)

    def __contains__(self, ordinal: int) -> bool:
        return self.find(ordinal) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def stop(self) -> int:
        """One more than the largest ordinal; 0 when there is none."""
        return self.stops[-1] if self.stops else 0

    def find(self, ordinal: int) -> int | None:
        """The position of the interval that holds `ordinal`."""
        at = bisect_right(self.starts, ordinal) - 1
        return at if at >= 0 and ordinal < self.stops[at] else None

    def ordinals(self) -> Iterator[int]:
        for start, stop, _ in self:
            yield from range(start, stop)

    def copy(self) -> Intervals[V]:
        new: Intervals[V] = Intervals()
        new.starts, new.stops, new.values = list(self.starts), list(self.stops), list(self.values)
        return new

    def add(self, start: int, stop: int, value: V) -> None:
        """Add [start, stop), which must be free."""
        at = bisect_right(self.starts, start)
        joins_left = at > 0 and self.stops[at - 1] == start and self.values[at - 1] == value
        joins_right = at < len(self.starts) and self.starts[at] == stop and self.values[at] == value
        if joins_left and joins_right:
            self.stops[at - 1] = self.stops[at]
            del self.starts[at], self.stops[at], self.values[at]
        elif joins_left:
            self.stops[at - 1] = stop
        elif joins_right:
            self.starts[at] = start
        else:
            self.starts.insert(at, start)
            self.stops.insert(at, stop)
            self.values.insert(at, value)

    def discard(self, ordinal: int) -> None:
        """Take `ordinal` out, if it is there."""
        at = self.find(ordinal)
        if at is None:
            return
        start, stop, value = self.starts[at], self.stops[at], self.values[at]
        rest = [(a, b) for a, b in ((start, ordinal), (ordinal + 1, stop)) if a < b]
        self.starts[at : at + 1] = [a for a, _ in rest]
        self.stops[at : at + 1] = [b for _, b in rest]
        self.values[at : at + 1] = [value] * len(rest)


def overlaps(left: Intervals[A], right: Intervals[B]) -> Iterator[tuple[int, int, A, B]]:
    """The maximal [start, stop) that lie in an interval of each, with both values, in order."""
    i = j = 0
    while i < len(left.starts) and j < len(right.starts):
        start, stop = max(left.starts[i], right.starts[j]), min(left.stops[i], right.stops[j])
        if start < stop:
            yield start, stop, left.values[i], right.values[j]
        if left.stops[i] <= right.stops[j]:
            i += 1
        else:
            j += 1


def gaps(rows: Iterable[tuple[int, int]], horizon: int) -> Iterator[tuple[int, int]]:
    """The [start, stop) of [0, horizon) that no row covers; rows may overlap and come in any order."""
    at = 0
    for start, stop in sorted(rows):
        if at < min(start, horizon):
            yield at, min(start, horizon)
        at = max(at, stop)
    if at < horizon:
        yield at, horizon
