"""A store that fails on purpose: at the call that a test names, in the way it names.

Every failure that the protocol must survive is one of these: the process dies before a request or after
it, a reply is lost, a request arrives late, a store says "exists" of the caller's own object. A test
counts the calls of a scenario once and then plays it with a failure at each.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from ckptstore.errors import AlreadyExistsError, OutcomeUnknownError, StoreUnavailableError
from ckptstore.store.base import Buffer, ObjectInfo, Store, Upload, byte_views
from ckptstore.store.collected import CollectedUpload

Verb = Literal["create", "write", "read", "read_into", "size", "list", "delete", "replace", "settle"]
Lost = Literal["request", "reply"]
Fault = Literal[
    "unavailable",  # not done; StoreUnavailableError
    "unknown, landed",  # done; OutcomeUnknownError
    "unknown, not landed",  # not done; OutcomeUnknownError
    "unknown, late",  # done `late_by` calls later, or by land_late(); OutcomeUnknownError now
    "exists, landed",  # done; AlreadyExistsError, as when a lower layer repeated the request
]
_CHANGES: Final = ("create", "replace", "delete")
_T = TypeVar("_T")


class SimulatedCrash(BaseException):
    """The process is dead: not an Exception, so that no handler of errors goes on living."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the store; `key` is the prefix for `list` and the first key for `settle`."""

    number: int
    verb: Verb
    key: str


class FaultStore:
    """A Store that passes calls on to `inner`, numbers them from 0, and fails where it is told to.

    `crash_at` is the number of the call in which the process dies, with the request lost (it did
    nothing) or the reply (it was done); every later call, from any thread, dies too. `faults` gives a
    fault by number; `choose` is asked for each other call. Of calls that only read, any fault is
    StoreUnavailableError. Thread-safe: calls pass one after another, in the order of their numbers.
    """

    def __init__(
        self,
        inner: Store,
        *,
        crash_at: int | None = None,
        lost: Lost = "request",
        faults: Mapping[int, Fault] | None = None,
        choose: Callable[[Call], Fault | None] | None = None,
        late_by: int = 3,
    ) -> None:
        self._inner = inner
        self._crash_at = crash_at
        self._lost = lost
        self._faults = dict(faults or {})
        self._choose = choose
        self._late_by = late_by
        self._lock = threading.RLock()
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._crashed = False
        self._calls: list[Call] = []

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls so far, the one that crashed included."""
        with self._lock:
            return tuple(self._calls)

    @property
    def crashed(self) -> bool:
        with self._lock:
            return self._crashed

    def reboot(self, *, land_late: bool = False) -> Store:
        """The objects as the next process finds them; this store is dead from now on."""
        with self._lock:
            self._crashed = True
            if land_late:
                self.land_late()
            self._late.clear()
        return self._inner

    def land_late(self) -> None:
        """Let every request that is still on its way arrive."""
        with self._lock:
            self._land(len(self._calls) + self._late_by)

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        value = b"".join(byte_views(data))  # a late request carries what was sent
        self._pass("create", key, lambda: self._inner.create(key, value))

    def upload(self, key: str, nbytes_max: int) -> Upload:
        """Each block is a call, `write`, and the last call is the `create` of it all."""
        return CollectedUpload(
            lambda blocks: self.create(key, blocks), lambda: self._pass("write", key, lambda: None)
        )

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        return self._pass("read", key, lambda: self._inner.read(key, start=start, nbytes=nbytes))

    def read_into(self, key: str, start: int, targets: Sequence[Buffer]) -> None:
        self._pass("read_into", key, lambda: self._inner.read_into(key, start, targets))

    def size(self, key: str) -> int:
        return self._pass("size", key, lambda: self._inner.size(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._pass("list", prefix, lambda: tuple(self._inner.list(prefix))))

    def delete(self, key: str) -> None:
        self._pass("delete", key, lambda: self._inner.delete(key))

    def replace(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        value = b"".join(byte_views(data))
        self._pass("replace", key, lambda: self._inner.replace(key, value))

    def settle(self, keys: Sequence[str]) -> None:
        self._pass("settle", keys[0] if keys else "", lambda: self._inner.settle(keys))

    def close(self) -> None:
        """The inner store stays open for the next process."""

    def _pass(self, verb: Verb, key: str, act: Callable[[], _T]) -> _T:
        with self._lock:
            if self._crashed:
                raise SimulatedCrash(f"{verb} {key}: the process has died before")
            call = Call(number=len(self._calls), verb=verb, key=key)
            self._calls.append(call)
            self._land(call.number)
            if call.number == self._crash_at:
                self._crash(call, act)
            fault = self._faults.get(call.number) or (self._choose(call) if self._choose else None)
            if fault is None:
                return act()
            raise self._fail(call, fault, act)

    def _crash(self, call: Call, act: Callable[[], object]) -> None:
        self._crashed = True
        try:
            if self._lost == "reply":
                act()
        finally:  # whatever the reply was, an error too, nobody hears it
            raise SimulatedCrash(f"crash at call {call.number}, {call.verb} {call.key}: {self._lost} lost")

    def _fail(self, call: Call, fault: Fault, act: Callable[[], object]) -> Exception:
        said = f"call {call.number}, {call.verb} {call.key}: simulated fault {fault!r}"
        if fault == "unavailable" or call.verb not in _CHANGES:
            return StoreUnavailableError(said, key=call.key)
        if fault == "unknown, late":
            self._late.append((call.number + self._late_by, act))
        elif fault in ("unknown, landed", "exists, landed"):
            with contextlib.suppress(AlreadyExistsError):  # the reply that is lost
                act()
        if fault == "exists, landed" and call.verb == "create":
            return AlreadyExistsError(said, key=call.key)
        return OutcomeUnknownError(said, key=call.key)

    def _land(self, number: int) -> None:
        due = [act for at, act in self._late if at <= number]
        self._late = [(at, act) for at, act in self._late if at > number]
        for act in due:
            try:
                act()
            except AlreadyExistsError:
                continue  # it came too late; nobody waits for the answer


def count_calls(scenario: Callable[[Store], object], inner: Store) -> int:
    """How many calls `scenario` makes on a store that does not fail; `inner` must be fresh."""
    store = FaultStore(inner)
    scenario(store)
    return len(store.calls)


def _conforms(store: FaultStore) -> Store:
    return store  # checked by mypy
