"""One member's contribution to an attempt: stage, plan, write, and learn the outcome.

Checkpoints and publications are made in the same way; this is that way. Nothing here waits for another
rank on the caller's thread: what ranks must know of each other to plan, they exchange in the background,
once a structure (exchange.py; protocol R12 to R14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.clock import tries
from ckptstore.commit import Committer
from ckptstore.digester import Digester
from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    FencedError,
    IncompleteSaveError,
    OutcomeUnknownError,
)
from ckptstore.exchange import Agreed, Exchange
from ckptstore.incarnation import Token
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Member, Part
from ckptstore.outcome import abandon_reason, abandoned, fenced
from ckptstore.plan.save import PlannedChunk
from ckptstore.replicaset import ReplicaSet
from ckptstore.snapshot import StagedChunk, StagingArena, stage, whole_leaves
from ckptstore.state import FlatState, Known, Structure, TensorLeaf, flatten
from ckptstore.store.base import Store
from ckptstore.tensor import Shard
from ckptstore.writer import Baseline, PartWriter

OUTCOME_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A state in host memory: the trainer may go on. `agreed` is None until layouts are exchanged."""

    attempt: AttemptId
    flat: FlatState
    structure: Structure
    agreed: Agreed | None
    chunks: tuple[StagedChunk, ...]
    replicas: tuple[ReplicaSet, ...] | None
    baseline: Baseline | None


class Contributor:
    """Stages and writes for one member of one incarnation. One attempt at a time."""

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
    ) -> None:
        self.token = token
        self.member = member
        self.store = store
        self.journal = journal
        self.size = size
        self.exchange = Exchange(run=token.run, member=member, size=size, store=store, journal=journal)
        self.committer = committer
        self.writer = PartWriter(store=store, run=token.run, member=member)
        self._digester = Digester(member.rank) if check_replicas else None
        self._arena = StagingArena()
        self._known = Known()
        self._sharded: tuple[Structure, tuple[Shard, ...]] = (Structure((), (), (), ()), ())

    # -- on the caller's thread

    def stage(self, attempt: AttemptId, state: Any, baseline: Baseline | None) -> Staged:
        """Copy what this member will write; the caller may change its tensors as soon as this returns."""
        flat = flatten(state, role=self.member.role, rank=self.member.rank, known=self._known)
        structure, leaves = flat.structure, flat.leaves
        agreed = self.exchange.plans.find(structure)
        if agreed is None and self.size == 1:
            agreed = self.exchange.plan_alone(structure)
        plan = agreed.chunks if agreed is not None else whole_leaves(leaves)
        skip = _stored_frozen(leaves, plan, baseline, self.writer.rewrite_every) if agreed is not None else ()
        return Staged(
            attempt=attempt,
            flat=flat,
            structure=structure,
            agreed=agreed,
            chunks=stage(leaves, plan, self._arena, skip=skip),
            replicas=None if self._digester is None else self._digester.take(leaves, self._shards(structure)),
            baseline=baseline,
        )

    def _shards(self, structure: Structure) -> tuple[Shard, ...]:
        """The shards of the structure; those of the last one are kept, since making them costs more than a look."""
        if self._sharded[0] != structure:
            self._sharded = (structure, structure.shards(self.size))
        return self._sharded[1]

    # -- in the background

    def contribute(
        self,
        staged: Staged,
        *,
        policy_version: int | None,
        timeout_s: float,
        phase: Callable[[str], None],
        stop: Callable[[], bool],
        written: Callable[[], None],
    ) -> Part:
        """Write the part (then call `written`) and return once the attempt is committed in the journal.

        Raises what `Committer.run` raises, FencedError, and TimeoutError while the attempt is still open.
        """
        attempt = staged.attempt
        try:
            agreed = staged.agreed or self.exchange.plan(
                attempt,
                staged.structure,
                timeout_s=timeout_s,
                stop=stop,
                closed=lambda: self.await_outcome(attempt, 0.0, stop),
            )
            part = self.writer.write(
                attempt,
                _planned(staged, agreed),
                skeleton=staged.flat.skeleton,
                layout=agreed.layout,
                policy_version=policy_version,
                baseline=staged.baseline,
                replicas=staged.replicas,
                phase=phase,
            )
        except Exception as error:  # whatever it was, the others must not wait for a part that will not come
            self._distrust()
            self.give_up(attempt, error)
            raise
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
        return part

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


def _planned(staged: Staged, agreed: Agreed) -> Sequence[StagedChunk]:
    """The planned chunks in staging memory: as staged, or cut out of whole leaves when the plan came later."""
    if staged.agreed is not None:
        return staged.chunks
    return [staged.chunks[chunk.shard].slice(chunk.box) for chunk in agreed.chunks]


def _stored_frozen(
    leaves: Sequence[TensorLeaf], plan: Sequence[PlannedChunk], baseline: Baseline | None, rewrite_every: int
) -> set[int]:
    """Indices of frozen leaves whose planned chunks all lie in the baseline: they are neither copied nor read."""
    if baseline is None:
        return set()
    frozen = {n for n, leaf in enumerate(leaves) if leaf.frozen}
    for chunk in plan:
        if chunk.shard in frozen:
            found = baseline.find(leaves[chunk.shard].spec, chunk.box)
            if found is None or not found.nbytes or found.reuses >= rewrite_every:
                frozen.discard(chunk.shard)
    return frozen
