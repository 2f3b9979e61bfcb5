"""Whatever fails, and whenever, the coordinator keeps the order and ends: finished, halted or stood down."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

import ckptstore
from ckptstore.errors import CkptStoreError, CorruptError, FencedError, StoreUnavailableError
from ckptstore.incarnation import Incarnation
from ckptstore.manifest import Member
from ckptstore.recovery.coordinator import Coordinator, Ended, Mission
from ckptstore.recovery.launcher import Call, MemberDiedError
from ckptstore.recovery.machine import Limits, State

TRAINERS = tuple(Member(role="trainer", rank=rank) for rank in range(2))
ENGINES = (Member(role="rollout", rank=0),)
ORDER = ["regroup", "restore", "rebuild", "publish", "converge", "admit"]
_URLS = (f"memory://coordinator-{number}" for number in itertools.count())


class NoSleep:
    """Virtual time: waiting costs nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def now(self) -> str:
        return "2026-01-01T00:00:00Z"

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


class NoProcesses:
    """A launcher of nothing; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Member, ...]]] = []

    def start(self, members: Sequence[Member]) -> None:
        self.asked.append(("start", tuple(members)))

    def ensure(self, members: Sequence[Member], *, deadline_s: float) -> None:
        self.asked.append(("ensure", tuple(members)))

    def call(self, member: Member, verb: str, *arguments: object) -> Call:
        raise NotImplementedError

    def ready(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        raise NotImplementedError

    def result(self, call: Call) -> object:
        raise NotImplementedError

    def gather(self, calls: Sequence[Call], *, deadline_s: float) -> list[object]:
        raise NotImplementedError

    def stop(self, members: Sequence[Member]) -> None:
        self.asked.append(("stop", tuple(members)))


class ScriptedJob:
    """Raises `failures[verb]` one after another, then succeeds; works for three pieces."""

    def __init__(self, failures: dict[str, list[CkptStoreError]] | None = None) -> None:
        self.failures = failures or {}
        self.log: list[str] = []
        self.left = 3

    def _do(self, verb: str) -> None:
        self.log.append(verb)
        if self.failures.get(verb):
            raise self.failures[verb].pop(0)

    def shut(self) -> None:
        self._do("shut")

    def regroup(self, incarnation: Incarnation) -> None:
        self.log.append(f"fence {incarnation.fence}")
        self._do("regroup")

    def restore(self, incarnation: Incarnation) -> None:
        self._do("restore")

    def rebuild(self) -> None:
        self._do("rebuild")

    def publish(self) -> None:
        self._do("publish")

    def converge(self) -> int:
        self._do("converge")
        return 1

    def replace(self, engines: Sequence[str]) -> None:
        self._do(f"replace {','.join(engines)}")

    def admit(self) -> None:
        self._do("admit")

    def advance(self) -> bool:
        self._do("advance")
        self.left -= 1
        return self.left > 0


def run(job: ScriptedJob, **limits: int) -> tuple[Coordinator, NoProcesses, Ended]:
    launcher, clock = NoProcesses(), NoSleep()
    mission = Mission(
        url=next(_URLS),
        job="test",
        roster={"trainer": 2, "loop": 1},
        trainers=TRAINERS,
        engines=ENGINES,
        limits=Limits(**limits),
    )
    coordinator = Coordinator(mission, launcher=launcher, job=job, clock=clock)
    return coordinator, launcher, coordinator.run("test")


DEATH = MemberDiedError("gone", members=(TRAINERS[1],))
ENGINE_DEATH = MemberDiedError("gone", members=ENGINES)


def test_a_start_takes_the_whole_path_and_releases_the_fence() -> None:
    job = ScriptedJob()
    coordinator, launcher, ended = run(job)
    assert ended.finished
    assert job.log == ["fence 1", *ORDER, "advance", "advance", "advance", "shut"]
    assert launcher.asked[0] == ("start", (*TRAINERS, *ENGINES))
    assert launcher.asked[1] == ("ensure", TRAINERS)
    assert coordinator.incarnation is not None
    history = ckptstore.open(coordinator.incarnation.url).catalog.history
    assert history.fold.released == {1}


@pytest.mark.parametrize("verb", [*ORDER[:-1], "advance"])
def test_a_death_at_any_point_begins_again_with_a_new_fence(verb: str) -> None:
    job = ScriptedJob({verb: [DEATH]})
    _, _, ended = run(job)
    assert ended.finished
    again = job.log[job.log.index(verb) + 1 :]
    assert again == ["shut", "fence 2", *ORDER, *(["advance"] * 3), "shut"]


@pytest.mark.parametrize("verb", ["converge", "advance"])
def test_an_engines_death_raises_no_fence(verb: str) -> None:
    job = ScriptedJob({verb: [ENGINE_DEATH]})
    _, _, ended = run(job)
    assert ended.finished
    assert not any(entry.startswith("fence 2") for entry in job.log)
    assert ("replace rollout/0" in job.log) == (verb == "advance")


@pytest.mark.parametrize("verb", ORDER[:-1])
def test_a_store_that_comes_back_in_time_is_waited_for(verb: str) -> None:
    job = ScriptedJob({verb: [StoreUnavailableError("disk full"), StoreUnavailableError("disk full")]})
    assert run(job, max_lives=9)[2].finished


def test_a_store_that_stays_down_halts_and_stops_the_members() -> None:
    job = ScriptedJob({"rebuild": [StoreUnavailableError("disk full")] * 1000})
    _, launcher, ended = run(job)
    assert not ended.finished
    assert "the store was down for 60 s: disk full" in ended.why
    assert launcher.asked[-1] == ("stop", (*TRAINERS, *ENGINES))


def test_a_lost_fence_stands_down_and_touches_no_process() -> None:
    job = ScriptedJob({"advance": [FencedError("fence 7 rules", held=1, current=7)]})
    coordinator, launcher, ended = run(job)
    assert not ended.finished
    assert ended.why.startswith("stood down")
    assert not any(verb == "stop" for verb, _ in launcher.asked)
    assert coordinator.state is State.HALTED


def test_damage_met_by_a_restore_is_a_new_fence() -> None:
    job = ScriptedJob({"restore": [CorruptError("a chunk is not what was written")]})
    assert run(job)[2].finished
    assert "fence 2" in job.log


def test_a_crash_loop_without_an_older_checkpoint_halts() -> None:
    job = ScriptedJob({"restore": [DEATH] * 10})
    _, launcher, ended = run(job, max_lives=3)
    assert not ended.finished
    assert "3 lives of one recovery point" in ended.why
    assert job.log.count("restore") == 3
    assert launcher.asked[-1][0] == "stop"


def test_a_mistake_of_the_job_is_raised_after_the_members_were_stopped() -> None:
    class Mistaken(ScriptedJob):
        def rebuild(self) -> None:
            raise ZeroDivisionError

    launcher = NoProcesses()
    mission = Mission(
        url=next(_URLS), job="test", roster={"trainer": 2, "loop": 1}, trainers=TRAINERS, engines=ENGINES
    )
    with pytest.raises(ZeroDivisionError):
        Coordinator(mission, launcher=launcher, job=Mistaken(), clock=NoSleep()).run("test")
    assert launcher.asked[-1][0] == "stop"
