"""Small runs for the tests of save and restore: made, saved and restored in one process, and compared bit by bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

import ckptstore
from ckptstore import Checkpointer, CheckpointInfo, Ledger, PerRank, TensorMap
from ckptstore.store.memory import MemoryStore

WAIT_S = 60.0
_names = count()


def new_url() -> str:
    """A memory store that no other test uses."""
    return f"memory://save-{next(_names)}"


def store_of(url: str) -> MemoryStore:
    return MemoryStore.named(url.removeprefix("memory://"))


def save(
    url: Any, *states: dict[str, Any], step: int = 1, roster: dict[str, int] | None = None
) -> CheckpointInfo:
    """One save of a new incarnation, a state a rank; the ranks are driven in turn by this thread."""
    return save_steps(url, {step: states}, roster=roster)[-1]


def save_steps(
    url: Any, steps: dict[int, Sequence[dict[str, Any]]], *, roster: dict[str, int] | None = None
) -> list[CheckpointInfo]:
    size = len(next(iter(steps.values())))
    infos = []
    with ckptstore.begin(url, roster or {"trainer": size}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(size)]
        for step, states in steps.items():
            infos.append(save_all(members, step, states))
        for member in members:
            member.close(WAIT_S)
    return infos


def save_all(members: Sequence[Checkpointer], step: int, states: Sequence[dict[str, Any]]) -> CheckpointInfo:
    handles = [member.save(step, state) for member, state in zip(members, states, strict=True)]
    return [handle.result(WAIT_S) for handle in handles][-1]


def restore(
    url: Any, *targets: dict[str, Any], strict: bool = True, mapping: TensorMap | None = None
) -> list[Checkpointer]:
    """Restore each rank's target by a new incarnation; the Checkpointers, for their reports."""
    with ckptstore.begin(url, {"trainer": len(targets)}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(len(targets))]
        for member, target in zip(members, targets, strict=True):
            member.restore(target, strict=strict, mapping=mapping)
    return members


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return b""
    size = plain.element_size()
    if size < 16:  # copying by another type of the same size: some dtypes have no copy of their own
        plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    flat = torch.empty(plain.numel(), dtype=plain.dtype)
    return flat.copy_(plain.reshape(-1)).view(torch.uint8).numpy().tobytes()


def bits(value: Any) -> Any:
    """A value whose equality is that of every bit of `value`, types and order of keys included."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), tensor_bytes(value))
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", [(type(key), key, bits(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [bits(item) for item in value])
    if isinstance(value, PerRank):
        return ("per rank", bits(value.value))
    if isinstance(value, Ledger):
        return ("ledger", value.to_json())
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("<d", value))
    if isinstance(value, complex):
        return ("complex", bits(value.real), bits(value.imag))
    return (type(value).__name__, value)


def ids(shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Each element holds its own number."""
    return torch.arange(math.prod(shape)).reshape(tuple(shape)).to(dtype)
