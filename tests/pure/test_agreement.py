"""How the roles' ledgers are joined, what is refused, and a loop that shows why the trainer decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.agreement import PartClaim, account, check_agreement, join_ledgers, unusable_groups
from ckptstore.errors import InconsistentCutError
from ckptstore.intervals import gaps
from ckptstore.ledger import Ledger
from ckptstore.manifest import Member

N = 16


@st.composite
def ledger_pairs(draw: st.DrawFn) -> tuple[Ledger, Ledger]:
    """A trainer's and an owner's ledger in any relation to each other, not only consistent ones."""
    owner, trainer = Ledger(seed=3), Ledger()
    owner.issue(draw(st.integers(0, N)))
    for ordinal in range(N):
        step = draw(st.integers(0, 4))
        if draw(st.booleans()):
            trainer.consume([ordinal], step)
        state = draw(st.sampled_from(["issued", "sealed", "consumed", "dropped"]))
        if state == "consumed":
            owner.consume([ordinal], draw(st.integers(0, 6)))
        elif ordinal < owner.next_ordinal and state == "sealed" and owner.state(ordinal) == "issued":
            owner.seal(ordinal, 0, draw(st.integers(0, 5)), fence=1)
        elif state == "dropped" and owner.state(ordinal) == "issued":
            owner.drop(ordinal, "stale")
    return trainer, owner


@given(ledger_pairs(), st.one_of(st.none(), st.integers(0, 5)))
@settings(max_examples=300, deadline=None)
def test_consumed_wins_over_buffered_and_buffered_over_issued(
    pair: tuple[Ledger, Ledger], version: int | None
) -> None:
    trainer, owner = pair
    joined = join_ledgers(trainer, owner, cut_version=version)
    assert joined.seed == owner.seed
    assert joined.next_ordinal == max(trainer.next_ordinal, owner.next_ordinal)
    for ordinal in range(N + 2):
        assert joined.consumed_at(ordinal) == trainer.consumed_at(ordinal)
        span = owner.sealed().get(ordinal)
        if trainer.consumed_at(ordinal) is not None:
            expected: str | None = "consumed"
        elif owner.state(ordinal) == "dropped":
            expected = "dropped"
        elif span is not None and version is not None and span[1] <= version:
            expected = "sealed"
            assert joined.sealed()[ordinal] == span
        else:
            expected = "issued" if ordinal < joined.next_ordinal else None
        assert joined.state(ordinal) == expected
    settled = [o for o in range(joined.next_ordinal) if joined.state(o) in ("consumed", "dropped")]
    assert joined.owed() == tuple(o for o in range(joined.next_ordinal) if o not in settled)
    assert Ledger.from_json(joined.to_json()) == joined
    assert join_ledgers(joined, joined, cut_version=version) == joined, "joining again changes nothing"
    assert account([joined]).lost == 0


def part(role: str, *ledgers: Ledger, rank: int = 0, step: int = 4, layout: str = "aa") -> PartClaim:
    return PartClaim(member=Member(role=role, rank=rank), step=step, layout=layout, ledgers=ledgers)


@given(ledger_pairs())
@settings(max_examples=200, deadline=None)
def test_only_contradictions_are_refused(pair: tuple[Ledger, Ledger]) -> None:
    trainer, owner = pair
    both = {o for o in range(N) if trainer.state(o) == "consumed" and owner.state(o) == "dropped"}
    two_steps = {
        o
        for o in range(N)
        if None not in (a := (trainer.consumed_at(o), owner.consumed_at(o))) and a[0] != a[1]
    }
    parts = [
        part("trainer", trainer),
        part("trainer", trainer.copy(), rank=1),
        part("loop", owner, layout="bb"),
    ]
    if both or two_steps:
        with pytest.raises(InconsistentCutError):
            check_agreement(parts, step=4, publication=3)
    else:
        assert check_agreement(parts, step=4, publication=3) == join_ledgers(trainer, owner, cut_version=3)


def consumed(ordinals: list[int], step: int) -> Ledger:
    ledger = Ledger()
    ledger.consume(ordinals, step)
    return ledger


def owner_that(**states: Any) -> Ledger:
    ledger = Ledger(seed=1)
    ledger.issue(8)
    for ordinal in states.get("dropped", ()):
        ledger.drop(ordinal, "stale")
    if "consumed" in states:
        ledger.consume(*states["consumed"])
    return ledger


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ([part("trainer", consumed([2, 3], 5))], "ordinals 2 to 3 are consumed at step 5, after the cut"),
        ([part("trainer", consumed([2], 4)), part("loop", owner_that(dropped=[2]))], "dropped"),
        ([part("trainer", consumed([2], 4)), part("loop", owner_that(consumed=([2], 3)))], "step 3"),
        ([part("trainer", consumed([2], 4)), part("trainer", consumed([2], 3), rank=1)], "steps 4 and 3"),
        ([part("trainer"), part("loop", step=3)], "loop/0 saved step 3"),
        ([part("trainer"), part("trainer", rank=1, layout="bb")], "bb by trainer/1"),
        ([part("trainer"), part("loop", owner_that(consumed=([2], 3)))], "recorded by loop"),
    ],
)
def test_what_is_a_bug_at_any_timing_is_refused_by_name(parts: list[PartClaim], names: str) -> None:
    with pytest.raises(InconsistentCutError, match=names):
        check_agreement(parts, step=4, publication=3)


def test_a_role_that_was_quick_or_slow_never_fails_a_cut() -> None:
    trainer = consumed([0, 1], 4)
    ahead = owner_that(consumed=([2, 3], 5))
    joined = check_agreement([part("loop", ahead), part("trainer", trainer)], step=4, publication=2)
    assert joined is not None and joined.owed() == tuple(range(2, 8)) and joined.frontier == 2
    behind = owner_that()
    joined = check_agreement([part("loop", behind), part("trainer", trainer)], step=4, publication=2)
    assert joined is not None and joined.owed() == tuple(range(2, 8))
    assert check_agreement([part("trainer"), part("loop")], step=4) is None


def test_ranks_that_consume_apart_are_added_up() -> None:
    parts = [part("actor", consumed([0, 2], 3)), part("actor", consumed([1], 3), rank=1)]
    joined = check_agreement(parts, step=4, publication=0)
    assert joined is not None and joined.frontier == 3


def test_groups_of_an_abandoned_suffix_or_too_old_are_not_reused() -> None:
    ledger = Ledger()
    ledger.issue(4)
    ledger.seal(0, 3, 4, fence=1)
    ledger.seal(1, 5, 6, fence=1)
    ledger.seal(2, 1, 4, fence=1)
    given_up = unusable_groups(ledger, on_lineage=lambda fence, n: (fence, n) <= (1, 4), oldest_version=2)
    assert given_up == (1, 2)
    ledger.reissue(given_up)
    assert list(ledger.sealed()) == [0] and ledger.owed() == (0, 1, 2, 3)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6), st.integers(0, 20))
def test_gaps_are_what_no_row_covers(rows: list[tuple[int, int]], horizon: int) -> None:
    rows = [(a, b) for a, b in rows if a < b]
    covered = {o for a, b in rows for o in range(a, b)}
    assert [o for a, b in gaps(rows, horizon) for o in range(a, b)] == [
        o for o in range(horizon) if o not in covered
    ]


def test_the_account_of_a_lineage_counts_what_was_lost_and_what_was_trained_twice() -> None:
    first, second = consumed([0, 1, 2], 1), consumed([0, 1, 2, 3], 1)
    assert (account([first, second]).lost, account([first, second]).doubled) == (0, 0)
    assert account([consumed([0, 1, 2, 3], 1), first]).doubled_first == (3,)
    assert account([consumed([3], 1), consumed([3], 2)]).doubled_first == (3,)
    assert account([consumed([3], 1)]).lost_first == (0, 1, 2)
    liar = owner_that(consumed=([3], 1))  # calls 3 consumed, which the weights do not hold
    assert account([first], liar).lost_first == (3,)
    ahead = owner_that(consumed=([3], 2))  # consumed after the cut: a restore owes it again
    assert account([first], ahead).lost == 0
    assert account([]) == account([Ledger()])


class Loop:
    """An owner, a trainer and late reports between them; the trainer is killed and restored from cuts."""

    def __init__(self, seed: int, restore: Callable[[Ledger, Ledger, int], Ledger]) -> None:
        self.random, self.restore = random.Random(seed), restore
        self.trainer, self.owner = Ledger(), Ledger()
        self.weights: list[int] = []
        self.reports: list[tuple[list[int], int]] = []
        self.step = 0
        self.cuts: list[tuple[int, list[int], Ledger]] = [(0, [], Ledger())]
        self.asked: list[tuple[int, list[int], Ledger]] = []

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.random.choice(
                (self.work, self.work, self.work, self.report, self.save, self.join, self.die)
            )()
        while self.reports or self.owner.owed():
            self.report()
            self.work()

    def work(self) -> None:
        if len(self.owner.owed()) < 4 and self.owner.next_ordinal < 60:
            self.owner.issue(4)
        owed = [o for o in self.owner.owed() if self.trainer.consumed_at(o) is None]
        if owed:
            batch, self.step = self.random.sample(owed, min(2, len(owed))), self.step + 1
            self.trainer.consume(batch, self.step)
            self.weights += batch
            self.reports.append((batch, self.step))

    def report(self) -> None:
        if self.reports:
            self.owner.consume(*self.reports.pop(0))

    def save(self) -> None:
        self.asked.append((self.step, list(self.weights), self.trainer.copy()))

    def join(self) -> None:
        if self.asked:
            step, weights, trainer = self.asked.pop(0)
            self.cuts.append((step, weights, self.restore(trainer, self.owner, step)))

    def die(self) -> None:
        step, weights, ledger = self.cuts[-1]
        self.step, self.weights, self.owner = step, list(weights), ledger.copy()
        self.trainer = Ledger()
        for start, stop, at in ledger.consumed:
            self.trainer.consume(range(start, stop), at)
        self.reports, self.asked = [], []


def by_the_trainer(trainer: Ledger, owner: Ledger, step: int) -> Ledger:
    parts = [part("trainer", trainer, step=step), part("loop", owner, step=step)]
    joined = check_agreement(parts, step=step, publication=step)
    assert joined is not None
    return joined


def by_the_owner(trainer: Ledger, owner: Ledger, step: int) -> Ledger:
    return owner.copy()  # the planted bug: its record of consumption is late, or ahead


def wrong_weights(restore: Callable[[Ledger, Ledger, int], Ledger]) -> int:
    wrong = 0
    for seed in range(60):
        loop = Loop(seed, restore)
        loop.run(150)
        wrong += sorted(loop.weights) != list(range(loop.owner.next_ordinal))
    return wrong


def test_every_ordinal_is_trained_exactly_once_when_the_trainer_decides() -> None:
    assert wrong_weights(by_the_trainer) == 0


def test_the_planted_bug_consumption_kept_by_the_owner_is_caught() -> None:
    assert wrong_weights(by_the_owner) > 0
