"""Training loops that run beside a save, and the time that they lose to it.

Lost is the time that the call of save blocks, and what the steps take longer than they do undisturbed until
the save is done. The steps touch memory of their own: what is measured is cores, caches, memory bandwidth
and the interpreter's lock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

QUIET_S = 0.3  # how long the loop runs undisturbed to learn its normal step
STEPS_MIN = 8
# Steps of some 10 ms: no training has shorter ones, and in shorter ones one time slice of the kernel is all.
MATMUL = 1024  # rows and columns
SMALL_OPS = 6000  # operations a step


class Pending(Protocol):
    """A save that was begun."""

    def done(self) -> bool:
        """Is it over, one way or the other? Does not wait."""
        ...

    def wait(self) -> None:
        """Return once it is; raises its failure."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`id` in figures, `words` in tables; `threads` of torch for one operation."""

    id: str
    words: str
    threads: int
    make: Callable[[], Callable[[], object]]


def _matmul() -> Callable[[], object]:
    import torch

    left, right, out = (torch.rand(MATMUL, MATMUL) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def _small() -> Callable[[], object]:
    import torch

    left, right = torch.rand(16, 16), torch.rand(16, 16)

    def step() -> None:
        value = left
        for _ in range(SMALL_OPS // 3):
            value = (value @ right).relu_() + left

    return step


LOOPS = (
    Loop(id="matmul_1", words="1-thread matmul", threads=1, make=_matmul),
    Loop(id="matmul_2", words="2-thread matmul", threads=2, make=_matmul),
    Loop(id="small_ops", words="small operations", threads=1, make=_small),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Seconds that one save cost the loop, and its longest step as a multiple of a normal one."""

    blocking_s: float
    slower_s: float
    worst: float
    steps: int

    @property
    def total_s(self) -> float:
        return self.blocking_s + self.slower_s


@contextmanager
def running(loop: Loop) -> Iterator[Callable[[], float]]:
    """A step of the loop, which gives its seconds, with torch's threads as the loop wants them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(loop.threads)
    try:
        work = loop.make()

        def step() -> float:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        for _ in range(3):
            step()
        yield step
    finally:
        torch.set_num_threads(before)


def normal_step_s(step: Callable[[], float], *, quiet_s: float = QUIET_S) -> float:
    """The median of undisturbed steps."""
    until, found = time.perf_counter() + quiet_s, [step() for _ in range(STEPS_MIN)]
    while time.perf_counter() < until:
        found.append(step())
    return statistics.median(found)


def lost_to(
    step: Callable[[], float],
    save: Callable[[], Pending],
    normal_s: float,
    *,
    hold: Callable[[], None] | None = None,
    hold_after_s: float = 0.0,
) -> Lost:
    """Call `save`, then step until it is done. Raises the save's failure.

    `hold` is what the next update waits for, called once when steps have taken `hold_after_s`; it blocks too.
    """
    began = time.perf_counter()
    pending = save()
    blocking_s = time.perf_counter() - began
    steps: list[float] = []
    until = time.perf_counter() + hold_after_s
    while not pending.done() or hold is not None:
        steps.append(step())
        if hold is not None and time.perf_counter() >= until:
            began = time.perf_counter()
            hold()
            blocking_s += time.perf_counter() - began
            hold = None
    pending.wait()
    return Lost(
        blocking_s=blocking_s,
        slower_s=sum(steps) - len(steps) * normal_s,
        worst=max(steps, default=normal_s) / normal_s,
        steps=len(steps),
    )


class Nothing:
    """No save at all, for `seconds`: what the loop loses to the machine's own noise."""

    def __init__(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds

    def done(self) -> bool:
        return time.perf_counter() >= self._until

    def wait(self) -> None:
        """It is over when it is done."""
