"""A small job for the simulation: incarnations that take over, members that save, second committers.

Tables are kept as objects instead of Parquet (`quick`), because histories by the hundred are wanted
here and the format is tested elsewhere; the crash enumeration uses the real ones.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from ckptstore import catalog, commit, exchange, incarnation, index, journal, writer
from ckptstore.checkpointer import Checkpointer, SaveHandle
from ckptstore.commit import Committer
from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    CorruptError,
    FencedError,
    InternalError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.held import Frozen, PerRank
from ckptstore.history import History, MarkEntry
from ckptstore.incarnation import Incarnation, Token, begin
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Index, ObjectRef, Part, part_key
from ckptstore.publish import Publisher
from ckptstore.testing.simulated import Chances
from ckptstore.testing.simulation import Simulation
from ckptstore.wire import digest_of
from tests.protocol.oracle import FROZEN, BrokenPromiseError, Oracle, code_of, need

ROSTER = {"trainer": 2, "loop": 1}
MEMBERS = (("trainer", 0), ("trainer", 1), ("loop", 0))
NAMES = {"trainer": ("a", "b", "c"), "loop": ("seen",)}
TIMEOUT_S = 1.5

ROUGH = Chances(
    die=0.002, lost_request=0.01, lost_reply=0.02, late=0.015, pause=0.008, stale=0.1, repeated=0.01
)


@dataclass(frozen=True)
class _OneObject:
    """An index that can only be read whole."""

    chunks: bytes
    side: tuple[Any, ...] = ()

    def ref(self, key: str) -> ObjectRef:
        return ObjectRef(key=key, nbytes=len(self.chunks), digest=digest_of(self.chunks))


class _Tables:
    """Bytes that stand for a table: equal tables of one writer are equal bytes, others never."""

    def __init__(self) -> None:
        self._objects: dict[bytes, Any] = {}

    def encode(self, value: Part | Index) -> bytes:
        data = f"{type(value).__name__} {value.id} {len(self._objects)}".encode()
        self._objects[data] = value
        return data

    def encode_index(self, value: Index, key: str) -> _OneObject:
        return _OneObject(chunks=self.encode(value))

    def decode(self, data: bytes, what: str) -> Any:
        return self._objects[data]


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Tables without Parquet and begins without the probe."""
    tables = _Tables()
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (writer, "encode_part", tables.encode),
            (writer, "decode_part", tables.decode),
            (commit, "decode_part", tables.decode),
            (exchange, "decode_part", tables.decode),
            (catalog, "decode_part", tables.decode),
            (index, "encode_index", tables.encode_index),
            (index, "decode_index", lambda data, what, read: tables.decode(data, what)),
            (incarnation, "probe", lambda store: None),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def state_of(role: str, rank: int) -> dict[str, Any]:
    arrays = {name: np.zeros((2, 3)) for name in NAMES[role]}
    frozen = {"frozen": Frozen({f"{role}.frozen": np.full(4, FROZEN)})} if role == "trainer" else {}
    return {**arrays, **frozen, "rank": PerRank(rank), "code": 0.0}


def fill(state: dict[str, Any], role: str, code: float) -> None:
    for name in NAMES[role]:
        state[name][:] = code
    state["code"] = code


