"""What a prefix of the journal means: fences, lineage, open attempts, publications.

`History` is the fold of the entries below a slot. Every rule that decides whether an entry may
land is a question to the fold of exactly the prefix below the slot it wants, so each is a pure
function here and replays as a unit test. The rules and their proof: protocol, R6-R13, R17, R22-R31;
docs/explanation/cuts.md tells them in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import CorruptError
from ckptstore.manifest import AttemptId, ObjectRef, PublicationId, Roster

SUMMARY_EVERY = 256
START = "start"
CHECKPOINT = "checkpoint"
ADOPT = "adopt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a fence continues from: nothing, a checkpoint, or (adopt) the living members of another fence."""

    kind: str
    checkpoint: AttemptId | None = None
    fence: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceEntry:
    fence: int
    replaces: int
    origin: Origin
    reason: str | None
    roster: Roster
    job: str
    founding: Mapping[str, Any] | None = None  # slot 0 holds what run.json holds
    kind: str = "fence"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEntry:
    """`publication` is (number, digest or None) in force; `witnesses` maps reused segments to checkpoints."""

    fence: int
    id: AttemptId
    index: ObjectRef
    witnesses: Mapping[str, AttemptId]
    level: str
    publication: tuple[int, str | None] | None
    counters: Mapping[str, Any]
    kind: str = "commit"

    @property
    def step(self) -> int:
        return self.id.step


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonEntry:
    fence: int
    id: AttemptId
    reason: str
    kind: str = "abandon"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEntry:
    fence: int
    number: int
    base: str | None
    index: ObjectRef
    digest: str
    kind: str = "publish"

    @property
    def id(self) -> PublicationId:
        return PublicationId(fence=self.fence, number=self.number, digest=self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkEntry:
    """`bad` or `good`: the verdict on a live checkpoint, after a second read."""

    kind: str
    id: AttemptId
    segments: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEntry:
    fence: int
    kind: str = "release"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireEntry:
    ids: tuple[AttemptId, ...]
    policy: str
    kind: str = "retire"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryEntry:
    """The fold of all slots below, as `wire.fold_to_json` tells it."""

    state: Any
    kind: str = "summary"


Body = (
    FenceEntry
    | CommitEntry
    | AbandonEntry
    | PublishEntry
    | MarkEntry
    | ReleaseEntry
    | RetireEntry
    | SummaryEntry
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One slot of the journal. `prev` is the digest of the entry before, `at` a label that no rule reads."""

    slot: int
    run: str
    write: str
    prev: str
    at: str
    by: str
    body: Body


@dataclass(slots=True)
class Fold:
    """The plain data of a history: exactly what a summary carries."""

    slots: int = 0
    fence: int = 0
    fences: dict[int, FenceEntry] = field(default_factory=dict)
    fence_slot: dict[int, int] = field(default_factory=dict)
    commits: dict[AttemptId, CommitEntry] = field(default_factory=dict)
    commit_slot: dict[AttemptId, int] = field(default_factory=dict)
    committed_at: dict[AttemptId, str] = field(default_factory=dict)
    retired: set[AttemptId] = field(default_factory=set)
    bad: dict[AttemptId, str] = field(default_factory=dict)
    rotten: set[str] = field(default_factory=set)
    abandoned: dict[AttemptId, str] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    publications: list[PublishEntry] = field(default_factory=list)

    def check_fence(self, entry: FenceEntry) -> None:
        """Refuse a fence that continues from nothing earlier: the lineage would not end. CorruptError."""
        origin = entry.origin
        known = {
            START: True,
            CHECKPOINT: origin.checkpoint in self.commits and origin.checkpoint.fence < entry.fence,
            ADOPT: origin.fence in self.fences and origin.fence < entry.fence,
        }
        if entry.fence < 1 or not known.get(origin.kind, False):
            raise CorruptError(
                f"the journal's fence {entry.fence} continues from {origin}, which is not before it: repair the "
                f"journal from a copy",
                fence=entry.fence,
            )


class History:
    """The fold of a journal prefix and the questions that the rules ask of it. Not thread-safe."""

    def __init__(self, fold: Fold | None = None) -> None:
        self.fold = fold if fold is not None else Fold()
        self.writes: dict[str, int] = {}

    # -- folding

    def apply(self, entry: Entry) -> None:
        """Fold in the entry of the next slot; another slot is CorruptError."""
        fold, body = self.fold, entry.body
        if entry.slot != fold.slots:
            raise CorruptError(
                f"journal entry {entry.slot} stands where slot {fold.slots} is due: repair it from a copy",
                slot=entry.slot,
            )
        if isinstance(body, FenceEntry):
            fold.check_fence(body)
            fold.fence = body.fence
            fold.fences[body.fence], fold.fence_slot[body.fence] = body, entry.slot
        elif isinstance(body, CommitEntry):
            fold.commits[body.id], fold.commit_slot[body.id] = body, entry.slot
            fold.committed_at[body.id] = entry.at
        elif isinstance(body, AbandonEntry):
            fold.abandoned[body.id] = body.reason
        elif isinstance(body, PublishEntry):
            fold.publications.append(body)
        elif isinstance(body, MarkEntry):
            self._mark(body)
        elif isinstance(body, RetireEntry):
            fold.retired.update(body.ids)
        elif isinstance(body, ReleaseEntry):
            fold.released.add(body.fence)
        self.writes[entry.write] = entry.slot
        fold.slots += 1

    def _mark(self, body: MarkEntry) -> None:
        if body.kind == "bad":
            self.fold.bad[body.id] = body.reason
            self.fold.rotten.update(body.segments)
        else:
            self.fold.bad.pop(body.id, None)
            self.fold.rotten.difference_update(body.segments)

    # -- fences and lineage

    @property
    def fence(self) -> int:
        """The newest fence; 0 before the first."""
        return self.fold.fence

    @property
    def slots(self) -> int:
        return self.fold.slots

    def chain(self) -> Iterator[tuple[int, int]]:
        """(fence, slots): entries of `fence` in slots below the second number are the newest fence's past (R23)."""
        at, until = self.fold.fence, self.fold.slots
        while at:
            yield at, until
            origin = self.fold.fences[at].origin
            if origin.kind == START:
                return
            if origin.kind == ADOPT and origin.fence is not None:
                at, until = origin.fence, self.fold.fence_slot[at]
            elif origin.checkpoint is not None:
                at, until = origin.checkpoint.fence, self.fold.commit_slot[origin.checkpoint] + 1

    def on_lineage(self, id: AttemptId) -> bool:
        return self.fold.commit_slot[id] < dict(self.chain()).get(id.fence, 0)

    def live(self) -> tuple[AttemptId, ...]:
        """Committed and not retired, in journal order."""
        return tuple(id for id in self.fold.commits if id not in self.fold.retired)

    def good(self) -> tuple[AttemptId, ...]:
        """Live, not marked bad, on the lineage of the newest fence; in journal order, so the last is the newest."""
        past = dict(self.chain())
        slot = self.fold.commit_slot
        return tuple(id for id in self.live() if id not in self.fold.bad and slot[id] < past.get(id.fence, 0))

    def restores(self, fence: int) -> AttemptId | None:
        """The checkpoint that `fence` restores, through adoptions; None for a fresh start."""
        at = fence
        while True:
            origin = self.fold.fences[at].origin
            if origin.kind != ADOPT or origin.fence is None:
                return origin.checkpoint
            at = origin.fence

    def status(self, id: AttemptId) -> str:
        """`ok`, `bad` or `abandoned` (left behind by a rollback)."""
        if id in self.fold.bad:
            return "bad"
        return "ok" if self.on_lineage(id) else "abandoned"

    # -- attempts

    def newest_commit(self, fence: int) -> AttemptId | None:
        """The last attempt that was committed under `fence`, or None."""
        return max((id for id in self.fold.commits if id.fence == fence), default=None)

    def is_open(self, attempt: AttemptId) -> bool:
        """Can a later entry be the first to name objects of this attempt (R13)?"""
        if attempt.fence != self.fence or attempt in self.fold.abandoned or self.is_committed(attempt):
            return False
        newest = self.newest_commit(attempt.fence)
        return attempt.kind == "p" or newest is None or attempt > newest

    def is_committed(self, attempt: AttemptId) -> bool:
        """Is the attempt in the journal, as a checkpoint or (kind `p`) as a publication?"""
        if attempt.kind == "s":
            return attempt in self.fold.commits
        prefix = f"index/{attempt}-"
        return any(
            p.fence == attempt.fence and p.index.key.startswith(prefix) for p in self.fold.publications
        )

    # -- publications

    def due_number(self) -> int:
        """The number of the next publication under the newest fence (R29).

        0 after a start; after a restore first the cut's publication again (a cut without one: the
        newest of the lineage + 1); then one more each time.
        """
        for fence, _ in self.chain():
            own = [p.number for p in self.fold.publications if p.fence == fence]
            if own:
                return own[-1] + 1
            origin = self.fold.fences[fence].origin
            if origin.kind == CHECKPOINT and origin.checkpoint is not None:
                cut = self.fold.commits[origin.checkpoint].publication
                if cut is not None:
                    return cut[0]
                return max((p.number for p in self.lineage_publications()), default=-1) + 1
        return 0

    def lineage_publications(self) -> list[PublishEntry]:
        """Publications that are the past of the newest fence, in journal order (R30)."""
        return [p for p in self.fold.publications if self.version_on_lineage(p.fence, p.number)]

    def version_on_lineage(self, fence: int, number: int) -> bool:
        """Is version (fence, number) the newest fence's own or below the origin through which it descends (R30)?"""
        limit: int | None = None
        at = self.fence
        while at:
            if at == fence:
                return limit is None or number <= limit
            origin = self.fold.fences[at].origin
            if origin.kind == ADOPT and origin.fence is not None:
                at = origin.fence
            elif origin.kind == CHECKPOINT and origin.checkpoint is not None:
                cut = self.fold.commits[origin.checkpoint].publication
                limit = cut[0] if cut is not None else -1
                at = origin.checkpoint.fence
            else:
                return False
        return False

    def served(self) -> PublishEntry | None:
        """The publication that rollouts should hold now: the newest of the newest fence (or, adopted, of its
        living predecessor); None between a fence and its first publish (R31)."""
        at = self.fence
        while at:
            own = [p for p in self.fold.publications if p.fence == at]
            if own:
                return own[-1]
            origin = self.fold.fences[at].origin
            if origin.kind != ADOPT or origin.fence is None:
                return None
            at = origin.fence
        return None

    def find_publication(self, number: int, digest: str | None = None) -> PublishEntry | None:
        """The newest entry of the lineage with this number (and digest, when given)."""
        for entry in reversed(self.fold.publications):
            if entry.number != number or digest not in (None, entry.digest):
                continue
            if self.version_on_lineage(entry.fence, entry.number):
                return entry
        return None
