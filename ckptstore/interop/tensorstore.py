"""One stored tensor as a `tensorstore.TensorStore`: any slice, and only the chunks that it touches are read.

Each stored chunk is one virtual chunk, so a read fetches and verifies exactly the chunks that a slice
touches. A regular grid of chunks is one virtual array; any other tiling is an overlay of several
(`plan/grid.py`), since TensorStore's own chunks are regular.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptstore.chunktable import ChunkTable, compact_table
from ckptstore.errors import InvalidInputError
from ckptstore.plan.grid import Grid, Tiling, arrange
from ckptstore.reader import read_leaves
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store
from ckptstore.tensor import Box, Shape, TensorSpec

if TYPE_CHECKING:
    import tensorstore

# Two numbers in a byte, for which TensorStore has no type: the bytes are given, shaped as in torch.
_AS_BYTES: Final = "float4_e2m1fn_x2"


def lazy_tensor(
    store: Store, table: ChunkTable, spec: TensorSpec, *, context: tensorstore.Context | None = None
) -> tensorstore.TensorStore:
    """The tensor of `table` that `spec` names, read-only; nothing is read yet.

    Packed float4 comes as uint8, two numbers a byte, shaped as in torch. InvalidInputError if tensorstore is not
    installed or does not know the dtype. Reads of the result raise CorruptError and what `store` raises.
    """
    ts = _tensorstore(spec)
    dtype = _dtype(ts, spec)
    rows = np.flatnonzero(table.tensor == table.tensors.find(spec.name))
    own = compact_table(table.take(rows))  # what the result holds on to, instead of the whole table
    boxes = [box for box in map(own.box, range(len(own))) if box.numel]
    make = _Make(ts=ts, dtype=dtype, context=context, read=_Read(store=store, table=own, spec=spec))
    return make.tiling(arrange(boxes)) if boxes else make.array(Box.whole(spec.shape), None)


def _tensorstore(spec: TensorSpec) -> Any:
    try:
        import tensorstore as ts
    except ImportError as error:
        raise InvalidInputError(
            f"{spec.name} cannot be opened as a lazy array: tensorstore is not installed; run pip install "
            f"'ckptstore[tensorstore]', or read it whole with run.read",
            tensor=spec.name,
        ) from error
    return ts


def _dtype(ts: Any, spec: TensorSpec) -> Any:
    try:
        return ts.dtype("uint8" if spec.dtype == _AS_BYTES else spec.dtype)
    except ValueError as error:
        raise InvalidInputError(
            f"{spec.name} is {spec.dtype}, which tensorstore does not know: read it whole with "
            f"run.read(names={spec.name.partition('/')[2]!r})",
            tensor=spec.name,
            dtype=spec.dtype,
        ) from error


class _Read:
    """Fills one virtual chunk; called by TensorStore's threads, several at once."""

    def __init__(self, *, store: Store, table: ChunkTable, spec: TensorSpec) -> None:
        self.store = store
        self.table = table
        self.spec = spec

    def __call__(self, domain: tensorstore.IndexDomain, array: np.ndarray[Any, Any], _: Any) -> None:
        # Nothing here waits for TensorStore, so its threads cannot wait for each other. That the answer is
        # None says that it never changes: a cache may keep it.
        box = Box(offset=tuple(domain.inclusive_min), shape=tuple(domain.shape))
        leaf = TensorLeaf(spec=self.spec, box=box, data=array, replicas=None, frozen=False)
        read_leaves(self.store, self.table, [leaf], lanes=1)


class _Make:
    """Builds arrays that share a reader and a context, and so one cache."""

    def __init__(self, *, ts: Any, dtype: Any, context: Any, read: _Read) -> None:
        self.ts = ts
        self.dtype = dtype
        self.context = context if context is not None else ts.Context()
        self.read = read

    def tiling(self, tiling: Tiling) -> tensorstore.TensorStore:
        if isinstance(tiling, Grid):
            return self.array(tiling.box, tiling.step)
        layers = [self.tiling(tile) for tile in tiling.tiles]
        return self.ts.overlay(layers, context=self.context)  # type: ignore[no-any-return]  # tensorstore has no types

    def array(self, box: Box, step: Shape | None) -> tensorstore.TensorStore:
        ts = self.ts
        layout = ts.ChunkLayout(grid_origin=box.offset, read_chunk_shape=step) if step else ts.ChunkLayout()
        return ts.virtual_chunked(  # type: ignore[no-any-return]  # tensorstore has no types
            self.read,
            dtype=self.dtype,
            domain=ts.IndexDomain(inclusive_min=box.offset, shape=box.shape),
            chunk_layout=layout,
            context=self.context,
        )
