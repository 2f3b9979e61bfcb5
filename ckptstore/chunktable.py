"""The chunk table: which bytes of which segment hold which box of which tensor.

Columns of numpy, never a million Python objects, because a checkpoint of a large model has a million
chunks. Sorted by (tensor, offset), so that a load plan looks at nothing but the rows it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.tensor import Box, TensorSpec
from ckptstore.tensors import Tensors, merge_tensors

DIGEST_NBYTES = 16  # XXH3-128
RAW = "raw"
DELTAS = frozenset({"xor+zstd", "sparse+zstd"})  # codecs whose chunks have a base

IntColumn = npt.NDArray[np.int64]
ByteColumn = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTable:
    """Columns of chunks, sorted by (tensor, offset); tensor names are `role/name`.

    `offset` and `shape` are boxes in elements, `[rows, max ndim]`, padded with 0 and 1. `start` and
    `nbytes` are bytes within the segment, as stored; `sizes` counts the decoded ones. `digest` is of the decoded
    bytes, `stored_digest` of the stored ones (zeros where they are the same; None if they are so everywhere).
    `reuses` counts the checkpoints in a row that have referenced the chunk, or its base, instead of writing it.
    """

    tensors: Tensors
    segments: tuple[str, ...]
    codecs: tuple[str, ...] = (RAW,)
    tensor: npt.NDArray[np.int32]
    offset: IntColumn
    shape: IntColumn
    segment: npt.NDArray[np.int32]
    start: IntColumn
    nbytes: IntColumn
    digest: ByteColumn
    stored_digest: ByteColumn | None = None
    codec: npt.NDArray[np.int16]
    reuses: npt.NDArray[np.int32]
    base: tuple[str, ...] = field(default=())  # a ChunkBase as text a row, or () when no chunk has a base

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def stored_digests(self) -> ByteColumn:
        """`stored_digest`, zeros for None."""
        if self.stored_digest is not None:
            return self.stored_digest
        return np.zeros((len(self), DIGEST_NBYTES), np.uint8)

    @property
    def encoded(self) -> npt.NDArray[np.bool_]:
        """Of each row: is the chunk stored in another form than its own bytes?"""
        return self.is_encoded(slice(None))

    def is_encoded(self, rows: slice | npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """The same of these rows alone."""
        return np.array([codec != RAW for codec in self.codecs] or [False])[self.codec[rows]]

    @property
    def deltas(self) -> npt.NDArray[np.bool_]:
        """Of each row: is the chunk a difference from a base?"""
        return np.array([codec in DELTAS for codec in self.codecs] or [False])[self.codec]

    @property
    def sizes(self) -> IntColumn:
        """Bytes of each chunk's elements: what decoding gives."""
        return np.asarray(self.shape.prod(axis=1) * self.tensors.itemsizes[self.tensor])

    @property
    def nbytes_saved(self) -> int:
        """By how many bytes the chunks' elements exceed what is stored of them."""
        return int(self.sizes.sum()) - int(self.nbytes.sum())

    def spec(self, row: int) -> TensorSpec:
        return self.tensors[int(self.tensor[row])]

    def box(self, row: int) -> Box:
        """The box of one row, in elements of its global tensor."""
        ndim = len(self.spec(row).shape)
        return Box(
            offset=tuple(int(v) for v in self.offset[row, :ndim]),
            shape=tuple(int(v) for v in self.shape[row, :ndim]),
        )

    def take(self, rows: npt.NDArray[Any]) -> ChunkTable:
        """The table of these rows (indices or mask, in ascending order); names stay as they are."""
        return ChunkTable(
            tensors=self.tensors,
            segments=self.segments,
            codecs=self.codecs,
            tensor=self.tensor[rows],
            offset=self.offset[rows],
            shape=self.shape[rows],
            segment=self.segment[rows],
            start=self.start[rows],
            nbytes=self.nbytes[rows],
            digest=self.digest[rows],
            stored_digest=None if self.stored_digest is None else self.stored_digest[rows],
            codec=self.codec[rows],
            reuses=self.reuses[rows],
            base=tuple(np.asarray(self.base, dtype=object)[rows]) if self.base else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableFrame:
    """What a table of given chunks has whatever is stored of them: names, boxes and the order of rows.

    Made once a plan. `rows[k]` is the row of chunk `k`.
    """

    specs: Sequence[TensorSpec]
    boxes: Sequence[Box]
    tensors: Tensors
    tensor: npt.NDArray[np.int32]
    offset: IntColumn
    shape: IntColumn
    order: npt.NDArray[np.intp]
    rows: Sequence[int]

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], boxes: Sequence[Box]) -> TableFrame:
        tensors = tuple(sorted({s.name: s for s in specs}.values(), key=lambda s: s.name))
        at = {spec.name: n for n, spec in enumerate(tensors)}
        count, depth = len(specs), max((len(s.shape) for s in specs), default=1) or 1
        offset, shape = np.zeros((count, depth), np.int64), np.ones((count, depth), np.int64)
        for n, box in enumerate(boxes):
            offset[n, : len(box.offset)] = box.offset
            shape[n, : len(box.shape)] = box.shape
        tensor = np.array([at[s.name] for s in specs], np.int32)
        order = _order(tensor, offset)
        rows = np.empty(count, np.int64)
        rows[order] = np.arange(count)
        return cls(
            specs=specs,
            boxes=boxes,
            tensors=Tensors.of(tensors),
            tensor=tensor[order],
            offset=offset[order],
            shape=shape[order],
            order=order,
            rows=rows.tolist(),
        )

    def table(
        self,
        *,
        segments: Sequence[str],
        starts: Sequence[int],
        nbytes: Sequence[int],
        digests: Sequence[bytes],
        reuses: Sequence[int],
        codecs: Sequence[str] | None = None,
        stored_digests: Sequence[bytes | None] | None = None,
        bases: Sequence[str] | None = None,
    ) -> ChunkTable:
        """The table of the chunks, given in the frame's order of chunks, sorted as tables are; raw without `codecs`."""
        keys = tuple(sorted(set(segments)))
        where = {key: n for n, key in enumerate(keys)}
        order, count = self.order, len(self.order)
        names = tuple(sorted(set(codecs or ()))) or (RAW,)
        codec = np.array([names.index(name) for name in codecs] if codecs else [0] * count, np.int16)
        stored = [digest or bytes(DIGEST_NBYTES) for digest in stored_digests or ()]
        encoded = any(map(any, stored))
        return ChunkTable(
            tensors=self.tensors,
            segments=keys,
            tensor=self.tensor,
            offset=self.offset,
            shape=self.shape,
            segment=np.array([where[key] for key in segments], np.int32)[order],
            start=np.array(starts, np.int64)[order],
            nbytes=np.array(nbytes, np.int64)[order],
            digest=_digests(digests)[order],
            stored_digest=_digests(stored)[order] if encoded else None,
            codecs=names,
            codec=codec[order],
            reuses=np.array(reuses, np.int32)[order],
            base=tuple([bases[n] for n in order.tolist()]) if bases is not None and any(bases) else (),
        )


