"""Run a bench: in every round the limits, then each contestant in turn, on one state.

What one contestant does lies in turn.py. Everything lies below one temporary folder, which is removed whatever happens.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.bench import disk, limits
from ckptstore.bench.contestants import Contestant, Ours
from ckptstore.bench.figures import LOCAL, NO_SAVE, OURS, REMOTE, BenchResult, Entrant, Limit, Series
from ckptstore.bench.loops import LOOPS, Nothing, lost_to, normal_step_s, running
from ckptstore.bench.memory import take
from ckptstore.bench.options import BenchOptions, check_room
from ckptstore.bench.peers import PEERS, quiet
from ckptstore.bench.states import State, blank_like, make, packed_nbytes
from ckptstore.bench.turn import Turn, check
from ckptstore.hostmemory import available_nbytes

Progress = Callable[[int, int, str], None]
TRIAL_NBYTES = 1 << 20
PREFIX = "ckptstore-bench-"  # of the temporary folder: what a killed bench left can be told by it


def run_bench(options: BenchOptions, progress: Progress = lambda done, total, words: None) -> BenchResult:
    """Measure. Raises InvalidInputError when there is too little room, before anything is written."""
    began = time.monotonic()
    entrants, contestants = _line_up(options)
    facts = [each.facts for each in contestants]
    check_room(options, extra_memory=[each.extra_memory for each in facts], memory_nbytes=available_nbytes())
    quiet()
    with _place(options) as place:
        bench = _Bench(options=options, place=place, progress=progress, entrants=entrants)
        bench.run(contestants)
    return BenchResult(
        machine=_machine(options, direct=bench.direct),
        place=options.place,
        state=options.state,
        nbytes=bench.nbytes,
        tensors=bench.tensors,
        seed=options.seed,
        rounds=options.rounds,
        seconds=time.monotonic() - began,
        entrants=tuple(entrants.values()),
        limits={
            name: _limit(name, bench.limit_s) for name in dict.fromkeys(name for name, _ in bench.limit_s)
        },
        figures={key: Series(values=tuple(values)) for key, values in bench.figures.items()},
        whats=LOCAL if options.local is not None else REMOTE,
    )


def _limit(name: str, found: dict[tuple[str, str], list[float]]) -> Limit:
    return Limit(
        id=name,
        variants={v: Series(values=tuple(values)) for (each, v), values in found.items() if each == name},
    )


def _line_up(options: BenchOptions) -> tuple[dict[str, Entrant], list[Contestant]]:
    """Who takes part, ckptstore first, and why the others do not."""
    entrants: dict[str, Entrant] = {}
    contestants: list[Contestant] = [Ours()]
    for name in options.peers:
        peer = PEERS[name]
        if peer.missing:
            entrants[name] = Entrant(
                id=name, words=name, problem="not installed", help=f"pip install {peer.package}"
            )
        elif options.local is None:
            entrants[name] = Entrant(
                id=name, words=name, problem="measured on local paths only", help="give a folder"
            )
        else:
            contestants += [way() for way in peer.ways]
    told = {}
    for contestant in contestants:
        facts = contestant.facts
        told[facts.id] = Entrant(
            id=facts.id,
            words=facts.words,
            version=facts.version,
            durable=facts.durable,
            checksums=facts.checksums,
        )
    return {**told, **entrants}, contestants


@contextlib.contextmanager
def _place(options: BenchOptions) -> Iterator[str]:
    """A new folder or prefix of our own; all that is below it is removed at the end."""
    name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
    if options.local is not None:
        folder = options.local.absolute() / name
        folder.mkdir()
        try:
            yield str(folder)
        finally:
            # Something may still be written for a moment after an interrupt: then the second try gets it.
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
        return
    url = f"{options.place.rstrip('/')}/{name}"
    try:
        yield url
    finally:
        limits.empty(url)


@dataclass
class _Bench:
    """The state of a bench under way."""

    options: BenchOptions
    place: str
    progress: Progress
    entrants: dict[str, Entrant]
    limit_s: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    done: int = 0
    total: int = 0
    step: int = 0
    direct: bool = False
    nbytes: int = 0
    tensors: int = 0

    def run(self, contestants: Sequence[Contestant]) -> None:
        self.total = len(contestants) + 1 + self.options.rounds * (len(contestants) + 1)
        if self.options.local is not None:
            self.direct = disk.has_direct(Path(self.place))
        playing = [each for each in contestants if self._try(each, self._trial)]
        self._tick("making the state")
        state = make(self.options.state, self.options.nbytes, seed=self.options.seed)
        self.nbytes, self.tensors = state.nbytes, len(state.tensors)
        memory = take(packed_nbytes(state))
        target, copy = blank_like(state, memory), limits.CopyLimit(state, memory)
        try:
            self._measure_limits(copy, memory, warm_up=True)
            for number in range(self.options.rounds):
                self._tick(f"round {number + 1}: limits")
                self._measure_limits(copy, memory)
                self._no_save()
                shift = number % len(playing)
                for contestant in (*playing[shift:], *playing[:shift]):  # nobody always follows the same
                    if self._play(contestant, state, target, memory, number):
                        continue
                    playing = [each for each in playing if each is not contestant]
        finally:
            copy.close()

    def _tick(self, words: str) -> None:
        self.progress(self.done, self.total, words)
        self.done += 1

    # -- limits

    def _measure_limits(self, copy: limits.CopyLimit, memory: Any, *, warm_up: bool = False) -> None:
        def found(name: str, variant: str, seconds: float) -> None:
            if not warm_up:
                self.limit_s.setdefault((name, variant), []).append(seconds)

        limits.measure_copy(copy, found)
        if self.options.local is not None:
            folder = Path(self.place) / "limit"
            folder.mkdir(exist_ok=True)
            limits.measure_disk(folder, memory, direct=self.direct, found=found)
        elif not warm_up:
            limits.measure_store(f"{self.place}/limit", self.nbytes, found=found)

    def _no_save(self) -> None:
        """The loops alone, for about as long as a save at the limits takes."""
        last = {name: values[-1] for (name, _), values in self.limit_s.items()}
        seconds = last[limits.COPY] + last[limits.WRITE if limits.WRITE in last else limits.PUT]
        for loop in LOOPS:
            with running(loop) as step:
                lost = lost_to(step, functools.partial(Nothing, seconds), normal_step_s(step))
                self._note(f"lost_{loop.id}", NO_SAVE, lost.total_s)
                self._note(f"worst_{loop.id}", NO_SAVE, lost.worst)

    def _note(self, what: str, who: str, value: float) -> None:
        self.figures.setdefault((what, who), []).append(value)

    # -- contestants

    def _try(self, contestant: Contestant, work: Callable[[Contestant], None]) -> bool:
        """Whether it went well. What another library raises is told in the result; our own failure is raised."""
        who = contestant.facts.id
        try:
            work(contestant)
        except Exception as error:
            if who == OURS:
                raise
            old = self.entrants[who]
            self.entrants[who] = Entrant(
                id=old.id,
                words=old.words,
                version=old.version,
                problem=f"failed: {type(error).__name__}: {error}".splitlines()[0][:200],
                help=f"--peers without {who.partition('-')[0]}",
            )
            for key in [key for key in self.figures if key[1] == who]:
                del self.figures[key]
            return False
        finally:
            with contextlib.suppress(Exception):
                contestant.close()  # after a failure it may fail again; what went wrong first is told
            gc.collect()
        return True

    def _trial(self, contestant: Contestant) -> None:
        """A tiny save and load: imports and first calls are paid here, and one that cannot run is found."""
        self._tick(f"trying {contestant.facts.words}")
        place = self._own_place(contestant, "trial")
        state = make("large", TRIAL_NBYTES)
        blank = blank_like(state, take(packed_nbytes(state)))
        contestant.open(place)
        contestant.save(0, state).wait()
        contestant.reload()
        contestant.load(blank)
        check(contestant, state, blank)
        contestant.close()
        self._remove(place)

    def _play(self, contestant: Contestant, state: State, target: State, memory: Any, number: int) -> bool:
        self._tick(f"round {number + 1}: {contestant.facts.words}")
        place = self._own_place(contestant, str(number))

        who = contestant.facts.id
        if number == 0:
            memory[:] = 0  # what a load leaves out shall not be there already
        turn = Turn(
            contestant=contestant,
            state=state,
            target=target,
            place=place,
            is_local=self.options.local is not None,
            is_first=number == 0,
            copy_s=self.limit_s[(limits.COPY, "1 thread")][-1],
            note=lambda what, value: self._note(what, who, value),
            next_step=self._next_step,
        )
        try:
            return self._try(contestant, lambda _: turn.play())
        finally:
            self._remove(place)

    def _own_place(self, contestant: Contestant, name: str) -> str:
        place = f"{self.place}/{contestant.facts.id}-{name}"
        if self.options.local is not None:
            Path(place).mkdir()
        return place

    def _remove(self, place: str) -> None:
        if self.options.local is not None:
            shutil.rmtree(place, ignore_errors=True)
        else:
            limits.empty(place)

    def _next_step(self) -> int:
        self.step += 1
        return self.step


def _machine(options: BenchOptions, *, direct: bool) -> dict[str, Any]:
    import torch

    told: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if options.local is not None:
        told |= {"file_system": _file_system(options.local.absolute()), "direct_io": direct}
    return told


def _file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`."""
    best, kind = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, each, *_ = line.split()
            if (folder == Path(point) or Path(point) in folder.parents) and len(point) >= len(best):
                best, kind = point, each
    return kind
