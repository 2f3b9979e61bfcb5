"""Numbered versions of the policy for the rollouts, through the store.

A publication is made like a checkpoint (segments, parts, index, entry), by every rank of one role, and
is served only under the newest fence. Its identity is the id, its staleness the number; after a restore
the cut's publication is announced again from its stored objects (protocol R29 to R31).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckptstore.binding import Binding
from ckptstore.catalog import Catalog, read_part
from ckptstore.clock import Clock, SystemClock
from ckptstore.commit import COMMIT_TIMEOUT_S, Committer
from ckptstore.contribution import Contributor
from ckptstore.errors import CorruptError, InternalError, InvalidInputError, NotFoundError
from ckptstore.history import CHECKPOINT, History, PublishEntry
from ckptstore.incarnation import Incarnation, Token
from ckptstore.index import open_index
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Member, PublicationId, whole_number
from ckptstore.mapping import TensorMap
from ckptstore.outcome import fenced
from ckptstore.reader import read_leaves
from ckptstore.skeleton import union
from ckptstore.state import TensorLeaf
from ckptstore.store.base import open_store
from ckptstore.stored_leaves import find_unequal_scalars, stored_leaves
from ckptstore.tied import join_tied
from ckptstore.translation import Translation


class Publisher:
    """Publishes for one member of the role that holds the policy. Not for use by several threads at once.

    `check_replicas=False`, on all ranks, publishes also where replicas of one box differ.
    """

    def __init__(
        self,
        inc: Incarnation | str,
        *,
        role: str,
        rank: int,
        timeout_s: float = COMMIT_TIMEOUT_S,
        check_replicas: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._token = Token.parse(inc) if isinstance(inc, str) else inc._token
        self._member = Member(role=role, rank=whole_number(rank, "rank"))
        size = self._token.roster.size(role)
        if self._member.rank >= size:
            raise InvalidInputError(
                f"{self._member} is not in the roster {dict(self._token.roster.roles)}: publish from a member of it",
                role=role,
                rank=rank,
            )
        self._store = open_store(self._token.url, storage_options) if isinstance(inc, str) else inc.store
        self._journal = Journal(
            self._store,
            clock=clock or SystemClock(),
            by=str(self._member),
            run=self._token.run,
            known=self._token.slot + 1,
        )
        self._timeout_s = timeout_s
        members = tuple(Member(role=role, rank=n) for n in range(size))
        committer = None
        if self._member.rank == 0:
            committer = Committer(
                store=self._store,
                journal=self._journal,
                fence=self._token.fence,
                members=members,
                leader=role,
            )
        self._contributor = Contributor(
            token=self._token,
            member=self._member,
            store=self._store,
            journal=self._journal,
            size=size,
            committer=committer,
            check_replicas=check_replicas,
        )
        self._counts: dict[int, int] = {}

    def due(self) -> int:
        """The number that the next publication must have."""
        history = self._history()
        return history.due_number()

    def publish(self, number: int, state: dict[str, Any]) -> PublicationId:
        """Publish `state` as version `number`; durable and in the journal on return. Every rank of the role calls this.

        InconsistentCutError: the number is not due, or the ranks' parts contradict each other.
        FencedError, IncompleteSaveError, TimeoutError as for a save.
        """
        number = whole_number(number, "number", first=0)
        tries = self._counts.get(number, 0)
        self._counts[number] = tries + 1
        attempt = AttemptId(fence=self._token.fence, step=number, number=tries, kind="p")
        try:
            staged, flat = self._contributor.begin(attempt, state, None, timeout_s=self._timeout_s)
            staging = self._contributor.stage_beside(staged, flat)
        except Exception as error:
            if self._contributor.size > 1:
                self._contributor.give_up(attempt, error)  # or the others would wait for this part
            raise
        self._contributor.contribute(
            staged,
            baseline=None,
            policy_version=number,
            timeout_s=self._timeout_s,
            phase=lambda name: None,
            stop=lambda: False,
            written=lambda: None,
        )
        staging.result()
        for entry in reversed(self._journal.history.fold.publications):
            if entry.fence == self._token.fence and entry.number == number:
                return entry.id
        raise InternalError(f"publication {number} is in the journal and cannot be found there")

    def reannounce(self) -> PublicationId | None:
        """Announce the restored cut's publication again, same number and digest, under this fence (R29).

        From its stored objects; durable on return. None when there is nothing to announce: a fresh start,
        or a cut that names no stored publication; then `due()` tells the number to publish. One member calls this.
        """

        def decide(history: History) -> PublishEntry | None:
            if history.fence != self._token.fence:
                attempt = AttemptId(fence=self._token.fence, step=history.due_number(), kind="p")
                raise fenced(attempt, self._token.fence, history.fence)
            entry = self._cut_publication(history)
            already = any(p.fence == self._token.fence for p in history.fold.publications)
            if entry is None or already:
                return None
            return PublishEntry(
                fence=self._token.fence,
                number=entry.number,
                base=entry.base,
                index=entry.index,
                digest=entry.digest,
            )

        entry = self._journal.append(decide)
        if entry is not None and isinstance(entry.body, PublishEntry):
            return entry.body.id
        served = self._journal.history.served()
        return served.id if served is not None and served.fence == self._token.fence else None

    def _cut_publication(self, history: History) -> PublishEntry | None:
        origin = self._token.origin
        if origin.kind != CHECKPOINT or origin.checkpoint is None:
            return None
        cut = history.fold.commits[origin.checkpoint].publication
        if cut is None or cut[1] is None:
            return None
        return history.find_publication(cut[0], cut[1])

    def _history(self) -> History:
        return self._journal.catch_up()

    def close(self) -> None:
        """Give the memory of snapshots back. Nothing is in flight between calls."""
        self._contributor.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a subscriber's load moved."""

    id: PublicationId
    nbytes: int
    nbytes_read: int


