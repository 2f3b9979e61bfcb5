"""Targets that are one tensor under several names, or share memory, and whether what was saved fits that.

Weights that are tied when they are saved are stored once. A target may be tied where the checkpoint is
not; then its one tensor can only be filled if both stored ones are equal, which is found out before
anything is changed. So it is with a view of a target (a transpose, a part of a flat buffer) beside it: what
was saved of the shared elements must be equal. Argued in docs/explanation/layouts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.chunktable import ChunkTable
from ckptstore.memoryspan import agree, host_runs, is_contiguous, overlapping, span_of
from ckptstore.pieces import address_of, memory_of
from ckptstore.reader import read_leaves
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store
from ckptstore.tensor import itemsize

_SHOWN = 5


def join_tied(
    store: Store, table: ChunkTable, leaves: Sequence[TensorLeaf]
) -> tuple[list[TensorLeaf], list[str]]:
    """The leaves with each memory once, and what does not fit: names that are tied here but saved unequal.

    Reads nothing unless two stored tensors were cut differently or differ somewhere.
    """
    if _lie_apart(leaves):  # nearly always, and cheaper to find out
        return list(leaves), []
    first: dict[Any, TensorLeaf] = {}
    kept, problems, judged = list[TensorLeaf](), list[str](), set[tuple[str, str]]()
    for leaf in leaves:
        other = first.setdefault((leaf.box, memory_of(leaf.data)), leaf) if leaf.box.numel else leaf
        if other is leaf:
            kept.append(leaf)
            continue
        names = (other.spec.name, leaf.spec.name)
        if names[0] == names[1] or names in judged or _equal(store, table, other, leaf):
            continue
        judged.add(names)
        problems.append(
            f"{names[0]} and {names[1]} are one tensor here but were saved with different values: untie them, or ask "
            f"for one of them only"
        )
    return kept, problems + _find_torn(store, table, kept)


def _lie_apart(leaves: Sequence[TensorLeaf]) -> bool:
    """Are all contiguous, and does each end before the next begins? False where only a closer look tells."""
    runs: Any = host_runs([leaf.data for leaf in leaves])
    if runs is None:
        held = [leaf for leaf in leaves if leaf.box.numel]
        if not all(is_contiguous(leaf.data) for leaf in held):
            return False
        runs = np.array([(address_of(leaf.data), leaf.nbytes) for leaf in held], np.uint64).reshape(-1, 2)
    runs = runs[runs[:, 1] > 0]
    start, nbytes = runs[np.argsort(runs[:, 0])].T
    return bool((start[:-1] + nbytes[:-1] <= start[1:]).all())


def _find_torn(store: Store, table: ChunkTable, leaves: Sequence[TensorLeaf]) -> list[str]:
    """A sentence for each memory that several leaves show parts of, and for which they were saved unequal."""
    found = [(leaf, span) for leaf in leaves if (span := span_of(leaf.data)) is not None]
    problems = []
    for group in overlapping([span for _, span in found]):
        some = [found[n] for n in group]
        if not agree([span for _, span in some], (_read(store, table, leaf) for leaf, _ in some)):
            names = sorted({leaf.spec.name for leaf, _ in some})
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            problems.append(
                f"{', '.join(names[:_SHOWN])}{more} share memory here but were saved with different values of it: "
                f"give them memory of their own, or ask for one of them only"
            )
    return problems


def _equal(store: Store, table: ChunkTable, one: TensorLeaf, two: TensorLeaf) -> bool:
    if _chunks(table, one.spec.name) == _chunks(table, two.spec.name):
        return True
    return bool(np.array_equal(_read(store, table, one), _read(store, table, two)))


def _chunks(table: ChunkTable, name: str) -> set[tuple[Any, bytes]]:
    rows = np.flatnonzero(table.tensor == table.tensors.find(name)).tolist()
    return {(table.box(row), table.digest[row].tobytes()) for row in rows}


def _read(store: Store, table: ChunkTable, leaf: TensorLeaf) -> npt.NDArray[np.uint8]:
    """The bytes that the leaf's box would have in the leaf's memory, row-major, in memory of their own."""
    data = np.empty(leaf.box.numel * itemsize(leaf.spec.dtype), np.uint8)
    if isinstance(leaf.data, np.ndarray):
        scratch: Any = data.view(leaf.data.dtype).reshape(leaf.box.shape)
    else:
        from ckptstore.interop.torch_tensor import from_bytes

        scratch = from_bytes(data, leaf.spec.dtype, leaf.box.shape)
        # Filled through such views, memory gets other bytes than are stored.
        if data.size and leaf.data.is_conj():
            scratch = scratch.conj()
        if data.size and leaf.data.is_neg():
            scratch = scratch._neg_view()
    read_leaves(
        store,
        table,
        [TensorLeaf(spec=leaf.spec, box=leaf.box, data=scratch, replicas=None, frozen=False)],
    )
    return data
