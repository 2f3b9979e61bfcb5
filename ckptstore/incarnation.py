"""Begin an incarnation: raise the fence, choose the recovery point once for all members.

One caller a job begins; every other process gets the token. The fence entry names what is restored, so
nothing can land between choosing and fencing, and whoever holds an older fence can never commit again.
Argument: protocol R22 to R26; docs/explanation/cuts.md.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckptstore.catalog import RUN_KEY
from ckptstore.clock import Clock, SystemClock, tries
from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    CorruptError,
    FencedError,
    InternalError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    RunInUseError,
    StoreUnavailableError,
)
from ckptstore.history import CHECKPOINT, FenceEntry, History, MarkEntry, Origin, ReleaseEntry
from ckptstore.index import read_index
from ckptstore.journal import Journal, new_id
from ckptstore.manifest import FORMAT, AttemptId, Member, Roster, whole_number
from ckptstore.recovery.point import choose_origin
from ckptstore.store.base import Store, open_store
from ckptstore.store.probe import probe
from ckptstore.wire import (
    canonical,
    decode_run,
    encode_run,
    origin_from_json,
    origin_to_json,
    roster_from_json,
    roster_to_json,
)

BEAT_S = 3.0
RUN_KEY_S = 10.0  # for a store that loses requests to settle who made the run
ALIVE_S = 15.0  # protocol R25: a beat that does not move for so long, on our clock, is a dead job's

PROCESS_JOB = secrets.token_hex(8)  # incarnations of one process are one job


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What a member needs to know of its incarnation; a string in transit. Holds no credentials."""

    url: str
    run: str
    fence: int
    slot: int
    origin: Origin
    roster: Roster
    committer: Member

    def __str__(self) -> str:
        return canonical(
            {
                "url": self.url,
                "run": self.run,
                "fence": self.fence,
                "slot": self.slot,
                "origin": origin_to_json(self.origin),
                "roster": roster_to_json(self.roster),
                "committer": [self.committer.role, self.committer.rank],
            }
        ).decode()

    @classmethod
    def parse(cls, text: str) -> Token:
        try:
            value = json.loads(text)
            return cls(
                url=value["url"],
                run=value["run"],
                fence=int(value["fence"]),
                slot=int(value["slot"]),
                origin=origin_from_json(value["origin"]),
                roster=roster_from_json(value["roster"]),
                committer=Member(role=value["committer"][0], rank=int(value["committer"][1])),
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise InvalidInputError(
                f"{text[:80]!r} is not a token: pass Incarnation.token of the process that called begin",
                token=text,
            ) from error


class Incarnation:
    """One life of the job: a fence, a roster and a recovery point. Close it to let the next one begin at once."""

    def __init__(self, *, token: Token, store: Store, journal: Journal, job: str) -> None:
        self._token = token
        self.store = store
        self.journal = journal
        self.job = job
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    @property
    def token(self) -> str:
        """Hand this to every member's process: `Checkpointer(token, role=…, rank=…)`."""
        return str(self._token)

    @property
    def url(self) -> str:
        return self._token.url

    @property
    def run_id(self) -> str:
        return self._token.run

    @property
    def fence(self) -> int:
        return self._token.fence

    @property
    def origin(self) -> Origin:
        return self._token.origin

    @property
    def roster(self) -> Roster:
        return self._token.roster

    @property
    def step(self) -> int | None:
        """The step that `restore` gives; None on a fresh start (step 0 exists: test `is None`)."""
        id = self._token.origin.checkpoint
        return None if id is None else id.step

    def start_beat(self) -> None:
        """Show newcomers that this job lives, by a counter that moves (protocol R25). Safety never rests on it."""
        with suppress(StoreUnavailableError, OutcomeUnknownError):  # the fence stands, also without a beat
            self._write_beat(0)
        self._beat = threading.Thread(target=self._beat_on, name="ckptstore-beat", daemon=True)
        self._beat.start()

    def _beat_on(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S):
            count += 1
            try:
                self._write_beat(count)
            except CkptStoreError:
                continue  # a missed beat only lets a newcomer in sooner; the fence keeps both safe

    def _write_beat(self, count: int) -> None:
        value = {"job": self.job, "beat": count, "host": socket.gethostname(), "pid": os.getpid()}
        self.store.replace(alive_key(self.fence), canonical(value))

    def close(self) -> None:
        """Append `release`, durable on return, so that the next `begin` need not wait. Safe to call twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._beat is not None:
            self._beat.join()

        def decide(history: History) -> ReleaseEntry | None:
            return ReleaseEntry(fence=self.fence) if history.fence == self.fence else None

        self.journal.append(decide)

    def __enter__(self) -> Incarnation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def alive_key(fence: int) -> str:
    return f"alive/f{fence:04d}"


def begin(
    url: str | os.PathLike[str],
    roster: Mapping[str, int],
    *,
    resume: str | int = "auto",
    takeover: bool = False,
    job: str | None = None,
    committer: tuple[str, int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> Incarnation:
    """Raise the fence of a run (made if it is new) and choose what all members restore; durable on return.

    `roster` gives the required roles and sizes, the first one's rank 0 commits unless `committer` names
    another (role, rank). `resume`: "auto" takes the newest good checkpoint and starts at zero only if
    nothing was ever committed; "must", "never" or a step ask for that. `job` names the job whose lives may
    follow each other without waiting; by default each process is one.

    Raises RunInUseError (the newest incarnation is another job's and alive; `takeover=True` overrides),
    FencedError (another `begin` won the race: stand down), NoRecoveryPointError, NoCheckpointError,
    InvalidInputError (the store fails the probe), CorruptError or UnsupportedFormatError (the journal).
    """
    wanted = Roster.of(roster)
    resume = resume if isinstance(resume, str) else whole_number(resume, "resume", first=0)
    leader = wanted.committer
    if committer is not None:
        leader = Member(role=committer[0], rank=whole_number(committer[1], "the committer's rank"))
    if leader.rank >= wanted.size(leader.role):
        raise InvalidInputError(
            f"committer {leader} is not in the roster {dict(roster)}: name a member of it"
        )
    store = open_store(url, storage_options)
    probe(store)
    clock = clock if clock is not None else SystemClock()
    name = job if job is not None else PROCESS_JOB
    journal = Journal(store, clock=clock, by=f"{socket.gethostname()}:{os.getpid()}")
    founding = _run_of(store, journal, clock)
    history = journal.catch_up()
    if not takeover:
        _check_free(store, history, name, clock)
    entry = _raise_fence(store, journal, wanted, resume, name, founding)
    token = Token(
        url=store.url,
        run=journal.run or "",
        fence=entry.fence,
        slot=journal.history.fold.fence_slot[entry.fence],
        origin=entry.origin,
        roster=wanted,
        committer=leader,
    )
    incarnation = Incarnation(token=token, store=store, journal=journal, job=name)
    incarnation.start_beat()
    return incarnation


def _raise_fence(
    store: Store, journal: Journal, roster: Roster, resume: str | int, job: str, founding: dict[str, Any]
) -> FenceEntry:
    """Append the fence entry, its origin judged on exactly the prefix below it; whoever loses the race stands down."""
    history = journal.catch_up()
    replaces = history.fence
    unreadable = _unreadable(store, history, resume)

    def decide(prefix: History) -> FenceEntry:
        if prefix.fence != replaces:
            raise FencedError(
                f"cannot begin: fence {prefix.fence} was raised while this process tried to replace fence "
                f"{replaces}; stand down, the other incarnation runs",
                step=None,
                held=replaces,
                current=prefix.fence,
            )
        origin, reason = choose_origin(prefix, resume, unreadable=unreadable)
        return FenceEntry(
            fence=replaces + 1,
            replaces=replaces,
            origin=origin,
            reason=reason,
            roster=roster,
            job=job,
            founding=founding if prefix.slots == 0 else None,
        )

    entry = journal.append(decide)
    if entry is None or not isinstance(entry.body, FenceEntry):
        raise InternalError("the journal gave back something other than the fence that was appended")
    with suppress(
        StoreUnavailableError, OutcomeUnknownError
    ):  # the fence stands; whoever meets them next says so
        for id in unreadable:
            _mark_bad(journal, id)
    return entry.body


def _run_of(store: Store, journal: Journal, clock: Clock) -> dict[str, Any]:
    """Read `run.json`, or make it; one of several that try wins, and all read the winner's."""
    for _ in tries(clock, deadline_s=RUN_KEY_S, first_s=0.01):
        try:
            value = decode_run(store.read(RUN_KEY), RUN_KEY)
            store.settle([RUN_KEY])
            journal.run = value["run"]
            return {"format": value["format"], "created": value["created"]}
        except NotFoundError:
            pass
        try:
            store.create(RUN_KEY, encode_run(new_id(), clock.now(), new_id()))
        except (AlreadyExistsError, OutcomeUnknownError):
            continue
    raise OutcomeUnknownError(
        f"{RUN_KEY} on {store.url} could not be settled: look at it", key=RUN_KEY, format=FORMAT
    )


def _check_free(store: Store, history: History, job: str, clock: Clock) -> None:
    """Refuse a run whose newest incarnation is another job's and moves its beat (protocol R25)."""
    fence = history.fence
    if not fence or fence in history.fold.released or history.fold.fences[fence].job == job:
        return
    first = _beat(store, fence)
    if first is None:
        return
    for _ in tries(clock, deadline_s=ALIVE_S, first_s=0.5, most_s=1.0):
        seen = _beat(store, fence)
        if seen is not None and seen != first:
            newest = next(reversed(history.good()), None)
            raise RunInUseError(
                f"{store.url} is in use: fence {fence} of job {seen.get('job')} on {seen.get('host')} (pid "
                f"{seen.get('pid')}) is alive, its newest checkpoint is {newest}; stop it, or pass takeover=True to "
                f"fence it off",
                url=store.url,
                fence=fence,
                job=seen.get("job"),
                host=seen.get("host"),
                newest=newest,
            )


def _mark_bad(journal: Journal, id: AttemptId) -> None:
    def decide(history: History) -> MarkEntry | None:
        if id in history.fold.bad or id not in history.live():
            return None
        return MarkEntry(kind="bad", id=id, segments=(), reason="its index is damaged or gone, read twice")

    journal.append(decide)


def _beat(store: Store, fence: int) -> dict[str, Any] | None:
    try:
        value = json.loads(store.read(alive_key(fence)))
    except (NotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _unreadable(store: Store, history: History, resume: str | int) -> list[AttemptId]:
    """Checkpoints that would be chosen but whose index cannot be read: passed over, with the reason in the entry."""
    skipped: list[AttemptId] = []
    while True:
        try:
            origin, _ = choose_origin(history, resume, unreadable=skipped)
        except NotFoundError:
            return skipped
        except CkptStoreError:
            return skipped  # judged again, and raised, on the prefix that the fence is decided on
        if origin.kind != CHECKPOINT or origin.checkpoint is None:
            return skipped
        if _readable(store, history, origin.checkpoint):
            return skipped
        skipped.append(origin.checkpoint)


def _readable(store: Store, history: History, id: AttemptId) -> bool:
    """Is the index whole? A damaged one is read a second time before it is believed to be damaged."""
    for _ in range(2):
        try:
            read_index(store, history.fold.commits[id].index)
            return True
        except CorruptError:
            continue
    return False
