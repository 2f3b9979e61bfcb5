"""An index as three Parquet objects, and back.

The chunk table is lean: a row names its tensor and its segment by number, so that almost all of it is
checksums. The tensors and the segments are tables of their own, which the chunk table's tail names by digest,
as it does each of its row groups: whoever trusts the tail can read any part and prove it
(docs/reference/format-v1.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ckptstore.chunkbase import ChunkBase
from ckptstore.chunktable import ChunkTable, compact_table
from ckptstore.errors import CorruptError
from ckptstore.manifest import AttemptId, Index, Member, ObjectRef, PartRef, SegmentRef, named_key
from ckptstore.soundness import check_table
from ckptstore.tablefile import (
    binary,
    box_columns,
    check_seal,
    chunk_columns,
    chunk_fields,
    codes_of,
    digests,
    grid,
    ints,
    open_table,
    seal,
    spread,
    texts,
)
from ckptstore.tensors import Tensors
from ckptstore.wire import digest_of, ref_from_json, ref_to_json

GROUP_ROWS = 4096
_MAGIC_NBYTES = 4
_TEXTS = ("codec", "base")

ReadObject = Callable[[ObjectRef], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedIndex:
    """The objects of an index: `side` are the tables that `chunks` names, to be made durable before it."""

    side: tuple[tuple[ObjectRef, bytes], ...]
    chunks: bytes
    tail_nbytes: int

    def ref(self, key: str) -> ObjectRef:
        """How an entry names the index: the chunk table, and its tail by a digest of its own."""
        tail = memoryview(self.chunks)[len(self.chunks) - self.tail_nbytes :]
        return ObjectRef(
            key=key,
            nbytes=len(self.chunks),
            digest=digest_of(self.chunks),
            tail=(self.tail_nbytes, digest_of(tail)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHead:
    """What the tail of a chunk table says: `groups` are the rows, first byte, size and digest of each row group."""

    run: str
    id: AttemptId
    parts: tuple[PartRef, ...]
    tensors: ObjectRef
    segments: ObjectRef
    rows: int
    groups: tuple[tuple[int, int, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorRows:
    """The tensor table: rows of tensor n are `bounds[n]` to `bounds[n + 1]` of the chunk table."""

    tensors: Tensors
    bounds: npt.NDArray[np.int64]


def encode_index(index: Index, key: str) -> EncodedIndex:
    """`key` is that of the chunk table; the others are named after it."""
    table = compact_table(index.table)
    same = {"run": index.run, "id": str(index.id)}
    listed = sorted(index.segments, key=lambda ref: ref.key)
    numbers = {ref.key: n for n, ref in enumerate(listed)}
    number = np.array([numbers[name] for name in table.segments] or [0], np.int32)
    stem = key.removesuffix(".parquet")
    tensors = _tensor_table(same, table)
    segments = _segment_table(same, listed)
    side = tuple(
        (ObjectRef(key=f"{stem}.{name}.parquet", nbytes=len(data), digest=digest_of(data)), data)
        for name, data in (("tensors", tensors), ("segments", segments))
    )
    meta = {
        **same,
        "kind": "index",
        "parts": [
            {"role": ref.member.role, "rank": ref.member.rank, **ref_to_json(ref.object)}
            for ref in index.parts
        ],
        "tensors": ref_to_json(side[0][0]),
        "segments": ref_to_json(side[1][0]),
    }
    columns = {
        "tensor": pa.array(table.tensor),
        **box_columns(table),
        "segment": pa.array(number[table.segment]),
        **chunk_columns(table),
    }
    chunks, tail_nbytes = seal(meta, columns, dictionary=_TEXTS, group_rows=GROUP_ROWS)
    return EncodedIndex(side=side, chunks=chunks, tail_nbytes=tail_nbytes)


def _tensor_table(same: dict[str, Any], table: ChunkTable) -> bytes:
    tensors = table.tensors
    counts = np.bincount(table.tensor, minlength=len(tensors))
    columns = {
        "tensor": pa.array(np.arange(len(tensors), dtype=np.int32)),
        "name": pa.array(tensors.names, pa.string()),
        "dtype": pa.DictionaryArray.from_arrays(
            pa.array(tensors.dtype.astype(np.int32)), pa.array(tensors.dtypes or ("",), pa.string())
        ).cast(pa.string()),
        "ndim": pa.array(tensors.ndim),
        **spread("dim", tensors.padded(table.offset.shape[1])),
        "first": pa.array(np.cumsum(counts) - counts),
        "chunks": pa.array(counts),
    }
    data, _ = seal({**same, "kind": "tensors"}, columns, dictionary=("dtype",))
    return data


def _segment_table(same: dict[str, Any], segments: Sequence[SegmentRef]) -> bytes:
    headers = np.frombuffer(b"".join(bytes.fromhex(ref.header) for ref in segments), np.uint8)
    columns = {
        "segment": pa.array(np.arange(len(segments), dtype=np.int32)),
        "key": pa.array([ref.key for ref in segments], pa.string()),
        "nbytes": pa.array(np.array([ref.nbytes for ref in segments], np.int64)),
        "header": digests(headers.reshape(-1, 16)),
    }
    data, _ = seal({**same, "kind": "segments"}, columns)
    return data


def decode_index(data: bytes, what: str, read: ReadObject) -> Index:
    """The whole index, every byte of it proven; `read` gives the bytes of an object that the chunk table names.

    Raises CorruptError or UnsupportedFormatError naming `what`, or the object that `read` gave.
    """
    check_seal(data, what)
    head = decode_head(data, what)
    tensors = decode_tensors(read(head.tensors), head)
    segments = decode_segments(read(head.segments), head)
    numbers = np.repeat(np.arange(len(tensors.tensors), dtype=np.int32), np.diff(tensors.bounds))
    table = decode_rows(data, what, head, range(len(head.groups)), tensors, segments)
    if not np.array_equal(numbers, table.tensor):
        raise CorruptError(f"{what}: its rows are not those that {head.tensors.key} counts", what=what)
    return Index(run=head.run, id=head.id, parts=head.parts, segments=segments, table=table)


def decode_head(data: Any, what: str) -> IndexHead:
    """What a proven tail says. `data` has the size of the object; of its bytes only those of the tail are read."""

    def read(file: pq.ParquetFile, meta: dict[str, Any]) -> IndexHead:
        found, at = [], _MAGIC_NBYTES
        if len(meta["groups"]) != file.metadata.num_row_groups:
            raise CorruptError(f"{what} names other row groups than it has", what=what)
        for n, (digest, nbytes) in enumerate(meta["groups"]):
            found.append((file.metadata.row_group(n).num_rows, at, int(nbytes), str(digest)))
            at += int(nbytes)
        parts = tuple(
            PartRef(member=Member(role=ref["role"], rank=int(ref["rank"])), object=ref_from_json(ref))
            for ref in meta["parts"]
        )
        _check_ranks(parts, what)
        return IndexHead(
            run=str(meta["run"]),
            id=AttemptId.parse(meta["id"]),
            parts=parts,
            tensors=ref_from_json(meta["tensors"]),
            segments=ref_from_json(meta["segments"]),
            rows=int(meta["rows"]),
            groups=tuple(found),
        )

    head: IndexHead = open_table(data, what, "index", read)
    return head


def _check_ranks(parts: Sequence[PartRef], what: str) -> None:
    """Each role has its ranks from 0 up, each once."""
    roles: dict[str, set[int]] = {}
    for ref in parts:
        roles.setdefault(ref.member.role, set()).add(ref.member.rank)
    if sum(map(len, roles.values())) != len(parts) or any(max(r) >= len(r) for r in roles.values()):
        raise CorruptError(f"{what} names the parts of other ranks than a role can have", what=what)


def decode_tensors(data: bytes, head: IndexHead) -> TensorRows:
    what = head.tensors.key

    def read(file: pq.ParquetFile, meta: dict[str, Any]) -> TensorRows:
        _check_same(meta, head, what)
        arrow = file.read(use_threads=False)
        dtypes, dtype = codes_of(arrow.column("dtype"))
        counts = ints(arrow, "chunks")
        if counts.min(initial=0) < 0:
            raise CorruptError(f"{what} counts less than no chunk", what=what)
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        if bounds[-1] != head.rows or not np.array_equal(bounds[:-1], ints(arrow, "first")):
            raise CorruptError(
                f"{what} counts {int(bounds[-1])} chunks where there are {head.rows}", what=what
            )
        return TensorRows(
            tensors=Tensors(
                names=texts(arrow, "name"),
                dtypes=dtypes,
                dtype=dtype.astype(np.int16),
                ndim=ints(arrow, "ndim", np.int8),
                dims=grid(arrow, "dim"),
            ),
            bounds=bounds,
        )

    check_seal(data, what)
    found: TensorRows = open_table(data, what, "tensors", read, texts=("dtype",))
    return found


def decode_segments(data: bytes, head: IndexHead) -> tuple[SegmentRef, ...]:
    what = head.segments.key

    def read(file: pq.ParquetFile, meta: dict[str, Any]) -> tuple[SegmentRef, ...]:
        _check_same(meta, head, what)
        arrow = file.read(use_threads=False)
        headers = binary(arrow.column("header")).tobytes().hex()
        return tuple(
            SegmentRef(key=named_key(key), nbytes=nbytes, header=headers[32 * n : 32 * n + 32])
            for n, (key, nbytes) in enumerate(
                zip(texts(arrow, "key"), ints(arrow, "nbytes").tolist(), strict=True)
            )
        )

    check_seal(data, what)
    found: tuple[SegmentRef, ...] = open_table(data, what, "segments", read)
    return found


def _check_same(meta: dict[str, Any], head: IndexHead, what: str) -> None:
    if meta["run"] != head.run or meta["id"] != str(head.id):
        raise CorruptError(f"{what} is of {meta['id']} of run {meta['run']}, not of {head.id}", what=what)


def decode_rows(
    data: Any,
    what: str,
    head: IndexHead,
    groups: Sequence[int],
    tensors: TensorRows,
    segments: Sequence[SegmentRef],
) -> ChunkTable:
    """The rows of these row groups, each proven. `data` has the size of the object; no other byte but the tail
    is read."""

    def read(file: pq.ParquetFile, meta: dict[str, Any]) -> ChunkTable:
        view = memoryview(data)
        for n in groups:
            _, start, nbytes, digest = head.groups[n]
            if digest_of(view[start : start + nbytes]) != digest:
                raise CorruptError(f"{what}: row group {n} is damaged", what=what)
        arrow = file.read_row_groups(list(groups), use_threads=False)
        return ChunkTable(
            tensors=tensors.tensors,
            tensor=ints(arrow, "tensor", np.int32),
            segments=tuple(ref.key for ref in segments),
            segment=ints(arrow, "segment", np.int32),
            **chunk_fields(arrow),
        )

    table: ChunkTable = open_table(data, what, "index", read, texts=_TEXTS)
    for column, count in ((table.tensor, len(tensors.tensors)), (table.segment, len(segments))):
        if len(table) and not 0 <= int(column.min()) <= int(column.max()) < count:
            raise CorruptError(f"{what} has rows of tensors or segments that it does not list", what=what)
    check_table(table, what)
    listed = {ref.key: ref.nbytes for ref in segments}
    for row, text in enumerate(table.base):
        base = ChunkBase.parse(text) if text else None
        if base is not None and base.start + base.nbytes > listed.get(base.segment, 0):
            raise CorruptError(
                f"{what}: {table.spec(row).name} builds on bytes of {base.segment} that no listed segment has",
                what=what,
                tensor=table.spec(row).name,
            )
    return table
