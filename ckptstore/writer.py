"""Write one member's part: checksum, reuse what is unchanged, segments, then the part.

Each object is durable before the next begins: whatever is visible is whole (docs/reference/format-v1.md,
order of writes). Chunks are taken as they are staged, and a block is on its way while the next is checksummed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptstore.baseline import Baseline
from ckptstore.chunkbase import ChunkBase
from ckptstore.chunksource import ChunkSource
from ckptstore.chunktable import ChunkTable, TableFrame
from ckptstore.chunkwriter import ChunkWriting
from ckptstore.clock import Clock, SystemClock
from ckptstore.encoder import Encoder
from ckptstore.errors import (
    AlreadyExistsError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.iorecord import IoRecord
from ckptstore.journal import new_id
from ckptstore.manifest import AttemptId, Member, Part, SegmentRef, part_key
from ckptstore.plan.encode import REBASE_EVERY
from ckptstore.replicaset import ReplicaSet
from ckptstore.staging import LIMIT_NBYTES_MIN, StagingMemory
from ckptstore.store.base import Buffer, Store
from ckptstore.stream import finish_own
from ckptstore.tablefile import decode_part, encode_part

REWRITE_EVERY: Final = 100
CREATE_TRIES: Final = 8

Phase = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunks:
    """The chunks of a part that is yet to be written: where they lie, and which were already stored."""

    planned: int
    table: ChunkTable
    frame: TableFrame
    segments: Sequence[SegmentRef]  # written
    nbytes_written: int
    nbytes_reused: int
    io: IoRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWriter:
    """Writes the parts of one member. Stateless but for `memory`, whose spare blocks it packs segments in."""

    store: Store
    run: str
    member: Member
    memory: StagingMemory = field(default_factory=lambda: StagingMemory(LIMIT_NBYTES_MIN))
    rewrite_every: int = REWRITE_EVERY
    rebase_every: int = REBASE_EVERY
    encoder: Encoder | None = None  # None: all chunks are raw
    clock: Clock = field(default_factory=SystemClock)

    def write(
        self,
        attempt: AttemptId,
        source: ChunkSource,
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
        stored = self.write_chunks(attempt, source, baseline)
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
        self, attempt: AttemptId, source: ChunkSource, baseline: Baseline | None
    ) -> StoredChunks:
        """Everything of the part but the part itself: its segments, durable on return."""
        writing = ChunkWriting(
            store=self.store,
            member=self.member,
            memory=self.memory,
            rewrite_every=self.rewrite_every,
            rebase_every=self.rebase_every,
            encoder=self.encoder,
            metadata={
                "format": "ckptstore/1",
                "run": self.run,
                "attempt": str(attempt),
                "member": str(self.member),
            },
            attempt=attempt,
            source=source,
            baseline=baseline,
            clock=self.clock,
        )
        segments = writing.run()
        columns, frame = writing.columns, source.frame
        table = frame.table(
            segments=columns.segments,
            starts=columns.starts,
            nbytes=columns.nbytes,
            digests=columns.digests,
            reuses=columns.reuses,
            codecs=columns.codecs,
            stored_digests=columns.stored_digests,
            bases=columns.bases,
        )
        return StoredChunks(
            planned=len(frame.specs),
            table=table,
            frame=frame,
            segments=segments,
            nbytes_written=writing.nbytes_written,
            nbytes_reused=writing.nbytes_reused,
            io=writing.log.record(),
        )

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
        mine = {ref.key for ref in stored.segments}
        needed = {ChunkBase.parse(text).segment for text in stored.table.base if text}
        reused = sorted(needed.union(stored.table.segments) - mine)
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
            nbytes_written=stored.nbytes_written,
            nbytes_reused=stored.nbytes_reused,
            refused=None,
            table=stored.table,
            replicas=replicas,
            io=stored.io,
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
                table=_NO_FRAME.table(segments=(), starts=(), nbytes=(), digests=(), reuses=()),
            )
        )

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


_NO_FRAME = TableFrame.of((), ())


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
    finish_own(store, key, lambda: store.create(key, data))
