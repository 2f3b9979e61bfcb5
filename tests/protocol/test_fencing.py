"""Who may begin, what is restored, and what a save tells when something is missing, refused or overtaken.

Everything runs in virtual time: one process drives several members in turn, as a test or a notebook does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptstore import exchange, incarnation
from ckptstore.checkpointer import Checkpointer, SaveHandle
from ckptstore.commit import Committer
from ckptstore.errors import (
    AlreadyExistsError,
    CorruptError,
    FencedError,
    IncompleteSaveError,
    InconsistentCutError,
    InvalidInputError,
    NoCheckpointError,
    NoRecoveryPointError,
    OutcomeUnknownError,
    RunInUseError,
    StoreUnavailableError,
)
from ckptstore.held import PerRank
from ckptstore.history import History
from ckptstore.incarnation import ALIVE_S, BEAT_S, Incarnation, begin
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Member, part_key
from ckptstore.store.memory import MemoryStore
from ckptstore.testing.clock import FakeClock
from ckptstore.testing.faults import Call, Fault, FaultStore
from ckptstore.testing.simulated import mounted
from ckptstore.testing.simulation import Simulation
from ckptstore.writer import PartWriter
from tests.protocol.planting import plant

ROSTER = {"trainer": 2, "loop": 1}
MEMBERS = (("trainer", 0), ("trainer", 1), ("loop", 0))
TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "probe", lambda store: None)


class Job:
    """All members of one run, driven by one thread of a simulation."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim

    def begin(self, job: str = "job", roster: dict[str, int] | None = None, **options: Any) -> Incarnation:
        inc = begin(self.sim.url, roster or ROSTER, job=job, clock=self.sim.clock, **options)
        inc._stop.set()
        return inc

    def member(self, inc: Incarnation, role: str, rank: int) -> Checkpointer:
        return Checkpointer(inc.token, role=role, rank=rank, clock=self.sim.clock, commit_timeout_s=TIMEOUT_S)

    def members(self, inc: Incarnation) -> list[Checkpointer]:
        return [self.member(inc, role, rank) for role, rank in MEMBERS]

    def save(self, members: list[Checkpointer], step: int, **changes: Any) -> list[SaveHandle]:
        """Save on all members in turn, and wait for all outcomes; `changes` go into rank 1's state."""
        handles = []
        for ck in members:
            state = self.state(step)
            if ck._member == Member(role="trainer", rank=1):
                state.update(changes)
            handles.append(ck.save(step, state))
        self.sim.wait(lambda: all(handle.done() for handle in handles))
        return handles

    @staticmethod
    def state(step: int) -> dict[str, Any]:
        return {"w": np.full(4, float(step)), "v": np.full(4, float(step)), "lr": 0.1, "rank": PerRank(0)}

    def history(self) -> History:
        return Journal(self.sim.store, clock=self.sim.clock).catch_up()


def play(scenario: Callable[[Job], None], **options: Any) -> Job:
    sim = Simulation(seed=options.pop("seed", 0), **options)
    job = Job(sim)
    sim.spawn("job", lambda: scenario(job))
    sim.run()
    return job


def committed(job: Job) -> list[AttemptId]:
    return list(job.history().fold.commits)


# -- fences


def test_a_save_of_an_older_incarnation_raises_fenced_at_result_on_every_member() -> None:
    def scenario(job: Job) -> None:
        old = job.members(job.begin("old"))
        job.save(old, 10)
        new = job.members(job.begin("new", takeover=True))
        for handle in job.save(old, 20):
            with pytest.raises(FencedError, match="holds fence 1 but the run is at fence 2"):
                handle.result(0)
        assert [handle.result(0).fence for handle in job.save(new, 20)] == [2, 2, 2]
        assert committed(job) == [AttemptId(fence=1, step=10), AttemptId(fence=2, step=20)]

    play(scenario)


def test_a_fence_raised_while_a_save_waits_for_parts_ends_the_wait() -> None:
    def scenario(job: Job) -> None:
        old = job.members(job.begin("old"))
        handle = old[0].save(10, job.state(10))
        other = old[1].save(10, job.state(10))
        job.begin("new", takeover=True)
        before_s = job.sim.now_s
        job.sim.wait(lambda: handle.done() and other.done())
        assert job.sim.now_s - before_s < TIMEOUT_S / 2
        for each in (handle, other):
            with pytest.raises(FencedError):
                each.result(0)

    play(scenario)


