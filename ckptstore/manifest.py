"""The nouns that the store's objects are made of: members, attempts, parts, indexes, references.

All are small and frozen; rows of chunks are columns (`chunktable.py`). How each is laid out in bytes
is `wire.py` and `tablefile.py`; what the journal's entries mean is `history.py`. The format is argued
in docs/reference/format-v1.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from ckptstore.chunktable import ChunkTable
from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.iorecord import IoRecord
from ckptstore.replicaset import ReplicaSet

FORMAT = 1

RANKS_MAX = 1 << 20  # every commit needs the parts of all of them

_ROLE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_ATTEMPT = re.compile(r"f(\d{4,})/([sp])(\d{8,})-(\d{3,})")


def whole_number(value: object, what: str, *, first: int | None = None) -> int:
    """The plain int, `first` or more, that a caller gave as `what`, also as numpy's or torch's.

       InvalidInputError for all else.
    A bool is refused, and text, and a float: each would go into keys and JSON as something else.
    """
    number = None
    if not isinstance(value, (bool, np.bool_)):
        with suppress(TypeError):
            number = index(value)  # type: ignore[arg-type]  # index() itself asks whether it is a number
    if number is None or (first is not None and number < first):
        more = "" if first is None else f" from {first} up"
        raise InvalidInputError(
            f"{what} is {value!r}, of type {type(value).__name__}: give an int{more}",
            what=what,
            value=repr(value),
        )
    return number


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Member:
    """One rank of one role."""

    role: str
    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not _ROLE.fullmatch(self.role):
            raise InvalidInputError(
                f"role {self.role!r} is not a name: use lower-case letters, digits and '_'", role=self.role
            )
        if self.rank < 0:
            raise InvalidInputError(f"rank {self.rank} of role {self.role!r} is negative", rank=self.rank)

    def __str__(self) -> str:
        return f"{self.role}/{self.rank}"

    @property
    def file(self) -> str:
        """The member as a part of keys: `trainer-00007`."""
        return f"{self.role}-{self.rank:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The members whose parts every commit needs: roles in order, with their sizes."""

    roles: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Roster:
        if not isinstance(sizes, Mapping):
            raise InvalidInputError(
                f"the roster is a {type(sizes).__name__}: give a dict of roles and sizes, such as {{'trainer': 8}}"
            )
        return cls(
            roles=tuple(
                (role, whole_number(size, f"the size of role {role!r}")) for role, size in sizes.items()
            )
        )

    def __post_init__(self) -> None:
        if not self.roles:
            raise InvalidInputError("a roster needs at least one role, such as {'trainer': 8}")
        for role, size in self.roles:
            Member(role=role, rank=0)
            if size < 1:
                raise InvalidInputError(f"role {role!r} has size {size}: leave it out, or give at least 1")
            if size > RANKS_MAX:
                raise InvalidInputError(
                    f"role {role!r} has size {size}: at most {RANKS_MAX} ranks make a role"
                )
        if len({role for role, _ in self.roles}) != len(self.roles):
            raise InvalidInputError(f"roster {self.roles} names a role twice: give each role once")

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(Member(role=role, rank=rank) for role, size in self.roles for rank in range(size))

    @property
    def committer(self) -> Member:
        """Who commits unless `begin` says otherwise: rank 0 of the first role."""
        return Member(role=self.roles[0][0], rank=0)

    def size(self, role: str) -> int:
        """Number of ranks of `role`; 0 if it is not in the roster."""
        return dict(self.roles).get(role, 0)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AttemptId:
    """One try to make a checkpoint (kind `s`) or a publication (kind `p`); also its id once it is committed.

    `step` is the publication's number for kind `p`; `number` counts earlier tries at it under that fence.
    """

    fence: int
    step: int
    number: int = 0
    kind: str = "s"

    def __post_init__(self) -> None:
        if self.kind not in ("s", "p") or min(self.fence, self.step, self.number) < 0:
            raise InvalidInputError(
                f"{self.kind} {self.fence}/{self.step}/{self.number} is no attempt: numbers start at 0",
                fence=self.fence,
                step=self.step,
                number=self.number,
            )

    def __str__(self) -> str:
        return f"f{self.fence:04d}/{self.kind}{self.step:08d}-{self.number:03d}"

    @classmethod
    def parse(cls, text: str) -> AttemptId:
        match = _ATTEMPT.fullmatch(text)
        if match is None:
            raise CorruptError(f"{text!r} is not an attempt such as f0003/s00001500-000", text=text)
        fence, kind, step, number = match.groups()
        return cls(fence=int(fence), kind=kind, step=int(step), number=int(number))


