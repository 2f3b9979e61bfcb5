"""One member's contribution to an attempt: stage, plan, write, and learn the outcome.

Checkpoints and publications are made in the same way; this is that way. Nothing here waits for another
rank on the caller's thread: what ranks must know of each other to plan, they exchange in the background,
once a structure (exchange.py; protocol R12 to R14).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ckptstore.baseline import Baseline
from ckptstore.chunksource import ChunkPlaces, SnapshotChunks
from ckptstore.chunktable import TableFrame
from ckptstore.clock import tries
from ckptstore.commit import Committer
from ckptstore.digester import Digester
from ckptstore.encoder import Encoder
from ckptstore.errors import (
    AlreadyExistsError,
    BudgetExceededError,
    CkptStoreError,
    FencedError,
    IncompleteSaveError,
    OutcomeUnknownError,
)
from ckptstore.exchange import Agreed, Exchange
from ckptstore.hostmemory import default_budget_nbytes
from ckptstore.image import Image, make_images
from ckptstore.incarnation import Token
from ckptstore.journal import Journal
from ckptstore.lazy import LazyStaging
from ckptstore.manifest import AttemptId, Member
from ckptstore.outcome import abandon_reason, abandoned, fenced
from ckptstore.plan.encode import NOTHING_ENCODED, CodecRules
from ckptstore.plan.save import PlannedChunk
from ckptstore.replicaset import ReplicaSet
from ckptstore.snapshot import COPY_THREADS, CopyPlan, Snapshot, whole_leaves
from ckptstore.staging import LIMIT_NBYTES_MIN, SPARE_BLOCKS, StagingMemory
from ckptstore.state import Known, flatten
from ckptstore.store.base import BLOCK_NBYTES, Store
from ckptstore.structure import FlatState, Structure
from ckptstore.tensor import itemsize
from ckptstore.transfer import DeviceStreams, Transfer, pin, streams_of_torch
from ckptstore.writer import PartWriter

OUTCOME_GRACE_S = 30.0
PREPARED_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What is made once of a structure, a plan and what of it is not copied."""

    structure: Structure
    plan: tuple[PlannedChunk, ...]
    skip: frozenset[int]  # chunks
    frame: TableFrame
    copies: CopyPlan
    places: ChunkPlaces

    @classmethod
    def of(
        cls, structure: Structure, plan: tuple[PlannedChunk, ...], frame: TableFrame, skip: frozenset[int]
    ) -> Prepared:
        images = make_images(frame.specs, frame.boxes, skip=skip)
        copies = CopyPlan.of(structure, plan, images)
        places = ChunkPlaces.of(images, copies.place, len(copies.blocks))
        return cls(structure=structure, plan=plan, skip=skip, frame=frame, copies=copies, places=places)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A state on its way to host memory. `agreed` is None until layouts are exchanged: then whole leaves are copied."""

    attempt: AttemptId
    skeleton: Any
    prepared: Prepared
    agreed: Agreed | None
    snapshot: Snapshot
    replicas: tuple[ReplicaSet, ...] | None


class Contributor:
    """Stages and writes for one member of one incarnation. Attempts are staged in order, and written in order."""

    def __init__(
        self,
        *,
        token: Token,
        member: Member,
        store: Store,
        journal: Journal,
        size: int,
        committer: Committer | None,
        check_replicas: bool,
        memory_budget: int | None = None,
        codec: CodecRules = NOTHING_ENCODED,
    ) -> None:
        self.token = token
        self.member = member
        self.store = store
        self.journal = journal
        self.size = size
        self.exchange = Exchange(run=token.run, member=member, size=size, store=store, journal=journal)
        self.committer = committer
        budget = default_budget_nbytes() if memory_budget is None else memory_budget
        bases = budget // 4 if codec.may_need_bases and budget >= 2 * LIMIT_NBYTES_MIN else 0
        budget -= bases
        self.memory = StagingMemory(
            max(budget, LIMIT_NBYTES_MIN) if memory_budget is None else budget, pin=pin
        )
        self.writer = PartWriter(
            store=store,
            run=token.run,
            member=member,
            memory=self.memory,
            rebase_every=codec.rebase_every,
            clock=journal.clock,
            encoder=None if codec.is_raw else Encoder(rules=codec, store=store, bases_nbytes=bases),
        )
        # With a core to spare the writer's first block is on its way while the second is copied.
        self._copies_first = len(os.sched_getaffinity(0)) <= COPY_THREADS
        self._helpers = ThreadPoolExecutor(1, thread_name_prefix=f"ckptstore-stage-{member.file}")
        self._digester = Digester(member.rank) if check_replicas else None
        self._known = Known()
        self._prepared: list[Prepared] = []
        self._reserved: tuple[Image, ...] = ()
        self._streams: DeviceStreams | None = None

    # -- on the caller's thread

    def begin(
        self, attempt: AttemptId, state: Any, baseline: Baseline | None, *, timeout_s: float
    ) -> tuple[Staged, FlatState]:
        """All of a save that comes before copying: values are captured now, tensors when they are staged.

        The second has the tensors; it is to be dropped when they are copied. BudgetExceededError: the first save
        of a structure on several ranks must copy all that this one holds before it can write, and that is more than
        the budget.
        """
        flat = flatten(state, role=self.member.role, rank=self.member.rank, known=self._known)
        structure = flat.structure
        agreed = self.exchange.plans.find(structure)
        if agreed is None and self.size == 1:
            agreed = self.exchange.plan_alone(structure)
        if agreed is None:
            prepared = self._prepare(structure, whole_leaves(structure), None)
            self._check_budget(prepared.copies.nbytes)
        else:
            prepared = self._prepare(structure, agreed.chunks, baseline)
        replicas: tuple[ReplicaSet, ...] | None = None
        if self._digester is not None:
            replicas = self._digester.take(flat, self.size) if self.size > 1 else ()
        return Staged(
            attempt=attempt,
            skeleton=flat.skeleton,
            prepared=prepared,
            agreed=agreed,
            snapshot=Snapshot(
                prepared.copies,
                self.memory,
                timeout_s=timeout_s,
                copies_first=self._copies_first,
                transfer=self._transfer(flat),
            ),
            replicas=replicas,
        ), flat

    def _transfer(self, flat: FlatState) -> Transfer | None:
        """None where all tensors lie in host memory."""
        if self._streams is None:
            self._streams = streams_of_torch()  # torch may be imported later than this is made
        return None if self._streams is None else Transfer.of(self._streams, flat.data, flat.places)

    def stage(self, staged: Staged, flat: FlatState) -> None:
        """Copy what this member will write; the caller may change its tensors as soon as this returns."""
        staged.snapshot.follow()
        staged.snapshot.stage(flat.data, flat.places, self._helpers)

    def stage_lazily(self, staged: Staged, flat: FlatState) -> LazyStaging:
        """As `stage`, in another thread, and before the next step of any optimizer."""
        specs = flat.structure.specs
        return LazyStaging.start(staged.snapshot, specs, flat.data, flat.places, self._helpers)

    def stage_beside(self, staged: Staged, flat: FlatState) -> Future[None]:
        """As `stage`, in another thread; the caller leaves the state as it is until that is done."""
        staged.snapshot.follow()
        return self._helpers.submit(staged.snapshot.stage, flat.data, flat.places)

    def close(self) -> None:
        """End the thread that helps to copy, and give the memory of snapshots back."""
        self._helpers.shutdown(wait=False)
        self.memory.close()

    def _prepare(
        self, structure: Structure, plan: tuple[PlannedChunk, ...], baseline: Baseline | None
    ) -> Prepared:
        same = [
            known
            for known in self._prepared
            if (known.plan is plan or known.plan == plan) and known.structure == structure
        ]
        frame = same[0].frame if same else _frame(structure, plan)
        skip = _stored_frozen(structure, plan, frame, baseline, self.writer.rewrite_every)
        for known in same:
            if known.skip == skip:
                return known
        made = Prepared.of(structure, plan, frame, skip)
        self._prepared = [made, *self._prepared[: PREPARED_KEPT - 1]]
        return made

    def _check_budget(self, nbytes: int) -> None:
        room = self.memory.limit_nbytes - SPARE_BLOCKS * BLOCK_NBYTES
        if nbytes > room:
            raise BudgetExceededError(
                f"{self.member} must copy {nbytes} bytes before its ranks agree who writes what, and its memory budget "
                f"leaves {room} for them: give memory_budget= at least {nbytes + SPARE_BLOCKS * BLOCK_NBYTES}",
                needed_nbytes=nbytes,
                budget_nbytes=self.memory.limit_nbytes,
            )

    # -- in the background

    def contribute(
        self,
        staged: Staged,
        *,
        baseline: Baseline | None,
        policy_version: int | None,
        timeout_s: float,
        phase: Callable[[str], None],
        stop: Callable[[], bool],
        written: Callable[[], None],
        reserve: bool = False,
    ) -> Baseline:
        """Write the part (then call `written`) and return once the attempt is committed in the journal.

        The result has the part's chunks, for the next save to refer to. The snapshot is given back in any case.
        With `reserve` this also takes what memory the next snapshot of the plan needs and this one did not.

        Raises what `Committer.run` raises, FencedError, and TimeoutError while the attempt is still open.
        """
        attempt = staged.attempt
        try:
            agreed = staged.agreed or self.exchange.plan(
                attempt,
                staged.prepared.structure,
                timeout_s=timeout_s,
                stop=stop,
                closed=lambda: self.await_outcome(attempt, 0.0, stop),
            )
            source = _chunks(staged, agreed)
            part = self.writer.write(
                attempt,
                source,
                skeleton=staged.skeleton,
                layout=agreed.layout,
                policy_version=policy_version,
                baseline=baseline,
                replicas=staged.replicas,
                phase=phase,
            )
        except Exception as error:  # whatever it was, the others must not wait for a part that will not come
            self._distrust()
            self.give_up(attempt, error)
            raise
        finally:
            staged.snapshot.discard()
        written()
        try:
            if self.committer is not None:
                self.committer.run(attempt, timeout_s=timeout_s, stop=stop)
            else:
                self.await_outcome(attempt, timeout_s + OUTCOME_GRACE_S, stop)
        except CkptStoreError:
            self._distrust()  # perhaps the layouts were not the same: all ranks exchange them again
            raise
        phase("committed")
        if reserve and self._reserved is not source.images:
            # Blocks went round while the writer kept up; a faster trainer or a slower store needs one for each.
            self.memory.reserve(*source.block_sizes())
            self._reserved = source.images
        return Baseline.of(attempt, part.table, part.segments, source.frame)

    def _distrust(self) -> None:
        self.exchange.plans.distrust()
        if self._digester is not None:
            self._digester.forget()

    def give_up(self, attempt: AttemptId, error: Exception) -> None:
        """Tell the others that no part will come; best effort, since the store may be what failed."""
        self._refuse(attempt, error)
        if self.committer is not None:
            told = error if isinstance(error, CkptStoreError) else CkptStoreError(repr(error))
            self.committer.try_to_abandon(attempt, abandon_reason(told, f"{self.member}: "), error)

    def _refuse(self, attempt: AttemptId, error: Exception) -> None:
        """A part that says why there is none (protocol R12)."""
        if isinstance(error, (FencedError, AlreadyExistsError, OutcomeUnknownError)):
            return  # another life's part stands there, or ours may: its key is not ours to take
        try:
            self.writer.refuse(attempt, str(error))
        except CkptStoreError as second:
            error.add_note(f"and the part that says so could not be written: {second}")

    def await_outcome(self, attempt: AttemptId, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Return once the journal has the attempt; raise once it never will (protocol R14)."""
        for _ in tries(self.journal.clock, deadline_s=timeout_s, first_s=0.005, most_s=0.5):
            history = self.journal.catch_up()
            if history.is_committed(attempt):
                return
            if history.fence != attempt.fence:
                raise fenced(attempt, attempt.fence, history.fence)
            reason = history.fold.abandoned.get(attempt)
            if reason is not None:
                raise abandoned(attempt, reason)
            if not history.is_open(attempt):
                raise IncompleteSaveError(
                    f"save of step {attempt.step} was overtaken: a later save is committed and {attempt} is not",
                    step=attempt.step,
                    missing=(),
                    reason="overtaken",
                )
            if stop():
                break
        raise TimeoutError(
            f"step {attempt.step}: this member's part is durable, but {attempt} is neither committed nor abandoned "
            f"after {timeout_s:g} s; see whether the committer {self.token.committer} lives"
        )


