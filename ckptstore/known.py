"""What is known of the state that a member flattened last, so that the next flatten only compares.

A training loop saves the same tensors again and again, and describing one costs 25 µs of Python. Known are the
tree (`seen.py`), what each tensor was like and where it lay, and which of them are tied; no tensor is kept. If
a state is alike in all that a structure follows from, the very structure of before is given back; else all is
forgotten and walked anew. So the result is always that of a walk: tests/save/test_known.py holds both equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.pieces import Piece, Tie, address_of, is_host_run
from ckptstore.seen import Differs, Look, Seen
from ckptstore.structure import Structure, Views

if TYPE_CHECKING:
    from ckptstore.interop.torch_signature import Signatures

NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """One tensor of a state, as a walk met it.

    `first` is the number of the first tensor that lies under it, in the walk's list; a piece adds its shard's.
    Not `stored` is what is tied to a tensor that was met before. Holds tensors: not to be kept.
    """

    first: int
    pieces: Sequence[Piece]
    tie: Tie | None
    stored: bool


class Recollection:
    """A state as it was: what is compared, and what follows if nothing differs."""

    def __init__(
        self, *, member: tuple[str, int], root: Seen, look: Look, met: Sequence[Met], structure: Structure
    ) -> None:
        """Raises Differs if the state cannot be compared exactly."""
        held = look.held
        self.member, self.root, self.structure = member, root, structure
        self._tensors = [n for n, each in enumerate(held) if not isinstance(each, np.ndarray)]
        self._arrays = [n for n, each in enumerate(held) if isinstance(each, np.ndarray)]
        self._signatures = _signatures([held[n] for n in self._tensors])
        self._outer = _signatures(look.distributed, placed=False)
        self._at = [0] * len(held)
        self._note(list(zip(self._tensors, self._signatures.places(), strict=True)))
        self._note([(n, address_of(held[n])) for n in self._arrays])
        self._sized = [_has_elements(each) for each in held]
        self._ties = Ties(met, held, self._at)
        self._views = _views(met, held)
        self._lies = _lies(met, held)
        self._check_memory(range(len(held)))
        self.places: tuple[int, ...] = tuple([self._place(lie) for lie in self._lies])

    def _note(self, moved: list[tuple[int, int]]) -> None:
        for n, address in moved:
            self._at[n] = address

    def _check_memory(self, numbers: Sequence[int]) -> None:
        """Elements without memory (a freed storage) are no tensor to believe in."""
        if any(self._sized[n] and not self._at[n] for n in numbers):
            raise Differs

    def _place(self, lie: tuple[int, int] | None) -> int:
        return NOWHERE if lie is None else self._at[lie[0]] + lie[1]

    def again(self, state: Any, look: Look) -> tuple[Seen, Sequence[Any]]:
        """(tree, data) of a state that differs in nothing but values and addresses; then `places` are anew.

        Raises Differs, and is to be forgotten, if any other thing may differ.
        """
        root = self.root.again(state, look)
        held = look.held
        if len(held) != len(self._at):
            raise Differs
        tensors = [held[n] for n in self._tensors] if self._arrays else held
        moved = self._signatures.moved(tensors)
        if moved is None or self._outer.moved(look.distributed) is None:
            raise Differs
        if self._arrays:
            moved = [(self._tensors[n], address) for n, address in moved]
            moved += [(n, now) for n in self._arrays if (now := address_of(held[n])) != self._at[n]]
        if moved:
            self._move(moved)
        self._ties.check_empty(held)
        self.root = root
        return root, self._views(held)

    def _move(self, moved: list[tuple[int, int]]) -> None:
        self._note(moved)
        numbers = [n for n, _ in moved]
        self._check_memory(numbers)
        self._ties.check_moved(numbers, self._at)
        gone = set(numbers)
        self.places = tuple(
            [
                self._place(lie) if lie is not None and lie[0] in gone else place
                for lie, place in zip(self._lies, self.places, strict=True)
            ]
        )


class _NoTensors:
    """The signatures of no tensors, for processes without torch."""

    def places(self) -> list[int]:
        return []

    def moved(self, tensors: Sequence[Any]) -> list[tuple[int, int]] | None:
        return None if tensors else []


def _signatures(tensors: Sequence[Any], *, placed: bool = True) -> Signatures | _NoTensors:
    if not tensors:
        return _NoTensors()
    from ckptstore.interop.torch_signature import Signatures

    return Signatures(tensors, placed=placed)


class Ties:
    """Which tensors of a state are one: those of one kind whose pieces lie in the same places."""

    def __init__(self, met: Sequence[Met], held: Sequence[Any], at: Sequence[int]) -> None:
        self._of: dict[int, int] = {}  # number of a held tensor: of the met one that it is of
        self._kinds: list[int | None] = [None] * len(met)  # None: can be tied to no other
        self._parts: list[tuple[tuple[int, int], ...]] = []
        self._empty: list[tuple[int, tuple[_EmptyPart, ...]]] = []
        kinds: dict[tuple[Any, ...], int] = {}
        for n, each in enumerate(met):
            sources = [(each.first + p.shard, held[each.first + p.shard]) for p in each.pieces]
            parts = [
                (number, _before(p.data, of)) for p, (number, of) in zip(each.pieces, sources, strict=True)
            ]
            self._parts.append(tuple(parts))
            if each.tie is None:
                continue
            kind = kinds.setdefault(each.tie.kind, len(kinds))
            if all(piece.box.numel for piece in each.pieces):
                self._kinds[n] = kind
                self._of.update((number, n) for number, _ in parts)
            else:
                empty = [
                    _EmptyPart.of(piece, number, of, each.tie.by_memory)
                    for piece, (number, of) in zip(each.pieces, sources, strict=True)
                ]
                self._empty.append((kind, tuple(empty)))
        self._all_anew(at)
        self._empties = self._pattern(held)

    def _key(self, n: int, at: Sequence[int]) -> tuple[Any, ...]:
        parts = self._parts[n]
        if len(parts) == 1:
            ((number, before),) = parts
            return self._kinds[n], at[number] + before
        return self._kinds[n], tuple([at[number] + before for number, before in parts])

    def _all_anew(self, at: Sequence[int]) -> list[int]:
        self._keys = [None if kind is None else self._key(n, at) for n, kind in enumerate(self._kinds)]
        self._first: dict[Any, int] = {}
        self._same = [self._first.setdefault(key, n) if key else n for n, key in enumerate(self._keys)]
        self._tied = {first for n, first in enumerate(self._same) if n != first}
        return self._same

    def check_moved(self, numbers: Sequence[int], at: Sequence[int]) -> None:
        """Raises Differs if tensors that lie elsewhere now are tied to others than before."""
        moved = {self._of[number] for number in numbers if number in self._of}
        if len(moved) > 1000 or any(n in self._tied or self._same[n] != n for n in moved):
            before = self._same
            if self._all_anew(at) != before:
                raise Differs
            return
        for n in moved:
            del self._first[self._keys[n]]
        for n in moved:
            self._keys[n] = key = self._key(n, at)
            if self._first.setdefault(key, n) != n:
                raise Differs

    def check_empty(self, held: Sequence[Any]) -> None:
        """Raises Differs if tensors without elements, which lie nowhere, are tied to others than before."""
        if self._empty and self._pattern(held) != self._empties:
            raise Differs

    def _pattern(self, held: Sequence[Any]) -> list[int]:
        first: dict[Any, int] = {}
        found = []
        for n, (kind, parts) in enumerate(self._empty):
            key = [part.key(held[part.number]) for part in parts]
            found.append(n if None in key else first.setdefault((kind, tuple(key)), n))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _EmptyPart:
    """A piece of a tensor that has a piece without elements: how it would be known to be the same as another."""

    number: int
    how: str  # "object", "memory", "nothing"
    shift: int  # elements between the beginnings of the held tensor and the piece

    @classmethod
    def of(cls, piece: Piece, number: int, source: Any, by_memory: bool) -> _EmptyPart:
        if not by_memory:
            return cls(number=number, how="object" if piece.data is source else "nothing", shift=0)
        return cls(number=number, how="memory", shift=piece.data.storage_offset() - source.storage_offset())

    def key(self, source: Any) -> Any:
        if self.how == "object":
            return id(source)
        if self.how == "nothing":
            return None
        return source.untyped_storage()._cdata, source.storage_offset() + self.shift


# -- how leaves follow from what was held


def _before(data: Any, source: Any) -> int:
    """Bytes between the beginnings of a held tensor and of a piece of it."""
    return 0 if data is source or not _has_elements(data) else address_of(data) - address_of(source)


def _has_elements(data: Any) -> bool:
    return bool(data.size if isinstance(data, np.ndarray) else data.numel())


def _views(met: Sequence[Met], held: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What gives the data of all leaves, from what a walk like the one that met these holds."""
    found = [
        (number, _view_of(piece.data, held[number]))
        for each in met
        if each.stored
        for piece in each.pieces
        for number in (each.first + piece.shard,)
    ]
    if len(found) < 2 or any(view is not None for _, view in found):
        return partial(_make_views, views=tuple(found))
    numbers = [number for number, _ in found]
    if numbers == list(range(len(held))):
        return tuple
    return itemgetter(*numbers)


def _make_views(held: list[Any], *, views: tuple[tuple[int, Any], ...]) -> Views:
    return Views(held, views)


def _view_of(data: Any, source: Any) -> Any:
    if data is source:
        return None
    if isinstance(source, np.ndarray) or source.is_conj() or source.is_neg():
        raise Differs
    before = data.storage_offset() - source.storage_offset()
    if (data.shape, data.stride(), before) == (source.shape, source.stride(), 0):
        return None
    return tuple(data.shape), data.stride(), before


def _lies(met: Sequence[Met], held: Sequence[Any]) -> list[tuple[int, int] | None]:
    """For each leaf the number of its tensor and the bytes before it; None where it is no run of host memory."""
    return [
        (number, _before(piece.data, held[number])) if is_host_run(piece.data) else None
        for each in met
        if each.stored
        for piece in each.pieces
        for number in (each.first + piece.shard,)
    ]
