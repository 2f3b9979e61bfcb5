"""A cluster in one process: members in threads, with numpy in place of a model, that die where a test says.

Saves, publications, fences and ledgers are real, on a memory store, so a death at any call is recovered by
the code that the Ray demo runs; only the arithmetic and the processes are stood in for.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np

import ckptstore
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.loop import Loop, LoopSpec
from ckptstore.demo.notes import Note
from ckptstore.demo.records import Group, StepReport
from ckptstore.errors import FencedError
from ckptstore.manifest import Member, PublicationId
from ckptstore.recovery.coordinator import Coordinator, Ended
from ckptstore.recovery.detector import Answered, Died, Failed, Outcome, Silent, judge
from ckptstore.recovery.launcher import Call, MemberDiedError, PeerLostError

CONTROL = ("ping", "enter")
Life = tuple[int, int]


class CoordinatorDied(BaseException):
    """Not an Exception: nothing in the code under test may catch it."""


class Meeting:
    """A process group: whoever dies or leaves breaks it for the others, as gloo's connections do."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)

    def meet(self) -> None:
        try:
            self._barrier.wait(timeout=20)
        except threading.BrokenBarrierError:
            raise PeerLostError("a peer was lost") from None

    def leave(self) -> None:
        self._barrier.abort()


class Ground:
    """What members share: meeting places, and the counter of calls that decides who dies when."""

    def __init__(self, doom: Callable[[str, str, int], bool]) -> None:
        self.doom = doom  # (member, verb, how many times that verb was called before) -> dies now
        self.meetings: dict[Life, Meeting] = {}
        self.lock = threading.Lock()
        self.counts: dict[tuple[str, str], int] = {}
        self.log: list[tuple[str, str]] = []

    def count(self, who: str, verb: str) -> int:
        with self.lock:
            self.log.append((who, verb))
            number = self.counts.get((who, verb), 0)
            self.counts[who, verb] = number + 1
        return number


class FakeTrainer:
    """A rank whose weights are one int64 array, equal on all ranks."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.life: Life = (0, 0)
        self.meeting: Meeting | None = None

    def ping(self) -> int:
        return 1

    def enter(self, life: Life) -> None:
        self.check(life)
        self.life = life
        if self.meeting is not None:
            self.meeting.leave()  # a real rank would wait in vain until its rendezvous times out

    def check(self, life: Life) -> None:
        if life < self.life:
            raise FencedError("older life", held=life[1], current=self.life[1])

    def leave(self, life: Life) -> None:
        self.check(life)
        if self.meeting is not None:
            self.meeting.leave()
        self.meeting = None

    def serve(self, life: Life) -> int:
        return 1

    def meet(self, life: Life, token: str, rank: int, size: int, port: int) -> None:
        self.check(life)
        self.rank = rank
        with self.ground.lock:
            self.meeting = self.ground.meetings.setdefault(life, Meeting(size))
        self.meeting.meet()
        self.checkpointer = ckptstore.Checkpointer(token, role="trainer", rank=rank, commit_timeout_s=20)
        self.publisher = ckptstore.Publisher(token, role="trainer", rank=rank, timeout_s=20)
        self.handle: ckptstore.SaveHandle | None = None

    def restore(self, life: Life, config: dict[str, Any]) -> tuple[int | None, dict[str, str]]:
        self.together(life)
        self.weights = np.arange(8, dtype=np.int64)
        self.ledger_ = ckptstore.Ledger(seed=0)
        self.updates = 0
        state = self.state()
        step = self.checkpointer.restore(state)
        self.updates = state["updates"]
        return step, {"weights": str(self.weights.tolist())}

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "ledger": self.ledger_, "updates": self.updates}

    def ledger(self, life: Life) -> dict[str, Any]:
        return self.ledger_.to_json()

    def step(self, life: Life, number: int, groups: Sequence[Group]) -> StepReport:
        self.together(life)
        assert [group.ordinal for group in groups] == sorted(group.ordinal for group in groups)
        self.updates += 1
        assert number == self.updates
        for group in groups:
            self.weights *= 31
            self.weights += group.ordinal + int(group.completions.sum())
        self.ledger_.consume([group.ordinal for group in groups], number)
        return StepReport(step=number, reward_mean=0.5, loss=0.0, kl=0.0, ratio=1.0, gradient_norm=0.0)

    def publish(self, life: Life, number: int) -> PublicationId:
        self.check(life)
        return self.publisher.publish(number, {"weights": self.weights})

    def evaluate(self, life: Life) -> float:
        self.together(life)
        return float(self.weights[0] % 1000)

    def save(self, life: Life, number: int, version: int) -> float:
        self.check(life)
        self.handle = self.checkpointer.save(number, self.state(), policy_version=version)
        return 1.0

    def settle(self, life: Life) -> None:
        if self.handle is not None:
            self.handle.result(20)

    def digests(self, life: Life) -> dict[str, str]:
        return {"weights": str(self.weights.tolist())}

    def together(self, life: Life) -> None:
        self.check(life)
        assert self.meeting is not None
        self.meeting.meet()


class FakeEngine:
    """Generates groups that depend on the weights it serves and on ordinals alone."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.life: Life = (0, 0)
        self.held: PublicationId | None = None

    def ping(self) -> int:
        return 1

    def load(self, life: Life, config: dict[str, Any], url: str, id: PublicationId) -> tuple[str, bool]:
        if life < self.life:
            raise FencedError("older life", held=life[1], current=self.life[1])
        self.life, young = life, self.held is None
        into = {"weights": np.zeros(8, dtype=np.int64)}
        ckptstore.Subscriber(url).load(id, into)
        self.weights, self.held = into["weights"], id
        return str(self.weights.tolist()), young

    def generate(self, life: Life, step: int, ordinals: Sequence[int]) -> list[Group]:
        if life < self.life:
            raise FencedError("older life", held=life[1], current=self.life[1])
        assert self.held is not None
        mix = int(self.weights.sum() % 997)
        return [
            Group(
                ordinal=ordinal,
                version=self.held.number,
                prompt=np.array([ordinal]),
                completions=np.full((2, 3), mix + ordinal, dtype=np.int64),
                logprobs=np.zeros((2, 3), dtype=np.float32),
                rewards=np.zeros(2, dtype=np.float32),
            )
            for ordinal in ordinals
        ]


