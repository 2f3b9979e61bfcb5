"""The values of a stored state that are no tensors, by dotted name and as plain JSON to look at.

For people and programs that inspect a checkpoint; what is restored goes through `state.py`, which gives back
every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptstore.skeleton import WRAPPERS, inner, tag_of, tensor_names
from ckptstore.state import decode


def value_leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, node) of every leaf that is no tensor; lists and PerRank values are one leaf."""
    tag = tag_of(node)
    if tag == "d":
        for key, child in node["d"]:
            yield from value_leaves(child, f"{path}.{key}" if path else str(key))
    elif tag in WRAPPERS:
        yield from value_leaves(inner(node), path)
    elif tag not in ("T", "N") and not (tag in ("l", "t", "p") and _only_tensors(node)):
        yield path, node


def _only_tensors(node: Any) -> bool:
    tag = tag_of(node)
    if tag in ("T", "N"):
        return True
    if tag == "d":
        return all(_only_tensors(child) for _, child in node["d"])
    if tag in ("l", "t"):
        return bool(node[tag]) and all(_only_tensors(child) for child in node[tag])
    return (tag == "p" or tag in WRAPPERS) and _only_tensors(inner(node))


def kind_of(node: Any) -> str:
    """A word for a person: list, float, bytes, ledger, …"""
    kinds = {"l": "list", "t": "tuple", "p": "per rank", "ledger": "ledger", "f": "float", "c": "complex"}
    kinds |= {"b": "bytes", "n": "numpy", "i": "int", "s": "str"}
    tag = tag_of(node)
    return kinds.get(tag, "none" if node is None else type(node).__name__)


def plain_value(node: Any) -> Any:
    """The value as plain JSON: tensors by name, a ledger by its counts, what JSON lacks as text."""
    if not isinstance(node, dict):
        return node
    ((tag, held),) = node.items()
    if tag == "d":
        return {str(key): plain_value(child) for key, child in held}
    if tag in ("l", "t"):
        return [plain_value(child) for child in held]
    if tag == "p" or tag in WRAPPERS:
        return plain_value(inner(node))
    if tag in ("T", "N"):
        return {"tensor": next(tensor_names(node))}
    value = decode(node, None)
    if tag == "ledger":
        return {"seed": value.seed, "frontier": value.frontier, **value.counts()}
    if isinstance(value, bytes):
        return {"nbytes": len(value)}
    if isinstance(value, int):
        return hex(value)  # beyond 64 bits, which few readers of JSON hold
    if isinstance(value, np.generic) and not np.iscomplexobj(value) and np.isfinite(value):
        return value.item()
    return str(value).encode("utf-8", "backslashreplace").decode()
