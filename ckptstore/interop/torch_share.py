"""Restore on all ranks of a process group, reading each stored byte once for all of them.

A chunk that several ranks want is read and verified by one, handed on, and verified again where it arrives.
No rank leaves before the end: whoever fails goes on taking part and says so, because a rank that stopped would
leave the others waiting. Collective, and on the caller's thread alone. Who reads what: plan/share.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from ckptstore.chunkbase import nbytes_of_bases
from ckptstore.chunktable import ChunkTable
from ckptstore.decode import check_codecs, decoded_nbytes
from ckptstore.errors import CkptStoreError
from ckptstore.fetch import Fetcher
from ckptstore.fill import Fill
from ckptstore.plan.load import plan_load, reads_of
from ckptstore.plan.share import Batch, Want, deal
from ckptstore.reader import Buffers, ReadReport
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store

AHEAD = 3  # batches that a rank has read and not yet handed on

Bytes = npt.NDArray[np.uint8]


class Together:
    """The ranks of one process group (None: the default one) in one restore."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._device = torch.device("cpu")
        if dist.get_backend(group) not in ("gloo", "mpi") and torch.accelerator.is_available():
            self._device = torch.accelerator.current_accelerator() or self._device
        self.told = False  # that this rank failed

    def agree(self, error: BaseException | None) -> None:
        """All ranks say whether they failed. A rank that did raises its own error, the others one that names it."""
        self.told = error is not None
        flags = self._gather(torch.tensor([int(error is not None)], dtype=torch.int64))
        if error is not None:
            raise error
        failed = [rank for rank, flag in enumerate(flags) if int(flag)]
        if failed:
            raise CkptStoreError(
                f"ranks {failed[:8]} of {self.size} could not restore, so this rank must not go on alone: see their "
                f"errors, then begin anew",
                ranks=tuple(failed),
            )

    def read(
        self,
        store: Store,
        table: ChunkTable,
        leaves: Sequence[TensorLeaf],
        *,
        memory_budget: int | None = None,
    ) -> ReadReport:
        """As `read_leaves`, each chunk read by one rank. All ranks raise if one does.

        What is handed on, AHEAD batches, is not of the budget.
        """
        error: BaseException | None = None
        try:
            plan = plan_load(table, leaves)
            check_codecs(table, plan.rows)
            fill = Fill.of(table, leaves, plan)
            opened = Fetcher(store, table, plan.reads, fill.without_memory, memory_budget=memory_budget)
        except CkptStoreError as found:
            error = found
        self.agree(error)
        rows = plan.rows.tolist()
        places = {row: at for at, row in enumerate(rows)}
        sizes = decoded_nbytes(table, plan.rows).tolist()
        wants = [_want(table, row, size) for row, size in zip(rows, sizes, strict=True)]
        batches = deal(self._exchange(wants))
        with (
            opened as fetcher,
            ThreadPoolExecutor(max_workers=fetcher.lanes, thread_name_prefix="ckptstore-read") as pool,
        ):
            share = _Share(
                fetcher=fetcher,
                table=table,
                fill=fill,
                places=places,
                row_of=dict(zip(wants, rows, strict=True)),
            )
            self._hand_on(batches, share, pool)
            shared = {want for batch in batches for want in batch.chunks}
            share.read_alone([row for want, row in share.row_of.items() if want not in shared], pool)
        self.agree(share.error)
        return ReadReport(
            nbytes_wanted=plan.nbytes_wanted,
            nbytes_read=share.nbytes_read,
            nbytes_leased=opened.budget.high_water,
        )

    def _hand_on(self, batches: Sequence[Batch], share: _Share, pool: ThreadPoolExecutor) -> None:
        mine = deque(batch for batch in batches if batch.reader == self.rank)
        under_way: deque[Future[Bytes | None]] = deque()
        for batch in batches:
            if batch.reader == self.rank:
                while mine and len(under_way) < AHEAD:
                    under_way.append(pool.submit(share.fetch, mine.popleft()))
                data = under_way.popleft().result()
                self._send(batch, data)
                if data is not None:
                    share.put(batch, data)
            elif self.rank in batch.takers:
                data = self._receive(batch)
                if data is not None:
                    share.check(batch, data)

    def _send(self, batch: Batch, data: Bytes | None) -> None:
        """First whether there is something, then the bytes."""
        status = torch.tensor([int(data is not None)], dtype=torch.int64, device=self._device)
        work = [dist.isend(status, dst=self._global(rank), group=self._group) for rank in batch.takers]
        if data is not None and data.size:
            body = torch.from_numpy(data).to(self._device)
            work += [dist.isend(body, dst=self._global(rank), group=self._group) for rank in batch.takers]
        for each in work:
            each.wait()  # type: ignore[union-attr]  # None only for ranks outside of the group

    def _receive(self, batch: Batch) -> Bytes | None:
        status = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.irecv(status, src=self._global(batch.reader), group=self._group).wait()  # type: ignore[union-attr]  # None only for ranks outside of the group
        if not int(status):
            return None  # its reader says why; all learn of it in the end
        body = torch.empty(batch.nbytes, dtype=torch.uint8, device=self._device)
        if batch.nbytes:
            dist.irecv(body, src=self._global(batch.reader), group=self._group).wait()  # type: ignore[union-attr]  # None only for ranks outside of the group
        return np.asarray(body.cpu().numpy())

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _exchange(self, wants: Sequence[Want]) -> list[list[Want]]:
        """What each rank wants, in order of rank."""
        mine = np.zeros((len(wants), 24), np.uint8)
        for n, want in enumerate(wants):
            mine[n, :16] = np.frombuffer(want.key, np.uint8)
            mine[n, 16:] = np.frombuffer(want.nbytes.to_bytes(8, "little"), np.uint8)
        counts = [int(each) for each in self._gather(torch.tensor([len(wants)], dtype=torch.int64))]
        padded = np.zeros((max(counts), 24), np.uint8)
        padded[: len(wants)] = mine
        found = self._gather(torch.from_numpy(padded)) if len(padded) else [torch.zeros(0)] * self.size
        return [
            [
                Want(key=row[:16].tobytes(), nbytes=int.from_bytes(row[16:].tobytes(), "little"))
                for row in rows[:n]
            ]
            for n, rows in zip(counts, (each.cpu().numpy() for each in found), strict=True)
        ]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self._device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return found


