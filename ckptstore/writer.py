"""Write one member's part: checksum, reuse what is unchanged, segments, then the part.

Each object is durable before the next begins: whatever is visible is whole (docs/reference/format-v1.md,
order of writes). Chunks are taken as they are staged, and a block is on its way while the next is checksummed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import Any, Final, Protocol

import xxhash

from ckptstore.baseline import Baseline
from ckptstore.chunktable import ChunkTable, TableFrame
from ckptstore.errors import (
    AlreadyExistsError,
    IncompleteSaveError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.image import Image
from ckptstore.journal import new_id
from ckptstore.manifest import AttemptId, Member, Part, SegmentRef, part_key, segment_key
from ckptstore.replicaset import ReplicaSet
from ckptstore.snapshot import Piece
from ckptstore.staging import LIMIT_NBYTES_MIN, StagingMemory
from ckptstore.store.base import Buffer, Store
from ckptstore.stream import SegmentStream, finish_own
from ckptstore.tablefile import decode_part, encode_part
from ckptstore.wire import digest_of

REWRITE_EVERY: Final = 100
CREATE_TRIES: Final = 8
WRITERS: Final = 4  # threads; one alone leaves the device idle between its calls
UNDER_WAY: Final = 6  # blocks

Phase = Callable[[str], None]


class ChunkSource(Protocol):
    """The chunks of one part, in the order of `frame`, and the images of the segments that they may make.

    Chunks in `skipped` were not staged: the caller has promised that they are stored already.
    """

    @property
    def frame(self) -> TableFrame: ...
    @property
    def images(self) -> tuple[Image, ...]: ...
    @property
    def skipped(self) -> Collection[int]: ...

    def pieces(self, chunk: int) -> Sequence[Piece]:
        """The chunk's bytes, once they are staged; raises what staging failed of."""

    def passed(self, chunk: int) -> None:
        """The writer has done with the chunk, or holds the blocks that it still needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunks:
    """The chunks of a part that is yet to be written: where they lie, and which were already stored."""

    planned: int
    table: ChunkTable
    frame: TableFrame
    segments: Sequence[SegmentRef]  # written
    nbytes_written: int
    nbytes_reused: int


class _Columns:
    """The rows of a part as they come to be known, one a chunk."""

    def __init__(self, count: int) -> None:
        self.segments = [""] * count
        self.starts = [0] * count
        self.nbytes = [0] * count
        self.digests = [b""] * count
        self.reuses = [0] * count

    def reuse(self, chunk: int, stored: ChunkTable, row: int) -> int:
        """The chunk lies where `row` of an earlier table says; its bytes there."""
        self.segments[chunk] = stored.segments[int(stored.segment[row])]
        self.starts[chunk] = int(stored.start[row])
        self.nbytes[chunk] = int(stored.nbytes[row])
        self.digests[chunk] = stored.digest[row].tobytes()
        self.reuses[chunk] = int(stored.reuses[row]) + 1
        return self.nbytes[chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWriter:
    """Writes the parts of one member. Stateless but for `memory`, whose spare blocks it packs segments in."""

    store: Store
    run: str
    member: Member
    memory: StagingMemory = field(default_factory=lambda: StagingMemory(LIMIT_NBYTES_MIN))
    rewrite_every: int = REWRITE_EVERY

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
        writing = _Writing(self, attempt, source, baseline)
        segments = writing.run()
        columns, frame = writing.columns, source.frame
        table = frame.table(
            segments=columns.segments,
            starts=columns.starts,
            nbytes=columns.nbytes,
            digests=columns.digests,
            reuses=columns.reuses,
        )
        return StoredChunks(
            planned=len(frame.specs),
            table=table,
            frame=frame,
            segments=segments,
            nbytes_written=writing.nbytes_written,
            nbytes_reused=writing.nbytes_reused,
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
        reused = sorted(set(stored.table.segments) - mine)
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


class _Writing:
    """One call of `write_chunks`: each chunk in the order of its image, checksummed, then reused or appended."""

    def __init__(
        self, writer: PartWriter, attempt: AttemptId, source: ChunkSource, baseline: Baseline | None
    ) -> None:
        self.writer = writer
        self.attempt = attempt
        self.source = source
        self.stored = baseline.table if baseline is not None else None
        self.known = baseline.rows(source.frame) if baseline is not None else [-1] * len(source.frame.specs)
        self.columns = _Columns(len(source.frame.specs))
        self.nbytes_written = self.nbytes_reused = 0
        self.under_way = BoundedSemaphore(UNDER_WAY)

    def run(self) -> list[SegmentRef]:
        for chunk in self.source.skipped:
            self._reuse_skipped(chunk)
        name, finishing = new_id(), list[Future[SegmentRef]]()
        # The threads end before the streams close: nobody writes from memory that was given back.
        with (
            ExitStack() as streams,
            ThreadPoolExecutor(WRITERS, thread_name_prefix="ckptstore-write") as writers,
        ):
            for image in self.source.images:
                key = segment_key(self.attempt, self.writer.member, name, len(finishing))
                found = self._segment(key, image, writers, streams)
                if found is not None:
                    finishing.append(found)
            return [each.result() for each in finishing]

    def _reuse_skipped(self, chunk: int) -> None:
        row = self.known[chunk]
        if row < 0 or self.stored is None:
            spec, box = self.source.frame.specs[chunk], self.source.frame.boxes[chunk]
            raise IncompleteSaveError(
                f"save of step {self.attempt.step}: {spec.name} {box} is frozen and was not staged, since the "
                f"checkpoint before had it, and that failed: save again",
                step=self.attempt.step,
                missing=(),
                reason="frozen, and not stored after all",
            )
        self.nbytes_reused += self.columns.reuse(chunk, self.stored, row)

    def _segment(
        self, key: str, image: Image, writers: ThreadPoolExecutor, streams: ExitStack
    ) -> Future[SegmentRef] | None:
        """Write one image's chunks under `key`; None if all of them are stored already."""
        stream: SegmentStream | None = None
        fresh, columns = list[int](), self.columns
        for place, chunk in enumerate(image.chunks):
            pieces = self.source.pieces(chunk)
            digest, size = digest_of_pieces(pieces), image.sizes[place]
            if self._is_stored(chunk, digest, size):
                self.nbytes_reused += size
                self.source.passed(chunk)
                continue
            if stream is None:
                stream = streams.enter_context(self._stream(key, image, writers))
            columns.segments[chunk], columns.starts[chunk] = key, stream.nbytes
            columns.nbytes[chunk], columns.digests[chunk] = size, digest
            self.nbytes_written += size
            fresh.append(place)
            for piece in pieces:
                stream.append(piece)
            self.source.passed(chunk)
        if stream is None:
            return None
        header = image.header.fill(fresh, [image.sizes[place] for place in fresh], self._metadata())
        return writers.submit(_finish, stream, header)

    def _is_stored(self, chunk: int, digest: bytes, size: int) -> bool:
        """Refer to the baseline's chunk if it has the same bytes and was not referred to for too long."""
        row, stored = self.known[chunk], self.stored
        if row < 0 or stored is None or not size:
            return False
        same = stored.digest[row].tobytes() == digest and int(stored.nbytes[row]) == size
        if not same or int(stored.reuses[row]) >= self.writer.rewrite_every:
            return False
        self.columns.reuse(chunk, stored, row)
        return True

    def _stream(self, key: str, image: Image, writers: ThreadPoolExecutor) -> SegmentStream:
        return SegmentStream(
            self.writer.store,
            key,
            header_nbytes=image.header.nbytes,
            nbytes_max=image.nbytes,
            memory=self.writer.memory,
            writers=writers,
            under_way=self.under_way,
        )

    def _metadata(self) -> dict[str, str]:
        return {
            "format": "ckptstore/1",
            "run": self.writer.run,
            "attempt": str(self.attempt),
            "member": str(self.writer.member),
        }


def _finish(stream: SegmentStream, header: bytes) -> SegmentRef:
    stream.finish(header)
    return SegmentRef(key=stream.key, nbytes=stream.nbytes, header=digest_of(header))


def digest_of_pieces(pieces: Sequence[Piece]) -> bytes:
    """XXH3-128 of the bytes end to end."""
    if len(pieces) == 1:
        return xxhash.xxh3_128_digest(pieces[0].data.data)
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece.data.data)
    return hasher.digest()


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
