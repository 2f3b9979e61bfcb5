"""Copy what a member holds into host memory, as images of its segments, so that the trainer may go on.

Everything is copied, CPU tensors too: aliasing them has torn other systems' checkpoints. Blocks are filled in
the order in which they are written, so a writer begins with the first while the last is yet to be copied. A
snapshot lives in this process and can be lost; what is durable is decided elsewhere (docs/explanation/cuts.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import TableFrame
from ckptstore.errors import InternalError
from ckptstore.held import torch_module
from ckptstore.image import Image, make_images
from ckptstore.plan.save import PlannedChunk
from ckptstore.staging import Block, StagingMemory
from ckptstore.state import Structure
from ckptstore.store.base import BLOCK_NBYTES
from ckptstore.tensor import Box, TensorSpec, cut_flat_range, itemsize

TWO_THREADS_NBYTES: Final = 32 << 20  # below, a second thread costs more than it copies
SMALL_NBYTES: Final = 512 << 10  # copies below are made many at a time: each call costs as much as 10 KiB

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCopies:
    """What fills one block, end to end: `nbytes[k]` bytes from byte `start[k]` of leaf `leaf[k]`, at byte `at[k]`."""

    size: int
    leaf: tuple[int, ...]
    start: tuple[int, ...]
    at: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyPlan:
    """How a state becomes the images of its segments. Made once a structure and plan.

    Blocks of all images are counted on; `place[chunk]` is where the chunk begins in them, in bytes (-1: not copied).
    """

    specs: tuple[TensorSpec, ...]
    shapes: tuple[tuple[int, ...], ...]
    images: tuple[Image, ...]
    blocks: tuple[BlockCopies, ...]
    place: tuple[int, ...]

    @classmethod
    def of(cls, structure: Structure, plan: Sequence[PlannedChunk], images: tuple[Image, ...]) -> CopyPlan:
        place, blocks = [-1] * len(plan), list[BlockCopies]()
        for image in images:
            first = len(blocks) * BLOCK_NBYTES
            for chunk, start in zip(image.chunks, image.starts, strict=True):
                place[chunk] = first + start
            blocks += _blocks(structure, plan, image)
        return cls(
            specs=structure.specs,
            shapes=tuple(box.shape for box in structure.boxes),
            images=images,
            blocks=tuple(blocks),
            place=tuple(place),
        )

    @property
    def nbytes(self) -> int:
        return sum(block.size for block in self.blocks)


def _blocks(structure: Structure, plan: Sequence[PlannedChunk], image: Image) -> list[BlockCopies]:
    sizes = [min(BLOCK_NBYTES, image.nbytes - at) for at in range(0, image.nbytes, BLOCK_NBYTES)]
    columns = [(list[int](), list[int](), list[int](), list[int]()) for _ in sizes]
    for chunk, at, left in zip(image.chunks, image.starts, image.sizes, strict=True):
        planned = plan[chunk]
        leaf = structure.boxes[planned.shard]
        size = itemsize(structure.specs[planned.shard].dtype)
        start = planned.box.start_in(leaf) * size if left else 0
        while left:
            block, offset = divmod(at, BLOCK_NBYTES)
            nbytes = min(left, BLOCK_NBYTES - offset)
            for column, value in zip(columns[block], (planned.shard, start, offset, nbytes), strict=True):
                column.append(value)
            start, at, left = start + nbytes, at + nbytes, left - nbytes
    return [
        BlockCopies(size=size, leaf=tuple(leaf), start=tuple(start), at=tuple(at), nbytes=tuple(nbytes))
        for size, (leaf, start, at, nbytes) in zip(sizes, columns, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes of a chunk that lie in one block, from its byte `at` on. Without a block they lie elsewhere."""

    data: Bytes
    block: Block | None
    at: int


