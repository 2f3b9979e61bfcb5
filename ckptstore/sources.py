"""Where the bytes of a state lie, and how one block of a snapshot is filled from them with the fewest calls.

A training loop saves the same tensors at the same addresses again and again, and a view costs more than the copy
of a small tensor. So views are of addresses, made once and used as long as every leaf lies where it lay; they keep
nothing alive, and are read only while a save holds the tensors (`FlatState.places` says when that is right).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.errors import InternalError
from ckptstore.held import torch_module
from ckptstore.staging import Block
from ckptstore.tensor import TensorSpec, cut_flat_range, itemsize
from ckptstore.transfer import NO_DEVICES, Device, Transfer, parts_of

# Copies below are made many at a time: each call costs as much as 10 KiB. torch takes several threads for one from
# 32,768 elements on, which is a disaster on busy cores, so they are of words, and no larger.
SMALL_NBYTES: Final = 256 << 10
WORD: Final = 8

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCopies:
    """What fills one block, end to end: `nbytes[k]` bytes from byte `start[k]` of leaf `leaf[k]`, at byte `at[k]`."""

    size: int
    leaf: tuple[int, ...]
    start: tuple[int, ...]
    at: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours of one block: `views` of host memory, or None for what goes by the tensors.

    That is a single copy, or several of one `device`.
    """

    low: int
    high: int
    at: int
    nbytes: int
    views: Any
    device: Device | None