def test_the_loser_of_a_race_of_begins_stands_down_and_does_not_count_up() -> None:
    outcomes: list[int | Exception] = []

    def contender(job: Job, name: str) -> Callable[[], None]:
        def run() -> None:
            try:
                outcomes.append(job.begin(name, takeover=True).fence)
            except FencedError as error:
                outcomes.append(error)

        return run

    lost = 0
    for seed in range(20):
        outcomes.clear()
        sim = Simulation(seed=seed)
        job = Job(sim)
        for name in ("one", "two", "three"):
            sim.spawn(name, contender(job, name))
        sim.run()
        fences = sorted(each for each in outcomes if isinstance(each, int))
        assert fences == list(range(1, len(fences) + 1))
        lost += 3 - len(fences)
    assert lost, "no seed had a race"


# -- RunInUse


def test_a_live_run_of_another_job_is_refused_until_it_ends() -> None:
    def scenario(job: Job) -> None:
        inc = job.begin("living")
        living = [True]

        def beat() -> None:
            for count in range(1, 1000):
                if not living[0]:
                    return
                job.sim.clock.sleep(BEAT_S)
                inc._write_beat(count)

        job.save(job.members(inc), 10)
        job.sim.spawn("beat", beat)
        with pytest.raises(RunInUseError, match="job living") as caught:
            job.begin("other")
        assert caught.value.newest == AttemptId(fence=1, step=10)
        assert job.begin("living").fence == 2, "the same job begins at once"
        inc._token = job.begin("living")._token  # the beat goes on under the newest fence
        with pytest.raises(RunInUseError):
            job.begin("other")
        living[0] = False
        job.sim.clock.sleep(2 * BEAT_S)
        before_s = job.sim.now_s
        assert job.begin("other").fence == 4, "a beat that does not move is a dead job's"
        assert job.sim.now_s - before_s >= ALIVE_S

    play(scenario)


def test_takeover_a_release_and_the_same_job_begin_at_once() -> None:
    def scenario(job: Job) -> None:
        first = job.begin("a")
        started_s = job.sim.now_s
        job.begin("b", takeover=True)
        last = job.begin("b")
        last._stop.clear()
        last._beat = None
        last.close()
        last.close()
        job.begin("c")
        assert job.sim.now_s - started_s < 1.0
        first._stop.clear()
        first._beat = None
        first.close()  # a fenced incarnation releases nothing
        assert job.history().fold.released == {3}

    play(scenario)


def test_a_fence_that_stands_is_not_reported_as_a_failure_when_its_beat_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def down(self: Incarnation, count: int) -> None:
        raise StoreUnavailableError("the store is down")

    monkeypatch.setattr(Incarnation, "_write_beat", down)
    play(lambda job: _expect(job.begin().fence, 1))


def _expect(found: Any, wanted: Any) -> None:
    assert found == wanted


# -- what is restored


def test_resume_chooses_the_newest_nothing_or_a_step() -> None:
    def scenario(job: Job) -> None:
        with pytest.raises(NoCheckpointError):
            job.begin(resume="must")
        inc = job.begin()
        assert inc.step is None
        members = job.members(inc)
        for step in (0, 10, 20):
            job.save(members, step)
        assert job.begin().step == 20
        assert job.begin(resume="must").step == 20
        assert job.begin(resume=0).step == 0, "step 0 exists"
        assert job.begin().step == 0, "auto follows the lineage, not the highest step"
        with pytest.raises(NoCheckpointError, match="step 15"):
            job.begin(resume=15)
        with pytest.raises(InvalidInputError):
            job.begin(resume="perhaps")
        back = job.begin(resume=20)
        state = job.state(0)
        assert job.member(back, "trainer", 1).restore(state) == 20 and (state["w"] == 20).all()
        fresh = job.begin(resume="never")
        assert fresh.step is None
        assert job.member(fresh, "trainer", 0).restore(job.state(0)) is None
        with pytest.raises(NoRecoveryPointError, match="f0001/s00000020-000"):
            job.begin()
        reasons = [entry.reason for entry in job.history().fold.fences.values()]
        assert all(reasons[n] for n in (3, 5, 6)) and not any(reasons[n] for n in (0, 1, 2, 4)), reasons

    play(scenario)


