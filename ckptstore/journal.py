"""Append to the journal and read it: numbered slots, each won once.

Fences and commits share one sequence, so whoever lost its fence meets the newer fence at or before
the slot it wants. Nothing but create-if-absent is needed of the store. What an entry may do is
decided by `history.py`, on exactly the prefix below its slot; the argument is protocol R6 to R9.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from ckptstore.clock import Clock, SystemClock
from ckptstore.errors import (
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.history import SUMMARY_EVERY, Body, Entry, History, SummaryEntry
from ckptstore.manifest import journal_key
from ckptstore.store.base import Store
from ckptstore.wire import decode_entry, digest_of, encode_entry, fold_from_json, fold_to_json

APPEND_TRIES = 64
READ_TRIES = 6


def new_id() -> str:
    """A random write id: lower-case hex, 64 bits."""
    return secrets.token_hex(8)


class Journal:
    """One process's view of a run's journal; of any run until `run` is known. Thread-safe.

    `known` is the number of slots that are known to exist (a token names its fence's): see `catch_up`.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        by: str = "",
        run: str | None = None,
        known: int = 0,
    ) -> None:
        self.store = store
        self.clock = clock if clock is not None else SystemClock()
        self.by = by
        self.run = run
        self._known = known
        self._lock = threading.RLock()
        self._history = History()
        self._prev = ""
        self._opened = False

    @property
    def history(self) -> History:
        """The fold as last read. Shared: ask it questions, do not change it."""
        return self._history

    def catch_up(self, least: int = 0) -> History:
        """Read to the end and return the fold.

        `least` is the number of slots that are known to exist: one of them that is not found is a failed
        read (StoreUnavailableError), never the end, and so is one whose successor is there (looked for at the
        first call). A wrong slot, run, digest or link is CorruptError.
        """
        with self._lock:
            least = max(least, self._known)
            first = not self._opened
            if first:
                self._open(least)
            while True:
                slot = self._history.slots
                data = self._read(slot, known=slot < least)
                if data is None and first and self._exists(slot + 1):
                    data = self._read(slot, known=True)  # no slot is left out: just made, or lost
                if data is None:
                    return self._history
                self._apply(data)

    def append(self, decide: Callable[[History], Body | None], *, tries: int = APPEND_TRIES) -> Entry | None:
        """Win the next slot for the body that `decide` returns, judged anew on each prefix.

        Durable on return. `decide` returns None when there is nothing to do (then so does this) and
        raises when a rule forbids the entry, which is final. OutcomeUnknownError: the entry may land
        or have landed; the caller must neither delete anything nor call the attempt failed.
        """
        write = new_id()
        unsure: int | None = None  # the slot at which a request of ours may still land, or has landed unheard
        with self._lock:
            for attempt in range(tries):
                try:
                    history = self.catch_up()
                    if write in history.writes:
                        return self._own(write)
                    if unsure is not None and history.slots > unsure:
                        unsure = None  # another won that slot, so ours never will
                    if history.slots and history.slots % SUMMARY_EVERY == 0:
                        self._try(self._entry(new_id(), SummaryEntry(state=fold_to_json(history.fold))))
                        continue
                    body = decide(history)
                    if body is None:
                        return None
                    entry = self._entry(write, body)
                    landed = self._try(entry)
                    if landed:
                        return entry
                    if landed is None:
                        unsure = entry.slot
                except StoreUnavailableError as error:
                    if unsure is None:
                        raise
                    raise self._unknown(unsure, str(error)) from error
                self.clock.sleep(min(0.001 * 2 ** min(attempt, 8), 0.25))
        raise self._unknown(self._history.slots, f"{tries} tries")

    @staticmethod
    def _unknown(slot: int, why: str) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"journal slot {slot} could not be settled ({why}): read the journal before deciding anything",
            slot=slot,
        )

    # -- one slot

    def _entry(self, write: str, body: Body) -> Entry:
        return Entry(
            slot=self._history.slots,
            run=self.run if self.run is not None else "",
            write=write,
            prev=self._prev,
            at=self.clock.now(),
            by=self.by,
            body=body,
        )

    def _try(self, entry: Entry) -> bool | None:
        """One create, settled by reading the key whenever it is not plain success; None: unknown (protocol R3)."""
        data, key = encode_entry(entry), journal_key(entry.slot)
        if entry.slot:
            self.store.settle([journal_key(entry.slot - 1)])
        try:
            self.store.create(key, data)
        except (AlreadyExistsError, OutcomeUnknownError):
            try:
                if self.store.read(key) != data:
                    return False  # another's, or an earlier try of ours: the next round reads which
                self.store.settle([key])
            except (NotFoundError, StoreUnavailableError):
                return None
        self._apply(data)
        return True

    def _own(self, write: str) -> Entry:
        slot = self._history.writes[write]
        self.store.settle([journal_key(slot)])
        data = self._read(slot, known=True)
        return decode_entry(data or b"", journal_key(slot))

    def _apply(self, data: bytes) -> None:
        key = journal_key(self._history.slots)
        entry = decode_entry(data, key)
        if entry.slot != self._history.slots or (self.run is not None and entry.run != self.run):
            raise CorruptError(
                f"{key} holds slot {entry.slot} of run {entry.run}, not of run {self.run}: repair it from a copy",
                key=key,
            )
        if entry.prev != self._prev:
            raise CorruptError(
                f"{key} follows an entry with digest {entry.prev}, the one before it has {self._prev}: "
                f"one of the two was changed; repair it from a copy",
                key=key,
            )
        self._history.apply(entry)
        self.run = entry.run
        self._prev = digest_of(data)

    def _read(self, slot: int, *, known: bool) -> bytes | None:
        key = journal_key(slot)
        for attempt in range(READ_TRIES):
            try:
                return self.store.read(key)
            except NotFoundError:
                if not known:
                    return None
            self.clock.sleep(min(0.01 * 2**attempt, 0.5))
        raise StoreUnavailableError(
            f"{key} is known to exist but is not found: the store lost it or this is another store; "
            f"check the URL and try again",
            key=key,
        )

    # -- opening at the newest summary

    def _open(self, least: int) -> None:
        """Start at the newest readable summary, found by bisecting keys: slots have no gaps (protocol R9)."""
        self._opened = True
        count = max(least // SUMMARY_EVERY, 0)
        while self._exists((count + 1) * SUMMARY_EVERY):
            count += max(count, 1)
        low, high = 0, count + 1  # low exists (or is 0), high does not or is untested beyond count
        while high - low > 1:
            middle = (low + high) // 2
            if self._exists(middle * SUMMARY_EVERY):
                low = middle
            else:
                high = middle
        for number in range(low, 0, -1):
            if self._start_at(number * SUMMARY_EVERY):
                return

    def _exists(self, slot: int) -> bool:
        try:
            self.store.size(journal_key(slot))
        except NotFoundError:
            return False
        return True

    def _start_at(self, slot: int) -> bool:
        key = journal_key(slot)
        try:
            data = self.store.read(key)
            entry = decode_entry(data, key)
            if not isinstance(entry.body, SummaryEntry) or entry.slot != slot:
                return False
            if self.run is not None and entry.run != self.run:
                return False
            history = History(fold_from_json(entry.body.state, key))
            if history.slots != slot:
                return False
            history.apply(entry)
        except (CorruptError, NotFoundError):
            return (
                False  # the one before it, and replay: the damage is met, and named, when that slot is read
            )
        self._history, self.run, self._prev = history, entry.run, digest_of(data)
        return True
