"""The recovery point is a function of the journal's fold; lineage as in protocol R23."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InvalidInputError, NoCheckpointError, NoRecoveryPointError
from ckptstore.history import (
    Body,
    CommitEntry,
    Entry,
    FenceEntry,
    History,
    MarkEntry,
    Origin,
    RetireEntry,
)
from ckptstore.manifest import AttemptId, ObjectRef, Roster
from ckptstore.recovery.point import choose_origin, lives, older

START = Origin(kind="start")
ROSTER = Roster.of({"trainer": 2, "loop": 1})
INDEX = ObjectRef(key="index/x.parquet", nbytes=1, digest="00")


class Writer:
    """Makes a history entry by entry."""

    def __init__(self) -> None:
        self.history = History()

    def add(self, body: Body) -> None:
        n = self.history.slots
        entry = Entry(slot=n, run="r", write=f"{n:04x}", prev="", at="", by="", body=body)
        self.history.apply(entry)

    def fence(self, origin: Origin) -> None:
        number = self.history.fence + 1
        self.add(
            FenceEntry(
                fence=number, replaces=number - 1, origin=origin, reason=None, roster=ROSTER, job="job"
            )
        )

    def resume(self, resume: str | int = "auto") -> Origin:
        origin, _ = choose_origin(self.history, resume)
        self.fence(origin)
        return origin

    def commit(self, step: int) -> AttemptId:
        tries = sum(id.fence == self.history.fence and id.step == step for id in self.history.fold.commits)
        id = AttemptId(fence=self.history.fence, step=step, number=tries)
        self.add(
            CommitEntry(
                fence=id.fence,
                id=id,
                index=INDEX,
                witnesses={},
                level="cluster",
                publication=None,
                counters={},
            )
        )
        return id

    def bad(self, id: AttemptId) -> None:
        self.add(MarkEntry(kind="bad", id=id, segments=(), reason="a flipped bit"))


def test_a_run_without_commits_starts() -> None:
    writer = Writer()
    assert choose_origin(writer.history, "auto") == (START, None)
    writer.fence(START)
    assert choose_origin(writer.history, "auto") == (START, None)
    with pytest.raises(NoCheckpointError, match="nothing was ever committed"):
        choose_origin(writer.history, "must")


def test_auto_takes_the_newest_of_the_lineage_and_not_the_highest_step() -> None:
    writer = Writer()
    writer.resume()
    five = writer.commit(5)
    ten = writer.commit(10)
    assert choose_origin(writer.history, "auto") == (Origin(kind="checkpoint", checkpoint=ten), None)
    writer.resume(5)  # step 10 is left behind
    assert choose_origin(writer.history, "auto")[0].checkpoint == five
    six = writer.commit(6)
    assert choose_origin(writer.history, "auto")[0].checkpoint == six


def test_a_bad_one_is_passed_over_and_all_bad_is_an_error_that_names_them() -> None:
    writer = Writer()
    writer.resume()
    five, ten = writer.commit(5), writer.commit(10)
    writer.bad(ten)
    assert choose_origin(writer.history, "auto")[0].checkpoint == five
    writer.bad(five)
    with pytest.raises(
        NoRecoveryPointError, match=r"s00000010-000 bad: a flipped bit; f0001/s00000005"
    ) as caught:
        choose_origin(writer.history, "auto")
    assert caught.value.commits == (five, ten)
    with pytest.raises(NoCheckpointError):
        choose_origin(writer.history, "must")


def test_never_leaves_commits_behind_with_a_reason_and_auto_then_refuses_to_guess() -> None:
    writer = Writer()
    writer.resume()
    writer.commit(5)
    origin, reason = choose_origin(writer.history, "never")
    assert origin == START
    assert reason
    writer.fence(origin)
    with pytest.raises(NoRecoveryPointError, match="abandoned by a rollback"):
        choose_origin(writer.history, "auto")


def test_retired_checkpoints_are_not_restored_and_still_forbid_a_fresh_start() -> None:
    writer = Writer()
    writer.resume()
    five = writer.commit(5)
    writer.add(RetireEntry(ids=(five,), policy="by hand"))
    with pytest.raises(NoRecoveryPointError, match="retired"):
        choose_origin(writer.history, "auto")
    with pytest.raises(NoCheckpointError):
        choose_origin(writer.history, 5)


def test_a_step_prefers_the_lineage_and_may_name_an_abandoned_checkpoint() -> None:
    writer = Writer()
    writer.resume()
    writer.commit(5)
    abandoned = writer.commit(10)
    writer.resume(5)
    origin, reason = choose_origin(writer.history, 10)
    assert (origin.checkpoint, reason) == (abandoned, "step 10 was asked for")
    again = writer.commit(10)
    assert choose_origin(writer.history, 10)[0].checkpoint == again
    writer.bad(again)
    assert choose_origin(writer.history, 10)[0].checkpoint == abandoned
    with pytest.raises(NoCheckpointError, match="step 7"):
        choose_origin(writer.history, 7)


def test_unreadable_checkpoints_are_passed_over_with_a_reason() -> None:
    writer = Writer()
    writer.resume()
    five, ten = writer.commit(5), writer.commit(10)
    origin, reason = choose_origin(writer.history, "auto", unreadable=[ten])
    assert origin.checkpoint == five
    assert reason is not None
    assert str(ten) in reason
    with pytest.raises(NoRecoveryPointError, match="unreadable"):
        choose_origin(writer.history, "auto", unreadable=[five, ten])


@pytest.mark.parametrize("resume", ["latest", "", -1, True, None])
def test_other_requests_are_refused(resume: object) -> None:
    with pytest.raises(InvalidInputError, match="resume="):
        choose_origin(History(), resume)  # type: ignore[arg-type]  # wrong on purpose


def test_lives_of_one_origin_are_counted_until_a_commit() -> None:
    writer = Writer()
    writer.resume()
    assert lives(writer.history) == 1
    writer.resume()
    assert lives(writer.history) == 2
    five = writer.commit(5)
    assert lives(writer.history) == 0  # this fence has made progress
    writer.resume()
    writer.resume()
    assert lives(writer.history) == 2
    ten = writer.commit(10)
    assert older(writer.history, ten) == five
    assert older(writer.history, five) is None
    writer.resume(5)
    assert lives(writer.history) == 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 20)),
        st.tuples(st.just("bad"), st.integers(0, 20)),
        st.tuples(st.just("auto"), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 20)),
        st.tuples(st.just("never"), st.just(0)),
    ),
    max_size=30,
)


@given(actions=ACTIONS)
def test_auto_restores_the_last_good_commit_that_the_lineage_can_reach(
    actions: list[tuple[str, int]],
) -> None:
    """An oracle that copies whole pasts instead of walking origins."""
    writer = Writer()
    writer.resume()
    past: list[AttemptId] = []  # commits of the lineage, in order
    pasts: dict[AttemptId, list[AttemptId]] = {}  # the past of each commit, itself included
    bad: set[AttemptId] = set()
    for verb, number in actions:
        if verb == "commit":
            # steps never decrease under a fence (R13)
            step = max([id.step for id in past if id.fence == writer.history.fence] + [number])
            id = writer.commit(step)
            past = [*past, id]
            pasts[id] = past
        elif verb == "bad" and past:
            id = past[number % len(past)]
            if id not in bad:
                writer.bad(id)
                bad.add(id)
        elif verb == "never":
            writer.resume("never")
            past = []
        elif verb in ("auto", "step"):
            try:
                chosen = writer.resume("auto" if verb == "auto" else number).checkpoint
            except (NoCheckpointError, NoRecoveryPointError):
                if verb == "auto":
                    assert pasts
                    assert set(past) <= bad
                continue
            if verb == "auto":
                good = [id for id in past if id not in bad]
                assert chosen == (good[-1] if good else None)
            past = pasts[chosen] if chosen is not None else []
