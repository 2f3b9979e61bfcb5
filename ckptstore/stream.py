"""Write one segment while its chunks are still being staged: blocks go out as they fill, the header last.

A block of staging memory whose bytes lie where the segment wants them is written as it is; everything else is
packed into spare blocks on the way. So a state that changed everywhere is copied once, by the trainer's call, and
one of which half is unchanged costs the copying of what follows a gap.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import BoundedSemaphore
from types import TracebackType
from typing import Final

import numpy as np

from ckptstore.errors import AlreadyExistsError, InternalError, OutcomeUnknownError
from ckptstore.snapshot import Piece
from ckptstore.staging import Block, StagingMemory
from ckptstore.store.base import BLOCK_NBYTES, Store, Upload
from ckptstore.writelog import WriteLog

FINISH_TRIES: Final = 8
SPARE_TIMEOUT_S: Final = 600.0


class SegmentStream:
    """One segment in the making. `append` from one thread; `finish` may run in another; `close` always.

    `under_way` bounds how many blocks of all streams are being written: who appends waits, so that hashing does not
    run ahead of the device and take the trainer's time.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        header_nbytes: int,
        nbytes_max: int,
        memory: StagingMemory,
        writers: Executor,
        under_way: BoundedSemaphore,
        log: WriteLog,
    ) -> None:
        self.key = key
        self.nbytes = header_nbytes  # so far
        self._store = store
        self._memory = memory
        self._writers = writers
        self._under_way = under_way
        self._log = log
        self._upload: Upload = store.upload(key, nbytes_max)
        self._block: Block | None = None
        self._number, self._fill = 0, header_nbytes
        self._first: tuple[Block, int] | None = (
            None  # memory and bytes of block 0, which waits for the header
        )
        self._writes: list[Future[None]] = []
        self._failed: BaseException | None = None

    def append(self, piece: Piece) -> None:
        """The next bytes of the segment; they are not needed any more once their block has no other user."""
        data, at = piece.data, piece.at
        while data.nbytes:
            if self._lies_right(piece.block, at):
                count = data.nbytes
            else:
                count = min(data.nbytes, BLOCK_NBYTES - self._fill)
                block = self._own()
                np.copyto(block.memory[self._fill : self._fill + count], data[:count])
            self._fill += count
            self.nbytes += count
            data, at = data[count:], at + count
            if self._fill == BLOCK_NBYTES:
                self._pass_on()

    def _lies_right(self, block: Block | None, at: int) -> bool:
        """May the piece's own block be written? Takes hold of it if it is the first piece of a block of ours.

        What lies before the piece in its block was passed before it, so the header may take that place.
        """
        if block is None or at != self._fill or (self._block is not None and self._block is not block):
            return False
        if self._block is None:
            self._memory.hold(block)
            self._block = block
        return True

    def _own(self) -> Block:
        """The current block as memory of ours, with what it holds so far."""
        block = self._block
        if block is None or not block.spare:
            own = self._memory.take(BLOCK_NBYTES, timeout_s=SPARE_TIMEOUT_S, spare=True)
            if block is not None:
                np.copyto(own.memory[: self._fill], block.memory[: self._fill])
                self._memory.drop(block)
            self._block = block = own
        return block

    def _pass_on(self) -> None:
        """The current block is complete: write it, but keep the first until the header is known."""
        if self._failed is not None:
            raise self._failed  # the rest of the segment would be hashed for nothing
        block, number, nbytes = self._block, self._number, self._fill
        self._block, self._number, self._fill = None, number + 1, 0
        if block is None:
            return
        if number == 0:
            self._first = block, nbytes
            return
        self._under_way.acquire()
        try:
            self._writes.append(self._writers.submit(self._write, number, block, nbytes))
        except BaseException:
            self._under_way.release()
            self._memory.drop(block)
            raise

    def _write(self, number: int, block: Block, nbytes: int) -> None:
        try:
            with self._log.busy(nbytes):
                self._upload.write(number, block.memory[:nbytes])
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._memory.drop(block)
            self._under_way.release()

    def finish(self, header: bytes) -> None:
        """Make the segment durable under its key. Its last, unfilled block and its first are written here."""
        if self._fill:
            if self._block is None:
                self._own()  # nothing came after the header
            self._pass_on()
        for write in self._writes:
            write.result()
        if self._first is None:
            raise InternalError(f"{self.key} ends without its first block: report this")
        block, nbytes = self._first
        np.copyto(block.memory[: len(header)], np.frombuffer(header, np.uint8))
        with self._log.busy(nbytes):
            self._upload.write(0, block.memory[:nbytes])
            finish_own(self._store, self.key, lambda: self._upload.finish(self.nbytes))
        self._log.note(self._upload.way, self.nbytes)

    def close(self) -> None:
        """Release what is held; what was not finished leaves nothing behind."""
        for write in self._writes:
            write.exception()  # raised by finish, or hidden by the error that ends this stream
        if self._first is not None:
            self._memory.drop(self._first[0])
            self._first = None
        if self._block is not None:
            self._memory.drop(self._block)
            self._block = None
        self._upload.abort()

    def __enter__(self) -> SegmentStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def finish_own(store: Store, key: str, finish: Callable[[], None]) -> None:
    """Create a key that holds a random id of its writer: nobody else wants it, so a lost reply is tried again."""
    for _ in range(FINISH_TRIES):
        try:
            finish()
            return
        except OutcomeUnknownError:
            continue
        except AlreadyExistsError:
            # Only an earlier try of ours can have made it, and objects are made all or nothing.
            store.settle([key])
            return
    raise OutcomeUnknownError(
        f"{key} could not be created in {FINISH_TRIES} tries: try the save again", key=key
    )
