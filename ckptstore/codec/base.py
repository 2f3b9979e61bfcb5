"""What a codec is, and which there are.

A chunk's row names its codec, so a codec is looked up by name and is never guessed from the bytes. Encoded
bytes come from a store and are not trusted: decoding checks every length before it writes, and writes only
into the memory it is given. Formats: docs/reference/format-v1.md.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UnsupportedFormatError

Bytes = npt.NDArray[np.uint8]

WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Codec(Protocol):
    """One way to store the bytes of a chunk; stateless and thread-safe.

    `word_nbytes` (1, 2, 4 or 8) is the size of the numbers that the chunk consists of; its bytes are a
    multiple of it. `base` is as many bytes, of the chunk that a delta is against; others take none. Decoding may be
    given `out` itself as the base.
    """

    name: str
    needs_base: bool

    def encode(self, data: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> bytes:
        """The stored form of `data`; it may be longer than `data`, and the caller then stores that raw."""

    def decode(self, stored: Bytes, out: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> None:
        """Fill `out`, all of it, from what `encode` gave for as many bytes.

        CorruptError when `stored` is anything else; `out` may then be partly written. Nothing beyond
        `out` and bounded scratch is allocated, whatever `stored` says.
        """


_HOMES = {
    "zstd": "ckptstore.codec.zstd:Zstd",
    "byteplane+zstd": "ckptstore.codec.byteplane:Byteplane",
    "xor+zstd": "ckptstore.codec.delta:Xor",
    "sparse+zstd": "ckptstore.codec.delta:Sparse",
}
NAMES = tuple(_HOMES)


def find_codec(name: str) -> Codec:
    """The codec of that name; UnsupportedFormatError if this version has none."""
    home = _HOMES.get(name)
    if home is None:
        raise UnsupportedFormatError(
            f"codec {name!r} is not known to this version, which has {', '.join(NAMES)}: upgrade ckptstore",
            codec=name,
        )
    module, _, noun = home.partition(":")
    make: Callable[[], Codec] = getattr(import_module(module), noun)
    return make()


def word_nbytes_of(item_nbytes: int) -> int:
    """The word in which an element's bytes are treated: a complex number is two of its halves."""
    return item_nbytes if item_nbytes in WORDS else 8
