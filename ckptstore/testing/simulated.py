"""The store and the clock of a simulated run: every call is a moment, and some calls go wrong.

Apart from the scheduler (`simulation.py`), because this is what a test adjusts: which misfortunes
happen, how often, and what an observer sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from ckptstore.clock import Clock, utc_label
from ckptstore.errors import AlreadyExistsError, NotFoundError, OutcomeUnknownError, StoreUnavailableError
from ckptstore.store.base import Buffer, Store, byte_views
from ckptstore.store.memory import MemoryStore

if TYPE_CHECKING:
    from ckptstore.testing.simulation import Simulation

_POLLED: Final = ("journal/", "parts/", "layouts/", "members/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How likely each misfortune is, at each call of a process (`stale`: at each read of a fresh polled key)."""

    die: float = 0.0
    lost_request: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    repeated: float = 0.0  # a lower layer sends the request twice, and the second meets the first
    unavailable: float = 0.0
    pause: float = 0.0
    stale: float = 0.0
    late_s: float = 2.0  # the longest way of a late request
    pause_s: float = 4.0
    fresh_s: float = 0.05


NO_CHANCES: Final = Chances()


class SimulatedClock:
    """Virtual seconds; a sleep lets the other threads run."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def monotonic(self) -> float:
        return self._simulation.now_s

    def now(self) -> str:
        return utc_label(1_767_225_600.0 + self._simulation.now_s)

    def sleep(self, duration_s: float) -> None:
        self._simulation.sleep(duration_s)


class SimulatedStore(MemoryStore):
    """The reference store, with a moment before each call at which anything may happen."""

    def __init__(self, simulation: Simulation, *, name: str) -> None:
        super().__init__(name=name)
        self.name = name
        self._simulation = simulation
        self._born_s: dict[str, float] = {}

    @property
    def objects(self) -> dict[str, bytes]:
        """A copy of all objects by key."""
        return dict(self._objects)

    def peek(self, key: str) -> bytes | None:
        """The object as it is now, for observers: no step, no fault."""
        return self._objects.get(key)

    def land(self, key: str, data: bytes) -> None:
        """The request arrives. AlreadyExistsError as for `create`."""
        super().create(key, data)
        self._born_s[key] = self._simulation.now_s
        try:
            self._simulation.observe(key, data)
        except BaseException as error:  # also one that the code under test would swallow
            self._simulation.fail(error)

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        value = b"".join(byte_views(data))  # a late request carries what was sent
        if not self._enter("create", key):
            return super().create(key, value)
        simulation, chances = self._simulation, self._simulation.chances
        lost, late = self._lucky(chances.lost_request), self._lucky(chances.late)
        unheard = self._lucky(chances.lost_reply)
        if late:
            simulation.send_late(key, value)
        elif unheard:
            self._land_quietly(key, value)
        if lost or late or unheard:
            simulation.log.append(f"  no reply to {key}")
            raise OutcomeUnknownError(f"no reply to the create of {key}", key=key)
        self.land(key, value)
        if self._lucky(chances.die):
            self._die()
        if self._lucky(chances.repeated):
            raise AlreadyExistsError(f"{key} is taken, by the caller's own object", key=key)

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        self._enter("read", key)
        self._stale(key)
        return super().read(key, start=start, nbytes=nbytes)

    def size(self, key: str) -> int:
        self._enter("size", key)
        self._stale(key)
        return super().size(key)

    def read_into(self, key: str, start: int, targets: Sequence[Buffer]) -> None:
        self._enter("read_into", key)
        super().read_into(key, start, targets)

    def list(self, prefix: str) -> Iterator[Any]:
        self._enter("list", prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._enter("delete", key)
        super().delete(key)

    def replace(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        self._enter("replace", key)
        super().replace(key, data)

    def settle(self, keys: Sequence[str]) -> None:
        self._enter("settle", keys[0] if keys else "")
        super().settle(keys)

    # -- misfortunes

    def _enter(self, verb: str, key: str) -> bool:
        simulation = self._simulation
        if not simulation.step():
            return False
        simulation.log.append(f"{simulation.now_s:.4f} {simulation.process}: {verb} {key}")
        if self._lucky(simulation.chances.die):
            self._die()
        if self._lucky(simulation.chances.unavailable):
            raise StoreUnavailableError(f"{verb} {key} was not done: try again", key=key)
        return True

    def _die(self) -> None:
        self._simulation.kill(self._simulation.process)
        self._simulation.step()

    def _stale(self, key: str) -> None:
        """A negative cache: a key that is polled may stay unseen for a moment after it was made."""
        simulation = self._simulation
        fresh = simulation.now_s - self._born_s.get(key, -1e9) < simulation.chances.fresh_s
        if fresh and key.startswith(_POLLED) and self._lucky(simulation.chances.stale):
            simulation.log.append(f"  {key} is not seen")
            raise NotFoundError(f"{key} is not seen yet", key=key)

    def _lucky(self, chance: float) -> bool:
        return self._simulation.is_taking_part and self._simulation.lucky(chance)

    def _land_quietly(self, key: str, value: bytes) -> None:
        with contextlib.suppress(AlreadyExistsError):  # the reply that is lost
            self.land(key, value)


@contextlib.contextmanager
def mounted(store: Store, name: str) -> Iterator[str]:
    """Let `memory://name` open this very store in this process; gives the URL."""
    with MemoryStore._named_lock:
        before = MemoryStore._named.get(name)
        MemoryStore._named[name] = cast(MemoryStore, store)
    try:
        yield f"memory://{name}"
    finally:
        with MemoryStore._named_lock:
            del MemoryStore._named[name]
            if before is not None:
                MemoryStore._named[name] = before


def _conforms(clock: SimulatedClock) -> Clock:
    return clock  # checked by mypy