def _digests(values: Sequence[bytes]) -> ByteColumn:
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), DIGEST_NBYTES)


def make_table(
    *,
    specs: Sequence[TensorSpec],
    boxes: Sequence[Box],
    segments: Sequence[str],
    starts: Sequence[int],
    nbytes: Sequence[int],
    digests: Sequence[bytes],
    reuses: Sequence[int] | None = None,
    codecs: Sequence[str] | None = None,
    stored_digests: Sequence[bytes | None] | None = None,
    bases: Sequence[str] | None = None,
) -> ChunkTable:
    """A table with one row for each item of the equally long sequences, sorted as tables are; raw without `codecs`."""
    return TableFrame.of(specs, boxes).table(
        segments=segments,
        starts=starts,
        nbytes=nbytes,
        digests=digests,
        reuses=reuses if reuses is not None else [0] * len(specs),
        codecs=codecs,
        stored_digests=stored_digests,
        bases=bases,
    )


def _order(tensor: npt.NDArray[np.int32], offset: IntColumn) -> npt.NDArray[np.intp]:
    keys: list[npt.NDArray[Any]] = [offset[:, dim] for dim in reversed(range(offset.shape[1]))]
    return np.lexsort([*keys, tensor])


def _pad(column: IntColumn, depth: int, fill: int) -> IntColumn:
    missing = depth - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=fill) if missing else column


