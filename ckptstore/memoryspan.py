"""Where the elements of tensors and arrays lie in memory, and which of them lie there twice.

A restore fills memory that it is given. Two targets whose elements overlap cannot both be filled unless what
was saved says the same of every shared byte, so whoever fills them has to know. Nearly all targets lie apart, which a
look at where each begins and ends settles; only the rest is compared element by element. Argued in
docs/explanation/layouts.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements of `itemsize` bytes in the memory of `device`: from byte address `start`, `steps` in bytes.

    Dimensions of one element are left out. `steps` may be negative (numpy) or 0 (expanded tensors).
    """

    device: str
    start: int
    itemsize: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def low(self) -> int:
        """The address of the first byte."""
        return self.start + sum((n - 1) * s for n, s in zip(self.shape, self.steps, strict=True) if s < 0)

    @property
    def stop(self) -> int:
        """One past the last byte."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.steps, strict=True) if s > 0)
        return self.start + reach + self.itemsize

    def within(self, memory: Bytes, base: int) -> npt.NDArray[Any]:
        """These elements, without a type, in other memory that stands for the addresses from `base`."""
        first = memory[self.start - base :][: self.itemsize].view(f"V{self.itemsize}")
        return np.lib.stride_tricks.as_strided(first, self.shape, self.steps, writeable=True)


def span_of(data: Any) -> Span | None:
    """Where a torch tensor's or a numpy array's elements lie; None if it has none."""
    if isinstance(data, np.ndarray):
        if not data.size:
            return None
        device, start, size = "cpu", data.__array_interface__["data"][0], data.itemsize
        shape, steps = data.shape, data.strides
    else:
        if not data.numel():
            return None
        device, start, size = str(data.device), data.data_ptr(), data.element_size()
        shape, steps = tuple(data.shape), tuple(size * step for step in data.stride())
    kept = [(n, step) for n, step in zip(shape, steps, strict=True) if n > 1]
    return Span(
        device=device,
        start=start,
        itemsize=size,
        shape=tuple(n for n, _ in kept),
        steps=tuple(step for _, step in kept),
    )


def is_contiguous(data: Any) -> bool:
    """Do the elements of a tensor or array follow each other in row-major order?"""
    return bool(data.flags.c_contiguous if isinstance(data, np.ndarray) else data.is_contiguous())


def host_runs(data: Sequence[Any]) -> npt.NDArray[np.int64] | None:
    """[address, bytes] of each, if all are torch tensors that are one run of host memory; None: ask each for itself."""
    if any(isinstance(each, np.ndarray) for each in data) or not data:
        return None
    from ckptstore.interop.torch_tensor import host_runs_of

    return host_runs_of(data)


def repeats(data: Any) -> bool:
    """Do several elements of one tensor or array lie in the same memory (it is expanded, or overlaps itself)?"""
    span = None if is_contiguous(data) else span_of(data)
    if span is None:
        return False
    reach = span.itemsize
    for step, n in sorted((abs(step), n) for n, step in zip(span.shape, span.steps, strict=True)):
        if step < reach:
            return step == 0 or _meet([span])
        reach += step * (n - 1)
    return False


def overlapping(spans: Sequence[Span]) -> list[list[int]]:
    """The indices of spans that share a byte with another, in groups that share none with each other."""
    order = sorted(range(len(spans)), key=lambda n: (spans[n].device, spans[n].low))
    groups: list[list[int]] = []
    device, stop = "", 0
    for n in order:
        if groups and spans[n].device == device and spans[n].low < stop:
            groups[-1].append(n)
            stop = max(stop, spans[n].stop)
        else:
            groups.append([n])
            device, stop = spans[n].device, spans[n].stop
    return [sorted(group) for group in groups if len(group) > 1 and _collide([spans[n] for n in group])]


def _collide(spans: Sequence[Span]) -> bool:
    """Does any byte belong to two of the spans? First as boxes of one grid, which slices of one tensor are."""
    boxes = _on_one_grid(spans)
    return _meet(spans) if boxes is None else _boxes_meet(*boxes)


def _on_one_grid(spans: Sequence[Span]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """(offsets, stops) of the spans as boxes of one row-major array; None if they are none.

    The array's steps are all those that the spans have; the coordinates of a span's first element follow from
    where it begins, and each must leave its row only at the end of it.
    """
    size = spans[0].itemsize
    low = min(span.low for span in spans)
    grid = sorted({step for span in spans for step in span.steps} | {size}, reverse=True)
    if grid[-1] != size or any(a % b for a, b in pairwise(grid)):
        return None
    place = {step: n for n, step in enumerate(grid)}
    offsets, stops = np.zeros((len(spans), len(grid)), np.int64), np.zeros((len(spans), len(grid)), np.int64)
    limits = [None, *(a // b for a, b in pairwise(grid))]
    for n, span in enumerate(spans):
        if span.itemsize != size or len(set(span.steps)) < len(span.steps) or (span.start - low) % size:
            return None
        left = span.start - low
        extent = dict(zip((place[step] for step in span.steps), span.shape, strict=True))
        for axis, step in enumerate(grid):
            at, left = divmod(left, step)
            stop, limit = at + extent.get(axis, 1), limits[axis]
            if limit is not None and stop > limit:
                return None
            offsets[n, axis], stops[n, axis] = at, stop
    return offsets, stops


def _boxes_meet(offsets: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
    """Do two of the boxes share an element? Each is held against those that begin before it ends on one axis."""
    axis = max(range(offsets.shape[1]), key=lambda n: len(np.unique(offsets[:, n])))
    order = np.argsort(offsets[:, axis], kind="stable")
    offsets, stops = offsets[order], stops[order]
    ends = np.searchsorted(offsets[:, axis], stops[:, axis], side="left")
    for n, end in enumerate(ends.tolist()):
        others = slice(n + 1, end)
        if ((offsets[others] < stops[n]) & (offsets[n] < stops[others])).all(axis=1).any():
            return True
    return False


def _meet(spans: Sequence[Span]) -> bool:
    """The same by marking every element: a byte for each of the largest unit that all of them are made of."""
    low, stop = min(span.low for span in spans), max(span.stop for span in spans)
    numbers = (n for span in spans for n in (span.itemsize, span.start - low, *span.steps))
    unit = reduce(gcd, numbers)
    marks = np.zeros((stop - low) // unit, np.bool_)
    total = 0
    for span in spans:
        width = span.itemsize // unit
        first = marks[(span.start - low) // unit :]
        view = np.lib.stride_tricks.as_strided(
            first, (*span.shape, width), (*(step // unit for step in span.steps), 1), writeable=True
        )
        view[...] = True
        total += view.size
    return bool(np.count_nonzero(marks) < total)


def agree(spans: Sequence[Span], contents: Iterable[Bytes]) -> bool:
    """May memory be filled with all of these (row-major bytes of each span), because shared bytes are equal?"""
    low, stop = min(span.low for span in spans), max(span.stop for span in spans)
    memory = np.zeros(stop - low, np.uint8)
    written = []
    for span, data in zip(spans, contents, strict=True):
        view = span.within(memory, low)
        wanted = data.view(view.dtype).reshape(span.shape)
        view[...] = wanted
        written.append((view, wanted))
    return all(view.tobytes() == wanted.tobytes() for view, wanted in written)
