"""Files as fast as the machine moves them: direct I/O in blocks of 16 MiB, and reads from the page cache.

Nothing here is part of a checkpoint: it is what a save and a load are held against.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptstore.bench.states import Bytes

BLOCK_NBYTES = 16 << 20
PAGE_NBYTES = 4096


def has_direct(folder: Path) -> bool:
    """Can files in `folder` be written past the page cache?"""
    path = folder / "direct"
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _each(count: int, work: Callable[[int], None]) -> float:
    """Seconds until all of `work(0)` … `work(count - 1)`, a thread each, are done."""
    if count == 1:
        began = time.perf_counter()
        work(0)
        return time.perf_counter() - began
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda _: None, range(count)))  # threads start outside of the measurement
        began = time.perf_counter()
        list(pool.map(work, range(count)))
        return time.perf_counter() - began


def _shares(memory: Bytes, count: int) -> list[Bytes]:
    each = -(-memory.nbytes // count // PAGE_NBYTES) * PAGE_NBYTES
    return [memory[n * each : (n + 1) * each] for n in range(count)]


def write_s(folder: Path, memory: Bytes, *, files: int, direct: bool) -> float:
    """Seconds to write `memory` to `files` new files, a thread each, durable at the end.

    They are named after their number; the length of `memory` is a multiple of 4 KiB.
    """
    shares = _shares(memory, files)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)

    def write(n: int) -> None:
        fd = os.open(folder / str(n), flags, 0o600)
        try:
            for at in range(0, shares[n].nbytes, BLOCK_NBYTES):
                block = shares[n].data[at : at + BLOCK_NBYTES]
                if os.pwrite(fd, block, at) != block.nbytes:
                    raise OSError(f"{folder / str(n)}: a write was cut short")
            os.fdatasync(fd)
        finally:
            os.close(fd)

    return _each(files, write)


def read_s(folder: Path, memory: Bytes, *, files: int, threads: int, direct: bool) -> float:
    """Seconds to read the `files` files that `write_s` made into `memory`."""
    shares = _shares(memory, files)
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)

    def read(thread: int) -> None:
        for n in range(thread, files, threads):
            fd = os.open(folder / str(n), flags)
            try:
                for at in range(0, shares[n].nbytes, BLOCK_NBYTES):
                    block = shares[n].data[at : at + BLOCK_NBYTES]
                    if os.preadv(fd, [block], at) != block.nbytes:
                        raise OSError(f"{folder / str(n)}: a read was cut short")
            finally:
                os.close(fd)

    return _each(threads, read)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def nbytes_in(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in files_in(folder))


def make_durable(folder: Path) -> None:
    """fsync of all files and folders below `folder`: what a library left to its user."""
    for path in (*files_in(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_cache(paths: Sequence[Path]) -> None:
    """Take files out of the page cache, so that the next read meets the disk. They must be durable."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill_cache(paths: Sequence[Path]) -> None:
    """Read files through the page cache, so that the next read meets it."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK_NBYTES):
                pass
