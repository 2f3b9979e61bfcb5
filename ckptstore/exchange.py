"""How the ranks of a role learn enough of each other to plan one save: outlines, exchanged through the store.

Each rank publishes its shards and then its outline, reads the outlines of all, and plans its own part. The
shards of others are read only when outlines contradict each other, to name the tensors. This happens in the
background, once a structure; later saves look their plan up by structure. Why through the store:
docs/design/0001; why outlines are enough: docs/design/0004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.clock import tries
from ckptstore.errors import (
    AlreadyExistsError,
    CorruptError,
    IncompleteSaveError,
    InconsistentCutError,
    NotFoundError,
)
from ckptstore.journal import Journal
from ckptstore.layout import shards_from_json, shards_to_json
from ckptstore.manifest import AttemptId, Member, layout_key, part_key, shards_key
from ckptstore.outcome import refused
from ckptstore.outline import (
    Outline,
    explain,
    find_disputes,
    layout_digest,
    outline,
    refuse,
    unequal_empties,
)
from ckptstore.plan.save import PlannedChunk, plan_rank
from ckptstore.state import Structure
from ckptstore.store.base import Store
from ckptstore.tablefile import decode_part
from ckptstore.tensor import Shard
from ckptstore.wire import canonical, load_json
from ckptstore.writer import create_contended, read_if_there

PLANS_KEPT = 8
SECOND_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """This rank's part of a plan that all ranks of the role made from the same outlines."""

    layout: str
    chunks: tuple[PlannedChunk, ...]


@dataclass(slots=True)
class Plans:
    """The plans of one member by structure, the newest of them first.

    After a failed save they are in doubt, and used again only if another rank still uses them.
    """

    _trusted: list[tuple[Structure, Agreed]] = field(default_factory=list)
    _doubted: list[tuple[Structure, Agreed]] = field(default_factory=list)

    def find(self, structure: Structure) -> Agreed | None:
        return _find(self._trusted, structure)

    def find_doubted(self, structure: Structure) -> Agreed | None:
        return _find(self._doubted, structure)

    def keep(self, structure: Structure, agreed: Agreed) -> None:
        self._trusted = _kept([(structure, agreed)], self._trusted)

    def distrust(self) -> None:
        """Exchange layouts again, unless another rank turns out to have kept the same plan (it saw no failure)."""
        self._doubted = _kept(self._trusted, self._doubted)
        self._trusted = []


_Planned = list[tuple[Structure, Agreed]]


def _find(plans: _Planned, structure: Structure) -> Agreed | None:
    for known, agreed in plans:  # by identity first: to find two unequal may take a look at all that is equal
        if known is structure:
            return agreed
    return next((agreed for known, agreed in plans if known == structure), None)


