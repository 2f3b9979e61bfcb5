"""Random states and random changes to them, for tests that compare two ways of flattening.

Everything is drawn from hypothesis one decision at a time, so that a failure shrinks to a small state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import ckptstore
from ckptstore.held import ExpertParallel, FlatShard, Frozen, HeldBy, PerRank, Sharded

SCALARS: tuple[Any, ...] = (
    *(0, 1, True, False, 1.0, 0.0, -0.0, -1, None, "", "a", "\ud800", float("nan"), float("inf"), 2**80),
    *(b"x", 1 + 2j, np.float32(1.5), np.int64(1)),
)
KEYS: tuple[Any, ...] = ("a", "b", "c.d", 0, 1, "1", "w", "experts")
SHAPES = ((), (1,), (4,), (2, 3), (3, 2), (0,), (0, 3), (2, 1, 2))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)


class Box:
    """An object with a state that hooks may change."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked = inner, 0

    def state_dict(self) -> Any:
        self.asked += 1
        return self.inner

    def load_state_dict(self, state: Any) -> None:
        self.inner = state


class Made:
    """A state that is drawn and changed; `pool` are the tensors that further ones may be tied to."""

    def __init__(
        self, draw: Callable[[st.SearchStrategy[Any]], Any], distributed: Callable[[Any], Any]
    ) -> None:
        self.draw, self.distributed = draw, distributed
        self.pool: list[torch.Tensor] = []
        self.state: dict[Any, Any] = {}
        for _ in range(self.pick(range(1, 5))):
            self.state[self.pick(KEYS)] = self.value(0)

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def tensor(self) -> torch.Tensor:
        shape, dtype = self.pick(SHAPES), self.pick(DTYPES)
        made = torch.ones(shape, dtype=dtype)
        how = self.pick(("plain", "parameter", "turned", "part", "expanded", "conj", "neg", "tied", "view"))
        if how == "parameter" and made.is_floating_point():
            made = torch.nn.Parameter(made)
        elif how == "turned" and made.dim() == 2:
            made = made.t()
        elif how == "part":
            made = torch.ones((*shape, 3), dtype=dtype)[..., 1]
        elif how == "expanded":
            made = torch.ones((), dtype=dtype).expand(shape)
        elif how == "conj" and made.is_complex():
            made = made.conj()
        elif how == "neg" and made.dtype != torch.bool:
            made = torch._neg_view(made)
        elif how == "tied" and self.pool:
            return self.pick(self.pool)
        elif how == "view" and self.pool:
            made = (
                self.pick(self.pool).detach().view(-1)[:2] if self.pick(self.pool).is_contiguous() else made
            )
        self.pool.append(made)
        return made

    def leaf(self) -> Any:
        how = self.pick(
            ("tensor", "tensor", "tensor", "sharded", "list", "flat", "array", "dtensor", "scalar")
        )
        if how == "scalar":
            return self.pick(SCALARS)
        if how == "array":
            made = np.ones(self.pick(SHAPES), self.pick((np.float32, np.int64)))
            return made.T if self.pick((True, False)) else made
        tensor = self.tensor()
        if how == "tensor":
            return tensor
        if how == "dtensor":
            return self.distributed(tensor.detach())
        if how == "flat":
            plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            return FlatShard(plain, global_shape=(3, 4), start=self.pick((0, 1, 5)), replicas=self.replicas())
        one = self.shard(tensor, 0)
        return one if how == "sharded" else [one, self.shard(tensor, 1)]

    def replicas(self) -> Any:
        return self.pick((None, [0, 1], (0, 1), (0,)))

    def shard(self, tensor: torch.Tensor, at: int) -> Sharded:
        inner = self.distributed(tensor.detach()) if self.pick((True, False, False)) else tensor
        whole = tuple(n + 1 for n in tensor.shape)
        return Sharded(inner, global_shape=whole, offset=(at,) * tensor.dim(), replicas=self.replicas())

    def value(self, depth: int) -> Any:
        kinds = ("leaf", "leaf", "dict", "ordered", "list", "tuple", "object", "wrapper")
        how = "leaf" if depth > 3 else self.pick(kinds)
        if how == "leaf":
            return self.leaf()
        if how == "object":
            return Box(self.value(depth + 1))
        if how == "wrapper":
            return self.wrapper(depth)
        items = [self.value(depth + 1) for _ in range(self.pick(range(4)))]
        if how in ("list", "tuple"):
            return items if how == "list" else tuple(items)
        kind: Any = dict if how == "dict" else OrderedDict
        return kind((self.pick(KEYS), item) for item in items)

    def wrapper(self, depth: int) -> Any:
        inner = self.value(depth + 1)
        how = self.pick(("rank", "frozen", "held", "experts", "stacked", "ledger"))
        if how == "rank":
            return PerRank(inner)
        if how == "frozen":
            return Frozen(inner)
        if how == "held":
            return HeldBy(inner, ranks=self.pick(([0], (0, 1), [1])))
        if how == "ledger":
            return ckptstore.Ledger(seed=self.pick((1, 2)))
        pattern = "experts.{expert}" if how == "experts" else "w"
        return ExpertParallel(inner, pattern, num_experts=8, rank=self.pick((0, 1)), size=2)

    # -- changes

    def change(self) -> None:
        """One change somewhere, of anything that a structure, a skeleton or a tie may follow from."""
        holder: Any = self.state
        for _ in range(12):
            inner = [each for each in _children(holder) if not isinstance(each[1], (int, str, float))]
            if not inner or not self.pick((True, True, False)):
                break
            holder = self.pick(inner)[1]
        if isinstance(holder, torch.Tensor):
            self.change_tensor(holder)
        elif isinstance(holder, np.ndarray):
            self.change_array(holder)
        elif isinstance(holder, dict):
            self.change_dict(holder)
        elif isinstance(holder, list):
            self.change_list(holder)
        elif isinstance(holder, (Sharded, FlatShard, HeldBy, ExpertParallel)):
            self.change_wrapper(holder)
        elif isinstance(holder, Box):
            holder.inner = self.value(2)
        elif isinstance(holder, PerRank):
            holder.value = self.value(2)
        elif isinstance(holder, Frozen):
            holder.tree = self.value(2)

    def change_dict(self, holder: dict[Any, Any]) -> None:
        how = self.pick(("add", "replace", "replace", "drop", "turn", "retype", "tie", "clone", "again"))
        if how == "add" or not holder:
            holder[self.pick(KEYS)] = self.value(2)
            return
        key = self.pick(list(holder))
        if how == "replace":
            holder[key] = self.value(2)
        elif how == "drop":
            del holder[key]
        elif how == "turn":
            holder[key] = holder.pop(key)
        elif how == "retype":
            holder[{"1": 1, 1: True, 0: False, "a": np.str_("a")}.get(key, key)] = holder.pop(key)
        elif how == "tie" and self.pool:
            holder[key] = self.pick(self.pool)
        elif how == "clone" and isinstance(holder[key], torch.Tensor):
            holder[key] = holder[key].detach().clone()
        elif (
            how == "again"
            and isinstance(holder[key], torch.Tensor)
            and "DTensor" not in str(type(holder[key]))
        ):
            old = holder.pop(key).detach()  # its memory is free, and the next of its size takes it
            shape, dtype, numel = tuple(old.shape), old.dtype, old.numel()
            self.pool = [each for each in self.pool if each.data_ptr() != old.data_ptr()]
            del old
            holder[key] = torch.ones(self.pick((shape, shape[::-1], (numel,))), dtype=dtype)

    def change_list(self, holder: list[Any]) -> None:
        how = self.pick(("add", "replace", "drop", "turn"))
        if how == "add" or not holder:
            holder.append(self.value(2))
        elif how == "replace":
            holder[self.pick(range(len(holder)))] = self.value(2)
        elif how == "drop":
            holder.pop()
        else:
            holder.reverse()

    def change_tensor(self, tensor: torch.Tensor) -> None:
        how = self.pick(("values", "resize", "set", "data", "turn", "grad"))
        with torch.no_grad():
            try:
                if how == "values" and tensor.dtype != torch.bool:
                    tensor.add_(1)
                elif how == "resize":
                    tensor.resize_(self.pick(SHAPES))
                elif how == "set":
                    tensor.set_(self.tensor().detach())
                elif how == "data":
                    tensor.data = self.tensor().detach()
                elif how == "turn" and tensor.dim() == 2:
                    tensor.data = tensor.data.t()
                elif how == "grad":
                    tensor.requires_grad_(not tensor.requires_grad)
            except (RuntimeError, NotImplementedError):
                pass  # not every tensor takes every change

    def change_array(self, array: Any) -> None:
        how = self.pick(("values", "shape"))
        if how == "values" and array.flags.writeable:
            array += 1
        elif how == "shape" and array.flags.c_contiguous:
            array.shape = array.shape[::-1]

    def change_wrapper(self, holder: Any) -> None:
        if isinstance(holder, HeldBy):
            holder.ranks = self.pick(([0], (0, 1), [1], [0, 2]))
        elif isinstance(holder, ExpertParallel):
            holder.rank = self.pick((0, 1))
            holder.num_experts = self.pick((8, 6))
        elif self.pick((True, False)):
            holder.replicas = self.pick((None, [0, 1], (0, 1), np.array([0, 1])))
        else:
            holder.global_shape = self.pick(
                (holder.global_shape, tuple(map(float, holder.global_shape)), (5,) * len(holder.global_shape))
            )


def _children(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, (list, tuple)):
        return list(enumerate(holder))
    names = [name for name in ("tensor", "tree", "value", "state", "inner") if name in _fields(holder)]
    return [(name, getattr(holder, name)) for name in names]


def _fields(holder: Any) -> tuple[str, ...]:
    if isinstance(holder, Box):
        return ("inner",)
    wrappers = (Sharded, FlatShard, HeldBy, ExpertParallel, PerRank, Frozen)
    return tuple(type(holder).__slots__) if isinstance(holder, wrappers) else ()  # type: ignore[attr-defined]  # every wrapper has slots
