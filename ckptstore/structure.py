"""A flat state: what the tensor leaves of a state are, where they lie, and everything else as JSON.

The nouns that plans, staging and digests are made from. Apart from `state.py`, which makes them of nested values,
and from `known.py`, which gives the same ones back while a state stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.tensor import DTYPES, Box, Shard, TensorSpec


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


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What a state's tensor leaves are, without their values: all that plans and staging depend on, one entry a leaf.

    A state that is as it was when it was flattened before with the same `Known` has the very same structure, so
    what follows from one is looked up by identity. Where that is lost, the parts are still the same objects, and
    20,000 leaves are compared in a millisecond.
    """

    specs: tuple[TensorSpec, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[tuple[int, ...] | None, ...]
    frozen: tuple[bool, ...]
    _shards: dict[int, tuple[Shard, ...]] = field(default_factory=dict, init=False, repr=False)

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

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        return (self.frozen, self.replicas, self.specs, self.boxes) == (
            other.frozen,
            other.replicas,
            other.specs,
            other.boxes,
        )

    def __hash__(self) -> int:
        """Of the ends alone: to hash 20,000 specs takes longer than to compare them."""
        return hash((len(self.specs), self.specs[:1], self.specs[-1:]))

    def shards(self, size: int) -> tuple[Shard, ...]:
        """One a leaf; a plain tensor is held by all `size` ranks. The same tuple at every call."""
        if size not in self._shards:
            everyone = tuple(range(size)) if size > 1 else ()
            self._shards[size] = tuple(
                [
                    Shard(spec=spec, box=box, replicas=everyone if replicas is None else replicas)
                    for spec, box, replicas in zip(self.specs, self.boxes, self.replicas, strict=True)
                ]
            )
        return self._shards[size]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatState:
    """The tensor leaves of a state, in order, and everything else as JSON.

    `data[n]` is the torch.Tensor or numpy array that holds the elements of leaf `n` now. Keep neither it nor the flat
    state longer than the save needs them: they keep the caller's memory alive.

    Nothing of it may be changed, the skeleton neither: later states share its unchanged parts.

    `places` is None unless the state was flattened with a `Known`. Then `places[n]` is the address of leaf `n` if
    its elements are, row-major and without a gap, one run of host memory, from which its bytes may be read as long
    as the tensors of this state live and are not changed in size; -1 if they are not, or may not be. (Leaves
    without elements have no address worth reading.) The very same tuple as at an earlier flatten, with the very
    same `structure`, says that every leaf lies where it lay then, so that views of these addresses that were made
    then are right again, for this save; where the tuple is another one, so they are for each leaf whose entry is
    equal and not -1. Between two saves the memory may belong to anyone: never read an address of an earlier state.
    """

    structure: Structure
    skeleton: Any
    places: tuple[int, ...] | None
    data: Sequence[Any]

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


View = tuple[int, Any]  # number of a tensor, and (shape, strides, elements before it) unless it is all of it


class Views(Sequence[Any]):
    """The tensors of one save, by leaf; a view of a part of one is made each time that it is asked for.

    Where all lie where they lay, nobody asks: 20,000 views take longer than all else that is done for a save.
    """

    __slots__ = ("_held", "_views")

    def __init__(self, held: list[Any], views: tuple[View, ...]) -> None:
        self._held, self._views = held, views

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, at: Any) -> Any:
        number, view = self._views[at]
        return _view(self._held[number], view)


def _view(tensor: Any, view: Any) -> Any:
    if view is None:
        return tensor
    shape, strides, before = view
    plain = tensor.detach()
    return plain.as_strided(shape, strides, plain.storage_offset() + before)
