"""Choose what an incarnation continues from: a checkpoint of the lineage, or nothing.

The choice is a pure function of the journal's fold, so a bad one seen in production replays as a
unit test. It is made once for all members, by whoever raises the fence, and the fence entry names
it, so nothing can land between choosing and fencing (protocol R22, R23).
"""

from __future__ import annotations

from collections.abc import Collection

from ckptstore.errors import InvalidInputError, NoCheckpointError, NoRecoveryPointError
from ckptstore.history import CHECKPOINT, START, History, Origin
from ckptstore.manifest import AttemptId

AUTO, MUST, NEVER = "auto", "must", "never"
NAMED_AT_MOST = 8  # commits that a message lists


def choose_origin(
    history: History, resume: str | int, *, unreadable: Collection[AttemptId] = ()
) -> tuple[Origin, str | None]:
    """Give the origin of the next fence and the reason that its entry must state, if it must state one.

    `auto`: the newest good checkpoint of the lineage; a start only if nothing was ever committed, else
    NoRecoveryPointError naming the commits. `must`: such a checkpoint or NoCheckpointError. `never`: a
    start. A step: its newest checkpoint that is not bad, the lineage's before an abandoned one's, or
    NoCheckpointError. `unreadable` are checkpoints that the caller could not reach or restore: they
    are passed over, and then the reason says so. Any other `resume` is InvalidInputError.
    """
    if resume == NEVER:
        return Origin(kind=START), "a fresh start was asked for"
    if isinstance(resume, int) and not isinstance(resume, bool) and resume >= 0:
        return _of_step(history, resume, unreadable)
    if resume not in (AUTO, MUST):
        raise InvalidInputError(
            f"resume={resume!r} is not known: use 'auto', 'must', 'never' or the step of a checkpoint",
            resume=resume,
        )
    good = history.good()
    usable = [id for id in good if id not in unreadable]
    if usable:
        skipped = good[good.index(usable[-1]) + 1 :]
        reason = f"newer checkpoints cannot be read: {_named(skipped)}" if skipped else None
        return Origin(kind=CHECKPOINT, checkpoint=usable[-1]), reason
    if resume == MUST:
        raise NoCheckpointError(
            f"resume='must', but the run has no checkpoint to restore ({_told(history, unreadable)}); "
            f"use resume='auto' for a first start",
            commits=tuple(history.fold.commits),
        )
    if history.fold.commits:
        raise NoRecoveryPointError(
            f"no checkpoint can be restored, and starting fresh over committed ones is refused "
            f"({_told(history, unreadable)}); choose one by resume=<step>, or leave them by resume='never'",
            commits=tuple(history.fold.commits),
        )
    return Origin(kind=START), None


def lives(history: History) -> int:
    """Count the newest fences in a row that have the newest fence's origin and committed nothing.

    1 while an origin's first life lasts; each fence after it that made no progress adds one. A life that
    committed has moved the origin, or was rolled back behind it on purpose, and ends the row.
    """
    count, origin = 0, None
    for fence in range(history.fence, 0, -1):
        entry = history.fold.fences.get(fence)
        if entry is None or history.newest_commit(fence) is not None:
            break
        if origin not in (None, entry.origin):
            break
        origin = entry.origin
        count += 1
    return count


def older(history: History, than: AttemptId) -> AttemptId | None:
    """Give the good checkpoint of the lineage before `than`, or None: what a crash loop falls back to."""
    slot = history.fold.commit_slot[than]
    before = [id for id in history.good() if history.fold.commit_slot[id] < slot]
    return before[-1] if before else None


def _of_step(history: History, step: int, unreadable: Collection[AttemptId]) -> tuple[Origin, str]:
    found = [id for id in history.live() if id.step == step]
    usable = [id for id in found if id not in history.fold.bad and id not in unreadable]
    if not usable:
        raise NoCheckpointError(
            f"the run has no checkpoint of step {step} that can be restored ({_told(history, unreadable)}); "
            f"choose another step",
            step=step,
            commits=tuple(history.fold.commits),
        )
    chosen = max(usable, key=lambda id: (history.on_lineage(id), history.fold.commit_slot[id]))
    return Origin(kind=CHECKPOINT, checkpoint=chosen), f"step {step} was asked for"


def _told(history: History, unreadable: Collection[AttemptId]) -> str:
    """The commits of the journal, newest first, each with what is wrong with it."""
    if not history.fold.commits:
        return "nothing was ever committed"
    texts = []
    for id in reversed(history.fold.commits):
        if id in history.fold.retired:
            fate = "retired"
        elif id in history.fold.bad:
            fate = f"bad: {history.fold.bad[id]}"
        elif id in unreadable:
            fate = "unreadable"
        else:
            fate = "ok" if history.on_lineage(id) else "abandoned by a rollback"
        texts.append(f"{id} {fate}")
    more = f" and {len(texts) - NAMED_AT_MOST} more" if len(texts) > NAMED_AT_MOST else ""
    return "; ".join(texts[:NAMED_AT_MOST]) + more


def _named(ids: Collection[AttemptId]) -> str:
    texts = [str(id) for id in ids]
    more = f" and {len(texts) - NAMED_AT_MOST} more" if len(texts) > NAMED_AT_MOST else ""
    return ", ".join(texts[-NAMED_AT_MOST:]) + more
