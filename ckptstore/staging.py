"""Host memory for snapshots on their way to a store: blocks, touched once, used again and again, never too many.

A fresh page costs seven times its copy, so nothing is given back to the system between saves. A limit holds
for all of it; whoever wants more waits until a writer has done with a block. Why blocks, and not a region a
snapshot: docs/explanation/performance.md.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore import hostmemory
from ckptstore.errors import InvalidInputError
from ckptstore.store.base import BLOCK_NBYTES
from ckptstore.store.direct import aligned

SPARE_BLOCKS: Final = 4  # for a writer that must repack: it never waits for memory that waits for it
# A chunk lies in three blocks at most and is passed on as a whole; a segment's first block is kept to its end.
LIMIT_NBYTES_MIN: Final = (SPARE_BLOCKS + 4) * BLOCK_NBYTES
_PAGE: Final = 4096
_SMALL: Final = 64 * 1024


@dataclass(slots=True, eq=False)
class Block:
    """Memory of at most BLOCK_NBYTES, aligned for direct I/O, in the hands of `users`; at none it is free."""

    memory: npt.NDArray[np.uint8]
    spare: bool = False
    users: int = 1
    torch: Any = None  # the same memory as a torch tensor, made when first wanted

    @property
    def nbytes(self) -> int:
        return int(self.memory.nbytes)


@dataclass(slots=True, eq=False)
class _Counts:
    allocations: int = 0
    nbytes: int = 0
    nbytes_used: int = 0
    nbytes_most: int = 0
    by_kind: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})


class StagingMemory:
    """Blocks for one member's snapshots, at most `limit_nbytes` in all. Thread-safe."""

    def __init__(self, limit_nbytes: int) -> None:
        if limit_nbytes < LIMIT_NBYTES_MIN:
            raise InvalidInputError(
                f"a memory budget of {limit_nbytes} bytes is too small to write by blocks: give at least "
                f"{LIMIT_NBYTES_MIN}",
                memory_budget=limit_nbytes,
            )
        self.limit_nbytes = limit_nbytes
        self._changed = threading.Condition()
        self._free: list[Block] = []
        self._counts = _Counts()

    @property
    def nbytes(self) -> int:
        """Bytes held now, free blocks included."""
        return self._counts.nbytes

    @property
    def nbytes_most(self) -> int:
        """The most bytes that were ever held."""
        return self._counts.nbytes_most

    @property
    def allocations(self) -> int:
        """How often memory was taken from the system."""
        return self._counts.allocations

    def take(self, nbytes: int, *, timeout_s: float, spare: bool = False) -> Block:
        """A block of at least `nbytes`, at most BLOCK_NBYTES, whose content is anything.

        Waits until one is free within the limit; TimeoutError after `timeout_s`. `spare` blocks are there for writers
        even when snapshots hold all others.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                block = self._find(nbytes, spare)
                if block is not None:
                    return block
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(
                        f"no staging memory after {timeout_s:g} s: {self._counts.nbytes_used} of "
                        f"{self.limit_nbytes} bytes are in use; the store may hang, or raise memory_budget="
                    )

    def _find(self, nbytes: int, spare: bool) -> Block | None:
        counts = self._counts
        most = SPARE_BLOCKS * BLOCK_NBYTES if spare else self.limit_nbytes - SPARE_BLOCKS * BLOCK_NBYTES
        size = _size(nbytes)
        if counts.by_kind[spare] + size > most:
            return None
        fitting = [block for block in self._free if size <= block.nbytes <= max(4 * size, _SMALL)]
        if fitting:
            block = min(fitting, key=lambda each: each.nbytes)
            if counts.by_kind[spare] + block.nbytes > most:
                return None
            self._free.remove(block)
        else:
            if counts.nbytes_used and counts.nbytes >= LIMIT_NBYTES_MIN and not hostmemory.is_left(size):
                return None  # a block that comes back is better than a process that is killed
            while self._free and counts.nbytes + size > self.limit_nbytes:
                counts.nbytes -= self._free.pop(0).nbytes  # of a size that nobody wants now
            block = self._made(size)
        block.spare, block.users = spare, 1
        counts.by_kind[spare] += block.nbytes
        counts.nbytes_used += block.nbytes
        return block

    def _made(self, size: int) -> Block:
        memory, counts = aligned(size), self._counts
        memory[::_PAGE] = 0
        counts.allocations += 1
        counts.nbytes += size
        counts.nbytes_most = max(counts.nbytes_most, counts.nbytes)
        return Block(memory)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have free blocks of these sizes as far as the limit and the machine allow; none of them is handed out.

        So the first save of a structure pays for its memory, and no later one does, however fast it is written.
        """
        with self._changed:
            wanted = Counter(_size(nbytes) for nbytes in sizes)
            wanted.subtract(Counter(block.nbytes for block in self._free))
            room = self.limit_nbytes - SPARE_BLOCKS * BLOCK_NBYTES
            for size in sorted(wanted.elements(), reverse=True):
                if self._counts.nbytes + size > room or not hostmemory.is_left(size):
                    break
                self._free.append(self._made(size))
            self._changed.notify_all()

    def hold(self, block: Block) -> None:
        """One more user of a block that somebody holds."""
        with self._changed:
            block.users += 1

    def drop(self, block: Block) -> None:
        """One user less; the last one makes it free."""
        with self._changed:
            block.users -= 1
            if not block.users:
                self._counts.by_kind[block.spare] -= block.nbytes
                self._counts.nbytes_used -= block.nbytes
                self._free.append(block)
                self._changed.notify_all()

    def clear(self) -> None:
        """Give the free blocks back to the system."""
        with self._changed:
            self._counts.nbytes -= sum(block.nbytes for block in self._free)
            self._free.clear()


def _size(nbytes: int) -> int:
    """Sizes of blocks are few, so that a state of about the same size finds the memory of the last."""
    if nbytes > BLOCK_NBYTES // 4:
        return BLOCK_NBYTES
    return max(_SMALL, 1 << (nbytes - 1).bit_length())