class Snapshot:
    """A state in host memory, block by block. One thread stages; another takes blocks and gives them back."""

    def __init__(self, plan: CopyPlan, memory: StagingMemory, *, timeout_s: float) -> None:
        self.plan = plan
        self._memory = memory
        self._timeout_s = timeout_s
        self._next = 0
        self._order = threading.Lock()
        self._changed = threading.Condition()
        self._blocks: list[Block | None] = [None] * len(plan.blocks)
        self._staged = [False] * len(plan.blocks)
        self._error: BaseException | None = None
        self._over = False

    # -- the trainer's side

    def stage(self, data: Sequence[Any], helpers: Executor | None = None) -> None:
        """Copy all blocks; the state may be changed as soon as this returns. What fails here, fails the writer too.

        Ends early, without an error, if the writer has given the snapshot up. `helpers` gives the second thread.
        TimeoutError when no block has become free for too long.
        """
        sources = _Sources(self.plan, data)
        helper = None
        if helpers is not None and self.plan.nbytes >= TWO_THREADS_NBYTES:
            helper = helpers.submit(self._work, sources)
        try:
            self._work(sources)
        finally:
            if helper is not None:
                helper.exception()  # told in self._error
        if self._error is not None:
            raise self._error

    def _work(self, sources: _Sources) -> None:
        try:
            while (number := self._begin()) is not None:
                block = self._blocks[number]
                if block is None:
                    raise InternalError(f"block {number} was given back before it was staged")
                sources.copy(self.plan.blocks[number], block)
                with self._changed:
                    self._staged[number] = True
                    self._changed.notify_all()
                if self._over:
                    self.give_back(number)
        except BaseException as error:
            # The thread that stages raises it; the writer must not wait for what will not come.
            self.fail(error)

    def _begin(self) -> int | None:
        """Memory for the next block, in order: were a later one served first, a writer might wait for ever."""
        with self._order:
            number = self._next
            if number == len(self.plan.blocks) or self._error is not None or self._over:
                return None
            block = self._memory.take(self.plan.blocks[number].size, timeout_s=self._timeout_s)
            with self._changed:
                self._blocks[number] = block
            self._next = number + 1
            return number

    def fail(self, error: BaseException) -> None:
        """No more will be staged, or wanted: whoever waits for a block gets `error`."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    # -- the writer's side

    def pieces(self, place: int, nbytes: int) -> list[Piece]:
        """The bytes from `place` on, once they are staged. Raises what staging failed of."""
        found = []
        while nbytes:
            number, at = divmod(place, BLOCK_NBYTES)
            block = self._wait(number)
            count = min(nbytes, BLOCK_NBYTES - at)
            found.append(Piece(block.memory[at : at + count], block, at))
            place, nbytes = place + count, nbytes - count
        return found

    def _wait(self, number: int) -> Block:
        block = self._blocks[number]
        if self._staged[number] and block is not None:
            return block
        with self._changed:
            self._changed.wait_for(lambda: self._staged[number] or self._error is not None)
            block = self._blocks[number]
            if self._error is not None or block is None:
                raise self._error or InternalError(f"block {number} was asked for after it was given back")
            return block

    def give_back(self, number: int) -> None:
        """The writer has done with a block that was staged. Safe to call twice."""
        with self._changed:
            block, self._blocks[number] = self._blocks[number], None
        if block is not None:
            self._memory.drop(block)

    def discard(self) -> None:
        """The writer has done, or has failed: all memory is given back, that being filled once it is filled."""
        with self._changed:
            self._over = True
            staged = [number for number, done in enumerate(self._staged) if done]
        for number in staged:
            self.give_back(number)


class SnapshotChunks:
    """The chunks of a plan, in a snapshot: as they were staged, or cut out of whole leaves when the plan came later.

    `places` are those of the chunks in the snapshot's blocks. Blocks are given back as the last chunk of each is
    passed. `in_place` promises that `images` are those that the snapshot was staged as.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        frame: TableFrame,
        images: tuple[Image, ...],
        places: Sequence[int],
        *,
        in_place: bool,
    ) -> None:
        self.frame = frame
        self.images = images
        self.skipped = [chunk for chunk, place in enumerate(places) if place < 0]
        self._snapshot = snapshot
        self._places = places
        self._in_place = in_place
        self._sizes = {
            chunk: size for image in images for chunk, size in zip(image.chunks, image.sizes, strict=True)
        }
        self._uses = [0] * len(snapshot.plan.blocks)
        for chunk in self._sizes:
            for block in self._blocks(chunk):
                self._uses[block] += 1

    def _blocks(self, chunk: int) -> range:
        place, size = self._places[chunk], self._sizes[chunk]
        return (
            range(place // BLOCK_NBYTES, (place + max(size, 1) - 1) // BLOCK_NBYTES + 1) if size else range(0)
        )

    def pieces(self, chunk: int) -> list[Piece]:
        found = self._snapshot.pieces(self._places[chunk], self._sizes[chunk])
        if self._in_place:
            return found
        # What lies before a piece may still be wanted, so its block is not one to lay a header in.
        return [Piece(piece.data, None, piece.at) for piece in found]

    def passed(self, chunk: int) -> None:
        for block in self._blocks(chunk):
            self._uses[block] -= 1
            if not self._uses[block]:
                self._snapshot.give_back(block)


class ListedChunks:
    """Chunks that lie in memory of their own, which does not change before they are written."""

    skipped: Sequence[int] = ()

    def __init__(self, specs: Sequence[TensorSpec], boxes: Sequence[Box], data: Sequence[Bytes]) -> None:
        self.frame = TableFrame.of(specs, boxes)
        self.images = make_images(specs, boxes)
        self._data = data

    def pieces(self, chunk: int) -> list[Piece]:
        return [Piece(self._data[chunk], None, 0)]

    def passed(self, chunk: int) -> None:
        """They are the caller's."""


class _Sources:
    """The bytes of the leaves of one save, as cheap to copy from as they can be."""

    def __init__(self, plan: CopyPlan, data: Sequence[Any]) -> None:
        self._plan = plan
        self._data = data
        self._views: list[Any] = [None] * len(data)  # False: not contiguous host memory
        self._torch = torch_module() is not None

    def copy(self, copies: BlockCopies, block: Block) -> None:
        for low, high in _runs(copies):
            if high - low > 1 and self._copy_many(copies, low, high, block):
                continue
            for k in range(low, high):
                out = block.memory[copies.at[k] : copies.at[k] + copies.nbytes[k]]
                self._copy_one(copies.leaf[k], copies.start[k], out)

    def _view(self, leaf: int) -> Any:
        view = self._views[leaf]
        if view is None:
            found = host_bytes(self._data[leaf])
            view = self._views[leaf] = False if found is None else found
        return view

    def _copy_one(self, leaf: int, start: int, out: Bytes) -> None:
        view = self._view(leaf)
        if view is False:
            copy_range(self._data[leaf], self._plan.shapes[leaf], start, out)
            return
        source = view[start : start + out.nbytes]
        if source.nbytes != out.nbytes:
            raise InternalError(
                f"{self._plan.specs[leaf].name}: bytes {start} to {start + out.nbytes} lie outside of the "
                f"{view.nbytes} bytes of its shard"
            )
        np.copyto(out, source)

    def _copy_many(self, copies: BlockCopies, low: int, high: int, block: Block) -> bool:
        """Small pieces of host memory in one call, which holds no lock; False where that cannot be done."""
        if not self._torch:
            return False
        from ckptstore.interop.torch_tensor import concatenate_bytes, from_bytes

        parts = []
        for k in range(low, high):
            view = self._view(copies.leaf[k])
            if view is False or not view.flags.writeable:  # torch warns of memory that it may not write
                return False
            start, nbytes = copies.start[k], copies.nbytes[k]
            if start + nbytes > view.nbytes:
                return False  # told by the slow way
            parts.append(view if nbytes == view.nbytes else view[start : start + nbytes])
        if block.torch is None:
            block.torch = from_bytes(block.memory, "uint8", (block.nbytes,))
        concatenate_bytes(parts, block.torch[copies.at[low] : copies.at[high - 1] + copies.nbytes[high - 1]])
        return True


def _runs(copies: BlockCopies) -> Iterator[tuple[int, int]]:
    """Ranges of copies: small neighbours together, large ones alone."""
    low, count = 0, len(copies.leaf)
    while low < count:
        high = low + 1
        if copies.nbytes[low] < SMALL_NBYTES:
            while high < count and copies.nbytes[high] < SMALL_NBYTES:
                high += 1
        yield low, high
        low = high


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


def whole_leaves(structure: Structure) -> tuple[PlannedChunk, ...]:
    """The plan that copies all that the rank holds, for when the real plan is not known yet."""
    return tuple(PlannedChunk(shard=n, box=box) for n, box in enumerate(structure.boxes))
