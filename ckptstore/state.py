"""Nested state as tensor leaves and a skeleton.

A state is nested dicts, lists and tuples of tensors, numbers, strings, bytes, numpy arrays and
objects with `state_dict`. Flattening gives each tensor a dotted name and keeps all else as tagged
JSON, so that loading never runs code. Anything else is refused by its path, before anything is saved.
The tags: docs/reference/format-v1.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.held import (
    ExpertParallel,
    Frozen,
    HeldBy,
    PerRank,
    Where,
    is_tensor_leaf,
    join,
    ranks_of,
    torch_module,
)
from ckptstore.ledger import Ledger
from ckptstore.pieces import describe, tie_of
from ckptstore.tensor import DTYPES, Box, Shard, TensorSpec
from ckptstore.values import decode_value, encode_value, is_utf8

WRAPPERS = (PerRank, Frozen, HeldBy, ExpertParallel)
MAX_DEPTH = 100  # far below the depth at which Python's own readers of JSON give up


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLeaf:
    """One box that this rank holds. `replicas` is None for a plain tensor: held by every rank of the role."""

    spec: TensorSpec
    box: Box
    data: Any  # torch.Tensor or numpy array: the elements of `box`
    replicas: tuple[int, ...] | None
    frozen: bool

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPES[self.spec.dtype]


@dataclass(frozen=True, slots=True)
class Structure:
    """What a state's tensor leaves are, without their values: all that plans and staging depend on, one entry a leaf.

    Leaves that were flattened with the same `Known` share their parts, so that equal structures compare by
    identity: 20,000 leaves in a millisecond.
    """

    specs: tuple[TensorSpec, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[tuple[int, ...] | None, ...]
    frozen: tuple[bool, ...]

    @classmethod
    def of(cls, leaves: Sequence[TensorLeaf]) -> Structure:
        return cls(
            tuple([leaf.spec for leaf in leaves]),
            tuple([leaf.box for leaf in leaves]),
            tuple([leaf.replicas for leaf in leaves]),
            tuple([leaf.frozen for leaf in leaves]),
        )

    def __len__(self) -> int:
        return len(self.specs)

    def shards(self, size: int) -> tuple[Shard, ...]:
        """One a leaf; a plain tensor is held by all `size` ranks."""
        everyone = tuple(range(size)) if size > 1 else ()
        return tuple(
            Shard(spec=spec, box=box, replicas=everyone if replicas is None else replicas)
            for spec, box, replicas in zip(self.specs, self.boxes, self.replicas, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """The tensor leaves of a state, in order, and everything else as JSON.

    `data[n]` is the torch.Tensor or numpy array that holds the elements of leaf `n` now. Keep it no longer than
    the save needs it: it keeps the caller's memory alive.
    """

    structure: Structure
    data: tuple[Any, ...]
    skeleton: Any

    @property
    def leaves(self) -> tuple[TensorLeaf, ...]:
        """The leaves as objects; made at every call."""
        known = self.structure
        return tuple(
            TensorLeaf(spec=spec, box=box, data=data, replicas=replicas, frozen=frozen)
            for spec, box, replicas, frozen, data in zip(
                known.specs, known.boxes, known.replicas, known.frozen, self.data, strict=True
            )
        )


def has_state_dict(value: Any) -> bool:
    if isinstance(value, type):
        return False  # a class is no object that holds state
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Known:
    """Specs, boxes and replicas of the states flattened before: equal ones are given back as the same objects.

    So whoever compares two structures does it by identity, at every save.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], tuple[TensorSpec, Box, tuple[int, ...] | None]] = {}

    def same(
        self, at: int, spec: TensorSpec, box: Box, replicas: tuple[int, ...] | None
    ) -> tuple[TensorSpec, Box, tuple[int, ...] | None]:
        """What leaf number `at` of its tensor was described by before, if that is equal."""
        now = (spec, box, replicas)
        known = self._of.get((spec.name, at))
        if known == now:
            return known
        self._of[spec.name, at] = now
        return now

    def forget_if_beyond(self, leaves: int) -> None:
        """Names that change at every save must not fill the memory: begin anew above so many leaves."""
        if len(self._of) > leaves:
            self._of.clear()


def flatten(state: Any, *, role: str, rank: int, known: Known | None = None) -> FlatState:
    """Flatten one rank's state. Values are captured now; tensors are referenced, not copied.

    What is as in earlier states flattened with the same `known` is described by the same objects.
    InvalidInputError names the path of what cannot be saved.
    """
    if not isinstance(state, dict):
        raise InvalidInputError(
            f"a state is a dict of names, not {type(state).__name__}: save {{'model': ...}} instead"
        )
    known = known or Known()
    walk = _Flatten(role, rank, known)
    skeleton = walk.node(state, "", Where(), 0)
    known.forget_if_beyond(4 * len(walk.leaves) + 1000)
    return FlatState(
        structure=Structure.of(walk.leaves),
        data=tuple([leaf.data for leaf in walk.leaves]),
        skeleton=skeleton,
    )


