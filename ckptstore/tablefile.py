"""Parts and indexes as Parquet objects, and back.

A part and an index are one object each: the chunk table as columns, everything else as JSON in the
file's key-value metadata. Anyone can query the rows with pyarrow, pandas or DuckDB. The JSON carries
a digest of itself and of all columns, so a part proves itself before any index names its digest.
Byte tables: docs/reference/format-v1.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ckptstore.chunktable import DIGEST_NBYTES, RAW, ChunkTable, compact_table
from ckptstore.errors import CorruptError, UnsupportedFormatError
from ckptstore.manifest import FORMAT, AttemptId, Index, Member, Part, PartRef, SegmentRef
from ckptstore.tensor import TensorSpec, itemsize
from ckptstore.wire import canonical, check_format, digest_of, load_json, ref_from_json, ref_to_json

META = b"ckptstore"
ROW_GROUP_ROWS = 131_072
_PLAIN = ("digest", "stored_digest")


def encode_part(part: Part) -> bytes:
    meta = {
        "format": FORMAT,
        "kind": "part",
        "run": part.run,
        "write": part.write,
        "id": str(part.id),
        "role": part.member.role,
        "rank": part.member.rank,
        "layout": part.layout,
        "policy_version": part.policy_version,
        "planned": part.planned,
        "segments": _segments_to_json(part.segments),
        "witnesses": dict(part.witnesses),
        "state": part.state,
        "nbytes_written": part.nbytes_written,
        "nbytes_reused": part.nbytes_reused,
        "refused": part.refused,
    }
    return _encode(meta, part.table)


def decode_part(data: bytes, what: str) -> Part:
    """Raises CorruptError or UnsupportedFormatError naming `what`."""
    meta, table = _decode(data, what, "part")
    try:
        return Part(
            run=str(meta["run"]),
            write=str(meta["write"]),
            id=AttemptId.parse(meta["id"]),
            member=Member(role=meta["role"], rank=int(meta["rank"])),
            layout=str(meta["layout"]),
            policy_version=meta["policy_version"],
            planned=int(meta["planned"]),
            segments=_segments_from_json(meta["segments"]),
            witnesses={str(k): str(v) for k, v in meta["witnesses"].items()},
            state=meta["state"],
            nbytes_written=int(meta["nbytes_written"]),
            nbytes_reused=int(meta["nbytes_reused"]),
            refused=meta["refused"],
            table=table,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"{what} lacks a field or has a wrong one ({error!r}): it is damaged", what=what
        ) from error


def encode_index(index: Index) -> bytes:
    meta = {
        "format": FORMAT,
        "kind": "index",
        "run": index.run,
        "id": str(index.id),
        "parts": [
            {"role": ref.member.role, "rank": ref.member.rank, **ref_to_json(ref.object)}
            for ref in index.parts
        ],
        "segments": _segments_to_json(index.segments),
    }
    return _encode(meta, index.table)


def decode_index(data: bytes, what: str) -> Index:
    """Raises CorruptError or UnsupportedFormatError naming `what`."""
    meta, table = _decode(data, what, "index")
    try:
        return Index(
            run=str(meta["run"]),
            id=AttemptId.parse(meta["id"]),
            parts=tuple(
                PartRef(member=Member(role=ref["role"], rank=int(ref["rank"])), object=ref_from_json(ref))
                for ref in meta["parts"]
            ),
            segments=_segments_from_json(meta["segments"]),
            table=table,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"{what} lacks a field or has a wrong one ({error!r}): it is damaged", what=what
        ) from error


def _segments_to_json(segments: tuple[SegmentRef, ...]) -> list[list[Any]]:
    return [[ref.key, ref.nbytes, ref.header] for ref in segments]


def _segments_from_json(value: Any) -> tuple[SegmentRef, ...]:
    return tuple(SegmentRef(key=str(k), nbytes=int(n), header=str(h)) for k, n, h in value)


# -- columns


def _strings(names: tuple[str, ...], codes: npt.NDArray[Any]) -> Any:
    values = pa.array(names if names else [""], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), values)


def _digests(column: npt.NDArray[np.uint8]) -> Any:
    data = pa.py_buffer(np.ascontiguousarray(column))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(DIGEST_NBYTES), len(column), [None, data])


def _columns(table: ChunkTable) -> dict[str, Any]:
    depth = table.offset.shape[1]
    dims = np.zeros((len(table.tensors) or 1, depth), np.int64)
    for n, spec in enumerate(table.tensors):
        dims[n, : len(spec.shape)] = spec.shape
    dtypes = tuple(sorted({spec.dtype for spec in table.tensors}))
    dtype_codes = np.array([dtypes.index(spec.dtype) for spec in table.tensors] or [0], np.int32)
    ndims = np.array([len(spec.shape) for spec in table.tensors] or [0], np.int8)
    columns: dict[str, Any] = {
        "tensor": _strings(tuple(s.name for s in table.tensors), table.tensor).cast(pa.string()),
        "dtype": _strings(dtypes, dtype_codes[table.tensor]),
        "ndim": pa.array(ndims[table.tensor]),
    }
    for d in range(depth):
        columns[f"dim{d}"] = pa.array(dims[table.tensor, d])
    for d in range(depth):
        columns[f"offset{d}"] = pa.array(np.ascontiguousarray(table.offset[:, d]))
    for d in range(depth):
        columns[f"shape{d}"] = pa.array(np.ascontiguousarray(table.shape[:, d]))
    columns["segment"] = _strings(table.segments, table.segment)
    columns["start"] = pa.array(table.start)
    columns["nbytes"] = pa.array(table.nbytes)
    columns["codec"] = _strings(table.codecs, table.codec)
    columns["base"] = pa.array(table.base or [""] * len(table), pa.string()).dictionary_encode()
    columns["reuses"] = pa.array(table.reuses)
    columns["digest"] = _digests(table.digest)
    columns["stored_digest"] = _digests(table.stored_digest)
    return columns


def _rows_digest(table: ChunkTable) -> str:
    """Digest of all columns in their memory form: independent of how Parquet lays them out."""
    hasher = xxhash.xxh3_128()
    names = [[s.name, s.dtype, list(s.shape)] for s in table.tensors]
    hasher.update(canonical([names, table.segments, table.codecs, table.base]))
    for column in (
        table.tensor, table.offset, table.shape, table.segment, table.start, table.nbytes,
        table.digest, table.stored_digest, table.codec, table.reuses,
    ):  # fmt: skip
        hasher.update(np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<")).view(np.uint8).data)
    return hasher.hexdigest()


def _encode(meta: dict[str, Any], table: ChunkTable) -> bytes:
    table = compact_table(table)
    meta = {**meta, "rows": len(table), "rows_digest": _rows_digest(table)}
    meta["check"] = digest_of(canonical(meta))
    columns = _columns(table)
    arrow = pa.table(columns)
    integers = [n for n, c in columns.items() if pa.types.is_integer(c.type)]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        arrow.schema,
        use_dictionary=["dtype", "segment", "codec", "base"],
        column_encoding={
            "tensor": "DELTA_BYTE_ARRAY",
            **{n: "DELTA_BINARY_PACKED" for n in integers if n != "ndim"},
            **dict.fromkeys(_PLAIN, "PLAIN"),
        },
        compression={n: "NONE" if n in _PLAIN else "ZSTD" for n in columns},
        write_statistics=["tensor"],
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.write_table(arrow, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata({META.decode(): canonical(meta).decode()})
    return bytes(sink.getvalue())


def _decode(data: bytes, what: str, kind: str) -> tuple[dict[str, Any], ChunkTable]:
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        raw = (file.metadata.metadata or {}).get(META)
        if raw is None:
            raise CorruptError(f"{what} is a Parquet file, but not ckptstore's: look at its key", what=what)
        meta = load_json(raw, what)
        check_format(meta.get("format"), what)
        check = meta.pop("check", None)
        if check != digest_of(canonical(meta)):
            raise CorruptError(f"{what} fails its check ({check}): it is damaged", what=what)
        if meta.get("kind") != kind:
            raise CorruptError(f"{what} is a {meta.get('kind')!r}, not a {kind}: it is misplaced", what=what)
        table = _table(file.read())
    except (CorruptError, UnsupportedFormatError):
        raise
    except Exception as error:  # pyarrow raises many kinds on damaged bytes; all of them mean the same here
        raise CorruptError(f"{what} is not a readable table ({error}): it is damaged", what=what) from error
    if len(table) != meta["rows"] or _rows_digest(table) != meta["rows_digest"]:
        raise CorruptError(
            f"{what}: its {len(table)} rows are not those that were written: it is damaged", what=what
        )
    check_table(table, what)
    return meta, table


def _codes(column: Any) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    merged = column.combine_chunks()
    if not pa.types.is_dictionary(merged.type):
        merged = merged.dictionary_encode()
    if isinstance(merged, pa.ChunkedArray):
        merged = merged.unify_dictionaries().combine_chunks() if merged.num_chunks else None
    if merged is None or len(merged) == 0:
        return (), np.zeros(0, np.int32)
    names = tuple(str(v) for v in merged.dictionary.to_pylist())
    codes = np.asarray(merged.indices, np.int32)
    order = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(names), np.int32)
    place[order] = np.arange(len(names), dtype=np.int32)
    return tuple(names[n] for n in order), place[codes]


def _binary(column: Any, rows: int) -> npt.NDArray[np.uint8]:
    merged = column.combine_chunks()
    chunks = merged.chunks if isinstance(merged, pa.ChunkedArray) else [merged]
    parts = [
        np.frombuffer(c.buffers()[1], np.uint8)[
            c.offset * DIGEST_NBYTES : (c.offset + len(c)) * DIGEST_NBYTES
        ]
        for c in chunks
    ]
    return (
        np.concatenate(parts).reshape(rows, DIGEST_NBYTES)
        if parts
        else np.zeros((0, DIGEST_NBYTES), np.uint8)
    )


def _table(arrow: Any) -> ChunkTable:
    rows = arrow.num_rows
    depth = sum(name.startswith("offset") for name in arrow.column_names)

    def ints(name: str, dtype: Any = np.int64) -> npt.NDArray[Any]:
        return np.asarray(arrow.column(name).to_numpy()).astype(dtype)

    def grid(prefix: str) -> npt.NDArray[np.int64]:
        return (
            np.stack([ints(f"{prefix}{d}") for d in range(depth)], axis=1)
            if rows
            else np.zeros((0, depth), np.int64)
        )

    names, tensor = _codes(arrow.column("tensor"))
    dtypes, dtype = _codes(arrow.column("dtype"))
    segments, segment = _codes(arrow.column("segment"))
    codecs, codec = _codes(arrow.column("codec"))
    bases, base = _codes(arrow.column("base"))
    first = np.searchsorted(tensor, np.arange(len(names)))
    ndim, dims = ints("ndim"), grid("dim")
    specs = tuple(
        TensorSpec(name=name, dtype=dtypes[dtype[row]], shape=tuple(int(v) for v in dims[row, : ndim[row]]))
        for name, row in zip(names, first.tolist(), strict=True)
    )
    return ChunkTable(
        tensors=specs,
        segments=segments,
        codecs=codecs or (RAW,),
        tensor=tensor,
        offset=grid("offset"),
        shape=grid("shape"),
        segment=segment,
        start=ints("start"),
        nbytes=ints("nbytes"),
        digest=_binary(arrow.column("digest"), rows),
        stored_digest=_binary(arrow.column("stored_digest"), rows),
        codec=codec.astype(np.int16),
        reuses=ints("reuses", np.int32),
        base=tuple(bases[b] for b in base) if any(bases) else (),
    )


def check_table(table: ChunkTable, what: str) -> None:
    """Refuse rows that can never be true: boxes outside their tensors, sizes that do not fit, bad offsets."""
    if not len(table):
        return
    depth = table.offset.shape[1]
    dims = np.ones((len(table.tensors), depth), np.int64)
    for n, spec in enumerate(table.tensors):
        dims[n, : len(spec.shape)] = spec.shape
    sizes = np.array([itemsize(spec.dtype) for spec in table.tensors], np.int64)
    wrong = ((table.offset < 0) | (table.shape < 0) | (table.offset + table.shape > dims[table.tensor])).any(
        axis=1
    )
    raw = np.array([codec == RAW for codec in table.codecs])[table.codec]
    wrong |= raw & (table.nbytes != table.shape.prod(axis=1) * sizes[table.tensor])
    wrong |= (table.start < 0) | (table.nbytes < 0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CorruptError(
            f"{what}: chunk {row} of {table.spec(row).name} has box {table.box(row)} and "
            f"{int(table.nbytes[row])} bytes, which cannot be: it is damaged",
            what=what,
            tensor=table.spec(row).name,
        )
