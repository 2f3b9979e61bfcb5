"""What a demo command found out: plain numbers for the table, the page and `--json`.

Apart from what makes it, so that the report needs neither Ray nor torch. Times `at_s` count seconds
from the start of their run; a run's steps count optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptstore.demo.records import Evaluation

AVERAGED = 10  # steps at each end whose mean reward tells whether the loop learns
LEARNED = 0.1  # by how much the mean must rise
LEARNS_AFTER = 60  # steps: shorter runs are not asked to have learned

Progress = Callable[[int, int, str], None]
"""Called with the step, the number of steps and a few words about what happens now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Mean reward of the groups that update `step` was made of."""

    step: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save of all members. `blocking_ms`: the longest that `save` held up a trainer rank.

    `committed` is false for one that a death kept from its commit; then its bytes are not known: 0.
    """

    at_s: float
    step: int
    fence: int
    blocking_ms: float
    committed: bool
    nbytes_written: int
    nbytes_reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One planned kill, as it was written (`trainer:1@17`); `at_s` is None for one that has not fired."""

    at: str
    fired: bool
    at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One new fence after a run's first: who died, and how long each phase took.

    `reached` updates were applied when it began, `restored` is the step it went back to. `detect_s` is
    from the kill to the moment it was noticed (0 when nobody was killed), `spawn_s` until all members
    answered, `publish_s` until all engines served the restored policy.
    """

    at_s: float
    fence: int
    reason: str
    died: tuple[str, ...]
    reached: int
    restored: int
    detect_s: float
    spawn_s: float
    regroup_s: float
    restore_s: float
    publish_s: float

    @property
    def total_s(self) -> float:
        return self.detect_s + self.spawn_s + self.regroup_s + self.restore_s + self.publish_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReplaced:
    """A rollout engine that died and was replaced without a fence while step `step` was generated."""

    at_s: float
    engine: str
    step: int
    ready_s: float | None  # until the new one served the newest policy; None if the run ended before


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Ordinals on the lineage of the final checkpoint, counted from the store alone."""

    issued: int
    consumed: int
    lost: int
    doubled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """The trainers were stopped after `step` and restored on `trainers` ranks.

    `saved` and `restored` are digests over the global tensors by name: as stored, and as the new ranks
    held them after their restore.
    """

    at_s: float
    step: int
    trainers: int
    saved: str
    restored: str

    @property
    def equal(self) -> bool:
        return self.saved == self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run of the loop from step 0 to its last.

    `rewards`, `evaluations` and `consumed` are those of the final state, whatever was redone on the way;
    `steps_redone` counts updates that a rollback threw away and that were made again. `digest` is over
    the global tensors of the final checkpoint by name, independent of the layout; `consumed` digests
    the ordinals that the trainer has consumed, with their steps.
    """

    label: str
    url: str
    seed: int
    steps: int
    every: int
    trainers: int
    rollouts: int
    wall_s: float
    rewards: tuple[Reward, ...]
    evaluations: tuple[Evaluation, ...]
    saves: tuple[Save, ...]
    kills: tuple[Kill, ...]
    recoveries: tuple[Recovery, ...]
    engines_replaced: tuple[EngineReplaced, ...]
    resizes: tuple[Resize, ...]
    steps_redone: int
    account: Account
    digest: str
    consumed: str

    @property
    def nbytes_written(self) -> int:
        return sum(save.nbytes_written for save in self.saves)

    @property
    def nbytes_reused(self) -> int:
        return sum(save.nbytes_reused for save in self.saves)

    @property
    def unfired(self) -> tuple[str, ...]:
        return tuple(kill.at for kill in self.kills if not kill.fired)

    @property
    def problems(self) -> tuple[str, ...]:
        """What this run did not do as it should, a few words each."""
        found = []
        if self.unfired:
            found.append(f"kills that did not fire: {', '.join(self.unfired)}")
        if self.account.lost or self.account.doubled:
            found.append(f"{self.account.lost} ordinals lost, {self.account.doubled} trained twice")
        for resize in self.resizes:
            if not resize.equal:
                found.append(
                    f"tensors restored on {resize.trainers} ranks are not those of step {resize.step}"
                )
        first, last = self.reward_first10, self.reward_last10
        if self.steps >= LEARNS_AFTER and last < first + LEARNED:
            found.append(f"the mean reward only went from {first:.3f} to {last:.3f}")
        return tuple(found)

    @property
    def reward_first10(self) -> float:
        return _mean([reward.mean for reward in self.rewards[:AVERAGED]])

    @property
    def reward_last10(self) -> float:
        return _mean([reward.mean for reward in self.rewards[-AVERAGED:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """What one command did: `run` is the one it is about, `undisturbed` the one it is compared with, if any.

    With kills and resizes both, `resized` continues the undisturbed run from the first resize on.
    """

    run: RunResult
    undisturbed: RunResult | None = None
    resized: RunResult | None = None
    wall_s: float = 0.0

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """All runs, in the order they were made."""
        return tuple(run for run in (self.undisturbed, self.run, self.resized) if run is not None)

    @property
    def differences(self) -> tuple[str, ...]:
        """What the run and the undisturbed one do not have bitwise in common; empty without a comparison."""
        if self.undisturbed is None:
            return ()
        one, other = self.run, self.undisturbed
        found = (
            ("tensors", one.digest == other.digest),
            ("consumed ordinals", one.consumed == other.consumed),
            ("evaluation records", one.evaluations == other.evaluations),
        )
        return tuple(name for name, equal in found if not equal)

    @property
    def bitwise_equal(self) -> bool | None:
        """None when there is nothing to compare with."""
        return None if self.undisturbed is None else not self.differences

    @property
    def problems(self) -> tuple[str, ...]:
        """What did not hold, a sentence each; empty is a success (exit 0)."""
        found = []
        if self.differences:
            found.append(
                f"the killed run differs from the undisturbed one in its {' and '.join(self.differences)}"
            )
        for run in self.runs:
            found.extend(f"{run.label}: {problem}" for problem in run.problems)
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """The fields of `--json`; `resizes` is there only when a resize was asked for."""
        run = self.run
        told: dict[str, Any] = {
            "steps": run.steps,
            "bitwise_equal": self.bitwise_equal,
            "digest": run.digest,
            "kills": [{"at": kill.at, "fired": kill.fired} for kill in run.kills],
            "unfired": list(run.unfired),
            "recoveries": len(run.recoveries),
            "engines_replaced": len(run.engines_replaced),
            "steps_redone": run.steps_redone,
            "recovery_s": [
                {name: round(getattr(recovery, f"{name}_s"), 3) for name in PHASES}
                for recovery in run.recoveries
            ],
            "blocking_ms": [round(save.blocking_ms, 2) for save in run.saves],
            "nbytes_written": run.nbytes_written,
            "nbytes_reused": run.nbytes_reused,
            "ledger": asdict(run.account),
            "reward_first10": run.reward_first10,
            "reward_last10": run.reward_last10,
            "evaluations": [asdict(evaluation) for evaluation in run.evaluations],
        }
        resizes = [resize for each in self.runs for resize in each.resizes]
        if resizes:
            told["resizes"] = [
                {"step": resize.step, "trainers": resize.trainers, "bitwise_equal": resize.equal}
                for resize in resizes
            ]
        return told


PHASES = ("detect", "spawn", "regroup", "restore", "publish")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
