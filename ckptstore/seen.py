"""What a walk over a state met at each place, and whether another state is alike there.

A node remembers kinds, keys and what wrappers say, and the skeleton that came of it; never a tensor, whose
memory it would keep. Asked again it gives itself where nothing but tensors can have changed, or a node with a
new skeleton; what it cannot compare exactly it refuses with `Differs`, and the state is walked anew. Tensors
are only collected here and compared many at once (`known.py`). Apart from `state.py`, which makes the nodes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import copysign
from typing import Any

from ckptstore.held import (
    ExpertParallel,
    Frozen,
    HeldBy,
    PerRank,
    Where,
    ranks_of,
)

DICTS = (dict, OrderedDict, defaultdict)
SCALARS = frozenset((bool, int, str, float, type(None)))
Place = tuple[str, Where, int]  # path, what is said of it, depth
NO_PLACE: Place = (
    "",
    Where(),
    0,
)  # of tensors, which are never walked anew alone: 20,000 places less to collect


class Differs(Exception):  # noqa: N818 - no error: it never leaves `flatten`
    """The state is not as it was, in a way that only a walk anew can tell."""


class Asked:
    """What `state_dict` of the objects of a state gave, each asked once a flatten.

    It may talk to other ranks, so a walk that is given up and done anew must not ask again.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Any, Any, Exception | None]] = []
        self._at = 0

    def rewind(self) -> None:
        self._at = 0

    def state_dict(self, holder: Any) -> Any:
        if self._at == len(self._given) or self._given[self._at][0] is not holder:
            del self._given[self._at :]
            try:
                self._given.append((holder, holder.state_dict(), None))
            except Exception as error:
                self._given.append((holder, None, error))
        _, told, failed = self._given[self._at]
        self._at += 1
        if failed is not None:
            raise failed
        return told