def _kept(new: _Planned, old: _Planned) -> _Planned:
    others = [plan for plan in old if all(plan[0] != structure for structure, _ in new)]
    return [*new, *others][:PLANS_KEPT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Exchanges outlines for one member of one incarnation, and keeps the plans that came of it."""

    run: str
    member: Member
    size: int
    store: Store
    journal: Journal
    plans: Plans = field(default_factory=Plans)

    def plan_alone(self, structure: Structure) -> Agreed:
        """The plan of a role of one rank, which has nobody to ask. LayoutMismatchError as `outline`."""
        shards = structure.shards(1)
        return self._agree(structure, shards, [outline(shards, rank=0, size=1)])

    def plan(
        self,
        attempt: AttemptId,
        structure: Structure,
        *,
        timeout_s: float,
        stop: Callable[[], bool],
        closed: Callable[[], None],
    ) -> Agreed:
        """Publish this rank's layout, read the others' outlines, make its part of the plan that all make.

        `closed` raises what became of the attempt once it is no longer open. LayoutMismatchError lists all
        that does not fit together, by tensor and rank; IncompleteSaveError names the ranks that published
        nothing in `timeout_s`, or refused; InconsistentCutError one whose structure did not change.
        """
        shards = structure.shards(self.size)
        mine = outline(shards, rank=self.member.rank, size=self.size)
        # The shards first: whoever sees the outline can read what it is of.
        self._publish(shards_key(attempt, self.member), {"shards": shards_to_json(shards)})
        self._publish(layout_key(attempt, self.member), {"outline": mine.to_json()})
        found: dict[int, Outline] = {self.member.rank: mine}
        part_seen_s: dict[int, float] = {}
        doubted = self.plans.find_doubted(structure)
        for _ in tries(self.journal.clock, deadline_s=timeout_s, first_s=0.002, most_s=0.25):
            for rank in range(self.size):
                if rank not in found and self._read(attempt, rank, found, part_seen_s, doubted):
                    assert doubted is not None
                    self.plans.keep(structure, doubted)
                    return doubted
            if len(found) == self.size or stop():
                break
            if not self.journal.catch_up().is_open(attempt):
                closed()
        missing = [rank for rank in range(self.size) if rank not in found]
        if missing:
            raise IncompleteSaveError(
                f"save of step {attempt.step} lacks the layouts of {self.member.role} ranks {missing[:8]} after "
                f"{timeout_s:g} s: see whether they live and call save at this step",
                step=attempt.step,
                missing=tuple(f"{self.member.role}/{rank}" for rank in missing),
            )
        outlines = [found[rank] for rank in range(self.size)]
        self._check(attempt, outlines)
        return self._agree(structure, shards, outlines)

    def _agree(self, structure: Structure, shards: tuple[Shard, ...], outlines: Sequence[Outline]) -> Agreed:
        agreed = Agreed(
            layout=layout_digest(self.member.role, outlines),
            chunks=plan_rank(outlines, self.member.rank, shards),
        )
        self.plans.keep(structure, agreed)
        return agreed

    def _publish(self, key: str, value: dict[str, Any]) -> None:
        data = canonical({**value, "run": self.run})
        if create_contended(self.store, key, data) != data:
            raise AlreadyExistsError(
                f"{key} holds the layout of another life of {self.member}: this process is a duplicate, exit",
                key=key,
            )

    def _check(self, attempt: AttemptId, outlines: Sequence[Outline]) -> None:
        disputes = find_disputes(outlines)
        problems = unequal_empties(outlines)
        if disputes:
            speakers = sorted({rank for dispute in disputes for rank in dispute.speakers})
            problems += explain(disputes, {rank: self._read_shards(attempt, rank) for rank in speakers})
        if problems:
            refuse(f"role {self.member.role!r} with {self.size} ranks", problems)

    def _load(self, key: str, name: str) -> Any:
        value = load_json(self.store.read(key), key)
        if not isinstance(value, dict) or value.get("run") != self.run or name not in value:
            raise CorruptError(f"{key} is not a layout of run {self.run}: save again", key=key)
        return value[name]

    def _read_shards(self, attempt: AttemptId, rank: int) -> tuple[Shard, ...]:
        key = shards_key(attempt, Member(role=self.member.role, rank=rank))
        try:
            return shards_from_json(self._load(key, "shards"))
        except NotFoundError as error:
            raise CorruptError(
                f"{key} is gone although the outline that follows it is there", key=key
            ) from error

    def _read(
        self,
        attempt: AttemptId,
        rank: int,
        found: dict[int, Outline],
        part_seen_s: dict[int, float],
        doubted: Agreed | None,
    ) -> bool:
        """Note the rank's outline if it is there. Has it written its part by the `doubted` plan instead?"""
        member = Member(role=self.member.role, rank=rank)
        try:
            value = self._load(layout_key(attempt, member), "outline")
        except NotFoundError:
            return self._check_part(attempt, member, part_seen_s, doubted)
        found[rank] = Outline.from_json(value, rank=rank, size=self.size)
        return False

    def _check_part(
        self, attempt: AttemptId, member: Member, seen_s: dict[int, float], doubted: Agreed | None
    ) -> bool:
        """A member that has a part and no layout publishes none: its structure is as before, or it refuses.

        True if its part is of the `doubted` plan, whose layouts are then still those of all ranks.
        Its layout may have come between our two looks, so a part is believed only when it is seen again.
        """
        data = read_if_there(self.store, part_key(attempt, member))
        if data is None:
            return False
        part = decode_part(data, part_key(attempt, member))
        if part.refused is not None:
            raise refused(attempt, member, part.refused)
        if doubted is not None and part.layout == doubted.layout:
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
