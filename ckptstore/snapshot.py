"""Copy what a member holds into host memory, as images of its segments, so that the trainer may go on.

Everything is copied, CPU tensors too: aliasing them has torn other systems' checkpoints. Blocks are filled in
the order in which they are written, so a writer may begin with the first while the last is yet to be copied. A
snapshot lives in this process and can be lost; what is durable is decided elsewhere (docs/explanation/cuts.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ckptstore.errors import InternalError
from ckptstore.image import Image
from ckptstore.plan.save import PlannedChunk
from ckptstore.sources import BlockCopies, Bytes, Sources, places_of
from ckptstore.staging import Block, StagingMemory
from ckptstore.state import Structure
from ckptstore.store.base import BLOCK_NBYTES
from ckptstore.tensor import itemsize
from ckptstore.transfer import NO_DEVICES, Arrival, Device, Transfer

COPY_THREADS: Final = 2
TWO_THREADS_NBYTES: Final = 32 << 20  # below, a second thread costs more than it copies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyPlan:
    """How a state becomes the images of its segments. Made once a structure and plan.

    Blocks of all images are counted on; `place[chunk]` is where the chunk begins in them, in bytes (-1: not copied).
    """

    images: tuple[Image, ...]
    blocks: tuple[BlockCopies, ...]
    sources: Sources
    place: tuple[int, ...]

    @classmethod
    def of(cls, structure: Structure, plan: Sequence[PlannedChunk], images: tuple[Image, ...]) -> CopyPlan:
        place, blocks = [-1] * len(plan), list[BlockCopies]()
        for image in images:
            first = len(blocks) * BLOCK_NBYTES
            for chunk, start in zip(image.chunks, image.starts, strict=True):
                place[chunk] = first + start
            blocks += _blocks(structure, plan, image)
        sources = Sources(structure.specs, [box.shape for box in structure.boxes], blocks)
        return cls(images=images, blocks=tuple(blocks), sources=sources, place=tuple(place))

    @property
    def nbytes(self) -> int:
        return sum(block.size for block in self.blocks)


def block_sizes(image: Image) -> list[int]:
    """Bytes of each block that an image is staged in."""
    return [min(BLOCK_NBYTES, image.nbytes - at) for at in range(0, image.nbytes, BLOCK_NBYTES)]


def _blocks(structure: Structure, plan: Sequence[PlannedChunk], image: Image) -> list[BlockCopies]:
    sizes = block_sizes(image)
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


class Piece(NamedTuple):
    """Bytes of a chunk that lie in one block, from its byte `at` on. Without a block they lie elsewhere.

    A tuple, since there are twenty thousand of them in some saves.
    """

    data: Bytes
    block: Block | None
    at: int


class Snapshot:
    """A state in host memory, block by block. One thread stages; another takes blocks and gives them back.

    With `copies_first` the writer gets no block before the last is staged, or staging waits for memory: for machines
    where each core that the writer takes is one that copies.
    """

    def __init__(
        self,
        plan: CopyPlan,
        memory: StagingMemory,
        *,
        timeout_s: float,
        copies_first: bool = False,
        transfer: Transfer | None = None,
    ) -> None:
        self.plan = plan
        self.transfer = transfer
        self._memory = memory
        self._timeout_s = timeout_s
        self._writes = not copies_first  # may the writer have what is staged?
        self._next = 0
        self._order = threading.Lock()
        self._changed = threading.Condition()
        self._blocks: list[Block | None] = [None] * len(plan.blocks)
        self._staged = [False] * len(plan.blocks)
        self._arriving: dict[int, tuple[Arrival, ...]] = {}  # blocks that accelerators may still copy to
        self._copied_from: Sequence[Any] = ()  # tensors that they may still copy from
        self._error: BaseException | None = None
        self._over = False
        self._check: Callable[[], None] | None = None

    # -- the trainer's side

    def follow(self) -> None:
        """What is staged is what the streams of this thread have been given to compute until now.

        To be called by the thread that saves, before `stage`, which may run in another.
        """
        if self.transfer is not None:
            self.transfer.follow()

    def stage(
        self, data: Sequence[Any], places: tuple[int, ...] | None = None, helpers: Executor | None = None
    ) -> None:
        """Copy all blocks; the state may be changed as soon as this returns. What fails here, fails the writer too.

        `places` are those of the flat state whose `data` they are. Ends early, without an error, if the writer has
        given the snapshot up. `helpers` gives the second thread.
        TimeoutError when no block has become free for too long.
        """
        try:
            devices = NO_DEVICES
            if self.transfer is not None:
                devices, self._copied_from = self.transfer.devices, data
            self.plan.sources.look(places if places is not None else places_of(data), devices)
        except BaseException as error:
            self.fail(error)
            raise
        helper = None
        if helpers is not None and self.plan.nbytes >= TWO_THREADS_NBYTES:
            helper = helpers.submit(self._work, data)
        try:
            self._work(data)
        finally:
            # It may not have begun: the thread may be busy with other memory, and there is nothing left to copy.
            if helper is not None and not helper.cancel():
                helper.exception()  # told in self._error
            self._let_write()
            self._finish()
        if self._error is not None:
            raise self._error

    def stage_unchanged(
        self, data: Sequence[Any], places: tuple[int, ...] | None, check: Callable[[], None]
    ) -> None:
        """As `stage`, while others might change the state: `check` raises if they did.

        It is asked when all is copied and before the writer gets the last block, so nothing torn is ever stored.
        """
        self._check = check
        self.stage(data, places)

    def _work(self, data: Sequence[Any]) -> None:
        number: int | None = None
        try:
            while (number := self._begin()) is not None:
                self._fill(number, data)
        except BaseException as error:
            # The thread that stages raises it; the writer must not wait for what will not come.
            self.fail(error)
            if number is not None:
                self._mark(number)  # some of it may have been queued
                self.give_back(number)

    def _finish(self) -> None:
        """Wait for all that accelerators were given to copy: until then both tensors and blocks are theirs."""
        if self.transfer is not None:
            try:
                self.transfer.finish()
            except BaseException as error:
                # Perhaps an interrupt: the tensors stay held until who discards the snapshot has waited for each block.
                self.fail(error)
                raise
            self._copied_from = ()

    def _mark(self, number: int) -> None:
        devices = self.devices_of(number)
        if self.transfer is not None and devices:
            self._arriving[number] = self.transfer.record(devices)

    def devices_of(self, number: int) -> list[Device]:
        """Accelerators that copy to a block."""
        return [] if self.transfer is None else self.transfer.devices_of(self.plan.blocks[number].leaf)

    def _fill(self, number: int, data: Sequence[Any]) -> None:
        block = self._blocks[number]
        if block is None:
            raise InternalError(f"block {number} was given back before it was staged")
        self.plan.sources.copy(number, data, block, self.transfer)
        if self._check is not None and number == len(self.plan.blocks) - 1:
            self._finish()  # what is still to be copied could still be changed
            self._check()
            self._check = None  # it knows the tensors
        self._mark(number)
        with self._changed:
            self._staged[number] = True
            self._changed.notify_all()
        if self._over:
            self.give_back(number)

    def _begin(self) -> int | None:
        """Memory for the next block, in order: were a later one served first, a writer might wait for ever."""
        with self._order:
            number = self._next
            if number == len(self.plan.blocks) or self._error is not None or self._over:
                return None
            size, pinned = self.plan.blocks[number].size, bool(self.devices_of(number))
            block = None if self._writes else self._memory.take_free(size, pinned=pinned)
            if block is None:
                self._let_write()  # what it has done with is what comes free
                block = self._memory.take(size, timeout_s=self._timeout_s, pinned=pinned)
            with self._changed:
                self._blocks[number] = block
            self._next = number + 1
            return number

    def _let_write(self) -> None:
        if not self._writes:
            with self._changed:
                self._writes = True
                self._changed.notify_all()

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
            block = self._blocks[number] if self._writes and self._staged[number] else None
            if block is None or number in self._arriving:
                block = self._wait(number)
            count = min(nbytes, BLOCK_NBYTES - at)
            found.append(Piece(block.memory[at : at + count], block, at))
            place, nbytes = place + count, nbytes - count
        return found

    def _wait(self, number: int) -> Block:
        with self._changed:
            self._changed.wait_for(lambda: (self._writes and self._staged[number]) or self._error is not None)
            block = self._blocks[number]
            if self._error is not None or block is None:
                raise self._error or InternalError(f"block {number} was asked for after it was given back")
        self._arrive(number)
        return block

    def _arrive(self, number: int) -> None:
        """Return once no accelerator copies to the block any more. If one fails, it stays marked: who knows."""
        for arrival in self._arriving.get(number, ()):
            arrival.wait()
        self._arriving.pop(number, None)

    def give_back(self, number: int) -> None:
        """The writer has done with a block that was staged. Safe to call twice.

        Memory that an accelerator may still copy to is nobody's: it is not given back if the device has failed.
        """
        self._arrive(number)
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


def whole_leaves(structure: Structure) -> tuple[PlannedChunk, ...]:
    """The plan that copies all that the rank holds, for when the real plan is not known yet."""
    return tuple(PlannedChunk(shard=n, box=box) for n, box in enumerate(structure.boxes))
