"""Declare how the tensors of one naming are made of the tensors of another, both ways.

A rule says that two arrangements of tensors are one array, so a box of a wanted tensor is a few boxes of
stored ones: nothing is computed from elements, and the inverse is the same rule read from the other side.
Nothing is guessed: a name that no rule takes stays what it is. Where in a state names are looked for:
`translation.py`; argued in docs/explanation/layouts.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore.arrangement import FIELD, Named, Side, as_side, bound_fields, compile_name, patterns
from ckptstore.errors import InvalidInputError

_DIGITS = re.compile(r"\d+")

Fields = tuple[tuple[str, str], ...]  # (field, its text), sorted


def _signature(text: str) -> str:
    return _DIGITS.sub("0", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """`stored` and `wanted` are the same array, once for all values of the fields that both sides share."""

    stored: Side
    wanted: Side

    def __post_init__(self) -> None:
        free = set()
        for side in (self.stored, self.wanted):
            names, bound = list(patterns(side)), list(bound_fields(side))
            fields = {compile_name(name).fields for name in names}
            if len(set(names)) < len(names) or len(fields) > 1 or not set(bound) <= next(iter(fields)):
                raise InvalidInputError(
                    f"a rule joins {', '.join(names)}: names of one side must differ, have the same fields, and have "
                    f"those that are stacked over ({', '.join(bound) or 'none'})",
                    names=tuple(names),
                )
            text = any(f"{{{over}*}}" in name for over in bound for name in names)
            if len(set(bound)) < len(bound) or text:
                raise InvalidInputError(
                    f"a rule of {names[0]} stacks over {', '.join(bound)}: stack once over each field, a number"
                )
            free.add(next(iter(fields)) - set(bound))
        if len(free) > 1:
            raise InvalidInputError(
                f"the two sides of a rule, {next(patterns(self.stored))} and {next(patterns(self.wanted))}, differ in "
                f"fields that no stack runs over: each must be on both sides"
            )

    @property
    def is_rename(self) -> bool:
        return isinstance(self.stored, Named) and isinstance(self.wanted, Named)

    def inverse(self) -> TensorRule:
        return TensorRule(stored=self.wanted, wanted=self.stored)

    def read(self, pattern: str, name: str) -> tuple[Fields, dict[str, int]] | None:
        """(values of the shared fields, numbers of the stacked ones) of a stored name, if it has that pattern."""
        values = compile_name(pattern).read(name)
        if values is None:
            return None
        numbers = {over: int(values.pop(over)) for over in bound_fields(self.stored)}
        return tuple(sorted(values.items())), numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """How wanted tensors are made of stored ones: rules, applied in stages. Pure; read backwards it is its inverse."""

    stages: tuple[tuple[TensorRule, ...], ...]
    _index: tuple[RuleIndex, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", tuple(RuleIndex.of(rules) for rules in self.stages))

    @classmethod
    def declare(cls, rules: Mapping[Side | str, Side | str]) -> TensorMap:
        """One stage: `{stored: wanted}`, each a name with fields or a concat, stack or transpose of such.

        InvalidInputError if a rule has no inverse, or two rules take or give tensors of one pattern.
        """
        made = tuple(
            TensorRule(stored=as_side(stored), wanted=as_side(wanted)) for stored, wanted in rules.items()
        )
        for which in ("stored", "wanted"):
            names = [name for rule in made for name in patterns(getattr(rule, which))]
            twice = (
                sorted({name for name in names if names.count(name) > 1})
                if len(set(names)) < len(names)
                else []
            )
            if twice:
                raise InvalidInputError(
                    f"two rules have the {which} name {', '.join(twice)}: each name belongs to one rule",
                    names=tuple(twice),
                )
        return cls(stages=(made,))

    def inverse(self) -> TensorMap:
        """The map that makes the stored tensors of the wanted ones."""
        return TensorMap(
            stages=tuple(tuple(rule.inverse() for rule in rules) for rules in reversed(self.stages))
        )

    def then(self, following: TensorMap) -> TensorMap:
        """This map, and then `following`, which takes what this one gives."""
        return TensorMap(stages=self.stages + following.stages)

    @property
    def indexes(self) -> tuple[RuleIndex, ...]:
        """The stages, each ready to look up names."""
        return self._index


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleIndex:
    """The rules of one stage by the shape of their stored names, so that a name meets few of them."""

    by_signature: Mapping[str, tuple[tuple[TensorRule, str], ...]]
    of_text: tuple[tuple[TensorRule, str], ...]  # patterns with {rest*}, which any name may have

    @classmethod
    def of(cls, rules: Sequence[TensorRule]) -> RuleIndex:
        found: dict[str, tuple[tuple[TensorRule, str], ...]] = {}
        of_text = []
        for rule in rules:
            for pattern in patterns(rule.stored):
                if "*}" in pattern:
                    of_text.append((rule, pattern))
                else:
                    key = _signature(FIELD.sub("0", pattern))
                    found[key] = (*found.get(key, ()), (rule, pattern))
        return cls(by_signature=found, of_text=tuple(of_text))

    def find(self, name: str) -> list[tuple[TensorRule, str, Fields, dict[str, int]]]:
        """The rules that take a stored name: (rule, pattern, shared fields, stacked numbers); two are one too many."""
        tried = (*self.by_signature.get(_signature(name), ()), *self.of_text)
        return [
            (rule, pattern, *read)
            for rule, pattern in tried
            if (read := rule.read(pattern, name)) is not None
        ]
