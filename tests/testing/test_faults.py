from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckptstore.errors import AlreadyExistsError, NotFoundError, OutcomeUnknownError, StoreUnavailableError
from ckptstore.store.base import Store
from ckptstore.store.memory import MemoryStore
from ckptstore.testing import FaultStore, SimulatedCrash, StoreConformance, count_calls
from ckptstore.testing.faults import Fault, Lost


class TestFaultStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        yield FaultStore(MemoryStore())

    def again(self, store: Store) -> Store:
        return store


def scenario(store: Store) -> None:
    store.create("a", b"1")
    store.read("a")
    store.replace("b", b"2")
    list(store.list(""))
    store.settle(["a"])
    store.delete("a")
    store.create("c", b"3")


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_crash_takes_effect_at_its_call_and_for_ever(lost: Lost) -> None:
    seen = []
    for crash_at in range(count_calls(scenario, MemoryStore())):
        store = FaultStore(MemoryStore(), crash_at=crash_at, lost=lost)
        with pytest.raises(SimulatedCrash):
            scenario(store)
        with pytest.raises(SimulatedCrash):
            store.size("a")
        seen.append(sorted(info.key for info in store.reboot().list("")))
    requests = [[], ["a"], ["a"], ["a", "b"], ["a", "b"], ["a", "b"], ["b"]]
    assert seen == (requests if lost == "request" else [*requests[1:], ["b", "c"]])


def test_a_crash_is_no_error_that_a_handler_could_swallow() -> None:
    assert not issubclass(SimulatedCrash, Exception)


@pytest.mark.parametrize(
    ("fault", "error", "there"),
    [
        ("unavailable", StoreUnavailableError, False),
        ("unknown, landed", OutcomeUnknownError, True),
        ("unknown, not landed", OutcomeUnknownError, False),
        ("unknown, late", OutcomeUnknownError, False),
        ("exists, landed", AlreadyExistsError, True),
    ],
)
def test_faults_of_create(fault: Fault, error: type[Exception], there: bool) -> None:
    inner = MemoryStore()
    store = FaultStore(inner, faults={1: fault})
    store.create("before", b"")
    with pytest.raises(error):
        store.create("a", b"1")
    assert ("a" in [info.key for info in inner.list("")]) is there
    assert [call.key for call in store.calls] == ["before", "a"]


def test_a_late_request_lands_some_calls_later_with_the_bytes_that_were_sent() -> None:
    inner, memory = MemoryStore(), bytearray(b"sent")
    store = FaultStore(inner, faults={0: "unknown, late"}, late_by=2)
    with pytest.raises(OutcomeUnknownError):
        store.create("a", memory)
    memory[:] = b"over"
    with pytest.raises(NotFoundError):
        store.read("a")
    assert store.read("a") == b"sent"


def test_a_late_request_that_meets_another_object_changes_nothing() -> None:
    store = FaultStore(MemoryStore(), faults={0: "unknown, late"})
    with pytest.raises(OutcomeUnknownError):
        store.create("a", b"late")
    store.create("a", b"first")
    store.land_late()
    assert store.read("a") == b"first"


@pytest.mark.parametrize("land_late", [False, True])
def test_a_late_request_may_arrive_after_its_sender_died(land_late: bool) -> None:
    store = FaultStore(MemoryStore(), faults={0: "unknown, late"})
    with pytest.raises(OutcomeUnknownError):
        store.create("a", b"late")
    after = store.reboot(land_late=land_late)
    assert [info.key for info in after.list("")] == (["a"] if land_late else [])
    with pytest.raises(SimulatedCrash):
        store.read("a")


def test_reads_can_only_be_unavailable() -> None:
    store = FaultStore(MemoryStore(), choose=lambda call: "unknown, landed" if call.verb == "read" else None)
    store.create("a", b"1")
    with pytest.raises(StoreUnavailableError):
        store.read("a")


def test_threads_are_numbered_without_gaps_and_all_die() -> None:
    store, deaths = FaultStore(MemoryStore(), crash_at=40), []

    def write(who: int) -> None:
        try:
            for index in range(20):
                store.create(f"{who}/{index}", b"")
        except SimulatedCrash:
            deaths.append(who)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [call.number for call in store.calls] == list(range(41))
    assert len(list(store.reboot().list(""))) == 40
    assert deaths