class _Flatten:
    def __init__(self, role: str, rank: int, known: Known) -> None:
        self.role, self.rank, self.known = role, rank, known
        self.leaves: list[TensorLeaf] = []
        self.names: set[str] = set()
        self.tied: dict[
            Any, str
        ] = {}  # by what they are and where they lie: the name under which they are stored

    def node(self, value: Any, path: str, where: Where, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise InvalidInputError(
                f"{path[:200]} is nested deeper than {MAX_DEPTH}: it may contain itself; flatten it",
                path=path,
            )
        if is_tensor_leaf(value):
            return self.tensor(value, path, where)
        if isinstance(value, Ledger):
            return {"ledger": value.to_json()}
        if isinstance(value, WRAPPERS):
            return self.wrapper(value, path, where, depth)
        if isinstance(value, dict):
            pairs = []
            for key, inner in value.items():
                told, at, within = where.enter(path, self.key(key, path))
                pairs.append([told, self.node(inner, at, within, depth + 1)])
            return {"d": pairs}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            tag, items = "l" if isinstance(value, list) else "t", []
            for number, inner in enumerate(value):
                where.check_place(path, number)
                items.append(self.node(inner, join(path, number), where, depth + 1))
            return {tag: items}
        torch = torch_module()
        if torch is not None and isinstance(value, torch.optim.Optimizer):
            raise InvalidInputError(
                f"{path} is a bare optimizer, whose keys are indices and whose load casts FP32 moments: save "
                f"ckptstore.torch_state(model, optimizer) instead",
                path=path,
            )
        if has_state_dict(value):
            return {"o": self.node(value.state_dict(), path, where, depth + 1)}
        return encode_value(value, path)

    def wrapper(self, value: Any, path: str, where: Where, depth: int) -> Any:
        if isinstance(value, PerRank):
            if where.per_rank:
                raise InvalidInputError(f"{path} is a PerRank within a PerRank: wrap it once", path=path)
            return {"p": self.node(value.value, path, replace(where, per_rank=True), depth + 1)}
        inner, within = unwrap(value, path, where, self.rank)
        node = self.node(inner, path, within, depth + 1)
        if isinstance(value, Frozen):
            return {"z": node}
        if isinstance(value, ExpertParallel):
            declared = [[each.pattern, each.total] for each in value.families(path) if not each.stacked]
            return {"x": [declared, node]} if declared else node
        return node

    def key(self, key: Any, path: str) -> Any:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise InvalidInputError(
                f"{path or 'the state'} has the key {key!r} of type {type(key).__name__}: keys are strings or ints",
                path=path,
            )
        if (isinstance(key, int) and key.bit_length() > 63) or (isinstance(key, str) and not is_utf8(key)):
            raise InvalidInputError(
                f"{path or 'the state'} has the key {ascii(key) if isinstance(key, str) else hex(key)}, which cannot "
                f"be a name: keys are text without lone surrogates, or integers of at most 63 bits",
                path=path,
            )
        return key

    def tensor(self, value: Any, path: str, where: Where) -> Any:
        name = f"{self.role}/{path}" + (f"#{self.rank}" if where.per_rank else "")
        if name in self.names:
            raise InvalidInputError(
                f"two tensors of the state are both named {path}: keys such as 1 and '1', or 'a.b' beside an 'a' that "
                f"holds 'b', give one dotted name; rename one of them",
                path=path,
            )
        self.names.add(name)
        spec, pieces = describe(value, name, path, self.rank, where)
        tie = tie_of(value, pieces)
        if tie is not None:
            name = self.tied.setdefault((spec.dtype, spec.shape, where.frozen, where.per_rank, tie), name)
        if name == spec.name:
            for at, piece in enumerate(pieces):
                spec, box, replicas = self.known.same(at, spec, piece.box, piece.replicas)
                self.leaves.append(
                    TensorLeaf(spec=spec, box=box, data=piece.data, replicas=replicas, frozen=where.frozen)
                )
        return {"N" if isinstance(value, np.ndarray) else "T": name.split("/", 1)[1]}


def unwrap(value: Any, path: str, where: Where, rank: int) -> tuple[Any, Where]:
    """(what is wrapped, what is said of it) of a Frozen, HeldBy or ExpertParallel."""
    if isinstance(value, Frozen):
        return value.tree, replace(where, frozen=True)
    if isinstance(value, HeldBy):
        ranks = ranks_of(value.ranks, path)
        if rank not in ranks:
            raise InvalidInputError(
                f"{path or 'the state'} is held by ranks {list(ranks)}, and this is rank {rank}: leave it out of this "
                f"rank's state, or correct ranks=",
                path=path,
            )
        return value.tree, replace(where, holders=ranks)
    return value.state, replace(where, experts=where.experts + value.families(path))


def decode(node: Any, tensors: Any) -> Any:
    """The nested value of a skeleton node; `tensors(name, numpy: bool)` gives each tensor."""
    if not isinstance(node, dict):
        return node
    ((tag, inner),) = node.items()
    if tag == "d":
        return {key: decode(child, tensors) for key, child in inner}
    if tag == "l":
        return [decode(child, tensors) for child in inner]
    if tag == "t":
        return tuple(decode(child, tensors) for child in inner)
    if tag in ("T", "N"):
        return tensors(inner, tag == "N")
    if tag in ("z", "o"):
        return decode(inner, tensors)
    if tag == "x":
        return decode(inner[1], tensors)
    if tag == "p":
        return PerRank(decode(inner, tensors))
    if tag == "ledger":
        return Ledger.from_json(inner)
    try:
        return decode_value(tag, inner)
    except (TypeError, ValueError, LookupError) as error:
        raise CorruptError(
            f"a stored value tagged {tag!r} cannot be read ({error}): it is damaged, run `ckptstore verify`"
        ) from error