class FakeProcess:
    """A member and its one thread; dead, it never answers again."""

    def __init__(self, member: Member, ground: Ground) -> None:
        self.member, self.ground = member, ground
        self.object: Any = (FakeTrainer if member.role == "trainer" else FakeEngine)(ground)
        self.pool = ThreadPoolExecutor(1)
        self.alive = True
        self.died = threading.Event()

    def kill(self) -> None:
        self.alive = False
        self.died.set()
        meeting = getattr(self.object, "meeting", None)
        if meeting is not None:
            meeting.leave()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def call(self, verb: str, arguments: Sequence[Any]) -> Future[Outcome]:
        if not self.alive:
            return _done(Died(why="dead"))
        if verb in CONTROL:
            return _done(self._run(verb, arguments))
        try:
            return self.pool.submit(self._run, verb, arguments)
        except RuntimeError:
            return _done(Died(why="dead"))

    def _run(self, verb: str, arguments: Sequence[Any]) -> Outcome:
        who = str(self.member)
        if self.alive and self.ground.doom(who, verb, self.ground.count(who, verb)):
            self.kill()
        if not self.alive:
            return Died(why="dead")
        try:
            value = getattr(self.object, verb)(*arguments)
        except Exception as error:
            return Died(why="dead") if not self.alive else Failed(error=error)
        return Answered(value=value) if self.alive else Died(why="dead")


