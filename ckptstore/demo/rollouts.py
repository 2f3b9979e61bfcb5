"""The engines of the loop: who lives, what each serves, and who generates which lease.

Apart from the loop's body because an engine's death concerns nobody else: its lease is dealt again as a
whole, a new process joins when it serves the newest publication, and the step goes on meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.clock import Clock
from ckptstore.demo.chaos import Outside
from ckptstore.demo.notes import EngineLost, EngineReady
from ckptstore.demo.records import Group
from ckptstore.errors import InternalError
from ckptstore.manifest import Member, PublicationId
from ckptstore.recovery.launcher import Call, Launcher, MemberDiedError

Lease = tuple[int, ...]

START_S = 120.0  # of an engine's process, on a busy machine
LOAD_S = 60.0
IDLE_S = 90.0  # without any answer: who has work and is silent so long is taken for dead
POLL_S = 0.5
AGAIN_FIRST_S, AGAIN_MOST_S = 0.05, 2.0
MAX_STARTS = 30  # in a row of one engine, without it ever serving


@dataclass(slots=True)
class Seat:
    """One engine's place: what it serves and is asked for now. `restart_s` is set while it is replaced."""

    engine: Member
    call: Call | None = None
    lease: Lease | None = None  # that of `call`; None while it loads
    loading: PublicationId | None = None
    serves: PublicationId | None = None
    restart_s: float | None = None
    starts: int = 0

    def clear(self) -> None:
        self.call = self.lease = self.loading = None


