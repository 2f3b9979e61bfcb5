"""What a decoded table can say at all: refuse sizes, shapes, boxes and bases that no table was ever written with.

Digests prove that a table is what somebody sealed, not that it can be. Whoever computes with its columns relies on what
is judged here, since columns overflow in silence.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ckptstore.chunkbase import ChunkBase
from ckptstore.chunktable import RAW, ChunkTable
from ckptstore.codec.base import NAMES
from ckptstore.errors import CorruptError, UnsupportedFormatError
from ckptstore.tensor import DTYPES
from ckptstore.tensors import Tensors

_TENSOR_NBYTES_MAX = 1 << 60  # so that sums of several stay within 64 bits


def check_tensors(tensors: Tensors, what: str) -> None:
    """Refuse names without order, and shapes that no tensor can have: columns are computed with, unlike objects."""
    depth = tensors.dims.shape[1]
    wrong = (tensors.ndim < 0) | (tensors.ndim > depth) | (tensors.dims < 0).any(axis=1)
    if not wrong.any():
        sizes = tensors.padded(depth, 1).astype(np.float64).prod(axis=1) * tensors.itemsizes
        wrong = sizes > _TENSOR_NBYTES_MAX
    if wrong.any():
        n = int(np.flatnonzero(wrong)[0])
        raise CorruptError(
            f"{what}: {tensors.names[n]} has {int(tensors.ndim[n])} dimensions of {tensors.dims[n].tolist()}, which "
            f"cannot be: it is damaged",
            what=what,
            tensor=tensors.names[n],
        )
    if any(a >= b for a, b in pairwise(tensors.names)):
        raise CorruptError(f"{what}: its tensors are not in the order of their names", what=what)


def check_table(table: ChunkTable, what: str) -> None:
    """Refuse rows that can never be true: boxes outside their tensors, sizes that do not fit, bad offsets."""
    unknown = [name for name in table.tensors.dtypes if name not in DTYPES]
    if unknown:
        raise UnsupportedFormatError(
            f"{what} has tensors of dtype {unknown[0]!r}: upgrade ckptstore", what=what
        )
    check_tensors(table.tensors, what)
    depth = table.offset.shape[1]
    if depth != table.shape.shape[1] or depth < table.tensors.ndim.max(initial=0):
        raise CorruptError(
            f"{what}: boxes of {depth} and {table.shape.shape[1]} dimensions do not fit its tensors: it is damaged",
            what=what,
        )
    if not len(table):
        return
    limit = table.tensors.padded(depth, 1)[table.tensor]
    wrong = np.zeros(len(table), np.bool_)
    for d in range(depth):
        offset, extent = table.offset[:, d], table.shape[:, d]
        wrong |= (offset < 0) | (extent < 0) | (offset > limit[:, d]) | (extent > limit[:, d] - offset)
    raw, sizes = ~table.encoded, table.sizes
    known = np.array([codec in NAMES for codec in table.codecs])[table.codec]
    wrong |= raw & (table.nbytes != sizes)
    wrong |= known & ((table.nbytes == 0) | (table.nbytes >= sizes))
    wrong |= (table.start < 0) | (table.nbytes < 0)
    stored = table.stored_digests.any(axis=1)
    wrong |= (raw & stored) | (known & ~stored)
    based = np.array([bool(text) for text in table.base or [""] * len(table)])
    wrong |= (raw | known) & (based != table.deltas)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CorruptError(
            f"{what}: chunk {row} of {table.spec(row).name} has box {table.offset[row].tolist()}, "
            f"{table.shape[row].tolist()} and {int(table.nbytes[row])} bytes, which cannot be: it is damaged",
            what=what,
            tensor=table.spec(row).name,
        )
    for row in np.flatnonzero(based).tolist():
        _check_base(table, row, int(sizes[row]), what)


def _check_base(table: ChunkTable, row: int, size: int, what: str) -> None:
    """Refuse a base that is none, or that cannot be the bytes that the delta starts from."""
    try:
        base = ChunkBase.parse(table.base[row])
    except CorruptError as error:
        raise CorruptError(f"{what}: {error}", what=what, tensor=table.spec(row).name) from error
    if base.nbytes != size if base.codec == RAW else not 0 < base.nbytes < size:
        raise CorruptError(
            f"{what}: {table.spec(row).name} has {size} bytes and builds on {base}, which cannot be: it is damaged",
            what=what,
            tensor=table.spec(row).name,
        )
