"""A saved state as though it had been saved under the names that a TensorMap gives.

Keys of the state's dicts are compared whole, at any depth, so that weights, master weights and moments
follow one declaration. What is below a taken key (a parameter's moments and counters) goes with it. Only
names and specs are looked at here; elements move when `stored_leaves.py` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptstore.arrangement import (
    MisfitError,
    Source,
    bound_fields,
    compile_name,
    find_sources,
    patterns,
    place,
    through,
)
from ckptstore.errors import LayoutMismatchError
from ckptstore.held import join
from ckptstore.mapping import Fields, RuleIndex, TensorMap, TensorRule
from ckptstore.skeleton import WRAPPERS, escape, has_tensors, inner, tag_of, wrapped
from ckptstore.tensor import Box, TensorSpec
from ckptstore.tensor_group import Find, Fit, TensorGroup, some

_TOLD = 20

GroupId = tuple[int, Fields]


class Translation:
    """The translated skeleton, and for each tensor that it names its spec and where its elements are stored."""

    def __init__(
        self, mapping: TensorMap, skeleton: Any, specs: Mapping[str, TensorSpec], *, role: str
    ) -> None:
        self._stored = specs
        self._stages: list[_Stage] = []
        for index in mapping.indexes:
            stage = _Stage(index, role, self._stages[-1].spec if self._stages else specs.get)
            skeleton = stage.node(skeleton, "")
            self._stages.append(stage)
        self.skeleton = skeleton

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit in the names seen so far and in the specs asked for, a sentence each."""
        return tuple(dict.fromkeys(text for stage in self._stages for text in stage.problems))

    @property
    def untaken(self) -> tuple[str, ...]:
        """Names of saved tensors that no rule of the first stage takes; they are kept."""
        return tuple(sorted(set(self._stages[0].untaken))) if self._stages else ()

    def spec(self, name: str) -> TensorSpec | None:
        """The spec of a tensor (`role/name`, as translated); None if it does not exist or does not fit."""
        return self._stages[-1].spec(name) if self._stages else self._stored.get(name)

    def refuse(self) -> None:
        """Raise one LayoutMismatchError that lists the problems, if there are any."""
        problems = self.problems
        if problems:
            more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
            raise LayoutMismatchError(
                f"the mapping does not fit what was saved: {'; '.join(problems[:_TOLD])}{more}; declare rules for the "
                f"names and shapes that `ckptstore show` lists",
                problems=problems,
            )

    def has(self, name: str) -> bool:
        """Whether a rule gives this tensor, perhaps from stored ones that do not fit."""
        return any(name in stage.tensors for stage in self._stages)

    def sources(self, name: str, box: Box) -> list[Source]:
        """Where each element of a box is stored, once. The tensor must have a spec."""
        found = [Source(tensor=name, box=box, at=box, order=tuple(range(len(box.shape))))]
        for stage in reversed(self._stages):
            found = [through(one, below) for one in found for below in stage.sources(one.tensor, one.box)]
        return found

    def equals(self, name: str) -> tuple[str, ...]:
        """The stored scalars that one scalar stands for: they must be equal."""
        names: Iterable[str] = (name,)
        for stage in reversed(self._stages):
            names = [below for one in names for below in stage.equals(one)]
        return tuple(names)


