"""The journal: slots won once whatever gets lost, summaries, damage, and what a prefix means."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore import incarnation
from ckptstore import journal as journal_module
from ckptstore.errors import CorruptError, OutcomeUnknownError, StoreUnavailableError, UnsupportedFormatError
from ckptstore.history import (
    ADOPT,
    CHECKPOINT,
    START,
    AbandonEntry,
    Body,
    CommitEntry,
    Entry,
    FenceEntry,
    Fold,
    History,
    MarkEntry,
    Origin,
    PublishEntry,
    ReleaseEntry,
    RetireEntry,
    SummaryEntry,
)
from ckptstore.incarnation import begin
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, ObjectRef, Roster, journal_key
from ckptstore.recovery.point import choose_origin
from ckptstore.store.memory import MemoryStore
from ckptstore.testing.clock import FakeClock
from ckptstore.testing.faults import Fault, FaultStore
from ckptstore.testing.simulated import Chances, mounted
from ckptstore.testing.simulation import Simulation
from ckptstore.wire import canonical, decode_entry, digest_of, encode_entry, fold_from_json, fold_to_json
from tests.protocol.planting import plant

REF = ObjectRef(key="index/none", nbytes=1, digest="0" * 32)


def fence(number: int, origin: Origin = Origin(kind=START)) -> FenceEntry:  # noqa: B008  # frozen
    return FenceEntry(
        fence=number,
        replaces=number - 1,
        origin=origin,
        reason=None,
        roster=Roster.of({"trainer": 1}),
        job=f"job{number}",
        founding={"format": 1} if number == 1 else None,
    )


def commit(fence: int, step: int, publication: int | None = None) -> CommitEntry:
    return CommitEntry(
        fence=fence,
        id=AttemptId(fence=fence, step=step),
        index=REF,
        witnesses={},
        level="home",
        publication=None if publication is None else (publication, None),
        counters={},
    )


def publish(fence: int, number: int) -> PublishEntry:
    return PublishEntry(fence=fence, number=number, base=None, index=REF, digest=f"{fence}.{number}")


def mark(number: int) -> MarkEntry:
    return MarkEntry(kind="bad", id=AttemptId(fence=1, step=number), segments=(f"s{number}",), reason="x")


def journal_of(store: Any, **options: Any) -> Journal:
    return Journal(store, clock=FakeClock(), run=options.pop("run", "r"), **options)


def filled(count: int, *, store: MemoryStore | None = None) -> MemoryStore:
    """A journal of `count` slots or a few more: a fence and marks."""
    store = store if store is not None else MemoryStore(name="filled")
    journal = journal_of(store)
    journal.append(lambda _: fence(1))
    while journal.history.slots < count:
        number = journal.history.slots
        journal.append(lambda _, number=number: mark(number))  # type: ignore[misc]  # mypy infers no lambda with a default
    return store


def replayed(store: MemoryStore) -> History:
    history = History()
    while (data := store._objects.get(journal_key(history.slots))) is not None:
        history.apply(decode_entry(data, "slot"))
    return history


def reforged(store: MemoryStore, slot: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an entry as a program would, with the right check, and every link after it."""
    prev = None
    while (data := store._objects.get(journal_key(slot))) is not None:
        value = json.loads(data)
        del value["check"]
        if prev is None:
            change(value)
        else:
            value["prev"] = prev
        data = canonical({**value, "check": digest_of(canonical(value))})
        store._objects[journal_key(slot)] = data
        prev, slot = digest_of(data), slot + 1


# -- slots


def test_racing_appends_each_land_once_whatever_is_lost() -> None:
    for seed in range(12):
        chances = Chances(lost_request=0.06, lost_reply=0.06, late=0.05, repeated=0.05, stale=0.2, pause=0.02)
        sim = Simulation(seed=seed, chances=chances)
        told: dict[int, bool | None] = {}

        def writer(
            number: int, sim: Simulation = sim, told: dict[int, bool | None] = told
        ) -> Callable[[], None]:
            def run() -> None:
                journal = Journal(sim.store, clock=sim.clock, run="r")
                for mine in range(4):
                    step = number * 10 + mine
                    try:
                        told[step] = journal.append(lambda _, step=step: mark(step)) is not None  # type: ignore[misc]  # mypy infers no lambda with a default
                    except OutcomeUnknownError:
                        told[step] = None

            return run

        for number in range(4):
            sim.spawn(f"writer{number}", writer(number))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal_module, "SUMMARY_EVERY", 5)
            sim.run()
        history = History()
        landed: list[int] = []
        while (data := sim.store.peek(journal_key(history.slots))) is not None:
            entry = decode_entry(data, "slot")
            assert isinstance(entry.body, SummaryEntry) == (entry.slot > 0 and entry.slot % 5 == 0)
            if isinstance(entry.body, MarkEntry):
                landed.append(entry.body.id.step)
            history.apply(entry)
        assert len(landed) == len(set(landed)), f"{seed=}: an append landed twice"
        assert {step for step, done in told.items() if done} <= set(landed)
        assert history.slots == sum(key.startswith("journal/") for key in sim.store.objects), "a gap"