def _want(table: ChunkTable, row: int, nbytes: int) -> Want:
    """Segment and start name a stored chunk in the same way on all ranks, whatever rows each has read."""
    place = f"{table.segments[int(table.segment[row])]}:{int(table.start[row])}"
    return Want(key=xxhash.xxh3_128_digest(place.encode()), nbytes=nbytes)


class _Share:
    """What this rank reads and puts in place; the first failure is kept, and the rest goes on."""

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        table: ChunkTable,
        fill: Fill,
        places: dict[int, int],
        row_of: dict[Want, int],
    ) -> None:
        self.fetcher, self.table, self.fill = fetcher, table, fill
        self.places, self.row_of = places, row_of
        self.nbytes_read = 0
        self.error: BaseException | None = None

    def fetch(self, batch: Batch) -> Bytes | None:
        """The batch's chunks end to end, each verified; None, with the error kept, if one cannot be had."""
        data = np.empty(batch.nbytes, np.uint8)
        parts = {self.row_of[want]: part for want, part in _parts(batch, data)}
        try:
            for read in reads_of(self.table, list(parts), gap_nbytes=0):
                chunks = [parts[row] for row in read.rows.tolist()]
                self.fetcher.read(read, Buffers(chunks), range(len(chunks)))
                self.nbytes_read += read.nbytes + nbytes_of_bases(self.table, read.rows)
        except Exception as error:  # whatever it was, the takers wait for this batch
            self.error = self.error or error
            return None
        return data

    def check(self, batch: Batch, data: Bytes) -> None:
        """Put a batch that another rank read in place, if it is what was stored."""
        for want, part in _parts(batch, data):
            row = self.row_of[want]
            if xxhash.xxh3_128_digest(part.data) != self.table.digest[row].tobytes():
                # What is stored is whole: no damage to be marked in the journal.
                self.error = self.error or CkptStoreError(
                    f"{self.table.spec(row).name} {self.table.box(row)} arrived from rank {batch.reader} with another "
                    f"digest than it was stored with: the network or a memory is faulty, restore again",
                    tensor=self.table.spec(row).name,
                )
                return
        self.put(batch, data)

    def put(self, batch: Batch, data: Bytes) -> None:
        for want, part in _parts(batch, data):
            self.fill.put(self.places[self.row_of[want]], part)

    def read_alone(self, rows: Sequence[int], pool: ThreadPoolExecutor) -> None:
        reads = reads_of(self.table, rows, gap_nbytes=0)
        work = [
            pool.submit(self.fetcher.read, read, self.fill, [self.places[row] for row in read.rows.tolist()])
            for read in reads
        ]
        for read, each in zip(reads, work, strict=True):
            error = each.exception()
            self.error = self.error or error
            self.nbytes_read += read.nbytes + nbytes_of_bases(self.table, read.rows)


def _parts(batch: Batch, data: Bytes) -> Iterator[tuple[Want, Bytes]]:
    at = 0
    for want in batch.chunks:
        yield want, data[at : at + want.nbytes]
        at += want.nbytes
