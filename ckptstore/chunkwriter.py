"""Write the chunks of one part: checksum each, refer to what is stored already, encode or append the rest.

Chunks are taken as they are staged, and a block is on its way while the next is checksummed. Encoded chunks go into
segments of their own, so that raw ones stay aligned to their elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from threading import BoundedSemaphore
from typing import Final

import numpy as np
import xxhash

from ckptstore.baseline import Baseline
from ckptstore.chunkbase import ChunkBase
from ckptstore.chunksource import ChunkSource
from ckptstore.chunktable import DELTAS, DIGEST_NBYTES, RAW, ChunkTable
from ckptstore.clock import Clock
from ckptstore.encoder import Bytes, Encoder, Form, Start
from ckptstore.errors import IncompleteSaveError
from ckptstore.image import Image
from ckptstore.journal import new_id
from ckptstore.manifest import AttemptId, Member, SegmentRef, segment_key
from ckptstore.snapshot import Piece
from ckptstore.staging import StagingMemory
from ckptstore.store.base import Store
from ckptstore.stream import SegmentStream
from ckptstore.wire import digest_of
from ckptstore.writelog import WriteLog

WRITERS: Final = 4  # threads; one alone leaves the device idle between its calls
FINISHERS: Final = 2
UNDER_WAY: Final = 6  # blocks


class _Columns:
    """The rows of a part as they come to be known, one a chunk."""

    def __init__(self, count: int) -> None:
        self.segments = [""] * count
        self.starts = [0] * count
        self.nbytes = [0] * count
        self.digests = [b""] * count
        self.reuses = [0] * count
        self.codecs = [RAW] * count
        self.stored_digests: list[bytes | None] = [None] * count
        self.bases = [""] * count

    def reuse(self, chunk: int, stored: ChunkTable, row: int) -> int:
        """The chunk lies where `row` of an earlier table says; its bytes there."""
        self.segments[chunk] = stored.segments[int(stored.segment[row])]
        self.starts[chunk] = int(stored.start[row])
        self.nbytes[chunk] = int(stored.nbytes[row])
        self.digests[chunk] = stored.digest[row].tobytes()
        self.reuses[chunk] = int(stored.reuses[row]) + 1
        self.codecs[chunk] = stored.codecs[int(stored.codec[row])]
        if stored.stored_digest is not None and self.codecs[chunk] != RAW:
            self.stored_digests[chunk] = stored.stored_digest[row].tobytes()
        self.bases[chunk] = stored.base[row] if stored.base else ""
        return self.nbytes[chunk]


@dataclass(slots=True, eq=False)
class _Open:
    """A segment that is being written: which places of its image it has so far, and their stored sizes."""

    stream: SegmentStream
    places: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Fresh:
    """Chunks at neighbouring places that are to be written; one alone perhaps in the form that is being made."""

    places: range
    digests: Sequence[bytes]
    pieces: Sequence[Piece]
    data: Bytes | None = None  # of one that is looked at by the encoder
    form: Future[Form | None] | None = None


class ChunkWriting:
    """One writing of a part's chunks, each in the order of its image."""

    def __init__(
        self,
        *,
        store: Store,
        member: Member,
        memory: StagingMemory,
        rewrite_every: int,
        rebase_every: int,
        encoder: Encoder | None,
        metadata: Mapping[str, str],
        attempt: AttemptId,
        source: ChunkSource,
        baseline: Baseline | None,
        clock: Clock,
    ) -> None:
        self.store, self.member, self.memory = store, member, memory
        self.rewrite_every, self.rebase_every = rewrite_every, rebase_every
        self.encoder, self.metadata = encoder, metadata
        self.attempt = attempt
        self.source = source
        self.stored = baseline.table if baseline is not None else None
        self._had = self.stored.digest.tobytes() if self.stored is not None else b""
        self.known = baseline.rows(source.frame) if baseline is not None else [-1] * len(source.frame.specs)
        self.columns = _Columns(len(source.frame.specs))
        self.nbytes_written = self.nbytes_reused = 0
        self.log = WriteLog(clock, None if encoder is None else encoder.meter)
        self.under_way = BoundedSemaphore(UNDER_WAY)
        self._name, self._count = new_id(), 0
        self._open: dict[bool, _Open] = {}  # by whether its chunks are encoded
        self._waiting = deque[_Fresh]()

    def run(self) -> list[SegmentRef]:
        for chunk in self.source.skipped:
            self._reuse_skipped(chunk)
        finishing = list[Future[SegmentRef]]()
        # The threads end before the streams close: nobody writes from memory that was given back.
        with (
            ExitStack() as streams,
            ThreadPoolExecutor(WRITERS, thread_name_prefix="ckptstore-write") as writers,
            # Threads of their own, since a segment's end waits for its writes.
            ThreadPoolExecutor(FINISHERS, thread_name_prefix="ckptstore-finish") as finishers,
            ThreadPoolExecutor(self._cores, thread_name_prefix="ckptstore-encode") as encoders,
        ):
            for image in self.source.images:
                self._image(image, writers, encoders, streams)
                for encoded in sorted(self._open):
                    done = self._open.pop(encoded)
                    header = image.header.fill(
                        done.places, done.sizes, self.metadata, encoded=done.places if encoded else ()
                    )
                    finishing.append(finishers.submit(_finish, done.stream, header))
            found = [each.result() for each in finishing]
        if self.encoder is not None:
            self.encoder.meter.settle()
        return found

    @property
    def _cores(self) -> int:
        return 1 if self.encoder is None else self.encoder.cores

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

    def _image(
        self, image: Image, writers: ThreadPoolExecutor, encoders: ThreadPoolExecutor, streams: ExitStack
    ) -> None:
        """Write one image's chunks that are not stored already; those that wait for their form in order."""
        for places in self.source.runs(image):
            for fresh in self._fresh(image, places):
                self._waiting.append(self._look(fresh, image, encoders))
                busy = sum(each.form is not None for each in self._waiting)
                while self._waiting and (not busy or busy > self._cores or self._waiting[0].form is None):
                    busy -= self._waiting[0].form is not None
                    self._append(self._waiting.popleft(), image, writers, streams)
        while self._waiting:
            self._append(self._waiting.popleft(), image, writers, streams)

    def _fresh(self, image: Image, places: range) -> Iterator[_Fresh]:
        """What of a run is to be written: chunk by chunk where an encoder looks at each, else neighbours together."""
        pieces = self.source.pieces(image, places)
        chunks, sizes = image.chunks[places.start : places.stop], image.sizes[places.start : places.stop]
        digests = digests_of(pieces, sizes)
        stored = list(map(self._is_stored, chunks, digests, sizes))
        if any(stored):
            self.source.passed(list(compress(chunks, stored)))
        low = 0
        while low < len(stored):
            high = low + 1
            while self.encoder is None and high < len(stored) and stored[high] == stored[low]:
                high += 1
            if not stored[low]:
                part = places[low:high]
                yield _Fresh(part, digests[low:high], _cut(pieces, sizes, low, high))
            low = high

    def _look(self, fresh: _Fresh, image: Image, encoders: ThreadPoolExecutor) -> _Fresh:
        """The chunk, on its way to the encoder if it is one for it."""
        if self.encoder is None:
            return fresh
        chunk, size = image.chunks[fresh.places.start], image.sizes[fresh.places.start]
        encoder, spec, box = self.encoder, self.source.frame.specs[chunk], self.source.frame.boxes[chunk]
        if not (encoder.may_encode(spec, size) or encoder.wants_base(spec, size)):
            return fresh
        data, form = _joined(fresh.pieces), None
        if encoder.may_encode(spec, size):
            form = encoders.submit(encoder.encode, spec, box, data, self._start(chunk))
        return replace(fresh, data=data, form=form)

    def _start(self, chunk: int) -> Start | None:
        """What the chunk may be a difference from: what the baseline stores in full, not for too long."""
        row, stored = self.known[chunk], self.stored
        if row < 0 or stored is None:
            return None
        reuses = int(stored.reuses[row]) + 1
        if reuses >= min(self.rebase_every, self.rewrite_every):
            return None
        codec = stored.codecs[int(stored.codec[row])]
        if codec in DELTAS:
            return Start(base=ChunkBase.parse(stored.base[row]), reuses=reuses)
        return Start(
            base=ChunkBase(
                segment=stored.segments[int(stored.segment[row])],
                start=int(stored.start[row]),
                nbytes=int(stored.nbytes[row]),
                codec=codec,
                digest=stored.digest[row].tobytes(),
            ),
            reuses=reuses,
        )

    def _append(self, fresh: _Fresh, image: Image, writers: ThreadPoolExecutor, streams: ExitStack) -> None:
        columns, low, high = self.columns, fresh.places.start, fresh.places.stop
        form = fresh.form.result() if fresh.form is not None else None
        found = self._open.get(form is not None)
        if found is None:
            key = segment_key(self.attempt, self.member, self._name, self._count)
            found = _Open(streams.enter_context(self._stream(key, image, writers)), [], [])
            self._open[form is not None], self._count = found, self._count + 1
        stream, chunks = found.stream, image.chunks[low:high]
        sizes = image.sizes[low:high] if form is None else (form.data.size,)
        start, key = stream.nbytes, stream.key
        for chunk, digest, size in zip(chunks, fresh.digests, sizes, strict=True):
            columns.segments[chunk], columns.starts[chunk] = key, start
            columns.nbytes[chunk], columns.digests[chunk] = size, digest
            start += size
        if form is not None:
            columns.codecs[chunks[0]], columns.stored_digests[chunks[0]] = form.codec, form.stored_digest
            columns.bases[chunks[0]], columns.reuses[chunks[0]] = form.base, form.reuses
        if fresh.data is not None:
            self._keep(chunks[0], fresh.data, image.sizes[low])
        self.nbytes_written += start - stream.nbytes
        found.places.extend(fresh.places)
        found.sizes.extend(sizes)
        for piece in fresh.pieces if form is None else [Piece(form.data, None, 0)]:
            stream.append(piece)
        self.source.passed(chunks)

    def _keep(self, chunk: int, data: Bytes, size: int) -> None:
        """Hold the bytes of a chunk that is stored in full, for deltas to come."""
        spec, columns = self.source.frame.specs[chunk], self.columns
        codec = columns.codecs[chunk]
        if self.encoder is None or codec in DELTAS or not self.encoder.wants_base(spec, size):
            return
        place = ChunkBase(
            segment=columns.segments[chunk],
            start=columns.starts[chunk],
            nbytes=columns.nbytes[chunk],
            codec=codec,
            digest=columns.digests[chunk],
        )
        self.encoder.keep(spec, self.source.frame.boxes[chunk], place, data)

    def _is_stored(self, chunk: int, digest: bytes, size: int) -> bool:
        """Refer to the baseline's chunk if it has the same bytes and was not referred to for too long."""
        row = self.known[chunk]
        if row < 0 or self.stored is None or not size:
            return False
        if self._had[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES] != digest:
            return False
        if int(self.stored.reuses[row]) >= self.rewrite_every:
            return False
        self.nbytes_reused += self.columns.reuse(chunk, self.stored, row)
        return True

    def _stream(self, key: str, image: Image, writers: ThreadPoolExecutor) -> SegmentStream:
        return SegmentStream(
            self.store,
            key,
            header_nbytes=image.header.nbytes,
            nbytes_max=image.nbytes,
            memory=self.memory,
            writers=writers,
            under_way=self.under_way,
            log=self.log,
        )


