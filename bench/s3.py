"""Segments put to and got from S3 (a SeaweedFS server on loopback, one process) beside tensorstore alone.

tensorstore's driver is the fastest client found for large objects (docs/explanation/performance.md). Both do eight
objects side by side, in turn, with new keys each time; the figures are ratios of medians. The server takes most of
the CPU, so they rank what the clients add, not S3.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.rows import Row
from ckptstore.store.base import BLOCK_NBYTES, Store, open_store
from tests.seaweed import Seaweed

OBJECTS = 8
SIZES_MIB = {16: 5, 64: 3}  # MiB of an object, and how often
AT_MOST = 1.15


def rows() -> Iterator[Row]:
    """The rows of the table, as each is measured."""
    with tempfile.TemporaryDirectory() as folder:
        server = Seaweed(Path(folder))
        try:
            server.start()
            server.make_bucket("bench")
            os.environ.update(server.environment)
            for mib, times in SIZES_MIB.items():
                yield from _compare(server, mib << 20, times)
        finally:
            server.kill()


def _compare(server: Seaweed, nbytes: int, times: int) -> Iterator[Row]:
    store, raw = open_store("s3://bench/ours"), _raw(server)
    rng = np.random.default_rng(0)
    segments = [rng.bytes(nbytes) for _ in range(OBJECTS)]
    targets = [bytearray(nbytes) for _ in range(OBJECTS)]
    taken: dict[str, list[float]] = {}
    with ThreadPoolExecutor(OBJECTS) as pool:
        for turn in range(times + 1):
            keys = [f"{nbytes}-{turn}-{number}" for number in range(OBJECTS)]
            acts: dict[str, Callable[[], object]] = {
                "put ours": partial(_all, pool, store.create, keys, segments),
                "put raw": partial(_wait, raw.write, keys, segments),
                "put by blocks": partial(
                    _all, pool, partial(_upload, store), [f"{k}-up" for k in keys], segments
                ),
                "get ours": partial(_all, pool, store.read_into, keys, [0] * OBJECTS, [[t] for t in targets]),
                "get raw": partial(_wait, raw.read, keys),
            }
            for name, act in acts.items():
                start = time.perf_counter()
                act()
                if turn:  # the first one makes connections
                    taken.setdefault(name, []).append(time.perf_counter() - start)
            if [bytes(target) for target in targets] != segments:
                raise ValueError("what was read is not what was written")
            _all(pool, store.delete, [*keys, *(f"{key}-up" for key in keys)])
    store.close()
    medians = {name: statistics.median(each) for name, each in taken.items()}
    gigabytes = OBJECTS * nbytes / 1e9
    for name, verb in (("put ours", "put"), ("put by blocks", "put"), ("get ours", "get")):
        ours, theirs = gigabytes / medians[name], gigabytes / medians[f"{verb} raw"]
        yield Row(
            what=f"S3, {name.replace(' ours', '')} {OBJECTS} × {nbytes >> 20} MiB, over tensorstore alone",
            value=medians[name] / medians[f"{verb} raw"],
            unit="×",
            at_most=AT_MOST,
            note=f"{ours:.2f} GB/s, alone {theirs:.2f}",
        )


def _raw(server: Seaweed) -> Any:
    import tensorstore

    spec = {
        "driver": "s3",
        "bucket": "bench",
        "path": "raw/",
        "endpoint": server.endpoint,
        "aws_region": "us-east-1",
        "context": {"aws_credentials": {"type": "environment"}},
    }
    return tensorstore.KvStore.open(spec).result()


def _all(pool: ThreadPoolExecutor, act: Callable[..., object], *arguments: Sequence[Any]) -> None:
    list(pool.map(act, *arguments))


def _upload(store: Store, key: str, data: bytes) -> None:
    upload, view = store.upload(key, len(data)), memoryview(data)
    for block in reversed(range(-(-len(data) // BLOCK_NBYTES))):
        upload.write(block, view[block * BLOCK_NBYTES : (block + 1) * BLOCK_NBYTES])
    upload.finish(len(data))


def _wait(start: Callable[..., Any], *arguments: Sequence[Any]) -> None:
    """All begun before one is waited for; what was read is taken as bytes, which copies it."""
    for future in list(map(start, *arguments)):
        _ = getattr(future.result(), "value", None)
