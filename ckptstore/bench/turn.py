"""One contestant's turn in a round: saves, saves beside loops, loads; the same for all.

It stands apart from the run, which decides who plays when and what becomes of a failure.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptstore.bench import disk
from ckptstore.bench.contestants import Contestant, Ours
from ckptstore.bench.loops import LOOPS, lost_to, normal_step_s, running
from ckptstore.bench.memory import cpu_s, peak_memory
from ckptstore.bench.states import State
from ckptstore.errors import InternalError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`place` is empty. `note` takes a figure by its id; `copy_s` is what the last copy of the state took."""

    contestant: Contestant
    state: State
    target: State
    place: str
    is_local: bool
    is_first: bool  # of this contestant: figures that do not vary are taken, and what was loaded is compared
    copy_s: float
    note: Callable[[str, float], None]
    next_step: Callable[[], int]

    def play(self) -> None:
        self.contestant.open(self.place)
        self._saves()
        self._beside_loops()
        if isinstance(self.contestant, Ours):
            self._lazily(self.contestant)
        self._loads()

    def _advance(self, keep: frozenset[str] = frozenset()) -> int:
        step = self.next_step()
        self.state.advance(step, keep)
        gc.collect()
        return step

    def _saves(self) -> None:
        contestant, state = self.contestant, self.state
        step = self._advance()
        with peak_memory() as peak:
            began = time.perf_counter()
            pending = contestant.save(step, state)
            self.note("block_first", time.perf_counter() - began)
            pending.wait()
        if peak.nbytes is not None:
            self.note("memory_save", peak.nbytes / state.nbytes)
        if self.is_first:
            names, frozen = state.half()
            step = self._advance(names)
            contestant.save(step, state).wait()
            self.note("half", contestant.nbytes_written(step) / (state.nbytes - frozen))
        self._fsync()
        self._warm()

    def _warm(self) -> None:
        step = self._advance()
        cpu, began = cpu_s(), time.perf_counter()
        pending = self.contestant.save(step, self.state)
        blocking_s = time.perf_counter() - began
        pending.wait()
        self._fsync()
        durable_s = time.perf_counter() - began
        self.note("block", blocking_s)
        self.note("durable" if self.is_local else "put", durable_s)
        self.note("cpu", (cpu_s() - cpu) / (self.state.nbytes / GIB))
        if not self.contestant.facts.background:  # training stands still until the save is over
            for loop in LOOPS:
                self.note(f"lost_{loop.id}", durable_s)
        self.contestant.keep_only(step)

    def _fsync(self) -> None:
        """Make durable what a library left to its user."""
        if self.contestant.facts.durable == "no" and self.is_local:
            disk.make_durable(Path(self.place))

    def _beside_loops(self) -> None:
        if not self.contestant.facts.background:
            return
        for loop in LOOPS:
            number = self._advance()
            with running(loop) as step:
                save = functools.partial(self.contestant.save, number, self.state)
                lost = lost_to(step, save, normal_step_s(step))
            self.note(f"lost_{loop.id}", lost.total_s)
            self.note(f"worst_{loop.id}", lost.worst)
            self.contestant.keep_only(number)

    def _lazily(self, ours: Ours) -> None:
        """Lazy saves, where the forward and backward take twice as long as the copy: then comes the update."""
        for loop in LOOPS:
            number = self._advance()
            with running(loop) as step:
                save = functools.partial(ours.save, number, self.state, lazy=True)
                update = functools.partial(ours.wait_staged, number)
                lost = lost_to(step, save, normal_step_s(step), hold=update, hold_after_s=2 * self.copy_s)
            if loop is LOOPS[0]:
                self.note("block_lazy", lost.blocking_s)
            self.note(f"lazy_{loop.id}", lost.total_s)
            ours.keep_only(number)

    def _loads(self) -> None:
        self._fsync()
        self.contestant.reload()
        if self.is_local:
            disk.drop_cache(disk.files_in(Path(self.place)))
        with peak_memory() as peak:
            began = time.perf_counter()
            self.contestant.load(self.target)
            self.note("load_cold" if self.is_local else "get", time.perf_counter() - began)
        if peak.nbytes is not None:
            self.note("memory_load", peak.nbytes / self.state.nbytes)
        if self.is_first:
            check(self.contestant, self.state, self.target)
        if self.is_local:
            disk.fill_cache(disk.files_in(Path(self.place)))
            began = time.perf_counter()
            self.contestant.load(self.target)
            self.note("load_warm", time.perf_counter() - began)


def check(contestant: Contestant, state: State, found: State) -> None:
    """Raises InternalError unless every bit came back."""
    wrong = state.differs_from(found)
    if wrong is not None:
        raise InternalError(f"{contestant.facts.words} gave other bits back: {wrong}")
