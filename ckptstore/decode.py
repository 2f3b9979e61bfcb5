"""How a chunk's stored bytes become its own: the one place where codecs meet the read path.

It stands apart so that fetching knows of no codec: it verifies stored bytes, asks for the others here, and verifies
those too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import RAW, ChunkTable
from ckptstore.errors import UnsupportedFormatError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.int64]
Decode: TypeAlias = Callable[[ChunkTable, int, memoryview, Bytes], None]
"""Fill the last argument with the decoded bytes of chunk `row` from its stored bytes, which are verified."""


def decode(table: ChunkTable, row: int, stored: memoryview, out: Bytes) -> None:
    """No codec but raw, whose bytes are never decoded, is known to this version."""
    raise UnsupportedFormatError(
        f"{table.spec(row).name} is encoded with {table.codecs[int(table.codec[row])]!r}, which this version "
        f"cannot decode: upgrade ckptstore",
        tensor=table.spec(row).name,
    )


def check_codecs(table: ChunkTable, rows: Rows) -> None:
    """UnsupportedFormatError if one of the chunks cannot be decoded; before anything is read."""
    unknown = np.array([codec != RAW for codec in table.codecs])[table.codec[rows]]
    if unknown.any():
        decode(table, int(rows[np.flatnonzero(unknown)[0]]), memoryview(b""), np.empty(0, np.uint8))


def decoded_nbytes(table: ChunkTable, rows: Rows) -> Rows:
    """Bytes of the chunks' elements."""
    return np.asarray(table.shape[rows].prod(axis=1) * table.tensors.itemsizes[table.tensor[rows]])