FAULTS: tuple[Fault, ...] = ("unknown, landed", "unknown, not landed", "unknown, late", "exists, landed")


def verbs_of_an_append() -> list[str]:
    store = FaultStore(filled(3))
    journal_of(store).append(lambda _: mark(99))
    return [call.verb for call in store.calls]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_reply_is_settled_by_reading_the_slot(fault: Fault) -> None:
    for number, verb in enumerate(verbs_of_an_append()):
        inner = filled(3)
        store = FaultStore(inner, faults={number: fault})
        try:
            entry = journal_of(store).append(lambda _: mark(99))
        except StoreUnavailableError:
            assert verb != "create", "an outcome that is not known was told as none"
            continue
        store.land_late()
        history = replayed(inner)
        assert entry is not None and entry.slot == 3 and history.slots == 4
        assert AttemptId(fence=1, step=99) in history.fold.bad


def test_a_create_that_did_not_land_is_unavailable_and_one_that_may_have_landed_is_unknown() -> None:
    at = verbs_of_an_append().index("create")
    with pytest.raises(StoreUnavailableError):
        journal_of(FaultStore(filled(3), faults={at: "unavailable"})).append(lambda _: mark(99))
    inner = filled(3)
    down: Callable[[Any], Fault | None] = lambda call: "unavailable" if call.number > at else None  # noqa: E731  # a def would hide the one line
    store = FaultStore(inner, faults={at: "unknown, landed"}, choose=down)
    with pytest.raises(OutcomeUnknownError, match="read the journal"):
        journal_of(store).append(lambda _: mark(99))
    assert AttemptId(fence=1, step=99) in replayed(inner).fold.bad


def test_a_rule_is_judged_on_exactly_the_prefix_below_the_slot() -> None:
    store = filled(3)
    mine, other = journal_of(store), journal_of(store)
    seen: list[int] = []

    def decide(history: History) -> Body:
        seen.append(history.slots)
        if len(seen) == 1:
            other.append(lambda _: mark(50))  # wins the slot between our look and our create
        return mark(51)

    entry = mine.append(decide)
    assert seen == [3, 4] and entry is not None and entry.slot == 4


def test_a_known_slot_that_is_not_found_is_a_failed_read_and_never_the_end() -> None:
    store = filled(6)
    del store._objects[journal_key(5)]
    assert journal_of(store).catch_up().slots == 5
    with pytest.raises(StoreUnavailableError, match="00000000000000000005"):
        journal_of(store).catch_up(6)
    with pytest.raises(StoreUnavailableError, match="00000000000000000005"):
        journal_of(store, known=6).catch_up()


# -- summaries


