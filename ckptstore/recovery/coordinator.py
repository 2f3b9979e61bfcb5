"""Act out the recovery machine: raise the fence, start members, and let a job restore and run.

The order is `machine.py`'s, what each step does is the job's, the processes are the launcher's; here is
only the wiring and the reading of errors as events. A coordinator keeps no state that the store does not
have, so whoever replaces a dead one begins in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import (
    CkptStoreError,
    CorruptError,
    FencedError,
    NoCheckpointError,
    NoRecoveryPointError,
    OutcomeUnknownError,
    RunInUseError,
    StoreUnavailableError,
)
from ckptstore.history import History, MarkEntry
from ckptstore.incarnation import Incarnation, begin
from ckptstore.manifest import Member
from ckptstore.recovery import machine
from ckptstore.recovery.launcher import Launcher, MemberDiedError
from ckptstore.recovery.machine import Action, Event, State
from ckptstore.recovery.point import lives, older

BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.1, 5.0


class Job(Protocol):
    """One training job's own part. Every method may raise MemberDiedError or an error of the store."""

    def shut(self) -> None:
        """Take no more work of members; what is under way is void."""

    def regroup(self, incarnation: Incarnation) -> None:
        """Tell every trainer the new fence, free whoever waits in the old group, let all meet."""

    def restore(self, incarnation: Incarnation) -> None:
        """All ranks to the incarnation's origin; to the initial state on a fresh start."""

    def rebuild(self) -> None:
        """The ledger, from the cut; the trainer's record of what is consumed decides."""

    def publish(self) -> None:
        """The restored policy under the new fence: the cut's publication again, or the number due."""

    def converge(self) -> int:
        """Bring engines to the newest publication, proven by digest; the number that serve it."""

    def replace(self, engines: Sequence[str]) -> None:
        """Start dead engines anew beside the running loop, and issue their leases again."""

    def admit(self) -> None:
        """Take work of members."""

    def advance(self) -> bool:
        """Do the next piece of work; False when there is none left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a coordinator's work ended. `finished` is true only when the job had nothing left to do."""

    finished: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mission:
    """What a coordinator is to bring about: a run, its members, and its bounds.

    `trainers` are the roster's members that run in processes of their own, `engines` rollouts. `resume` is
    the first fence's; later ones are "auto". `start_s` bounds the start of processes, `store_s` how long
    the store may be down while recovering.
    """

    url: str
    job: str
    roster: Mapping[str, int]
    trainers: tuple[Member, ...]
    engines: tuple[Member, ...]
    resume: str | int = "auto"
    limits: machine.Limits = field(default_factory=machine.Limits)
    start_s: float = 120.0
    store_s: float = 60.0


class Watch(Protocol):
    """Told what goes on, for reports; decides nothing."""

    def happened(self, event: Event) -> None:
        """Called with each event, before the machine steps."""

    def acted(self, action: Action, duration_s: float) -> None:
        """Called after each action that ended well."""


