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

PAIRS: Final = 4  # racing side by side
ROUNDS: Final = 10
_START_S_MAX: Final = 60.0  # a bound for a wait that takes microseconds


def probe(store: Store, *, pairs: int = PAIRS, rounds: int = ROUNDS) -> None:
    """Race two threads to create a scratch key, `pairs` keys at a time, and remove the keys.

    Two a key: where they overlap, a store that checks and then writes lets both win. More would only queue for
    the lock of an honest one: SeaweedFS asks for a contended lock again once a second, and eight writers of
    twenty keys took it half a minute.

    Raises InvalidInputError, naming the store and what it did, unless each key had one winner, whose
    bytes are there, and a later create is refused; StoreUnavailableError as it comes.
    """
    scratch = f"probe/{secrets.token_hex(16)}"
    names = [f"{scratch}-{index:02d}" for index in range(pairs * rounds)]
    values = [f"{scratch} {writer} {secrets.token_hex(16)}".encode() for writer in range(2)]
    with ThreadPoolExecutor(2 * pairs, thread_name_prefix="ckptstore-probe") as pool:
        try:
            outcomes = _race(store, pool, [names[pair::pairs] for pair in range(pairs)], values)
            problems = [_judge(name, outcomes[name]) for name in names]
            if not any(problems):
                problems = list(pool.map(lambda name: _reread(store, name, values, outcomes[name]), names))
            problem = next(filter(None, problems), None)
        except BaseException:
            for name in names:
                with contextlib.suppress(CkptStoreError):  # the first failure is the one to tell
                    store.delete(name)
            raise
        list(pool.map(store.delete, names))
    if problem is not None:
        raise InvalidInputError(
            f"{store.url} cannot hold a run: {problem}; two jobs could both believe to have committed, use "
            "another store",
            url=store.url,
            problem=problem,
        )


def _race(
    store: Store, pool: ThreadPoolExecutor, names: Sequence[Sequence[str]], values: Sequence[bytes]
) -> dict[str, list[bool | None]]:
    """For each key and writer: landed, met another, or unknown (None). `names`: the keys of each pair."""
    together = threading.Barrier(len(names) * len(values))

    def write(mine: Sequence[str], value: bytes) -> list[bool | None]:
        try:
            return [_create(store, name, value, together) for name in mine]
        except BaseException:
            together.abort()
            raise

    tasks = [(mine, pool.submit(write, mine, value)) for mine in names for value in values]
    failures = [failure for _, task in tasks if (failure := task.exception()) is not None]
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure  # the others only stopped waiting for this one
    found: dict[str, list[bool | None]] = {}
    for mine, task in tasks:
        for name, outcome in zip(mine, task.result(), strict=True):
            found.setdefault(name, []).append(outcome)
    return found


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


def _reread(store: Store, name: str, values: Sequence[bytes], outcomes: Sequence[bool | None]) -> str | None:
    # The bytes that may be there: those of the winner, or of all that cannot know.
    told = True if True in outcomes else None
    won = [value for value, outcome in zip(values, outcomes, strict=True) if outcome is told]
    try:
        held = store.read(name)
    except NotFoundError:
        return None if told is None else f"{name} was created and cannot be found"
    if held not in won:
        return f"{name} holds other bytes than those of the create that landed"
    try:
        store.create(name, b"late")
    except AlreadyExistsError:
        return None
    return f"{name} was created a second time, after it was there"
