"""The flat names of torch.distributed.checkpoint (DCP), and the nested skeletons of ckptstore.

DCP's planners flatten a nested state to dotted names and keep the path of each; a ckptstore state is nested
and its tensors have those same dotted names. So the paths need no place of their own: the skeleton gives the
nesting to `ckptstore.open` and the paths to torch. Pure functions; how torch descends into containers is
mirrored from its `_traverse.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from ckptstore.errors import InvalidInputError
from ckptstore.manifest import AttemptId
from ckptstore.skeleton import WRAPPERS, inner, tag_of
from ckptstore.wire import canonical, digest_of

Path = tuple[str | int, ...]

_STEP = re.compile(r"(?<![\d.])(\d+)(?:\.[A-Za-z]+)?/*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One item of a DCP checkpoint: its dotted name, its place in the nested state, and what is stored for it."""

    fqn: str
    path: Path
    node: Any  # skeleton: a tensor (`T`), or a value

    @property
    def is_tensor(self) -> bool:
        return tag_of(self.node) == "T"


def dcp_layout(role: str, attempt: AttemptId) -> str:
    """The layout digest of an attempt that torch's planner planned: such parts have no layouts to agree on."""
    return digest_of(canonical([role, "torch.distributed.checkpoint", str(attempt)]))


def step_of(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """The step that a checkpoint_id ends in (`step-100`, `epoch=1-step=100.ckpt`, `100`); None when it ends in none."""
    found = _STEP.search(os.fspath(checkpoint_id))
    return None if found is None else int(found[1])


# -- from names to a skeleton


def nest(nodes: Mapping[str, Any], paths: Mapping[str, Any]) -> Any:
    """The skeleton of a state from its items by dotted name, nested by their paths, in the order of `paths`.

    An item without a path, with one that does not spell its name, or whose place another item takes,
    stands at the top under its dotted name.
    """
    root: dict[str | int, Any] = {}
    ordered = [fqn for fqn in paths if fqn in nodes] + [fqn for fqn in nodes if fqn not in paths]
    for fqn in ordered:
        path = paths.get(fqn)
        if _is_path(path) and ".".join(map(str, path)) == fqn and _place(root, path, nodes[fqn]):
            continue
        if fqn in root:
            raise InvalidInputError(
                f"{fqn} is an item on one rank and holds other items on another: give them different names",
                name=fqn,
            )
        root[fqn] = _Leaf(nodes[fqn])
    return _encode(root, as_list=False)


@dataclass(frozen=True, slots=True)
class _Leaf:
    node: Any


def _is_path(path: Any) -> TypeGuard[Path]:
    return (
        isinstance(path, tuple)
        and bool(path)
        and isinstance(path[0], str)
        and all(type(key) in (str, int) for key in path)
    )


def _place(root: dict[str | int, Any], path: Path, node: Any) -> bool:
    """Put the node at its path; False, and nothing changed, when a leaf or another kind of container is in the way."""
    at = root
    for key, following in pairwise(path):
        found = at.get(key)
        if found is None:
            break
        if isinstance(found, _Leaf) or any(type(other) is not type(following) for other in found):
            return False
        at = found
    else:
        if path[-1] in at:
            return False
    at = root
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = _Leaf(node)
    return True


def _encode(placed: Any, *, as_list: bool) -> Any:
    if isinstance(placed, _Leaf):
        return placed.node
    children = {key: _encode(child, as_list=_is_list(child)) for key, child in placed.items()}
    if as_list:  # what no rank saved is None, as in torch's own nesting
        return {"l": [children.get(n) for n in range(max(children) + 1)]}
    return {"d": [[key, child] for key, child in children.items()]}


def _is_list(child: Any) -> bool:
    return isinstance(child, dict) and all(type(key) is int for key in child)


# -- from a skeleton to names


def entries(skeleton: Any, *, whole_objects: bool) -> dict[str, Entry]:
    """The items that torch's flattening makes of a state, by dotted name; InvalidInputError if two have one name.

    `whole_objects`: an `o` node is one item (a value that torch's planner did not flatten), not to be
    descended into. PerRank values are left out: torch knows none.
    """
    found: dict[str, Entry] = {}
    for path, node in _walk(skeleton, (), whole_objects):
        fqn = ".".join(map(str, path))
        if fqn in found:
            raise InvalidInputError(
                f"two items of the checkpoint are both named {fqn} when it is flattened: read it with "
                f"ckptstore.open, which keeps the nesting",
                name=fqn,
            )
        found[fqn] = Entry(fqn=fqn, path=path, node=node)
    return found


def _walk(node: Any, path: Path, whole_objects: bool) -> Iterator[tuple[Path, Any]]:
    node = _unwrapped(node, whole_objects)
    tag = tag_of(node)
    if tag == "p":
        return
    if tag == "d":
        for key, child in node["d"]:
            yield from _walk(child, (*path, str(key)), whole_objects)
    elif tag == "l" and not is_terminal(node, whole_objects):
        for number, child in enumerate(node["l"]):
            yield from _walk(child, (*path, number), whole_objects)
    else:
        yield path, node


def is_terminal(node: Any, whole_objects: bool) -> bool:
    """Would torch's flattening keep this as one item? Lists of plain values are; tuples always are."""
    node = _unwrapped(node, whole_objects)
    tag = tag_of(node)
    if tag == "d":
        return False
    if tag != "l":
        return True
    children = [_unwrapped(child, whole_objects) for child in node["l"]]
    return not any(tag_of(c) == "T" or not is_terminal(c, whole_objects) for c in children)


def _unwrapped(node: Any, whole_objects: bool) -> Any:
    while tag_of(node) in WRAPPERS and not (whole_objects and tag_of(node) == "o"):
        node = inner(node)
    return node


def tags_in(node: Any) -> set[str]:
    """All tags below and at a skeleton node."""
    tag = tag_of(node)
    children: Sequence[Any] = ()
    if tag == "d":
        children = [child for _, child in node["d"]]
    elif tag in ("l", "t"):
        children = node[tag]
    elif tag == "p" or tag in WRAPPERS:
        children = [inner(node)]
    return {tag}.union(*(tags_in(child) for child in children))