def _finish(stream: SegmentStream, header: bytes) -> SegmentRef:
    stream.finish(header)
    return SegmentRef(key=stream.key, nbytes=stream.nbytes, header=digest_of(header))


def _joined(pieces: Sequence[Piece]) -> Bytes:
    if len(pieces) == 1:
        return pieces[0].data
    data, at = np.empty(sum(piece.data.nbytes for piece in pieces), np.uint8), 0
    for piece in pieces:  # np.concatenate would hold the interpreter's lock
        np.copyto(data[at : at + piece.data.nbytes], piece.data)
        at += piece.data.nbytes
    return data


def _cut(pieces: Sequence[Piece], sizes: Sequence[int], low: int, high: int) -> Sequence[Piece]:
    """Of the pieces of chunks of these sizes those of some; several chunks are one piece."""
    if high - low == len(sizes):
        return pieces
    (piece,) = pieces
    at = sum(sizes[:low])
    return [Piece(piece.data[at : at + sum(sizes[low:high])], piece.block, piece.at + at)]


def digests_of(pieces: Sequence[Piece], sizes: Sequence[int]) -> list[bytes]:
    """XXH3-128 of each chunk, of which the pieces are the bytes end to end; several chunks are one piece."""
    if len(pieces) == 1:
        data, ends = pieces[0].data.data, list(accumulate(sizes))
        return [xxhash.xxh3_128_digest(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece.data.data)
    return [hasher.digest()]
