"""Ask a store, before a run trusts it, whether create-if-absent has one winner.

Everything in the journal rests on that promise, and some stores break it silently: they check, then
write. The probe is necessary, not sufficient: a race that it wins by luck it cannot see, which is why
`open_store` knows its schemes by name. It writes, so read-only opens never run it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
)
from ckptstore.store.base import Store

WRITERS: Final = 8
KEYS: Final = 20
_START_S_MAX: Final = 60.0  # a bound for a wait that takes microseconds


def probe(store: Store, *, writers: int = WRITERS, keys: int = KEYS) -> None:
    """Race `writers` threads to create each of `keys` scratch keys, and remove the keys.

    Raises InvalidInputError, naming the store and what it did, unless each key had one winner, whose
    bytes are there, and a later create is refused; StoreUnavailableError as it comes.
    """
    scratch = f"probe/{secrets.token_hex(16)}"
    names = [f"{scratch}-{index:02d}" for index in range(keys)]
    try:
        values = [f"{scratch} {writer} {secrets.token_hex(16)}".encode() for writer in range(writers)]
        outcomes = _race(store, names, values)
        problem = next(filter(None, map(_judge, names, zip(*outcomes, strict=True))), None)
        problem = problem or next(
            filter(None, (_reread(store, name, values, won) for name, won in _winners(names, outcomes))), None
        )
    except BaseException:
        for name in names:
            with contextlib.suppress(CkptStoreError):  # the first failure is the one to tell
                store.delete(name)
        raise
    for name in names:
        store.delete(name)
    if problem is not None:
        raise InvalidInputError(
            f"{store.url} cannot hold a run: {problem}; two jobs could both believe to have committed, use "
            "another store",
            url=store.url,
            problem=problem,
        )


def _race(store: Store, names: Sequence[str], values: Sequence[bytes]) -> list[list[bool | None]]:
    """For each writer and key: landed, met another, or unknown (None)."""
    together = threading.Barrier(len(values))

    def write(value: bytes) -> list[bool | None]:
        try:
            return [_create(store, name, value, together) for name in names]
        except BaseException:
            together.abort()
            raise

    with ThreadPoolExecutor(len(values), thread_name_prefix="ckptstore-probe") as pool:
        futures = [pool.submit(write, value) for value in values]
    failures = [failure for future in futures if (failure := future.exception()) is not None]
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure  # the others only stopped waiting for this one
    return [future.result() for future in futures]


def _create(store: Store, name: str, value: bytes, together: threading.Barrier) -> bool | None:
    together.wait(_START_S_MAX)
    try:
        store.create(name, value)
    except AlreadyExistsError:
        return False
    except OutcomeUnknownError:
        return None
    return True


def _judge(name: str, outcomes: Sequence[bool | None]) -> str | None:
    landed, unknown = outcomes.count(True), outcomes.count(None)
    if landed > 1 or (landed == 0 and unknown == 0):
        return f"of {len(outcomes)} racing creates of {name}, {landed} were told that they landed"
    return None


def _winners(names: Sequence[str], outcomes: Sequence[Sequence[bool | None]]) -> list[tuple[str, set[int]]]:
    """For each key the writers whose bytes may be there: the winner, or those that cannot know."""
    found = []
    for name, each in zip(names, zip(*outcomes, strict=True), strict=True):
        won = True if True in each else None
        found.append((name, {writer for writer, outcome in enumerate(each) if outcome is won}))
    return found


def _reread(store: Store, name: str, values: Sequence[bytes], won: set[int]) -> str | None:
    try:
        held = store.read(name)
    except NotFoundError:
        return None if len(won) > 1 else f"{name} was created and cannot be found"
    if held not in [values[writer] for writer in won]:
        return f"{name} holds other bytes than those of the create that landed"
    try:
        store.create(name, b"late")
    except AlreadyExistsError:
        return None
    return f"{name} was created a second time, after it was there"
