"""The wrappers that say how a rank holds what is in a state, and what they say of a place in it.

A plain tensor is held by every rank of the role and a DTensor says what it is; all else is told by a
wrapper. They are nouns only: what boxes follow is `pieces.py`. Argued in docs/explanation/layouts.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.errors import InvalidInputError
from ckptstore.experts import Experts, deal_experts
from ckptstore.skeleton import escape, unescape
from ckptstore.tensor import Shape

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Sharded:
    """A tensor of which this rank holds one box: `offset` and `global_shape` count elements.

    `replicas` names the ranks of the role that hold the very same box, this one included; they share
    the work of writing it. Without it the holder writes it whole. A list of them under one name means
    several boxes of one tensor. A DTensor within says itself who holds what of the box.
    """

    tensor: torch.Tensor
    global_shape: Shape
    offset: Shape
    replicas: Sequence[int] | None = None

    @classmethod
    def dim0(cls, tensor: torch.Tensor, *, start: int, size: int) -> Sharded:
        """Rows `start` to `start + tensor.shape[0]` of a tensor that has `size` rows over all ranks."""
        if tensor.dim() == 0:
            raise InvalidInputError("Sharded.dim0 needs a tensor with at least one dimension, not a scalar")
        return cls(
            tensor=tensor,
            global_shape=(size, *tensor.shape[1:]),
            offset=(start, *([0] * (tensor.dim() - 1))),
        )


@dataclass(slots=True)
class FlatShard:
    """A 1-D tensor with a range of a flattened global tensor: its elements `start` to `start + len(tensor)`.

    So hold distributed optimizers their buckets. The range may be empty. `replicas` and lists are as for
    `Sharded`.
    """

    tensor: torch.Tensor
    global_shape: Shape
    start: int
    replicas: Sequence[int] | None = None


@dataclass(slots=True)
class PerRank:
    """State that differs by rank; given back to equal rank counts only, and reported otherwise."""

    value: Any


@dataclass(slots=True)
class Frozen:
    """A tree that is promised not to change: written once, referenced by every later checkpoint."""

    tree: Any


@dataclass(slots=True)
class HeldBy:
    """A tree whose plain tensors are held by these ranks of the role alone, this one included.

    So a pipeline stage holds its layers. A DTensor on a slice of a mesh (`mesh["tp"]`) is held as well by those
    of the ranks that are at the same place of other slices; without this wrapper, by its own slice alone.
    Sharded and FlatShard are as they say.
    """

    tree: Any
    ranks: Sequence[int]


@dataclass(slots=True)
class ExpertParallel:
    """A state (or an object that has one) whose experts are numbered from 0 on each rank.

    `pattern` is the dotted name of the experts, `*` standing for any one part: `layers.*.mlp.experts.{expert}`
    where each expert is a module of its own, `layers.*.mlp.experts.w1` where they are stacked, `[experts, ...]`.
    It may begin anywhere in a name, so weights, master weights and moments come under one pattern; several
    families with the same number of experts are a list of patterns. Names get the experts' global numbers.

    Experts are dealt as torch.chunk does to `size` ranks of experts, of which this is number `rank`, or
    `experts` lists the global numbers of this rank's, in its order. `replicas` are the ranks of the role
    that hold the same experts, this one included; without it this rank holds them alone. A commit is
    refused unless all `num_experts` of each family are there.
    """

    state: Any
    pattern: str | Sequence[str]
    num_experts: int
    rank: int | None = None
    size: int | None = None
    experts: Sequence[int] | None = None
    replicas: Sequence[int] | None = None

    def families(self, path: str) -> tuple[Experts, ...]:
        """One for each pattern. InvalidInputError naming `path` if what was given contradicts itself."""
        if (self.experts is None) == (self.rank is None or self.size is None):
            raise InvalidInputError(
                f"{path or 'the state'} is an ExpertParallel that is given both or neither of experts= and rank= "
                f"with size=: give one of them",
                path=path,
            )
        if self.experts is not None:
            numbers = tuple(map(index, self.experts))
        else:
            numbers = deal_experts(self.num_experts, rank=index(self.rank or 0), size=index(self.size or 0))
        patterns = [self.pattern] if isinstance(self.pattern, str) else self.pattern
        return tuple(
            Experts(
                pattern=escape(each),
                total=self.num_experts,
                numbers=numbers,
                replicas=ranks_of(self.replicas or (), path),
            )
            for each in patterns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What the wrappers around a place of a state say of it."""

    frozen: bool = False
    per_rank: bool = False
    holders: tuple[int, ...] | None = None  # of plain tensors; None: every rank of the role
    experts: tuple[Experts, ...] = ()  # families whose names may yet begin or end below
    stacked: Experts | None = None  # the tensors here are stacks of these experts

    def enter(self, path: str, key: Any) -> tuple[Any, str, Where]:
        """(key in the checkpoint, path, what is said of it) of a dict's key."""
        if not self.experts:
            return key, join(path, key), self
        before = path.split(".") if path else []
        parts = [*before, *escape(str(key)).split(".")]
        where = self
        for family in self.experts:
            if family.stacked:
                if family.find(parts, len(before) + 1) is not None:
                    where = replace(where, stacked=family)
            elif (found := family.rename(parts, len(before))) is not None:
                at, number = found
                parts[at] = number
                others = tuple(each for each in where.experts if each is not family)
                where = replace(where, experts=others, holders=family.replicas)
                inner = ".".join(parts[len(before) :])
                key = int(inner) if isinstance(key, int) else unescape(inner)
        return key, ".".join(parts), where

    def is_expert(self, path: str, key: Any) -> bool:
        """Does a key of the checkpoint name an expert of a family, by its global number?"""
        before = path.split(".") if path else []
        parts = [*before, *escape(str(key)).split(".")]
        return any(
            not family.stacked
            and replace(family, numbers=tuple(range(family.total))).rename(parts, len(before))
            for family in self.experts
        )

    def check_place(self, path: str, number: int) -> None:
        """InvalidInputError if a list's place `number` would be an expert's number: places cannot be global."""
        parts = [*path.split("."), str(number)]
        if any(not family.stacked and family.rename(parts, len(parts) - 1) for family in self.experts):
            raise InvalidInputError(
                f"{path} is a list of experts, whose places cannot have global numbers: make it a dict by number",
                path=path,
            )


def join(path: str, key: Any) -> str:
    return f"{path}.{escape(str(key))}" if path else escape(str(key))


def torch_module() -> Any:
    """torch when this process has imported it; without it no leaf can be a torch tensor."""
    return sys.modules.get("torch")


def is_torch_tensor(value: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def is_tensor_leaf(value: Any) -> bool:
    """A leaf that is stored as chunks: a torch tensor, a numpy array, a shard or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, (Sharded, FlatShard)) for v in value)
    return isinstance(value, (Sharded, FlatShard, np.ndarray)) or is_torch_tensor(value)


def integers(value: Sequence[int], path: str) -> Shape:
    """Plain ints, since numpy's are no JSON."""
    try:
        return tuple(map(index, value))
    except TypeError as error:
        raise InvalidInputError(
            f"{path} is a shard with a global_shape, offset, start or replicas that are not integers ({error})",
            path=path,
        ) from error


def ranks_of(value: Sequence[int], path: str) -> tuple[int, ...]:
    return tuple(sorted(set(integers(value, path))))
