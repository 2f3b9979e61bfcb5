"""The body of the loop: lease, generate, train, publish, and every few steps evaluate and save.

It is the coordinator's job in the sense of `recovery.coordinator` and the member `loop/0` of the roster:
it owns the prompts' ledger, the evaluation records and the publication in force, and saves them beside
the trainers. It sees neither torch nor Ray, so it is replaced within a moment and tested in one process.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptstore.agreement import join_ledgers
from ckptstore.checkpointer import Checkpointer
from ckptstore.clock import Clock, SystemClock
from ckptstore.demo.chaos import Outside
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.kills import COORDINATOR, MIDDLE, is_saved
from ckptstore.demo.notes import Applied, Committed, Ended, Fenced, Moved, Noticed, Restored, Saving, Took
from ckptstore.demo.records import Evaluation, Group, join_digests
from ckptstore.demo.result import Reward
from ckptstore.demo.rollouts import Rollouts
from ckptstore.errors import CkptStoreError, InternalError
from ckptstore.incarnation import Incarnation
from ckptstore.ledger import Ledger
from ckptstore.manifest import Member, PublicationId
from ckptstore.publish import Publisher
from ckptstore.recovery import machine
from ckptstore.recovery.coordinator import Mission
from ckptstore.recovery.launcher import Launcher
from ckptstore.recovery.machine import Action, Event
from ckptstore.savehandle import SaveHandle

TRAINER, LOOP, ROLLOUT = "trainer", "loop", "rollout"
MEET_S, LEAVE_S, RESTORE_S, STEP_S, COMMIT_S = 60.0, 120.0, 600.0, 180.0, 180.0
"""Bounds on calls of all trainers; a death ends the waiting within milliseconds."""
_PHASES = {
    machine.RestartMembers: "spawn",
    machine.Regroup: "regroup",
    machine.Restore: "restore",
    machine.RebuildLedger: "restore",
    machine.Publish: "publish",
    machine.ConvergeEngines: "publish",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """One stretch of a run with one number of trainers, up to step `until`, which is saved, as `saves` are.

    `order` counts the stretches of a command: members refuse calls of lower ones. `deaths` is how many
    are planned: so many more lives of one recovery point are allowed.
    """

    order: int
    job: str
    url: str
    config: DemoConfig
    until: int
    saves: tuple[int, ...] = ()
    resume: str | int = "auto"
    deaths: int = 0

    @property
    def trainers(self) -> tuple[Member, ...]:
        return tuple(Member(role=TRAINER, rank=rank) for rank in range(self.config.trainers))

    @property
    def engines(self) -> tuple[Member, ...]:
        return tuple(Member(role=ROLLOUT, rank=rank) for rank in range(self.config.rollouts))

    def mission(self) -> Mission:
        """What the coordinator is to bring about."""
        return Mission(
            url=self.url,
            job=self.job,
            roster={TRAINER: self.config.trainers, LOOP: 1},
            trainers=self.trainers,
            engines=self.engines,
            resume=self.resume,
            limits=machine.Limits(max_lives=3 + self.deaths, min_engines=self.config.rollouts),
        )


@dataclass(slots=True)
class Step:
    """The step under way: its ordinals and the groups that have come so far."""

    number: int
    ordinals: tuple[int, ...]
    leases: deque[tuple[int, ...]]
    groups: list[Group] = field(default_factory=list)


class Loop:
    """The demo's job. One thread."""

    def __init__(
        self, spec: LoopSpec, *, launcher: Launcher, outside: Outside, clock: Clock | None = None
    ) -> None:
        self._spec = spec
        self._launcher = launcher
        self._outside = outside
        self._clock = clock if clock is not None else SystemClock()
        self._rollouts = Rollouts(engines=spec.engines, launcher=launcher, outside=outside, clock=self._clock)
        self._life = (spec.order, 0)
        self._inc: Incarnation | None = None
        self._checkpointer: Checkpointer | None = None
        self._handle: SaveHandle | None = None
        self._publication: PublicationId | None = None
        self._ledger = Ledger(seed=spec.config.seed)
        self._evaluations: list[Evaluation] = []
        self._rewards: list[Reward] = []
        self._applied = 0
        self._reason = ""
        self._step: Step | None = None

    # -- recovery, in the order of the machine

    def happened(self, event: Event) -> None:
        """Note deaths and fences."""
        if isinstance(event, machine.TrainerDied):
            self._outside.note(Noticed(who=event.members))
        elif isinstance(event, machine.FenceRaised):
            self._outside.note(Fenced(fence=event.fence, reason=self._reason))

    def acted(self, action: Action, duration_s: float) -> None:
        """Note how long each phase of a recovery took."""
        if isinstance(action, machine.RaiseFence):
            self._reason = action.reason
        phase = _PHASES.get(type(action))
        if phase is not None:
            self._outside.note(Took(phase=phase, duration_s=duration_s))

    def shut(self) -> None:
        """Give up the step under way; what engines still send is not asked for."""
        self._step = None
        self._rollouts.forget()

    def regroup(self, incarnation: Incarnation) -> None:
        """Tell every trainer the new fence, free whoever waits in the old group, let all meet."""
        self._inc, self._life = incarnation, (self._spec.order, incarnation.fence)
        self._outside.note(Moved(step=incarnation.step or 0, words="the ranks meet"))
        self._trainers("enter", deadline_s=MEET_S)
        self._trainers("leave", deadline_s=LEAVE_S)
        first = self._spec.trainers[0]
        (port,) = self._launcher.gather([self._launcher.call(first, "serve", self._life)], deadline_s=MEET_S)
        size = len(self._spec.trainers)
        calls = [
            self._launcher.call(member, "meet", self._life, incarnation.token, rank, size, port)
            for rank, member in enumerate(self._spec.trainers)
        ]
        self._launcher.gather(calls, deadline_s=MEET_S)

    def restore(self, incarnation: Incarnation) -> None:
        """All ranks and the loop's own state to the origin; a fresh start trains the first policy."""
        words = "warm-up" if incarnation.step is None else f"restore of step {incarnation.step}"
        self._outside.note(Moved(step=incarnation.step or 0, words=words))
        told = self._trainers("restore", self._spec.config.to_json(), deadline_s=RESTORE_S)
        steps = {step for step, _ in told}
        if steps != {incarnation.step}:
            raise InternalError(
                f"trainers restored steps {steps} where the origin is step {incarnation.step}; please report it",
                steps=steps,
            )
        if self._checkpointer is not None:
            with contextlib.suppress(CkptStoreError, TimeoutError):  # of a save that is void by now
                self._checkpointer.close(timeout_s=0)
        self._checkpointer = Checkpointer(incarnation, role=LOOP, rank=0)
        self._handle = None
        self._ledger = Ledger(seed=self._spec.config.seed)
        self._evaluations, self._rewards = [], []  # of a life that is over; a start restores nothing
        state = self._state(None)
        self._checkpointer.restore(state)
        self._ledger = state["ledger"]
        self._evaluations = [Evaluation(**record) for record in json.loads(state["evaluations"])]
        self._rewards = [Reward(**record) for record in json.loads(state["rewards"])]
        self._applied = incarnation.step or 0
        digest = join_digests(digests for _, digests in told)
        self._outside.note(Restored(step=self._applied, digest=digest))

    def rebuild(self) -> None:
        """The trainer's record of what is consumed decides; no group outlives the loop, so all are owed."""
        first = self._spec.trainers[0]
        (told,) = self._launcher.gather([self._launcher.call(first, "ledger", self._life)], deadline_s=STEP_S)
        self._ledger = join_ledgers(Ledger.from_json(told), self._ledger, cut_version=None)

    def publish(self) -> None:
        """The cut's publication again, from its stored objects; or the number that is due, from the trainers."""
        assert self._inc is not None
        publisher = Publisher(self._inc, role=TRAINER, rank=0)
        self._publication = publisher.reannounce()
        if self._publication is None:
            self._publication = self._publish(publisher.due())

    def converge(self) -> int:
        """Start what is dead, bring all engines to the newest publication."""
        assert self._publication is not None
        self._rollouts.serve(self._life, self._spec.config.to_json(), self._spec.url, self._publication)
        return self._rollouts.converge()

    def replace(self, engines: Sequence[str]) -> None:
        """Start engines anew beside the loop; their leases are dealt again."""
        self._rollouts.replace(engines, self._applied + 1)

    def admit(self) -> None:
        """Nothing to open: leases are dealt by `advance` alone."""

    # -- the loop

    def advance(self) -> bool:
        """One step; may be called again when an engine's death has cut it short."""
        if self._applied >= self._spec.until:
            self._finish()
            return False
        if self._step is None:
            self._step = self._begin_step()
        step = self._step
        self._rollouts.collect(step.number, step.leases, step.groups)
        self._outside.at(COORDINATOR, step.number, MIDDLE)
        self._train(step)
        self._step = None
        return True

    def _begin_step(self) -> Step:
        """The next ordinals: what is owed first, then new ones; whole leases, in order."""
        number, config = self._applied + 1, self._spec.config
        self._outside.note(Moved(step=number, words="generate"))
        owed = self._ledger.owed()[: config.prompts]
        ordinals = (*owed, *self._ledger.issue(config.prompts - len(owed)))
        width = config.lease_prompts
        leases = deque(ordinals[at : at + width] for at in range(0, len(ordinals), width))
        return Step(number=number, ordinals=ordinals, leases=leases)

    def _train(self, step: Step) -> None:
        number = step.number
        groups = sorted(step.groups, key=lambda group: group.ordinal)
        for group in groups:
            self._ledger.seal(group.ordinal, group.version, group.version, fence=self._life[1])
        self._outside.note(Moved(step=number, words="train"))
        reports = self._trainers("step", number, groups, deadline_s=STEP_S)
        self._ledger.consume(step.ordinals, number)
        self._rewards.append(Reward(step=number, mean=reports[0].reward_mean))
        self._applied = number
        self._outside.note(Applied(step=number))
        self._outside.note(Moved(step=number, words="publish"))
        self._publication = self._publish(number)
        self._rollouts.serve(self._life, self._spec.config.to_json(), self._spec.url, self._publication)
        if number % self._spec.config.evaluate_every == 0 or number == self._spec.config.steps:
            self._evaluate(number)
        if number == self._spec.until or is_saved(number, self._spec.config, self._spec.saves):
            self._save(number)

    def _publish(self, number: int) -> PublicationId:
        ids = set(self._trainers("publish", number, deadline_s=STEP_S))
        if len(ids) != 1:
            raise InternalError(f"ranks published different versions {ids}; please report it", ids=ids)
        published: PublicationId = ids.pop()
        return published

    def _evaluate(self, number: int) -> None:
        self._outside.note(Moved(step=number, words="evaluate"))
        accuracies = self._trainers("evaluate", deadline_s=STEP_S)
        self._evaluations.append(Evaluation(step=number, accuracy=accuracies[0]))

    def _save(self, number: int) -> None:
        """Stage on all members; writing and committing go on beside the next steps."""
        self._settle()
        assert self._checkpointer is not None and self._publication is not None
        self._outside.note(Moved(step=number, words="save"))
        blocking_ms = self._trainers("save", number, self._publication.number, deadline_s=COMMIT_S)
        self._outside.note(Saving(step=number, fence=self._life[1], blocking_ms=max(blocking_ms)))
        self._handle = self._checkpointer.save(
            number, self._state(self._publication), policy_version=self._publication.number
        )

    def _settle(self) -> None:
        """Wait for the save before: first on the trainers, whose deaths are seen, then here."""
        if self._handle is None:
            return
        self._trainers("settle", deadline_s=COMMIT_S)
        info = self._handle.result(COMMIT_S)
        self._handle = None
        self._outside.note(
            Committed(
                step=info.step,
                fence=info.fence,
                nbytes_written=info.nbytes_written,
                nbytes_reused=info.nbytes_reused,
            )
        )

    def _finish(self) -> None:
        self._settle()
        if self._checkpointer is not None:
            self._checkpointer.close(COMMIT_S)
        digest = join_digests(self._trainers("digests", deadline_s=STEP_S))
        self._outside.note(Ended(step=self._applied, digest=digest))

    def _state(self, publication: PublicationId | None) -> dict[str, Any]:
        """Lists that grow are one text each, so that every save has the same structure."""
        return {
            "ledger": self._ledger,
            "evaluations": json.dumps([asdict(record) for record in self._evaluations]),
            "rewards": json.dumps([asdict(record) for record in self._rewards]),
            "publication": json.dumps(None if publication is None else asdict(publication)),
        }

    def _trainers(self, verb: str, *arguments: Any, deadline_s: float) -> list[Any]:
        calls = [self._launcher.call(member, verb, self._life, *arguments) for member in self._spec.trainers]
        return self._launcher.gather(calls, deadline_s=deadline_s)
