"""Fetch the chunks of ranges, verify every one, and hand each to its place: reading overlaps the rest.

Each thread (a lane) reads a block, verifies it, puts it in place and reads the next; while one verifies, the
others read, so the device is never idle and no queue is needed. A block read past the page cache costs one copy
into the target; bytes that are in memory already go straight into it, in windows that are hashed while they are
near. Memory is leased from one budget. Figures: docs/explanation/performance.md.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ckptstore.budget import ByteBudget, Lease
from ckptstore.chunktable import DIGEST_NBYTES, ChunkTable
from ckptstore.decode import Decode, Decoder, decoded_nbytes, working_nbytes
from ckptstore.errors import BudgetExceededError, CorruptError, NotFoundError
from ckptstore.plan.load import Ints, Read
from ckptstore.store.base import BLOCK_NBYTES, Store
from ckptstore.store.direct import aligned
from ckptstore.store.download import DOWNLOAD_ALIGN, Download, Downloads, block_room, open_download
from ckptstore.tensor import itemsize

DIRECT_LANES = 3  # two keep the device busy while one verifies
RANGE_LANES = 4
MEMORY_BUDGET_NBYTES = 256 * 2**20

_BLOCK_NBYTES = BLOCK_NBYTES + 2 * DOWNLOAD_ALIGN  # a block that begins and ends anywhere
_BLOCK_NBYTES_MIN = 2 * DOWNLOAD_ALIGN
_ELEMENT_ALIGN = 16  # the largest element

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Places(Protocol):
    """Where decoded chunks go. A place is a number that the caller gives a chunk. For several threads at once."""

    def memory(self, ats: Sequence[int]) -> list[Bytes | None]:
        """The targets' own memory for each whole chunk; None for one that is to be `put`."""

    def put(self, at: int, data: Bytes) -> None:
        """Take a whole verified chunk, aligned to its elements. `data` may be reused on return."""


