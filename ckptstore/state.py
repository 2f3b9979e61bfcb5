"""Nested state as tensor leaves and a skeleton, and the wrappers that say how a leaf is held.

A state is nested dicts, lists and tuples of tensors, numbers, strings, bytes, numpy arrays and
objects with `state_dict`. Flattening gives each tensor a dotted name and keeps all else as tagged
JSON, so that loading never runs code. Anything else is refused by its path, before anything is saved.
The tags: docs/reference/format-v1.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.errors import InvalidInputError
from ckptstore.ledger import Ledger
from ckptstore.tensor import DTYPES, Box, Shape, TensorSpec
from ckptstore.values import decode_value, encode_value, is_utf8, numpy_dtype

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 100  # far below the depth at which Python's own readers of JSON give up


@dataclass(slots=True)
class Sharded:
    """A tensor of which this rank holds one box: `offset` and `global_shape` count elements.

    `replicas` names the ranks of the role that hold the very same box, this one included; they share
    the work of writing it. Without it the holder writes it whole. A list of them under one name means
    several boxes of one tensor.
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
class PerRank:
    """State that differs by rank; given back to equal rank counts only, and reported otherwise."""

    value: Any


@dataclass(slots=True)
class Frozen:
    """A tree that is promised not to change: written once, referenced by every later checkpoint."""

    tree: Any


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """The tensor leaves of a state, in order, and everything else as JSON."""

    leaves: tuple[TensorLeaf, ...]
    skeleton: Any


def escape(name: str) -> str:
    """`@`, `#` and `%` have meanings of their own in stored names."""
    return name.replace("%", "%25").replace("@", "%40").replace("#", "%23")


def torch_module() -> Any:
    """torch when this process has imported it; without it no leaf can be a torch tensor."""
    return sys.modules.get("torch")


