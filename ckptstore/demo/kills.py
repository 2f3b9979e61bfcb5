"""Planned kills: which process dies at which point of which step.

Pure, so that a plan is checked in full before anything starts: a kill that cannot fire is a usage error.
`trainer:1@17` dies while update 17 is computed, `rollout:0@23` while it generates for step 23,
`coordinator@31` in the middle of step 31, `trainer:0@20+save` in the save of step 20, after its segments
and before its part. `random:5` chooses five of the first three kinds from the run's seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.demo.config import DemoConfig
from ckptstore.errors import InvalidInputError

TRAINER, ROLLOUT, COORDINATOR = "trainer", "rollout", "coordinator"
UPDATE, GENERATE, MIDDLE, SAVE = "update", "generate", "middle", "save"
_PHASE = {TRAINER: UPDATE, ROLLOUT: GENERATE, COORDINATOR: MIDDLE}
_KILL = re.compile(r"(trainer|rollout|coordinator)(?::(\d{1,6}))?@(\d{1,9})(\+save)?")
_RANDOM = re.compile(r"random:(\d{1,4})")
RESPAWN_STEPS = 12  # a replaced engine is back within these: random kills of one engine keep apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One planned kill: `who`, as `trainer:1` or `coordinator`, at a phase of a step."""

    who: str
    step: int
    phase: str

    def __str__(self) -> str:
        return f"{self.who}@{self.step}" + ("+save" if self.phase == SAVE else "")

    def hits(self, who: str, step: int, phase: str) -> bool:
        """Is this the moment? An engine that is being replaced at its step is hit when it generates next."""
        late = self.phase == GENERATE and step >= self.step
        return who == self.who and phase == self.phase and (step == self.step or late)


def parse_kills(text: str, config: DemoConfig, *, saves: Sequence[int] = ()) -> tuple[Kill, ...]:
    """Read `--kill`, in the order given. `saves` are steps saved besides every `every`th and the last.

    Raises InvalidInputError for what is malformed or can never fire, naming it and what would do.
    """
    chosen: list[Kill] = []
    for item in (part.strip() for part in text.split(",")):
        match = _RANDOM.fullmatch(item)
        if match is not None:
            count = int(match[1])
            chosen += _at_random(count, config)
            continue
        kill = _parse(item)
        _check(kill, item, config)
        if kill.phase == SAVE and not is_saved(kill.step, config, saves):
            raise InvalidInputError(
                f"kill {item!r} can never fire: step {kill.step} is not saved; choose a multiple of "
                f"{config.every}, or {config.steps}, the last step",
                kill=item,
            )
        chosen.append(kill)
    return tuple(chosen)


def is_saved(step: int, config: DemoConfig, saves: Sequence[int] = ()) -> bool:
    """Every `every`th step is saved, the last, and those where the trainers are stopped."""
    return step > 0 and (step % config.every == 0 or step == config.steps or step in saves)


def _parse(item: str) -> Kill:
    match = _KILL.fullmatch(item)
    if match is None:
        raise InvalidInputError(
            f"kill {item!r} is not understood; write trainer:RANK@STEP, rollout:RANK@STEP, coordinator@STEP, "
            f"trainer:RANK@STEP+save or random:COUNT, separated by commas",
            kill=item,
        )
    kind, rank, step, save = match.groups()
    if (kind == COORDINATOR) != (rank is None):
        wanted = "no rank, there is one" if kind == COORDINATOR else "a rank, as in " + kind + ":0"
        raise InvalidInputError(f"kill {item!r} is not understood; give {kind} {wanted}", kill=item)
    if save and kind != TRAINER:
        raise InvalidInputError(
            f"kill {item!r} can never fire: +save is a point of trainers alone; write trainer:RANK@STEP+save",
            kill=item,
        )
    who = kind if rank is None else f"{kind}:{int(rank)}"
    return Kill(who=who, step=int(step), phase=SAVE if save else _PHASE[kind])


def _check(kill: Kill, item: str, config: DemoConfig) -> None:
    if not 1 <= kill.step <= config.steps:
        raise InvalidInputError(
            f"kill {item!r} can never fire: the run has steps 1 to {config.steps}; choose one of them",
            kill=item,
        )
    kind, _, rank = kill.who.partition(":")
    size = {TRAINER: config.trainers, ROLLOUT: config.rollouts}.get(kind, 1)
    if rank and int(rank) >= size:
        raise InvalidInputError(
            f"kill {item!r} can never fire: the run has {kind} 0 to {size - 1}; choose one of them", kill=item
        )


def _at_random(count: int, config: DemoConfig) -> list[Kill]:
    """Choose kills of any process at any step, each step at most once, from the seed alone."""
    if not 1 <= count <= config.steps:
        raise InvalidInputError(
            f"kill 'random:{count}' cannot be planned: choose 1 to {config.steps}, one a step at most",
            kill=f"random:{count}",
        )
    source = random.Random(f"kills {config.seed}")
    victims = [f"{TRAINER}:{rank}" for rank in range(config.trainers)]
    victims += [f"{ROLLOUT}:{rank}" for rank in range(config.rollouts)] + [COORDINATOR]
    last: dict[str, int] = {}
    kills = []
    for step in sorted(source.sample(range(1, config.steps + 1), count)):
        free = [
            who
            for who in victims
            if not who.startswith(ROLLOUT) or step - last.get(who, -RESPAWN_STEPS) >= RESPAWN_STEPS
        ]
        who = source.choice(free)
        last[who] = step
        kills.append(Kill(who=who, step=step, phase=_PHASE[who.partition(":")[0]]))
    return kills