def named_key(value: object) -> str:
    """The key by which one object names another; ValueError for what no store can hold."""
    key = str(value)
    if len(key) > 1024 or not _KEY.fullmatch(key):
        raise ValueError(f"{key[:200]!r} is no key")
    return key


def part_key(attempt: AttemptId, member: Member) -> str:
    """Deterministic, so that two lives of one member meet at it (protocol R2)."""
    return f"parts/{attempt}/{member.file}.parquet"


def segment_key(attempt: AttemptId, member: Member, writer: str, number: int) -> str:
    return f"data/{attempt}/{member.file}-{writer}-{number:03d}.safetensors"


def index_key(attempt: AttemptId, writer: str) -> str:
    return f"index/{attempt}-{writer}.parquet"


def layout_key(attempt: AttemptId, member: Member) -> str:
    """The member's outline, created after `shards_key`."""
    return f"layouts/{attempt}/{member.file}.json"


def shards_key(attempt: AttemptId, member: Member) -> str:
    """The member's shards, which are read only when outlines contradict each other."""
    return f"layouts/{attempt}/{member.file}.shards.json"


def journal_key(slot: int) -> str:
    return f"journal/{slot:020d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationId:
    """Identity of one version of the policy; `number` alone may repeat after a rollback (protocol R29)."""

    fence: int
    number: int
    digest: str

    def __str__(self) -> str:
        return f"f{self.fence:04d}/p{self.number:08d}/{self.digest[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """One object as another names it: `digest` is the XXH3-128 of all its bytes, in hex.

    `tail` is how many bytes at its end have a digest of their own, and that digest, for an object that can
    be read in part: the tail names the rest.
    """

    key: str
    nbytes: int
    digest: str
    tail: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRef:
    """A segment by key and size; `header` is the digest of its header, chunks have digests of their own."""

    key: str
    nbytes: int
    header: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one member contributes: its chunk table, segments, and state that is not tensors.

    `state` is the tagged JSON skeleton of `state.py`. `segments` is closed: own and reused ones. `planned`
    counts the chunks of the plan; a part with fewer rows lost one. `replicas` are the digests of what is held
    together with other ranks, or None where none were taken. `refused` is the reason of a member
    that cannot contribute (protocol R12), or None. `io` is how its own segments were written, None if not recorded.
    """

    run: str
    write: str
    id: AttemptId
    member: Member
    layout: str
    policy_version: int | None
    planned: int
    segments: tuple[SegmentRef, ...]
    witnesses: Mapping[str, str]
    state: Any
    nbytes_written: int
    nbytes_reused: int
    refused: str | None
    table: ChunkTable
    replicas: tuple[ReplicaSet, ...] | None = None
    io: IoRecord | None = None

    @property
    def step(self) -> int:
        return self.id.step


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """A part as the index names it."""

    member: Member
    object: ObjectRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All rows of one checkpoint, its parts, and the closed list of its segments."""

    run: str
    id: AttemptId
    parts: tuple[PartRef, ...]
    segments: tuple[SegmentRef, ...]
    table: ChunkTable

    def part_of(self, role: str) -> Iterator[PartRef]:
        return (ref for ref in self.parts if ref.member.role == role)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint, as lists show it. `status` is ok, abandoned (left behind by a rollback) or bad.

    `nbytes` are stored, of all its chunks: those written for it (`nbytes_written`) and those that lay in an earlier
    checkpoint (`nbytes_reused`). `nbytes_saved` is what their encoding spares, so that written + reused + saved are the
    bytes of all its tensors; None in what was committed before it was counted.
    """

    id: AttemptId
    step: int
    fence: int
    slot: int
    committed_at: str
    nbytes: int
    nbytes_written: int
    nbytes_reused: int
    nbytes_saved: int | None
    roles: Mapping[str, int]
    publication: tuple[int, str | None] | None
    status: str