class Fetcher:
    """Fetches chunks of `table` from several threads at once, at most `lanes`. Use it in a `with`.

    `reads` are those that will be asked for, and `through` the rows of theirs that have no memory of their own to
    be read into. `memory_budget` (None: MEMORY_BUDGET_NBYTES, more if one chunk needs more) bounds the blocks and
    the scratch memory of chunks that are larger than a block or encoded. BudgetExceededError if it is too small
    for one of them.
    """

    def __init__(
        self,
        store: Store,
        table: ChunkTable,
        reads: Sequence[Read],
        through: Ints,
        *,
        lanes: int | None = None,
        memory_budget: int | None = None,
        block_nbytes: int = _BLOCK_NBYTES,
        decode: Decode | None = None,
    ) -> None:
        self._store, self._table, self._decode = store, table, decode or Decoder(store.read_into)
        lanes = lanes or (DIRECT_LANES if isinstance(store, Downloads) else RANGE_LANES)
        largest = max((block_room(read.start, read.nbytes) for read in reads), default=0)
        block_nbytes = max(min(block_nbytes, largest), _BLOCK_NBYTES_MIN)
        encoded = [read.rows[table.is_encoded(read.rows)] for read in reads] if table.encoded.any() else []
        scratch = int(self._scratch_nbytes(np.concatenate([through, *encoded])).max(initial=0))
        if memory_budget is None:
            memory_budget = max(MEMORY_BUDGET_NBYTES, scratch + block_nbytes)
        left = (memory_budget - scratch) // DOWNLOAD_ALIGN * DOWNLOAD_ALIGN
        if left < _BLOCK_NBYTES_MIN:
            raise BudgetExceededError(
                f"reading needs {scratch + _BLOCK_NBYTES_MIN} bytes at once, {scratch} of them for one chunk, more "
                f"than the memory budget of {memory_budget}: raise the budget",
                wanted_nbytes=scratch + _BLOCK_NBYTES_MIN,
                budget_nbytes=memory_budget,
            )
        self.budget = ByteBudget(memory_budget)
        self.lanes = max(1, min(lanes, left // block_nbytes))
        self._block_nbytes = min(block_nbytes, left)
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._leases: list[Lease] = []

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._free.clear()
            for lease in self._leases:
                lease.release()

    def read(self, read: Read, places: Places, ats: Sequence[int]) -> None:
        """Fetch the read's chunks, whose places are `ats`. CorruptError names tensor and segment."""
        chunks = _Chunks(self._table, read, ats)
        chunks.check_sizes()
        work = _Work(self, chunks, places)
        try:
            with open_download(self._store, read.segment) as download:
                window = download.window(read.start, read.nbytes)
                if window is not None and chunks.end_to_end and all(each is not None for each in work.memory):
                    work.straight(download, window)
                else:
                    work.through_blocks(download, window)
        except (NotFoundError, CorruptError) as error:
            if "tensor" in error.values:
                raise
            raise _named(error, self._table, read.segment, chunks.rows[0]) from error

    @contextlib.contextmanager
    def block(self) -> Iterator[memoryview]:
        """Aligned memory for one read, for one thread."""
        with self._lock:
            block = self._free.pop() if self._free else None
        if block is None:
            lease = self.budget.lease(self._block_nbytes)
            with self._lock:
                self._leases.append(lease)
            block = aligned(self._block_nbytes).data
        try:
            yield block
        finally:
            with self._lock:
                self._free.append(block)

    @contextlib.contextmanager
    def scratch(self, nbytes: int, *, beside: int = 0) -> Iterator[Bytes]:
        """Memory for one chunk; `beside` bytes are leased for whoever works on it."""
        with self.budget.lease(nbytes + beside):
            yield aligned(nbytes)

    def read_again(self, segment: str, row: int, into: Bytes, wanted: bytes) -> None:
        """The one more try that a chunk with a wrong digest has."""
        table, start = self._table, int(self._table.start[row])
        try:
            self._store.read_into(segment, start, [into])
        except (NotFoundError, CorruptError) as error:
            raise _named(error, table, segment, row) from error
        if xxhash.xxh3_128_digest(into.data) != wanted:
            raise CorruptError(
                f"{table.spec(row).name} {table.box(row)} in {segment} at byte {start} has digest "
                f"{xxhash.xxh3_128_hexdigest(into.data)} where {wanted.hex()} was written: the data is damaged, "
                f"use another copy or an older checkpoint",
                segment=segment,
                tensor=table.spec(row).name,
            )

    def decode(self, row: int, stored: memoryview, out: Bytes) -> None:
        """Fill `out` with the chunk's own bytes, and verify them too."""
        self._decode(self._table, row, stored, out)
        wanted = self._table.digest[row].tobytes()
        if xxhash.xxh3_128_digest(out.data) != wanted:
            spec, segment = self._table.spec(row), self._table.segments[int(self._table.segment[row])]
            raise CorruptError(
                f"{spec.name} {self._table.box(row)} in {segment} decodes to bytes with digest "
                f"{xxhash.xxh3_128_hexdigest(out.data)} where {wanted.hex()} was saved: use an older checkpoint",
                segment=segment,
                tensor=spec.name,
            )

    def _scratch_nbytes(self, rows: Ints) -> Ints:
        """At most so much is leased at once for each chunk: stored and decoded bytes, and what decoding takes."""
        table = self._table
        more = decoded_nbytes(table, rows) + working_nbytes(table, rows) + _ELEMENT_ALIGN
        return np.asarray(table.nbytes[rows] + np.where(table.is_encoded(rows), more, 0))

    @property
    def block_nbytes(self) -> int:
        return self._block_nbytes


class _Chunks:
    """The chunks of one read as columns of plain Python values, which loops are fast over."""

    def __init__(self, table: ChunkTable, read: Read, ats: Sequence[int]) -> None:
        self.table, self.segment, self.ats = table, read.segment, ats
        self.rows: list[int] = read.rows.tolist()
        self.starts: list[int] = table.start[read.rows].tolist()
        self.sizes: list[int] = table.nbytes[read.rows].tolist()
        self.decoded: list[int] = decoded_nbytes(table, read.rows).tolist()
        self.working: list[int] = working_nbytes(table, read.rows).tolist()
        self.raw: list[bool] = (~table.is_encoded(read.rows)).tolist()
        digests = table.digest[read.rows].tobytes()
        if not all(self.raw):
            own = np.array(self.raw)[:, None]
            digests = np.where(own, table.digest[read.rows], table.stored_digests[read.rows]).tobytes()
        self.wanted = [digests[n : n + DIGEST_NBYTES] for n in range(0, len(digests), DIGEST_NBYTES)]
        self.ends = list(accumulate(map(operator.add, self.starts, self.sizes), max))
        self.end_to_end = sum(self.sizes) == read.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    def check_sizes(self) -> None:
        if self.sizes == self.decoded:
            return
        for row, size, decoded, raw in zip(self.rows, self.sizes, self.decoded, self.raw, strict=True):
            if raw and size != decoded:
                raise CorruptError(
                    f"{self.table.spec(row).name} {self.table.box(row)} has {decoded} bytes and is said to be stored "
                    f"in {size}: the chunk table is damaged, use another copy or an older checkpoint",
                    segment=self.segment,
                    tensor=self.table.spec(row).name,
                )

    def is_misaligned(self, k: int) -> bool:
        """Would the chunk's elements lie across their own size, in a block that lies as the segment does?"""
        start = self.starts[k]
        return bool(start % _ELEMENT_ALIGN and start % itemsize(self.table.spec(self.rows[k]).dtype))

    def group(self, first: int, limit: int) -> int:
        """From chunk `first` on, at least that: the end of the chunks that lie before byte `limit`."""
        return max(bisect_right(self.ends, limit, first), first + 1)


class _Work:
    """One read under way in one thread."""

    def __init__(self, fetcher: Fetcher, chunks: _Chunks, places: Places) -> None:
        self.fetcher, self.chunks, self.places = fetcher, chunks, places
        self.memory = places.memory(chunks.ats)
        if not all(chunks.raw):  # an encoded chunk cannot be read into its target
            self.memory = [each if raw else None for each, raw in zip(self.memory, chunks.raw, strict=True)]

    def straight(self, download: Download, window: int) -> None:
        """Into the targets' own memory: every chunk has some, and nothing lies between them."""
        chunks, memory, n = self.chunks, self.memory, 0
        digest, wanted = xxhash.xxh3_128_digest, chunks.wanted
        while n < len(chunks):
            if chunks.sizes[n] > window:
                self._large(download, n, window)
                n += 1
                continue
            last = chunks.group(n, chunks.starts[n] + window)
            targets: list[Any] = memory[n:last]
            if not all(chunks.sizes[n:last]):
                targets = [each for each in targets if each.size]
            if targets:
                download.read_into(chunks.starts[n], targets)
            for k in range(n, last):
                into: Any = memory[k]
                if digest(into) != wanted[k]:
                    self._read_again(k, into)
            n = last

    def through_blocks(self, download: Download, window: int | None) -> None:
        """Into a block, and from there to the targets."""
        chunks, n = self.chunks, 0
        digest, wanted = xxhash.xxh3_128_digest, chunks.wanted
        limit = min(self.fetcher.block_nbytes, window or self.fetcher.block_nbytes)
        with self.fetcher.block() as block:
            while n < len(chunks):
                if block_room(chunks.starts[n], chunks.sizes[n]) > self.fetcher.block_nbytes:
                    self._large(download, n, window, block)
                    n += 1
                    continue
                start = chunks.starts[n]
                last = chunks.group(n, start - start % DOWNLOAD_ALIGN + limit)
                # Of one alone its own end: in a damaged table a chunk may lie within an earlier one.
                end = chunks.ends[last - 1] if last > n + 1 else start + chunks.sizes[n]
                data = self._block(download, start, end - start, block, window)
                for k in range(n, last):
                    at = chunks.starts[k] - start
                    part: Any = data[at : at + chunks.sizes[k]]
                    if digest(part) != wanted[k]:
                        self._read_again(k, part)
                    memory = self.memory[k]
                    if memory is not None:
                        np.copyto(memory, part)
                    else:
                        self._place(k, part)
                n = last

    def _block(
        self, download: Download, start: int, nbytes: int, block: memoryview, window: int | None
    ) -> Bytes:
        if not nbytes:
            return np.empty(0, np.uint8)
        if window is None:
            return np.frombuffer(download.read_block(start, nbytes, block), np.uint8)
        at = start % DOWNLOAD_ALIGN  # elements stay aligned
        found = block[at : at + nbytes]
        download.read_into(start, [found])
        return np.frombuffer(found, np.uint8)

    def _read_again(self, k: int, into: Bytes) -> None:
        self.fetcher.read_again(self.chunks.segment, self.chunks.rows[k], into, self.chunks.wanted[k])

    def _place(self, k: int, stored: Bytes) -> None:
        at = self.chunks.ats[k]
        if not self.chunks.raw[k]:
            self._place_decoded(k, stored)
        elif self.chunks.is_misaligned(k):
            with self.fetcher.scratch(stored.size) as copy:
                np.copyto(copy, stored)
                self.places.put(at, copy)
        else:
            self.places.put(at, stored)

    def _place_decoded(self, k: int, stored: Bytes) -> None:
        row, at = self.chunks.rows[k], self.chunks.ats[k]
        memory, decoded, working = self.places.memory([at])[0], self.chunks.decoded[k], self.chunks.working[k]
        with self.fetcher.scratch(0 if memory is not None else decoded, beside=working) as out:
            self.fetcher.decode(row, stored.data, out if memory is None else memory)
            if memory is None:
                self.places.put(at, out)

    def _large(self, download: Download, k: int, window: int | None, block: memoryview | None = None) -> None:
        """A chunk that is hashed in pieces, while other threads read."""
        memory, size = self.memory[k], self.chunks.sizes[k]
        if memory is not None:
            self._in_pieces(download, k, memory, window, block)
            return
        row, at, decoded = self.chunks.rows[k], self.chunks.ats[k], self.chunks.decoded[k]
        own = None if self.chunks.raw[k] else self.places.memory([at])[0]
        extra = 0 if self.chunks.raw[k] or own is not None else decoded
        # One lease for all, so that no two threads wait for each other's second one.
        room = -(-size // _ELEMENT_ALIGN) * _ELEMENT_ALIGN + extra
        with self.fetcher.scratch(room, beside=self.chunks.working[k]) as scratch:
            stored = scratch[:size]
            self._in_pieces(download, k, stored, window, block)
            if self.chunks.raw[k]:
                self.places.put(at, stored)
            else:
                out = own if own is not None else scratch[scratch.size - decoded :]
                self.fetcher.decode(row, stored.data, out)
                if own is None:
                    self.places.put(at, out)

    def _in_pieces(
        self, download: Download, k: int, into: Bytes, window: int | None, block: memoryview | None
    ) -> None:
        start, size = self.chunks.starts[k], self.chunks.sizes[k]
        digest, at = xxhash.xxh3_128(), 0
        while at < size:
            if window is None and block is not None:
                nbytes = min(size - at, block.nbytes - (start + at) % DOWNLOAD_ALIGN)
                data = self._block(download, start + at, nbytes, block, None)
                digest.update(data.data)
                np.copyto(into[at : at + nbytes], data)
            else:
                nbytes = min(size - at, window or size)
                piece: Any = into[at : at + nbytes]
                download.read_into(start + at, [piece])
                digest.update(piece)
            at += nbytes
        if digest.digest() != self.chunks.wanted[k]:
            self.fetcher.read_again(self.chunks.segment, self.chunks.rows[k], into, self.chunks.wanted[k])


def _named(error: NotFoundError | CorruptError, table: ChunkTable, segment: str, row: int) -> CorruptError:
    """A segment that is gone or too short is damage, named with `row`'s tensor, which needs it."""
    tensor = table.spec(row).name
    how = "is not there" if isinstance(error, NotFoundError) else "was cut"
    return CorruptError(
        f"segment {segment} {how}, so {tensor} cannot be read ({error}): use another copy or an older checkpoint",
        segment=segment,
        tensor=tensor,
    )
