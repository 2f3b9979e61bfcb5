"""Host memory for snapshots on their way to a store: blocks, touched once, used again and again, never too many.

A fresh page costs seven times its copy, so nothing is given back to the system between saves. A limit holds
for all of it; whoever wants more waits until a writer has done with a block. Why blocks, and not a region a
snapshot: docs/explanation/performance.md.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
    torch: Any = None  # the same memory as a torch tensor of words, made when first wanted
    pinned: bool = False  # an accelerator copies into it by itself

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
    """Blocks for one member's snapshots, at most `limit_nbytes` in all. Thread-safe.

    `pin` makes pinned memory, as a torch tensor of words, for who asks for it; None if there is none, and then
    it is not asked again.
    """

    def __init__(self, limit_nbytes: int, *, pin: Callable[[int], Any] | None = None) -> None:
        if limit_nbytes < LIMIT_NBYTES_MIN:
            raise InvalidInputError(
                f"a memory budget of {limit_nbytes} bytes is too small to write by blocks: give at least "
                f"{LIMIT_NBYTES_MIN}",
                memory_budget=limit_nbytes,
            )
        self.limit_nbytes = limit_nbytes
        self._pin = pin
        self._changed = threading.Condition()
        self._free: list[Block] = []
        self._held: Counter[tuple[int, bool]] = Counter()  # blocks, free or not, by size and whether pinned
        self._reserves = True
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

    def take(self, nbytes: int, *, timeout_s: float, spare: bool = False, pinned: bool = False) -> Block:
        """A block of at least `nbytes`, at most BLOCK_NBYTES, whose content is anything.

        Waits until one is free within the limit; TimeoutError after `timeout_s`. `spare` blocks are there for writers
        even when snapshots hold all others. `pinned` is a wish: look at the block.
        """
        deadline, size = time.monotonic() + timeout_s, _size(nbytes)
        with self._changed:
            pinned = pinned and self._pin is not None
            while True:
                block = self._reuse(size, spare, pinned)
                if block is not None:
                    return block
                if self._may_grow(size, spare):
                    self._use(size, spare)
                    self._grow(size, pinned)
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(
                        f"no staging memory after {timeout_s:g} s: {self._counts.nbytes_used} of "
                        f"{self.limit_nbytes} bytes are in use; the store may hang, or raise memory_budget="
                    )
        try:
            return self._make(size, spare=spare, pinned=pinned)
        except BaseException:  # no memory, or an interrupt: the bytes are not held after all
            with self._changed:
                self._use(-size, spare)
                self._grow(-size, pinned)
            raise

    def take_free(self, nbytes: int, *, pinned: bool = False) -> Block | None:
        """As `take`, at once: None where memory would have to be waited for, or taken from the system."""
        with self._changed:
            return self._reuse(_size(nbytes), False, pinned)

    def _make(self, size: int, *, spare: bool = False, users: int = 1, pinned: bool = False) -> Block:
        pin = self._pin if pinned else None
        words = None if pin is None else pin(size)
        if words is not None:
            return Block(words.numpy().view(np.uint8), spare=spare, users=users, torch=words, pinned=True)
        block = Block(_touched(size), spare=spare, users=users)
        if pinned:
            with self._changed:
                self._pin = None
                self._held.update({(size, False): 1, (size, True): -1})
        return block

    def reserve(self, sizes: Sequence[int], pinned_sizes: Sequence[int] = ()) -> None:
        """Hold blocks of these sizes, used ones included, as far as the limit and the machine allow.

        For a thread beside the trainer's: new memory is touched here, so that no later save of the structure takes
        any, however fast it is staged. Ends early after `stop_reserving`.
        """
        with self._changed:
            pins = self._pin is not None
            wanted = Counter((_size(nbytes), False) for nbytes in sizes)
            wanted.update((_size(nbytes), pins) for nbytes in pinned_sizes)
            wanted.subtract(self._held)  # those in use come back
        for size, pinned in sorted(wanted.elements(), reverse=True):
            with self._changed:
                room = self.limit_nbytes - SPARE_BLOCKS * BLOCK_NBYTES
                if not self._reserves or self._counts.nbytes + size > room or not hostmemory.is_left(size):
                    return
                self._grow(size, pinned)
            try:
                block = self._make(size, users=0, pinned=pinned)
            except (MemoryError, OSError):  # the system has no more: then saves wait for the writer
                with self._changed:
                    self._grow(-size, pinned)
                return
            with self._changed:
                self._free.append(block)
                self._changed.notify_all()

    # -- with the lock held

    def _most(self, spare: bool) -> int:
        return SPARE_BLOCKS * BLOCK_NBYTES if spare else self.limit_nbytes - SPARE_BLOCKS * BLOCK_NBYTES

    def _reuse(self, size: int, spare: bool, pinned: bool) -> Block | None:
        """The smallest free block that is not much too large, if its kind may have so much.

        Where pinned memory is wanted and there is none free, a new block is better while the limit has room for it.
        """
        room = self._most(spare) - self._counts.by_kind[spare]
        fitting = [b for b in self._free if size <= b.nbytes <= min(max(4 * size, _SMALL), room)]
        if not fitting:
            return None
        block = min(fitting, key=lambda each: (each.pinned is not pinned, each.nbytes))
        if pinned and not block.pinned and self._pin is not None and self._has_room(size, spare):
            return None
        self._free.remove(block)
        block.spare, block.users = spare, 1
        self._use(block.nbytes, spare)
        return block

    def _has_room(self, size: int, spare: bool) -> bool:
        counts = self._counts
        within = counts.nbytes + size <= self.limit_nbytes and hostmemory.is_left(size)
        return within and counts.by_kind[spare] + size <= self._most(spare)

    def _may_grow(self, size: int, spare: bool) -> bool:
        counts = self._counts
        if counts.by_kind[spare] + size > self._most(spare):
            return False
        if counts.nbytes_used and counts.nbytes >= LIMIT_NBYTES_MIN and not hostmemory.is_left(size):
            return False  # a block that comes back is better than a process that is killed
        while self._free and counts.nbytes + size > self.limit_nbytes:
            self._shed(self._free.pop(0))  # of a size that nobody wants now
        return counts.nbytes + size <= self.limit_nbytes

    def _use(self, nbytes: int, spare: bool) -> None:
        self._counts.by_kind[spare] += nbytes
        self._counts.nbytes_used += nbytes
        if nbytes < 0:
            self._changed.notify_all()

    def _shed(self, block: Block) -> None:
        self._grow(-block.nbytes, block.pinned)

    def _grow(self, nbytes: int, pinned: bool) -> None:
        counts = self._counts
        self._held[abs(nbytes), pinned] += 1 if nbytes > 0 else -1
        counts.allocations += nbytes > 0
        counts.nbytes += nbytes
        counts.nbytes_most = max(counts.nbytes_most, counts.nbytes)

    # -- what is handed out

    def hold(self, block: Block) -> None:
        """One more user of a block that somebody holds."""
        with self._changed:
            block.users += 1

    def drop(self, block: Block) -> None:
        """One user less; the last one makes it free."""
        with self._changed:
            block.users -= 1
            if not block.users:
                self._free.append(block)
                self._use(-block.nbytes, block.spare)

    def stop_reserving(self) -> None:
        """No more saves will come."""
        self._reserves = False

    def close(self) -> None:
        """Give the free blocks back to the system, and reserve no more."""
        self.stop_reserving()
        with self._changed:
            while self._free:
                self._shed(self._free.pop())


def _touched(size: int) -> npt.NDArray[np.uint8]:
    memory = aligned(size)
    memory[::_PAGE] = 0
    return memory


def _size(nbytes: int) -> int:
    """Sizes of blocks are few, so that a state of about the same size finds the memory of the last."""
    if nbytes > BLOCK_NBYTES // 4:
        return BLOCK_NBYTES
    return max(_SMALL, 1 << (nbytes - 1).bit_length())
