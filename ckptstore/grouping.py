"""Group tensors by a number in their dotted names: by layer, by expert, or by a pattern of one's own.

A pattern is dotted words with one `{}` for a number: `layers.{}` finds `model.layers.3` in
`model.layers.3.mlp.w`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ckptstore.errors import InvalidInputError

PATTERNS: Final = {"layer": "layers.{}", "expert": "experts.{}"}
_NUMBER: Final = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)|(?<=#)\d+")
REST: Final = "(no such number)"


def pattern_of(name: str) -> str:
    """The name with `*` in place of each number between dots, and of the rank of per-rank tensors."""
    return _NUMBER.sub("*", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How names become groups. `by` is prefix (numbers become `*`), tensor, layer, expert, or a pattern with `{}`."""

    by: str

    def __post_init__(self) -> None:
        words = PATTERNS.get(self.by, self.by)
        if self.by not in ("prefix", "tensor") and (
            words.count("{}") != 1 or not re.fullmatch(r"[^{}]+\.\{\}", words)
        ):
            raise InvalidInputError(
                f"cannot group by {self.by!r}: use prefix, tensor, layer, expert, or words of names that end in a "
                f"number's place, such as 'blocks.{{}}'",
                by=self.by,
            )

    def key(self, name: str) -> str:
        """The group of a tensor, by its dotted name; REST when the pattern is not in it."""
        if self.by == "tensor":
            return name
        if self.by == "prefix":
            return pattern_of(name)
        found = re.search(rf"(?:^|(?<=\.)){re.escape(self._words)}\.\d+(?=\.|$)", name)
        return name[: found.end()] if found else REST

    def row_key(self, name: str, row: int) -> str:
        """The group of row `row` of a stacked tensor: that of one named with the number, where the words are in it."""
        found = re.search(rf"(?:^|(?<=\.)){re.escape(self._words)}(?=\.|$)", name)
        return f"{name[: found.end()]}.{row}" if found else f"{name}[{row}]"

    @property
    def _words(self) -> str:
        return PATTERNS.get(self.by, self.by).removesuffix(".{}")


def natural_order(keys: Iterable[str]) -> list[str]:
    """Sorted with numbers as numbers, so that layer 10 follows layer 9; REST comes last."""
    return sorted(
        keys,
        key=lambda key: (
            key == REST,
            [(int(w), "") if w.isdigit() else (-1, w) for w in re.split(r"(\d+)", key)],
        ),
    )
