"""A loop of trainer, ledger owner and messages in flight, which crashes: is each prompt trained once?

The weights are a count of how often each ordinal was trained on, so what they hold is what was trained.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ckptstore import agreement
from ckptstore.checkpointer import Checkpointer
from ckptstore.errors import InvalidInputError
from ckptstore.incarnation import begin
from ckptstore.ledger import Ledger
from ckptstore.testing.simulation import Simulation
from tests.protocol.oracle import BrokenPromiseError, need

PROMPTS = 24
BATCH = 2
MOMENTS_MAX = 2000


class _Life:
    """One incarnation: restored states, and reports of the trainer that have not reached the owner yet."""

    def __init__(self, sim: Simulation, seed: int, life: int) -> None:
        self.sim = sim
        clock = sim.clock
        self.inc = begin(sim.url, {"trainer": 1, "loop": 1}, takeover=True, job=f"{seed}.{life}", clock=clock)
        self.trainer = Checkpointer(self.inc, role="trainer", rank=0, clock=clock, commit_timeout_s=5)
        self.owner = Checkpointer(self.inc, role="loop", rank=0, clock=clock, commit_timeout_s=5)
        self.state: dict[str, Any] = {"trained": np.zeros(PROMPTS, np.int64), "ledger": Ledger(seed)}
        self.owned: dict[str, Any] = {"ledger": Ledger(seed)}
        self.step = self.trainer.restore(self.state) or 0
        self.owner.restore(self.owned)
        if self.step:  # what is owed is what the cut says, and the cut is both ledgers joined
            self.owned["ledger"] = agreement.join_ledgers(
                self.state["ledger"], self.owned["ledger"], cut_version=0
            )
            self.owned["ledger"].reissue(self.owned["ledger"].owed())
        self.reports: list[tuple[tuple[int, ...], int]] = []

    def offer(self) -> tuple[int, ...]:
        ledger = self.owned["ledger"]
        flying = {ordinal for batch, _ in self.reports for ordinal in batch}
        owed = [ordinal for ordinal in ledger.owed() if ordinal not in flying]
        room = min(BATCH - len(owed), PROMPTS - ledger.next_ordinal)
        return tuple((*owed, *(ledger.issue(room) if room > 0 else ()))[:BATCH])

    def train(self, batch: tuple[int, ...]) -> None:
        ledger = self.state["ledger"]
        try:
            ledger.consume(batch, self.step + 1)
        except InvalidInputError as error:  # in the weights already, whoever offers it (R34)
            self.reports += [((ordinal,), ledger.consumed_at(ordinal)) for ordinal in error.consumed]
            batch = tuple(ordinal for ordinal in batch if ordinal not in error.consumed)
            if not batch:
                return
            ledger.consume(batch, self.step + 1)
        self.step += 1
        self.state["trained"][list(batch)] += 1
        self.reports.append((batch, self.step))

    def deliver(self) -> None:
        batch, step = self.reports.pop(0)
        ledger = self.owned["ledger"]
        ledger.consume([ordinal for ordinal in batch if ledger.consumed_at(ordinal) is None], step)

    def done(self) -> bool:
        ledger = self.owned["ledger"]
        return not self.reports and ledger.next_ordinal == PROMPTS and not ledger.owed()


def train_each_once(seed: int) -> None:
    """Raises BrokenPromiseError when the final weights lack an ordinal or hold it twice."""
    rng, sim, found = random.Random(seed), Simulation(seed=seed), list[Any]()

    def job() -> None:
        for life in range(6):
            loop = _Life(sim, seed, life)
            loop.inc._stop.set()
            if _live(loop, rng, crashes=life < 5):
                found.append(loop.state["trained"])
                return

    sim.spawn("job", job)
    sim.run()
    trained = found[0]
    lost, doubled = np.flatnonzero(trained == 0).tolist(), np.flatnonzero(trained > 1).tolist()
    need(not lost and not doubled, f"{seed=}: ordinals {lost} were never trained, {doubled} more than once")


def _live(loop: _Life, rng: random.Random, *, crashes: bool) -> bool:
    for _ in range(MOMENTS_MAX):
        if loop.done():
            return True
        if crashes and rng.random() < 0.1:
            return False
        choice = rng.random()
        if choice < 0.5:
            batch = loop.offer()
            if batch:
                loop.train(batch)
        elif choice < 0.8 and loop.reports:
            loop.deliver()
        elif loop.step:
            _save(loop, rng)
    raise BrokenPromiseError("the loop never ends: what is owed is refused, or what is trained is owed")


def _save(loop: _Life, rng: random.Random) -> None:
    """The owner contributes at any moment after the trainer's save, so it may be ahead (R35)."""
    handle = loop.trainer.save(loop.step, loop.state, policy_version=0)
    step = loop.step
    for _ in range(rng.randrange(3)):
        batch = loop.offer()
        if batch:
            loop.train(batch)
        if loop.reports:
            loop.deliver()
    other = loop.owner.save(step, loop.owned)
    for each in (handle, other):
        loop.sim.wait(each.done)
        each.result(0)