def _done(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


class FakeCluster:
    """The machine: processes by member. It outlives coordinators."""

    def __init__(self, doom: Callable[[str, str, int], bool] = lambda who, verb, number: False) -> None:
        self.ground = Ground(doom)
        self.processes: dict[Member, FakeProcess] = {}

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()


class FakeLauncher:
    """One coordinator's launcher. `doomed_at`: the coordinator dies when it makes that call."""

    def __init__(self, cluster: FakeCluster, *, doomed_at: int | None = None) -> None:
        self.cluster = cluster
        self.doomed_at = doomed_at
        self.calls = 0

    def start(self, members: Sequence[Member]) -> None:
        for member in members:
            process = self.cluster.processes.get(member)
            if process is None or not process.alive:
                self.cluster.processes[member] = FakeProcess(member, self.cluster.ground)

    def ensure(self, members: Sequence[Member], *, deadline_s: float) -> None:
        self.start(members)

    def call(self, member: Member, verb: str, *arguments: Any) -> Call:
        self.calls += 1
        if self.doomed_at is not None and self.calls > self.doomed_at:
            raise CoordinatorDied
        process = self.cluster.processes.get(member)
        handle = process.call(verb, arguments) if process is not None else _done(Died(why="none"))
        return Call(member=member, verb=verb, handle=handle)

    def ready(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = [call for call in calls if self._ended(call)]
            if found or time.monotonic() > deadline_s:
                return found
            wait([call.handle for call in calls], timeout=0.02, return_when="FIRST_COMPLETED")

    def _ended(self, call: Call) -> bool:
        process = self.cluster.processes.get(call.member)
        return bool(call.handle.done()) or process is None or not process.alive

    def result(self, call: Call) -> Any:
        return judge({call.member: self._outcome(call, 20)})[call.member]

    def gather(self, calls: Sequence[Call], *, deadline_s: float) -> list[Any]:
        outcomes: dict[Member, Outcome] = {}
        waiting = list(calls)
        while waiting:
            for call in self.ready(waiting, timeout_s=20):
                waiting.remove(call)
                outcomes[call.member] = self._outcome(call, 20)
                if isinstance(outcomes[call.member], Died):
                    outcomes.update({other.member: Silent(alive=True) for other in waiting})
                    waiting = []
                    break
        values = judge(outcomes)
        return [values[call.member] for call in calls]

    def _outcome(self, call: Call, timeout_s: float) -> Outcome:
        process = self.cluster.processes.get(call.member)
        if process is None or not process.alive:
            return call.handle.result() if call.handle.done() else Died(why="dead")
        try:
            outcome: Outcome = call.handle.result(timeout_s)
        except FutureTimeoutError:
            raise AssertionError(f"{call.member}.{call.verb} hangs") from None
        return outcome

    def stop(self, members: Sequence[Member]) -> None:
        for member in members:
            process = self.cluster.processes.pop(member, None)
            if process is not None:
                process.kill()


class Quiet:
    """The world outside, without kills; keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def at(self, who: str, step: int, phase: str) -> None:
        pass

    def note(self, *notes: Note) -> None:
        self.notes.extend(notes)


SMALL = DemoConfig(
    steps=5,
    every=2,
    evaluate_every=3,
    trainers=2,
    rollouts=2,
    prompts=4,
    samples=2,
    lease_prompts=2,
    warm_up_steps=0,
)


def spec(url: str, config: DemoConfig = SMALL, **changes: Any) -> LoopSpec:
    return LoopSpec(
        **{
            "order": 1,
            "job": "test",
            "url": url,
            "config": config,
            "until": config.steps,
            "deaths": 5,
            **changes,
        }
    )


def run_coordinator(
    cluster: FakeCluster, what: LoopSpec, outside: Quiet, *, doomed_at: int | None = None
) -> Ended:
    """One coordinator's life, to the end of its work; raises CoordinatorDied where it is doomed."""
    launcher = FakeLauncher(cluster, doomed_at=doomed_at)
    loop = Loop(what, launcher=launcher, outside=outside)
    return Coordinator(what.mission(), launcher=launcher, job=loop, watch=loop).run("the loop begins")


def final(url: str) -> tuple[Any, ...]:
    """All that must be equal: weights, consumed ordinals, evaluation records, rewards."""
    run = ckptstore.open(url)
    trainer, loop = run.read(role="trainer"), run.read(role="loop")
    return (
        trainer["weights"].tolist(),
        trainer["updates"],
        trainer["ledger"].to_json()["consumed"],
        loop["ledger"].to_json()["consumed"],
        json.loads(loop["evaluations"]),
        json.loads(loop["rewards"]),
    )


__all__ = ["CoordinatorDied", "FakeCluster", "MemberDiedError", "Quiet", "final", "run_coordinator", "spec"]
