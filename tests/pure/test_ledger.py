"""The ledger against a dictionary of states, and the form in which it is stored."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.ledger import Ledger


class NaiveLedger:
    """One dictionary entry an ordinal: slow, and plainly right."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Any, ...]] = {}
        self.next = 0

    def issue(self, count: int) -> tuple[int, ...]:
        given_out = tuple(range(self.next, self.next + count))
        self.states.update((o, ("issued",)) for o in given_out)
        self.next += count
        return given_out

    def held(self, ordinal: int) -> str | None:
        return self.states.get(ordinal, (None,))[0]

    def seal(self, ordinal: int, first: int, last: int) -> bool:
        if self.held(ordinal) != "issued":
            return False
        self.states[ordinal] = ("sealed", first, last, 0)
        return True

    def reissue(self, ordinals: list[int]) -> bool:
        if any(self.held(o) not in ("issued", "sealed") for o in ordinals):
            return False
        self.states.update((o, ("issued",)) for o in ordinals)
        return True

    def consume(self, ordinals: list[int], step: int) -> bool:
        if len(set(ordinals)) < len(ordinals) or any(
            self.held(o) in ("consumed", "dropped") for o in ordinals
        ):
            return False
        self.states.update((o, ("consumed", step)) for o in ordinals)
        self.next = max([self.next, *(o + 1 for o in ordinals)])
        return True

    def drop(self, ordinal: int, reason: str) -> bool:
        if self.held(ordinal) not in ("issued", "sealed"):
            return False
        self.states[ordinal] = ("dropped", reason)
        return True


def accepted(call: Any, *args: Any) -> bool:
    try:
        call(*args)
    except InvalidInputError:
        return False
    return True


ordinals = st.integers(0, 24)
actions = st.one_of(
    st.tuples(st.just("issue"), st.integers(0, 6)),
    st.tuples(st.just("seal"), ordinals, st.integers(0, 3), st.integers(3, 6)),
    st.tuples(st.just("reissue"), st.lists(ordinals, max_size=3)),
    st.tuples(st.just("consume"), st.lists(ordinals, max_size=5), st.integers(0, 3)),
    st.tuples(st.just("drop"), ordinals, st.sampled_from(["stale", "length"])),
)


def agree(ledger: Ledger, naive: NaiveLedger) -> None:
    by_state = {name: [o for o in naive.states if naive.held(o) == name] for name in ledger.counts()}
    assert ledger.counts() == {name: len(held) for name, held in by_state.items()}
    assert ledger.owed() == tuple(sorted(by_state["issued"] + by_state["sealed"]))
    assert ledger.next_ordinal == naive.next
    unsettled = (o for o in range(naive.next + 1) if naive.held(o) not in ("consumed", "dropped"))
    assert ledger.frontier == next(unsettled)
    for ordinal in range(30):
        assert ledger.state(ordinal) == naive.held(ordinal)
        was = naive.states.get(ordinal, ())
        assert ledger.consumed_at(ordinal) == (was[1] if was and was[0] == "consumed" else None)
    assert ledger.sealed() == {o: naive.states[o][1:] for o in sorted(by_state["sealed"])}


@given(st.lists(actions, max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_interleaving_equals_a_dictionary_of_states(steps: list[tuple[Any, ...]]) -> None:
    ledger, naive = Ledger(seed=5), NaiveLedger()
    for name, *args in steps:
        before = ledger.to_json()
        if name == "issue":
            assert ledger.issue(*args) == naive.issue(*args)
        elif not getattr(naive, name)(*args):
            assert not accepted(getattr(ledger, name), *args)
            assert ledger.to_json() == before, "a refused call changed something"
        else:
            assert accepted(getattr(ledger, name), *args), (name, args)
        agree(ledger, naive)
    told = json.loads(json.dumps(ledger.to_json()))
    again = Ledger.from_json(told)
    assert again == ledger
    assert again.to_json() == ledger.to_json()
    agree(again, naive)
    other = Ledger(seed=1)
    other.issue(3)
    other.load_json(told)
    assert other == ledger and other.seed == 5
    clone = ledger.copy()
    clone.consume([100], 9)
    agree(ledger, naive)
    assert clone != ledger


def damage(value: Any, data: st.DataObject) -> None:
    """Change one thing inside a told ledger."""
    place = value
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, list) and inner and data.draw(st.booleans()):
            place = inner
            continue
        place[key] = data.draw(st.sampled_from([None, -1, 3, 2.0, True, "x", "", [], [1], [[2, 1, 0]], {}]))
        return


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_damaged_ledger_is_refused_or_is_another_whole_one(data: st.DataObject) -> None:
    ledger = Ledger(seed=7)
    ledger.issue(12)
    ledger.consume([0, 1, 2], 1)
    ledger.consume([3, 5], 2)
    ledger.drop(6, "stale")
    ledger.seal(7, 1, 2, fence=3)
    value = copy.deepcopy(ledger.to_json())
    damage(value, data)
    target = Ledger()
    target.issue(2)
    before = target.to_json()
    try:
        target.load_json(value)
    except CorruptError:
        assert target.to_json() == before
    else:
        assert target.to_json() == value  # a ledger that could have been told
        assert type(target.seed) is int


@pytest.mark.parametrize(
    ("field", "rows"),
    [
        ("issued", [[0, 1]]),  # consumed too
        ("consumed", [[0, 2, 1], [2, 3, 1]]),  # not merged
        ("consumed", [[4, 5, 1], [0, 1, 1]]),  # not sorted
        ("consumed", [[0, 99, 1]]),  # not below next
        ("sealed", [[7, 2, 1, 0]]),
        ("sealed", [[7, 1, 1, 0], [7, 1, 1, 0]]),
        ("sealed", 7),
        ("dropped", [[9, 10, ""]]),
    ],
)
def test_what_a_ledger_cannot_have_told_is_corrupt(field: str, rows: Any) -> None:
    ledger = Ledger()
    ledger.issue(10)
    ledger.consume([0, 1, 2], 1)
    with pytest.raises(CorruptError, match="not a ledger"):
        Ledger.from_json({**ledger.to_json(), field: rows})


def test_a_trainer_refuses_what_it_has_consumed_naming_all() -> None:
    trainer = Ledger()
    trainer.consume([4, 5, 6], 1)
    with pytest.raises(InvalidInputError, match="4, 6 already consumed") as found:
        trainer.consume([3, 4, 6, 7], 2)
    assert found.value.consumed == (4, 6)
    assert [trainer.consumed_at(o) for o in (3, 4, 7)] == [None, 1, None]
    with pytest.raises(InvalidInputError):
        trainer.consume([8, 8], 2)


def test_a_million_ordinals_in_order_stay_small() -> None:
    ledger = Ledger()
    for step in range(1000):
        ledger.consume(ledger.issue(1000), step)
    assert ledger.frontier == 1_000_000
    assert len(json.dumps(ledger.to_json())) < 32_000


@given(st.permutations(range(8)), st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_the_stored_form_does_not_depend_on_the_order_of_calls(order: list[int], steps: list[int]) -> None:
    one, other = Ledger(), Ledger()
    for ordinal in range(8):
        one.consume([ordinal], steps[ordinal])
        other.consume([order[ordinal]], steps[order[ordinal]])
    assert one.to_json() == other.to_json()
    rows = one.to_json()["consumed"]
    assert len(rows) == 1 + sum(a != b for a, b in itertools.pairwise(steps))
