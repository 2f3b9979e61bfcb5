"""Tensors that one rule joins: do they fit together, and where does each lie in the rule's array?

All of one set of shared fields and one place below the keys (the weights of layer 3's experts, or their
first moments). Specs are looked up when they are asked for, since a rank needs few of a model's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ckptstore.arrangement import MisfitError, Placement, compile_name, measure, patterns, place
from ckptstore.mapping import TensorRule
from ckptstore.tensor import Box, Shape, TensorSpec

_SHOWN = 5

Find = Callable[[str], TensorSpec | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Both arrangements of a group of tensors. A scalar is in all its places the same one (`common`)."""

    dtype: str
    stored: tuple[tuple[str, Placement], ...]
    wanted: Mapping[str, Placement]
    common: bool = False


@dataclass(slots=True, kw_only=True)
class TensorGroup:
    """Tensors of one rule with equal shared fields and one suffix: stored key to stored name."""

    rule: TensorRule
    fields: dict[str, str]
    stored: dict[str, str]
    fit: Fit | None = None
    failed: bool = False

    def array_shape(self, find: Find) -> Shape:
        """The shape of the rule's array; MisfitError if the stored tensors do not tell it."""
        counts: dict[str, int] = {}
        first, shape = next(patterns(self.rule.stored)), None
        for key, name in self.stored.items():
            for pattern in patterns(self.rule.stored):
                read = self.rule.read(pattern, key)
                if read is None:
                    continue
                counts = {over: max(n + 1, counts.get(over, 0)) for over, n in read[1].items()}
                spec = find(name)
                if pattern == first and spec is not None:
                    shape = spec.shape
        if shape is None:
            raise MisfitError(
                f"no {compile_name(first).show(self.fields)} is saved beside {some(self.stored)}"
            )
        return measure(self.rule.stored, shape, counts)

    def arrange(self, find: Find) -> Fit:
        """The group's two arrangements; MisfitError if what is stored does not make them."""
        specs = {key: find(name) for key, name in self.stored.items()}
        absent = [self.stored[key] for key, spec in specs.items() if spec is None]
        if absent:
            raise MisfitError(f"{some(absent)} are not to be had")
        known = {key: spec for key, spec in specs.items() if spec is not None}
        dtypes = {spec.dtype: spec.name for spec in known.values()}
        if len(dtypes) > 1:
            raise MisfitError(" but ".join(f"{name} is {dtype}" for dtype, name in dtypes.items()))
        (dtype,) = dtypes
        if not self.rule.is_rename and all(not spec.shape for spec in known.values()):
            scalar = Placement(box=Box.whole(()), dims=())
            stored = tuple((name, scalar) for name in self.stored.values())
            return Fit(dtype=dtype, stored=stored, wanted={}, common=True)
        if self.rule.is_rename:
            ((key, spec),) = known.items()
            whole = Placement(box=Box.whole(spec.shape), dims=tuple(range(len(spec.shape))))
            (pattern,) = patterns(self.rule.wanted)
            wanted = {compile_name(pattern).fill(self.fields): whole}
            return Fit(dtype=dtype, stored=((self.stored[key], whole),), wanted=wanted)
        shape = self.array_shape(find)
        placed = dict(place(self.rule.stored, shape, self.fields))
        missing = [key for key in placed if key not in known]
        if missing:
            raise MisfitError(f"{some(missing)} of {len(placed)} tensors are not saved beside {some(known)}")
        wrong = [
            f"{known[key].name} is {list(known[key].shape)}, not {list(placement.shape)}"
            for key, placement in placed.items()
            if known[key].shape != placement.shape
        ]
        if wrong:
            raise MisfitError(some(wrong))
        return Fit(
            dtype=dtype,
            stored=tuple((self.stored[key], placement) for key, placement in placed.items()),
            wanted=dict(place(self.rule.wanted, shape, self.fields)),
        )


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