def test_a_damaged_index_is_passed_over_with_a_reason_and_no_fresh_start_hides_the_commits() -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        for step in (10, 20):
            job.save(members, step)
        store = job.sim.store
        keys = [key for key in store.objects if key.startswith("index/") and key.count(".") == 1]
        store._objects[keys[1]] = store._objects[keys[1]][:-1]
        inc = job.begin()
        assert inc.step == 10
        assert "s00000020" in (job.history().fold.fences[2].reason or "")
        del store._objects[keys[0]]
        with pytest.raises(NoRecoveryPointError):
            job.begin()

    play(scenario)


def test_an_index_that_is_not_seen_at_once_is_read_again_before_it_is_called_damaged() -> None:
    inner = MemoryStore(name="hidden")
    with mounted(inner, "hidden") as url:
        inc = begin(url, {"trainer": 1}, clock=FakeClock())
        inc._stop.set()
        Checkpointer(inc, role="trainer", rank=0).save(10, {"w": np.ones(3)}).result(60)
        again = begin(url, {"trainer": 1}, takeover=True, clock=FakeClock())
        again._stop.set()
        key = next(key for key in inner._objects if key.startswith("index/"))
        hidden = inner._objects.pop(key)

        class Clock(FakeClock):
            def sleep(self, duration_s: float) -> None:
                inner._objects[key] = hidden
                super().sleep(duration_s)

        state = {"w": np.zeros(3)}
        assert Checkpointer(again, role="trainer", rank=0, clock=Clock()).restore(state) == 10
        third = begin(url, {"trainer": 1}, takeover=True, clock=FakeClock())
        third._stop.set()
        del inner._objects[key]
        with pytest.raises(CorruptError, match=key):
            Checkpointer(third, role="trainer", rank=0, clock=FakeClock()).restore(state)
        bad = Journal(inner).catch_up().fold.bad
        assert list(bad) == [AttemptId(fence=1, step=10)]


# -- parts that are missing, refused or contradict


def abandoned(job: Job, attempt: AttemptId) -> str:
    history = job.history()
    assert not history.is_committed(attempt) and not history.is_open(attempt)
    return history.fold.abandoned[attempt]


def test_a_member_missing_at_the_commit_is_named_the_attempt_abandoned_and_the_next_save_works() -> None:
    def scenario(job: Job) -> None:
        inc = job.begin()
        members = job.members(inc)
        job.save(members, 10)
        before_s = job.sim.now_s
        handles = job.save(members[:2], 20)
        assert TIMEOUT_S <= job.sim.now_s - before_s < 2 * TIMEOUT_S
        for handle in handles:
            with pytest.raises(IncompleteSaveError, match="loop/0"):
                handle.result(0)
        assert "loop/0" in abandoned(job, AttemptId(fence=1, step=20))
        late = members[2].save(20, job.state(20))
        job.sim.wait(late.done)
        with pytest.raises(IncompleteSaveError):
            late.result(0)
        assert [handle.result(0).step for handle in job.save(members, 30)] == [30] * 3
        assert [id.step for id in committed(job)] == [10, 30]

    play(scenario)


def test_a_failed_save_is_raised_by_the_next_save_and_by_close() -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        handle = members[0].save(10, job.state(10))
        job.sim.wait(handle.done)
        with pytest.raises(IncompleteSaveError):
            members[0].save(20, job.state(20))
        handle = members[0].save(20, job.state(20))
        job.sim.wait(handle.done)
        with pytest.raises(IncompleteSaveError):
            members[0].close()
        members[0].close()

    play(scenario)


