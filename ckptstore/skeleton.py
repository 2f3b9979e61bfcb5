"""Questions to the tagged JSON of a state: its common values, its ledger, the union of several ranks'.

Pure functions on what `state.py` wrote; the tags are listed in docs/reference/format-v1.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckptstore.ledger import Ledger

CONTAINERS = ("d", "l", "t", "z", "o", "x")
WRAPPERS = ("z", "o", "x")


def escape(name: str) -> str:
    """`@`, `#` and `%` have meanings of their own in stored names."""
    return name.replace("%", "%25").replace("@", "%40").replace("#", "%23")


def unescape(name: str) -> str:
    return name.replace("%23", "#").replace("%40", "@").replace("%25", "%")


def tag_of(node: Any) -> str:
    """The tag of a skeleton node; `v` for a plain JSON value."""
    return next(iter(node)) if isinstance(node, dict) else "v"


def check_node(node: Any) -> None:
    """Refuse what `flatten` never wrote, since all other functions take a node's form for granted: ValueError.

    A tag that is not known is of a newer version, and for `decode` to refuse.
    """
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("a list without a tag")
        return
    if len(node) != 1:
        raise ValueError(f"a value with {len(node)} tags")
    ((tag, value),) = node.items()
    children: Sequence[Any] = ()
    if tag == "d":
        if not _is_pairs(value, (str, int)):
            raise ValueError("a dict that is no list of keys and values")
        children = [child for _, child in value]
    elif tag in ("l", "t"):
        if not isinstance(value, list):
            raise ValueError("a sequence that is no list")
        children = value
    elif tag in ("T", "N"):
        if not isinstance(value, str):
            raise ValueError(f"a tensor named {value!r}")
    elif tag == "x":
        if not (isinstance(value, list) and len(value) == 2 and _is_pairs(value[0], str)):
            raise ValueError("experts without declarations")
        if not all(type(total) is int for _, total in value[0]):
            raise ValueError("a number of experts that is none")
        children = value[1:]
    elif tag in ("z", "o", "p"):
        children = (value,)
    for child in children:
        check_node(child)


def _is_pairs(value: Any, first: type | tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], first) for pair in value
    )


def inner(node: Any) -> Any:
    """What a wrapping node wraps: Frozen, an object with state, a family of experts, PerRank."""
    tag = tag_of(node)
    return node["x"][1] if tag == "x" else node[tag]


def tensor_names(node: Any) -> Iterator[str]:
    """Names (without the role) of all tensors below a skeleton node; of tied ones, the first name for each."""
    tag = tag_of(node)
    if tag in ("T", "N"):
        yield node[tag]
    elif tag == "d":
        for _, child in node["d"]:
            yield from tensor_names(child)
    elif tag in ("l", "t"):
        for child in node[tag]:
            yield from tensor_names(child)
    elif tag == "p" or tag in WRAPPERS:
        yield from tensor_names(inner(node))


def tensor_paths(node: Any, path: str) -> list[str]:
    """Where the tensors below a node stand in the state; `path` is the node's own place."""
    tag = tag_of(node)
    if tag in ("T", "N"):
        return [path]
    if tag == "d":
        children = [(escape(str(key)), child) for key, child in node["d"]]
    elif tag in ("l", "t"):
        children = [(str(number), child) for number, child in enumerate(node[tag])]
    elif tag == "p" or tag in WRAPPERS:
        return tensor_paths(inner(node), path)
    else:
        return []
    return [
        found for key, child in children for found in tensor_paths(child, f"{path}.{key}" if path else key)
    ]


def has_tensors(node: Any) -> bool:
    tag = tag_of(node)
    if tag in ("T", "N"):
        return True
    if tag == "d":
        return any(has_tensors(child) for _, child in node["d"])
    if tag in ("l", "t"):
        return any(has_tensors(child) for child in node[tag])
    return (tag == "p" or tag in WRAPPERS) and has_tensors(inner(node))


def common_values(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """(path, value) of all leaves that must be equal on every rank that has them.

    Tensors are judged by coverage and PerRank by nobody, so both are left out. A list counts as one
    value when it holds no tensor, since its length is part of it.
    """
    return list(_common(node, path))


def _common(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    tag = tag_of(node)
    if tag in ("T", "N", "p"):
        return
    if tag == "d":
        for key, child in node["d"]:
            yield from _common(child, f"{path}.{key}" if path else str(key))
    elif tag in ("l", "t") and has_tensors(node):
        for number, child in enumerate(node[tag]):
            yield from _common(child, f"{path}.{number}")
    elif tag in WRAPPERS:
        if tag == "x":
            yield f"the experts of {path or 'the state'}", node["x"][0]
        yield from _common(inner(node), path)
    else:
        yield path, node


def find_ledger(node: Any) -> Ledger | None:
    """The first Ledger of a state, or None."""
    tag = tag_of(node)
    if tag == "ledger":
        return Ledger.from_json(node["ledger"])
    if tag == "d":
        children = [child for _, child in node["d"]]
    elif tag in ("l", "t"):
        children = node[tag]
    elif tag == "p" or tag in WRAPPERS:
        children = [inner(node)]
    else:
        return None
    return next((found for child in children if (found := find_ledger(child)) is not None), None)


def union(nodes: Sequence[Any], *, by_rank: bool = False) -> Any:
    """One skeleton from several ranks': dicts are joined key by key, lists place by place, all else is the first's.

    With `by_rank` a PerRank node becomes one of a list, an item for each node given: None for one that has none there.
    """
    return _union(list(enumerate(nodes)), len(nodes) if by_rank else 0)


def _union(nodes: Sequence[tuple[int, Any]], ranks: int) -> Any:
    """`union` of nodes with the place of each among all; `ranks` is how many those are, 0 if not by rank."""
    first = nodes[0][1]
    tag = tag_of(first)
    same = [(at, node) for at, node in nodes if tag_of(node) == tag]
    if tag == "d":
        children: dict[str | int, list[tuple[int, Any]]] = {}
        for at, node in same:
            for key, child in node["d"]:
                children.setdefault(key, []).append((at, child))
        return {"d": [[key, _union(found, ranks)] for key, found in children.items()]}
    if tag in ("l", "t") and any(has_tensors(node) for _, node in same):
        longest = max(len(node[tag]) for _, node in same)
        places = [[(at, node[tag][n]) for at, node in same if n < len(node[tag])] for n in range(longest)]
        return {tag: [_union(found, ranks) for found in places]}
    if tag in WRAPPERS:
        return wrapped(first, _union([(at, inner(node)) for at, node in same], ranks))
    if tag == "p" and ranks:
        held = {at: node["p"] for at, node in same}
        return {"p": {"l": [held.get(at) for at in range(ranks)]}}
    return first


def prune(node: Any, wanted: Callable[[str], bool], path: str = "") -> Any:
    """The node with only those leaves below dict keys whose dotted path is wanted; None when none is.

    A list or tuple is kept or dropped as one leaf, since its places count.
    """
    tag = tag_of(node)
    if tag == "d":
        kept = []
        for key, child in node["d"]:
            found = prune(child, wanted, f"{path}.{key}" if path else str(key))
            if found is not None:
                kept.append([key, found])
        return {"d": kept} if kept else None
    if tag in WRAPPERS:
        left = prune(inner(node), wanted, path)
        return None if left is None else wrapped(node, left)
    return node if wanted(path) else None


def wrapped(node: Any, new: Any) -> Any:
    """The wrapping node with something else in it."""
    tag = tag_of(node)
    return {"x": [node["x"][0], new]} if tag == "x" else {tag: new}
