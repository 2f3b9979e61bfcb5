"""zstandard at level 1, and the frame that the other codecs use: content size in it, no checksum of its own.

Level 1, since higher ones gain little on weights and cost several times as much (docs/explanation/performance.md);
no checksum, since a chunk's row has one of the decoded bytes and one of the stored ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard

from ckptstore.codec.base import Bytes
from ckptstore.errors import CorruptError

LEVEL = 1


def compress(data: Bytes) -> bytes:
    """One frame of all of `data`."""
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(data.data)


def decompress(frame: Bytes, out: Bytes) -> None:
    """Fill `out` from one frame of just as many bytes; CorruptError if `frame` is no such frame."""
    if not out.size and not frame.size:
        return
    try:
        said = zstandard.frame_content_size(frame[:18].tobytes())
        if said != out.size:
            raise CorruptError(f"a zstd frame of {said} bytes stands where {out.size} were encoded")
        with zstandard.ZstdDecompressor().stream_reader(frame.data) as reader:
            done = 0
            while done < out.size:
                got = reader.readinto(out.data[done:])
                if not got:
                    break
                done += got
            if done != out.size or reader.read(1):
                raise CorruptError(
                    f"a zstd frame ends after {done} of {out.size} bytes, or goes on after them"
                )
    except zstandard.ZstdError as error:
        raise CorruptError(f"a zstd frame is damaged ({error})") from error


@dataclass(frozen=True, slots=True)
class Zstd:
    """The chunk as one frame."""

    name: str = "zstd"
    needs_base: bool = False

    def encode(self, data: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> bytes:
        return compress(data)

    def decode(self, stored: Bytes, out: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> None:
        decompress(np.asarray(stored), out)
