"""The limits that figures are held against, measured in the same run and on the same state.

A limit has variants (threads, files); the one with the smallest median over the rounds is the limit.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ckptstore.bench import disk
from ckptstore.bench.states import Bytes, State, split
from ckptstore.store.base import Store, open_store

COPY, WRITE, READ, CACHED, PUT, GET = "copy", "write", "read", "cached", "put", "get"
SMALL_NBYTES = 256 << 10  # below this a call for each tensor costs more than its copy
FILES = (1, 2, 4)
REQUESTS = (4, 8)

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


class Client(Protocol):
    """Whoever puts and gets objects: the fastest that is known for a scheme."""

    words: str

    def put(self, key: str, data: bytes) -> None: ...

    def get(self, key: str) -> None: ...


class StoreClient:
    """ckptstore's own store, where no faster client is known."""

    words = "ckptstore's store"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory = bytearray(disk.BLOCK_NBYTES)

    def put(self, key: str, data: bytes) -> None:
        self._store.create(key, data)

    def get(self, key: str) -> None:
        self._store.read_into(key, 0, [self._memory])  # threads may share it: nobody looks


class TensorstoreClient:
    """tensorstore's S3 driver alone, the fastest client found (docs/explanation/performance.md)."""

    words = "tensorstore"

    def __init__(self, url: str) -> None:
        import tensorstore
        from botocore.session import Session

        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        session = Session()
        found, keys = session.create_client("s3").meta, session.get_credentials()
        spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": f"{prefix}/"}
        spec["aws_region"] = found.region_name
        if keys is not None and keys.method == "env":  # otherwise it looks for them everywhere, and says so
            spec["context"] = {"aws_credentials": {"type": "environment"}}
        if ".amazonaws." not in found.endpoint_url:
            spec["endpoint"] = found.endpoint_url
        self._store: Any = tensorstore.KvStore.open(spec).result()

    def put(self, key: str, data: bytes) -> None:
        self._store.write(key, data).result()

    def get(self, key: str) -> None:
        self._store.read(key).result()


def client_of(url: str) -> Client:
    if url.startswith("s3://"):
        return TensorstoreClient(url)
    return StoreClient(open_store(url))


def measure_store(url: str, nbytes: int, *, found: Found) -> None:
    """Put and get objects of 16 MiB below `url`, several at once, as many as `nbytes` need; they are deleted."""
    client, blocks = client_of(url), range(-(-nbytes // disk.BLOCK_NBYTES))
    payload = os.urandom(disk.BLOCK_NBYTES)
    share = nbytes / (len(blocks) * disk.BLOCK_NBYTES)  # the last block counts for what it would hold
    for requests in REQUESTS:
        words = f"{requests} at once, {client.words}"
        with ThreadPoolExecutor(requests) as pool:
            try:
                began = time.perf_counter()
                list(pool.map(lambda n: client.put(str(n), payload), blocks))
                found(PUT, words, (time.perf_counter() - began) * share)
                began = time.perf_counter()
                list(pool.map(lambda n: client.get(str(n)), blocks))
                found(GET, words, (time.perf_counter() - began) * share)
            finally:
                empty(url)


def empty(url: str) -> None:
    """Delete all objects below `url`."""
    store = open_store(url)
    with ThreadPoolExecutor(REQUESTS[-1]) as pool:
        list(pool.map(store.delete, [info.key for info in store.list("")]))
