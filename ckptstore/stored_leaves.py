"""Read the leaves of a translated state: each becomes views of its target, one for each stored box that it needs.

A view is the target's own memory, narrowed and with its dimensions in the stored order, so chunks are
scattered straight into it and no tensor is put together on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ckptstore.arrangement import Source
from ckptstore.chunktable import ChunkTable
from ckptstore.errors import LayoutMismatchError
from ckptstore.reader import ReadReport, read_leaves
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store
from ckptstore.tensor import Box, itemsize
from ckptstore.translation import Translation

_SHOWN = 20


def read_translated(
    store: Store, table: ChunkTable, translation: Translation, leaves: Sequence[TensorLeaf]
) -> ReadReport:
    """Fill the leaves, whose specs are those of the translation, as `read_leaves` does.

    LayoutMismatchError before any is touched if scalars that become one differ.
    """
    differ = find_unequal_scalars(store, table, translation, leaves)
    if differ:
        more = f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise LayoutMismatchError(
            f"cannot read with this mapping: {'; '.join(differ[:_SHOWN])}{more}; read them under their own names",
            problems=tuple(differ),
        )
    return read_leaves(store, table, stored_leaves(table, translation, leaves))


def stored_leaves(
    table: ChunkTable, translation: Translation, leaves: Iterable[TensorLeaf]
) -> list[TensorLeaf]:
    """What the leaves need, in the coordinates of the stored tensors; their data are views of the leaves' data."""
    stored = table.tensors.by_name
    return [
        TensorLeaf(
            spec=stored[source.tensor],
            box=source.box,
            data=view_of(leaf.data, leaf.box, source),
            replicas=None,
            frozen=False,
        )
        for leaf in leaves
        for source in translation.sources(leaf.spec.name, leaf.box)
    ]


def view_of(data: Any, box: Box, source: Source) -> Any:
    """The elements `source.at` of a tensor or array that holds `box`, in the order of the stored dimensions."""
    kept = [dim for dim in range(len(box.shape)) if dim in source.order]
    slices = source.at.relative_to(box).slices
    # The Ellipsis keeps numpy from giving a scalar, which would be a copy.
    cut = (*(one if dim in kept else one.start for dim, one in enumerate(slices)), Ellipsis)
    order = tuple(kept.index(dim) for dim in source.order if dim >= 0)
    part = data[cut].transpose(order) if isinstance(data, np.ndarray) else data.detach()[cut].permute(order)
    return part[(*(slice(None) if dim >= 0 else None for dim in source.order), Ellipsis)]


def find_unequal_scalars(
    store: Store, table: ChunkTable, translation: Translation, leaves: Iterable[TensorLeaf]
) -> list[str]:
    """A sentence for each scalar (a step counter) that stands for stored ones that differ. Reads only those."""
    stored = table.tensors.by_name
    scalars = {leaf.spec.name: translation.equals(leaf.spec.name) for leaf in leaves if not leaf.spec.shape}
    joined = {name: equal for name, equal in scalars.items() if len(equal) > 1}
    if not joined:
        return []
    data = {
        name: np.empty((), f"V{itemsize(stored[name].dtype)}") for equal in joined.values() for name in equal
    }
    wanted = [
        TensorLeaf(spec=stored[name], box=Box.whole(()), data=one, replicas=None, frozen=False)
        for name, one in data.items()
    ]
    read_leaves(store, table, wanted)
    return [
        f"{name} stands for {equal[0]} and {other}, which differ"
        for name, equal in joined.items()
        for other in equal[1:]
        if data[other].tobytes() != data[equal[0]].tobytes()
    ]
