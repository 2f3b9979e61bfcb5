"""Find what is damaged in a checkpoint, by reading all of it: the half of `verify` that compares digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckptstore.chunktable import ChunkTable
from ckptstore.decode import Bytes, check_codecs
from ckptstore.errors import CorruptError, NotFoundError
from ckptstore.fetch import Fetcher
from ckptstore.manifest import SegmentRef
from ckptstore.plan.load import Read, all_reads, reads_of
from ckptstore.reader import in_lanes
from ckptstore.store.base import Store
from ckptstore.wire import digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong with a checkpoint: the object, what is in it, and how it is wrong."""

    key: str
    tensor: str | None
    problem: str


class _Nowhere:
    """Places of chunks that are verified and dropped."""

    def memory(self, ats: Sequence[int]) -> list[Bytes | None]:
        return [None] * len(ats)

    def put(self, at: int, data: Bytes) -> None:
        """Verified: that was all."""


def find_damage(
    store: Store,
    table: ChunkTable,
    segments: Sequence[SegmentRef],
    *,
    lanes: int | None = None,
    memory_budget: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Damage]:
    """Read every chunk and every segment header and compare digests; `progress` is told of bytes done."""
    rows = np.arange(len(table))
    check_codecs(table, rows)
    every = all_reads(table)
    with Fetcher(store, table, every, rows, lanes=lanes, memory_budget=memory_budget) as fetcher:
        with ThreadPoolExecutor(max_workers=fetcher.lanes, thread_name_prefix="ckptstore-verify") as pool:
            headers = [
                damage for damage in pool.map(lambda ref: _header_damage(store, ref), segments) if damage
            ]
        gone = {damage.key for damage in headers if damage.problem == "is missing"}
        reads = [read for read in every if read.segment not in gone]
        found = in_lanes(fetcher, lambda read: _range_damage(fetcher, table, read, progress), reads)
    return headers + [damage for some in found for damage in some]


def _header_damage(store: Store, ref: SegmentRef) -> Damage | None:
    try:
        nbytes = store.size(ref.key)
    except NotFoundError:
        return Damage(key=ref.key, tensor=None, problem="is missing")
    if nbytes != ref.nbytes:
        return Damage(key=ref.key, tensor=None, problem=f"has {nbytes} bytes where {ref.nbytes} were written")
    try:
        prefix = store.read(ref.key, start=0, nbytes=8)
        length = int.from_bytes(prefix, "little")
        header = prefix + store.read(ref.key, start=8, nbytes=min(length, nbytes - 8))
    except CorruptError as error:
        return Damage(key=ref.key, tensor=None, problem=str(error))
    if digest_of(header) != ref.header:
        return Damage(key=ref.key, tensor=None, problem="has a damaged header")
    return None


def _range_damage(
    fetcher: Fetcher, table: ChunkTable, read: Read, progress: Callable[[int], None]
) -> list[Damage]:
    """Damaged chunks of one range: all at once when the range is fine, one by one when it is not."""
    try:
        fetcher.read(read, _Nowhere(), range(len(read.rows)))
        return []
    except CorruptError as error:
        if len(read.rows) == 1:
            return [Damage(key=read.segment, tensor=table.spec(int(read.rows[0])).name, problem=str(error))]
        return [
            found
            for row in read.rows.tolist()
            for one in reads_of(table, [row])
            for found in _range_damage(fetcher, table, one, lambda _: None)
        ]
    finally:
        progress(read.nbytes)
