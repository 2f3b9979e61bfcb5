"""Nested state as tensor leaves and a skeleton.

A state is nested dicts, lists and tuples of tensors, numbers, strings, bytes, numpy arrays and
objects with `state_dict`. Flattening gives each tensor a dotted name and keeps all else as tagged
JSON, so that loading never runs code. Anything else is refused by its path, before anything is saved.
The tags: docs/reference/format-v1.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.held import (
    ExpertParallel,
    Frozen,
    HeldBy,
    PerRank,
    Where,
    is_tensor_leaf,
    join,
    ranks_of,
    torch_module,
)
from ckptstore.known import Met, Recollection
from ckptstore.ledger import Ledger
from ckptstore.pieces import describe, tie_of
from ckptstore.seen import (
    SCALARS,
    WRAPPERS,
    Asked,
    Differs,
    Look,
    Place,
    Seen,
    SeenItems,
    SeenObject,
    SeenTensor,
    SeenValue,
    SeenWrapper,
    has_state_dict,
    opened,
)
from ckptstore.seen_tensor import see_tensor
from ckptstore.structure import FlatState as FlatState
from ckptstore.structure import Structure as Structure
from ckptstore.structure import TensorLeaf as TensorLeaf
from ckptstore.tensor import Box, TensorSpec
from ckptstore.values import decode_value, encode_value, is_utf8

MAX_DEPTH = 100  # far below the depth at which Python's own readers of JSON give up


class Known:
    """What the states flattened before were like, so that the next one is only compared. Holds no tensor.

    Specs, boxes and replicas equal to earlier ones are given back as the same objects, and the structure of the
    last state as the same one. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], tuple[TensorSpec, Box, tuple[int, ...] | None]] = {}
        self._last: Recollection | None = None
        self._structure: Structure | None = None

    def same(
        self, at: int, spec: TensorSpec, box: Box, replicas: tuple[int, ...] | None
    ) -> tuple[TensorSpec, Box, tuple[int, ...] | None]:
        """What leaf number `at` of its tensor was described by before, if that is equal."""
        now = (spec, box, replicas)
        known = self._of.get((spec.name, at))
        if known == now:
            return known
        self._of[spec.name, at] = now
        return now

    def again(self, state: Any, role: str, rank: int, asked: Asked) -> FlatState | None:
        """The flat state, if it is as the last one in all that a structure follows from."""
        last, self._last = self._last, None  # an error in the middle leaves nothing half known
        if last is None or last.member != (role, rank):
            return None
        look = Look(asked, lambda value, place: _Flatten(role, rank, None, asked).node(value, *place))
        try:
            root, data = last.again(state, look)
        except Exception:  # Differs, or anything: the walk anew meets it again and says where
            return None
        self._last = last
        return FlatState(structure=last.structure, skeleton=root.skeleton, places=last.places, data=data)

    def keep(self, root: Seen, structure: Structure, walk: _Flatten) -> FlatState:
        """Remember what a walk met, as far as it can be compared exactly."""
        if len(self._of) > 4 * len(structure) + 1000:
            self._of.clear()  # names that change at every save must not fill the memory
        if structure == self._structure and self._structure is not None:
            structure = self._structure
        self._structure = structure
        flat = walk.flat(root, structure)
        if walk.comparable:
            try:
                self._last = Recollection(
                    member=(walk.role, walk.rank),
                    root=root,
                    look=walk.look,
                    met=walk.met,
                    structure=structure,
                )
            except Differs:
                return flat
            return replace(flat, places=self._last.places)
        return flat


def flatten(state: Any, *, role: str, rank: int, known: Known | None = None) -> FlatState:
    """Flatten one rank's state. Values are captured now; tensors are referenced, not copied.

    What is as in the state flattened before with the same `known` is only compared, and described by the same
    objects. InvalidInputError names the path of what cannot be saved.
    """
    if not isinstance(state, dict):
        raise InvalidInputError(
            f"a state is a dict of names, not {type(state).__name__}: save {{'model': ...}} instead"
        )
    asked = Asked()
    if known is not None and (found := known.again(state, role, rank, asked)) is not None:
        return found
    asked.rewind()
    walk = _Flatten(role, rank, known, asked)
    root = walk.node(state, "", Where(), 0)
    structure = Structure.of(walk.leaves)
    return walk.flat(root, structure) if known is None else known.keep(root, structure, walk)


