"""Outcomes of demo commands, made up from a seed: what a report must cope with."""

from __future__ import annotations

import random
from dataclasses import replace

from ckptstore.demo.records import Evaluation
from ckptstore.demo.result import (
    Account,
    DemoOutcome,
    EngineReplaced,
    Kill,
    Recovery,
    Resize,
    Reward,
    RunResult,
    Save,
)

STEP_S = 0.6
KINDS = ("trainer:1", "rollout:0", "coordinator", "trainer:0", "rollout:1")


def make_outcome(
    *,
    steps: int = 75,
    every: int = 5,
    kills: int = 4,
    unfired: int = 0,
    compared: bool = True,
    equal: bool = True,
    resizes: tuple[tuple[int, int], ...] = (),
    lost: int = 0,
) -> DemoOutcome:
    undisturbed = make_run("undisturbed", steps=steps, every=every)
    if not compared:
        return DemoOutcome(
            run=make_run("undisturbed", steps=steps, every=every, kills=kills, resizes=resizes), wall_s=61.0
        )
    killed = make_run("killed", steps=steps, every=every, kills=kills, unfired=unfired)
    if not equal:
        killed = replace(
            killed,
            digest="0" * 32,
            evaluations=killed.evaluations[:-1],
            account=replace(killed.account, lost=lost),
        )
    resized = make_run("resized", steps=steps, every=every, resizes=resizes) if resizes else None
    return DemoOutcome(run=killed, undisturbed=undisturbed, resized=resized, wall_s=187.3)


def make_run(
    label: str,
    *,
    steps: int,
    every: int,
    kills: int = 0,
    unfired: int = 0,
    resizes: tuple[tuple[int, int], ...] = (),
) -> RunResult:
    source = random.Random(steps)  # rewards do not depend on what was killed
    rewards = tuple(
        Reward(step=n, mean=min(0.5 + 0.3 * n / steps + source.gauss(0, 0.03), 1.0))
        for n in range(1, steps + 1)
    )
    evaluations = tuple(
        Evaluation(step=n, accuracy=min(0.4 + 0.4 * n / steps + source.gauss(0, 0.02), 1.0))
        for n in range(0, steps + 1, every)
    )
    told = _Story(random.Random(kills), steps, every)
    told.live(sorted(source.sample(range(1, steps + 1), min(kills, steps))))
    at_s = told.at_s
    return RunResult(
        label=label,
        url="file:///tmp/ckptstore-demo-x1y2/run",
        seed=0,
        steps=steps,
        every=every,
        trainers=2,
        rollouts=2,
        wall_s=at_s + 1.5,
        rewards=rewards,
        evaluations=evaluations,
        saves=tuple(told.saves),
        kills=tuple(told.kills)
        + tuple(Kill(at=f"rollout:1@{steps - n}", fired=False, at_s=None) for n in range(unfired)),
        recoveries=tuple(told.recoveries),
        engines_replaced=tuple(told.engines),
        resizes=tuple(
            Resize(at_s=step * STEP_S, step=step, trainers=trainers, saved="a" * 32, restored="a" * 32)
            for step, trainers in resizes
        ),
        steps_redone=sum(r.reached - r.restored for r in told.recoveries),
        account=Account(issued=steps * 32, consumed=steps * 32, lost=0, doubled=0),
        digest="9f86d081884c7d659a2feaa0c55ad015",
        consumed="3b0c44298fc1c149afbf4c8996fb9242",
    )


class _Story:
    def __init__(self, source: random.Random, steps: int, every: int) -> None:
        self.source, self.steps, self.every = source, steps, every
        self.at_s, self.step, self.fence = 6.0, 0, 1
        self.saves: list[Save] = []
        self.kills: list[Kill] = []
        self.recoveries: list[Recovery] = []
        self.engines: list[EngineReplaced] = []

    def live(self, kills: list[int]) -> None:
        self.save(0)
        while self.step < self.steps:
            self.at_s += STEP_S * self.source.uniform(0.8, 1.3)
            if kills and kills[0] == self.step + 1:
                kills.pop(0)
                self.kill()
                continue
            self.step += 1
            if self.step % self.every == 0 or self.step == self.steps:
                self.save(self.step)

    def save(self, step: int) -> None:
        first = not self.saves
        self.saves.append(
            Save(
                at_s=self.at_s,
                step=step,
                fence=self.fence,
                blocking_ms=self.source.uniform(2, 4) * (8 if first else 1),
                committed=True,
                nbytes_written=int(self.source.uniform(24, 26) * 2**20) * (2 if first else 1),
                nbytes_reused=0 if first else 3 * 2**20,
            )
        )

    def kill(self) -> None:
        who = KINDS[len(self.kills) % len(KINDS)]
        self.kills.append(Kill(at=f"{who}@{self.step + 1}", fired=True, at_s=self.at_s))
        if who.startswith("rollout"):
            self.engines.append(
                EngineReplaced(
                    at_s=self.at_s + 0.05,
                    engine=who.replace(":", "/"),
                    step=self.step + 1,
                    ready_s=self.source.uniform(3, 5),
                )
            )
            return
        restored = max((save.step for save in self.saves if save.step <= self.step), default=0)
        if len(self.kills) % 4 == 3:
            last = self.saves[-1]
            self.saves[-1] = replace(last, committed=False, nbytes_written=0, nbytes_reused=0)
            restored = max(restored - self.every, 0)
        self.fence += 1
        recovery = Recovery(
            at_s=self.at_s + 0.03,
            fence=self.fence,
            reason=f"{who} died",
            died=(who.replace(":", "/"),),
            reached=self.step,
            restored=restored,
            detect_s=0.03,
            spawn_s=self.source.uniform(0.2, 0.4) if who == "coordinator" else self.source.uniform(2.5, 4.5),
            regroup_s=self.source.uniform(0.05, 0.1),
            restore_s=self.source.uniform(0.1, 0.3),
            publish_s=self.source.uniform(0.1, 0.2),
        )
        self.recoveries.append(recovery)
        self.at_s += recovery.total_s
        self.step = restored
