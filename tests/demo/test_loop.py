"""The loop survives a death at any call: members in threads, real saves on a memory store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import ckptstore
from ckptstore.agreement import account
from ckptstore.demo.loop import Loop
from ckptstore.demo.notes import Fenced, read_story
from ckptstore.ledger import Ledger
from ckptstore.recovery.launcher import Call
from tests.demo.cluster import CoordinatorDied, FakeCluster, FakeLauncher, Quiet, final, run_coordinator, spec

_URLS = (f"memory://loop-{number}" for number in itertools.count())


@pytest.fixture
def url() -> str:
    return next(_URLS)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[tuple[object, ...], list[tuple[str, str]], int]:
    """The final state of a run without deaths, the calls that it made, and those of its coordinator."""
    url, cluster = next(_URLS), FakeCluster()
    outside = Quiet()
    assert run_coordinator(cluster, spec(url), outside).finished
    cluster.close()
    return final(url), cluster.ground.log, len(cluster.ground.log)


def check(url: str, expected: tuple[object, ...]) -> None:
    assert final(url) == expected
    run = ckptstore.open(url)
    steps = [info.step for info in run.checkpoints() if info.status == "ok"]
    ledgers = [run.read(step, names="ledger")["ledger"] for step in steps]
    counted = account(ledgers, run.read(role="loop")["ledger"])
    assert (counted.issued, counted.consumed, counted.lost, counted.doubled) == (20, 20, 0, 0)
    assert run.verify().ok


def points(log: list[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    """Every call of the log as (member, verb, how many times before)."""
    counts: dict[tuple[str, str], int] = {}
    for who, verb in log:
        number = counts.get((who, verb), 0)
        counts[who, verb] = number + 1
        yield who, verb, number


def test_an_undisturbed_run_counts_every_ordinal_once(
    undisturbed: tuple[tuple[object, ...], object, object],
) -> None:
    expected = undisturbed[0]
    assert expected[1] == 5
    assert expected[2] == expected[3] == [[4 * step, 4 * step + 4, step + 1] for step in range(5)]


VERBS = ["restore", "step", "publish", "evaluate", "save", "settle", "digests", "meet", "leave"]
CALLS = [*((verb, rank) for verb in VERBS for rank in (0, 1)), ("serve", 0), ("ledger", 0)]


@pytest.mark.parametrize(("verb", "rank"), CALLS)
def test_a_trainer_dies_at_any_call(
    verb: str, rank: int, url: str, undisturbed: tuple[tuple[object, ...], list[tuple[str, str]], int]
) -> None:
    """The middle one of its calls of each kind; tests/demo/test_loop_ray.py kills real processes."""
    expected, log, _ = undisturbed
    calls = [number for who, name, number in points(log) if (who, name) == (f"trainer/{rank}", verb)]
    doom = (f"trainer/{rank}", verb, calls[len(calls) // 2])
    cluster, outside = FakeCluster(lambda *call: call == doom), Quiet()
    assert run_coordinator(cluster, spec(url), outside).finished
    cluster.close()
    check(url, expected)
    assert sum(isinstance(note, Fenced) for note in outside.notes) == 2
    assert len(read_story(outside.notes, 0.0).recoveries) == 1


@pytest.mark.parametrize("verb", ["load", "generate"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_an_engine_dies_without_a_fence(
    verb: str, number: int, url: str, undisturbed: tuple[tuple[object, ...], object, object]
) -> None:
    cluster = FakeCluster(lambda *call: call == ("rollout/0", verb, number))
    outside = Quiet()
    assert run_coordinator(cluster, spec(url), outside).finished
    cluster.close()
    check(url, undisturbed[0])
    assert sum(isinstance(note, Fenced) for note in outside.notes) == 1


def test_both_engines_die_at_once(url: str, undisturbed: tuple[tuple[object, ...], object, object]) -> None:
    cluster = FakeCluster(lambda who, verb, number: (verb, number) == ("generate", 2))
    outside = Quiet()
    assert run_coordinator(cluster, spec(url), outside).finished
    cluster.close()
    check(url, undisturbed[0])
    assert len(read_story(outside.notes, 0.0).engines_replaced) == 2


@pytest.mark.parametrize("part", range(6))
def test_the_coordinator_dies_at_any_call(
    part: int, url: str, undisturbed: tuple[tuple[object, ...], list[tuple[str, str]], int]
) -> None:
    """Another takes over, adopts the members and rolls back to the last cut."""
    expected, _, calls = undisturbed
    doomed_at = (calls * (2 * part + 1)) // 12
    cluster, outside = FakeCluster(), Quiet()
    with pytest.raises(CoordinatorDied):
        run_coordinator(cluster, spec(url), outside, doomed_at=doomed_at)
    assert run_coordinator(cluster, spec(url), outside).finished
    cluster.close()
    check(url, expected)


def test_a_crash_loop_falls_back_to_an_older_checkpoint_and_then_halts_with_a_report(url: str) -> None:
    doomed = [False]
    cluster, outside = FakeCluster(lambda who, verb, number: doomed[0] and verb == "step"), Quiet()
    assert run_coordinator(cluster, spec(url, until=4), outside).finished
    doomed[0] = True
    ended = run_coordinator(cluster, spec(url, order=2, deaths=0), outside)
    assert not ended.finished
    assert "no older one" in ended.why
    assert not cluster.processes  # halted: the members are stopped
    run = ckptstore.open(url)
    history = run.catalog.history
    assert history.fence in history.fold.released
    origins = [fence.origin.checkpoint for fence in history.fold.fences.values()]
    steps = [id.step if id is not None else None for id in origins]
    assert steps == [None, 4, 4, 4, 4, 2, 2, 2, 2]  # three lives each; the fourth fence is given up at once
    assert run.verify().ok


def test_a_resize_continues_on_another_number_of_ranks(
    url: str, undisturbed: tuple[tuple[object, ...], object, object]
) -> None:
    cluster, outside = FakeCluster(), Quiet()
    whole = spec(url)
    assert run_coordinator(cluster, replace(whole, until=3), outside).finished
    smaller = replace(whole, order=2, resume="must", config=replace(whole.config, trainers=1))
    assert run_coordinator(cluster, smaller, outside).finished
    cluster.close()
    assert final(url)[:4] == undisturbed[0][:4]


def test_members_refuse_a_coordinator_that_was_replaced(url: str) -> None:
    cluster, outside = FakeCluster(), Quiet()
    with pytest.raises(CoordinatorDied):
        run_coordinator(cluster, spec(url), outside, doomed_at=40)
    newer = ckptstore.begin(url, {"trainer": 2, "loop": 1}, job="test")
    assert newer.fence == 2
    # The first one's life, gone on: its next fence is raised over `newer`, which then stands down.
    assert run_coordinator(cluster, spec(url), outside).finished
    handle = ckptstore.Checkpointer(newer, role="loop", rank=0).save(9, {"a": 1})
    with pytest.raises(ckptstore.FencedError):
        handle.result(20)
    cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_member_dies_at_each_of_its_calls(
    undisturbed: tuple[tuple[object, ...], list[tuple[str, str]], int],
) -> None:
    """Every call that an undisturbed run makes of a trainer or an engine, one death a run."""
    expected, log, _ = undisturbed
    for doom in points(log):
        url, cluster = next(_URLS), FakeCluster(lambda *call, doom=doom: call == doom)
        assert run_coordinator(cluster, spec(url), Quiet()).finished, doom
        cluster.close()
        assert final(url) == expected, doom


class LedgerTeller(FakeLauncher):
    """A launcher whose only trainer tells a ledger."""

    def __init__(self, told: Ledger) -> None:
        super().__init__(FakeCluster())
        self.told = told

    def gather(self, calls: Sequence[Call], *, deadline_s: float) -> list[Any]:
        assert [call.verb for call in calls] == ["ledger"]
        return [self.told.to_json()]


@pytest.mark.parametrize(("trainer", "copy", "owed"), [(12, 8, ()), (8, 12, (8, 9, 10, 11)), (8, 8, ())])
def test_the_trainer_decides_what_is_consumed_whatever_the_loop_s_copy_says(
    trainer: int, copy: int, owed: tuple[int, ...]
) -> None:
    ledgers = {}
    for name, consumed in (("trainer", trainer), ("copy", copy)):
        ledgers[name] = Ledger(seed=0)
        ledgers[name].issue(max(trainer, copy))
        for step in range(consumed // 4):
            ledgers[name].consume(range(4 * step, 4 * step + 4), step + 1)
    loop = Loop(spec("memory://unused"), launcher=LedgerTeller(ledgers["trainer"]), outside=Quiet())
    loop._ledger = ledgers["copy"]
    loop.rebuild()
    assert loop._ledger.owed() == owed
    first = loop._begin_step()
    known = max(trainer, copy)
    assert first.ordinals == (owed or tuple(range(known, known + 4)))