class Sources:
    """The leaves of one structure as sources of copies. One save at a time looks and copies."""

    def __init__(
        self, specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]], blocks: Sequence[BlockCopies]
    ) -> None:
        self.specs = specs
        self._shapes = shapes
        self._blocks = blocks
        self._places: tuple[int, ...] | None = None
        self._devices: Mapping[int, Device] = NO_DEVICES
        self._runs: list[list[_Run]] = []

    def look(self, places: tuple[int, ...], devices: Mapping[int, Device] = NO_DEVICES) -> None:
        """The leaves lie at these addresses, -1 where they are no single run of host memory, or on these devices.

        Only views of blocks in which a leaf lies elsewhere than before are made anew: a random state is another tensor
        at every save.
        """
        before = self._places
        if devices != self._devices:
            before = None
        if places is before:
            return
        runs, changed = list(self._runs), range(len(self._blocks))
        if before is not None and len(before) == len(places):
            moved = {n for n, (old, new) in enumerate(zip(before, places, strict=True)) if old != new}
            anew = [n for n in changed if not moved.isdisjoint(self._blocks[n].leaf)]
        else:
            runs, anew = [[] for _ in changed], list(changed)
        leaves = sorted({leaf for n in anew for leaf in self._blocks[n].leaf})
        sizes = [_numel(self._shapes[leaf]) * itemsize(self.specs[leaf].dtype) for leaf in leaves]
        window = _Window.over([places[leaf] for leaf in leaves], sizes)
        for n in anew:
            copies = self._blocks[n]
            runs[n] = [
                self._run(copies, low, high, places, window, devices)
                for low, high in _neighbours(copies, places, devices)
            ]
        self._runs, self._places, self._devices = runs, places, devices

    def _run(
        self,
        copies: BlockCopies,
        low: int,
        high: int,
        places: tuple[int, ...],
        window: _Window,
        devices: Mapping[int, Device],
    ) -> _Run:
        nbytes = copies.at[high - 1] + copies.nbytes[high - 1] - copies.at[low]
        views: Any = None
        if places[copies.leaf[low]] >= 0:
            parts = [(places[copies.leaf[k]] + copies.start[k], copies.nbytes[k]) for k in range(low, high)]
            views = window.torch(parts) if high - low > 1 else window.numpy(*parts[0])
        return _Run(low, high, copies.at[low], nbytes, views, devices.get(copies.leaf[low]))

    def copy(self, number: int, data: Sequence[Any], block: Block, transfer: Transfer | None = None) -> None:
        """Fill block `number`; `data` are the tensors of the save whose places were looked at.

        What lies on the devices of `transfer` has only been queued on return.
        """
        copies = self._blocks[number]
        for run in self._runs[number]:
            if run.device is not None and transfer is not None:
                parts = [
                    part
                    for k in range(run.low, run.high)
                    for part in parts_of(
                        data[copies.leaf[k]], self._shapes[copies.leaf[k]], copies.start[k], copies.nbytes[k]
                    )
                ]
                transfer.copy(run.device, parts, block, run.at)
            elif run.views is None:
                leaf, out = copies.leaf[run.low], block.memory[run.at : run.at + run.nbytes]
                copy_range(data[leaf], self._shapes[leaf], copies.start[run.low], out)
            elif run.high - run.low == 1:
                np.copyto(block.memory[run.at : run.at + run.nbytes], run.views)
            else:
                self._concatenate(run, block)

    def _concatenate(self, run: _Run, block: Block) -> None:
        from ckptstore.interop.torch_tensor import concatenate, from_bytes

        if block.torch is None:
            block.torch = from_bytes(block.memory, "int64", (block.nbytes // WORD,))
        concatenate(run.views, block.torch[run.at // WORD : (run.at + run.nbytes) // WORD])


def _neighbours(
    copies: BlockCopies, places: Sequence[int], devices: Mapping[int, Device]
) -> Iterator[tuple[int, int]]:
    """Ranges of copies: small ones of one memory together where torch can take them at once, all others alone."""
    together = torch_module() is not None
    low, count = 0, len(copies.leaf)

    def small(k: int) -> bool:
        place, nbytes = places[copies.leaf[k]], copies.nbytes[k]
        words = not (place + copies.start[k] | nbytes | copies.at[k]) % WORD
        return together and words and nbytes < SMALL_NBYTES and place >= 0

    def small_of(k: int, device: Device) -> bool:
        return devices.get(copies.leaf[k]) == device and copies.nbytes[k] < SMALL_NBYTES

    while low < count:
        high = low + 1
        device = devices.get(copies.leaf[low]) if devices else None
        if device is not None:
            while small_of(low, device) and high < count and small_of(high, device):
                high += 1
        elif small(low):
            while high < count and small(high):
                high += 1
        yield low, high
        low = high


class _Window:
    """All addresses from the lowest to the highest leaf as one array, since a slice is the cheapest view there is.

    Most of it belongs to nobody and is never touched. It keeps nothing alive.
    """

    def __init__(self, low: int, nbytes: int) -> None:
        low, nbytes = low - low % WORD, -(-(nbytes + low % WORD) // WORD) * WORD
        self._low = low
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (low, False), "version": 3}
        self._array: Bytes = np.asarray(self)
        self._tensor: Any = None

    @classmethod
    def over(cls, places: Sequence[int], sizes: Sequence[int]) -> _Window:
        spans = [(at, at + n) for at, n in zip(places, sizes, strict=True) if at >= 0 and n]
        if not spans:
            return cls(WORD, 0)
        low, high = min(at for at, _ in spans), max(end for _, end in spans)
        return cls(low, high - low)

    def numpy(self, place: int, nbytes: int) -> Bytes:
        at = place - self._low
        if at < 0 or at + nbytes > self._array.nbytes:
            raise InternalError(f"{nbytes} bytes at {place} lie outside of the leaves' addresses")
        return self._array[at : at + nbytes]

    def torch(self, parts: Sequence[tuple[int, int]]) -> list[Any]:
        """The parts, (place, nbytes), as words."""
        if self._tensor is None:
            from ckptstore.interop.torch_tensor import from_bytes

            self._tensor = from_bytes(self._array, "int64", (self._array.nbytes // WORD,))
        low, tensor = self._low // WORD, self._tensor
        return [tensor[place // WORD - low : (place + n) // WORD - low] for place, n in parts]


def places_of(data: Sequence[Any]) -> tuple[int, ...]:
    """The address of each tensor or array that is one run of host memory, row-major; -1 for all others."""
    found = []
    for each in data:
        view = host_bytes(each)
        found.append(-1 if view is None or not view.flags.writeable else view.ctypes.data)
    return tuple(found)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def host_bytes(data: Any) -> Bytes | None:
    """The elements in host memory, row-major, as bytes and without a copy; None where they do not lie so."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            return None
        return data.reshape(-1).view(np.uint8) if data.size else np.zeros(0, np.uint8)
    from ckptstore.interop.torch_tensor import byte_view

    return byte_view(data)


def copy_range(data: Any, shape: tuple[int, ...], start: int, out: Bytes) -> None:
    """Copy `out.nbytes` bytes from byte `start` of the row-major elements of a tensor or array of any strides."""
    if not out.nbytes:
        return
    size = data.itemsize if isinstance(data, np.ndarray) else data.element_size()
    first, last = start // size, (start + out.nbytes) // size
    at = 0
    for box in cut_flat_range(shape, first, last):
        part = data[box.slices] if box.shape else data
        copy_bytes(part, out[at : at + box.numel * size])
        at += box.numel * size


def copy_bytes(data: Any, out: Bytes) -> None:
    """Copy the elements of a tensor or array, row-major, into `out`."""
    if not out.nbytes:
        return
    if isinstance(data, np.ndarray):
        np.copyto(out.view(data.dtype).reshape(data.shape), data)
        return
    from ckptstore.interop.torch_tensor import copy_to_bytes

    copy_to_bytes(data, out)
