"""Two committers, two incarnations, members that die, requests that get lost: in every order a seed can give.

Each history is the real code under the simulation; `oracle.py` says what must hold. A failure prints its
seed, and `play(seed)` gives the same history again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from ckptstore.errors import FencedError, IncompleteSaveError
from ckptstore.testing.simulated import NO_CHANCES, Chances
from tests.protocol.loop import MEMBERS, Loop, play, quick

SEEDS = 240
LONG_SEEDS = 20_000
BATCHES = 8


@pytest.fixture(autouse=True)
def quick_tables() -> Iterator[None]:
    with quick():
        yield


@pytest.mark.parametrize("batch", range(BATCHES))
def test_what_callers_are_told_and_what_is_committed_agree_in_any_order(
    batch: int, pytestconfig: pytest.Config
) -> None:
    seeds = range(batch, LONG_SEEDS if pytestconfig.getoption("--long") else SEEDS, BATCHES)
    seen: Counter[str] = Counter()
    for seed in seeds:
        oracle = play(seed)
        seen.update(type(outcome).__name__ for _, outcome in oracle.saves)
        seen["commits"] += len(oracle.commits)
        seen["fences"] += oracle.fence
    # A scenario in which nothing goes wrong, or nothing goes right, proves nothing.
    for name in ("NoneType", "FencedError", "IncompleteSaveError", "commits"):
        assert seen[name] > len(seeds) // 8, f"{name} is too rare: {seen}"
    assert seen["fences"] > len(seeds)


def test_a_seed_replays_exactly() -> None:
    def history(seed: int) -> tuple[list[str], dict[str, bytes]]:
        loop = Loop(seed)
        loop.run()
        return [line.split(" ", 1)[-1] for line in loop.sim.log], loop.sim.store.objects

    for seed in range(3):
        first, again = history(seed), history(seed)
        assert first[0] == again[0], f"{seed=}: other calls"
        assert [key for key in first[1] if not key.startswith("alive/")] == [
            key for key in again[1] if not key.startswith("alive/")
        ], f"{seed=}: other objects"


@pytest.mark.parametrize("seed", range(6))
def test_every_save_is_committed_when_nothing_goes_wrong(seed: int) -> None:
    loop = Loop(seed, chances=NO_CHANCES, begins=1)
    loop.two_committers = loop.marker = loop.double_life = False
    oracle = loop.run()
    plan = loop.plan(loop.incarnations[0]._token)
    assert list(oracle.commits) == plan
    assert Counter(id for id, outcome in oracle.saves if outcome is None) == dict.fromkeys(plan, len(MEMBERS))


@pytest.mark.parametrize("seed", range(6))
def test_a_lost_request_or_reply_alone_never_fails_a_save(seed: int) -> None:
    loop = Loop(seed, chances=Chances(lost_request=0.05, lost_reply=0.05, repeated=0.05, stale=0.2), begins=1)
    loop.two_committers = loop.marker = loop.double_life = False
    oracle = loop.run()
    assert list(oracle.commits) == loop.plan(loop.incarnations[0]._token)
    assert all(outcome is None for _, outcome in oracle.saves), oracle.saves


@pytest.mark.parametrize("seed", range(4))
def test_an_older_incarnation_is_fenced_at_its_next_save_and_the_newer_goes_on(seed: int) -> None:
    loop = Loop(seed, chances=NO_CHANCES, begins=2)
    loop.two_committers = loop.marker = loop.double_life = False
    oracle = loop.run()
    old = [outcome for id, outcome in oracle.saves if id.fence == 1]
    assert all(outcome is None or isinstance(outcome, FencedError | IncompleteSaveError) for outcome in old)
    newest = max(fence for _, fence in oracle.begins if isinstance(fence, int))
    last = next(inc for inc in loop.incarnations if inc.fence == newest)
    assert set(loop.plan(last._token)) <= set(oracle.commits)