class _Flatten:
    """One walk over all of a state."""

    def __init__(self, role: str, rank: int, known: Known | None, asked: Asked) -> None:
        self.role, self.rank, self.known = role, rank, known
        self.look = Look(asked, _never)  # not a method: a cycle would keep the tensors until it is collected
        self.leaves: list[TensorLeaf] = []
        self.names: set[str] = set()
        self.tied: dict[
            Any, str
        ] = {}  # by what they are and where they lie: the name under which they are stored
        self.met: list[Met] = []
        self.comparable = True

    def flat(self, root: Seen, structure: Structure) -> FlatState:
        data = tuple([leaf.data for leaf in self.leaves])
        return FlatState(structure=structure, skeleton=root.skeleton, places=None, data=data)

    def node(self, value: Any, path: str, where: Where, depth: int) -> Seen:
        if depth > MAX_DEPTH:
            raise InvalidInputError(
                f"{path[:200]} is nested deeper than {MAX_DEPTH}: it may contain itself; flatten it",
                path=path,
            )
        place = (path, where, depth)
        if is_tensor_leaf(value):
            return self.tensor(value, place)
        if isinstance(value, Ledger):
            return SeenValue(skeleton={"ledger": value.to_json()}, place=place, tensors=0)
        if isinstance(value, WRAPPERS):
            return self.wrapper(value, place)
        if isinstance(value, dict):
            pairs, children = [], []
            for key, inner in value.items():
                told, at, within = where.enter(path, self.key(key, path))
                children.append(child := self.node(inner, at, within, depth + 1))
                pairs.append([told, child.skeleton])
            return self.items(value, "d", pairs, children, place)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            children = []
            for number, inner in enumerate(value):
                where.check_place(path, number)
                children.append(self.node(inner, join(path, number), where, depth + 1))
            tag = "l" if isinstance(value, list) else "t"
            return self.items(value, tag, [child.skeleton for child in children], children, place)
        torch = torch_module()
        if torch is not None and isinstance(value, torch.optim.Optimizer):
            raise InvalidInputError(
                f"{path} is a bare optimizer, whose keys are indices and whose load casts FP32 moments: save "
                f"ckptstore.torch_state(model, optimizer) instead",
                path=path,
            )
        if has_state_dict(value):
            told = self.node(self.look.asked.state_dict(value), path, where, depth + 1)
            return SeenObject(
                skeleton={"o": told.skeleton}, place=place, tensors=told.tensors, kind=type(value), inner=told
            )
        return SeenValue(
            skeleton=encode_value(value, path),
            place=place,
            tensors=0,
            scalar=(value,) if type(value) in SCALARS else None,
        )

    def items(self, value: Any, tag: str, skeletons: list[Any], children: list[Seen], place: Place) -> Seen:
        seen = SeenItems.of(value, tag, skeletons, children, place)
        self.comparable &= type(seen) is not Seen
        return seen

    def wrapper(self, value: Any, place: Place) -> Seen:
        path, where, depth = place
        if isinstance(value, PerRank):
            if where.per_rank:
                raise InvalidInputError(f"{path} is a PerRank within a PerRank: wrap it once", path=path)
            inner, within = value.value, replace(where, per_rank=True)
        else:
            inner, within = unwrap(value, path, where, self.rank)
        child = self.node(inner, path, within, depth + 1)
        skeleton = node = child.skeleton
        if isinstance(value, (PerRank, Frozen)):
            skeleton = {"p" if isinstance(value, PerRank) else "z": node}
        elif isinstance(value, ExpertParallel):
            declared = [[each.pattern, each.total] for each in value.families(path) if not each.stacked]
            skeleton = {"x": [declared, node]} if declared else node
        if type(value) not in WRAPPERS:
            self.comparable &= not child.tensors
            return SeenValue(skeleton=skeleton, place=place, tensors=child.tensors)
        return SeenWrapper(
            skeleton=skeleton,
            place=place,
            tensors=child.tensors,
            kind=type(value),
            said=opened(value)[1],
            inner=child,
        )

    def key(self, key: Any, path: str) -> Any:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise InvalidInputError(
                f"{path or 'the state'} has the key {key!r} of type {type(key).__name__}: keys are strings or ints",
                path=path,
            )
        if (isinstance(key, int) and key.bit_length() > 63) or (isinstance(key, str) and not is_utf8(key)):
            raise InvalidInputError(
                f"{path or 'the state'} has the key {ascii(key) if isinstance(key, str) else hex(key)}, which cannot "
                f"be a name: keys are text without lone surrogates, or integers of at most 63 bits",
                path=path,
            )
        return key

    def tensor(self, value: Any, place: Place) -> Seen:
        path, where, _ = place
        name = f"{self.role}/{path}" + (f"#{self.rank}" if where.per_rank else "")
        if name in self.names:
            raise InvalidInputError(
                f"two tensors of the state are both named {path}: keys such as 1 and '1', or 'a.b' beside an 'a' that "
                f"holds 'b', give one dotted name; rename one of them",
                path=path,
            )
        self.names.add(name)
        spec, pieces = describe(value, name, path, self.rank, where)
        tie = tie_of(value, spec, where, pieces)
        if tie is not None:
            name = self.tied.setdefault((tie.kind, tie.places), name)
        if name == spec.name:
            for at, piece in enumerate(pieces):
                box, replicas = piece.box, piece.replicas
                if self.known is not None:
                    spec, box, replicas = self.known.same(at, spec, box, replicas)
                self.leaves.append(
                    TensorLeaf(spec=spec, box=box, data=piece.data, replicas=replicas, frozen=where.frozen)
                )
        skeleton = {"N" if isinstance(value, np.ndarray) else "T": name.split("/", 1)[1]}
        if self.known is None:  # nobody will ask again
            return SeenTensor(skeleton=skeleton, place=place, tensors=1)
        first = len(self.look.held)
        seen = see_tensor(value, skeleton, place)
        if seen is None:
            self.comparable = False
            return SeenValue(skeleton=skeleton, place=place, tensors=1)
        seen.again(value, self.look)
        self.met.append(Met(first=first, pieces=pieces, tie=tie, stored=name == spec.name))
        return seen