@pytest.fixture
def small_summaries(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(journal_module, "SUMMARY_EVERY", 4)
    return 4


def test_slots_256_and_512_are_summaries_and_an_opener_reads_few_slots() -> None:
    store = filled(520)
    kinds = {slot: json.loads(store._objects[journal_key(slot)])["kind"] for slot in range(520)}
    assert {slot for slot, kind in kinds.items() if kind == "summary"} == {256, 512}
    counted = FaultStore(store)
    journal = journal_of(counted)
    assert journal.catch_up().fold == replayed(store).fold
    assert sum(call.verb == "read" for call in counted.calls) < 14, [c.key for c in counted.calls]
    assert sum(call.verb == "size" for call in counted.calls) < 8
    assert not any(call.verb == "list" for call in counted.calls)


@pytest.mark.parametrize("count", [*range(1, 14), 33, 64])
def test_opening_by_bisection_gives_what_a_replay_gives(count: int, small_summaries: int) -> None:
    store = filled(count)
    for known in (0, count // 2, count):
        journal = journal_of(store, known=known)
        assert journal.catch_up().fold == replayed(store).fold
        entry = journal.append(lambda _, known=known: mark(1000 + known))  # type: ignore[misc]  # mypy infers no lambda with a default
        assert entry is not None


def test_a_summary_that_cannot_be_read_falls_back_to_the_one_before(small_summaries: int) -> None:
    whole = replayed(filled(11)).fold
    missing = FaultStore(filled(11), choose=_unavailable_once(journal_key(8)))
    with pytest.raises(StoreUnavailableError):
        journal_of(missing).catch_up()
    store = filled(11)

    def forget(value: dict[str, Any]) -> None:
        value["state"] = {"of": "a later version"}

    reforged(store, 8, forget)
    counted = FaultStore(store)
    assert journal_of(counted).catch_up().fold == whole
    reads = [call.key for call in counted.calls if call.verb == "read"]
    assert journal_key(4) in reads and journal_key(1) not in reads
    reforged(store, 4, forget)
    assert journal_of(store).catch_up().fold == whole


def _unavailable_once(key: str) -> Callable[[Any], Fault | None]:
    seen: list[str] = []

    def choose(call: Any) -> Fault | None:
        if call.key == key and call.verb == "read" and not seen:
            seen.append(key)
            return "unavailable"
        return None

    return choose


def rich_history() -> History:
    """One of everything that a fold can hold."""
    id = AttemptId(fence=1, step=10)
    bodies: list[Body] = [
        fence(1),
        publish(1, 0),
        commit(1, 10, 0),
        AbandonEntry(fence=1, id=AttemptId(fence=1, step=11), reason="slow"),
        commit(1, 12, 0),
        mark(12),
        RetireEntry(ids=(AttemptId(fence=1, step=12),), policy="p"),
        ReleaseEntry(fence=1),
        fence(2, Origin(kind=CHECKPOINT, checkpoint=id)),
        publish(2, 0),
        AbandonEntry(fence=2, id=AttemptId(fence=2, step=20), reason="slow"),
    ]
    return folded(bodies)


def folded(bodies: list[Body]) -> History:
    history = History()
    for slot, body in enumerate(bodies):
        history.apply(Entry(slot=slot, run="r", write=f"{slot}", prev="", at="now", by="", body=body))
    return history


def test_a_summary_carries_every_field_of_the_fold() -> None:
    fold = rich_history().fold
    assert all(getattr(fold, name) for name in Fold.__dataclass_fields__), "the example lacks a field"
    told = fold_from_json(json.loads(canonical(fold_to_json(fold))), "summary")
    for name in Fold.__dataclass_fields__:
        kept = getattr(fold, name)
        if name == "abandoned":  # attempts of older fences are void without it
            kept = {id: reason for id, reason in kept.items() if id.fence == fold.fence}
        assert getattr(told, name) == kept, name


@pytest.mark.parametrize("name", sorted(fold_to_json(Fold())))
def test_a_summary_that_drops_a_field_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fold = rich_history().fold
    told = fold_to_json(fold)
    told[name] = type(told[name])()
    try:
        assert fold_to_json(fold_from_json(told, "summary")) != fold_to_json(fold)
    except CorruptError as error:
        assert "summary" in str(error) or "continues from" in str(error)


@pytest.mark.parametrize(
    "origin",
    [
        Origin(kind="checkpoint", checkpoint=AttemptId(fence=2, step=1)),
        Origin(kind="checkpoint"),
        Origin(kind="adopt", fence=2),
        Origin(kind="adopt", fence=9),
        Origin(kind="adopt"),
        Origin(kind="other"),
    ],
    ids=str,
)
def test_a_fence_that_continues_from_nothing_before_it_is_refused(origin: Origin) -> None:
    """Its lineage would have no end, and every question to it would wait for one."""
    history = rich_history()
    entry = FenceEntry(
        fence=history.fence + 1,
        replaces=history.fence,
        origin=origin if origin.fence != 2 else Origin(kind="adopt", fence=history.fence + 1),
        reason=None,
        roster=Roster.of({"trainer": 1}),
        job="job",
    )
    with pytest.raises(CorruptError, match="continues from"):
        history.fold.check_fence(entry)
    history.fold.fences[entry.fence], history.fold.fence_slot[entry.fence] = entry, history.slots
    with pytest.raises(CorruptError, match="continues from"):
        fold_from_json(fold_to_json(history.fold), "summary")


# -- damage


def test_any_byte_changed_in_any_slot_is_named_and_refused() -> None:
    whole = filled(5)
    rng = random.Random(5)
    for slot in range(whole_slots := 5):
        for _ in range(40):
            data = bytearray(whole._objects[journal_key(slot)])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            store = MemoryStore(name="damaged")
            store._objects.update(whole._objects)
            store._objects[journal_key(slot)] = bytes(data)
            with pytest.raises((CorruptError, UnsupportedFormatError), match=journal_key(slot)):
                journal_of(store).catch_up(whole_slots)


def test_an_entry_replaced_by_a_valid_one_of_another_place_is_refused() -> None:
    store = filled(6)
    store._objects[journal_key(3)] = store._objects[journal_key(4)]
    with pytest.raises(CorruptError, match=journal_key(3)):
        journal_of(store).catch_up()
    store = filled(6)
    other = encode_entry(Entry(slot=3, run="r", write="w", prev="elsewhere", at="", by="", body=mark(3)))
    store._objects[journal_key(3)] = other
    with pytest.raises(CorruptError, match="follows an entry"):
        journal_of(store).catch_up()
    with pytest.raises(CorruptError, match="run"):
        journal_of(filled(6), run="another").catch_up()


@pytest.mark.parametrize("kind", ["pin", "compact", "something new"])
def test_an_unknown_kind_is_refused_and_never_skipped(kind: str) -> None:
    store = filled(6)
    reforged(store, 3, lambda value: value.update(kind=kind))
    with pytest.raises(UnsupportedFormatError, match=kind):
        journal_of(store).catch_up()


def damaged(store: MemoryStore) -> None:
    store._objects[journal_key(1)] = store._objects[journal_key(1)][:-2] + b" }"


def gone(store: MemoryStore) -> None:
    del store._objects[journal_key(1)]


def newer(store: MemoryStore) -> None:
    reforged(store, 1, lambda value: value.update(kind="pin"))


@pytest.mark.parametrize(
    ("harm", "error"),
    [(damaged, CorruptError), (gone, StoreUnavailableError), (newer, UnsupportedFormatError)],
)
def test_begin_refuses_a_journal_with_a_bad_slot_and_writes_nothing(
    harm: Callable[[MemoryStore], None], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incarnation, "probe", lambda store: None)
    store = MemoryStore(name="harmed")
    with mounted(store, "harmed") as url:
        for job in range(3):
            inc = begin(url, {"trainer": 1}, takeover=True, job=str(job), clock=FakeClock())
            inc._stop.set()
        harm(store)
        before = dict(store._objects)
        with pytest.raises(error, match=journal_key(1)):
            begin(url, {"trainer": 1}, takeover=True, job="next", clock=FakeClock())
        assert store._objects == before


# -- what a prefix means


def random_history(seed: int) -> History:
    """Fences that start, restore any checkpoint or adopt; commits and publications in between."""
    rng = random.Random(seed)
    history = folded([fence(1)])
    for _ in range(rng.randrange(3, 30)):
        choice, now = rng.random(), history.fence
        if choice < 0.25:
            committed = list(history.fold.commits)
            origins = [Origin(kind=START), Origin(kind=ADOPT, fence=now)]
            origins += [Origin(kind=CHECKPOINT, checkpoint=id) for id in committed] * 3
            body: Body = fence(now + 1, rng.choice(origins))
        elif choice < 0.7:
            newest = history.newest_commit(now)
            served = history.served()
            body = commit(now, (newest.step if newest else 0) + 10, served.number if served else None)
        else:
            body = publish(now, history.due_number())
        history.apply(
            Entry(slot=history.slots, run="r", write=str(history.slots), prev="", at="", by="", body=body)
        )
    return history


def ancestors(history: History) -> list[int]:
    """Slots that are the past of the newest fence, walked back one entry at a time."""
    fold = history.fold
    owner = {slot: fence for fence, slot in fold.fence_slot.items()}
    past, at, fence = [], history.slots - 1, history.fence
    while at >= 0:
        past.append(at)
        if owner.get(at) == fence:
            origin = fold.fences[fence].origin
            if origin.kind == START:
                break
            if origin.kind == CHECKPOINT and origin.checkpoint is not None:
                at, fence = fold.commit_slot[origin.checkpoint], origin.checkpoint.fence
                continue
            fence = origin.fence or 0
        at -= 1
    return past


@pytest.mark.parametrize("seed", range(60))
def test_the_lineage_is_what_a_walk_back_through_the_entries_meets(seed: int) -> None:
    history = random_history(seed)
    past = set(ancestors(history))
    for id, slot in history.fold.commit_slot.items():
        # The walk also meets slots of fences in between; only the entries of the chain's fences count.
        chain = dict(history.chain())
        assert history.on_lineage(id) == (slot in past and id.fence in chain and slot < chain[id.fence])
        assert history.on_lineage(id) == _descends(history, id)
    good = history.good()
    assert list(good) == sorted(good, key=history.fold.commit_slot.__getitem__)
    if good:
        assert choose_origin(history, "auto")[0].checkpoint == good[-1]


def _descends(history: History, id: AttemptId) -> bool:
    """Does the newest fence descend from this commit? By R23's words, recursively."""

    def past_of(fence: int, until: int) -> set[AttemptId]:
        own = {c for c, slot in history.fold.commit_slot.items() if c.fence == fence and slot < until}
        origin = history.fold.fences[fence].origin
        if origin.kind == ADOPT and origin.fence is not None:
            return own | past_of(origin.fence, history.slots)
        if origin.checkpoint is not None:
            return own | past_of(origin.checkpoint.fence, history.fold.commit_slot[origin.checkpoint] + 1)
        return own

    return id in past_of(history.fence, history.slots)


def test_latest_is_the_newest_of_the_lineage_and_not_the_highest_step() -> None:
    first = AttemptId(fence=1, step=10)
    history = folded(
        [
            fence(1),
            commit(1, 10),
            commit(1, 20),
            commit(1, 30),
            fence(2, Origin(kind=CHECKPOINT, checkpoint=first)),
        ]
    )
    assert history.good() == (first,)
    assert history.status(AttemptId(fence=1, step=30)) == "abandoned"
    history.apply(Entry(slot=5, run="r", write="5", prev="", at="", by="", body=commit(2, 20)))
    assert history.good() == (first, AttemptId(fence=2, step=20))


def numbers(*bodies: Body) -> int:
    return folded(list(bodies)).due_number()


def test_publication_numbers_follow_the_lineage() -> None:
    ten = Origin(kind=CHECKPOINT, checkpoint=AttemptId(fence=1, step=10))
    assert numbers(fence(1)) == 0
    assert numbers(fence(1), publish(1, 0), publish(1, 1)) == 2
    past = (fence(1), publish(1, 0), publish(1, 1), commit(1, 10, 1), publish(1, 2), publish(1, 3))
    assert numbers(*past, fence(2, ten)) == 1, "first the cut's publication again"
    assert numbers(*past, fence(2, ten), publish(2, 1)) == 2, "then one more each time"
    assert numbers(*past, fence(2, Origin(kind=ADOPT, fence=1))) == 4, "an adopted life counts on"
    assert numbers(*past, fence(2)) == 0, "a fresh start begins anew"
    bare = (fence(1), publish(1, 0), commit(1, 10), publish(1, 1))
    assert numbers(*bare, fence(2, ten)) == 0, "nothing is known to be below a cut that names none"


def test_a_version_is_current_only_below_the_cut_through_which_the_newest_fence_descends() -> None:
    ten = Origin(kind=CHECKPOINT, checkpoint=AttemptId(fence=1, step=10))
    past = [fence(1), publish(1, 0), publish(1, 1), commit(1, 10, 1), publish(1, 2)]
    history = folded([*past, fence(2, ten)])
    assert history.served() is None, "none is served between a fence and its first publish"
    assert [history.version_on_lineage(1, n) for n in range(3)] == [True, True, False]
    history = folded([*past, fence(2, ten), publish(2, 1)])
    served = history.served()
    assert served is not None and (served.fence, served.number) == (2, 1)
    assert history.version_on_lineage(2, 1) and not history.version_on_lineage(3, 0)
    adopted = folded([*past, fence(2, Origin(kind=ADOPT, fence=1))])
    served = adopted.served()
    assert served is not None and (served.fence, served.number) == (1, 2)
    assert adopted.version_on_lineage(1, 2)


def test_a_slot_known_from_the_token_is_what_the_planted_bug_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Journal, "catch_up", ("least = max(least, self._known)", "pass"))
    store = filled(6)
    del store._objects[journal_key(5)]
    assert journal_of(store, known=6).catch_up().slots == 5
