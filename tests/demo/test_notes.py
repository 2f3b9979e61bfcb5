"""A run's story is read from notes: what was redone, how long each phase took, who was replaced."""

from __future__ import annotations

import random

import pytest

from ckptstore.demo.notes import (
    Applied,
    Committed,
    EngineLost,
    EngineReady,
    Fenced,
    Note,
    Noticed,
    Restored,
    Saving,
    Shot,
    Took,
    read_story,
    with_commits,
)
from ckptstore.manifest import AttemptId, CheckpointInfo

STORY: list[Note] = [
    Fenced(at_s=1.0, fence=1, reason="the loop begins"),
    Took(at_s=1.5, phase="spawn", duration_s=0.5),
    Restored(at_s=2.0, step=0, digest="a"),
    EngineReady(at_s=2.1, engine="rollout/0"),
    Applied(at_s=3.0, step=1),
    Applied(at_s=4.0, step=2),
    Saving(at_s=4.1, step=2, fence=1, blocking_ms=7.0),
    Committed(at_s=4.6, step=2, fence=1, nbytes_written=100, nbytes_reused=20),
    Applied(at_s=5.0, step=3),
    Saving(at_s=5.1, step=3, fence=1, blocking_ms=9.0),
    EngineLost(at_s=5.2, engine="rollout/0", step=4),
    EngineLost(at_s=5.3, engine="rollout/0", step=4),  # its successor did not come up at once
    Applied(at_s=5.5, step=4),
    Shot(at_s=6.0, kill="trainer:1@5", who="trainer/1"),
    Noticed(at_s=6.25, who=("trainer/1",)),
    Fenced(at_s=6.5, fence=2, reason="lost trainer/1"),
    Took(at_s=7.5, phase="spawn", duration_s=1.0),
    Took(at_s=7.6, phase="regroup", duration_s=0.1),
    Took(at_s=7.9, phase="restore", duration_s=0.25),
    Restored(at_s=7.9, step=2, digest="b"),
    Took(at_s=8.0, phase="restore", duration_s=0.05),
    Took(at_s=8.2, phase="publish", duration_s=0.1),
    Took(at_s=8.3, phase="publish", duration_s=0.1),
    EngineReady(at_s=8.4, engine="rollout/0"),
    Applied(at_s=9.0, step=3),
]


@pytest.mark.parametrize("seed", range(5))
def test_the_story_does_not_depend_on_the_order_in_which_notes_came(seed: int) -> None:
    notes = list(STORY)
    random.Random(seed).shuffle(notes)
    # Notes of the same moment come from one process, in order: a stable sort keeps those.
    notes.sort(key=lambda note: STORY.index(note) if note.at_s == 7.9 else -1)
    story = read_story(notes, 1.0)
    assert story == read_story(STORY, 1.0)
    (recovery,) = story.recoveries
    assert (recovery.fence, recovery.died, recovery.reached, recovery.restored) == (2, ("trainer/1",), 4, 2)
    phases = (recovery.detect_s, recovery.spawn_s, recovery.regroup_s, recovery.restore_s, recovery.publish_s)
    assert phases == pytest.approx((0.25, 1.25, 0.1, 0.3, 0.2))
    assert recovery.total_s == pytest.approx(2.1)
    assert story.steps_redone == 2
    assert story.shots == {"trainer:1@5": [5.0]}


def test_a_save_that_was_cut_short_is_told_as_uncommitted() -> None:
    saves = read_story(STORY, 1.0).saves
    assert [(save.step, save.committed, save.nbytes_written) for save in saves] == [
        (2, True, 100),
        (3, False, 0),
    ]


def test_an_engine_counts_once_until_it_serves_again() -> None:
    (engine,) = read_story(STORY, 1.0).engines_replaced
    assert (engine.engine, engine.step) == ("rollout/0", 4)
    assert engine.ready_s == pytest.approx(3.2)


def test_a_recovery_that_was_cut_short_redoes_nothing_by_itself() -> None:
    again = [
        Noticed(at_s=7.55, who=("coordinator",)),
        Fenced(at_s=7.58, fence=3, reason="the coordinator died"),
    ]
    story = read_story([note for note in STORY if note.at_s < 7.55] + again + STORY[17:], 1.0)
    assert [recovery.fence for recovery in story.recoveries] == [2, 3]
    assert story.recoveries[0].restore_s == 0.0
    assert story.steps_redone == 2


def test_a_commit_whose_teller_died_is_a_commit() -> None:
    saves = read_story([note for note in STORY if not isinstance(note, Committed)], 1.0).saves
    assert [save.committed for save in saves] == [False, False]
    info = CheckpointInfo(
        id=AttemptId(fence=1, step=2),
        step=2,
        fence=1,
        slot=3,
        committed_at="2026-05-04T10:22:31Z",
        nbytes=120,
        nbytes_written=100,
        nbytes_reused=20,
        nbytes_saved=0,
        roles={"trainer": 2},
        publication=None,
        status="abandoned",
    )
    assert with_commits(saves, [info]) == read_story(STORY, 1.0).saves