def _never(value: Any, place: Place) -> Seen:
    """A walk anew meets nothing that it would have to walk anew."""
    raise Differs


def unwrap(value: Any, path: str, where: Where, rank: int) -> tuple[Any, Where]:
    """(what is wrapped, what is said of it) of a Frozen, HeldBy or ExpertParallel."""
    if isinstance(value, Frozen):
        return value.tree, replace(where, frozen=True)
    if isinstance(value, HeldBy):
        ranks = ranks_of(value.ranks, path)
        if rank not in ranks:
            raise InvalidInputError(
                f"{path or 'the state'} is held by ranks {list(ranks)}, and this is rank {rank}: leave it out of this "
                f"rank's state, or correct ranks=",
                path=path,
            )
        return value.tree, replace(where, holders=ranks)
    return value.state, replace(where, experts=where.experts + value.families(path))


def decode(node: Any, tensors: Any) -> Any:
    """The nested value of a skeleton node; `tensors(name, numpy: bool)` gives each tensor."""
    if not isinstance(node, dict):
        return node
    ((tag, inner),) = node.items()
    if tag == "d":
        return {key: decode(child, tensors) for key, child in inner}
    if tag == "l":
        return [decode(child, tensors) for child in inner]
    if tag == "t":
        return tuple(decode(child, tensors) for child in inner)
    if tag in ("T", "N"):
        return tensors(inner, tag == "N")
    if tag in ("z", "o"):
        return decode(inner, tensors)
    if tag == "x":
        return decode(inner[1], tensors)
    if tag == "p":
        return PerRank(decode(inner, tensors))
    if tag == "ledger":
        return Ledger.from_json(inner)
    try:
        return decode_value(tag, inner)
    except (TypeError, ValueError, LookupError) as error:
        raise CorruptError(
            f"a stored value tagged {tag!r} cannot be read ({error}): it is damaged, run `ckptstore verify`"
        ) from error
