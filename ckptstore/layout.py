"""Meshes and layouts: which rank of a role holds which boxes.

A whole layout is known to tools and tests alone. Ranks exchange outlines of theirs (outline.py), and read the
shards of another, as the JSON of this module, only to name what contradicts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.tensor import Box, Shard, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes with their sizes; ranks run row-major, the last axis fastest, as in torch's DeviceMesh."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise InvalidInputError(
                f"mesh axes {self.axes} repeat a name or have a size below 1; name each axis once",
                axes=self.axes,
            )

    @property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The index of `rank` on each axis, in the order of the axes."""
        if not 0 <= rank < self.size:
            raise InvalidInputError(
                f"rank {rank} is not in a mesh of {self.size} ranks {self.axes}; pass 0 to {self.size - 1}",
                rank=rank,
                axes=self.axes,
            )
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name, _ in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at an index for each axis; the inverse of `coordinate`."""
        if set(coordinate) != {name for name, _ in self.axes} or any(
            not 0 <= coordinate[name] < size for name, size in self.axes
        ):
            raise InvalidInputError(
                f"coordinate {dict(coordinate)} does not fit mesh axes {self.axes}; give each axis one index",
                coordinate=dict(coordinate),
                axes=self.axes,
            )
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate[name]
        return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The shards of all ranks of one role: `ranks[r]` is what rank r holds, in its own order."""

    role: str
    ranks: tuple[tuple[Shard, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """A value for `json.dumps`; `from_json` gives an equal layout back."""
        return {"role": self.role, "ranks": [shards_to_json(shards) for shards in self.ranks]}

    @classmethod
    def from_json(cls, value: Any) -> Layout:
        """The layout of `to_json`'s value, which may come from a file: malformed input is CorruptError."""
        if not isinstance(value, dict) or set(value) != {"role", "ranks"}:
            raise CorruptError("a layout is not an object of role and ranks; exchange the layouts again")
        role, ranks = value["role"], value["ranks"]
        if not isinstance(role, str) or not isinstance(ranks, list):
            raise CorruptError("a layout's role or ranks have the wrong type; exchange the layouts again")
        return cls(role=role, ranks=tuple(shards_from_json(shards) for shards in ranks))


def shards_to_json(shards: Sequence[Shard]) -> list[Any]:
    """Compact lists: the distinct replica sets, then a shard each.

    A shard is `[name, dtype, global shape, offset, shape, number of its replica set]`; written out
    at every shard, the sets of a thousand ranks would be most of the text.
    """
    sets: dict[tuple[int, ...], int] = {}
    rows = [
        [
            shard.spec.name,
            shard.spec.dtype,
            list(shard.spec.shape),
            list(shard.box.offset),
            list(shard.box.shape),
            sets.setdefault(shard.replicas, len(sets)),
        ]
        for shard in shards
    ]
    return [[list(ranks) for ranks in sets], rows]


def shards_from_json(value: Any) -> tuple[Shard, ...]:
    """The shards of `shards_to_json`'s value, which may come from a file: malformed input is CorruptError."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(item, list) for item in value):
        raise CorruptError("a rank's shards are not two lists; exchange the layouts again")
    try:
        sets = [_ints(ranks) for ranks in value[0]]
    except InvalidInputError as error:
        raise CorruptError(f"a rank's replica sets are malformed: {error}") from error
    return tuple(_shard_from_json(item, sets) for item in value[1])


def _shard_from_json(item: Any, sets: Sequence[tuple[int, ...]]) -> Shard:
    if not isinstance(item, list) or len(item) != 6 or type(item[5]) is not int:
        raise CorruptError(f"shard {item!r} does not have its six fields; exchange the layouts again")
    name, dtype, shape, offset, extent, number = item
    if not isinstance(name, str) or not isinstance(dtype, str) or not 0 <= number < len(sets):
        raise CorruptError(f"shard {item!r} lacks a name, dtype or replica set; exchange the layouts again")
    try:
        return Shard(
            spec=TensorSpec(name=name, dtype=dtype, shape=_ints(shape)),
            box=Box(offset=_ints(offset), shape=_ints(extent)),
            replicas=sets[number],
        )
    except InvalidInputError as error:
        raise CorruptError(f"shard {item!r} is malformed: {error}", tensor=name) from error


def _ints(value: Any) -> tuple[int, ...]:
    # bool is an int in Python and `true` would come back as `1`: another digest for an equal layout.
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        raise InvalidInputError(f"{value!r} is not a list of whole numbers; exchange the layouts again")
    return tuple(value)