def is_torch_tensor(value: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def is_tensor_leaf(value: Any) -> bool:
    """A leaf that is stored as chunks: a torch tensor, a Sharded or a list of them, a numpy array."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, Sharded) for v in value)
    return isinstance(value, (Sharded, np.ndarray)) or is_torch_tensor(value)


def has_state_dict(value: Any) -> bool:
    if isinstance(value, type):
        return False  # a class is no object that holds state
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def join(path: str, key: Any) -> str:
    return f"{path}.{escape(str(key))}" if path else escape(str(key))


def flatten(state: Any, *, role: str, rank: int) -> FlatState:
    """Flatten one rank's state. Values are captured now; tensors are referenced, not copied.

    InvalidInputError names the path of what cannot be saved.
    """
    if not isinstance(state, dict):
        raise InvalidInputError(
            f"a state is a dict of names, not {type(state).__name__}: save {{'model': ...}} instead"
        )
    walk = _Flatten(role, rank)
    skeleton = walk.node(state, "", frozen=False, per_rank=False, depth=0)
    return FlatState(leaves=tuple(walk.leaves), skeleton=skeleton)


class _Flatten:
    def __init__(self, role: str, rank: int) -> None:
        self.role, self.rank = role, rank
        self.leaves: list[TensorLeaf] = []
        self.names: set[str] = set()

    def node(self, value: Any, path: str, *, frozen: bool, per_rank: bool, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise InvalidInputError(
                f"{path[:200]} is nested deeper than {MAX_DEPTH}: it may contain itself; flatten it",
                path=path,
            )
        if is_tensor_leaf(value):
            return self.tensor(value, path, frozen=frozen, per_rank=per_rank)
        if isinstance(value, Ledger):
            return {"ledger": value.to_json()}
        if isinstance(value, PerRank):
            if per_rank:
                raise InvalidInputError(f"{path} is a PerRank within a PerRank: wrap it once", path=path)
            return {"p": self.node(value.value, path, frozen=frozen, per_rank=True, depth=depth + 1)}
        if isinstance(value, Frozen):
            return {"z": self.node(value.tree, path, frozen=True, per_rank=per_rank, depth=depth + 1)}
        if isinstance(value, dict):
            pairs = [
                [
                    self.key(key, path),
                    self.node(v, join(path, key), frozen=frozen, per_rank=per_rank, depth=depth + 1),
                ]
                for key, v in value.items()
            ]
            return {"d": pairs}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            tag = "l" if isinstance(value, list) else "t"
            return {
                tag: [
                    self.node(v, join(path, n), frozen=frozen, per_rank=per_rank, depth=depth + 1)
                    for n, v in enumerate(value)
                ]
            }
        torch = torch_module()
        if torch is not None and isinstance(value, torch.optim.Optimizer):
            raise InvalidInputError(
                f"{path} is a bare optimizer, whose keys are indices and whose load casts FP32 moments: save "
                f"ckptstore.torch_state(model, optimizer) instead",
                path=path,
            )
        if has_state_dict(value):
            return {
                "o": self.node(value.state_dict(), path, frozen=frozen, per_rank=per_rank, depth=depth + 1)
            }
        return encode_value(value, path)

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

    def tensor(self, value: Any, path: str, *, frozen: bool, per_rank: bool) -> Any:
        name = f"{self.role}/{path}" + (f"#{self.rank}" if per_rank else "")
        if name in self.names:
            raise InvalidInputError(
                f"two tensors of the state are both named {path}: keys such as 1 and '1', or 'a.b' beside an 'a' that "
                f"holds 'b', give one dotted name; rename one of them",
                path=path,
            )
        self.names.add(name)
        shards = value if isinstance(value, list) else [value]
        for shard in shards:
            spec, box, data, replicas = describe(shard, name, path, self.rank)
            if shard is not shards[0] and spec != self.leaves[-1].spec:
                raise InvalidInputError(
                    f"{path} lists shards of {self.leaves[-1].spec.dtype}{list(self.leaves[-1].spec.shape)} and of "
                    f"{spec.dtype}{list(spec.shape)}: shards of one list are boxes of one tensor",
                    path=path,
                )
            if per_rank:
                if isinstance(shard, Sharded):
                    raise InvalidInputError(
                        f"{path} is Sharded within a PerRank: a shard already differs by rank, unwrap it",
                        path=path,
                    )
                replicas = ()
            self.leaves.append(TensorLeaf(spec=spec, box=box, data=data, replicas=replicas, frozen=frozen))
        return {"N" if isinstance(value, np.ndarray) else "T": name.split("/", 1)[1]}


def describe(
    value: Any, name: str, path: str, rank: int
) -> tuple[TensorSpec, Box, Any, tuple[int, ...] | None]:
    """(global spec, box, local data, replicas) of one tensor leaf."""
    if isinstance(value, np.ndarray):
        shape = tuple(value.shape)
        return (
            TensorSpec(name=name, dtype=numpy_dtype(value, path), shape=shape),
            Box.whole(shape),
            value,
            None,
        )
    from ckptstore.interop.torch_tensor import check_dense, dtype_name, is_dtensor, local_shard

    if isinstance(value, Sharded):
        return _describe_sharded(value, name, path)
    if is_dtensor(value):
        local = local_shard(value, rank, path)
        spec = TensorSpec(name=name, dtype=dtype_name(value.dtype, path), shape=local.shape)
        return spec, local.box, local.tensor, local.replicas
    check_dense(value, path)
    shape = tuple(value.shape)
    return (
        TensorSpec(name=name, dtype=dtype_name(value.dtype, path), shape=shape),
        Box.whole(shape),
        value,
        None,
    )


def _describe_sharded(value: Sharded, name: str, path: str) -> tuple[TensorSpec, Box, Any, tuple[int, ...]]:
    from ckptstore.interop.torch_tensor import check_dense, dtype_name, is_dtensor

    if not is_torch_tensor(value.tensor) or is_dtensor(value.tensor):
        raise InvalidInputError(
            f"{path} is Sharded over a {type(value.tensor).__name__}: give it the plain local torch tensor",
            path=path,
        )
    check_dense(value.tensor, path)
    shape = tuple(value.tensor.shape)
    try:  # numpy's integers are no JSON
        whole, offset = tuple(map(index, value.global_shape)), tuple(map(index, value.offset))
        replicas = tuple(sorted(set(map(index, value.replicas)))) if value.replicas is not None else ()
    except TypeError as error:
        raise InvalidInputError(
            f"{path} is Sharded with a global_shape, offset or replicas that are not sequences of integers ({error})",
            path=path,
        ) from error
    fits = len(shape) == len(whole) == len(offset) and all(
        o >= 0 and o + n <= total for o, n, total in zip(offset, shape, whole, strict=True)
    )
    if not fits:
        raise InvalidInputError(
            f"{path}: a shard of shape {shape} at offset {offset} does not lie within global shape {whole}: "
            f"correct offset= or global_shape=",
            path=path,
        )
    spec = TensorSpec(name=name, dtype=dtype_name(value.tensor.dtype, path), shape=whole)
    return spec, Box(offset=offset, shape=shape), value.tensor, replicas


def tensor_names(node: Any) -> Iterator[str]:
    """Names (without the role) of all tensors below a skeleton node."""
    if not isinstance(node, dict):
        return
    ((tag, inner),) = node.items()
    if tag in ("T", "N"):
        yield inner
    elif tag == "d":
        for _, child in inner:
            yield from tensor_names(child)
    elif tag in ("l", "t"):
        for child in inner:
            yield from tensor_names(child)
    elif tag in ("p", "z", "o"):
        yield from tensor_names(inner)


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
    if tag == "p":
        return PerRank(decode(inner, tensors))
    if tag == "ledger":
        return Ledger.from_json(inner)
    return decode_value(tag, inner)
