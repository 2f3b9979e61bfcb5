"""One member's contribution to an attempt: stage, plan, write, and learn the outcome.

Checkpoints and publications are made in the same way; this is that way. Nothing here waits for another
rank on the caller's thread: layouts are exchanged through the store in the background, once a structure
(design section 4; protocol R12 to R14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.clock import tries
from ckptstore.commit import Committer
from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    CorruptError,
    FencedError,
    IncompleteSaveError,
    InconsistentCutError,
    NotFoundError,
    OutcomeUnknownError,
)
from ckptstore.incarnation import Token
from ckptstore.journal import Journal
from ckptstore.layout import Layout, shards_from_json, shards_to_json
from ckptstore.manifest import AttemptId, Member, Part, layout_key, part_key
from ckptstore.outcome import abandon_reason, abandoned, fenced, refused
from ckptstore.plan.save import PlannedChunk, plan_save
from ckptstore.snapshot import StagedChunk, StagingArena, stage, whole_leaves
from ckptstore.state import FlatState, TensorLeaf, flatten
from ckptstore.store.base import Store
from ckptstore.tablefile import decode_part
from ckptstore.tensor import Shard
from ckptstore.wire import canonical, load_json
from ckptstore.writer import Baseline, PartWriter, create_contended, read_if_there

PLANS_KEPT = 8
OUTCOME_GRACE_S = 30.0
SECOND_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """This rank's share of a plan that all ranks of the role made from the same layouts."""

    layout: str
    chunks: tuple[PlannedChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A state in host memory: the trainer may go on. `agreed` is None until layouts are exchanged."""

    attempt: AttemptId
    flat: FlatState
    shards: tuple[Shard, ...]
    agreed: Agreed | None
    chunks: tuple[StagedChunk, ...]
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
    ) -> None:
        self.token = token
        self.member = member
        self.store = store
        self.journal = journal
        self.size = size
        self.committer = committer
        self.writer = PartWriter(store=store, run=token.run, member=member)
        self._arena = StagingArena()
        self._plans: dict[bytes, Agreed] = {}
        self._former: dict[
            bytes, Agreed
        ] = {}  # plans of failed saves, used again only if another rank still does

    # -- on the caller's thread

    def stage(self, attempt: AttemptId, state: Any, baseline: Baseline | None) -> Staged:
        """Copy what this member will write; the caller may change its tensors as soon as this returns."""
        flat = flatten(state, role=self.member.role, rank=self.member.rank)
        shards = tuple(_shard(leaf, self.size) for leaf in flat.leaves)
        agreed = self._plans.get(_structure(shards))
        if agreed is None and self.size == 1:
            agreed = self._agree(shards, Layout(role=self.member.role, ranks=(shards,)))
        plan = agreed.chunks if agreed is not None else whole_leaves(flat.leaves)
        skip = (
            _stored_frozen(flat.leaves, plan, baseline, self.writer.rewrite_every)
            if agreed is not None
            else ()
        )
        chunks = stage(flat.leaves, plan, self._arena, skip=skip)
        return Staged(
            attempt=attempt, flat=flat, shards=shards, agreed=agreed, chunks=chunks, baseline=baseline
        )

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
            agreed = staged.agreed or self._exchange(attempt, staged.shards, timeout_s, stop)
            part = self.writer.write(
                attempt,
                _planned(staged, agreed),
                skeleton=staged.flat.skeleton,
                layout=agreed.layout,
                policy_version=policy_version,
                baseline=staged.baseline,
                phase=phase,
            )
        except Exception as error:  # whatever it was, the others must not wait for a part that will not come
            self._distrust_plans()
            self.give_up(attempt, error)
            raise
        written()
        try:
            if self.committer is not None:
                self.committer.run(attempt, timeout_s=timeout_s, stop=stop)
            else:
                self.await_outcome(attempt, timeout_s + OUTCOME_GRACE_S, stop)
        except CkptStoreError:
            self._distrust_plans()  # perhaps the layouts were not the same: all ranks exchange them again
            raise
        phase("committed")
        return part

    def _distrust_plans(self) -> None:
        """Exchange layouts again, unless another rank turns out to have kept the same plan (it saw no failure)."""
        if len(self._former) >= PLANS_KEPT:
            self._former.clear()
        self._former.update(self._plans)
        self._plans.clear()

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

    # -- layouts

    def _agree(self, shards: tuple[Shard, ...], layout: Layout) -> Agreed:
        agreed = Agreed(layout=layout.digest, chunks=plan_save(layout)[self.member.rank])
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        self._plans[_structure(shards)] = agreed
        return agreed

    def _exchange(
        self, attempt: AttemptId, shards: tuple[Shard, ...], timeout_s: float, stop: Callable[[], bool]
    ) -> Agreed:
        """Publish this rank's layout, read the others', make the plan that all of them make."""
        key = layout_key(attempt, self.member)
        data = canonical({"shards": shards_to_json(shards), "run": self.token.run})
        if create_contended(self.store, key, data) != data:
            raise AlreadyExistsError(
                f"{key} holds the layout of another life of {self.member}: this process is a duplicate, exit",
                key=key,
            )
        found: dict[int, tuple[Shard, ...]] = {self.member.rank: shards}
        part_seen_s: dict[int, float] = {}
        former = self._former.get(_structure(shards))
        for _ in tries(self.journal.clock, deadline_s=timeout_s, first_s=0.002, most_s=0.25):
            for rank in range(self.size):
                if rank not in found:
                    other = Member(role=self.member.role, rank=rank)
                    if self._read_layout(attempt, other, found, part_seen_s, former) and former is not None:
                        self._plans[_structure(shards)] = former
                        return former
            if len(found) == self.size or stop():
                break
            history = self.journal.catch_up()
            if not history.is_open(attempt):
                self.await_outcome(attempt, 0.0, stop)
        missing = [rank for rank in range(self.size) if rank not in found]
        if missing:
            raise IncompleteSaveError(
                f"save of step {attempt.step} lacks the layouts of {self.member.role} ranks {missing[:8]} after "
                f"{timeout_s:g} s: see whether they live and call save at this step",
                step=attempt.step,
                missing=tuple(f"{self.member.role}/{rank}" for rank in missing),
            )
        return self._agree(
            shards, Layout(role=self.member.role, ranks=tuple(found[r] for r in range(self.size)))
        )

    def _read_layout(
        self,
        attempt: AttemptId,
        member: Member,
        found: dict[int, tuple[Shard, ...]],
        part_seen_s: dict[int, float],
        former: Agreed | None,
    ) -> bool:
        """Note the member's layout if it is there. Has it written its part by the `former` plan instead?"""
        key = layout_key(attempt, member)
        try:
            value = load_json(self.store.read(key), key)
        except NotFoundError:
            return self._check_part(attempt, member, part_seen_s, former)
        if value.get("run") != self.token.run or "shards" not in value:
            raise CorruptError(f"{key} is not a layout of run {self.token.run}: save again", key=key)
        found[member.rank] = shards_from_json(value["shards"])
        return False

    def _check_part(
        self, attempt: AttemptId, member: Member, seen_s: dict[int, float], former: Agreed | None
    ) -> bool:
        """A member that has a part and no layout publishes none: its structure is as before, or it refuses.

        True if its part is of the `former` plan, whose layouts are then still those of all ranks.
        Its layout may have come between our two looks, so a part is believed only when it is seen again.
        """
        data = read_if_there(self.store, part_key(attempt, member))
        if data is None:
            return False
        part = decode_part(data, part_key(attempt, member))
        if part.refused is not None:
            raise refused(attempt, member, part.refused)
        if former is not None and part.layout == former.layout:
            return True
        now_s = self.journal.clock.monotonic()
        if now_s - seen_s.setdefault(member.rank, now_s) < SECOND_LOOK_S:
            return False
        raise InconsistentCutError(
            f"the tensors of {self.member} changed at step {attempt.step} but those of {member} did not: this "
            f"save is given up, the next one exchanges all layouts",
            step=attempt.step,
            role=member.role,
        )


def _shard(leaf: TensorLeaf, size: int) -> Shard:
    everyone = tuple(range(size)) if size > 1 else ()
    return Shard(spec=leaf.spec, box=leaf.box, replicas=everyone if leaf.replicas is None else leaf.replicas)


def _structure(shards: Sequence[Shard]) -> bytes:
    return canonical(shards_to_json(shards))


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
