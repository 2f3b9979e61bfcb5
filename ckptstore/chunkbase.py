"""The base of a delta: the stored chunk that an encoded one is a difference from, as its row names it.

A base is itself no delta, so restoring a chunk reads at most two. Its segment is in the closed list of the
checkpoint with a witness, as reused segments are: nobody may remove it while the delta lives (protocol R11, R16).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptstore.chunktable import DELTAS, ChunkTable
from ckptstore.errors import CorruptError

_DIGEST_LETTERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBase:
    """Where the base's stored bytes lie, how they are encoded, and the digest of the decoded ones.

    Decoded, it has as many bytes as the chunk that builds on it.
    """

    segment: str
    start: int
    nbytes: int  # stored
    codec: str
    digest: bytes

    def __str__(self) -> str:
        return f"{self.segment}:{self.start}:{self.nbytes}:{self.codec}:{self.digest.hex()}"

    @classmethod
    def parse(cls, text: str) -> ChunkBase:
        """The inverse of `str`; CorruptError for anything else, and for a base that has a base."""
        parts = text.split(":")
        if len(parts) != 5 or not all(part.isascii() and part.isdigit() for part in parts[1:3]):
            raise CorruptError(f"{text!r} names no base of a delta: the table is damaged", base=text)
        segment, start, nbytes, codec, digest = parts
        if codec in DELTAS:
            raise CorruptError(
                f"{text!r} is a delta itself, and deltas do not build on deltas: the table is damaged",
                base=text,
            )
        try:
            value = bytes.fromhex(digest) if len(digest) == _DIGEST_LETTERS else b""
        except ValueError:
            value = b""
        found = cls(segment=segment, start=int(start), nbytes=int(nbytes), codec=codec, digest=value)
        if str(found) != text or not segment:
            raise CorruptError(f"{text!r} names no base of a delta: the table is damaged", base=text)
        return found


def nbytes_of_bases(table: ChunkTable, rows: Iterable[int] | None = None) -> int:
    """Stored bytes that must be read for these chunks (None: all) besides their own."""
    texts = table.base if rows is None or not table.base else [table.base[row] for row in rows]
    return sum(ChunkBase.parse(text).nbytes for text in texts if text)
