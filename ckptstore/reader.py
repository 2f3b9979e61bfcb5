"""Read chunks, verify every one, and put their elements where they are wanted.

A chunk that is wanted whole and lies contiguous in its target is read straight into it; others pass
through a buffer of at most one read. Nothing is trusted: a chunk whose digest is wrong is read a second
time, then named. A partial read fetches whole chunks, because checksums are of whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptstore.chunktable import RAW, ChunkTable
from ckptstore.errors import CorruptError, NotFoundError, UnsupportedFormatError
from ckptstore.manifest import SegmentRef
from ckptstore.plan.load import Piece, Read, plan_load
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store
from ckptstore.tensor import Shard, itemsize
from ckptstore.wire import digest_of

READERS = 4
BATCH_NBYTES = 16 << 20
GAP_NBYTES = 64 << 10

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
    plan = plan_load(table, [Shard(spec=leaf.spec, box=leaf.box) for leaf in leaves])
    fill = _Fill(store=store, table=table, leaves=leaves)
    with ThreadPoolExecutor(max_workers=readers, thread_name_prefix="ckptstore-read") as pool:
        futures = [pool.submit(fill.read, read) for read in plan.reads]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    return ReadReport(nbytes_wanted=plan.nbytes_wanted, nbytes_read=plan.nbytes_read)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    store: Store
    table: ChunkTable
    leaves: Sequence[TensorLeaf]

    def read(self, read: Read) -> None:
        direct = [self._in_place(row, pieces) for row, pieces in zip(read.rows, read.pieces, strict=True)]
        chunks = [
            view if view is not None else np.empty(int(self.table.nbytes[row]), np.uint8)
            for row, view in zip(read.rows, direct, strict=True)
        ]
        fetch_chunks(self.store, self.table, read, chunks)
        for view, data, pieces in zip(direct, chunks, read.pieces, strict=True):
            if view is None:
                for piece in pieces:
                    self._scatter(piece, data)

    def _in_place(self, row: int, pieces: Sequence[Piece]) -> Bytes | None:
        """The target's own memory for the chunk, when the whole chunk is one contiguous run of one target."""
        if len(pieces) != 1:
            return None
        leaf, box = self.leaves[pieces[0].target], pieces[0].box
        if box != self.table.box(row) or not box.is_contiguous_in(leaf.box):
            return None
        whole = byte_view_of(leaf.data)
        if whole is None:
            return None
        start = box.start_in(leaf.box) * itemsize(leaf.spec.dtype)
        return whole[start : start + int(self.table.nbytes[row])]

    def _scatter(self, piece: Piece, data: Bytes) -> None:
        leaf, source = self.leaves[piece.target], self.table.box(piece.row)
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
    for row in read.rows:
        if table.codecs[int(table.codec[row])] != RAW:
            raise UnsupportedFormatError(
                f"{table.spec(row).name} is encoded with {table.codecs[int(table.codec[row])]!r}, which this version "
                f"cannot decode: upgrade ckptstore",
                tensor=table.spec(row).name,
            )
    buffers: list[Bytes] = []
    at = read.start
    for row, data in zip(read.rows, chunks, strict=True):
        gap = int(table.start[row]) - at
        if gap:
            buffers.append(np.empty(gap, np.uint8))
        buffers.append(data)
        at += gap + data.nbytes
    tensor = table.spec(read.rows[0]).name
    _read_into(store, read.segment, read.start, buffers, tensor)
    for row, data in zip(read.rows, chunks, strict=True):
        wanted = table.digest[row].tobytes()
        if xxhash.xxh3_128_digest(data.data) == wanted:
            continue
        _read_into(store, read.segment, int(table.start[row]), [data], table.spec(row).name)
        if xxhash.xxh3_128_digest(data.data) != wanted:
            raise CorruptError(
                f"{table.spec(row).name} {table.box(row)} in {read.segment} at byte {int(table.start[row])} has "
                f"digest {xxhash.xxh3_128_hexdigest(data.data)} where {wanted.hex()} was written: the data is damaged, "
                f"use another copy or an older checkpoint",
                segment=read.segment,
                tensor=table.spec(row).name,
            )


def _read_into(store: Store, segment: str, start: int, buffers: Sequence[Bytes], tensor: str) -> None:
    """Fill the buffers; a segment that is gone or too short is damage, named with the tensor that needs it."""
    try:
        store.read_into(segment, start, buffers)
    except (NotFoundError, CorruptError) as error:
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
        reads = [read for read in _all_reads(table) if read.segment not in gone]
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


def _all_reads(table: ChunkTable) -> Iterator[Read]:
    """Every chunk once, in ranges of neighbours."""
    order = np.lexsort((table.start, table.segment))
    rows: list[int] = []
    for row in (int(n) for n in order):
        if rows:
            first, last = rows[0], rows[-1]
            end = int(table.start[row] + table.nbytes[row])
            near = table.segment[row] == table.segment[last] and (
                0 <= int(table.start[row] - table.start[last] - table.nbytes[last]) <= GAP_NBYTES
            )
            if not near or end - int(table.start[first]) > BATCH_NBYTES:
                yield _range(table, rows)
                rows = []
        rows.append(row)
    if rows:
        yield _range(table, rows)


def _range(table: ChunkTable, rows: list[int]) -> Read:
    start = int(table.start[rows[0]])
    end = int(table.start[rows[-1]] + table.nbytes[rows[-1]])
    segment = table.segments[int(table.segment[rows[0]])]
    return Read(segment=segment, start=start, nbytes=end - start, rows=tuple(rows), pieces=((),) * len(rows))


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
            return [Damage(key=read.segment, tensor=table.spec(read.rows[0]).name, problem=str(error))]
        return [
            d for row in read.rows for d in _range_damage(store, table, _range(table, [row]), lambda _: None)
        ]
    finally:
        progress(read.nbytes)
