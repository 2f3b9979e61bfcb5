"""An index read in part is the index read whole, and every byte of it is proven before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore import CorruptError, UnsupportedFormatError, indexfile
from ckptstore.chunktable import ChunkTable
from ckptstore.index import open_index, read_index, write_index
from ckptstore.manifest import AttemptId, Index, ObjectRef, SegmentRef
from ckptstore.store.memory import MemoryStore
from ckptstore.tensor import TensorSpec
from ckptstore.testing.strategies import chunk_tables, specs, tilings

COLUMNS = ("offset", "shape", "start", "nbytes", "digest", "reuses")


def index_of(table: ChunkTable) -> Index:
    """With another digest, and count of reuses, in each row."""
    count = len(table)
    digest = np.arange(count * 16, dtype=np.uint32).astype(np.uint8).reshape(count, 16)
    made = ChunkTable(
        **{
            **{name: getattr(table, name) for name in ChunkTable.__dataclass_fields__},
            "digest": digest,
            "reuses": np.arange(count, dtype=np.int32),
        }
    )
    segments = tuple(
        SegmentRef(key=key, nbytes=10**6, header=f"{n:032x}") for n, key in enumerate(table.segments)
    )
    return Index(run="r", id=AttemptId(fence=1, step=2), parts=(), segments=segments, table=made)


def stored(table: ChunkTable, group_rows: int) -> tuple[MemoryStore, Index, ObjectRef]:
    store, index = MemoryStore(), index_of(table)
    with mock.patch.object(indexfile, "GROUP_ROWS", group_rows):
        return store, index, write_index(store, index)


def rows_of(table: ChunkTable, names: Sequence[str]) -> list[tuple[object, ...]]:
    """Everything that the table says of these tensors' chunks, as values."""
    rows = [row for row in range(len(table)) if table.spec(row).name in names]
    return [
        (
            table.spec(row),
            table.segments[table.segment[row]],
            *(np.asarray(getattr(table, name)[row]).tobytes() for name in COLUMNS),
        )
        for row in rows
    ]


@st.composite
def tables(draw: st.DrawFn) -> ChunkTable:
    tensors: list[TensorSpec] = draw(specs(prefix="trainer/"))
    return draw(chunk_tables({spec: draw(tilings(spec.shape)) for spec in tensors}))


@settings(max_examples=60)
@given(data=st.data(), table=tables(), group_rows=st.integers(1, 4))
def test_what_is_read_in_part_is_what_is_read_whole(
    data: st.DataObject, table: ChunkTable, group_rows: int
) -> None:
    store, index, ref = stored(table, group_rows)
    whole, names = read_index(store, ref), list(table.tensors.names)
    assert whole.segments == index.segments and whole.id == index.id
    assert whole.table.tensors == table.tensors
    assert rows_of(whole.table, names) == rows_of(index.table, names)
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True))
    part = open_index(store, ref).table([*wanted, "trainer/unknown"])
    assert rows_of(part, wanted) == rows_of(index.table, wanted)
    groups = {row // group_rows for row in range(len(table)) if table.spec(row).name in wanted}
    most = sum(min(group_rows, len(table) - group_rows * n) for n in groups)
    assert len(part) == most, "a row group that nobody wants was read, or one was not"


@settings(max_examples=25)
@given(data=st.data(), table=tables(), group_rows=st.integers(1, 4))
def test_a_flipped_byte_is_an_error_or_is_never_looked_at(
    data: st.DataObject, table: ChunkTable, group_rows: int
) -> None:
    store, index, ref = stored(table, group_rows)
    names = list(table.tensors.names)
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True))
    for info in list(store.list("index/")):
        before = store.read(info.key)
        for at in data.draw(st.lists(st.integers(0, len(before) - 1), min_size=8, max_size=8)):
            flipped = bytearray(before)
            flipped[at] ^= 1 << (at % 8)
            store.replace(info.key, bytes(flipped))
            with pytest.raises((CorruptError, UnsupportedFormatError), match="index/"):
                read_index(store, ref)
            try:
                part = open_index(store, ref).table(wanted)
            except CorruptError as error:
                assert info.key in str(error)
            else:
                assert info.key == ref.key and ref.tail and at < ref.nbytes - ref.tail[0]
                assert rows_of(part, wanted) == rows_of(index.table, wanted)
        store.replace(info.key, before)