class Coordinator:
    """Runs one mission to its end. Used by one thread."""

    def __init__(
        self,
        mission: Mission,
        *,
        launcher: Launcher,
        job: Job,
        clock: Clock | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._mission = mission
        self._launcher = launcher
        self._job = job
        self._clock = clock if clock is not None else SystemClock()
        self._watch = watch
        self._resume = mission.resume
        self._backoff_s = BACKOFF_FIRST_S
        self._down_since: float | None = None
        self._ended = Ended(finished=False, why="it has not begun")
        self.incarnation: Incarnation | None = None
        self.state = State.FENCING

    def run(self, reason: str) -> Ended:
        """Recover, then advance the job until it is done or a person must look.

        An error that is neither a death nor the store's, nor a fence's, is a mistake of the job: it is raised
        after the members were stopped.
        """
        self.state, actions = machine.start(reason)
        try:
            while self.state is not State.HALTED:
                event = self._next(actions)
                actions = ()
                if event is not None:
                    if self._watch is not None:
                        self._watch.happened(event)
                    self.state, actions = machine.step(self.state, event, self._mission.limits)
            self._next(actions)
        except Exception:
            self._halt("an error that no recovery mends")
            raise
        return self._ended

    def _next(self, actions: Sequence[Action]) -> Event | None:
        """Act until something happens; with nothing to do while running, let the job advance."""
        try:
            for action in actions:
                began_s = self._clock.monotonic()
                event = self._act(action)
                if self._watch is not None:
                    self._watch.acted(action, self._clock.monotonic() - began_s)
                if event is not None:
                    self._recovered()
                    return event
            if self.state is State.RUNNING:
                return None if self._job.advance() else machine.Finished()
        except CkptStoreError as error:
            return self._event(error)
        return None

    def _act(self, action: Action) -> Event | None:
        verb = _VERBS[type(action)]
        return verb(self, action)

    # -- errors as events

    def _event(self, error: CkptStoreError) -> Event:
        if isinstance(error, MemberDiedError):
            return self._death(error)
        if isinstance(error, (FencedError, RunInUseError)):
            return machine.FenceLost(why=str(error))
        if isinstance(error, (StoreUnavailableError, OutcomeUnknownError)):
            return self._store_down(error)
        if isinstance(error, CorruptError) and self.state in _RESTORES:
            return machine.RestoreCorrupt(why=str(error))
        if isinstance(error, (NoCheckpointError, NoRecoveryPointError)):
            return machine.RetriesSpent(why=str(error))
        raise error

    def _death(self, error: MemberDiedError) -> Event:
        died = tuple(error.members)
        engines = tuple(str(member) for member in died if member in self._mission.engines)
        if engines and len(engines) == len(died):
            return machine.RolloutDied(engines=engines)
        return machine.TrainerDied(members=tuple(str(member) for member in died))

    def _store_down(self, error: CkptStoreError) -> Event:
        now_s = self._clock.monotonic()
        if self._down_since is None:
            self._down_since = now_s
        if now_s - self._down_since > self._mission.store_s:
            return machine.RetriesSpent(why=f"the store was down for {self._mission.store_s:g} s: {error}")
        return machine.StoreDown(why=str(error))

    def _recovered(self) -> None:
        self._down_since, self._backoff_s = None, BACKOFF_FIRST_S

    # -- actions

    def _raise_fence(self, action: machine.RaiseFence) -> Event:
        resume = self._older() if action.fall_back else self._resume
        mission = self._mission
        previous = self.incarnation
        self.incarnation = begin(
            mission.url, mission.roster, resume=resume, job=mission.job, clock=self._clock
        )
        self._resume = "auto"
        if previous is not None:
            previous.close()  # ends its beat; a fence that is not the newest is not released
        history = self.incarnation.journal.history
        restores = history.restores(self.incarnation.fence)
        return machine.FenceRaised(
            fence=self.incarnation.fence,
            lives=lives(history),
            older=restores is not None and older(history, restores) is not None,
        )

    def _older(self) -> str | int:
        """The step before the origin that was tried too often."""
        history = self._life.journal.catch_up()
        tried = history.restores(history.fence)
        fallback = older(history, tried) if tried is not None else None
        return "auto" if fallback is None else fallback.step

    def _restart(self, action: machine.RestartMembers) -> Event:
        self._launcher.start((*self._mission.trainers, *self._mission.engines))
        self._launcher.ensure(self._mission.trainers, deadline_s=self._mission.start_s)
        return machine.Gathered()

    def _regroup(self, action: machine.Regroup) -> Event:
        self._job.regroup(self._life)
        return machine.Met()

    def _restore(self, action: machine.Restore) -> Event:
        self._job.restore(self._life)
        return machine.Restored()

    def _mark_bad(self, action: machine.MarkBad) -> None:
        """The rank that met the damage has read it twice and marked it; this is for one that died of it."""
        id = self._life.origin.checkpoint
        if id is None:
            return

        def decide(history: History) -> MarkEntry | None:
            if id in history.fold.bad or id not in history.live():
                return None
            return MarkEntry(kind="bad", id=id, segments=(), reason=action.why[:2000])

        self._life.journal.append(decide)

    def _rebuild(self, action: machine.RebuildLedger) -> Event:
        self._job.rebuild()
        return machine.LedgerRebuilt()

    def _publish(self, action: machine.Publish) -> Event:
        self._job.publish()
        return machine.Published()

    def _converge(self, action: machine.ConvergeEngines) -> Event:
        return machine.Converged(engines=self._job.converge())

    def _replace(self, action: machine.ReplaceEngines) -> None:
        self._job.replace(action.engines)

    def _admit(self, action: machine.OpenAdmission) -> None:
        self._job.admit()

    def _shut(self, action: machine.ShutAdmission) -> None:
        self._job.shut()

    def _back_off(self, action: machine.Backoff) -> None:
        self._clock.sleep(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MOST_S)

    def _finish(self, action: machine.Release) -> None:
        self._job.shut()
        self._ended = Ended(finished=True, why=self._released("the job is done"))

    def _stand_down(self, action: machine.StandDown) -> None:
        self._ended = Ended(finished=False, why=f"stood down: {action.why}")

    def _halted(self, action: machine.Halt) -> None:
        self._halt(action.report)

    def _halt(self, why: str) -> None:
        """Stop the members and let the next incarnation begin at once."""
        self._launcher.stop((*self._mission.trainers, *self._mission.engines))
        self._ended = Ended(finished=False, why=self._released(why))

    def _released(self, why: str) -> str:
        """Release the fence if the store allows; `why`, and that it was not released where it does not."""
        if self.incarnation is None:
            return why
        try:
            self.incarnation.close()
        except CkptStoreError as error:
            return f"{why}; the fence was not released, so the next begin may wait: {error}"
        return why

    @property
    def _life(self) -> Incarnation:
        assert self.incarnation is not None, "the machine raises a fence first"
        return self.incarnation


_RESTORES = (State.RESTORING, State.REBUILDING, State.PUBLISHING, State.CONVERGING)
_VERBS: Mapping[type[Any], Callable[[Coordinator, Any], Event | None]] = {
    machine.RaiseFence: Coordinator._raise_fence,
    machine.RestartMembers: Coordinator._restart,
    machine.Regroup: Coordinator._regroup,
    machine.Restore: Coordinator._restore,
    machine.MarkBad: Coordinator._mark_bad,
    machine.RebuildLedger: Coordinator._rebuild,
    machine.Publish: Coordinator._publish,
    machine.ConvergeEngines: Coordinator._converge,
    machine.ReplaceEngines: Coordinator._replace,
    machine.OpenAdmission: Coordinator._admit,
    machine.ShutAdmission: Coordinator._shut,
    machine.Backoff: Coordinator._back_off,
    machine.Release: Coordinator._finish,
    machine.StandDown: Coordinator._stand_down,
    machine.Halt: Coordinator._halted,
}
