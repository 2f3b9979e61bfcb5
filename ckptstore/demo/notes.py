"""What the loop tells of itself while it runs, and how a run's story is read from it.

Notes are kept outside the loop, because its own processes die. Nothing in the loop reads them: they are
for the report alone. `at_s` is the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptstore.demo.result import EngineReplaced, Recovery, Save

if TYPE_CHECKING:  # numpy would cost the processes that only take notes
    from ckptstore.manifest import CheckpointInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something happened now."""

    at_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Note):
    """The loop is in step `step` (updates applied so far + 1) and does what `words` say."""

    step: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(Note):
    """Update `step` was applied."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot(Note):
    """A planned kill fired: `kill` as it was written."""

    kill: str
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(Note):
    """Somebody found `who` dead (`trainer/1`, `coordinator`)."""

    who: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced(Note):
    fence: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Took(Note):
    """A phase of a recovery ended well: spawn, regroup, restore or publish."""

    phase: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Note):
    """All ranks hold step `step`; `digest` is over their global tensors by name."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(Note):
    """All members staged step `step`; `blocking_ms` is the longest that a trainer rank was held up."""

    step: int
    fence: int
    blocking_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Note):
    step: int
    fence: int
    nbytes_written: int
    nbytes_reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost(Note):
    engine: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady(Note):
    """An engine serves the newest publication."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Note):
    """A coordinator's work is done: `step` updates, whose global tensors have this digest."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a report tells of a run besides its final state; times count from the run's start."""

    saves: tuple[Save, ...]
    recoveries: tuple[Recovery, ...]
    engines_replaced: tuple[EngineReplaced, ...]
    shots: dict[str, list[float]]
    steps_redone: int


def read_story(notes: Sequence[Note], began_s: float) -> Story:
    """Put the notes of one run in order and read them."""
    ordered = sorted(notes, key=lambda note: note.at_s)
    recoveries = _recoveries(ordered, began_s)
    shots: dict[str, list[float]] = {}
    for note in ordered:
        if isinstance(note, Shot):
            shots.setdefault(note.kill, []).append(note.at_s - began_s)
    return Story(
        saves=_saves(ordered, began_s),
        recoveries=recoveries,
        engines_replaced=_engines(ordered, began_s),
        shots=shots,
        steps_redone=sum(max(recovery.reached - recovery.restored, 0) for recovery in recoveries),
    )


def _saves(notes: Sequence[Note], began_s: float) -> tuple[Save, ...]:
    saves: dict[tuple[int, int], Save] = {}
    for note in notes:
        if isinstance(note, Saving):
            saves[note.fence, note.step] = Save(
                at_s=note.at_s - began_s,
                step=note.step,
                fence=note.fence,
                blocking_ms=note.blocking_ms,
                committed=False,
                nbytes_written=0,
                nbytes_reused=0,
            )
        elif isinstance(note, Committed) and (note.fence, note.step) in saves:
            saves[note.fence, note.step] = replace(
                saves[note.fence, note.step],
                committed=True,
                nbytes_written=note.nbytes_written,
                nbytes_reused=note.nbytes_reused,
            )
    return tuple(saves.values())


def with_commits(saves: Sequence[Save], infos: Sequence[CheckpointInfo]) -> tuple[Save, ...]:
    """The saves as the store knows them: a commit whose teller died before it told of it is a commit."""
    known = {(info.fence, info.step): info for info in infos}
    return tuple(
        save
        if (info := known.get((save.fence, save.step))) is None
        else replace(
            save, committed=True, nbytes_written=info.nbytes_written, nbytes_reused=info.nbytes_reused
        )
        for save in saves
    )


def _engines(notes: Sequence[Note], began_s: float) -> tuple[EngineReplaced, ...]:
    replaced: list[EngineReplaced] = []
    known: set[str] = set()  # those that have served in this run: others are only being started
    for note in notes:
        if isinstance(note, EngineLost):
            waiting = any(engine.engine == note.engine and engine.ready_s is None for engine in replaced)
            if waiting or note.engine not in known:
                continue  # told before: its successor did not come up at once, or the teller changed
            replaced.append(
                EngineReplaced(at_s=note.at_s - began_s, engine=note.engine, step=note.step, ready_s=None)
            )
        elif isinstance(note, EngineReady):
            known.add(note.engine)
            for place, engine in enumerate(replaced):
                if engine.engine == note.engine and engine.ready_s is None:
                    replaced[place] = replace(engine, ready_s=note.at_s - began_s - engine.at_s)
    return tuple(replaced)


def _recoveries(notes: Sequence[Note], began_s: float) -> tuple[Recovery, ...]:
    """One for each fence after the first. Phases that a further death cut short stay 0."""
    found: list[Recovery] = []
    shot_s: dict[str, float] = {}  # who -> when; until the death is noticed
    died: tuple[str, ...] = ()
    noticed_s: float | None = None
    detect_s, reached, fences = 0.0, 0, 0
    for note in notes:
        if isinstance(note, Applied):
            reached = note.step
        elif isinstance(note, Shot):
            shot_s[note.who] = note.at_s
        elif isinstance(note, Noticed):
            died, noticed_s = note.who, note.at_s
            times = [shot_s.pop(who) for who in note.who if who in shot_s]
            detect_s = note.at_s - max(times) if times else 0.0
        elif isinstance(note, Fenced):
            fences += 1
            if fences > 1:
                found.append(
                    Recovery(
                        at_s=(noticed_s if noticed_s is not None else note.at_s) - began_s,
                        fence=note.fence,
                        reason=note.reason,
                        died=died,
                        reached=reached,
                        restored=reached,
                        detect_s=detect_s,
                        spawn_s=note.at_s - noticed_s if noticed_s is not None else 0.0,
                        regroup_s=0.0,
                        restore_s=0.0,
                        publish_s=0.0,
                    )
                )
            died, noticed_s, detect_s = (), None, 0.0
        elif isinstance(note, Took) and found:
            name = f"{note.phase}_s"
            found[-1] = replace(found[-1], **{name: getattr(found[-1], name) + note.duration_s})
        elif isinstance(note, Restored):
            if found:
                found[-1] = replace(found[-1], restored=note.step)
            reached = note.step
    return tuple(found)
