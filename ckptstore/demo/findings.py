"""What a run came to, read from its store and from notes, never from the memory of the loop.

Apart from the command, because the account of ordinals must stand on the store alone: whoever holds the
store can make it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ckptstore.agreement import account
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.kills import Kill
from ckptstore.demo.notes import Ended, Note, read_story, with_commits
from ckptstore.demo.records import Evaluation
from ckptstore.demo.result import Account, Resize, Reward, RunResult
from ckptstore.demo.result import Kill as KillResult
from ckptstore.errors import InternalError
from ckptstore.ledger import Ledger
from ckptstore.run import Run
from ckptstore.run import open as open_run


def find_result(
    *,
    label: str,
    url: str,
    config: DemoConfig,
    kills: Sequence[Kill],
    notes: Sequence[Note],
    resizes: tuple[Resize, ...],
    digest: str,
    began_s: float,
    wall_s: float,
) -> RunResult:
    """Tell of a finished run. `digest` is over the global tensors of its last checkpoint, as stored.

    InternalError: they are not those that the trainers held in the end.
    """
    held = [note.digest for note in notes if isinstance(note, Ended)][-1]
    if digest != held:
        raise InternalError(
            f"the tensors of step {config.steps} in {url} are not those that the trainers hold; please report it",
            url=url,
        )
    run = open_run(url)
    loop = run.read(role="loop")
    ledgers = lineage(run)
    counted = account(ledgers, loop["ledger"])
    story = read_story(notes, began_s)
    shots = {name: list(times) for name, times in story.shots.items()}
    return RunResult(
        label=label,
        url=url,
        seed=config.seed,
        steps=config.steps,
        every=config.every,
        trainers=config.trainers,
        rollouts=config.rollouts,
        wall_s=wall_s,
        rewards=tuple(Reward(**record) for record in json.loads(loop["rewards"])),
        evaluations=tuple(Evaluation(**record) for record in json.loads(loop["evaluations"])),
        saves=with_commits(story.saves, run.checkpoints()),
        kills=tuple(_fired(kill, shots) for kill in kills),
        recoveries=story.recoveries,
        engines_replaced=story.engines_replaced,
        resizes=resizes,
        steps_redone=story.steps_redone,
        account=Account(
            issued=counted.issued, consumed=counted.consumed, lost=counted.lost, doubled=counted.doubled
        ),
        digest=digest,
        consumed=_digest(ledgers[-1].to_json()["consumed"]),
    )


def lineage(run: Run) -> list[Ledger]:
    """The trainer's ledger in each checkpoint of the lineage, oldest first."""
    infos = [info for info in run.checkpoints() if info.status == "ok"]
    return [run.read(info.step, role="trainer", names="ledger")["ledger"] for info in infos]


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _fired(kill: Kill, shots: dict[str, list[float]]) -> KillResult:
    """Kills that are written alike fire one after another."""
    times = shots.get(str(kill), [])
    return KillResult(at=str(kill), fired=bool(times), at_s=times.pop(0) if times else None)
