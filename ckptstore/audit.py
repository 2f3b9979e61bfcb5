"""What `verify --full` checks beside digests: that the objects of a checkpoint agree with each other.

Digests prove that bytes are what was written. This proves that what was written fits together: segments
are whole safetensors files whose headers name every chunk where the table has it, the index holds the
rows of its parts and no others, and the chunks tile their tensors (protocol R11). A failure here, with all
digests right, is a bug of a writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptstore.chunkbase import ChunkBase
from ckptstore.chunktable import ChunkTable, compact_table, merge_tables
from ckptstore.cut import check_coverage
from ckptstore.damage import Damage
from ckptstore.errors import CkptStoreError, CorruptError, NotFoundError
from ckptstore.manifest import Index, Part, SegmentRef
from ckptstore.segment import HEADER_NBYTES_MAX, parse_header
from ckptstore.store.base import Store

_COLUMNS = (
    "tensor",
    "offset",
    "shape",
    "segment",
    "start",
    "nbytes",
    "digest",
    "stored_digests",
    "codec",
    "reuses",
)


def audit_index(index: Index, parts: Sequence[Part], key: str) -> list[Damage]:
    """Does the index, stored at `key`, tile its tensors and hold exactly what its parts hold?"""
    problems = []
    try:
        check_coverage(index.table)
    except CkptStoreError as error:
        problems.append(str(error))
    try:
        if not _same_rows(merge_tables([part.table for part in parts]), index.table):
            problems.append("does not hold the rows of its parts")
    except CorruptError as error:
        problems.append(str(error))
    listed = {ref.key: ref for ref in index.segments}
    if any(listed.get(ref.key) != ref for part in parts for ref in part.segments):
        problems.append("does not list the segments of its parts")
    needed = {index.table.segments[n] for n in np.unique(index.table.segment)}
    if not needed | {ChunkBase.parse(text).segment for text in index.table.base if text} <= set(listed):
        problems.append("has chunks in segments that it does not list")
    return [Damage(key=key, tensor=None, problem=problem) for problem in problems]


def _same_rows(one: ChunkTable, other: ChunkTable) -> bool:
    one, other = compact_table(one), compact_table(other)
    names = (one.tensors, one.segments, one.codecs, one.base)
    return names == (other.tensors, other.segments, other.codecs, other.base) and all(
        np.array_equal(getattr(one, column), getattr(other, column)) for column in _COLUMNS
    )


def audit_segments(store: Store, segments: Sequence[SegmentRef], table: ChunkTable) -> list[Damage]:
    """Is each segment one whole safetensors file, with every chunk of `table` where its header says?

    Segments that are gone or cannot be read are left to `find_damage`, which names them.
    """
    order = np.argsort(table.segment, kind="stable")
    bounds = np.searchsorted(table.segment[order], np.arange(len(table.segments) + 1))
    rows = {key: order[bounds[n] : bounds[n + 1]] for n, key in enumerate(table.segments)}
    bases: dict[str, list[tuple[int, int]]] = {}
    for base in (ChunkBase.parse(text) for text in set(table.base) if text):
        bases.setdefault(base.segment, []).append((base.start, base.nbytes))
    found = []
    for ref in segments:
        try:
            own = rows.get(ref.key, order[:0])
            places = [*zip(table.start[own].tolist(), table.nbytes[own].tolist(), strict=True)]
            problem = _segment_problem(store, ref, [*places, *bases.get(ref.key, ())])
        except (CorruptError, NotFoundError):
            continue
        if problem is not None:
            found.append(Damage(key=ref.key, tensor=None, problem=problem))
    return found


def _segment_problem(store: Store, ref: SegmentRef, told: Sequence[tuple[int, int]]) -> str | None:
    if store.size(ref.key) != ref.nbytes:
        return None
    length = int.from_bytes(store.read(ref.key, start=0, nbytes=8), "little")
    if length > min(HEADER_NBYTES_MAX, ref.nbytes - 8):
        return f"has a header of {length} bytes, more than it may have"
    header = store.read(ref.key, start=0, nbytes=8 + length)
    fields = parse_header(header, ref.key)
    if not header.rstrip(b" ").endswith(b"}"):
        return "has a header that is not padded with spaces"
    spans = sorted(tuple(entry["data_offsets"]) for name, entry in fields.items() if name != "__metadata__")
    at = 0
    for start, stop in spans:
        if start != at or stop < start:
            return f"has a hole or an overlap at byte {len(header) + at} of its data"
        at = stop
    if len(header) + at != ref.nbytes:
        return f"ends at byte {ref.nbytes} where its header ends at {len(header) + at}"
    stored = {(len(header) + start, stop - start) for start, stop in spans}
    missing = [place for place in told if place not in stored]
    if missing:
        return (
            f"has no tensor of {missing[0][1]} bytes at byte {missing[0][0]}, where the chunk table has one"
        )
    return None