def test_a_part_that_refuses_ends_the_save_at_once_with_its_reason() -> None:
    def scenario(job: Job) -> None:
        inc = job.begin()
        members = job.members(inc)
        writer = PartWriter(store=job.sim.store, run=inc.run_id, member=Member(role="loop", rank=0))
        writer.refuse(AttemptId(fence=1, step=10), "the disk of loop/0 is full")
        before_s = job.sim.now_s
        for handle in job.save(members[:2], 10):
            with pytest.raises(IncompleteSaveError, match=r"loop/0.*disk of loop/0 is full"):
                handle.result(0)
        assert job.sim.now_s - before_s < 1.0
        abandoned(job, AttemptId(fence=1, step=10))

    play(scenario)


@pytest.mark.parametrize("rank", [0, 1], ids=["the committer", "another member"])
def test_a_state_that_one_rank_cannot_save_ends_the_save_for_all_at_once(rank: int) -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        before_s = job.sim.now_s
        with pytest.raises(InvalidInputError, match="bad"):
            members[rank].save(10, {"bad": {1, 2}})
        handles = [ck.save(10, job.state(10)) for ck in members if ck is not members[rank]]
        job.sim.wait(lambda: all(handle.done() for handle in handles))
        for handle in handles:
            with pytest.raises(IncompleteSaveError, match=f"trainer/{rank}"):
                handle.result(0)
        assert job.sim.now_s - before_s < 1.0
        abandoned(job, AttemptId(fence=1, step=10))
        assert [handle.result(0).step for handle in job.save(members, 20)] == [20] * 3

    play(scenario)


def test_a_damaged_part_is_an_inconsistent_cut_for_every_member() -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        loop = Member(role="loop", rank=0)
        job.sim.store.create(part_key(AttemptId(fence=1, step=10), loop), b"not a part")
        handles = [ck.save(10, job.state(10)) for ck in members[:2]]
        job.sim.wait(lambda: all(handle.done() for handle in handles))
        for handle in handles:
            with pytest.raises(InconsistentCutError, match="loop-00000"):
                handle.result(0)
        abandoned(job, AttemptId(fence=1, step=10))

    play(scenario)


