from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptstore.errors import AlreadyExistsError, InvalidInputError, StoreUnavailableError
from ckptstore.store.base import Buffer, Store
from ckptstore.store.local import LocalStore
from ckptstore.store.memory import MemoryStore
from ckptstore.store.probe import PAIRS, ROUNDS, probe
from ckptstore.testing.faults import Call, Fault, FaultStore, SimulatedCrash


class CheckThenWrite(MemoryStore):
    """What fsspec's generic exclusive create does; the barrier lets all checks happen before any write."""

    def __init__(self) -> None:
        super().__init__(name="check-then-write")
        self._checked = threading.Barrier(2 * PAIRS)

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        if any(info.key == key for info in self.list(key)):
            raise AlreadyExistsError("taken")
        self._checked.wait(60)
        self.replace(key, data)


class Overwriting(MemoryStore):
    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        self.replace(key, data)


class RefusingAll(MemoryStore):
    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        raise AlreadyExistsError("taken")


class Forgetting(MemoryStore):
    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        super().create(key, data)
        self.delete(f"{key}")
        super().create(key, b"")
        self._objects.pop(key)  # gone, and a later create would land


class KeepingTheLosersBytes(MemoryStore):
    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        try:
            super().create(key, data)
        except AlreadyExistsError:
            self.replace(key, data)
            raise


class TakingASecondCreateLater(MemoryStore):
    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        if data == b"late":
            self.replace(key, data)
        else:
            super().create(key, data)


@pytest.mark.parametrize(
    "store",
    [
        CheckThenWrite(),
        Overwriting(),
        RefusingAll(),
        Forgetting(),
        KeepingTheLosersBytes(),
        TakingASecondCreateLater(),
    ],
    ids=lambda store: type(store).__name__,
)
def test_a_store_without_one_winner_is_refused_by_name(store: MemoryStore) -> None:
    with pytest.raises(InvalidInputError, match="cannot hold a run") as caught:
        probe(store)
    assert store.url in str(caught.value)
    assert "probe/" in caught.value.problem
    assert list(store.list("")) == []


def test_an_honest_store_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    stores: list[Store] = [MemoryStore(), LocalStore(root=tmp_path / "run")]
    for store in stores:
        store.create("run.json", b"x")
        probe(store)
        probe(store)
        assert [info.key for info in store.list("")] == ["run.json"]


def test_the_probe_races_two_writers_for_every_key() -> None:
    store = FaultStore(MemoryStore())
    probe(store)
    creates = [call.key for call in store.calls if call.verb == "create"]
    assert (
        set(Counter(creates).values()) == {3} and len(set(creates)) == PAIRS * ROUNDS
    )  # and one comes later


@pytest.mark.parametrize("fault", ["unknown, landed", "unknown, not landed", "exists, landed"])
def test_lost_replies_do_not_condemn_a_store(fault: Fault) -> None:
    def choose(call: Call) -> Fault | None:
        return fault if call.verb == "create" and call.number < 40 and call.number % 3 == 0 else None

    store = FaultStore(MemoryStore(), choose=choose)
    if fault == "exists, landed":  # nobody was told to have won: this is what a probe cannot let pass
        with pytest.raises(InvalidInputError):
            probe(store)
    else:
        probe(store)
    assert list(store.list("")) == []


def test_a_store_that_is_unavailable_is_not_condemned_and_keeps_no_scratch_keys() -> None:
    inner = MemoryStore()

    def choose(call: Call) -> Fault | None:
        return "unavailable" if call.verb == "create" and 50 <= call.number < 60 else None

    store = FaultStore(inner, choose=choose)
    with pytest.raises(StoreUnavailableError):
        probe(store)
    assert list(inner.list("")) == []


def test_a_crash_in_the_probe_passes_through() -> None:
    with pytest.raises(SimulatedCrash):
        probe(FaultStore(MemoryStore(), crash_at=30))