def merge_tables(tables: Sequence[ChunkTable], owners: Sequence[str] = ()) -> ChunkTable:
    """All rows of `tables` as one table. Two specs for one name: CorruptError naming it, and whose they are.

    `owners` say whose the tables are, one each. The columns of the result are the only arrays of its length
    that are made, one of them at a time besides.
    """
    tensors, numbers = merge_tensors([table.tensors for table in tables], owners)
    segments = tuple(sorted({key for table in tables for key in table.segments}))
    codecs = tuple(dict.fromkeys(codec for table in tables for codec in table.codecs)) or (RAW,)
    depth = max((t.offset.shape[1] for t in tables), default=1)
    where = {key: n for n, key in enumerate(segments)}
    how = {name: n for n, name in enumerate(codecs)}
    tensor = _joined([at[t.tensor] for t, at in zip(tables, numbers, strict=True)], np.int32)
    offset = _joined([_pad(t.offset, depth, 0) for t in tables], np.int64, depth)
    order = _order(tensor, offset)

    def sorted_column(columns: Sequence[npt.NDArray[Any]], dtype: Any, width: int | None = None) -> Any:
        return _joined(columns, dtype, width)[order]

    offset = offset[order]
    encoded = any(t.stored_digest is not None for t in tables)
    base = [b for t in tables for b in (t.base or ("",) * len(t))] if any(t.base for t in tables) else []
    return ChunkTable(
        tensors=tensors,
        segments=segments,
        codecs=codecs,
        tensor=tensor[order],
        offset=offset,
        shape=sorted_column([_pad(t.shape, depth, 1) for t in tables], np.int64, depth),
        segment=sorted_column([_codes(t.segments, where)[t.segment] for t in tables], np.int32),
        start=sorted_column([t.start for t in tables], np.int64),
        nbytes=sorted_column([t.nbytes for t in tables], np.int64),
        digest=sorted_column([t.digest for t in tables], np.uint8, DIGEST_NBYTES),
        stored_digest=sorted_column([t.stored_digests for t in tables], np.uint8, DIGEST_NBYTES)
        if encoded
        else None,
        codec=sorted_column([_codes(t.codecs, how)[t.codec] for t in tables], np.int16),
        reuses=sorted_column([t.reuses for t in tables], np.int32),
        base=tuple(base[n] for n in order.tolist()) if base else (),
    )


def _codes(names: Sequence[str], into: Mapping[str, int]) -> npt.NDArray[np.int64]:
    return np.array([into[name] for name in names] or [0], np.int64)


def _joined(columns: Sequence[npt.NDArray[Any]], dtype: Any, width: int | None = None) -> npt.NDArray[Any]:
    if not columns:
        return np.zeros((0,) if width is None else (0, width), dtype)
    return np.concatenate(columns, dtype=dtype, casting="unsafe")


def compact_table(table: ChunkTable) -> ChunkTable:
    """The same rows with only the names they use, each list sorted: one content, one form."""

    def used(names: Sequence[str], column: npt.NDArray[Any]) -> tuple[list[int], npt.NDArray[np.int64]]:
        counts = np.bincount(column, minlength=len(names))
        kept = sorted(np.flatnonzero(counts).tolist(), key=names.__getitem__)
        place = np.zeros(max(len(names), 1), np.int64)
        place[kept] = np.arange(len(kept))
        return kept, place

    tensors, tensor = used(table.tensors.names, table.tensor)
    segments, segment = used(table.segments, table.segment)
    codecs, codec = used(table.codecs, table.codec)
    whole = tensors == list(range(len(table.tensors)))
    same = segments == list(range(len(table.segments)))
    return ChunkTable(
        tensors=table.tensors if whole else table.tensors.take(np.array(tensors, np.int64)),
        segments=table.segments if same else tuple(table.segments[n] for n in segments),
        codecs=tuple(table.codecs[n] for n in codecs) or (RAW,),
        tensor=table.tensor if whole else tensor[table.tensor].astype(np.int32),
        offset=table.offset,
        shape=table.shape,
        segment=table.segment if same else segment[table.segment].astype(np.int32),
        start=table.start,
        nbytes=table.nbytes,
        digest=table.digest,
        stored_digest=table.stored_digest,
        codec=codec[table.codec].astype(np.int16),
        reuses=table.reuses,
        base=table.base if any(table.base) else (),
    )