def _chunks(staged: Staged, agreed: Agreed) -> SnapshotChunks:
    """The planned chunks in the snapshot: as staged, or cut out of whole leaves when the plan came later."""
    prepared = staged.prepared
    if staged.agreed is not None:
        return SnapshotChunks(staged.snapshot, prepared.frame, prepared.places, in_place=True)
    structure = prepared.structure
    frame = _frame(structure, agreed.chunks)
    starts = [prepared.copies.place[chunk.shard] + _start_in(structure, chunk) for chunk in agreed.chunks]
    places = ChunkPlaces.of(make_images(frame.specs, frame.boxes), starts, len(prepared.copies.blocks))
    return SnapshotChunks(staged.snapshot, frame, places, in_place=False)


def _start_in(structure: Structure, chunk: PlannedChunk) -> int:
    """Byte of its leaf at which a chunk begins."""
    if not chunk.box.numel:
        return 0
    return chunk.box.start_in(structure.boxes[chunk.shard]) * itemsize(structure.specs[chunk.shard].dtype)


def _frame(structure: Structure, plan: Sequence[PlannedChunk]) -> TableFrame:
    return TableFrame.of([structure.specs[chunk.shard] for chunk in plan], [chunk.box for chunk in plan])


def _stored_frozen(
    structure: Structure,
    plan: Sequence[PlannedChunk],
    frame: TableFrame,
    baseline: Baseline | None,
    rewrite_every: int,
) -> frozenset[int]:
    """Chunks of frozen leaves all of whose chunks lie in the baseline: they are neither copied nor read."""
    if baseline is None or not any(structure.frozen):
        return frozenset()
    stored, rows = baseline.table, baseline.rows(frame)
    frozen = [n for n, chunk in enumerate(plan) if structure.frozen[chunk.shard]]
    missing = {
        plan[n].shard
        for n in frozen
        if rows[n] < 0 or not stored.nbytes[rows[n]] or stored.reuses[rows[n]] >= rewrite_every
    }
    return frozenset(n for n in frozen if plan[n].shard not in missing)
