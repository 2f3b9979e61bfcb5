"""One rank's part in the saves of a DCP writer: how it learns of an attempt, and what it writes for it.

DCP scatters each rank's plan, and so a ticket in it. But a planner that caches plans gives the writer the plan
of an *earlier* save, with that save's ticket; so a ticket notes itself where it arrives, and the writer takes
it from there, not from the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.baseline import Baseline
from ckptstore.chunksource import ListedChunks
from ckptstore.claim import claim
from ckptstore.clock import SystemClock
from ckptstore.commit import Committer
from ckptstore.errors import (
    CkptStoreError,
    CorruptError,
    FencedError,
    InternalError,
    InvalidInputError,
)
from ckptstore.incarnation import Token
from ckptstore.index import read_index
from ckptstore.interop.dcp_items import Item
from ckptstore.interop.dcp_names import dcp_layout
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Member, Part
from ckptstore.outcome import abandon_reason, fenced
from ckptstore.store.base import Store
from ckptstore.writer import PartWriter, StoredChunks

_arrived: dict[tuple[str, str, int], Ticket] = {}
_arrived_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What one rank needs for one save. `url` is the run's as the writers were given it; `commits`: the coordinator."""

    url: str
    role: str
    rank: int
    token: str
    attempt: AttemptId
    commits: bool

    def arrive(self) -> None:
        with _arrived_lock:
            _arrived[self.url, self.role, self.rank] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.url, self.role, self.rank, self.token, str(self.attempt), self.commits)


def _arrive(url: str, role: str, rank: int, token: str, attempt: str, commits: bool) -> Ticket:
    """Called where torch unpacks a scattered plan."""
    ticket = Ticket(
        url=url, role=role, rank=rank, token=token, attempt=AttemptId.parse(attempt), commits=commits
    )
    ticket.arrive()
    return ticket


def take_ticket(url: str, role: str, rank: int) -> Ticket:
    """The ticket of the save that is under way, once."""
    with _arrived_lock:
        ticket = _arrived.pop((url, role, rank), None)
    if ticket is None:
        raise InvalidInputError(
            f"rank {rank} of {role!r} was told nothing of a save to {url}: give StorageWriter the same url and role on "
            f"all ranks, and let the planner keep SavePlan.storage_data of the global plan",
            url=url,
            rank=rank,
        )
    return ticket


class DcpMember:
    """One member under one fence. One attempt at a time."""

    def __init__(self, *, token: str, member: Member, store: Store, journal: Journal) -> None:
        self.token = token
        self.member = member
        self.store = store
        self.journal = journal
        self._parsed = Token.parse(token)
        self._writer = PartWriter(store=store, run=self._parsed.run, member=member, clock=journal.clock)
        self._baseline: Baseline | None = None
        self._stored: StoredChunks | None = None
        self._last: Part | None = None

    @classmethod
    def join(cls, ticket: Ticket, store: Store) -> DcpMember:
        """Claim the rank's life under the ticket's fence (AlreadyExistsError if another process has it)."""
        token = Token.parse(ticket.token)
        member = Member(role=ticket.role, rank=ticket.rank)
        clock = SystemClock()
        journal = Journal(store, clock=clock, by=str(member), run=token.run, known=token.slot + 1)
        claim(store, clock, token.fence, member, single=True)
        made = cls(token=ticket.token, member=member, store=store, journal=journal)
        made._take_baseline_of_origin()
        return made

    def _take_baseline_of_origin(self) -> None:
        id = self._parsed.origin.checkpoint
        if id is None:
            return
        commit = self.journal.catch_up().fold.commits.get(id)
        if commit is None:
            return
        try:
            index = read_index(self.store, commit.index)
        except CorruptError:
            return  # then nothing is reused, and the save writes in full
        self._baseline = Baseline.of(id, index.table, index.segments)

    def write_chunks(self, attempt: AttemptId, items: Sequence[Item]) -> None:
        """The segments of this rank's part, durable on return. FencedError before anything is written."""
        history = self.journal.catch_up()
        if history.fence != attempt.fence:
            raise fenced(attempt, attempt.fence, history.fence)
        last, self._last = self._last, None
        if (
            last is not None
        ):  # chunks are reused only from what was seen committed; after a failure from nothing
            committed = history.is_committed(last.id)
            self._baseline = Baseline.of(last.id, last.table, last.segments) if committed else None
        chunks = [chunk for item in items for chunk in item.chunks]
        listed = ListedChunks([c.spec for c in chunks], [c.box for c in chunks], [c.data for c in chunks])
        self._stored = self._writer.write_chunks(attempt, listed, self._baseline)

    def write_part(self, attempt: AttemptId, skeleton: Any) -> None:
        """The part over the chunks that were written, durable on return."""
        stored, self._stored = self._stored, None
        if stored is None:
            raise InternalError(f"{self.member} has written no chunks for {attempt}")
        self._last = self._writer.write_part(
            attempt,
            stored,
            skeleton=skeleton,
            layout=dcp_layout(self.member.role, attempt),
            policy_version=None,
            baseline=self._baseline,
        )

    def commit(self, attempt: AttemptId, timeout_s: float) -> None:
        """As `Committer.run`, over the parts of all ranks."""
        try:
            self._committer().run(attempt, timeout_s=timeout_s)
        except CkptStoreError:
            self._last = self._baseline = None
            raise

    def give_up(self, attempt: AttemptId, error: Exception) -> None:
        """Abandon the attempt in the journal, since a part will not come; noted on `error` if that fails too."""
        self._last = self._baseline = self._stored = None
        if isinstance(error, FencedError):
            return
        told = error if isinstance(error, CkptStoreError) else CkptStoreError(repr(error))
        self._committer().try_to_abandon(attempt, abandon_reason(told, f"{self.member}: "), error)

    def _committer(self) -> Committer:
        return Committer(
            store=self.store,
            journal=self.journal,
            fence=self._parsed.fence,
            members=self._parsed.roster.members,
            leader=self.member.role,
        )
