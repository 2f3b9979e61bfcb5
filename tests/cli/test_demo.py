"""`ckptstore demo` around the loop: usage, outputs, exit codes. The loop itself is made up here; tests/demo runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.cli import demo as command
from ckptstore.demo.result import DemoOutcome
from tests.cli.commands import Ended, run, spawn
from tests.cli.outcomes import make_outcome

KEYS = {
    "steps", "bitwise_equal", "digest", "kills", "unfired", "recoveries", "engines_replaced", "steps_redone",
    "recovery_s", "blocking_ms", "nbytes_written", "nbytes_reused", "ledger", "reward_first10", "reward_last10",
    "evaluations",
}  # fmt: skip

Make = Callable[[DemoOutcome], list[Any]]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Let the command get this outcome; gives the list of options it asked with."""

    def make(outcome: DemoOutcome) -> list[Any]:
        asked: list[Any] = []

        def run_demo(options: Any, progress: Any) -> DemoOutcome:
            asked.append(options)
            print("a library talks")
            progress(3, 75, "killed: update")
            return outcome

        monkeypatch.setattr(command, "run_demo", run_demo)
        monkeypatch.setattr(command, "NEEDED", ())
        return asked

    return make


def test_json_alone_is_on_stdout_with_exactly_the_promised_keys(made_up: Make) -> None:
    outcome = make_outcome(kills=4)
    made_up(outcome)
    ended = run("demo", "--kill", "random:4", "--json")
    assert ended.code == 0
    assert set(ended.json) == KEYS
    assert ended.json == json.loads(json.dumps(outcome.to_json()))
    assert ended.json["bitwise_equal"] is True and set(ended.json["recovery_s"][0]) == {
        "detect", "spawn", "regroup", "restore", "publish",
    }  # fmt: skip
    assert set(ended.json["kills"][0]) == {"at", "fired"}
    assert "a library talks" in ended.err


def test_flags_reach_the_loop(made_up: Make, tmp_path: Path) -> None:
    asked = made_up(make_outcome(kills=1))
    url = str(tmp_path / "run")
    arguments = "--steps 30 --every 3 --trainers 3 --rollouts 1 --seed 7 --kill trainer:2@4 --resize 10:1 --resize 20:2"
    assert run("demo", *arguments.split(), "--url", url, "--keep").code == 0
    (options,) = asked
    config = options.config
    assert (config.steps, config.every, config.trainers, config.rollouts, config.seed) == (30, 3, 3, 1, 7)
    assert [str(kill) for kill in options.kills] == ["trainer:2@4"]
    assert options.resizes == ((10, 1), (20, 2))
    assert options.url == url and options.keep


def test_the_table_ends_with_verdict_and_next(made_up: Make, tmp_path: Path) -> None:
    made_up(make_outcome(kills=2))
    page = tmp_path / "out.html"
    ended = run("demo", "--report", str(page))
    lines = ended.out.splitlines()
    assert ended.code == 0
    assert lines[-2] == "Bitwise equal to the undisturbed run after 2 kills."
    assert lines[-1].startswith("next: open ") and str(page) in ended.out.replace("\n", "")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"wrote {page}" in ended.err


@pytest.mark.parametrize(
    "outcome", [make_outcome(unfired=1), make_outcome(equal=False), make_outcome(equal=False, lost=1)]
)
def test_what_does_not_hold_is_1(made_up: Make, outcome: DemoOutcome) -> None:
    made_up(outcome)
    assert run("demo", "--json").code == 1
    ended = run("demo")
    assert ended.code == 1
    assert all(problem in " ".join(ended.out.split()) for problem in outcome.problems)


def test_a_page_that_cannot_be_written_loses_no_result(
    made_up: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(make_outcome())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckptstore.demo.report.write_report", full)
    ended = run("demo", "--report", str(tmp_path / "out.html"), "--json")
    assert ended.code == 0 and set(ended.json) == KEYS and "was not written" in ended.err


def one_sentence(ended: Ended, code: int) -> bool:
    return (
        ended.code == code
        and ended.out == ""
        and ended.err.startswith("ckptstore: ")
        and ended.err.count("\n") == 1
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "--kill trainer:2@4",
        "--kill trainer:0@99",
        "--kill trainer:0@4+save",
        "--kill rollout:0@5+save",
        "--kill nonsense",
        "--resize 40",
        "--resize 80:1",
        "--resize 40:99",
        "--steps 0",
        "--every 0",
        "--trainers 0",
        "--url memory://x",
        "--report /nowhere/at/all/out.html",
    ],
)
def test_usage_errors_are_2_before_anything_starts(made_up: Make, arguments: str) -> None:
    asked = made_up(make_outcome())
    ended = run("demo", *arguments.split())
    assert one_sentence(ended, 2), ended
    assert asked == []


def test_a_url_with_a_run_is_refused(made_up: Make, run_url: str) -> None:
    made_up(make_outcome())
    assert one_sentence(run("demo", "--url", run_url), 2)


def test_missing_packages_are_named(made_up: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(make_outcome())
    monkeypatch.setattr(command, "NEEDED", ("ray", "nothing_like_it"))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else real(name))
    ended = run("demo")
    assert (
        one_sentence(ended, 2) and "ray and nothing_like_it" in ended.err and "ckptstore[demo]" in ended.err
    )


def test_a_loop_that_halts_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def halts(options: Any, progress: Any) -> DemoOutcome:
        raise ckptstore.NoRecoveryPointError("the loop halted: step 7 died three times; look at it")

    monkeypatch.setattr(command, "run_demo", halts)
    monkeypatch.setattr(command, "NEEDED", ())
    assert one_sentence(run("demo"), 1)


def test_what_children_print_goes_to_stderr(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom ckptstore.cli.demo import stdout_on_stderr\n"
        "with stdout_on_stderr():\n    os.system('echo child'); print('library')\nprint('data')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "data\n"
    assert set(ended.stderr.split()) == {"child", "library"}


def test_refusing_costs_no_heavy_import() -> None:
    assert spawn("demo", "--kill", "nonsense").code == 2
    code = (
        "import sys\nfrom ckptstore.cli.app import app\n"
        "try: app(['demo', '--kill', 'nonsense'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert {"torch", "ray", "transformers"}.isdisjoint(ended.stdout.split())


def test_help_teaches() -> None:
    told = run("demo", "--help").out
    for words in ("trainer:0@20+save", "random:5", "40:1", "Examples:", "--report", "Exit code 1"):
        assert words in told


def test_nothing_is_left_in_descriptor_1() -> None:
    before = os.fstat(1)
    with command.stdout_on_stderr():
        pass
    assert os.fstat(1) == before
