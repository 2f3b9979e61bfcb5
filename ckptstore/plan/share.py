"""Who reads a stored chunk that several ranks want, and in what order chunks are handed on.

Every rank makes the same deal from the same wants, so nobody has to be asked. In the order of the batches each
rank waits for the batches before it alone, so handing on cannot stand still. Why: docs/explanation/restore.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARED_BATCH_NBYTES = 16 * 2**20

Key = bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A stored chunk, by a key that all ranks give it, and its stored bytes."""

    key: Key
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Chunks that `reader` reads and hands on to the `takers`, end to end in this order."""

    reader: int
    takers: tuple[int, ...]
    chunks: tuple[Want, ...]

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


def deal(wants: Sequence[Sequence[Want]], *, batch_nbytes: int = SHARED_BATCH_NBYTES) -> tuple[Batch, ...]:
    """The batches of all chunks that two or more ranks want; `wants[r]` are those of rank r, each once.

    Each chunk is read by one of the ranks that want it: the one that reads least until then, largest chunks
    first, counting what each wants alone. A batch has at most `batch_nbytes`, or one chunk. Readers take turns.
    """
    ranks: dict[Want, list[int]] = {}
    for rank, wanted in enumerate(wants):
        for want in wanted:
            ranks.setdefault(want, []).append(rank)
    loads = [0] * len(wants)
    shared: list[Want] = []
    for want, who in ranks.items():
        if len(who) > 1:
            shared.append(want)
        else:
            loads[who[0]] += want.nbytes
    dealt: dict[tuple[int, tuple[int, ...]], list[Want]] = {}
    for want in sorted(shared, key=lambda want: (-want.nbytes, want.key)):
        who = ranks[want]
        reader = min(who, key=lambda rank: (loads[rank], rank))
        loads[reader] += want.nbytes
        dealt.setdefault((reader, tuple(rank for rank in who if rank != reader)), []).append(want)
    turns = [0] * len(wants)
    batches: list[tuple[int, Batch]] = []
    for (reader, takers), chunks in sorted(dealt.items()):
        for some in _cut(chunks, batch_nbytes):
            batches.append((turns[reader], Batch(reader=reader, takers=takers, chunks=tuple(some))))
            turns[reader] += 1
    return tuple(batch for _, batch in sorted(batches, key=lambda item: (item[0], item[1].reader)))


def _cut(chunks: Sequence[Want], batch_nbytes: int) -> list[list[Want]]:
    batches: list[list[Want]] = []
    nbytes = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.key):
        if not batches or nbytes + chunk.nbytes > batch_nbytes:
            batches.append([])
            nbytes = 0
        batches[-1].append(chunk)
        nbytes += chunk.nbytes
    return batches
