"""Read the tensors of a checkpoint into their targets, every chunk verified.

Nothing is trusted: a chunk whose digest is wrong is read a second time, then named. A partial read fetches
whole chunks, because checksums are of whole chunks. How bytes are read, and how fast: ckptstore/fetch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ckptstore.chunkbase import nbytes_of_bases
from ckptstore.chunktable import ChunkTable
from ckptstore.decode import Bytes, check_codecs
from ckptstore.fetch import Fetcher
from ckptstore.fill import Fill
from ckptstore.plan.load import Ints, LoadPlan, Read, plan_load
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What a load moved, and the most memory it took besides the targets' own.

    `nbytes_wanted` are of the wanted elements, `nbytes_read` were read to get them.
    """

    nbytes_wanted: int
    nbytes_read: int
    nbytes_leased: int = 0


def read_leaves(
    store: Store,
    table: ChunkTable,
    leaves: Sequence[TensorLeaf],
    *,
    lanes: int | None = None,
    memory_budget: int | None = None,
) -> ReadReport:
    """Fill the leaves' tensors in place from the chunks of `table`, each chunk verified.

    Missing tensors, other dtypes or shapes are raised together before any target is touched
    (MissingTensorError, LayoutMismatchError), and so is a `memory_budget` that one chunk exceeds
    (BudgetExceededError). CorruptError names tensor and segment; some targets are then already written, so the
    state must not be used.
    """
    plan = plan_load(table, leaves)
    check_codecs(table, plan.rows)
    fill = Fill.of(table, leaves, plan)
    with Fetcher(
        store, table, plan.reads, fill.without_memory, lanes=lanes, memory_budget=memory_budget
    ) as fetcher:
        fetch_plan(fetcher, plan, fill)
        return ReadReport(
            nbytes_wanted=plan.nbytes_wanted,
            nbytes_read=plan.nbytes_read + nbytes_of_bases(table, plan.rows),
            nbytes_leased=fetcher.budget.high_water,
        )


def fetch_plan(fetcher: Fetcher, plan: LoadPlan, fill: Fill) -> None:
    """All reads of the plan, in order, in the fetcher's lanes; the first error ends it."""

    def one(read: Read) -> None:
        fetcher.read(read, fill, range(read.first, read.first + len(read.rows)))

    in_lanes(fetcher, one, plan.reads)


def in_lanes(fetcher: Fetcher, call: Callable[[Read], T], reads: Iterable[Read]) -> list[T]:
    """What `call` gives for each read, in order; after an error no further one is begun."""
    reads = list(reads)
    if len(reads) == 1:  # most loads of one value: no thread for it
        return [call(reads[0])]
    with ThreadPoolExecutor(max_workers=fetcher.lanes, thread_name_prefix="ckptstore-read") as pool:
        futures: list[Future[T]] = [pool.submit(call, read) for read in reads]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


class Buffers:
    """Places that are buffers: place n is `chunks[n]`."""

    def __init__(self, chunks: Sequence[Bytes]) -> None:
        self._chunks = chunks

    def memory(self, ats: Sequence[int]) -> list[Bytes | None]:
        return [self._chunks[at] for at in ats]

    def put(self, at: int, data: Bytes) -> None:
        np.copyto(self._chunks[at], data)


def fetch_chunks(store: Store, table: ChunkTable, read: Read, chunks: Sequence[Bytes]) -> None:
    """Fill the buffers with the chunks of one range, verified; a bad one is read once more, then CorruptError."""
    check_codecs(table, read.rows)
    encoded: Ints = read.rows[table.is_encoded(read.rows)]
    with Fetcher(store, table, [read], encoded, lanes=1) as fetcher:
        fetcher.read(read, Buffers(chunks), range(len(read.rows)))
