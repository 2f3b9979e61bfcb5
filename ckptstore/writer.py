"""Write one member's part: checksum, reuse what is unchanged, segments, then the part.

Each object is durable before the next begins: whatever is visible is whole (docs/reference/format-v1.md,
order of writes). A chunk is reused only from a checkpoint that was seen committed, by tensor, box and
digest (protocol R16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ckptstore.chunktable import ChunkTable, make_table
from ckptstore.errors import (
    AlreadyExistsError,
    InternalError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.journal import new_id
from ckptstore.manifest import AttemptId, Member, Part, SegmentRef, part_key, segment_key
from ckptstore.replicaset import ReplicaSet
from ckptstore.segment import CHUNKS_MAX, make_header, order
from ckptstore.snapshot import StagedChunk
from ckptstore.store.base import Buffer, Store
from ckptstore.tablefile import decode_part, encode_part
from ckptstore.tensor import Box, TensorSpec
from ckptstore.wire import digest_of

SEGMENT_NBYTES = 2 << 30
REWRITE_EVERY = 100
CREATE_TRIES = 8

Phase = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One chunk of the part: where it lies, by whom it was written."""

    spec: TensorSpec
    box: Box
    segment: str
    start: int
    nbytes: int
    digest: bytes
    reuses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunks:
    """The chunks of a part that is yet to be written: where they lie, and which were already stored."""

    planned: int
    reused: Sequence[Row]
    written: Sequence[Row]
    segments: Sequence[SegmentRef]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Chunks of the newest checkpoint that this member has seen committed and good."""

    id: AttemptId
    table: ChunkTable
    segments: Mapping[str, SegmentRef]
    numbers: Mapping[str, int]
    bounds: Sequence[int]  # rows of tensor n are bounds[n] to bounds[n + 1]

    @classmethod
    def of(cls, id: AttemptId, table: ChunkTable, segments: Sequence[SegmentRef]) -> Baseline:
        return cls(
            id=id,
            table=table,
            segments={ref.key: ref for ref in segments},
            numbers={spec.name: n for n, spec in enumerate(table.tensors)},
            bounds=np.searchsorted(table.tensor, np.arange(len(table.tensors) + 1, dtype=np.int32)).tolist(),
        )

    def find(self, spec: TensorSpec, box: Box) -> Row | None:
        """The stored chunk of exactly this tensor and box, or None."""
        number = self.numbers.get(spec.name)
        if number is None or self.table.tensors[number] != spec:
            return None
        low, high = self.bounds[number], self.bounds[number + 1]
        ndim = len(spec.shape)
        same = (self.table.offset[low:high, :ndim] == box.offset).all(axis=1)
        same &= (self.table.shape[low:high, :ndim] == box.shape).all(axis=1)
        hits = np.flatnonzero(same)
        if not len(hits):
            return None
        row = low + int(hits[0])
        return Row(
            spec=spec,
            box=box,
            segment=self.table.segments[int(self.table.segment[row])],
            start=int(self.table.start[row]),
            nbytes=int(self.table.nbytes[row]),
            digest=self.table.digest[row].tobytes(),
            reuses=int(self.table.reuses[row]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWriter:
    """Writes the parts of one member. Stateless; the store and the run are those of the incarnation."""

    store: Store
    run: str
    member: Member
    segment_nbytes: int = SEGMENT_NBYTES
    rewrite_every: int = REWRITE_EVERY

    def write(
        self,
        attempt: AttemptId,
        chunks: Sequence[StagedChunk],
        *,
        skeleton: Any,
        layout: str,
        policy_version: int | None,
        baseline: Baseline | None,
        replicas: tuple[ReplicaSet, ...] | None = None,
        phase: Phase = lambda _: None,
    ) -> Part:
        """Segments, then the part, each durable before the next begins; all durable on return.

        AlreadyExistsError: another life of this member wrote its part of this attempt.
        """
        stored = self.write_chunks(attempt, chunks, baseline)
        phase("segments_written")
        part = self.write_part(
            attempt,
            stored,
            skeleton=skeleton,
            layout=layout,
            policy_version=policy_version,
            baseline=baseline,
            replicas=replicas,
        )
        phase("part_written")
        return part

    def write_chunks(
        self, attempt: AttemptId, chunks: Sequence[StagedChunk], baseline: Baseline | None
    ) -> StoredChunks:
        """Everything of the part but the part itself: its segments, durable on return."""
        reused, fresh = self._reuse(chunks, baseline)
        written, segments = self._segments(attempt, fresh)
        return StoredChunks(planned=len(chunks), reused=reused, written=written, segments=segments)

    def write_part(
        self,
        attempt: AttemptId,
        stored: StoredChunks,
        *,
        skeleton: Any,
        layout: str,
        policy_version: int | None,
        baseline: Baseline | None,
        replicas: tuple[ReplicaSet, ...] | None = None,
    ) -> Part:
        """The part over what `write_chunks` stored by the same baseline; durable on return. Raises as `write`."""
        reused = sorted({row.segment for row in stored.reused})
        known = baseline.segments if baseline is not None else {}
        part = Part(
            run=self.run,
            write=new_id(),
            id=attempt,
            member=self.member,
            layout=layout,
            policy_version=policy_version,
            planned=stored.planned,
            segments=(*stored.segments, *(known[key] for key in reused)),
            witnesses={key: str(baseline.id) for key in reused} if baseline is not None else {},
            state=skeleton,
            nbytes_written=sum(row.nbytes for row in stored.written),
            nbytes_reused=sum(row.nbytes for row in stored.reused),
            refused=None,
            table=_table([*stored.reused, *stored.written]),
            replicas=replicas,
        )
        self._create_part(part)
        return part

    def refuse(self, attempt: AttemptId, reason: str) -> None:
        """A part that says why this member cannot contribute, so that nobody waits for it (protocol R12)."""
        self._create_part(
            Part(
                run=self.run,
                write=new_id(),
                id=attempt,
                member=self.member,
                layout="",
                policy_version=None,
                planned=0,
                segments=(),
                witnesses={},
                state=None,
                nbytes_written=0,
                nbytes_reused=0,
                refused=reason[:1000],
                table=_table([]),
            )
        )

    # -- steps

    def _reuse(
        self, chunks: Sequence[StagedChunk], baseline: Baseline | None
    ) -> tuple[list[Row], list[tuple[StagedChunk, bytes]]]:
        rows, fresh = [], []
        for chunk in chunks:
            found = baseline.find(chunk.spec, chunk.box) if baseline is not None else None
            if chunk.data is None:
                if found is None:
                    raise InternalError(
                        f"{chunk.spec.name} {chunk.box} is frozen, was not staged and is not stored"
                    )
                digest = found.digest
            else:
                digest = xxhash.xxh3_128_digest(chunk.data.data)
            keep = (
                found is not None
                and found.digest == digest
                and found.nbytes == chunk.nbytes
                and found.nbytes > 0
            )
            if found is not None and keep and (chunk.data is None or found.reuses < self.rewrite_every):
                rows.append(
                    Row(
                        spec=found.spec,
                        box=found.box,
                        segment=found.segment,
                        start=found.start,
                        nbytes=found.nbytes,
                        digest=digest,
                        reuses=found.reuses + 1,
                    )
                )
            else:
                fresh.append((chunk, digest))
        return rows, fresh

    def _segments(
        self, attempt: AttemptId, fresh: Sequence[tuple[StagedChunk, bytes]]
    ) -> tuple[list[Row], list[SegmentRef]]:
        rows: list[Row] = []
        refs: list[SegmentRef] = []
        writer = new_id()
        for number, group in enumerate(self._groups(fresh)):
            specs = [chunk.spec for chunk, _ in group]
            placed = [group[n] for n in order(specs)]
            key = segment_key(attempt, self.member, writer, number)
            header = make_header(
                [chunk.spec for chunk, _ in placed],
                [chunk.box for chunk, _ in placed],
                {
                    "format": "ckptstore/1",
                    "run": self.run,
                    "attempt": str(attempt),
                    "member": str(self.member),
                },
            )
            create_own(self.store, key, [header.data, *(c.data for c, _ in placed if c.data is not None)])
            refs.append(SegmentRef(key=key, nbytes=header.nbytes, header=digest_of(header.data)))
            for (chunk, digest), start in zip(placed, header.starts, strict=True):
                rows.append(
                    Row(
                        spec=chunk.spec,
                        box=chunk.box,
                        segment=key,
                        start=start,
                        nbytes=chunk.nbytes,
                        digest=digest,
                        reuses=0,
                    )
                )
        return rows, refs

    def _groups(self, fresh: Sequence[tuple[StagedChunk, bytes]]) -> list[list[tuple[StagedChunk, bytes]]]:
        groups: list[list[tuple[StagedChunk, bytes]]] = []
        nbytes = 0
        for item in fresh:
            if not groups or len(groups[-1]) >= CHUNKS_MAX or nbytes + item[0].nbytes > self.segment_nbytes:
                groups.append([])
                nbytes = 0
            groups[-1].append(item)
            nbytes += item[0].nbytes
        return groups

    def _create_part(self, part: Part) -> None:
        key = part_key(part.id, part.member)
        data = encode_part(part)
        found = create_contended(self.store, key, data)
        if found != data:
            theirs = decode_part(found, key).write
            raise AlreadyExistsError(
                f"{key} was written by another life of {part.member} (write {theirs}): this process is "
                f"a duplicate, exit",
                key=key,
            )


def create_contended(store: Store, key: str, data: bytes) -> bytes:
    """Create a key that others may want too, and give what it holds: `data`, or another's (protocol R3).

    Durable on return. OutcomeUnknownError: ours may still land, or has landed unheard.
    """
    unsure = False
    for _ in range(CREATE_TRIES):
        try:
            try:
                store.create(key, data)
                return data
            except (AlreadyExistsError, OutcomeUnknownError):
                unsure = True
            found = read_if_there(store, key)
            if found is not None:
                store.settle([key])
                return found
        except StoreUnavailableError as error:
            if not unsure:
                raise
            raise OutcomeUnknownError(f"{key} may have landed ({error}): read it back", key=key) from error
    raise OutcomeUnknownError(f"{key} could not be settled in {CREATE_TRIES} tries: read it back", key=key)


def read_if_there(store: Store, key: str) -> bytes | None:
    """The object's bytes; None when it is absent or cannot be read now."""
    try:
        return store.read(key)
    except (NotFoundError, StoreUnavailableError):
        return None


def create_own(store: Store, key: str, data: Buffer | Sequence[Buffer]) -> None:
    """Create a key that holds a random id of its writer: nobody else wants it, so a lost reply is tried again."""
    for _ in range(CREATE_TRIES):
        try:
            store.create(key, data)
            return
        except OutcomeUnknownError:
            continue
        except AlreadyExistsError:
            # Only an earlier try of ours can have made it, and objects are made all or nothing.
            store.settle([key])
            return
    raise OutcomeUnknownError(
        f"{key} could not be created in {CREATE_TRIES} tries: try the save again", key=key
    )


def _table(rows: Sequence[Row]) -> ChunkTable:
    return make_table(
        specs=[row.spec for row in rows],
        boxes=[row.box for row in rows],
        segments=[row.segment for row in rows],
        starts=[row.start for row in rows],
        nbytes=[row.nbytes for row in rows],
        digests=[row.digest for row in rows],
        reuses=[row.reuses for row in rows],
    )
