"""The limits that figures are held against, measured in the same run and on the same state.

A limit has variants (threads, files); the one with the smallest median over the rounds is the limit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ckptstore.bench import disk
from ckptstore.bench.states import Bytes, State, split
from ckptstore.store.base import Store

COPY, WRITE, READ, CACHED, PUT, GET = "copy", "write", "read", "cached", "put", "get"
SMALL_NBYTES = 256 << 10  # below this a call for each tensor costs more than its copy
FILES = (1, 2, 4)
REQUESTS = (1, 4, 8)

Found = Callable[[str, str, float], None]  # limit, variant, seconds


class CopyLimit:
    """Copies a state's tensors end to end into memory that is used again, with one thread or two.

    Large tensors are copied one by one, small ones a block of 16 MiB at once: the fastest ways found.
    """

    def __init__(self, state: State, memory: Bytes) -> None:
        sources = state.bytes_of()
        self._calls = {
            ways: [
                _copies(sources[part], memory, sum(s.nbytes for s in sources[: part.start]))
                for part in split([source.nbytes for source in sources], ways)
            ]
            for ways in (1, 2)
        }
        self._pool = ThreadPoolExecutor(2)

    def seconds(self, threads: int) -> float:
        began = time.perf_counter()
        if threads == 1:
            _run(self._calls[1][0])
        else:
            list(self._pool.map(_run, self._calls[threads]))
        return time.perf_counter() - began

    def close(self) -> None:
        self._pool.shutdown()


def _run(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _copies(sources: Sequence[Bytes], memory: Bytes, at: int) -> list[Callable[[], object]]:
    """Calls that copy `sources` to memory[at:], each releasing the interpreter's lock."""
    import torch

    calls: list[Callable[[], object]] = []
    small: list[torch.Tensor] = []
    waiting = 0  # bytes of `small`

    def flush() -> None:
        nonlocal small, waiting, at
        if small:
            batch, out = small, torch.from_numpy(memory[at : at + waiting])
            calls.append(lambda: torch.cat(batch, out=out))
            at, small, waiting = at + waiting, [], 0

    for source in sources:
        if source.nbytes < SMALL_NBYTES:
            small.append(torch.from_numpy(source))
            waiting += source.nbytes
            if waiting >= disk.BLOCK_NBYTES:
                flush()
            continue
        flush()
        calls.append(functools.partial(np.copyto, memory[at : at + source.nbytes], source))
        at += source.nbytes
    flush()
    return calls


def measure_copy(copy: CopyLimit, found: Found) -> None:
    for threads in (1, 2):
        found(COPY, f"{threads} thread{'s' * (threads > 1)}", copy.seconds(threads))


def measure_disk(folder: Path, memory: Bytes, *, direct: bool, found: Found) -> None:
    """Write, read cold and read warm, in `folder`, which is left empty. `memory` holds what is written."""
    how = "direct" if direct else "buffered"
    try:
        for files in FILES:
            words = f"{files} file{'s' * (files > 1)}, {how}"
            found(WRITE, words, disk.write_s(folder, memory, files=files, direct=direct))
            paths = [folder / str(n) for n in range(files)]
            disk.drop_cache(paths)
            found(READ, words, disk.read_s(folder, memory, files=files, threads=files, direct=direct))
        disk.read_s(folder, memory, files=FILES[-1], threads=1, direct=False)  # fills the page cache
        for threads in (1, 2):
            took = disk.read_s(folder, memory, files=FILES[-1], threads=threads, direct=False)
            found(CACHED, f"{threads} thread{'s' * (threads > 1)}", took)
    finally:
        for n in range(FILES[-1]):
            (folder / str(n)).unlink(missing_ok=True)


def measure_store(store: Store, memory: Bytes, *, found: Found) -> None:
    """Put and get objects of 16 MiB, several at once; they are deleted."""
    blocks = [memory[at : at + disk.BLOCK_NBYTES] for at in range(0, memory.nbytes, disk.BLOCK_NBYTES)]
    numbers = range(len(blocks))
    for requests in REQUESTS:
        words = f"{requests} at once"
        with ThreadPoolExecutor(requests) as pool:
            try:
                began = time.perf_counter()
                list(pool.map(lambda n: store.create(f"limit/{n}", blocks[n]), numbers))
                found(PUT, words, time.perf_counter() - began)
                began = time.perf_counter()
                list(pool.map(lambda n: store.read_into(f"limit/{n}", 0, [blocks[n]]), numbers))
                found(GET, words, time.perf_counter() - began)
            finally:
                list(pool.map(lambda n: store.delete(f"limit/{n}"), numbers))
