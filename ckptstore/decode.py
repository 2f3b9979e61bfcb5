"""How a chunk's stored bytes become its own: the one place where codecs meet the read path.

It stands apart so that fetching knows of no codec: it verifies stored bytes, asks for the others here, and verifies
those too. A delta's base is verified here, so that damage is blamed on the segment that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ckptstore.chunkbase import ChunkBase
from ckptstore.chunktable import RAW, ChunkTable
from ckptstore.codec.base import NAMES, find_codec, word_nbytes_of
from ckptstore.errors import CorruptError, NotFoundError, UnsupportedFormatError
from ckptstore.tensor import itemsize

Bytes: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.int64]
ReadInto: TypeAlias = Callable[[str, int, Sequence[Bytes]], None]
Decode: TypeAlias = Callable[[ChunkTable, int, memoryview, Bytes], None]
"""Fill the last argument with the decoded bytes of chunk `row` from its stored bytes, which are verified."""

BASE_TRIES = 2


def check_codecs(table: ChunkTable, rows: Rows) -> None:
    """UnsupportedFormatError if this version cannot decode one of the chunks; before anything is read."""
    known = np.array([codec == RAW or codec in NAMES for codec in table.codecs] or [True])
    unknown = ~known[table.codec[rows]]
    if unknown.any():
        row = int(rows[np.flatnonzero(unknown)[0]])
        raise UnsupportedFormatError(
            f"{table.spec(row).name} is encoded with {table.codecs[int(table.codec[row])]!r}, which this version "
            f"cannot decode: upgrade ckptstore",
            tensor=table.spec(row).name,
        )


def decoded_nbytes(table: ChunkTable, rows: Rows) -> Rows:
    """Bytes of the chunks' elements."""
    return np.asarray(table.shape[rows].prod(axis=1) * table.tensors.itemsizes_of(table.tensor[rows]))


def working_nbytes(table: ChunkTable, rows: Rows) -> Rows:
    """At most so much memory decoding takes besides stored and decoded bytes: 0 for raw chunks.

    A base's stored bytes and its byte planes, or a sparse delta's gaps and values: as many as there are words.
    """
    encoded = table.is_encoded(rows)
    if not encoded.any():
        return np.zeros(len(rows), np.int64)
    times = np.where(table.tensors.itemsizes_of(table.tensor[rows]) == 1, 3, 2)
    return np.asarray(np.where(encoded, times * decoded_nbytes(table, rows), 0))


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the chunks of one store. `read_into(segment, start, buffers)` is `Store.read_into`. Thread-safe."""

    read_into: ReadInto

    def __call__(self, table: ChunkTable, row: int, stored: memoryview, out: Bytes) -> None:
        """Fill `out` with the bytes of chunk `row`, from its stored bytes, whose digest has been verified.

        A delta reads its base, a second time if its digest is wrong. CorruptError names the tensor, and as segment
        the one that is damaged. UnsupportedFormatError: a codec of a later version. Takes `working_nbytes` at most,
        whatever the bytes say.
        """
        spec, name = table.spec(row), table.codecs[int(table.codec[row])]
        check_codecs(table, np.array([row]))
        word = word_nbytes_of(itemsize(spec.dtype))
        text = table.base[row] if table.base else ""
        try:
            if text:
                self.read_base(ChunkBase.parse(text), out, word)
            codec = find_codec(name)
            codec.decode(
                np.frombuffer(stored, np.uint8), out, word_nbytes=word, base=out if codec.needs_base else None
            )
        except CorruptError as error:
            segment = error.values.get("segment", table.segments[int(table.segment[row])])
            raise CorruptError(
                f"{spec.name} {table.box(row)} in {segment} cannot be decoded from {name} ({error}): use another copy "
                f"or an older checkpoint",
                segment=segment,
                tensor=spec.name,
            ) from error

    def read_base(self, base: ChunkBase, out: Bytes, word: int) -> None:
        """Fill `out` with the decoded base, verified; CorruptError after a second try."""
        found = ""
        for _ in range(BASE_TRIES):
            try:
                self._fill(base, out, word)
            except CorruptError as error:
                found = str(error)
                continue
            found = f"its base has digest {xxhash.xxh3_128_hexdigest(out.data)}, not {base.digest.hex()}"
            if xxhash.xxh3_128_digest(out.data) == base.digest:
                return
        raise CorruptError(found, segment=base.segment)

    def _fill(self, base: ChunkBase, out: Bytes, word: int) -> None:
        if base.codec == RAW:
            if base.nbytes != out.size:
                raise CorruptError(f"its base has {base.nbytes} bytes, not {out.size}")
            self._read(base, out)
            return
        stored = np.empty(min(base.nbytes, out.size), np.uint8)
        self._read(base, stored)
        find_codec(base.codec).decode(stored, out, word_nbytes=word)

    def _read(self, base: ChunkBase, into: Bytes) -> None:
        try:
            self.read_into(base.segment, base.start, [into])
        except NotFoundError as error:
            raise CorruptError(f"the segment of its base is not there: {error}") from error
