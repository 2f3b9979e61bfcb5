"""Whether many tensors are as they were, asked in a few calls.

Asking one tensor for one property from Python costs 0.1 to 0.4 µs, and what a save must know of a tensor is
eight of them. torch's own guard of compiled code compares all but the address in one call for many tensors;
it is private to torch, so it is tried before it is trusted, and plain Python does the same more slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)
"""Exact types whose properties are torch's own: a subclass may answer what it likes."""

BLOCK = 512  # tensors of one call: what a guard has read is still in the cache when addresses are asked for


@dataclass(slots=True)
class _Block:
    """`check` takes each tensor once: torch's guard refuses to see one twice. `repeats` are the others, each with
    the place of the same tensor before it."""

    check: Callable[..., bool]
    repeats: dict[int, int]
    places: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], placed: bool) -> _Block:
        first: dict[int, int] = {}
        repeats = {n: at for n, each in enumerate(tensors) if (at := first.setdefault(id(each), n)) != n}
        make = _guard if _guard_works() else _slow_check
        return cls(
            make([tensors[n] for n in first.values()]),
            repeats,
            tuple(map(Tensor.data_ptr, tensors)) if placed else (),
        )

    def is_alike(self, tensors: Sequence[Tensor]) -> bool:
        if not self.repeats:
            return self.check(*tensors)
        once = [each for n, each in enumerate(tensors) if n not in self.repeats]
        return all(tensors[n] is tensors[at] for n, at in self.repeats.items()) and self.check(*once)


class Signatures:
    """What some tensors were like: type, dtype, device, layout, shape, strides, conjugate and negative bits.

    Holds no tensor. `placed` says whether the tensors have addresses (a DTensor has none of its own).
    """

    def __init__(self, tensors: Sequence[Tensor], *, placed: bool = True) -> None:
        self._types = tuple(map(type, tensors))
        self._blocks = [_Block.of(tensors[at : at + BLOCK], placed) for at in range(0, len(tensors), BLOCK)]

    def places(self) -> list[int]:
        """The address of each tensor's first element; 0 for one without elements or memory."""
        return [place for block in self._blocks for place in block.places]

    def moved(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]] | None:
        """(number, new address) of the tensors that lie elsewhere than before, and now are known to lie there.

        None if any is unlike before in another way, or is no such tensor.
        """
        if tuple(map(type, tensors)) != self._types:
            return None
        found: list[tuple[int, int]] = []
        for at, block in zip(range(0, len(tensors), BLOCK), self._blocks, strict=True):
            some = tensors[at : at + BLOCK]
            if not block.is_alike(some):
                return None
            now = tuple(map(Tensor.data_ptr, some)) if block.places else ()
            if now != block.places:
                both = enumerate(zip(block.places, now, strict=True))
                found += [(at + n, new) for n, (old, new) in both if old != new]
                block.places = now
        return found


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    # The stub lacks the tensors themselves, and says lists of sizes where lists of such lists are taken.
    make: Any = TensorGuards
    made = make(
        *tensors,
        dynamic_dims_sizes=[list(each.shape) for each in tensors],
        dynamic_dims_strides=[list(each.stride()) for each in tensors],
    )
    check: Callable[..., bool] = made.check
    return check


def _slow_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    known = [_properties(each) for each in tensors]
    return lambda *now: (
        len(now) == len(known)
        and all(_properties(each) == before for each, before in zip(now, known, strict=True))
    )


def _properties(tensor: Tensor) -> tuple[object, ...]:
    return (
        type(tensor),
        tensor.layout,
        tensor.dtype,
        tensor.device,
        tensor.is_quantized,
        tensor.is_nested,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


@functools.cache
def _guard_works() -> bool:
    """Does torch's guard take what is alike, and refuse what differs in one property each?"""
    base, number = torch.zeros(2, 3), torch.zeros(2, dtype=torch.complex64)
    like: list[tuple[Tensor, Tensor]] = [(base, torch.ones(2, 3)), (number, torch.ones_like(number))]
    unlike: list[tuple[Tensor, Tensor]] = [
        (base, torch.zeros(2, 4)),
        (base, torch.zeros(6)),
        (base, torch.zeros(3, 2).t()),
        (base, torch.zeros(4, 3)[::2]),
        (base, torch.zeros(2, 3, dtype=torch.int32)),
        (base, torch.zeros(2, 3, device="meta")),
        (base, Parameter(base)),
        (base, torch._neg_view(base)),
        (base, torch.zeros(2, 3).to_sparse()),
        (number, number.conj()),
        (torch.zeros(()), torch.zeros(1)),
        (torch.zeros(0, 3), torch.zeros(3, 0).t()),
    ]
    try:
        return all(_guard([a])(b) for a, b in like) and not any(
            _guard([a])(b) or _guard([base, a])(base, b) for a, b in unlike
        )
    except Exception:  # another torch: whatever it says to this, plain Python does it
        return False
