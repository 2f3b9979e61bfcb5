"""Fit a saved state onto the state that is to be restored, before anything is changed.

The target says what is wanted: its tensors are filled in place, its other leaves are replaced in the
containers it is given. Everything that does not fit is collected, so that one error lists all of it;
only then are changes made. Which leaf replaces which: docs/explanation/restore.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptstore.errors import LayoutMismatchError, MissingTensorError
from ckptstore.held import (
    ExpertParallel,
    Frozen,
    HeldBy,
    PerRank,
    Where,
    is_tensor_leaf,
    join,
    torch_module,
)
from ckptstore.ledger import Ledger
from ckptstore.memoryspan import repeats
from ckptstore.pieces import describe
from ckptstore.plainleaf import PlainLeaves
from ckptstore.seen import has_state_dict
from ckptstore.skeleton import WRAPPERS, has_tensors, inner, tag_of, tensor_paths
from ckptstore.state import TensorLeaf, decode, unwrap
from ckptstore.tensor import TensorSpec
from ckptstore.tensors import Tensors
from ckptstore.translation import Translation

KEEP = object()
SHOWN = 20


def _no_tensors(name: str, numpy: bool) -> Any:
    raise LookupError(name)


@dataclass(slots=True)
class Binding:
    """The plan of a restore: tensors to fill, changes to make afterwards, and what does not fit."""

    role: str
    rank: int
    per_rank: bool  # the number of ranks is the saved one, so PerRank values are given back
    leaves: list[TensorLeaf] = field(default_factory=list)
    changes: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    not_given_back: list[str] = field(default_factory=list)
    _plain: PlainLeaves = field(default_factory=PlainLeaves)

    def bind(self, target: Any, saved: Any) -> None:
        """Fit `target` (the state's dict) onto the saved skeleton. Changes nothing."""
        self._node(target, saved, "", Where())

    def present(self, tensors: Mapping[str, TensorSpec]) -> list[TensorLeaf]:
        """The wanted leaves whose tensors are stored: all of them, unless the restore is not strict."""
        return [leaf for leaf in self.leaves if leaf.spec.name in tensors]

    def check_specs(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Note each wanted tensor that is stored with another dtype or global shape, or not at all."""
        for leaf in self.leaves:
            self._check_spec(leaf.spec, tensors.get(leaf.spec.name))

    def check_stored(self, tensors: Tensors) -> None:
        """As `check_specs`, of columns: no spec is made for what fits."""
        specs = [leaf.spec for leaf in self.leaves]
        for n in np.flatnonzero(tensors.match(specs) < 0).tolist():
            self._check_spec(specs[n], tensors.by_name.get(specs[n].name))

    def _check_spec(self, spec: TensorSpec, stored: TensorSpec | None) -> None:
        if stored is None:
            self.missing.append(spec.name.split("/", 1)[1])
        elif stored != spec:
            self.mismatched.append(
                f"{spec.name} was saved as {stored.dtype}{list(stored.shape)}, the target is "
                f"{spec.dtype}{list(spec.shape)}"
            )

    def check_translated(self, translation: Translation) -> dict[str, TensorSpec]:
        """As `check_specs`, under a mapping's names; notes also what it cannot make. The specs of what is there."""
        specs: dict[str, TensorSpec] = {}
        unmade: set[str] = set()
        for name, wanted in {leaf.spec.name: leaf.spec for leaf in self.leaves}.items():
            spec = translation.spec(name)
            if spec is not None:
                specs[name] = spec
            elif translation.has(name):
                unmade.add(name)
                specs[name] = wanted  # told by the translation's problems, not as missing
        self.check_specs(specs)
        self.mismatched.extend(translation.problems)
        return {name: spec for name, spec in specs.items() if name not in unmade}

    def refuse(self, *, strict: bool = True) -> None:
        """Raise one error that lists all that is missing (if strict) or of another kind, or return."""
        missing = self.missing if strict else []
        if not missing and not self.mismatched:
            return
        kind = MissingTensorError if missing else LayoutMismatchError
        texts = [f"{name} is not in the checkpoint" for name in missing] + self.mismatched
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        skip = ", or pass strict=False to skip what is missing" if missing else ""
        raise kind(
            f"cannot restore {self.role}/{self.rank}: {'; '.join(texts[:SHOWN])}{more}; nothing was changed: ask for "
            f"what was saved, as `ckptstore show` lists it{skip}",
            missing=tuple(missing),
            mismatched=tuple(self.mismatched),
        )

    def apply(self) -> None:
        """Make the changes to everything that is not a tensor."""
        for change in self.changes:
            change()

    # -- one node: returns KEEP, or the value that replaces the target in its container

    def _node(self, target: Any, saved: Any, path: str, where: Where) -> Any:
        while tag_of(saved) in WRAPPERS:
            saved = inner(saved)
        if isinstance(target, (Frozen, HeldBy, ExpertParallel)):
            wrapped, within = unwrap(target, path, where, self.rank)
            attribute = "state" if isinstance(target, ExpertParallel) else "tree"
            return self._inner(target, attribute, wrapped, saved, path, within)
        if isinstance(target, PerRank):
            return self._per_rank(target, saved, path, where)
        if tag_of(saved) == "p":
            self.mismatched.append(f"{path} was saved as PerRank; wrap the target in PerRank as well")
            return KEEP
        if is_tensor_leaf(target):
            return self._tensor(target, saved, path, where)
        if isinstance(target, Ledger):
            return self._ledger(target, saved, path)
        if isinstance(target, dict):
            return self._dict(target, saved, path, where)
        if isinstance(target, (list, tuple)) and not hasattr(target, "_fields"):
            return self._sequence(target, saved, path, where)
        torch = torch_module()
        if torch is not None and isinstance(target, torch.optim.Optimizer):
            self.mismatched.append(
                f"{path} is a bare optimizer; restore ckptstore.torch_state(model, optimizer)"
            )
            return KEEP
        if has_state_dict(target):
            state = target.state_dict()
            self._node(state, saved, path, where)
            self.changes.append(lambda: target.load_state_dict(state))
            return KEEP
        return self._value(saved, path)

    def _is_plain(self, target: Any, saved: Any, where: Where) -> bool:
        """Take a plain tensor onto a stored one, without the many questions; False for all else, and to find errors."""
        stored = saved.get("T") if type(saved) is dict else None
        if stored is None or where.per_rank or where.stacked is not None:
            return False
        leaf = self._plain.leaf(target, f"{self.role}/{stored}")
        if leaf is None:
            return False
        self.leaves.append(leaf)
        return True

    def _inner(self, holder: Any, attribute: str, value: Any, saved: Any, path: str, where: Where) -> Any:
        new = self._node(value, saved, path, where)
        if new is not KEEP:
            self.changes.append(lambda: setattr(holder, attribute, new))
        return KEEP

    def _per_rank(self, target: PerRank, saved: Any, path: str, where: Where) -> Any:
        if tag_of(saved) != "p":
            self.mismatched.append(f"{path} was not saved as PerRank; give a plain target")
            return KEEP
        if not self.per_rank:
            self.not_given_back.append(path)
            return KEEP
        return self._inner(target, "value", target.value, saved["p"], path, replace(where, per_rank=True))

    def _tensor(self, target: Any, saved: Any, path: str, where: Where) -> Any:
        if tag_of(saved) not in ("T", "N"):
            self.mismatched.append(f"{path} is a tensor here but was saved as a value")
            return KEEP
        stored = saved[tag_of(saved)]  # another's name where it was saved as tied to that
        if where.per_rank and not stored.endswith(f"#{self.rank}"):
            stored = f"{path}#{self.rank}"  # the node is another rank's, whose value this is not
        spec, pieces = describe(target, f"{self.role}/{stored}", path, self.rank, where)
        if any(_is_read_only(piece.data) for piece in pieces):
            self.mismatched.append(f"{path} cannot be written to, or its elements share memory; give a copy")
        self.leaves += [
            TensorLeaf(spec=spec, box=piece.box, data=piece.data, replicas=None, frozen=False)
            for piece in pieces
        ]
        return KEEP

    def _ledger(self, target: Ledger, saved: Any, path: str) -> Any:
        if tag_of(saved) != "ledger":
            self.mismatched.append(f"{path} is a Ledger here but was saved as something else")
        else:
            self.changes.append(lambda: target.load_json(saved["ledger"]))
        return KEEP

    def _dict(self, target: dict[Any, Any], saved: Any, path: str, where: Where) -> Any:
        if tag_of(saved) != "d":
            self.mismatched.append(f"{path or 'the state'} is a dict here but was saved as something else")
            return KEEP
        children = dict(saved["d"])
        asked = set()
        for key, value in target.items():
            told, at, within = where.enter(path, key)
            asked.add(told)
            if told not in children:
                self._note_missing(value, at, within)
                continue
            child = children[told]
            if self._is_plain(value, child, within):
                continue
            new = self._node(value, child, at, within)
            if new is not KEEP:
                self.changes.append(_setter(target, key, new))
        for key, child in children.items():
            if key in asked:
                continue
            if has_tensors(child) or tag_of(child) == "p" or _holds_tensors(target):
                self.unasked.extend(tensor_paths(child, join(path, key)) or [join(path, key)])
            elif not where.is_expert(path, key):  # another rank's, by a number that means another one here
                self.changes.append(_setter(target, key, decode(child, _no_tensors)))
        return KEEP

    def _note_missing(self, value: Any, path: str, where: Where) -> None:
        """Every leaf below, by name: a whole missing subtree lists its tensors."""
        while isinstance(value, (Frozen, PerRank, HeldBy, ExpertParallel)):
            if isinstance(value, PerRank):
                value = value.value
            else:
                value, where = unwrap(value, path, where, self.rank)
        if not is_tensor_leaf(value) and has_state_dict(value):
            value = value.state_dict()
        if isinstance(value, dict) and value:
            for key, child in value.items():
                _, at, within = where.enter(path, key)
                self._note_missing(child, at, within)
        else:
            self.missing.append(path)

    def _sequence(self, target: Any, saved: Any, path: str, where: Where) -> Any:
        tag = "l" if isinstance(target, list) else "t"
        if tag_of(saved) != tag:
            self.mismatched.append(
                f"{path} is a {type(target).__name__} here but was saved as something else"
            )
            return KEEP
        children = saved[tag]
        if not _holds_tensors(target) and not has_tensors(saved):
            value = decode(saved, _no_tensors)
            if tag == "t":
                return value
            self.changes.append(lambda: target.__setitem__(slice(None), value))
            return KEEP
        if len(children) != len(target):
            self.mismatched.append(f"{path} has {len(target)} items here but {len(children)} were saved")
            return KEEP
        new = [
            self._node(value, child, join(path, n), where)
            for n, (value, child) in enumerate(zip(target, children, strict=True))
        ]
        if all(value is KEEP for value in new):
            return KEEP
        if tag == "t":
            return tuple(old if value is KEEP else value for old, value in zip(target, new, strict=True))
        for n, value in enumerate(new):
            if value is not KEEP:
                self.changes.append(_setter(target, n, value))
        return KEEP

    def _value(self, saved: Any, path: str) -> Any:
        if has_tensors(saved):
            self.mismatched.append(
                f"{path} is a value here but was saved with tensors; give tensors of their shapes"
            )
            return KEEP
        return decode(saved, _no_tensors)


def _setter(container: Any, key: Any, value: Any) -> Callable[[], None]:
    def change() -> None:
        container[key] = value

    return change


def _is_read_only(data: Any) -> bool:
    return repeats(data) or (isinstance(data, np.ndarray) and not data.flags.writeable)


def _holds_tensors(target: Any) -> bool:
    if is_tensor_leaf(target):
        return True
    if isinstance(target, (Frozen, HeldBy)):
        return _holds_tensors(target.tree)
    if isinstance(target, ExpertParallel):
        return _holds_tensors(target.state)
    if isinstance(target, PerRank):
        return _holds_tensors(target.value)
    if isinstance(target, dict):
        return any(_holds_tensors(value) for value in target.values())
    if isinstance(target, (list, tuple)):
        return any(_holds_tensors(value) for value in target)
    return has_state_dict(target) and not isinstance(target, (Ledger, np.generic))