class Look:
    """One walk: the tensors it met, in order, and how to walk anew what is no tensor and has changed."""

    __slots__ = ("asked", "distributed", "held", "walk")

    def __init__(self, asked: Asked, walk: Callable[[Any, Place], Seen]) -> None:
        self.held: list[Any] = []  # torch tensors and numpy arrays: what lies under wrappers and DTensors
        self.distributed: list[Any] = []  # the DTensors
        self.asked = asked
        self.walk = walk

    def anew(self, seen: Seen, value: Any) -> Seen:
        if seen.tensors:
            raise Differs
        found = self.walk(value, seen.place)
        if found.tensors:
            raise Differs
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """One place of a state. `tensors` counts the tensors in it that have names, tied ones included."""

    skeleton: Any
    place: Place
    tensors: int

    def again(self, value: Any, look: Look) -> Seen:
        """What is at this place now. `Differs` if that may change which tensors there are."""
        return look.anew(self, value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenValue(Seen):
    """A value that is no tensor. `scalar` holds one that may be compared instead of encoded."""

    scalar: tuple[Any] | None = None

    def again(self, value: Any, look: Look) -> Seen:
        if self.scalar is not None:
            (known,) = self.scalar
            if type(value) is type(known) and value == known and (value != 0.0 or _same_zero(value, known)):
                return self
        return look.anew(self, value)


def _same_zero(one: Any, two: Any) -> bool:
    return type(one) is not float or copysign(1.0, one) == copysign(1.0, two)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenItems(Seen):
    """A dict, list or tuple. Children are plain tensors but for those in `inner`, which is by their numbers.

    `scalars` holds all children where they may be compared at once.
    """

    kind: type[Any]
    keys: tuple[Any, ...]  # of a dict
    key_types: tuple[type, ...]
    count: int
    inner: tuple[tuple[int, Seen], ...]
    scalars: tuple[Any, ...] | None
    scalar_types: tuple[type, ...]

    @classmethod
    def of(cls, value: Any, tag: str, skeletons: list[Any], children: Sequence[Seen], place: Place) -> Seen:
        """`skeletons` are those of the children, with the keys of a dict."""
        tensors = sum([child.tensors for child in children])
        skeleton = {tag: skeletons}
        if type(value) not in (*DICTS, list, tuple):  # it may give its items as it likes
            if tensors:
                return Seen(skeleton=skeleton, place=place, tensors=tensors)
            return SeenValue(skeleton=skeleton, place=place, tensors=0)
        keys = tuple(value) if tag == "d" else ()
        scalars = _scalars(children)
        return cls(
            skeleton=skeleton,
            place=place,
            tensors=tensors,
            kind=type(value),
            keys=keys,
            key_types=tuple(map(type, keys)),
            count=len(children),
            inner=tuple([(n, each) for n, each in enumerate(children) if type(each) is not SeenTensor]),
            scalars=scalars,
            scalar_types=tuple(map(type, scalars or ())),
        )

    def again(self, value: Any, look: Look) -> Seen:
        if type(value) is not self.kind:
            return look.anew(self, value)
        values: Sequence[Any] = value
        if self.kind is not list and self.kind is not tuple:
            keys = tuple(value)
            if keys != self.keys or tuple(map(type, keys)) != self.key_types:
                return look.anew(self, value)
            if not self.inner and self.count:  # a dict of plain tensors: most are
                look.held += value.values()
                return self
            values = tuple(value.values())
        if len(values) != self.count:
            return look.anew(self, value)
        if self.scalars is not None:
            same = tuple(values) == self.scalars and tuple(map(type, values)) == self.scalar_types
            return self if same else look.anew(self, value)
        held, at = look.held, 0
        changed: list[tuple[int, Seen]] = []
        for n, child in self.inner:
            if at < n:
                held += values[at:n]
            found = child.again(values[n], look)
            if found is not child:
                changed.append((n, found))
            at = n + 1
        if at < self.count:
            held += values[at:]
        return self._with(changed) if changed else self

    def _with(self, changed: list[tuple[int, Seen]]) -> Seen:
        """Skeletons are shared with earlier states, so the lists on the way to a change are new."""
        ((tag, old),) = self.skeleton.items()
        new, inner = list(old), dict(self.inner)
        for n, child in changed:
            new[n] = [old[n][0], child.skeleton] if tag == "d" else child.skeleton
            inner[n] = child
        scalars = _scalars(list(inner.values())) if len(inner) == self.count else None
        return replace(
            self,
            skeleton={tag: new},
            inner=tuple(inner.items()),
            scalars=scalars,
            scalar_types=tuple(map(type, scalars or ())),
        )


def _scalars(children: Sequence[Seen]) -> tuple[Any, ...] | None:
    """The children's values, if all are scalars. Not with a zero of floats: 0.0 equals -0.0."""
    found: list[Any] = []
    for child in children:
        if type(child) is not SeenValue or child.scalar is None:
            return None
        found += child.scalar
    return None if any(type(each) is float and each == 0.0 for each in found) else tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenObject(Seen):
    """An object with `state_dict`."""

    kind: type[Any]
    inner: Seen

    def again(self, value: Any, look: Look) -> Seen:
        if type(value) is not self.kind or not has_state_dict(value):
            return look.anew(self, value)
        found = self.inner.again(look.asked.state_dict(value), look)
        return self if found is self.inner else replace(self, inner=found, skeleton={"o": found.skeleton})


def has_state_dict(value: Any) -> bool:
    if isinstance(value, type):
        return False  # a class is no object that holds state
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenWrapper(Seen):
    """A PerRank, Frozen, HeldBy or ExpertParallel."""

    kind: type[Any]
    said: Any
    inner: Seen

    def again(self, value: Any, look: Look) -> Seen:
        if type(value) is not self.kind:
            return look.anew(self, value)
        wrapped, said = opened(value)
        if said != self.said:
            return look.anew(self, value)
        found = self.inner.again(wrapped, look)
        if found is self.inner:
            return self
        if self.skeleton is self.inner.skeleton:
            skeleton = found.skeleton
        else:
            ((tag, old),) = self.skeleton.items()
            skeleton = {tag: [old[0], found.skeleton] if tag == "x" else found.skeleton}
        return replace(self, inner=found, skeleton=skeleton)


def opened(value: Any) -> tuple[Any, Any]:
    """(what is wrapped, what the wrapper says of it) of one of these exact types."""
    if type(value) is HeldBy:
        return value.tree, ranks_of(value.ranks, "")
    if type(value) is ExpertParallel:
        return value.state, value.families("")
    return (value.tree if type(value) is Frozen else value.value), ()


WRAPPERS = (PerRank, Frozen, HeldBy, ExpertParallel)


# -- tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenTensor(Seen):
    """A torch tensor of a plain type; whether it is alike is found out for many at once."""

    def again(self, value: Any, look: Look) -> Seen:
        look.held.append(value)
        return self
