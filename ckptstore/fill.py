"""Where the chunks of a load go: into their targets' own memory, or spread over boxes of them.

A chunk that one target alone wants whole, and that is one run of it, has memory of its own there; others are
scattered. Where twenty thousand chunks go is found with columns: no object is made for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import ChunkTable
from ckptstore.decode import Bytes, decoded_nbytes
from ckptstore.memoryspan import host_runs
from ckptstore.plan.load import Ints, LoadPlan, Pieces
from ckptstore.state import TensorLeaf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fill:
    """The places of a load plan: a place is the number of a row of it. Keeps the leaves' tensors alive."""

    table: ChunkTable
    leaves: Sequence[TensorLeaf]
    pieces: Pieces
    address: Sequence[int]  # of each place's own memory, -1 where it has none
    nbytes: Sequence[int]  # of each place's chunk
    host: HostMemory

    @classmethod
    def of(cls, table: ChunkTable, leaves: Sequence[TensorLeaf], plan: LoadPlan) -> Fill:
        pieces = plan.pieces
        first = pieces.bounds[:-1]
        row, target = pieces.row[first], pieces.target[first]
        # One target wants the chunk, all of it, and has it in one run.
        own = np.diff(pieces.bounds) == 1
        own &= (pieces.n[first] == table.shape[row]).all(axis=1) & (pieces.start[first] >= 0)
        bases = np.full(len(leaves), -1, np.int64)
        holds = np.zeros(len(leaves), np.bool_)
        holds[target[own]] = True
        held = np.flatnonzero(holds)
        bases[held] = host_addresses([leaves[n].data for n in held.tolist()], plan.target_nbytes[held])
        sizes = table.tensors.itemsizes_of(table.tensor[row])
        base = bases[target] if len(leaves) else np.zeros(0, np.int64)
        address = np.where(own & (base >= 0), base + pieces.start[first] * sizes, -1)
        nbytes = decoded_nbytes(table, row)
        return cls(
            table=table,
            leaves=leaves,
            pieces=pieces,
            address=address.tolist(),
            nbytes=nbytes.tolist(),
            host=HostMemory.around(address[address >= 0], nbytes[address >= 0]),
        )

    @property
    def without_memory(self) -> Ints:
        """Rows of the chunks that must be scattered."""
        return self.pieces.row[self.pieces.bounds[:-1][np.array(self.address, np.int64) < 0]]

    def memory(self, ats: Sequence[int]) -> list[Bytes | None]:
        address, nbytes, run = self.address, self.nbytes, self.host.run
        return [None if address[at] < 0 else run(address[at], nbytes[at]) for at in ats]

    def put(self, at: int, data: Bytes) -> None:
        """Put a whole chunk in place, wherever it belongs."""
        memory = self.memory([at])[0]
        if memory is not None:
            np.copyto(memory, data)
            return
        for n in range(int(self.pieces.bounds[at]), int(self.pieces.bounds[at + 1])):
            self._scatter(n, data)

    def _scatter(self, n: int, data: Bytes) -> None:
        leaf = self.leaves[int(self.pieces.target[n])]
        piece = self.pieces.piece(n, len(leaf.box.shape))
        source = self.table.box(piece.row)
        if isinstance(leaf.data, np.ndarray):
            chunk = data.view(leaf.data.dtype).reshape(source.shape)
            leaf.data[piece.box.relative_to(leaf.box).slices] = chunk[piece.box.relative_to(source).slices]
            return
        from ckptstore.interop.torch_tensor import copy_box_from_bytes

        copy_box_from_bytes(leaf.data, leaf.box, data, source, piece.box)


def host_address(data: Any, nbytes: int) -> int:
    """Where the elements of a tensor or array begin in host memory; -1 where they are not one run of `nbytes`."""
    if not isinstance(data, np.ndarray):
        from ckptstore.interop.torch_tensor import host_address_of

        return host_address_of(data, nbytes)
    if not data.flags.c_contiguous or not data.flags.writeable or data.nbytes != nbytes:
        return -1
    return int(data.__array_interface__["data"][0])


def host_addresses(data: Sequence[Any], nbytes: Ints) -> Ints:
    """`host_address` of each."""
    runs = host_runs(data)
    if runs is not None:
        return np.where(runs[:, 1] == nbytes, runs[:, 0], -1)
    return np.array([host_address(each, n) for each, n in zip(data, nbytes.tolist(), strict=True)], np.int64)


class HostMemory:
    """The memory of this process between the lowest and the highest of some runs, as one array.

    A slice of it costs a tenth of what an array of each tensor does. Only the runs may be touched, and only while
    whoever owns them lives.
    """

    def __init__(self, low: int, nbytes: int) -> None:
        self.low = low
        self.__array_interface__ = {"data": (low, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self._array: npt.NDArray[np.uint8] = np.asarray(self) if nbytes else np.empty(0, np.uint8)

    @classmethod
    def around(cls, address: Ints, nbytes: Ints) -> HostMemory:
        if not len(address):
            return cls(0, 0)
        low = int(address.min())
        return cls(low, int((address + nbytes).max()) - low)

    def run(self, address: int, nbytes: int) -> Bytes:
        """One run, which is one of those or lies in it."""
        found: Any = self._array[address - self.low : address - self.low + nbytes]
        return found  # type: ignore[no-any-return]  # numpy types the view as Any
