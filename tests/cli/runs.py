"""A small run to list, show and damage: two fences, a rollback, reuse, publications, values of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ckptstore

ROSTER = {"trainer": 2, "loop": 1}
STEPS = (5, 10, 15)


def state_of(rank: int, step: int) -> dict[str, Any]:
    layers = {
        str(n): {"w": np.full((4, 8), step + n, np.float32), "b": np.zeros(8, np.float64)} for n in range(3)
    }
    return {
        "model": {"layers": layers, "head": np.arange(6, dtype=np.int64) * step},
        "reference": ckptstore.Frozen({"w": np.ones((16, 16), np.float32)}),
        "rng": ckptstore.PerRank({"state": np.array([rank, step]), "draws": rank}),
        "step": step,
        "rate": 3e-4,
        "names": ["a", "b"],
        "worst": float("nan"),
    }


def make_run(folder: Path) -> str:
    """Fence 1 saves 5, 10, 15; fence 2 goes back to 10, so 15 is abandoned, and saves 15 again."""
    url = str(folder)
    _save(url, STEPS, resume="auto")
    _save(url, (15,), resume=10)
    return url


def _save(url: str, steps: tuple[int, ...], *, resume: str | int) -> None:
    with ckptstore.begin(url, roster=ROSTER, resume=resume) as inc:
        trainers = [ckptstore.Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        loop = ckptstore.Checkpointer(inc, role="loop", rank=0)
        if inc.step is not None:
            for rank, each in enumerate(trainers):
                each.restore(state_of(rank, 0))
            loop.restore({"evaluations": [], "ledger": ckptstore.Ledger()})
        for step in steps:
            ledger = ckptstore.Ledger(seed=7)
            ledger.issue(4 * step)
            handles = [each.save(step, state_of(rank, step)) for rank, each in enumerate(trainers)]
            handles.append(
                loop.save(step, {"evaluations": [[n, n / 100] for n in range(step)], "ledger": ledger})
            )
            for handle in handles:
                handle.result(30)
        for each in (*trainers, loop):
            each.close()
