"""An index on the store: written whole, read whole, or only as far as a load plan needs it.

One rank of a thousand wants a thousandth of the rows. It reads the tail of the chunk table, which the journal
names by digest; the two tables that the tail names; and the row groups that hold its tensors, which the tail
names as well. So every byte that is used is proven, and no other is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import ChunkTable
from ckptstore.errors import CorruptError, NotFoundError
from ckptstore.indexfile import (
    IndexHead,
    TensorRows,
    decode_head,
    decode_index,
    decode_rows,
    decode_segments,
    decode_tensors,
    encode_index,
)
from ckptstore.journal import new_id
from ckptstore.manifest import AttemptId, Index, ObjectRef, PartRef, SegmentRef, index_key
from ckptstore.store.base import Store
from ckptstore.wire import digest_of
from ckptstore.writer import create_own

Bytes = npt.NDArray[np.uint8]


def write_index(store: Store, index: Index) -> ObjectRef:
    """Durable on return, and nobody else's: its keys hold a fresh id. Gives how an entry names it."""
    key = index_key(index.id, new_id())
    encoded = encode_index(index, key)
    for ref, data in encoded.side:
        create_own(store, ref.key, data)
    create_own(store, key, encoded.chunks)
    return encoded.ref(key)


def read_index(store: Store, ref: ObjectRef) -> Index:
    """All of the index that an entry names, each digest checked. CorruptError (also when it is gone) names it."""
    return decode_index(read_object(store, ref), ref.key, lambda side: read_object(store, side))


def read_object(store: Store, ref: ObjectRef) -> bytes:
    """The bytes of an object that another names, its digest checked. CorruptError (also when it is gone)."""
    try:
        data = store.read(ref.key)
    except NotFoundError as error:
        raise _gone(store, ref, error) from error
    if len(data) != ref.nbytes or digest_of(data) != ref.digest:
        raise CorruptError(
            f"{ref.key} has {len(data)} bytes with digest {digest_of(data)} where {ref.nbytes} and {ref.digest} were "
            f"named: it is damaged, use an older checkpoint",
            key=ref.key,
        )
    return data


def _gone(store: Store, ref: ObjectRef, error: NotFoundError) -> CorruptError:
    return CorruptError(
        f"{ref.key} is named by the journal but is not on {store.url}: the checkpoint is damaged, use an older one",
        key=ref.key,
    )


def open_index(store: Store, ref: ObjectRef) -> OpenIndex:
    """Read and prove the tail of an index, its tensors and its segments, but no row. CorruptError."""
    if ref.tail is None:
        return OpenIndex.of(read_index(store, ref))
    try:
        buffer = np.zeros(ref.nbytes, np.uint8)  # memory is taken only where something is read
    except (MemoryError, ValueError) as error:
        raise CorruptError(
            f"{ref.key} cannot have the {ref.nbytes} bytes that the journal names: it is damaged, use an older "
            f"checkpoint",
            key=ref.key,
        ) from error
    _read_span(store, ref, buffer, ref.nbytes - ref.tail[0], [ref.tail])
    head = decode_head(buffer, ref.key)
    rows = decode_tensors(read_object(store, head.tensors), head)
    segments = decode_segments(read_object(store, head.segments), head)
    return OpenIndex(
        id=head.id,
        parts=head.parts,
        segments=segments,
        rows=rows,
        source=_Source(store=store, ref=ref, head=head, buffer=buffer),
        whole=None,
    )


def _read_span(
    store: Store, ref: ObjectRef, buffer: Bytes, start: int, pieces: Sequence[tuple[int, str]]
) -> None:
    """Fill the buffer from byte `start` with pieces end to end, each of a size and a digest.

    As with chunks, what is wrong is read once more before anybody believes it; then CorruptError.
    """
    stop = start + sum(nbytes for nbytes, _ in pieces)
    if not 0 <= start < stop <= ref.nbytes:
        raise CorruptError(f"{ref.key}: bytes {start} to {stop} cannot be: it is damaged", key=ref.key)
    for _ in range(2):
        try:
            store.read_into(ref.key, start, [buffer[start:stop]])
        except NotFoundError as error:
            raise _gone(store, ref, error) from error
        at, bad = start, (-1, 0)
        for nbytes, digest in pieces:
            if digest_of(buffer[at : at + nbytes].data) != digest:
                bad = (at, nbytes)
            at += nbytes
        if bad[0] < 0:
            return
    raise CorruptError(
        f"{bad[1]} bytes of {ref.key} from byte {bad[0]} are not those that the journal and the tail name: it is "
        f"damaged, use an older checkpoint",
        key=ref.key,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Source:
    store: Store
    ref: ObjectRef
    head: IndexHead
    buffer: Bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenIndex:
    """An index of which everything but the rows is known; rows are read for the tensors that are asked for."""

    id: AttemptId
    parts: tuple[PartRef, ...]
    segments: tuple[SegmentRef, ...]
    rows: TensorRows
    source: _Source | None
    whole: ChunkTable | None  # where the rows are at hand

    @classmethod
    def of(cls, index: Index) -> OpenIndex:
        """An index that was read whole."""
        bounds = np.searchsorted(index.table.tensor, np.arange(len(index.table.tensors) + 1))
        return cls(
            id=index.id,
            parts=index.parts,
            segments=index.segments,
            rows=TensorRows(tensors=index.table.tensors, bounds=bounds),
            source=None,
            whole=index.table,
        )

    def part_of(self, role: str) -> Iterator[PartRef]:
        return (ref for ref in self.parts if ref.member.role == role)

    def table(self, names: Iterable[str]) -> ChunkTable:
        """All rows of these tensors, and of whatever else their row groups hold. CorruptError."""
        if self.whole is not None or self.source is None:
            assert self.whole is not None
            return self.whole
        wanted = self._groups(names)
        source = self.source
        for first, last in _runs(wanted):
            groups = source.head.groups[first : last + 1]
            pieces = [(nbytes, digest) for _, _, nbytes, digest in groups]
            _read_span(source.store, source.ref, source.buffer, groups[0][1], pieces)
        return decode_rows(source.buffer, source.ref.key, source.head, wanted, self.rows, self.segments)

    def _groups(self, names: Iterable[str]) -> list[int]:
        assert self.source is not None
        found = self.rows.tensors.find_all(list(names))
        found = found[found >= 0]
        ends = np.cumsum([count for count, _, _, _ in self.source.head.groups])
        low, high = self.rows.bounds[found], self.rows.bounds[found + 1]
        low, high = low[high > low], high[high > low]
        first, last = np.searchsorted(ends, low, side="right"), np.searchsorted(ends, high - 1, side="right")
        marks = np.zeros(len(ends) + 1, np.int64)
        np.add.at(marks, first, 1)
        np.add.at(marks, last + 1, -1)
        return np.flatnonzero(np.cumsum(marks[:-1]) > 0).tolist()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours."""
    first = None
    for n, number in enumerate(numbers):
        first = number if first is None else first
        if n + 1 == len(numbers) or numbers[n + 1] != number + 1:
            yield first, number
            first = None
