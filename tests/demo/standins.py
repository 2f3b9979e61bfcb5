"""Small stand-ins for public names of ckptstore, so that the numerical half is tested alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Sharded:
    tensor: torch.Tensor
    start: int
    size: int

    @classmethod
    def dim0(cls, tensor: torch.Tensor, *, start: int, size: int) -> Sharded:
        return cls(tensor, start, size)


@dataclass
class Frozen:
    tree: Any


@dataclass
class PerRank:
    value: Any


class Ledger:
    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self.consumed: dict[int, int] = {}

    def consume(self, ordinals: Iterable[int], step: int) -> None:
        self.consumed.update(dict.fromkeys(ordinals, step))

    def consumed_at(self, ordinal: int) -> int | None:
        return self.consumed.get(ordinal)


def install_standins() -> None:
    """Put the stand-ins where `import ckptstore` finds them, in this process only."""
    import ckptstore

    for kind in (Sharded, Frozen, PerRank, Ledger):
        setattr(ckptstore, kind.__name__, kind)