class Loop:
    """One seed: who lives when, and what happens to them."""

    def __init__(self, seed: int, *, chances: Chances | None = None, begins: int | None = None) -> None:
        rng = random.Random(seed ^ 0x5EED)
        rough = rng.random()
        self.chances = chances if chances is not None else (Chances(stale=0.05) if rough < 0.2 else ROUGH)
        if chances is None and 0.2 <= rough < 0.35:
            self.chances = replace(ROUGH, unavailable=0.01)
        if chances is None and rough > 0.6:
            self.chances = replace(ROUGH, die=0.0)
        self.sim = Simulation(seed=seed, chances=self.chances, observe=self._observe)
        self.oracle = Oracle(objects=self.sim.store)
        self.rng = rng
        self.incarnations: list[Incarnation] = []
        self.two_committers = rng.random() < 0.6
        self.marker = rng.random() < 0.3
        self.twice = rng.random() < 0.5
        self.double_life = rng.random() < 0.15
        self.summary_every = rng.choice((256, 3, 5))
        self.publishes = rng.random() < 0.4
        count = begins if begins is not None else rng.choice((1, 2, 2, 3))
        spread_s = rng.choice((0.02, 0.3, 3.0, 3.0))  # begins that race, or take over in mid-save
        self.starts = [rng.uniform(0, 0.02), *(rng.uniform(0, spread_s) for _ in range(count - 1))]

    def _observe(self, key: str, data: bytes) -> None:
        self.oracle.observe(key, data)

    def run(self) -> Oracle:
        """Play the seed; raises the first BrokenPromiseError."""
        try:
            for number, at_s in enumerate(self.starts):
                self.sim.spawn(f"launcher{number}", self._launcher(number, at_s))
            with mock.patch.object(journal, "SUMMARY_EVERY", self.summary_every):
                self.sim.run()
                self.oracle.check()
        finally:
            for inc in self.incarnations:
                inc._stop.set()
        return self.oracle

    # -- processes

    def _launcher(self, number: int, at_s: float) -> Callable[[], None]:
        def run() -> None:
            sim, job = self.sim, f"job{number}"
            sim.clock.sleep(at_s)
            try:
                inc = begin(sim.url, ROSTER, takeover=True, job=job, clock=sim.clock)
            except CkptStoreError as error:
                need(not isinstance(error, (CorruptError, InternalError)), f"begin: {error!r}")
                self.oracle.begins.append((job, error))
                return
            self.incarnations.append(inc)
            self.oracle.begins.append((job, inc.fence))
            for role, rank in MEMBERS:
                sim.spawn(f"{role}{rank}.f{inc.fence}", self._member(inc.token, role, rank))
            if self.two_committers:
                sim.spawn(f"second.f{inc.fence}", self._second(inc.token))
            if self.marker:
                sim.spawn(f"marker.f{inc.fence}", self._marker)
            if self.double_life:
                role, rank = sim.random.choice(MEMBERS)
                sim.spawn(f"{role}{rank}.f{inc.fence}.again", self._member(inc.token, role, rank, late=True))

        return run

    def plan(self, token: Token) -> list[AttemptId]:
        base = token.origin.checkpoint
        first = 10 if base is None else base.step + 10
        made = [(first, 0), (first, 1), (first + 10, 0)] if self.twice else [(first, 0), (first + 10, 0)]
        return [AttemptId(fence=token.fence, step=step, number=number) for step, number in made]

    def _member(self, text: str, role: str, rank: int, *, late: bool = False) -> Callable[[], None]:
        def run() -> None:
            sim, token = self.sim, Token.parse(text)
            if late:
                sim.clock.sleep(sim.random.uniform(0, 1))
            ck = Checkpointer(text, role=role, rank=rank, clock=sim.clock, commit_timeout_s=TIMEOUT_S)
            state = state_of(role, rank)
            try:
                step = ck.restore(state)
            except (StoreUnavailableError, OutcomeUnknownError):
                return  # this rank ends, and the others wait for it in vain
            except (AlreadyExistsError, NotFoundError) as error:
                need(
                    late or self.double_life or not isinstance(error, AlreadyExistsError),
                    f"restore: {error!r}",
                )
                return
            found = {name: state[name].copy() for name in NAMES[role]}
            self.oracle.restored(
                token.fence, f"{role}/{rank}", step, {**found, "code": np.array(state["code"])}
            )
            version = self._published(text, token, role, rank)
            for attempt in self.plan(token):
                try:
                    outcome = self._save(ck, attempt, state, role, version)
                except AlreadyExistsError:
                    return  # the other life has the claim
                if isinstance(outcome, FencedError):
                    return

        return run

    def _published(self, text: str, token: Token, role: str, rank: int) -> int:
        """Publish once, or tell the number that this scenario's cut names anyway."""
        base = token.origin.checkpoint
        number = 0 if base is None else (self.oracle.numbers[base] or 0)
        if not self.publishes or role != "trainer":
            return number
        attempt = AttemptId(fence=token.fence, step=number, kind="p")
        publisher = Publisher(text, role=role, rank=rank, clock=self.sim.clock, timeout_s=TIMEOUT_S)
        outcome: BaseException | None = None
        try:
            publisher.publish(number, {"policy": np.full(3, float(number))})
        except (CkptStoreError, TimeoutError) as error:
            outcome = error
        self.oracle.published.append((attempt, outcome))
        return number

    def _save(
        self, ck: Checkpointer, attempt: AttemptId, state: dict[str, Any], role: str, version: int
    ) -> BaseException | None:
        fill(state, role, code_of(attempt))
        try:
            handle: SaveHandle = ck.save(attempt.step, state, policy_version=version)
        except AlreadyExistsError:
            raise
        except CkptStoreError as error:
            need(not isinstance(error, (CorruptError, InternalError)), f"save: {error!r}")
            return error
        need(handle.attempt == attempt, f"{handle.attempt} was saved as {attempt}")
        fill(state, role, -1.0)  # the trainer goes on at once
        self.sim.wait(handle.done)
        outcome: BaseException | None = None
        try:
            info = handle.result(0)
            need(info.id == attempt, f"{attempt} was told as {info.id}")
        except (CkptStoreError, TimeoutError) as error:
            need(not isinstance(error, (CorruptError, InternalError)), f"result of {attempt}: {error!r}")
            outcome = error
        if self.sim.store.peek(part_key(attempt, ck._member)) is None:
            self.oracle.given_up.add(attempt)
        self.oracle.saves.append((attempt, outcome))
        return outcome

    def _second(self, text: str) -> Callable[[], None]:
        def run() -> None:
            sim, token = self.sim, Token.parse(text)
            sim.clock.sleep(sim.random.choice((0.0, 0.0, 1.0)))
            committer = Committer(
                store=sim.store,
                journal=Journal(sim.store, clock=sim.clock, by="second", run=token.run, known=token.slot + 1),
                fence=token.fence,
                members=token.roster.members,
                leader="trainer",
            )
            for attempt in self.plan(token):
                outcome: BaseException | None = None
                try:
                    committer.run(attempt, timeout_s=sim.random.choice((0.1, 0.5, 3.0)))
                except (CkptStoreError, TimeoutError) as error:
                    need(
                        not isinstance(error, (CorruptError, InternalError)),
                        f"commit of {attempt}: {error!r}",
                    )
                    outcome = error
                self.oracle.saves.append((attempt, outcome))
                if isinstance(outcome, FencedError):
                    return

        return run

    def _marker(self) -> None:
        """Somebody finds damage in a segment of the newest checkpoint, twice, and says so."""
        sim = self.sim
        sim.clock.sleep(sim.random.uniform(0, 2))
        journal_of_marker = Journal(sim.store, clock=sim.clock, by="marker")

        def decide(history: History) -> MarkEntry | None:
            good = history.good()
            if len(good) < 2:
                return None
            segments = tuple(ref.key for ref in self.oracle.indexes[good[-1]].segments)
            return MarkEntry(kind="bad", id=good[-1], segments=segments, reason="found twice")

        with contextlib.suppress(CkptStoreError):
            journal_of_marker.append(decide)


def play(seed: int, **options: Any) -> Oracle:
    """One history, with tables that cost nothing."""
    loop = Loop(seed, **options)
    try:
        return loop.run()
    except Exception as error:
        error.add_note(f"replay: tests.protocol.loop.play({seed}); the last calls:")
        error.add_note("\n".join(loop.sim.log[-40:]))
        raise


__all__ = ["BrokenPromiseError", "Loop", "play", "quick"]
