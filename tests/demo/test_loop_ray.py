"""The whole demo in real processes: killed at every kind of point, compared bitwise, and resized."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.demo.command import DemoOptions, parse_resizes, run_demo
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.kills import parse_kills
from ckptstore.demo.result import DemoOutcome
from ckptstore.errors import InvalidInputError

SMALL = DemoConfig(
    steps=8,
    every=2,
    evaluate_every=3,
    prompts=8,
    samples=4,
    lease_prompts=4,
    warm_up_steps=2,
    warm_up_rows=32,
    evaluation_rows=20,
    hidden=64,
)
KILLS = "trainer:1@3,rollout:0@2,trainer:0@4+save,coordinator@7"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> DemoOutcome:
    url = str(tmp_path_factory.mktemp("demo") / "run")
    options = DemoOptions(
        config=SMALL, url=url, kills=parse_kills(KILLS, SMALL, saves=(4, 6)), resizes=((4, 1), (6, 3))
    )
    return run_demo(options)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestDemo:
    def test_the_killed_run_equals_the_undisturbed_one(self, outcome: DemoOutcome) -> None:
        assert outcome.undisturbed is not None
        assert outcome.differences == ()
        assert outcome.bitwise_equal is True
        assert outcome.run.rewards == outcome.undisturbed.rewards
        assert [reward.step for reward in outcome.run.rewards] == list(range(1, 9))
        assert [record.step for record in outcome.run.evaluations] == [3, 6, 8]

    def test_every_kill_fired_once_and_led_to_what_it_should(self, outcome: DemoOutcome) -> None:
        run = outcome.run
        assert run.unfired == ()
        assert [kill.at for kill in run.kills] == KILLS.split(",")
        died = [recovery.died for recovery in run.recoveries]
        assert died == [("trainer/1",), ("trainer/0",), ("coordinator",)]
        assert [recovery.fence for recovery in run.recoveries] == [2, 3, 4]
        assert [engine.engine for engine in run.engines_replaced].count("rollout/0") == 1
        assert all(recovery.restored <= recovery.reached for recovery in run.recoveries)
        assert run.steps_redone == sum(r.reached - r.restored for r in run.recoveries) > 0

    def test_nothing_was_lost_or_doubled_by_the_store_s_own_account(self, outcome: DemoOutcome) -> None:
        for run in outcome.runs:
            account = run.account
            assert (account.issued, account.consumed, account.lost, account.doubled) == (64, 64, 0, 0)

    def test_the_save_that_was_killed_was_never_committed(self, outcome: DemoOutcome) -> None:
        fence = next(recovery.fence for recovery in outcome.run.recoveries if recovery.died == ("trainer/0",))
        lost = [save for save in outcome.run.saves if save.step == 4 and save.fence < fence]
        assert [save.committed for save in lost] == [False]
        history = ckptstore.open(outcome.run.url).catalog.history
        assert not any(id.step == 4 and id.fence < fence for id in history.fold.commits)

    def test_a_resize_restores_what_was_saved_and_goes_on(self, outcome: DemoOutcome) -> None:
        resized = outcome.resized
        assert resized is not None
        assert [(resize.step, resize.trainers, resize.equal) for resize in resized.resizes] == [
            (4, 1, True),
            (6, 3, True),
        ]
        assert [reward.step for reward in resized.rewards] == list(range(1, 9))
        assert outcome.undisturbed is not None
        assert resized.rewards[:4] == outcome.undisturbed.rewards[:4]

    def test_the_stores_are_whole_and_the_outcome_has_no_problem(self, outcome: DemoOutcome) -> None:
        assert outcome.problems == ()
        for run in outcome.runs[:2]:
            assert ckptstore.open(run.url).verify().ok

    def test_the_json_has_the_promised_fields(self, outcome: DemoOutcome) -> None:
        told = outcome.to_json()
        assert set(told) == {
            "steps", "bitwise_equal", "digest", "kills", "unfired", "recoveries", "engines_replaced", "steps_redone",
            "recovery_s", "blocking_ms", "nbytes_written", "nbytes_reused", "ledger", "reward_first10",
            "reward_last10", "evaluations", "resizes",
        }  # fmt: skip
        assert told["recoveries"] == len(told["recovery_s"]) == 3
        assert told["nbytes_reused"] > 0
        assert all(phases["spawn"] > 0 for phases in told["recovery_s"])


def test_a_coordinator_imports_no_torch(tmp_path: Path) -> None:
    """It must be replaced within a moment: a whole loop with stand-in members runs in a process without torch."""
    script = """
import sys
import ckptstore.demo.members
from tests.demo.cluster import FakeCluster, Quiet, run_coordinator, spec
cluster = FakeCluster(lambda *call: call == ("trainer/1", "step", 2))
assert run_coordinator(cluster, spec("memory://light"), Quiet()).finished
cluster.close()
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
        timeout=100,
    )


def test_resizes_are_read_or_refused() -> None:
    config = DemoConfig(steps=75)
    assert parse_resizes("40:1,55:3", config) == parse_resizes(["40:1", "55:3"], config) == ((40, 1), (55, 3))
    assert parse_resizes((), config) == ()
    for text in ("40", "40:", "x:1", "0:1", "75:1", "40:1,40:2", "55:3,40:1", "40:0", "40:9"):
        with pytest.raises(InvalidInputError):
            parse_resizes(text, config)


def test_a_store_that_cannot_serve_the_demo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="several"):
        DemoOptions.parse(url="memory://x")
    url = str(tmp_path / "run")
    assert DemoOptions.parse(url=url).url == url
    ckptstore.begin(url, {"trainer": 1}).close()
    with pytest.raises(InvalidInputError, match="already"):
        DemoOptions.parse(url=url)
