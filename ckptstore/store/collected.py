"""An upload for stores that take an object in one piece: its blocks are copied and kept until the end.

It holds the whole object in memory, so a store that can write in place has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from ckptstore.errors import InternalError
from ckptstore.store.base import BLOCK_NBYTES, Buffer, Upload, Way, byte_views

IN_ONE_PIECE: Final = Way("whole", "the store takes objects in one piece")


class CollectedUpload:
    """`create` makes the object of its blocks; `note` is called before each block is taken."""

    def __init__(
        self,
        create: Callable[[Sequence[Buffer]], None],
        note: Callable[[], object] = lambda: None,
        *,
        way: Way = IN_ONE_PIECE,
    ) -> None:
        self.way = way
        self._create = create
        self._note = note
        self._lock = threading.Lock()
        self._blocks: dict[int, bytes] = {}

    def write(self, block: int, data: Buffer) -> None:
        self._note()
        value = b"".join(byte_views(data))
        with self._lock:
            self._blocks[block] = value

    def finish(self, nbytes: int) -> None:
        with self._lock:
            blocks = [self._blocks[number] for number in sorted(self._blocks)]
            check_blocks({number: len(block) for number, block in self._blocks.items()}, nbytes)
        self._create(blocks)

    def abort(self) -> None:
        with self._lock:
            self._blocks.clear()


def check_blocks(sizes: dict[int, int], nbytes: int) -> None:
    """InternalError unless the blocks written make an object of `nbytes`: a hole would be stored as zeros."""
    count = -(-nbytes // BLOCK_NBYTES)
    wanted = {n: min(BLOCK_NBYTES, nbytes - n * BLOCK_NBYTES) for n in range(count)}
    if sizes != wanted:
        wrong = sorted(n for n in {*sizes, *wanted} if sizes.get(n) != wanted.get(n))
        raise InternalError(
            f"an upload of {nbytes} bytes ends with blocks {wrong[:5]} missing or of a wrong size: report this"
        )


def _conforms(upload: CollectedUpload) -> Upload:
    return upload  # checked by mypy