def test_common_values_that_differ_between_ranks_are_refused_by_path_and_rank() -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        for handle in job.save(members, 10, lr=0.2):
            with pytest.raises(InconsistentCutError, match=r"lr differs.*trainer/1.*PerRank"):
                handle.result(0)
        abandoned(job, AttemptId(fence=1, step=10))
        assert all(handle.result(0).step == 20 for handle in job.save(members, 20, rank=PerRank(7)))

    play(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_a_structure_that_changes_on_one_rank_costs_one_save_and_not_all_later_ones(seed: int) -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        job.save(members, 10)
        for handle in job.save(members, 20, moment=np.ones(3)):
            with pytest.raises((InconsistentCutError, IncompleteSaveError), match="trainer/1"):
                handle.result(0)
        abandoned(job, AttemptId(fence=1, step=20))
        assert all(handle.result(0).step == 30 for handle in job.save(members, 30))

    play(scenario, seed=seed)


def test_a_tensor_of_another_shape_on_one_rank_is_refused() -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        for handle in job.save(members, 10, w=np.ones(5)):
            with pytest.raises((InconsistentCutError, IncompleteSaveError, InvalidInputError), match=r"w"):
                handle.result(0)
        abandoned(job, AttemptId(fence=1, step=10))

    play(scenario)


def test_a_layout_made_between_two_looks_is_not_taken_for_an_unchanged_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        assert all(handle.result(0).step == 10 for handle in job.save(members, 10))

    for seed in range(20):
        play(scenario, seed=seed)
    monkeypatch.setattr(exchange, "SECOND_LOOK_S", 0.0)
    with pytest.raises((InconsistentCutError, IncompleteSaveError)):
        for seed in range(200):
            play(scenario, seed=seed)


# -- order of saves


def test_steps_never_decrease_and_a_repeated_step_is_a_new_attempt() -> None:
    def scenario(job: Job) -> None:
        members = job.members(job.begin())
        job.save(members, 10)
        with pytest.raises(InvalidInputError, match="steps never decrease"):
            members[0].save(5, job.state(5))
        for number in (1, 2):
            assert {h.result(0).id for h in job.save(members, 10)} == {
                AttemptId(fence=1, step=10, number=number)
            }
        assert len(committed(job)) == 3

    play(scenario)


def test_the_number_of_a_save_is_taken_before_anything_can_fail() -> None:
    inner = MemoryStore(name="numbers")
    down = [False]
    choose: Callable[[Call], Fault | None] = lambda call: "unavailable" if down[0] else None  # noqa: E731  # a def would hide the one line
    store = FaultStore(inner, choose=choose)
    with mounted(store, "numbers") as url:
        inc = begin(url, {"trainer": 1}, clock=FakeClock())
        inc._stop.set()
        ck = Checkpointer(inc, role="trainer", rank=0)
        down[0] = True
        with pytest.raises(StoreUnavailableError):
            ck.save(10, {"w": np.ones(2)})  # its claim failed
        down[0] = False
        assert ck.save(10, {"w": np.ones(2)}).result(60).id.number == 1


def _parts(job: Job, inc: Incarnation, steps: tuple[int, ...]) -> None:
    """All members' parts of these steps, and no committer that looks at them."""
    for step in steps:
        for role, rank in MEMBERS:
            ck = job.member(inc, role, rank)
            ck._contributor.committer = None
            ck._life = 0
            handle = ck.save(step, job.state(step))
            job.sim.spawn("patience", lambda handle=handle: job.sim.wait(handle._written.is_set))  # type: ignore[misc]  # mypy infers no lambda with a default
    job.sim.clock.sleep(5)


def test_an_attempt_overtaken_by_a_later_one_is_never_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(job: Job) -> None:
        inc = job.begin()
        _parts(job, inc, (10, 20))
        for step in (20, 10):
            committer = Committer(
                store=job.sim.store,
                journal=Journal(job.sim.store, clock=job.sim.clock, run=inc.run_id),
                fence=1,
                members=inc.roster.members,
                leader="trainer",
            )
            if step == 20:
                committer.run(AttemptId(fence=1, step=step), timeout_s=1)
            else:
                with pytest.raises(IncompleteSaveError, match="later save of this fence is committed"):
                    committer.run(AttemptId(fence=1, step=step), timeout_s=1)
        assert [id.step for id in committed(job)] == [20]

    play(scenario)
    old = 'return attempt.kind == "p" or newest is None or attempt > newest'
    plant(monkeypatch, History, "is_open", (old, "return True"))
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        play(scenario)


def test_two_committers_of_one_attempt_are_both_told_of_the_one_commit() -> None:
    def scenario(job: Job) -> None:
        inc = job.begin()
        _parts(job, inc, (10,))
        for _ in range(2):
            Committer(
                store=job.sim.store,
                journal=Journal(job.sim.store, clock=job.sim.clock, run=inc.run_id),
                fence=1,
                members=inc.roster.members,
                leader="trainer",
            ).run(AttemptId(fence=1, step=10), timeout_s=1)
        assert [id.step for id in committed(job)] == [10]

    play(scenario)


# -- one life


def test_a_trainer_rank_has_one_life_under_a_fence_and_the_loop_may_have_several() -> None:
    def scenario(job: Job) -> None:
        inc = job.begin()
        members = job.members(inc)
        job.save(members, 10)
        with pytest.raises(AlreadyExistsError, match="already lives under fence 1"):
            job.member(inc, "trainer", 1).save(20, job.state(20))
        again = [*members[:2], job.member(inc, "loop", 0)]
        assert all(handle.result(0).step == 20 for handle in job.save(again, 20))

    play(scenario)


def test_an_outcome_that_may_still_land_is_unknown_and_never_told_as_a_failure() -> None:
    inner = MemoryStore(name="unheard")
    lost = [False]

    def choose(call: Call) -> Fault | None:
        if call.verb == "create" and call.key.startswith("journal/") and call.key.endswith("1.json"):
            lost[0] = True
            return "unknown, landed"
        return "unavailable" if lost[0] else None

    with mounted(FaultStore(inner, choose=choose), "unheard") as url:
        inc = begin(url, {"trainer": 1}, clock=FakeClock())
        inc._stop.set()
        handle = Checkpointer(inc, role="trainer", rank=0).save(10, {"w": np.ones(2)})
        with pytest.raises(OutcomeUnknownError):
            handle.result(60)
    assert Journal(inner).catch_up().is_committed(handle.attempt)