class _Stage:
    """One stage: walks a skeleton, and answers for what it renames. `find` gives specs of the stage before."""

    def __init__(self, index: RuleIndex, role: str, find: Find) -> None:
        self.index, self.role, self.find = index, role, find
        self.problems: list[str] = []
        self.untaken: list[str] = []
        self.tensors: dict[str, tuple[TensorGroup, str]] = {}  # translated name: its group and key
        self.groups: dict[tuple[str, GroupId, str], TensorGroup] = {}
        self.given: dict[GroupId, list[str]] = {}  # keys that were given for the newest dict

    # -- names

    def node(self, node: Any, path: str) -> Any:
        tag = tag_of(node)
        if tag in ("T", "N"):
            self.untaken.append(node[tag])
        elif tag == "d":
            return {"d": self.entries(node["d"], path)}
        elif tag in ("l", "t") and has_tensors(node):
            return {tag: [self.node(child, join(path, n)) for n, child in enumerate(node[tag])]}
        elif tag == "p":
            return {"p": self.node(node["p"], path)}
        elif tag in WRAPPERS:
            return wrapped(node, self.node(inner(node), path))
        return node

    def entries(self, pairs: list[Any], path: str) -> list[Any]:
        members: dict[GroupId, dict[str, Any]] = {}
        rules: dict[GroupId, TensorRule] = {}
        order: list[tuple[Any, GroupId | None, Any]] = []
        for key, child in pairs:
            found = self.index.find(key) if isinstance(key, str) else []
            if len(found) > 1:
                self.problems.append(f"{join(path, key)} is taken by {len(found)} rules")
            if len(found) != 1:
                order.append((key, None, child))
                continue
            rule, _, fields, _ = found[0]
            group = (id(rule), fields)
            rules[group] = rule
            if group not in members:
                order.append((key, group, None))
            members.setdefault(group, {})[key] = child
        given: dict[Any, Any] = {}
        for key, place_of, child in order:
            if place_of is None:
                self.give(given, key, self.node(child, join(path, key)), path)
            else:
                rule, found_by_key = rules[place_of], members[place_of]
                for wanted in self.wanted_keys(rule, place_of, found_by_key, path):
                    made = self.merge(rule, place_of, found_by_key, wanted, path, "")
                    self.give(given, wanted, made, path)
        children = dict(pairs)
        if "state" in children and tag_of(children.get("groups")) == "d":
            self.check_groups(children["groups"]["d"], path)
        return [[key, child] for key, child in given.items()]

    def give(self, given: dict[Any, Any], key: Any, child: Any, path: str) -> None:
        if key in given:
            self.problems.append(
                f"{join(path, key)} is given twice, by two rules or by a rule and a name that none takes"
            )
        given[key] = child

    def wanted_keys(self, rule: TensorRule, group: GroupId, members: dict[str, Any], path: str) -> list[str]:
        """The keys that a group becomes; how many a stack gives is told by the tensors' shapes."""
        fields = dict(group[1])
        keys: list[str] = []
        if not any(bound_fields(rule.wanted)):
            keys = [compile_name(name).fill(fields) for name in patterns(rule.wanted)]
        else:
            error: MisfitError | None = None
            for names in _tensors(members):
                full = {key: f"{self.role}/{name}" for key, name in names.items()}
                specs = [self.find(name) for name in full.values()]
                if all(spec is None or not spec.shape for spec in specs):
                    continue  # a counter beside the moments
                try:
                    shape = TensorGroup(rule=rule, fields=fields, stored=full).array_shape(self.find)
                    keys = [key for key, _ in place(rule.wanted, shape, fields)]
                    break
                except MisfitError as caught:
                    error = caught
            if not keys and group in self.given:
                keys = self.given[group]  # a list of parameters has no tensors of its own
            if not keys:
                reason = error or "none of them has a tensor that tells how many"
                self.problems.append(
                    f"{some(join(path, key) for key in members)} cannot be taken apart: {reason}"
                )
        self.given[group] = keys
        return keys

    def merge(
        self, rule: TensorRule, group: GroupId, members: dict[str, Any], wanted: str, path: str, suffix: str
    ) -> Any:
        """What a group's nodes at one place below their keys become below the key `wanted`."""
        first = next(iter(members.values()))
        tag = tag_of(first)
        if len({{"N": "T"}.get(tag_of(node), tag_of(node)) for node in members.values()}) > 1:
            self.problems.append(f"{self.told(members, path, suffix)} are of different kinds and become one")
            return first

        def below(children: dict[str, Any], at: str) -> Any:
            return self.merge(rule, group, children, wanted, path, at)

        if tag in ("T", "N"):
            mark = "#" + first[tag].split("#", 1)[1] if "#" in first[tag] else ""
            name = join(path, wanted) + suffix + mark
            at = (path, group, suffix + mark)
            if at not in self.groups:
                stored = {key: f"{self.role}/{node[tag_of(node)]}" for key, node in members.items()}
                self.groups[at] = TensorGroup(rule=rule, fields=dict(group[1]), stored=stored)
            self.tensors[f"{self.role}/{name}"] = (self.groups[at], wanted)
            return {tag: name}
        if tag == "d":
            children: dict[Any, dict[str, Any]] = {}
            for key, node in members.items():
                for name, child in node["d"]:
                    children.setdefault(name, {})[key] = child
            return {
                "d": [
                    [name, below(found, f"{suffix}.{escape(str(name))}")] for name, found in children.items()
                ]
            }
        if tag in ("l", "t") and has_tensors(first):
            if len({len(node[tag]) for node in members.values()}) > 1:
                self.problems.append(
                    f"{self.told(members, path, suffix)} have different lengths and become one"
                )
                return first
            return {
                tag: [
                    below({key: node[tag][n] for key, node in members.items()}, f"{suffix}.{n}")
                    for n in range(len(first[tag]))
                ]
            }
        if tag == "p" or tag in WRAPPERS:
            made = below({key: inner(node) for key, node in members.items()}, suffix)
            return {"p": made} if tag == "p" else wrapped(first, made)
        if any(node != first for node in members.values()):
            self.problems.append(f"{self.told(members, path, suffix)} have different values and become one")
        return first

    def told(self, members: Mapping[str, Any], path: str, suffix: str) -> str:
        return some(join(path, key) + suffix for key in members)

    def check_groups(self, groups: list[Any], path: str) -> None:
        """Note parameters that become one and lie in two groups of an optimizer (as `torch_state` tells it)."""
        owner: dict[GroupId, Any] = {}
        for at, node in groups:
            listed = dict(node["d"]).get("params") if tag_of(node) == "d" else None
            for name, _ in listed["d"] if listed is not None and tag_of(listed) == "d" else ():
                found = self.index.find(name) if isinstance(name, str) else []
                for rule, _, fields, _ in found:
                    other = owner.setdefault((id(rule), fields), at)
                    if other != at:
                        self.problems.append(
                            f"{name} is in group {at} of {path or 'the optimizer'}, but what it becomes one with is in "
                            f"group {other}"
                        )

    # -- tensors

    def spec(self, name: str) -> TensorSpec | None:
        if name not in self.tensors:
            return self.find(name)
        group, key = self.tensors[name]
        fit = self.fit(group, name)
        if fit is None:
            return None
        shape = () if fit.common else fit.wanted[key].shape
        return TensorSpec(name=name, dtype=fit.dtype, shape=shape)

    def sources(self, name: str, box: Box) -> list[Source]:
        if name not in self.tensors:
            return [Source(tensor=name, box=box, at=box, order=tuple(range(len(box.shape))))]
        group, key = self.tensors[name]
        fit = self.fit(group, name)
        if fit is None:
            return []
        if fit.common:
            return [Source(tensor=fit.stored[0][0], box=box, at=box, order=())]
        return list(find_sources(fit.wanted[key], box, fit.stored))

    def equals(self, name: str) -> list[str]:
        if name not in self.tensors:
            return [name]
        return list(self.tensors[name][0].stored.values())

    def fit(self, group: TensorGroup, name: str) -> Fit | None:
        """The group's two arrangements; None, with the problem noted, if what is stored does not make them."""
        if group.fit is None and not group.failed:
            try:
                group.fit = group.arrange(self.find)
            except MisfitError as error:
                group.failed = True
                self.problems.append(f"{name} cannot be made: {error}")
        return group.fit


def _tensors(members: Mapping[str, Any]) -> list[dict[str, str]]:
    """For each place below the keys: the name of each key's tensor there."""
    found: dict[str, dict[str, str]] = {}

    def walk(key: str, node: Any, at: str) -> None:
        tag = tag_of(node)
        if tag in ("T", "N"):
            found.setdefault(at, {})[key] = node[tag]
        elif tag == "d":
            for name, child in node["d"]:
                walk(key, child, f"{at}.{name}")
        elif tag in ("l", "t"):
            for n, child in enumerate(node[tag]):
                walk(key, child, f"{at}.{n}")
        elif tag == "p" or tag in WRAPPERS:
            walk(key, inner(node), at)

    for key, node in members.items():
        walk(key, node, "")
    return list(found.values())
