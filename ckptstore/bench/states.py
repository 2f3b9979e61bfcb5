"""The states that are saved: the mix of a mixture-of-experts trainer, few large tensors, many small ones.

Each parameter is kept as trainers keep it: BF16 weights, FP32 master weights and two FP32 moments, 14 bytes
in all. Values come from a seed and change as one optimizer step changes them, so that nothing is saved twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

KINDS = ("moe", "large", "small")
MASTER, EXP_AVG, EXP_AVG_SQ = "optimizer.master", "optimizer.exp_avg", "optimizer.exp_avg_sq"
PARAMETER_NBYTES = 2 + 4 + 4 + 4
SMALL_COUNT, LARGE_COUNT = 5_000, 8  # parameters: 20,000 and 32 tensors
SMALLEST = 1 << 20
ALIGN = 64
CHANGED_EVERY = 59  # one BF16 weight in so many changes in a step at learning rate 1e-6: 1.7 %
GROWTH = 1 + 2.0**-10  # changes every FP32 value that is not zero

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the model; it becomes four tensors."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameters(kind: str, nbytes: int) -> tuple[Parameter, ...]:
    """Parameters whose tensors hold about `nbytes` bytes; equal arguments give equal shapes."""
    numel = max(nbytes, SMALLEST) // PARAMETER_NBYTES
    if kind == "moe":
        return _moe(numel, nbytes)
    count = SMALL_COUNT if kind == "small" else LARGE_COUNT
    columns = 16 if kind == "small" else 64
    rows = max(round(numel / count / columns), 1)
    return tuple(Parameter(name=f"layers.{n}.weight", shape=(rows, columns)) for n in range(count))


def _moe(numel: int, nbytes: int) -> tuple[Parameter, ...]:
    """Layers of attention, router and experts; the embedding takes what is left of `numel`."""
    layers, experts = (8, 16) if nbytes < 2 << 30 else (12, 32)
    hidden = max(int(math.sqrt(0.94 * numel / layers / (1.5 * experts + 4))) // 8 * 8, 8)
    found = []
    for n in range(layers):
        at = f"layers.{n}"
        found += [Parameter(name=f"{at}.attention.{w}", shape=(hidden, hidden)) for w in "qkvo"]
        found += [Parameter(name=f"{at}.norm{n}", shape=(hidden,)) for n in (1, 2)]
        found.append(Parameter(name=f"{at}.router", shape=(experts, hidden)))
        for e in range(experts):
            up, down = (hidden // 2, hidden), (hidden, hidden // 2)
            shapes = {"w1": up, "w2": down, "w3": up}
            found += [Parameter(name=f"{at}.experts.{e}.{w}", shape=shape) for w, shape in shapes.items()]
    rows = max((numel - sum(each.numel for each in found)) // hidden, 1)
    return (Parameter(name="embedding", shape=(rows, hidden)), *found)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Tensors by dotted name, grouped as a trainer groups them, and values that are no tensors."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def nested(self) -> dict[str, Any]:
        """`{"model": {name: tensor}, "optimizer": {"master": …}, …}`: the same tensors, new dicts."""
        found: dict[str, Any] = {"model": {}, "optimizer": {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}}
        for name, tensor in self.tensors.items():
            head, _, rest = name.partition(".")
            if head == "optimizer":
                kind, _, rest = rest.partition(".")
                found[head][kind][rest] = tensor
            else:
                found[head][rest] = tensor
        return {**found, **self.values}

    def bytes_of(self) -> list[Bytes]:
        """Each tensor's memory as bytes."""
        return [memory_of(tensor) for tensor in self.tensors.values()]

    def advance(self, step: int, keep: Collection[str] = ()) -> None:
        """Change all tensors but those in `keep` as an optimizer step does: every FP32 value, few BF16 ones."""
        import torch

        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if name in keep:
                    continue
                if tensor.dtype == torch.bfloat16:
                    words = tensor.view(torch.int16).reshape(-1)
                    words[step % min(CHANGED_EVERY, len(words)) :: CHANGED_EVERY] ^= 1
                else:
                    tensor.mul_(GROWTH)

    def half(self) -> tuple[frozenset[str], int]:
        """Names of about half of the bytes, whole parameters, and how many bytes those are."""
        found: set[str] = set()
        nbytes, total = 0, self.nbytes
        sizes = {name: tensor.nbytes for name, tensor in self.tensors.items()}
        for name in self.tensors:
            if not name.startswith("model."):
                continue
            base = name.removeprefix("model.")
            group = [name, *(f"{kind}.{base}" for kind in (MASTER, EXP_AVG, EXP_AVG_SQ))]
            size = sum(sizes[each] for each in group)
            if nbytes + size <= total / 2:
                found.update(group)
                nbytes += size
        return frozenset(found), nbytes

    def differs_from(self, other: State) -> str | None:
        """The first tensor whose bits differ; None when all are equal."""
        for name, tensor in self.tensors.items():
            if not np.array_equal(memory_of(tensor), memory_of(other.tensors[name])):
                return name
        return None


def memory_of(tensor: torch.Tensor) -> Bytes:
    """A contiguous CPU tensor's memory as bytes."""
    import torch

    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def make(kind: str, nbytes: int, *, seed: int = 0) -> State:
    """A state of about `nbytes` bytes with values from `seed`, each tensor in memory of its own."""
    import torch

    source = torch.Generator().manual_seed(seed)
    shapes = parameters(kind, nbytes)
    masters = [torch.empty(each.shape).normal_(0, 0.02, generator=source) for each in shapes]
    tensors = {f"model.{each.name}": master.bfloat16() for each, master in zip(shapes, masters, strict=True)}
    tensors |= {f"{MASTER}.{each.name}": master for each, master in zip(shapes, masters, strict=True)}
    for kind_, scale in ((EXP_AVG, 1e-4), (EXP_AVG_SQ, 1e-8)):
        for each in shapes:
            drawn = torch.empty(each.shape).normal_(0, scale, generator=source)
            tensors[f"{kind_}.{each.name}"] = drawn.abs_() if kind_ == EXP_AVG_SQ else drawn
    return State(
        tensors=tensors, values={"step": 1000, "lr": 1e-6, "betas": [0.9, 0.95], "consumed": 1 << 40}
    )


def packed_nbytes(state: State) -> int:
    """Bytes that `blank_like` needs."""
    return sum(-(-tensor.nbytes // ALIGN) * ALIGN for tensor in state.tensors.values())


def blank_like(state: State, memory: Bytes) -> State:
    """The same names and shapes in `memory`, whatever it holds: what a load fills."""
    import torch

    at, tensors = 0, {}
    for name, tensor in state.tensors.items():
        part = torch.from_numpy(memory[at : at + tensor.nbytes])
        tensors[name] = part.view(tensor.dtype).view(tensor.shape)
        at += -(-tensor.nbytes // ALIGN) * ALIGN
    return State(tensors=tensors, values=dict(state.values))


def split(sizes: Sequence[int], ways: int) -> list[slice]:
    """Runs of consecutive items with about equally many bytes each."""
    ends = np.cumsum(sizes)
    cuts = [0, *(int(np.searchsorted(ends, ends[-1] * n / ways)) for n in range(1, ways)), len(sizes)]
    return [slice(low, high) for low, high in itertools.pairwise(cuts)]
