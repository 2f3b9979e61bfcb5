"""What a walk over a state saw of the tensors that are not plain: arrays, DTensors, shards.

As in `seen.py`: what they say is compared exactly and here, what lies under them is collected and compared with
all other tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore.held import FlatShard, Sharded, integers, ranks_of
from ckptstore.seen import NO_PLACE, Differs, Look, Place, Seen, SeenTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenArray(Seen):
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def again(self, value: Any, look: Look) -> Seen:
        if type(value) is not np.ndarray or (value.dtype, value.shape, value.strides) != (
            self.dtype,
            self.shape,
            self.strides,
        ):
            raise Differs
        look.held.append(value)
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenDTensor(Seen):
    """Its mesh and placements; its own shape and dtype are compared with those of the others."""

    kind: type[Any]
    mesh: Any
    placements: tuple[Any, ...]
    order: Any

    def again(self, value: Any, look: Look) -> Seen:
        if type(value) is not self.kind:
            raise Differs
        spec = value._spec
        if spec.mesh is not self.mesh or getattr(spec, "shard_order", None) != self.order:
            raise Differs
        placements = spec.placements
        if placements is not self.placements and (
            placements != self.placements or tuple(map(type, placements)) != tuple(map(type, self.placements))
        ):
            raise Differs
        look.distributed.append(value)
        look.held.append(value._local_tensor)
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenShard(Seen):
    """A Sharded or FlatShard, or a list of them (`said` is None). `fields` are those that said it, if unchangeable."""

    kind: type[Any]
    said: Any
    fields: tuple[Any, ...]
    inner: tuple[Seen, ...]
    plain: bool  # one, of a plain tensor

    def again(self, value: Any, look: Look) -> Seen:
        if type(value) is not self.kind:
            raise Differs
        if not self._is_kept(value) and shard_says(value) != self.said:
            raise Differs
        if self.plain:
            look.held.append(value.tensor)
            return self
        parts = value if self.said is None else (value.tensor,)
        if len(parts) != len(self.inner):
            raise Differs
        for part, child in zip(parts, self.inner, strict=True):
            child.again(part, look)
        return self

    def _is_kept(self, value: Any) -> bool:
        if not self.fields:
            return False
        whole, at, replicas = self.fields
        now = value.offset if self.kind is Sharded else value.start
        return value.global_shape is whole and now is at and value.replicas is replicas


def _fields(value: Any) -> tuple[Any, ...]:
    return value.global_shape, value.offset if type(value) is Sharded else value.start, value.replicas


def _kept_fields(value: Any) -> tuple[Any, ...]:
    """Its fields, where the same objects will say the same again: of ints alone, and no lists."""
    if type(value) is list:
        return ()
    fields = _fields(value)
    parts = [part if isinstance(part, tuple) else (part,) for part in fields]
    return fields if all(type(n) in (int, type(None)) for part in parts for n in part) else ()


def shard_says(value: Any) -> Any:
    if type(value) is list:
        return None
    whole, replicas = tuple(integers(value.global_shape, "")), ranks_of(value.replicas or (), "")
    if type(value) is Sharded:
        return whole, integers(value.offset, ""), replicas, value.replicas is None
    return whole, integers((value.start,), ""), replicas


def see_tensor(value: Any, skeleton: Any, place: Place) -> Seen | None:
    """The node of a tensor leaf; None for what cannot be compared exactly."""
    if type(value) is np.ndarray:
        return SeenArray(
            skeleton=skeleton,
            place=place,
            tensors=1,
            dtype=value.dtype,
            shape=value.shape,
            strides=value.strides,
        )
    if isinstance(value, np.ndarray):
        return None
    if type(value) in (Sharded, FlatShard, list):
        inner = tuple(
            see_tensor(part, None, place) for part in (value if type(value) is list else [value.tensor])
        )
        if any(part is None or type(part) is SeenArray for part in inner):
            return None
        return SeenShard(
            skeleton=skeleton,
            place=place,
            tensors=1,
            kind=type(value),
            said=shard_says(value),
            fields=_kept_fields(value),
            inner=tuple(part for part in inner if part is not None),
            plain=type(value) is not list and type(inner[0]) is SeenTensor,
        )
    if isinstance(value, (Sharded, FlatShard, list)):
        return None
    from ckptstore.interop.torch_signature import PLAIN
    from ckptstore.interop.torch_tensor import is_dtensor

    if type(value) in PLAIN:
        return SeenTensor(skeleton=skeleton, place=NO_PLACE, tensors=1)
    spec = getattr(value, "_spec", None)
    if not is_dtensor(value) or spec is None or type(getattr(value, "_local_tensor", None)) not in PLAIN:
        return None
    return SeenDTensor(
        skeleton=skeleton,
        place=place,
        tensors=1,
        kind=type(value),
        mesh=spec.mesh,
        placements=spec.placements,
        order=getattr(spec, "shard_order", None),
    )
