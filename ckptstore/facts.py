"""What a commit has to know of a member's state, taken out of it in one walk.

A thousand states of a thousand names each are millions of small objects, which cost more time and memory
than all else that a committer does, most of it in the cyclic collector. So of each state only this stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import InconsistentCutError
from ckptstore.experts import Families, declared
from ckptstore.ledger import Ledger
from ckptstore.manifest import AttemptId, Member
from ckptstore.skeleton import common_values, escape, find_ledger, has_tensors, inner, tag_of, tensor_names

_STEP, _INT = "\x1f", "\x1e"  # before each key of a path, and before those that are integers
_CONTROLS = {ord(_STEP): "%1F", ord(_INT): "%1E"}  # within keys, where `escape` leaves no other %


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """`names` are those of its tensors, without the role and in no order.

    `common` is JSON of its common values, `[[path, value], …]`; `families` are the experts that it declares, each with
    the names below the declaration. `kinds` are what `kinds_of` tells.
    """

    names: tuple[str, ...]
    common: str
    families: Families
    ledger: Ledger | None
    kinds: tuple[str, ...]


def facts_of(state: Any, pool: dict[str, str]) -> StateFacts:
    """The facts of a state's skeleton; equal texts of states with one `pool` are one object."""
    found = _Found(pool=pool)
    found.walk(state, "")
    common = json.dumps(found.common, sort_keys=True)
    return StateFacts(
        names=tuple(found.names),
        common=pool.setdefault(common, common),
        families=tuple(found.families),
        ledger=found.ledger,
        kinds=tuple(pool.setdefault(kind, kind) for kind in kinds_of(state)),
    )


def kinds_of(node: Any, path: str = "") -> Iterator[str]:
    """What stands where: the kind and, each after `_STEP`, the keys that lead there; of all but tensors.

    Keys and not dotted names, since `a.b` may be one key or two.
    """
    tag = tag_of(node)
    if tag == "d":
        yield f"a dict{path}"
        for key, child in node["d"]:
            if type(child) is not dict or "T" not in child:
                step = escape(key).translate(_CONTROLS) if isinstance(key, str) else f"{_INT}{key}"
                yield from kinds_of(child, f"{path}{_STEP}{step}")
    elif tag in ("l", "t") and has_tensors(node):
        yield f"{'a list' if tag == 'l' else 'a tuple'} with tensors{path}"
        for number, child in enumerate(node[tag]):
            yield from kinds_of(child, f"{path}{_STEP}{_INT}{number}")
    elif tag in ("z", "o", "x"):
        yield from kinds_of(inner(node), path)
    elif tag not in ("T", "N"):
        yield f"{'a PerRank' if tag == 'p' else 'a value'}{path}"


@dataclass(slots=True, kw_only=True)
class _Found:
    pool: dict[str, str]
    names: list[str] = field(default_factory=list)
    common: list[tuple[str, Any]] = field(default_factory=list)
    families: list[tuple[tuple[str, int], tuple[str, ...]]] = field(default_factory=list)
    ledger: Ledger | None = None

    def walk(self, node: Any, path: str) -> None:
        """Add what a node has; the names below it stand together.

        Dicts of tensors are nearly all of a large state, so they are walked here; what is rare is left to the
        functions that say what each fact is.
        """
        tag = tag_of(node)
        if tag == "d":
            items = node["d"]
            tensors = [child["T"] for _, child in items if type(child) is dict and "T" in child]
            self._name(tensors)
            for key, child in items if len(tensors) < len(items) else ():
                if type(child) is not dict or "T" not in child:
                    self.walk(child, f"{path}.{key}" if path else str(key))
        elif tag in ("z", "o"):
            self.walk(inner(node), path)
        elif tag == "x":
            first, at = len(self.names), len(self.families)
            self.common.append((f"the experts of {path or 'the state'}", node["x"][0]))
            self.walk(inner(node), path)
            names = tuple(self.names[first:])
            self.families[at:at] = [((pattern, total), names) for pattern, total in node["x"][0]]
        else:
            self._name(list(tensor_names(node)))
            self.common += common_values(node, path)
            self.families += [(family, tuple(names)) for family, names in declared(node)]
            self.ledger = find_ledger(node) if self.ledger is None else self.ledger

    def _name(self, names: list[str]) -> None:
        self.names += map(self.pool.setdefault, names, names)


# -- do the states of a role have the same things under the same names


def check_kinds(attempt: AttemptId, role: str, states: Sequence[tuple[Member, StateFacts]]) -> None:
    """Refuse states of one role of which one has a value where another has a dict, a tensor or another kind.

    Their union would have to drop one of them. InconsistentCutError names the place and who has what there.
    """
    found: dict[str, str] = {}
    for kind in {kind for _, facts in states for kind in facts.kinds}:
        what = kind.partition(_STEP)[0]
        path = kind.removeprefix(what)
        other = found.setdefault(path, what)
        if other != what:
            here, there = ([m for m, facts in states if f"{k}{path}" in facts.kinds] for k in (what, other))
            raise _unlike(attempt, role, path, what, here, other, there)
    names = {name for _, facts in states for name in facts.names}
    for path, what in found.items():
        name = _dotted(path)
        if what != "a dict" and name in names:
            here = [m for m, facts in states if f"{what}{path}" in facts.kinds]
            there = [m for m, facts in states if m not in here and name in facts.names]
            if there:
                raise _unlike(attempt, role, path, what, here, "a tensor", there)


def _dotted(path: str) -> str:
    return ".".join(key.removeprefix(_INT) for key in path.split(_STEP)[1:])


def _unlike(
    attempt: AttemptId, role: str, path: str, what: str, here: list[Member], other: str, there: list[Member]
) -> InconsistentCutError:
    (first, one), (second, two) = sorted([(min(here), what), (min(there), other)])
    return InconsistentCutError(
        f"{_dotted(path) or 'the state'} is {one} on {first} and {two} on {second} at step {attempt.step}: make it one "
        f"kind on all ranks, or leave it out where it is not held",
        step=attempt.step,
        role=role,
        path=_dotted(path),
    )