class Subscriber:
    """Loads publications. Needs no token: whatever it loads is verified, and its id says what it is."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._catalog = Catalog(open_store(url, storage_options), clock=clock).open()

    def newest(self) -> PublicationId | None:
        """The publication to serve now; None between a fence and its first publish."""
        served = self._catalog.history.served()
        return None if served is None else served.id

    def is_current(self, id: PublicationId) -> bool:
        """Is this version on the lineage of the newest fence? Work of any other is dropped (protocol R30)."""
        return self._catalog.history.version_on_lineage(id.fence, id.number)

    def load(
        self, id: PublicationId, into: dict[str, Any], *, mapping: TensorMap | None = None
    ) -> LoadReport:
        """Fill `into` in place with the publication's full tensors, each chunk verified.

        `mapping` makes the tensors of `into` of those of a publication in another naming. NotFoundError: the
        journal has no such publication. MissingTensorError, LayoutMismatchError (before
        any target is touched), CorruptError: then the targets must not be used.
        """
        entry = next((p for p in self._catalog.history.fold.publications if p.id == id), None)
        if entry is None:
            raise NotFoundError(
                f"publication {id} is not in the journal of {self._catalog.store.url}", id=str(id)
            )
        index = open_index(self._catalog.store, entry.index)
        refs = sorted(index.parts, key=lambda ref: ref.member.rank)
        if not refs:
            raise CorruptError(f"publication {id} has no part: publish it again", key=entry.index.key)
        saved = union([read_part(self._catalog.store, ref).state for ref in refs])
        binding = Binding(role=refs[0].member.role, rank=0, per_rank=False)
        stored = index.rows.tensors.by_name
        if mapping is None:
            binding.bind(into, saved)
            binding.check_specs(stored)
            binding.refuse()
            table = index.table(leaf.spec.name for leaf in binding.leaves)
            leaves: Sequence[TensorLeaf] = binding.leaves
        else:
            translation = Translation(mapping, saved, stored, role=binding.role)
            binding.bind(into, translation.skeleton)
            binding.check_translated(translation)
            binding.refuse()
            table = index.table(n for leaf in binding.leaves for n in translation.equals(leaf.spec.name))
            binding.mismatched += find_unequal_scalars(
                self._catalog.store, table, translation, binding.leaves
            )
            leaves = stored_leaves(table, translation, binding.leaves)
        leaves, unequal = join_tied(self._catalog.store, table, leaves)
        binding.mismatched += unequal
        binding.refuse()
        report = read_leaves(self._catalog.store, table, leaves)
        binding.apply()
        return LoadReport(id=id, nbytes=report.nbytes_wanted, nbytes_read=report.nbytes_read)
