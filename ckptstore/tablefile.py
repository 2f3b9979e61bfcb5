"""Tables as sealed Parquet objects, and parts among them, and back.

A part is one object: the chunk table as columns, everything else as JSON in the file's key-value metadata.
Anyone can query the rows with pyarrow, pandas or DuckDB. The JSON carries a digest of every other byte, so
a table proves itself before anything names its digest. Byte tables: docs/reference/format-v1.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ckptstore.chunktable import DIGEST_NBYTES, RAW, ChunkTable, compact_table
from ckptstore.errors import CorruptError, UnsupportedFormatError
from ckptstore.iorecord import IoRecord
from ckptstore.manifest import FORMAT, AttemptId, Member, Part, SegmentRef, named_key
from ckptstore.replicaset import ReplicaSet
from ckptstore.soundness import check_table
from ckptstore.tensors import Tensors
from ckptstore.wire import canonical, check_format, digest_of, load_json

META = b"ckptstore"
PLAIN = ("digest", "stored_digest", "header")
_NO_CHECK = "0" * 2 * DIGEST_NBYTES
_TEXTS = ("tensor", "dtype", "segment", "codec", "base")


def encode_part(part: Part) -> bytes:
    table = compact_table(part.table)
    meta = {
        "kind": "part",
        "run": part.run,
        "write": part.write,
        "id": str(part.id),
        "role": part.member.role,
        "rank": part.member.rank,
        "layout": part.layout,
        "policy_version": part.policy_version,
        "planned": part.planned,
        "segments": [[ref.key, ref.nbytes, ref.header] for ref in part.segments],
        "witnesses": dict(part.witnesses),
        "state": part.state,
        "nbytes_written": part.nbytes_written,
        "nbytes_reused": part.nbytes_reused,
        "replicas": None if part.replicas is None else [each.to_json() for each in part.replicas],
        "refused": part.refused,
        "io": None if part.io is None else part.io.to_json(),
    }
    tensors = table.tensors
    columns = {
        "tensor": _strings(tensors.names, table.tensor),
        "dtype": _strings(tensors.dtypes, tensors.dtype[table.tensor]),
        "ndim": pa.array(tensors.ndim[table.tensor]),
        **spread("dim", tensors.padded(table.offset.shape[1])[table.tensor]),
        **box_columns(table),
        "segment": _strings(table.segments, table.segment),
        **chunk_columns(table),
    }
    data, _ = seal(meta, columns, dictionary=_TEXTS)
    return data


def decode_part(data: bytes, what: str) -> Part:
    """Raises CorruptError or UnsupportedFormatError naming `what`."""

    def read(file: pq.ParquetFile, meta: dict[str, Any]) -> Part:
        table = _part_table(file.read(use_threads=False))
        check_table(table, what)
        return Part(
            run=str(meta["run"]),
            write=str(meta["write"]),
            id=AttemptId.parse(meta["id"]),
            member=Member(role=meta["role"], rank=int(meta["rank"])),
            layout=str(meta["layout"]),
            policy_version=meta["policy_version"],
            planned=int(meta["planned"]),
            segments=tuple(
                SegmentRef(key=named_key(k), nbytes=int(n), header=str(h)) for k, n, h in meta["segments"]
            ),
            witnesses={str(k): str(v) for k, v in meta["witnesses"].items()},
            state=meta["state"],
            nbytes_written=int(meta["nbytes_written"]),
            nbytes_reused=int(meta["nbytes_reused"]),
            refused=meta["refused"],
            replicas=_replicas_from_json(meta.get("replicas")),
            io=None if meta.get("io") is None else IoRecord.from_json(meta["io"]),
            table=table,
        )

    check_seal(data, what)
    part: Part = open_table(data, what, "part", read, texts=_TEXTS)
    return part


def _replicas_from_json(value: Any) -> tuple[ReplicaSet, ...] | None:
    return None if value is None else tuple(ReplicaSet.from_json(each) for each in value)


# -- sealed Parquet files


def seal(
    meta: Mapping[str, Any],
    columns: Mapping[str, Any],
    *,
    dictionary: Sequence[str] = (),
    group_rows: int | None = None,
) -> tuple[bytes, int]:
    """The file of these columns, and how many bytes its tail has: all behind the last row group.

    `meta` gets the number of rows, the row groups with their digests, and `check`: the digest of the whole
    file with zeros in place of `check` itself.
    """
    table = pa.table(dict(columns))
    integers = [n for n in columns if pa.types.is_integer(columns[n].type)]
    texts = [n for n in columns if n not in dictionary and pa.types.is_string(columns[n].type)]
    sink = pa.BufferOutputStream()
    ends = [4]
    with pq.ParquetWriter(
        sink,
        table.schema,
        use_dictionary=list(dictionary),
        column_encoding={
            **{n: "DELTA_BINARY_PACKED" for n in integers if n != "ndim"},
            **dict.fromkeys(texts, "DELTA_BYTE_ARRAY"),
            **{n: "PLAIN" for n in columns if n in PLAIN},
        },
        compression={n: "NONE" if n in PLAIN else "ZSTD" for n in columns},
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        most = group_rows or max(table.num_rows, 1)
        for start in range(0, table.num_rows, most):
            writer.write_table(table.slice(start, most), row_group_size=most)
            ends.append(sink.tell())
        # What is written already can be seen only once the sink is closed, so the digests come in afterwards.
        sizes = [stop - start for start, stop in pairwise(ends)]
        groups = [[_NO_CHECK, size] for size in sizes]
        told = {"format": FORMAT, **meta, "rows": table.num_rows, "groups": groups, "check": _NO_CHECK}
        text = canonical(told)
        writer.add_key_value_metadata({META.decode(): text.decode()})
    data = bytearray(sink.getvalue())
    view = memoryview(data)
    for start, size, group in zip(ends, sizes, groups, strict=False):
        group[0] = digest_of(view[start : start + size])
    at = data.rindex(text)
    data[at : at + len(text)] = canonical(told)
    _put_check(data, at, len(text))
    return bytes(data), len(data) - ends[-1]


def _put_check(data: bytearray, at: int, nbytes: int) -> None:
    place = data.index(b'"check":"' + _NO_CHECK.encode(), at, at + nbytes) + len(b'"check":"')
    data[place : place + len(_NO_CHECK)] = digest_of(data).encode()


def check_seal(data: bytes, what: str) -> None:
    """Refuse a table of which any byte is not the one that was written."""
    at = data.rfind(b'{"check":"') + len(b'{"check":"')  # the first key in order, of the last such object
    check = data[at : at + len(_NO_CHECK)]
    view = memoryview(data)
    if digest_of_parts(view[:at], _NO_CHECK.encode(), view[at + len(_NO_CHECK) :]) != check.decode("latin-1"):
        _refuse_newer(data, what)
        raise CorruptError(f"{what} fails its check: it is damaged, or is no table of ckptstore's", what=what)


def digest_of_parts(*parts: Any) -> str:
    """Digest of these bytes end to end, in hex."""
    import xxhash

    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _refuse_newer(data: bytes, what: str) -> None:
    """A newer format may be sealed in another way: then say so."""
    try:
        raw = (pq.ParquetFile(pa.BufferReader(data)).metadata.metadata or {}).get(META)
        number = load_json(raw, what).get("format") if raw is not None else None
    except Exception:  # damaged bytes make pyarrow raise many kinds; the caller says what they mean
        return
    if isinstance(number, int):
        check_format(number, what)


def open_table(
    data: Any,
    what: str,
    kind: str,
    read: Callable[[pq.ParquetFile, dict[str, Any]], Any],
    *,
    texts: Sequence[str] = (),
) -> Any:
    """What `read` makes of a proven table of `kind` and its JSON; `texts` are read as dictionaries.

    Whatever fails in it is raised as CorruptError or UnsupportedFormatError naming `what`.
    """
    try:
        file = pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, read_dictionary=list(texts)
        )
        raw = (file.metadata.metadata or {}).get(META)
        if raw is None:
            raise CorruptError(f"{what} is a Parquet file, but not ckptstore's: look at its key", what=what)
        meta = load_json(raw, what)
        check_format(meta.get("format"), what)
        if meta.get("kind") != kind:
            raise CorruptError(f"{what} is a {meta.get('kind')!r}, not a {kind}: it is misplaced", what=what)
        if meta["rows"] != file.metadata.num_rows:
            raise CorruptError(
                f"{what} has {file.metadata.num_rows} rows where {meta['rows']} were written", what=what
            )
        return read(file, meta)
    except (CorruptError, UnsupportedFormatError):
        raise
    except Exception as error:  # pyarrow raises many kinds on damaged bytes; all of them mean the same here
        raise CorruptError(
            f"{what} is not a readable {kind}, or lacks a field ({error!r}): it is damaged", what=what
        ) from error


# -- columns


def box_columns(table: ChunkTable) -> dict[str, Any]:
    return {**spread("offset", table.offset), **spread("shape", table.shape)}


def chunk_columns(table: ChunkTable) -> dict[str, Any]:
    """What parts and indexes say of a chunk besides its tensor, box and segment."""
    nothing = pa.nulls(len(table), pa.string())
    return {
        "start": pa.array(table.start),
        "nbytes": pa.array(table.nbytes),
        "codec": _strings(table.codecs, table.codec),
        "base": pa.array([b or None for b in table.base], pa.string()) if any(table.base) else nothing,
        "reuses": pa.array(table.reuses),
        "digest": digests(table.digest),
        "stored_digest": _stored(table),
    }


def spread(prefix: str, grid: npt.NDArray[Any]) -> dict[str, Any]:
    return {f"{prefix}{d}": pa.array(np.ascontiguousarray(grid[:, d])) for d in range(grid.shape[1])}


def _strings(names: tuple[str, ...], codes: npt.NDArray[Any]) -> Any:
    values = pa.array(names if names else [""], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), values).cast(pa.string())


def digests(column: npt.NDArray[np.uint8]) -> Any:
    data = pa.py_buffer(np.ascontiguousarray(column))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(DIGEST_NBYTES), len(column), [None, data])


def _stored(table: ChunkTable) -> Any:
    if table.stored_digest is None:
        return pa.nulls(len(table), pa.binary(DIGEST_NBYTES))
    values = [row.tobytes() if row.any() else None for row in table.stored_digest]
    return pa.array(values, pa.binary(DIGEST_NBYTES))


def codes_of(column: Any) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """The sorted distinct texts of a column, and which of them each row has; null is `""`."""
    merged = column.unify_dictionaries().combine_chunks()
    if isinstance(merged, pa.ChunkedArray):
        merged = merged.chunk(0) if merged.num_chunks else None
    if merged is None or not len(merged):
        return (), np.zeros(0, np.int32)
    names = merged.dictionary.to_pylist()
    codes = merged.indices.fill_null(len(names)) if merged.null_count else merged.indices
    names += [""] if merged.null_count else []
    order = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(names), np.int32)
    place[order] = np.arange(len(names), dtype=np.int32)
    return tuple(names[n] for n in order), place[np.asarray(codes, np.int64)]


def ints(arrow: Any, name: str, dtype: Any = np.int64) -> npt.NDArray[Any]:
    """A column of integers that `dtype` holds; ValueError for any other."""
    column = arrow.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ValueError(f"column {name} is {column.type} with {column.null_count} nulls")
    values = np.asarray(column.to_numpy())
    found = values.astype(dtype, copy=False)
    if found.dtype != values.dtype and (found != values).any():
        raise ValueError(f"column {name} has numbers beyond {np.dtype(dtype)}")
    return found


def texts(arrow: Any, name: str) -> tuple[str, ...]:
    """A column of texts, none of which is missing; ValueError for any other."""
    column = arrow.column(name)
    if not pa.types.is_string(column.type) or column.null_count:
        raise ValueError(f"column {name} is {column.type} with {column.null_count} nulls")
    return tuple(column.to_numpy())


def grid(arrow: Any, prefix: str) -> npt.NDArray[np.int64]:
    """Columns `prefix0`, `prefix1`, … side by side."""
    depth = sum(name.startswith(prefix) and name[len(prefix) :].isdigit() for name in arrow.column_names)
    out = np.empty((arrow.num_rows, depth), np.int64)
    for d in range(depth):
        out[:, d] = ints(arrow, f"{prefix}{d}")
    return out


def binary(column: Any) -> npt.NDArray[np.uint8]:
    """A column of digests, none of which is missing; ValueError for any other."""
    if column.type != pa.binary(DIGEST_NBYTES) or column.null_count:
        raise ValueError(f"a column of digests is {column.type} with {column.null_count} nulls")
    parts = [
        np.frombuffer(c.buffers()[1], np.uint8)[
            c.offset * DIGEST_NBYTES : (c.offset + len(c)) * DIGEST_NBYTES
        ]
        for c in column.chunks
        if len(c)
    ]
    whole = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return whole.reshape(-1, DIGEST_NBYTES)


def chunk_fields(arrow: Any) -> dict[str, Any]:
    """The fields of a ChunkTable that `box_columns` and `chunk_columns` hold."""
    codecs, codec = codes_of(arrow.column("codec"))
    stored = arrow.column("stored_digest")
    encoded = None
    if stored.null_count < len(stored):
        rows = [v if v is not None else bytes(DIGEST_NBYTES) for v in stored.to_pylist()]
        encoded = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, DIGEST_NBYTES)
    base = arrow.column("base")
    return {
        "offset": grid(arrow, "offset"),
        "shape": grid(arrow, "shape"),
        "start": ints(arrow, "start"),
        "nbytes": ints(arrow, "nbytes"),
        "codecs": codecs or (RAW,),
        "codec": codec.astype(np.int16),
        "reuses": ints(arrow, "reuses", np.int32),
        "digest": binary(arrow.column("digest")),
        "stored_digest": encoded,
        "base": tuple(v or "" for v in base.to_pylist()) if base.null_count < len(base) else (),
    }


def _part_table(arrow: Any) -> ChunkTable:
    names, tensor = codes_of(arrow.column("tensor"))
    dtypes, dtype = codes_of(arrow.column("dtype"))
    segments, segment = codes_of(arrow.column("segment"))
    first = np.searchsorted(tensor, np.arange(len(names), dtype=np.int32))
    tensors = Tensors(
        names=names,
        dtypes=dtypes,
        dtype=dtype[first].astype(np.int16),
        ndim=ints(arrow, "ndim", np.int8)[first],
        dims=grid(arrow, "dim")[first],
    )
    return ChunkTable(
        tensors=tensors, tensor=tensor, segments=segments, segment=segment, **chunk_fields(arrow)
    )
