"""A file read past the page cache where its bytes are not in it, and out of the cache where they are.

Direct reads in large aligned blocks run at the speed of the device, where buffered ones took up to six times as
long in bad moments; but bytes that are in memory already must not be fetched from the disk again. So each range
is looked up in the cache first (mincore(2), a few pages of it). Figures: docs/explanation/performance.md.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from ckptstore.store import file
from ckptstore.store.base import BLOCK_NBYTES, check_range
from ckptstore.store.direct import ALIGN

CACHED_WINDOW_NBYTES: Final = 2 * 2**20  # with smaller ones lanes wait for the interpreter too often
DIRECT_NBYTES_MIN: Final = 256 * 2**10  # a shorter read gains nothing from it
_SAMPLES: Final = 16
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Refusals:
    """File systems, by device number, that refused direct reads: asked once each, then read through the cache."""

    def __init__(self) -> None:
        self._devices: set[int] = set()  # adding to a set is atomic, and adding twice is fine

    def note(self, device: int) -> None:
        self._devices.add(device)

    def __contains__(self, device: int) -> bool:
        return device in self._devices


class FileDownload:
    """The open file `fd` at `path`, read as a Download; raises OSError, and CorruptError where it is too short."""

    def __init__(self, fd: int, path: str, *, key: str, url: str, refusals: Refusals) -> None:
        self._fd = fd
        self._path = path
        self._key = key
        self._url = url
        self._refusals = refusals
        self._found = os.fstat(fd)
        self._direct = -1

    def window(self, start: int, nbytes: int) -> int | None:
        if self._is_cached(start, nbytes):
            return CACHED_WINDOW_NBYTES
        if nbytes < DIRECT_NBYTES_MIN or self._found.st_dev in self._refusals or not hasattr(os, "O_DIRECT"):
            return BLOCK_NBYTES
        return None

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        wanted = self._check(start, sum(target.nbytes for target in targets))
        self._check_read(start, file.read_into(self._fd, start, targets), wanted)

    def read_block(self, start: int, nbytes: int, block: memoryview) -> memoryview:
        self._check(start, nbytes)
        before = start % ALIGN
        found = block[before : before + nbytes]
        done = self._read_direct(start - before, before + nbytes, block) - before
        if done < nbytes:  # refused, or cut since it was opened: the file itself says which
            done = max(done, 0)
            done += file.read_into(self._fd, start + done, [found[done:]])
        self._check_read(start, done, nbytes)
        return found

    def close(self) -> None:
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)

    def _check(self, start: int, nbytes: int) -> int:
        return check_range(self._url, self._key, self._found.st_size, start, nbytes)

    def _check_read(self, start: int, done: int, wanted: int) -> None:
        if done < wanted:  # truncated since it was opened
            check_range(self._url, self._key, start + done, start, wanted)

    def _read_direct(self, start: int, nbytes: int, block: memoryview) -> int:
        """Bytes read from `start`, a multiple of ALIGN; fewer than `nbytes` at the end, or when they are refused."""
        done, whole = 0, -(-nbytes // ALIGN) * ALIGN
        try:
            if self._direct < 0:
                self._direct = file.open_direct(self._path)
            while done < nbytes:
                got = os.preadv(self._direct, [block[done:whole]], start + done)
                done += got
                if got == 0 or done % ALIGN:  # where the file ends, or where no direct read can go on
                    break
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._refusals.note(self._found.st_dev)
        return min(done, nbytes)

    def _is_cached(self, start: int, nbytes: int) -> bool:
        """Whether some pages of the range, spread over it, are all in the page cache. False where nobody can tell."""
        if not nbytes or not self._may_ask():
            return False
        granularity = mmap.ALLOCATIONGRANULARITY
        low = start // granularity * granularity
        try:
            region = mmap.mmap(self._fd, start + nbytes - low, prot=mmap.PROT_READ, offset=low)
        except (OSError, ValueError):  # no mapping here, or the file ends before the range
            return False
        with region:
            pages = np.frombuffer(region, np.uint8)
            first, step = pages.ctypes.data, max((start + nbytes - 1 - low) // _SAMPLES, mmap.PAGESIZE)
            del pages  # or the region could not be closed
            places = (*range(start - low, start + nbytes - low, step), start + nbytes - 1 - low)
            return all(_is_page_cached(first + at // mmap.PAGESIZE * mmap.PAGESIZE) for at in places)

    def _may_ask(self) -> bool:
        """To others than its owner and its writers the kernel calls every page of a file cached."""
        return self._found.st_uid == os.geteuid() or os.access(self._path, os.W_OK)


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _is_page_cached(address: int) -> bool:
    answer = (ctypes.c_ubyte * 1)()
    asked = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), answer)
    return asked == 0 and bool(answer[0] & 1)
