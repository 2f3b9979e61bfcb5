"""One object being read range by range, by whichever way is fastest for each range.

It stands apart from the Store Protocol because only a store that knows two ways (past a cache, or out of it) has
something to choose; every other store is read through `read_into`, as here, and needs to do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, runtime_checkable

from ckptstore.store.base import BLOCK_NBYTES, Store

DOWNLOAD_ALIGN: Final = 4096
"""A block begins at a multiple of this address and is as many bytes, or a multiple."""


class Download(Protocol):
    """An object that is open for reading. For one thread at a time; errors are those of `Store.read_into`."""

    def window(self, start: int, nbytes: int) -> int | None:
        """How the range is best read: None by `read_block`, else by `read_into` with about so many bytes a call."""

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fill all targets, which are not empty, in order with the bytes from `start` on."""

    def read_block(self, start: int, nbytes: int, block: memoryview) -> memoryview:
        """The range, somewhere within `block`, whose other bytes then hold anything.

        The block has room for the bytes from the last multiple of DOWNLOAD_ALIGN before `start` on.
        """


@runtime_checkable
class Downloads(Protocol):
    """What a store may offer besides."""

    def download(self, key: str) -> AbstractContextManager[Download]:
        """Raises NotFoundError, here or when bytes are read."""


@contextlib.contextmanager
def open_download(store: Store, key: str) -> Iterator[Download]:
    """The store's own way to read an object, or ranges of it through `read_into`."""
    if isinstance(store, Downloads):
        with store.download(key) as own:
            yield own
    else:
        yield _Ranges(store, key)


def block_room(start: int, nbytes: int) -> int:
    """Bytes of the smallest block into which `read_block` can read the range."""
    return -(-(start % DOWNLOAD_ALIGN + nbytes) // DOWNLOAD_ALIGN) * DOWNLOAD_ALIGN


class _Ranges:
    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    def window(self, start: int, nbytes: int) -> int | None:
        return BLOCK_NBYTES

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        self._store.read_into(self._key, start, targets)

    def read_block(self, start: int, nbytes: int, block: memoryview) -> memoryview:
        at = start % DOWNLOAD_ALIGN  # as it would lie after a direct read: elements stay aligned
        found = block[at : at + nbytes]
        if nbytes:
            self._store.read_into(self._key, start, [found])
        return found


def _conforms(ranges: _Ranges) -> Download:
    return ranges  # checked by mypy
