"""Several processes of a job, interleaved at every store call from a seed, in virtual time.

The real code runs, in real threads, but one at a time: a thread parks before each call of the store and
in each sleep, and the seed says which one goes on. Requests and replies are lost, requests land late,
fresh keys are not seen yet, processes pause and die. One seed is one history, exactly: a violation
found once is a unit test. What must hold is for the test to say (`observe`); tests/protocol shows it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeVar, cast

from ckptstore.clock import Clock
from ckptstore.errors import AlreadyExistsError
from ckptstore.testing.faults import SimulatedCrash
from ckptstore.testing.simulated import NO_CHANCES, Chances, SimulatedClock, SimulatedStore, mounted

T = TypeVar("T")

_REAL_S_MAX: Final = 120.0  # so that a mistake ends as a failure and not as a hang
_CALL_S: Final = 0.0002  # virtual seconds of one call of the store


@dataclass(slots=True, eq=False)
class _Actor:
    """One thread of one process. `gate` is locked while it may not run."""

    process: str
    gate: threading.Lock
    until: Callable[[], bool] | None = None
    wake_s: float | None = None
    doomed: bool = False
    unwinding: bool = False


@dataclass(slots=True)
class _Late:
    at_s: float
    key: str
    data: bytes = field(repr=False)


class Simulation:
    """Runs processes until all have ended. `run` raises the first failure: an `observe` or a process's own.

    `observe(key, data)` is called, with every thread at rest, as an object lands; what it raises ends the
    run. Use the same seed and the same functions, and everything happens again, ids included. Threads
    that a process starts belong to it, but for those of pools and named in `aside`, which pass freely.
    One simulation at a time.
    """

    _serial: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self,
        *,
        seed: int,
        chances: Chances = NO_CHANCES,
        observe: Callable[[str, bytes], None] = lambda key, data: None,
        calls_max: int = 50_000,
        aside: Sequence[str] = ("ckptstore-beat",),
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.chances = chances
        self.observe = observe
        self.aside = tuple(aside)
        self.now_s = 0.0
        self.calls = 0
        self.log: list[str] = []
        self.store = SimulatedStore(self, name=f"simulation-{next(self._serial)}")
        self.clock: Clock = SimulatedClock(self)
        self._calls_max = calls_max
        self._ids = random.Random(seed + 1)
        self._stay = self.random.choice((0.0, 0.2, 0.5, 0.8, 0.95))
        self._actors: list[_Actor] = []
        self._late: list[_Late] = []
        self._mine = threading.local()
        self._over = threading.Lock()
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        return self.store.url

    # -- for scenarios

    def spawn(self, process: str, run: Callable[[], object]) -> None:
        """Add a thread to a process. Before `run`, or from a process that runs."""
        thread = threading.Thread(target=run, name=f"simulated-{process}", daemon=True)
        self._adopt(thread, process)
        _real_start(thread)

    def wait(self, until: Callable[[], bool]) -> None:
        """Let others run until the condition holds; it is asked often and must change nothing."""
        me = self._me()
        me.until = until
        try:
            self._park(me)
        finally:
            me.until = None

    def kill(self, process: str) -> None:
        """Every thread of the process dies at its next step. The caller's own process may be named too."""
        for actor in self._actors:
            if actor.process == process:
                actor.doomed = True
        self.log.append(f"{process} dies")

    def alive(self, process: str) -> bool:
        return any(actor.process == process and not actor.doomed for actor in self._actors)

    @property
    def process(self) -> str:
        """The process of the calling thread."""
        return self._me().process

    def run(self) -> None:
        """Run until every process has ended and every late request has landed."""
        if not self._actors:
            return
        self._over.acquire()
        with mounted(self.store, self.store.name), self._patched():
            self._next().gate.release()
            if not self._over.acquire(timeout=_REAL_S_MAX):
                raise TimeoutError(f"seed {self.seed}: a thread waits for what the simulation does not see")
            if self._failure is None:
                self.now_s += self.chances.late_s
                self._land()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """End the run with this failure; every process dies."""
        if self._failure is None:
            self._failure = error
            self._late.clear()
        for actor in self._actors:
            actor.doomed = True

    # -- turns

    def _me(self) -> _Actor:
        return cast(_Actor, self._mine.actor)

    @property
    def is_taking_part(self) -> bool:
        """Is the calling thread one of a simulated process?"""
        return self._known() is not None

    def _known(self) -> _Actor | None:
        return getattr(self._mine, "actor", None)

    def step(self) -> bool:
        """A moment at which anything may happen; False (at once) for a thread that is none of ours."""
        me = self._known()
        if me is None:
            return False
        self.calls += 1
        self.now_s += _CALL_S
        if self.calls > self._calls_max:
            self.fail(AssertionError(f"seed {self.seed}: {self._calls_max} calls and no end"))
        if self.lucky(self.chances.pause):
            me.wake_s = self.now_s + self.random.uniform(0, self.chances.pause_s)
        self._park(me)
        return True

    def sleep(self, duration_s: float) -> None:
        me = self._known()
        if me is not None:
            me.wake_s = self.now_s + duration_s
            self._park(me)

    def _park(self, me: _Actor) -> None:
        if me.unwinding:
            raise SimulatedCrash(f"{me.process} is dead")
        chosen = self._next(me)
        if chosen is not me:
            chosen.gate.release()
            me.gate.acquire()
        me.wake_s = None
        if me.doomed:
            me.unwinding = True
            raise SimulatedCrash(f"{me.process} is dead")

    def _next(self, me: _Actor | None = None) -> _Actor:
        while True:
            self._land()
            ready = [actor for actor in self._actors if self._ready(actor)]
            if me is not None and me in ready and self.lucky(self._stay):
                return me
            if ready:
                return self.random.choice(ready)
            wakes = [actor.wake_s for actor in self._actors if actor.wake_s is not None]
            wakes += [late.at_s for late in self._late]
            if wakes:
                self.now_s = max(self.now_s, min(wakes))
            else:
                self.fail(AssertionError(f"seed {self.seed}: all wait: {[a.process for a in self._actors]}"))

    def _ready(self, actor: _Actor) -> bool:
        if actor.doomed:
            return True
        if actor.wake_s is not None and actor.wake_s > self.now_s:
            return False
        return actor.until is None or actor.until()

    def lucky(self, chance: float) -> bool:
        """Does it happen, this time?"""
        return chance > 0 and self.random.random() < chance

    # -- threads

    def _adopt(self, thread: threading.Thread, process: str) -> None:
        actor = _Actor(process=process, gate=threading.Lock())
        actor.gate.acquire()
        self._actors.append(actor)
        body = thread.run

        def run() -> None:
            self._mine.actor = actor
            actor.gate.acquire()
            try:
                if not actor.doomed:
                    body()
            except SimulatedCrash:
                pass
            except BaseException as error:  # whatever a process did not expect is a failure of the test
                self.fail(error)
            finally:
                self._mine.actor = None
                self._actors.remove(actor)
                if self._actors:
                    self._next().gate.release()
                else:
                    self._over.release()

        thread.run = run  # type: ignore[method-assign]  # it is what a simulation replaces

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Threads of processes are adopted as they start, and random ids come from the seed."""
        start, token_hex = threading.Thread.start, secrets.token_hex

        def start_adopted(thread: threading.Thread) -> None:
            me = self._known()
            if me is not None and thread.name not in self.aside and not _of_pool(thread):
                self._adopt(thread, me.process)
            start(thread)

        def seeded_hex(nbytes: int | None = None) -> str:
            return token_hex(nbytes) if self._known() is None else self._ids.randbytes(nbytes or 32).hex()

        threading.Thread.start = start_adopted  # type: ignore[method-assign,assignment]  # it is what a simulation replaces
        secrets.token_hex = seeded_hex
        try:
            yield
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]  # it is what a simulation replaces
            secrets.token_hex = token_hex

    # -- late requests

    def send_late(self, key: str, data: bytes) -> None:
        at_s = self.now_s + self.random.uniform(0, self.chances.late_s)
        self._late.append(_Late(at_s=at_s, key=key, data=data))

    def _land(self) -> None:
        due = [late for late in self._late if late.at_s <= self.now_s]
        self._late = [late for late in self._late if late.at_s > self.now_s]
        for late in due:
            with contextlib.suppress(AlreadyExistsError):  # it came too late; nobody waits for the answer
                self.store.land(late.key, late.data)
                self.log.append(f"{late.key} lands late")


_real_start = threading.Thread.start


def _of_pool(thread: threading.Thread) -> bool:
    """Pool threads act for the one that waits for them, and it has the turn."""
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", "") == "concurrent.futures.thread"
