"""Files written past the page cache: large aligned blocks, by several threads, at the speed of the device.

Direct writes cost a tenth of the processor time of buffered ones and leave the cache to the trainer
(docs/explanation/performance.md). Where the file system refuses them, the same calls go through the cache,
with write-back started block by block. It stands apart as the one place that knows of alignment.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

ALIGN: Final = 4096  # of memory, offsets and lengths: no device asks for more
_SYNC_FILE_RANGE_WRITE: Final = 2
# EFAULT: memory that an accelerator's driver has pinned may be none that the kernel can give to a disk.
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory for direct I/O, not yet touched, in huge pages where the kernel grants them."""
    # Private: the kernel grants no huge pages to shared memory, and Python's default is shared.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    region = mmap.mmap(-1, max(-(-nbytes // ALIGN) * ALIGN, ALIGN), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)[:nbytes]


class DirectFile:
    """A new file of at most `nbytes_max` bytes whose blocks are written at their places in any order.

    `direct` says whether writes pass the page cache by; it turns False when the file system refuses one, and `reason`
    then says why.
    """

    def __init__(self, path: str, nbytes_max: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.direct = hasattr(os, "O_DIRECT")
        self.reason = None if self.direct else "the operating system has no direct I/O"
        self._lock = threading.Lock()
        try:
            self._fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            # The refused open may have made the file; it is ours, since a name like it is never used twice.
            self.direct = False
            self.reason = f"the file system opens no file for direct I/O: {error.strerror}"
            self._fd = os.open(path, flags & ~os.O_EXCL, 0o666)
        self.nbytes_max = nbytes_max
        try:
            self._allocate(nbytes_max)
        except BaseException:
            self.close()
            raise

    def _allocate(self, nbytes: int) -> None:
        """Room for all that may come, so that threads write without waiting for each other; best effort.

        What comes may be less, so a lack of room is no error yet, and the last free bytes are left to others.
        """
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        free = os.fstatvfs(self._fd)
        if call is None or not nbytes or nbytes > free.f_bavail * free.f_frsize:
            return  # posix_fallocate would write zeros where the file system has no such call
        if call(self._fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
            os.ftruncate(self._fd, 0)

    def write(self, start: int, data: memoryview) -> None:
        """Write `data` at byte `start`, which is a multiple of ALIGN. Its last bytes may be no whole ALIGN."""
        whole = data.nbytes // ALIGN * ALIGN
        if whole:
            self._write_all(start, self._at_aligned_address(data[:whole]))
        if whole < data.nbytes:
            tail = aligned(ALIGN)
            tail[: data.nbytes - whole] = np.frombuffer(data[whole:], np.uint8)
            self._write_all(start + whole, tail.data)  # `finish` cuts what is too much

    def _at_aligned_address(self, data: memoryview) -> memoryview:
        source = np.frombuffer(data, np.uint8)
        if not self.direct or source.ctypes.data % ALIGN == 0:
            return data
        copy = aligned(source.nbytes)
        np.copyto(copy, source)
        return copy.data

    def _write_all(self, start: int, data: memoryview) -> None:
        first = start
        while data.nbytes:
            try:
                done = os.pwritev(self._fd, [data], start)
            except OSError as error:
                if error.errno not in _REFUSED or not self.direct:
                    raise
                self._go_buffered(f"the file system refused a direct write: {error.strerror}")
                continue
            if not done:
                raise OSError(errno.EIO, "the file system took no bytes and gave no error")
            start, data = start + done, data[done:]
            if self.direct and start % ALIGN:
                # a short count that no direct write can go on from
                self._go_buffered("a direct write ended between aligned blocks")
        if not self.direct:
            _start_write_back(self._fd, first, start - first)

    def _go_buffered(self, reason: str) -> None:
        with self._lock:
            if self.direct:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.direct, self.reason = False, reason

    def finish(self, nbytes: int) -> None:
        """Cut the file to `nbytes` and make it durable."""
        os.ftruncate(self._fd, nbytes)
        os.fsync(self._fd)

    def close(self) -> None:
        """Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _start_write_back(fd: int, start: int, nbytes: int) -> None:
    """Ask for write-back now, so that the last fsync waits for little; where it cannot be asked, fsync does all."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
