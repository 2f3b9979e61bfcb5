"""The nouns that the store's objects are made of: members, attempts, chunk tables, references.

A chunk table is columns, never a million Python objects; everything else is small and frozen. How
each is laid out in bytes is `wire.py`; what the journal's entries mean is `history.py`. The
format is argued in docs/reference/format-v1.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import CorruptError, InvalidInputError
from .tensor import Box, TensorSpec

FORMAT = 1
DIGEST_NBYTES = 16  # XXH3-128
RAW = "raw"

IntColumn = npt.NDArray[np.int64]
ByteColumn = npt.NDArray[np.uint8]

_ROLE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_ATTEMPT = re.compile(r"f(\d{4,})/([sp])(\d{8,})-(\d{3,})")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Member:
    """One rank of one role."""

    role: str
    rank: int

    def __post_init__(self) -> None:
        if not _ROLE.fullmatch(self.role):
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
        return cls(roles=tuple((role, int(size)) for role, size in sizes.items()))

    def __post_init__(self) -> None:
        if not self.roles:
            raise InvalidInputError("a roster needs at least one role, such as {'trainer': 8}")
        for role, size in self.roles:
            Member(role=role, rank=0)
            if size < 1:
                raise InvalidInputError(f"role {role!r} has size {size}: leave it out, or give at least 1")
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


def part_key(attempt: AttemptId, member: Member) -> str:
    """Deterministic, so that two lives of one member meet at it (protocol R2)."""
    return f"parts/{attempt}/{member.file}.parquet"


def segment_key(attempt: AttemptId, member: Member, writer: str, number: int) -> str:
    return f"data/{attempt}/{member.file}-{writer}-{number:03d}.safetensors"


def index_key(attempt: AttemptId, writer: str) -> str:
    return f"index/{attempt}-{writer}.parquet"


def layout_key(attempt: AttemptId, member: Member) -> str:
    return f"layouts/{attempt}/{member.file}.json"


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
    """One object as another names it: `digest` is the XXH3-128 of all its bytes, in hex."""

    key: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRef:
    """A segment by key and size; `header` is the digest of its header, chunks have digests of their own."""

    key: str
    nbytes: int
    header: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTable:
    """Columns of chunks, sorted by (tensor, offset); tensor names are `role/name`.

    `offset` and `shape` are boxes in elements, `[rows, max ndim]`, padded with 0 and 1. `start` and
    `nbytes` are bytes within the segment. `digest` is of the decoded bytes, `stored_digest` of the
    stored ones (zeros when they are the same). `reuses` counts the checkpoints in a row that have
    referenced the chunk instead of writing it.
    """

    tensors: tuple[TensorSpec, ...]
    segments: tuple[str, ...]
    codecs: tuple[str, ...] = (RAW,)
    tensor: npt.NDArray[np.int32]
    offset: IntColumn
    shape: IntColumn
    segment: npt.NDArray[np.int32]
    start: IntColumn
    nbytes: IntColumn
    digest: ByteColumn
    stored_digest: ByteColumn
    codec: npt.NDArray[np.int16]
    reuses: npt.NDArray[np.int32]
    base: tuple[str, ...] = field(default=())  # one text a row, or () when no chunk has a base

    def __len__(self) -> int:
        return len(self.tensor)

    def spec(self, row: int) -> TensorSpec:
        return self.tensors[int(self.tensor[row])]

    def box(self, row: int) -> Box:
        """The box of one row, in elements of its global tensor."""
        ndim = len(self.spec(row).shape)
        return Box(
            offset=tuple(int(v) for v in self.offset[row, :ndim]),
            shape=tuple(int(v) for v in self.shape[row, :ndim]),
        )

    def take(self, rows: npt.NDArray[Any]) -> ChunkTable:
        """The table of these rows (indices or mask, in ascending order); names stay as they are."""
        return ChunkTable(
            tensors=self.tensors,
            segments=self.segments,
            codecs=self.codecs,
            tensor=self.tensor[rows],
            offset=self.offset[rows],
            shape=self.shape[rows],
            segment=self.segment[rows],
            start=self.start[rows],
            nbytes=self.nbytes[rows],
            digest=self.digest[rows],
            stored_digest=self.stored_digest[rows],
            codec=self.codec[rows],
            reuses=self.reuses[rows],
            base=tuple(np.asarray(self.base, dtype=object)[rows]) if self.base else (),
        )


def make_table(
    *,
    specs: Sequence[TensorSpec],
    boxes: Sequence[Box],
    segments: Sequence[str],
    starts: Sequence[int],
    nbytes: Sequence[int],
    digests: Sequence[bytes],
    reuses: Sequence[int] | None = None,
) -> ChunkTable:
    """A table of raw chunks, one row for each item of the equally long sequences, sorted as tables are."""
    tensors = tuple(sorted({s.name: s for s in specs}.values(), key=lambda s: s.name))
    keys = tuple(sorted(set(segments)))
    at = {spec.name: n for n, spec in enumerate(tensors)}
    where = {key: n for n, key in enumerate(keys)}
    rows, depth = len(specs), max((len(s.shape) for s in specs), default=1) or 1
    offset, shape = np.zeros((rows, depth), np.int64), np.ones((rows, depth), np.int64)
    for n, box in enumerate(boxes):
        offset[n, : len(box.offset)] = box.offset
        shape[n, : len(box.shape)] = box.shape
    table = ChunkTable(
        tensors=tensors,
        segments=keys,
        tensor=np.array([at[s.name] for s in specs], np.int32),
        offset=offset,
        shape=shape,
        segment=np.array([where[key] for key in segments], np.int32),
        start=np.array(starts, np.int64),
        nbytes=np.array(nbytes, np.int64),
        digest=np.frombuffer(b"".join(digests), np.uint8).reshape(rows, DIGEST_NBYTES).copy(),
        stored_digest=np.zeros((rows, DIGEST_NBYTES), np.uint8),
        codec=np.zeros(rows, np.int16),
        reuses=np.array(reuses if reuses is not None else [0] * rows, np.int32),
    )
    return table.take(_order(table))


def _order(table: ChunkTable) -> npt.NDArray[np.intp]:
    keys = [table.offset[:, dim] for dim in reversed(range(table.offset.shape[1]))]
    return np.lexsort((*keys, table.tensor))


def _pad(column: IntColumn, depth: int, fill: int) -> IntColumn:
    missing = depth - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=fill) if missing else column


def merge_tables(tables: Sequence[ChunkTable]) -> ChunkTable:
    """All rows of `tables` as one table. Two specs for one name: CorruptError naming it."""
    specs: dict[str, TensorSpec] = {}
    for table in tables:
        for spec in table.tensors:
            if specs.setdefault(spec.name, spec) != spec:
                raise CorruptError(
                    f"{spec.name} is {specs[spec.name].dtype}{list(specs[spec.name].shape)} in one part and "
                    f"{spec.dtype}{list(spec.shape)} in another: all members must save the same global tensor",
                    tensor=spec.name,
                )
    tensors = tuple(specs[name] for name in sorted(specs))
    segments = tuple(sorted({key for table in tables for key in table.segments}))
    codecs = tuple(dict.fromkeys(codec for table in tables for codec in table.codecs)) or (RAW,)
    depth = max((t.offset.shape[1] for t in tables), default=1)
    any_base = any(t.base for t in tables)

    def codes(names: Sequence[str], column: npt.NDArray[Any], into: Mapping[str, int]) -> npt.NDArray[Any]:
        lookup = np.array([into[name] for name in names] or [0], np.int64)
        return lookup[column] if len(column) else column

    at = {spec.name: n for n, spec in enumerate(tensors)}
    where = {key: n for n, key in enumerate(segments)}
    how = {name: n for n, name in enumerate(codecs)}
    stack: dict[str, list[Any]] = {name: [] for name in ("tensor", "segment", "codec")}
    for t in tables:
        stack["tensor"].append(codes([s.name for s in t.tensors], t.tensor, at))
        stack["segment"].append(codes(t.segments, t.segment, where))
        stack["codec"].append(codes(t.codecs, t.codec, how))

    def join(columns: list[Any], dtype: Any, empty: tuple[int, ...] = (0,)) -> npt.NDArray[Any]:
        return np.concatenate(columns).astype(dtype) if columns else np.zeros(empty, dtype)

    merged = ChunkTable(
        tensors=tensors,
        segments=segments,
        codecs=codecs,
        tensor=join(stack["tensor"], np.int32),
        offset=join([_pad(t.offset, depth, 0) for t in tables], np.int64, (0, depth)),
        shape=join([_pad(t.shape, depth, 1) for t in tables], np.int64, (0, depth)),
        segment=join(stack["segment"], np.int32),
        start=join([t.start for t in tables], np.int64),
        nbytes=join([t.nbytes for t in tables], np.int64),
        digest=join([t.digest for t in tables], np.uint8, (0, DIGEST_NBYTES)),
        stored_digest=join([t.stored_digest for t in tables], np.uint8, (0, DIGEST_NBYTES)),
        codec=join(stack["codec"], np.int16),
        reuses=join([t.reuses for t in tables], np.int32),
        base=tuple(b for t in tables for b in (t.base or ("",) * len(t))) if any_base else (),
    )
    return merged.take(_order(merged))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one member contributes: its chunk table, segments, and state that is not tensors.

    `state` is the tagged JSON skeleton of `state.py`. `segments` is closed: own and reused ones. `planned`
    counts the chunks of the plan; a part with fewer rows lost one. `refused` is the reason of a member
    that cannot contribute (protocol R12), or None.
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
    """One committed checkpoint, as lists show it. `status` is ok, abandoned (left behind by a rollback) or bad."""

    id: AttemptId
    step: int
    fence: int
    slot: int
    committed_at: str
    nbytes: int
    nbytes_written: int
    nbytes_reused: int
    roles: Mapping[str, int]
    publication: tuple[int, str | None] | None
    status: str