class Rollouts:
    """Deals leases to the engines of one coordinator. One thread."""

    def __init__(
        self, *, engines: Sequence[Member], launcher: Launcher, outside: Outside, clock: Clock
    ) -> None:
        self._seats = [Seat(engine=engine) for engine in engines]
        self._launcher = launcher
        self._outside = outside
        self._clock = clock
        self._life = (0, 0)
        self._load: tuple[Any, ...] = ()
        self._target: PublicationId | None = None
        self._digest: str | None = None

    # -- what they serve

    def serve(
        self, life: tuple[int, int], config: Mapping[str, Any], url: str, publication: PublicationId
    ) -> None:
        """From now on engines must serve `publication`; idle ones begin to load it at once."""
        if life != self._life:
            self.forget()
        self._life, self._target, self._digest = life, publication, None
        self._load = (dict(config), url)
        for seat in self._seats:
            if seat.call is None and seat.restart_s is None and seat.serves is not None:
                self._send_load(seat)

    def forget(self) -> None:
        """Nothing that was asked for is waited for any more."""
        for seat in self._seats:
            seat.clear()

    def converge(self) -> int:
        """Start what is dead and bring every engine to the publication; their number."""
        self.forget()
        engines = [seat.engine for seat in self._seats]
        self._launcher.ensure(engines, deadline_s=START_S)
        calls = [self._send_load(seat) for seat in self._seats]
        told = self._launcher.gather(calls, deadline_s=LOAD_S)
        for seat, (digest, fresh) in zip(self._seats, told, strict=True):
            if fresh and self._life[1] > 1:
                self._outside.note(EngineLost(engine=str(seat.engine), step=0))
            self._loaded(seat, digest)
        return len(self._seats)

    def _send_load(self, seat: Seat) -> Call:
        seat.loading = self._target
        seat.lease = None
        seat.call = self._launcher.call(seat.engine, "load", self._life, *self._load, self._target)
        return seat.call

    def _loaded(self, seat: Seat, digest: str) -> None:
        if seat.loading == self._target:
            self._digest = self._digest if self._digest is not None else digest
            if digest != self._digest:
                self._launcher.stop([seat.engine])
                raise MemberDiedError(
                    f"{seat.engine} serves weights of digest {digest} where others serve {self._digest} as the same "
                    f"publication; it was stopped",
                    members=(seat.engine,),
                )
        seat.serves = seat.loading
        seat.restart_s, seat.starts = None, 0
        seat.clear()
        self._outside.note(EngineReady(engine=str(seat.engine)))

    # -- deaths

    def replace(self, engines: Sequence[str], step: int) -> None:
        """Start these anew, soon, beside the loop."""
        for seat in self._seats:
            if str(seat.engine) not in engines:
                continue
            self._launcher.stop([seat.engine])
            wait_s = 0.0 if seat.restart_s is None else AGAIN_FIRST_S * 2.0**seat.starts
            seat.restart_s = self._clock.monotonic() + min(wait_s, AGAIN_MOST_S)
            seat.serves = None
            self._outside.note(EngineLost(engine=str(seat.engine), step=step))

    def _restart(self, seat: Seat) -> None:
        """Try to start an engine; the name of a dead one is freed a little later, so tries may be needed."""
        seat.starts += 1
        if seat.starts > MAX_STARTS:
            raise InternalError(
                f"{seat.engine} could not be started in {MAX_STARTS} tries; see the log of its process",
                engine=str(seat.engine),
            )
        self._launcher.start([seat.engine])
        self._send_load(seat)

    # -- leases

    def collect(self, step: int, leases: deque[Lease], groups: list[Group]) -> None:
        """Deal `leases` and add the groups of each to `groups`, until all have come.

        MemberDiedError names engines that died; then their leases are back in `leases`, and `collect` may be
        called again with the same arguments once they are being replaced.
        """
        heard_s = self._clock.monotonic()
        while leases or any(seat.lease for seat in self._seats):
            turn = step % len(self._seats)  # each engine is first at times: there may be fewer leases
            for seat in (*self._seats[turn:], *self._seats[:turn]):
                self._deal(seat, step, leases)
            busy = {id(seat.call): seat for seat in self._seats if seat.call is not None}
            ready = self._launcher.ready([seat.call for seat in busy.values() if seat.call], timeout_s=POLL_S)
            if ready:
                heard_s = self._clock.monotonic()
                self._take([(busy[id(call)], call) for call in ready], leases, groups)
            elif self._clock.monotonic() - heard_s > IDLE_S:
                self._give_up(leases)

    def _deal(self, seat: Seat, step: int, leases: deque[Lease]) -> None:
        if seat.call is not None:
            return
        if seat.restart_s is not None:
            if self._clock.monotonic() >= seat.restart_s:
                self._restart(seat)
        elif seat.serves != self._target:
            self._send_load(seat)
        elif leases:
            seat.lease = leases.popleft()
            seat.call = self._launcher.call(seat.engine, "generate", self._life, step, seat.lease)

    def _take(self, ready: Sequence[tuple[Seat, Call]], leases: deque[Lease], groups: list[Group]) -> None:
        died = []
        for seat, call in ready:
            try:
                value = self._launcher.result(call)
                if seat.lease is None:
                    digest, _ = value
                    self._loaded(seat, digest)
                    continue
                groups.extend(self._checked(seat, value))
                seat.clear()
            except MemberDiedError:
                died.append(seat)
        if died:
            self._mourn(died, leases)

    def _checked(self, seat: Seat, groups: Sequence[Group]) -> Sequence[Group]:
        """Work of any other version than the one in force is not taken, whoever sends it."""
        assert self._target is not None
        odd = [group.ordinal for group in groups if group.version != self._target.number]
        if odd:
            raise InternalError(
                f"{seat.engine} made groups {odd} with another version than {self._target}; please report it",
                engine=str(seat.engine),
            )
        return groups

    def _mourn(self, died: Sequence[Seat], leases: deque[Lease]) -> None:
        for seat in died:
            if seat.lease is not None:
                leases.appendleft(seat.lease)
            seat.clear()
        names = ", ".join(str(seat.engine) for seat in died)
        raise MemberDiedError(
            f"engines died: {names}; replace them, their leases are dealt again",
            members=tuple(seat.engine for seat in died),
        )

    def _give_up(self, leases: deque[Lease]) -> None:
        silent = [seat for seat in self._seats if seat.call is not None]
        if not silent:
            raise InternalError(f"no engine could be asked for {IDLE_S:g} s; please report it")
        self._launcher.stop([seat.engine for seat in silent])
        self._mourn(silent, leases)
