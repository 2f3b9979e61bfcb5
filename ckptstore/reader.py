"""Read chunks, verify every one, and put their elements where they are wanted.

A chunk that is wanted whole and lies contiguous in its target is read straight into it; others pass
through a buffer of at most one read. Nothing is trusted: a chunk whose digest is wrong is read a second
time, then named. A partial read fetches whole chunks, because checksums are of whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptstore.chunktable import DIGEST_NBYTES, RAW, ChunkTable
from ckptstore.errors import CorruptError, NotFoundError, UnsupportedFormatError
from ckptstore.manifest import SegmentRef
from ckptstore.plan.load import LoadPlan, Pieces, Read, all_reads, plan_load
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store
from ckptstore.tensor import itemsize
from ckptstore.wire import digest_of

READERS = 4

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What a load moved: bytes of the wanted elements, and bytes read to get them."""

    nbytes_wanted: int
    nbytes_read: int


def read_leaves(
    store: Store, table: ChunkTable, leaves: Sequence[TensorLeaf], *, readers: int = READERS
) -> ReadReport:
    """Fill the leaves' tensors in place from the chunks of `table`, each chunk verified.

    Missing tensors, other dtypes or shapes are raised together before any target is touched
    (MissingTensorError, LayoutMismatchError). CorruptError names tensor and segment; some targets are
    then already written, so the state must not be used.
    """
    plan = plan_load(table, leaves)
    fill = Fill.of(store, table, leaves, plan)
    with ThreadPoolExecutor(max_workers=readers, thread_name_prefix="ckptstore-read") as pool:
        futures = [pool.submit(fill.read, read) for read in plan.reads]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    return ReadReport(nbytes_wanted=plan.nbytes_wanted, nbytes_read=plan.nbytes_read)


