"""Sum up tens of thousands of tensor names as a short tree of prefixes.

Numbers in names (layers, experts, ranks) become `*`, so what repeats is one row. Then prefixes are opened,
level by level and the largest first, until the tree has as many rows as asked for. Pure.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ckptstore.grouping import pattern_of
from ckptstore.tensor import Shape, TensorSpec


@dataclass(slots=True)
class Prefix:
    """All tensors whose names go on from here. `shape` and `dtype` lists have one item when all agree."""

    name: str
    tensors: int = 0
    nbytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    shapes: set[Shape] = field(default_factory=set)
    children: dict[str, Prefix] = field(default_factory=dict)

    def add(self, spec: TensorSpec, count: int) -> None:
        self.tensors += count
        self.nbytes += spec.nbytes * count
        self.dtypes.add(spec.dtype)
        self.shapes.add(spec.shape)


def prefix_rows(tensors: Iterable[tuple[str, TensorSpec]], *, most: int) -> list[dict[str, Any]]:
    """Rows of the tree, parents before their children: name, depth, tensors, nbytes, dtypes, shape.

    `name` is the whole prefix, ending in a dot when more follows; `shape` is None where several occur.
    """
    root = Prefix("")
    equal = Counter((pattern_of(name), spec.dtype, spec.shape) for name, spec in tensors)
    for (pattern, dtype, shape), number in equal.items():
        _insert(root, pattern, TensorSpec(name=pattern, dtype=dtype, shape=shape), number)
    for child in root.children.values():
        _join_chains(child)
    opened = _open_largest(root, most)
    rows: list[dict[str, Any]] = []
    _walk(root, opened, 0, rows)
    return rows


def _insert(root: Prefix, pattern: str, spec: TensorSpec, number: int) -> None:
    at, path = root, ""
    parts = pattern.split(".")
    for place, part in enumerate(parts):
        # a tensor may be named as others' prefix is: with the dot the two are different children
        key = part if place == len(parts) - 1 else f"{part}."
        path += key
        at = at.children.setdefault(key, Prefix(path))
        at.add(spec, number)


def _join_chains(node: Prefix) -> None:
    """A prefix with one continuation is no row of its own."""
    while len(node.children) == 1:
        (only,) = node.children.values()
        node.name, node.children = only.name, only.children
    for child in node.children.values():
        _join_chains(child)


def _open_largest(root: Prefix, most: int) -> set[int]:
    """Identities of the nodes whose children are shown."""
    opened, rows, order = {id(root)}, len(root.children), count()
    heap = [(0, -child.nbytes, next(order), child) for child in root.children.values()]
    heapq.heapify(heap)
    while heap:
        depth, _, _, node = heapq.heappop(heap)
        if not node.children or rows + len(node.children) > most:
            continue
        opened.add(id(node))
        rows += len(node.children)
        for child in node.children.values():
            heapq.heappush(heap, (depth + 1, -child.nbytes, next(order), child))
    return opened


def _walk(node: Prefix, opened: set[int], depth: int, rows: list[dict[str, Any]]) -> None:
    for child in node.children.values():
        rows.append(_row(child, depth))
        if id(child) in opened:
            _walk(child, opened, depth + 1, rows)


def _row(node: Prefix, depth: int) -> dict[str, Any]:
    return {
        "name": node.name,
        "depth": depth,
        "tensors": node.tensors,
        "nbytes": node.nbytes,
        "dtypes": sorted(node.dtypes),
        "shape": list(next(iter(node.shapes))) if len(node.shapes) == 1 else None,
    }


def shape_text(shape: Sequence[int] | None) -> str:
    """`4096×2048`, `scalar`, or `various` where several occur."""
    if shape is None:
        return "various"
    return "×".join(str(extent) for extent in shape) if shape else "scalar"
