"""Do the parts of one attempt agree, and what is owed after the cut?

Pure, because the same answer is needed before a commit and again before a restart. A cut must never
fail because a role was quick or slow, so only what is a bug at any timing is refused; the rest is
joined: consumed wins over buffered, buffered over issued. Why consumption is the trainer's alone to
tell: protocol, R33-R37; docs/explanation/cuts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .errors import InconsistentCutError
from .intervals import Intervals, gaps, overlaps
from .ledger import Ledger, Span
from .manifest import Member

TRAINER = "trainer"

_NAMED_AT_MOST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PartClaim:
    """What one part says: the step of its save, the digest of its role's exchanged layouts, its ledgers."""

    member: Member
    step: int
    layout: str
    ledgers: tuple[Ledger, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Numbers of ordinals at the newest cut of a lineage. `lost_first` and `doubled_first` name a few."""

    issued: int
    consumed: int
    lost: int
    doubled: int
    lost_first: tuple[int, ...] = ()
    doubled_first: tuple[int, ...] = ()


def check_agreement(
    parts: Sequence[PartClaim], *, step: int, publication: int | None = None, decides: str | None = None
) -> Ledger | None:
    """Join the ledgers of an attempt's parts; None when no part holds one.

    `publication` is the number in force at the cut. Ledgers of the role `decides` (the trainer, or the
    first part's role where there is none) say what is consumed; all ledgers say what is sealed and
    dropped. Raises InconsistentCutError, naming every contradiction, for a part of another step, two
    layouts in a role, an ordinal consumed at two steps, after the cut, or both consumed and dropped, and
    for consumption that only another role records: nobody could say then what the weights hold.
    """
    problems = [*_other_steps(parts, step), *_other_layouts(parts)]
    if decides is None:
        roles = [p.member.role for p in parts]
        decides = TRAINER if TRAINER in roles or not roles else roles[0]
    deciding = _distinct(ledger for p in parts if p.member.role == decides for ledger in p.ledgers)
    others = _distinct(ledger for p in parts if p.member.role != decides for ledger in p.ledgers)
    if not deciding and any(len(ledger.consumed) for ledger in others):
        keepers = sorted({p.member.role for p in parts for ledger in p.ledgers if len(ledger.consumed)})
        problems.append(
            f"consumption is recorded by {', '.join(keepers)} while {decides} holds no ledger: "
            f"keep a Ledger in the state of {decides} and call its consume in the update"
        )
    for ledger in deciding:
        problems += [
            f"{_named(start, stop)} consumed at step {at}, after the cut"
            for start, stop, at in ledger.consumed
            if at > step
        ]
    trainer, conflicts = _merge_consumed(deciding)
    problems += conflicts
    for ledger in others:
        problems += [
            f"{_named(start, stop)} consumed at step {at}, but the copy of another role says step {copy}"
            for start, stop, at, copy in overlaps(trainer.consumed, ledger.consumed)
            if at != copy
        ]
    for ledger in (*deciding, *others):
        problems += [
            f"{_named(start, stop)} consumed at step {at} and dropped ({reason})"
            for start, stop, at, reason in overlaps(trainer.consumed, ledger.dropped)
        ]
    if problems:
        told = "; ".join(problems[:_NAMED_AT_MOST])
        more = f"; and {len(problems) - _NAMED_AT_MOST} more" if len(problems) > _NAMED_AT_MOST else ""
        raise InconsistentCutError(
            f"the parts of step {step} contradict each other: {told}{more}; this is a bug of the loop, "
            "which no timing explains: mend its records, then save again",
            step=step,
            problems=tuple(problems),
        )
    if not deciding and not others:
        return None
    return join_ledgers(trainer if deciding else None, *others, *deciding, cut_version=publication)


def join_ledgers(trainer: Ledger | None, *others: Ledger | None, cut_version: int | None) -> Ledger:
    """What a cut knows of every ordinal: consumed as the trainer says, then dropped, sealed, issued.

    Groups sealed by a version above `cut_version` (the publication number in force; all of them for None)
    count as issued. Every ordinal below the largest known that is neither consumed nor dropped is owed,
    also what another ledger calls consumed: its record is a copy, maybe of steps after the cut.
    """
    known = [ledger for ledger in (trainer, *others) if ledger is not None]
    seed = next((ledger.seed for ledger in others if ledger is not None), trainer.seed if trainer else 0)
    consumed: Intervals[int] = trainer.consumed if trainer is not None else Intervals()
    dropped: dict[int, str] = {}
    sealed: dict[int, Span] = {}
    for ledger in known:
        for start, stop, reason in ledger.dropped:
            for ordinal in range(start, stop):
                if ordinal not in consumed:
                    dropped.setdefault(ordinal, reason)
        for ordinal, span in ledger.sealed().items():
            if cut_version is not None and span[1] <= cut_version and ordinal not in consumed:
                sealed.setdefault(ordinal, span)
    sealed = {ordinal: span for ordinal, span in sorted(sealed.items()) if ordinal not in dropped}
    merged: Intervals[str] = Intervals()
    for ordinal, reason in sorted(dropped.items()):
        merged.add(ordinal, ordinal + 1, reason)
    horizon = max((ledger.next_ordinal for ledger in known), default=0)
    held = [(start, stop) for start, stop, _ in consumed]
    held += [(ordinal, ordinal + 1) for ordinal in (*dropped, *sealed)]
    return Ledger.from_json(  # by intervals: one method call an ordinal would take seconds for a million
        {
            "seed": seed,
            "next": horizon,
            "issued": [[start, stop] for start, stop in gaps(held, horizon)],
            "sealed": [[ordinal, *span] for ordinal, span in sealed.items()],
            "consumed": [list(row) for row in consumed],
            "dropped": [list(row) for row in merged],
        }
    )


def unusable_groups(
    ledger: Ledger, *, on_lineage: Callable[[int, int], bool], oldest_version: int
) -> tuple[int, ...]:
    """Sealed ordinals whose groups may not be trained on after a restore, to be given to `Ledger.reissue`.

    `on_lineage(fence, number)` judges a version (`History.version_on_lineage`); `oldest_version` is the
    staleness bound.
    """
    return tuple(
        ordinal
        for ordinal, (first, last, fence) in ledger.sealed().items()
        if first < oldest_version or not on_lineage(fence, last)
    )


def account(lineage: Sequence[Ledger], owner: Ledger | None = None) -> Account:
    """Count the samples in the weights of the newest cut of a lineage.

    `lineage` holds the ledger that decides consumption of every checkpoint, oldest first; `owner` the
    ledger of the newest cut that records issued, sealed and dropped (None: the newest of `lineage` does).
    Lost: below the largest consumed or issued, and neither consumed, dropped nor owed. What the owner
    saw consumed after the cut is owed again by a restore, so it is not lost. Doubled: consumed in one cut
    and, in the next, consumed at another step or not at all (the weights hold it, and it is owed again).
    """
    newest = lineage[-1] if lineage else Ledger()
    keeper = owner if owner is not None else newest
    horizon = max(newest.next_ordinal, keeper.next_ordinal)
    last_step = max(newest.consumed.values, default=-1)
    settled = [(start, stop) for start, stop, _ in newest.consumed]
    settled += [(start, stop) for start, stop, _ in keeper.dropped]
    settled += [(start, stop) for start, stop, at in keeper.consumed if at > last_step]
    settled += [(ordinal, ordinal + 1) for ordinal in keeper.owed()]
    lost = [ordinal for start, stop in gaps(settled, horizon) for ordinal in range(start, stop)]
    doubled: set[int] = set()
    for earlier, later in pairwise(lineage):
        same = [(a, b) for a, b, was, now in overlaps(earlier.consumed, later.consumed) if was == now]
        changed = Intervals[None]()
        for start, stop in gaps(same, earlier.consumed.stop):
            changed.add(start, stop, None)
        doubled.update(o for a, b, _, _ in overlaps(earlier.consumed, changed) for o in range(a, b))
    return Account(
        issued=horizon,
        consumed=len(newest.consumed),
        lost=len(lost),
        doubled=len(doubled),
        lost_first=tuple(lost[:_NAMED_AT_MOST]),
        doubled_first=tuple(sorted(doubled)[:_NAMED_AT_MOST]),
    )


def _named(start: int, stop: int) -> str:
    return f"ordinal {start} is" if stop == start + 1 else f"ordinals {start} to {stop - 1} are"


def _distinct(ledgers: Iterable[Ledger]) -> list[Ledger]:
    """Ranks of a role save equal copies of one ledger: keep one of each."""
    found: list[Ledger] = []
    for ledger in ledgers:
        if ledger not in found:
            found.append(ledger)
    return found


def _merge_consumed(ledgers: Sequence[Ledger]) -> tuple[Ledger, list[str]]:
    """The consumption that several ledgers of one role record together, and where two of them differ."""
    if len(ledgers) == 1:
        return ledgers[0], []
    merged, conflicts = Ledger(), list[str]()
    for ledger in ledgers:
        conflicts += [
            f"{_named(start, stop)} consumed at steps {one} and {two}"
            for start, stop, one, two in overlaps(merged.consumed, ledger.consumed)
            if one != two
        ]
        for start, stop, at in ledger.consumed:
            merged.consume([o for o in range(start, stop) if merged.consumed_at(o) is None], at)
    return merged, conflicts


def _other_steps(parts: Sequence[PartClaim], step: int) -> list[str]:
    return [f"{p.member} saved step {p.step}" for p in parts if p.step != step]


def _other_layouts(parts: Sequence[PartClaim]) -> list[str]:
    """Roles whose members planned with different layouts, with the members of each."""
    held: dict[str, dict[str, list[str]]] = {}
    for part in parts:
        held.setdefault(part.member.role, {}).setdefault(part.layout, []).append(str(part.member))
    return [
        f"role {role} planned with {len(layouts)} layouts ("
        + ", ".join(
            f"{digest} by {' '.join(members[:_NAMED_AT_MOST])}" for digest, members in layouts.items()
        )
        + ")"
        for role, layouts in held.items()
        if len(layouts) > 1
    ]