def _whole(table: ChunkTable, pieces: Pieces) -> npt.NDArray[np.bool_]:
    """Of each row of the plan: does one target alone want it, and want all of it?"""
    at = pieces.bounds[:-1]
    single = np.diff(pieces.bounds) == 1
    return np.asarray(single & (pieces.n[at] == table.shape[pieces.row[at]]).all(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fill:
    """Puts chunks where a load plan wants them. A place is the number of a row of the plan."""

    store: Store
    table: ChunkTable
    leaves: Sequence[TensorLeaf]
    pieces: Pieces
    whole: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, store: Store, table: ChunkTable, leaves: Sequence[TensorLeaf], plan: LoadPlan) -> Fill:
        whole = _whole(table, plan.pieces)
        return cls(store=store, table=table, leaves=leaves, pieces=plan.pieces, whole=whole)

    def read(self, read: Read, places: Sequence[int] = ()) -> None:
        """Fetch a read's chunks and put them in place; `places` are theirs if the read is not the plan's own."""
        places = places or range(read.first, read.first + len(read.rows))
        direct = [self._in_place(at) for at in places]
        sizes = self.table.nbytes[read.rows].tolist()
        chunks = [
            view if view is not None else np.empty(nbytes, np.uint8)
            for nbytes, view in zip(sizes, direct, strict=True)
        ]
        fetch_chunks(self.store, self.table, read, chunks)
        for at, view, data in zip(places, direct, chunks, strict=True):
            if view is None:
                self._scatter_all(at, data)

    def put(self, at: int, data: Bytes) -> None:
        """Put a whole chunk in place that was fetched elsewhere."""
        view = self._in_place(at)
        if view is None:
            self._scatter_all(at, data)
        else:
            np.copyto(view, data)

    def _scatter_all(self, at: int, data: Bytes) -> None:
        for n in range(int(self.pieces.bounds[at]), int(self.pieces.bounds[at + 1])):
            self._scatter(n, data)

    def _in_place(self, at: int) -> Bytes | None:
        """The target's own memory for the chunk, when the whole chunk is one contiguous run of one target."""
        if not self.whole[at]:
            return None
        n = int(self.pieces.bounds[at])
        leaf = self.leaves[int(self.pieces.target[n])]
        box = self.pieces.piece(n, len(leaf.box.shape)).box
        if not box.is_contiguous_in(leaf.box):
            return None
        whole = byte_view_of(leaf.data)
        if whole is None:
            return None
        size = itemsize(leaf.spec.dtype)
        start = box.start_in(leaf.box) * size
        return whole[start : start + box.numel * size]

    def _scatter(self, n: int, data: Bytes) -> None:
        leaf = self.leaves[int(self.pieces.target[n])]
        piece = self.pieces.piece(n, len(leaf.box.shape))
        source = self.table.box(piece.row)
        if isinstance(leaf.data, np.ndarray):
            chunk = data.view(leaf.data.dtype).reshape(source.shape)
            leaf.data[piece.box.relative_to(leaf.box).slices] = chunk[piece.box.relative_to(source).slices]
            return
        from ckptstore.interop.torch_tensor import copy_box_from_bytes

        copy_box_from_bytes(leaf.data, leaf.box, data, source, piece.box)


def byte_view_of(data: Any) -> Bytes | None:
    """The memory of a tensor or array as writable bytes; None where it is not one contiguous run in host memory."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous or not data.flags.writeable:
            return None
        return data.reshape(-1).view(np.uint8) if data.size else np.zeros(0, np.uint8)
    from ckptstore.interop.torch_tensor import byte_view

    return byte_view(data)


def fetch_chunks(store: Store, table: ChunkTable, read: Read, chunks: Sequence[Bytes]) -> None:
    """Read the chunks of one range into the buffers and verify them; a bad one is read once more, then CorruptError."""
    rows = read.rows.tolist()
    _refuse_codecs(table, read)
    buffers: list[Bytes] = []
    at = read.start
    for start, data in zip(table.start[read.rows].tolist(), chunks, strict=True):
        gap = start - at
        if gap:
            buffers.append(np.empty(gap, np.uint8))
        buffers.append(data)
        at += gap + data.nbytes
    _read_into(store, read.segment, read.start, buffers, table, rows[0])
    wanted = table.digest[read.rows].tobytes()
    for n, data in enumerate(chunks):
        digest = wanted[n * DIGEST_NBYTES : (n + 1) * DIGEST_NBYTES]
        if xxhash.xxh3_128_digest(data.data) != digest:
            _read_again(store, table, read.segment, rows[n], data)


def _refuse_codecs(table: ChunkTable, read: Read) -> None:
    unknown = np.array([codec != RAW for codec in table.codecs])[table.codec[read.rows]]
    if unknown.any():
        row = int(read.rows[np.flatnonzero(unknown)[0]])
        raise UnsupportedFormatError(
            f"{table.spec(row).name} is encoded with {table.codecs[int(table.codec[row])]!r}, which this version "
            f"cannot decode: upgrade ckptstore",
            tensor=table.spec(row).name,
        )


def _read_again(store: Store, table: ChunkTable, segment: str, row: int, data: Bytes) -> None:
    """The one more try that a chunk with a wrong digest has."""
    wanted = table.digest[row].tobytes()
    _read_into(store, segment, int(table.start[row]), [data], table, row)
    if xxhash.xxh3_128_digest(data.data) != wanted:
        raise CorruptError(
            f"{table.spec(row).name} {table.box(row)} in {segment} at byte {int(table.start[row])} has "
            f"digest {xxhash.xxh3_128_hexdigest(data.data)} where {wanted.hex()} was written: the data is damaged, "
            f"use another copy or an older checkpoint",
            segment=segment,
            tensor=table.spec(row).name,
        )


def _read_into(
    store: Store, segment: str, start: int, buffers: Sequence[Bytes], table: ChunkTable, row: int
) -> None:
    """Fill the buffers; a segment that is gone or too short is damage, named with `row`'s tensor, which needs it."""
    try:
        store.read_into(segment, start, buffers)
    except (NotFoundError, CorruptError) as error:
        tensor = table.spec(row).name
        how = "is not there" if isinstance(error, NotFoundError) else "was cut"
        raise CorruptError(
            f"segment {segment} {how}, so {tensor} cannot be read ({error}): use another copy or an older checkpoint",
            segment=segment,
            tensor=tensor,
        ) from error


# -- verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong with a checkpoint: the object, what is in it, and how it is wrong."""

    key: str
    tensor: str | None
    problem: str


def find_damage(
    store: Store,
    table: ChunkTable,
    segments: Sequence[SegmentRef],
    *,
    readers: int = READERS,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Damage]:
    """Read every chunk and every segment header and compare digests; `progress` is told of bytes done."""
    with ThreadPoolExecutor(max_workers=readers, thread_name_prefix="ckptstore-verify") as pool:
        headers = list(pool.map(lambda ref: _header_damage(store, ref), segments))
        gone = {damage.key for damage in headers if damage is not None and damage.problem == "is missing"}
        reads = [read for read in all_reads(table) if read.segment not in gone]
        found = list(pool.map(lambda read: _range_damage(store, table, read, progress), reads))
    return [damage for damage in headers if damage is not None] + [
        damage for some in found for damage in some
    ]


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
    store: Store, table: ChunkTable, read: Read, progress: Callable[[int], None]
) -> list[Damage]:
    """Damaged chunks of one range: all at once when the range is fine, one by one when it is not."""
    chunks = [np.empty(int(table.nbytes[row]), np.uint8) for row in read.rows]
    try:
        fetch_chunks(store, table, read, chunks)
        return []
    except CorruptError as error:
        if len(read.rows) == 1:
            return [Damage(key=read.segment, tensor=table.spec(int(read.rows[0])).name, problem=str(error))]
        return [
            found
            for n in range(len(read.rows))
            for one in all_reads(table.take(read.rows[n : n + 1]))
            for found in _range_damage(store, table.take(read.rows[n : n + 1]), one, lambda _: None)
        ]
    finally:
        progress(read.nbytes)
