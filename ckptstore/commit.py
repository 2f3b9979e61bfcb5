"""Turn the parts of an attempt into one journal entry, or abandon it there.

Any holder of the token may do this, also two at once: every object named is durable before the entry,
the index key is nobody else's, and the entry is judged on exactly the prefix below its slot. Checked
here: each part, its count, one structure and equal common values in a role, coverage of every tensor,
agreement of the roles, and a witness for whatever is reused (protocol R10 to R17, R35, R36).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from ckptstore.agreement import PartClaim, check_agreement
from ckptstore.chunktable import ChunkTable, merge_tables
from ckptstore.clock import tries
from ckptstore.cut import check_coverage, check_part, check_role
from ckptstore.errors import (
    CkptStoreError,
    CorruptError,
    IncompleteSaveError,
    InconsistentCutError,
    NotFoundError,
    StoreUnavailableError,
)
from ckptstore.experts import check_experts
from ckptstore.facts import StateFacts, check_kinds, facts_of
from ckptstore.history import AbandonEntry, CommitEntry, History, PublishEntry
from ckptstore.index import open_index, write_index
from ckptstore.journal import Journal
from ckptstore.manifest import (
    AttemptId,
    Index,
    Member,
    ObjectRef,
    Part,
    PartRef,
    SegmentRef,
    part_key,
)
from ckptstore.outcome import abandon_reason, fenced, refused
from ckptstore.replicas import check_replicas
from ckptstore.store.base import Store
from ckptstore.tablefile import decode_part
from ckptstore.wire import canonical, digest_of

COMMIT_TIMEOUT_S = 600.0
NAMED_AT_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A part that was read back from the store, and how the index names it.

    Of the state only facts are kept, unless the attempt is a publication, whose digest is of the states too.
    """

    part: Part
    facts: StateFacts
    ref: ObjectRef

    @classmethod
    def of(cls, data: bytes, key: str, pool: dict[str, str]) -> Received:
        """The part that these bytes of an object are; texts are shared through `pool`. CorruptError."""
        part = decode_part(data, key)
        try:
            facts = facts_of(part.state, pool)
        except (TypeError, ValueError, LookupError, StopIteration, RecursionError) as error:
            raise CorruptError(
                f"the state in {key} is none of ckptstore's ({error!r}): save again", key=key
            ) from error
        return cls(
            part=part if part.id.kind == "p" else replace(part, state=None),
            facts=facts,
            ref=ObjectRef(key=key, nbytes=len(data), digest=digest_of(data)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Committer:
    """Collects, checks and commits the attempts of one incarnation. Stateless but for the journal's view."""

    store: Store
    journal: Journal
    fence: int
    members: Sequence[Member]
    leader: str  # the role whose policy version counts

    def run(
        self,
        attempt: AttemptId,
        *,
        timeout_s: float = COMMIT_TIMEOUT_S,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Commit (or publish) the attempt, durable on return; or abandon it in the journal and raise.

        IncompleteSaveError: members are missing after `timeout_s`, or refused. InconsistentCutError: the
        parts contradict each other. FencedError: a newer incarnation owns the run. OutcomeUnknownError:
        the entry may have landed; read the journal. `stop` ends the waiting early, as a time-out does.
        """
        try:
            parts = self._collect(attempt, timeout_s, stop)
            index = self._check(attempt, parts)
            ref = self._write_index(index)
            self._append(attempt, index, ref, parts)
        except (IncompleteSaveError, InconsistentCutError, CorruptError) as error:
            self.abandon(attempt, abandon_reason(error))
            if self._is_committed(attempt, self.journal.history):
                return  # by another holder of the token, who found it whole
            if isinstance(error, CorruptError):
                raise InconsistentCutError(str(error), step=attempt.step, **error.values) from error
            raise
        except StoreUnavailableError as error:
            # Nothing that names the attempt has landed, and this committer will not try again.
            self.try_to_abandon(attempt, abandon_reason(error), error)
            raise

    def try_to_abandon(self, attempt: AttemptId, reason: str, error: Exception) -> None:
        """As `abandon`, for a failure that is to be raised: that this fails too (a full disk) is only noted on it."""
        try:
            self.abandon(attempt, reason)
        except CkptStoreError as second:
            error.add_note(f"and the attempt {attempt} could not be abandoned in the journal: {second}")

    def abandon(self, attempt: AttemptId, reason: str) -> None:
        """Record that the attempt will never be committed; nothing when it already is, or another fence rules."""

        def decide(history: History) -> AbandonEntry | None:
            if history.fence != self.fence or not history.is_open(attempt):
                return None
            return AbandonEntry(fence=self.fence, id=attempt, reason=reason[:2000])

        self.journal.append(decide)

    # -- steps

    def _collect(
        self, attempt: AttemptId, timeout_s: float, stop: Callable[[], bool]
    ) -> dict[Member, Received]:
        parts: dict[Member, Received] = {}
        pool: dict[str, str] = {}
        for _ in tries(self.journal.clock, deadline_s=timeout_s, first_s=0.002, most_s=0.25):
            for member in self.members:
                if member in parts:
                    continue
                key = part_key(attempt, member)
                try:
                    data = self.store.read(key)
                except NotFoundError:
                    continue
                parts[member] = Received.of(data, key, pool)
                if (reason := parts[member].part.refused) is not None:
                    raise refused(attempt, member, reason)
            if len(parts) == len(self.members) or self._is_committed(attempt, self.journal.catch_up()):
                break
            if stop():
                raise TimeoutError(
                    f"the Checkpointer was closed while step {attempt.step} waited for parts: {attempt} stays open"
                )
        missing = [str(member) for member in self.members if member not in parts]
        if missing:
            raise IncompleteSaveError(
                f"save of step {attempt.step} lacks the parts of {', '.join(missing[:NAMED_AT_MOST])}"
                f"{_more(missing)} after {timeout_s:g} s: the attempt {attempt} was abandoned and the checkpoint "
                f"before it stands; see whether those processes live, and that every required member calls save",
                step=attempt.step,
                missing=tuple(missing),
                reason="missing",
            )
        # In the order of the roster, whichever came first: digests and messages follow it.
        return {member: parts[member] for member in self.members}

    def _is_committed(self, attempt: AttemptId, history: History) -> bool:
        """Is it in the journal, from whatever committer? FencedError when it is not and never will be."""
        if history.is_committed(attempt):
            return True
        if history.fence != self.fence:
            raise fenced(attempt, self.fence, history.fence)
        return False

    def _check(self, attempt: AttemptId, parts: Mapping[Member, Received]) -> Index:
        for member, received in parts.items():
            check_part(attempt, member, received.part, self.journal.run)
        roles: dict[str, list[Received]] = {}
        for member in self.members:
            roles.setdefault(member.role, []).append(parts[member])
        for role, of_role in roles.items():
            check_received(attempt, role, of_role)
        tables = [(str(member), parts[member].part.table) for member in self.members]
        try:
            table = merge_tables([table for _, table in tables], [member for member, _ in tables])
        except CorruptError as error:
            raise InconsistentCutError(str(error), step=attempt.step) from error
        check_coverage(table, tables)
        for role, of_role in roles.items():
            check_named(attempt, role, of_role, table)
        if attempt.kind == "s":
            self._check_ledgers(attempt, roles)
        segments = {ref.key: ref for received in parts.values() for ref in received.part.segments}
        fresh = [ref for ref in segments.values() if not self._is_reused(ref, parts)]
        self._check_segments(fresh)
        return Index(
            run=self.journal.run or "",
            id=attempt,
            parts=tuple(PartRef(member=member, object=parts[member].ref) for member in self.members),
            segments=tuple(segments[key] for key in sorted(segments)),
            table=table,
        )

    def _check_ledgers(self, attempt: AttemptId, roles: Mapping[str, Sequence[Received]]) -> None:
        """Consumption is the leading role's state; the other roles' records of it never decide (R33 to R36)."""
        claims = []
        for received in (received for of_role in roles.values() for received in of_role):
            part, ledger = received.part, received.facts.ledger
            claims.append(
                PartClaim(
                    member=part.member,
                    step=part.step,
                    layout=part.layout,
                    ledgers=() if ledger is None else (ledger,),
                )
            )
        version = roles[self.leader][0].part.policy_version if self.leader in roles else None
        check_agreement(claims, step=attempt.step, publication=version, decides=self.leader)

    @staticmethod
    def _is_reused(ref: SegmentRef, parts: Mapping[Member, Received]) -> bool:
        return any(ref.key in received.part.witnesses for received in parts.values())

    def _check_segments(self, segments: Iterable[SegmentRef]) -> None:
        """Each new segment is there, whole in size, and durable, before anything is built on it (R4)."""
        refs = list(segments)
        for ref in refs:
            try:
                nbytes = self.store.size(ref.key)
            except NotFoundError as error:
                raise InconsistentCutError(
                    f"segment {ref.key} is named by a part but is not on {self.store.url}: the store lost it; "
                    f"check the store, then save again",
                    segment=ref.key,
                ) from error
            if nbytes != ref.nbytes:
                raise InconsistentCutError(
                    f"segment {ref.key} has {nbytes} bytes where its part names {ref.nbytes}: the store cut it; "
                    f"check the store, then save again",
                    segment=ref.key,
                )
        self.store.settle([ref.key for ref in refs])

    def _write_index(self, index: Index) -> ObjectRef:
        self.store.settle([ref.object.key for ref in index.parts])
        return write_index(self.store, index)

    def _append(
        self, attempt: AttemptId, index: Index, ref: ObjectRef, parts: Mapping[Member, Received]
    ) -> None:
        witnesses = _witnesses(parts)
        listed = {id: self._segments_of(id) for id in sorted(set(witnesses.values()))}
        version = parts[self.members[0]].part.policy_version
        counters = {
            "nbytes": int(index.table.nbytes.sum()),
            "nbytes_saved": index.table.nbytes_saved,
            "nbytes_written": sum(r.part.nbytes_written for r in parts.values()),
            "nbytes_reused": sum(r.part.nbytes_reused for r in parts.values()),
            "roles": {
                role: sum(m.role == role for m in self.members) for role in {m.role for m in self.members}
            },
        }

        def decide(history: History) -> CommitEntry | PublishEntry | None:
            if history.is_committed(attempt):
                return None
            if history.fence != self.fence:
                raise fenced(attempt, self.fence, history.fence)
            if not history.is_open(attempt):
                reason = history.fold.abandoned.get(attempt, "a later save of this fence is committed")
                raise IncompleteSaveError(
                    f"save of step {attempt.step}: the attempt {attempt} is closed ({reason}); save again",
                    step=attempt.step,
                    missing=(),
                    reason=reason,
                )
            if attempt.kind == "p":
                due = history.due_number()
                if attempt.step != due:
                    raise InconsistentCutError(
                        f"publication {attempt.step} where {due} is due: numbers follow the lineage; publish {due}",
                        number=attempt.step,
                        due=due,
                    )
                return PublishEntry(
                    fence=self.fence,
                    number=attempt.step,
                    base=None,
                    index=ref,
                    digest=content_digest(index.table, [r.part.state for r in parts.values()]),
                )
            _check_witnesses(history, attempt, witnesses, listed)
            found = history.find_publication(version) if version is not None else None
            return CommitEntry(
                fence=self.fence,
                id=attempt,
                index=ref,
                witnesses=witnesses,
                level="home",
                publication=None if version is None else (version, found.digest if found else None),
                counters=counters,
            )

        self.journal.append(decide)

    def _segments_of(self, id: AttemptId) -> frozenset[str]:
        """Segments that the index in force of a checkpoint lists; empty when it cannot be read."""
        commit = self.journal.history.fold.commits.get(id)
        if commit is None:
            return frozenset()
        try:
            return frozenset(ref.key for ref in open_index(self.store, commit.index).segments)
        except CkptStoreError:
            return frozenset()


def content_digest(table: ChunkTable, states: Sequence[object]) -> str:
    """Digest of what a publication holds: tensors, boxes, chunk digests and values, not where they lie."""
    hasher = xxhash.xxh3_128()
    hasher.update(canonical([[s.name, s.dtype, list(s.shape)] for s in table.tensors]))
    for column in (table.tensor, table.offset, table.shape, table.digest):
        hasher.update(np.ascontiguousarray(column).view(np.uint8).data)
    hasher.update(canonical(list(states)))
    return hasher.hexdigest()


def check_received(attempt: AttemptId, role: str, received: Sequence[Received]) -> None:
    """Refuse parts of one role that contradict each other: structure, common values, experts, replicas."""
    parts = [each.part for each in received]
    check_role(attempt, role, parts, [each.facts.common for each in received])
    check_kinds(attempt, role, [(each.part.member, each.facts) for each in received])
    check_experts(attempt, role, [(each.part.member, each.facts.families) for each in received])
    check_replicas(attempt, role, parts)


def check_named(attempt: AttemptId, role: str, received: Sequence[Received], table: ChunkTable) -> None:
    """Every tensor that a state names has rows: coverage alone says nothing of a tensor that lost all of them."""
    named: set[str] = set()
    for each in received:
        named.update(each.facts.names)
    lost = {f"{role}/{name}" for name in named}.difference(table.tensors.names)
    if lost:
        name = min(lost)
        member = next(each.part.member for each in received if name[len(role) + 1 :] in each.facts.names)
        raise InconsistentCutError(
            f"the state of {member} names {name}, of which no chunk came with step {attempt.step}: chunks "
            f"were lost, save again",
            step=attempt.step,
            member=str(member),
            tensor=name,
        )


def _witnesses(parts: Mapping[Member, Received]) -> dict[str, AttemptId]:
    return {
        key: AttemptId.parse(id)
        for received in parts.values()
        for key, id in sorted(received.part.witnesses.items())
    }


def _check_witnesses(
    history: History,
    attempt: AttemptId,
    witnesses: Mapping[str, AttemptId],
    listed: Mapping[AttemptId, frozenset[str]],
) -> None:
    """Whatever is reused is still needed by something good, in exactly this prefix (R17)."""
    good = set(history.good())
    for segment, id in witnesses.items():
        if id not in good or segment not in listed[id] or segment in history.fold.rotten:
            raise InconsistentCutError(
                f"step {attempt.step} reuses {segment}, but checkpoint {id} no longer vouches for it: the next save "
                f"writes everything anew",
                step=attempt.step,
                segment=segment,
            )


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
