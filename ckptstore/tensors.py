"""Many tensor specs as columns: names in order, dtypes, extents.

A checkpoint of a large model has a quarter of a million tensors. As objects they cost more time than all else
that is done with a chunk table, so one is made only for whoever asks for it; otherwise it is a number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptError
from ckptstore.tensor import TensorSpec, itemsize

ABSENT, OTHER = -1, -2  # what `Tensors.match` gives besides numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensors(Sequence[TensorSpec]):
    """Specs sorted by name (code points), as columns. `dims[n]` is the global shape, 0 beyond `ndim[n]`."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    dtype: npt.NDArray[np.int16]  # index into `dtypes`
    ndim: npt.NDArray[np.int8]
    dims: npt.NDArray[np.int64]  # [tensors, at least the largest ndim]

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Tensors:
        """The columns of `specs`, which are sorted by name; itself if it is columns."""
        if isinstance(specs, cls):
            return specs
        items = list(specs)
        dtypes = tuple(sorted({spec.dtype for spec in items}))
        at = {name: n for n, name in enumerate(dtypes)}
        dims = np.zeros((len(items), max((len(s.shape) for s in items), default=0)), np.int64)
        for n, spec in enumerate(items):
            dims[n, : len(spec.shape)] = spec.shape
        return cls(
            names=tuple(spec.name for spec in items),
            dtypes=dtypes,
            dtype=np.array([at[spec.dtype] for spec in items], np.int16),
            ndim=np.array([len(spec.shape) for spec in items], np.int8),
            dims=dims,
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TensorSpec, ...]: ...
    def __getitem__(self, at: int | slice) -> TensorSpec | tuple[TensorSpec, ...]:
        if isinstance(at, slice):
            return tuple(self[n] for n in range(*at.indices(len(self))))
        return TensorSpec(
            name=self.names[at],
            dtype=self.dtypes[self.dtype[at]],
            shape=tuple(self.dims[at, : self.ndim[at]].tolist()),
        )

    def __iter__(self) -> Iterator[TensorSpec]:
        dtypes, ndim, dims = self.dtype.tolist(), self.ndim.tolist(), self.dims.tolist()
        for name, dtype, depth, extents in zip(self.names, dtypes, ndim, dims, strict=True):
            yield TensorSpec(name=name, dtype=self.dtypes[dtype], shape=tuple(extents[:depth]))

    def __eq__(self, other: object) -> bool:
        """Equal specs in equal order, whatever the columns' padding."""
        if not isinstance(other, Tensors):
            return NotImplemented
        if self.names != other.names or not np.array_equal(self.ndim, other.ndim):
            return False
        depth = max(self.dims.shape[1], other.dims.shape[1])
        return np.array_equal(self.padded(depth), other.padded(depth)) and np.array_equal(
            np.array((*self.dtypes, ""))[self.dtype], np.array((*other.dtypes, ""))[other.dtype]
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def find(self, name: str) -> int:
        """Index of the tensor of that name; -1 if there is none."""
        at = bisect_left(self.names, name)
        return at if at < len(self.names) and self.names[at] == name else -1

    def find_all(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """`find` of each name."""
        if 16 * len(names) > len(self):  # a dictionary of all names is cheaper than so many searches
            numbers = dict(zip(self.names, range(len(self)), strict=True))
            return np.array([numbers.get(name, ABSENT) for name in names], np.int64)
        return np.array([self.find(name) for name in names], np.int64)

    def match(self, specs: Sequence[TensorSpec]) -> npt.NDArray[np.int64]:
        """Index of each spec: ABSENT where there is none of its name, OTHER where that has another dtype or shape."""
        if not len(self):
            return np.full(len(specs), ABSENT, np.int64)
        at = self.find_all([spec.name for spec in specs])
        width = max(self.dims.shape[1], max((len(spec.shape) for spec in specs), default=0))
        padding, codes = (0,) * width, {name: n for n, name in enumerate(self.dtypes)}
        flat = chain.from_iterable(spec.shape + padding[len(spec.shape) :] for spec in specs)
        dims = np.fromiter(flat, np.int64, width * len(specs)).reshape(len(specs), width)
        stored = np.zeros_like(dims)
        stored[:, : self.dims.shape[1]] = self.dims[at]
        same = np.array([codes.get(spec.dtype, -1) for spec in specs], np.int64) == self.dtype[at]
        same &= np.array([len(spec.shape) for spec in specs], np.int64) == self.ndim[at]
        same &= (dims == stored).all(axis=1)
        return np.where(same | (at == ABSENT), at, OTHER)

    @property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """The specs under their names, each made when it is asked for."""
        return _ByName(self)

    def padded(self, depth: int, fill: int = 0) -> npt.NDArray[np.int64]:
        """`dims` with exactly `depth` columns (at least the largest ndim), `fill` beyond each tensor's own."""
        dims = np.full((len(self), depth), fill, np.int64)
        width = min(depth, self.dims.shape[1])
        dims[:, :width] = self.dims[:, :width]
        if fill:
            dims[np.arange(depth) >= self.ndim[:, None]] = fill
        return dims

    @property
    def itemsizes(self) -> npt.NDArray[np.int64]:
        """Bytes of one element of each tensor."""
        return self.itemsizes_of(np.arange(len(self)))

    def itemsizes_of(self, which: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Bytes of one element of each of these tensors."""
        sizes = np.array([itemsize(name) for name in self.dtypes] or [0], np.int64)
        return np.asarray(sizes[self.dtype[which]])

    def take(self, which: npt.NDArray[Any]) -> Tensors:
        """The specs of these numbers, which rise."""
        return Tensors(
            names=tuple(map(self.names.__getitem__, which.tolist())),
            dtypes=self.dtypes,
            dtype=self.dtype[which],
            ndim=self.ndim[which],
            dims=self.dims[which],
        )


class _ByName(Mapping[str, TensorSpec]):
    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> TensorSpec:
        at = self._tensors.find(name)
        if at < 0:
            raise KeyError(name)
        return self._tensors[at]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._tensors.find(name) >= 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.names)

    def __len__(self) -> int:
        return len(self._tensors)


def merge_tensors(
    all_of: Sequence[Tensors], owners: Sequence[str] = ()
) -> tuple[Tensors, list[npt.NDArray[np.int32]]]:
    """The union, and for each of `all_of` the number there of each of its tensors.

    CorruptError names a tensor that has two specs and, if it is given the `owners`, whose they are.
    """
    places: dict[str, int] = {}
    codes = []
    for tensors in all_of:
        codes.append([places.setdefault(name, len(places)) for name in tensors.names])
    found = list(places)
    order = sorted(range(len(found)), key=found.__getitem__)
    rank = np.empty(len(found), np.int32)
    rank[order] = np.arange(len(found), dtype=np.int32)
    numbers = [rank[np.array(code, np.int64)] for code in codes]
    dtypes = tuple(sorted({name for tensors in all_of for name in tensors.dtypes}))
    depth = max((tensors.dims.shape[1] for tensors in all_of), default=0)
    columns = np.zeros((len(found), depth + 2), np.int64)  # dtype, ndim, dims
    for tensors, at in zip(all_of, numbers, strict=True):
        columns[at] = _as_rows(tensors, dtypes, depth)
    for n, (tensors, at) in enumerate(zip(all_of, numbers, strict=True)):
        differs = np.flatnonzero((columns[at] != _as_rows(tensors, dtypes, depth)).any(axis=1))
        if len(differs):
            spec = tensors[int(differs[0])]
            raise _two_specs(spec, n, all_of, owners)
    merged = Tensors(
        names=tuple(found[n] for n in order),
        dtypes=dtypes,
        dtype=columns[:, 0].astype(np.int16),
        ndim=columns[:, 1].astype(np.int8),
        dims=columns[:, 2:],
    )
    return merged, numbers


def _two_specs(spec: TensorSpec, at: int, all_of: Sequence[Tensors], owners: Sequence[str]) -> CorruptError:
    found = ((n, each[k]) for n, each in enumerate(all_of) if (k := each.find(spec.name)) >= 0)
    other = next((n, each) for n, each in found if each != spec)
    (first, one), (second, two) = sorted([other, (at, spec)], key=lambda pair: pair[0])
    where = (owners[first], owners[second]) if owners else ("one part", "another")
    return CorruptError(
        f"{spec.name} is {one.dtype}{list(one.shape)} in {where[0]} and {two.dtype}{list(two.shape)} in {where[1]}: "
        f"all members must save the same global tensor",
        tensor=spec.name,
    )


def _as_rows(tensors: Tensors, dtypes: tuple[str, ...], depth: int) -> npt.NDArray[np.int64]:
    lookup = np.array([dtypes.index(name) for name in tensors.dtypes] or [0], np.int64)
    rows = np.zeros((len(tensors), depth + 2), np.int64)
    rows[:, 0] = lookup[tensors.dtype]
    rows[:, 1] = tensors.ndim
    rows[:, 2 : 2 + tensors.dims.shape[1]] = tensors.dims
    return rows
