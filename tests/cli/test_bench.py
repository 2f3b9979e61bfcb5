"""`ckptstore bench` around the measuring: usage, outputs, exit codes, and what an interrupt leaves: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.bench.options import BenchOptions
from tests.bench.made_up import make_result
from tests.cli.commands import command, hear_interrupts, run


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """Let the command get a made-up result; gives the options it asked with."""
    asked: list[BenchOptions] = []

    def run_bench(options: BenchOptions, progress: object) -> object:
        asked.append(options)
        print("a library talks")
        return make_result({("durable", "dcp"): (0.01, 0.02, 0.03)})

    monkeypatch.setattr("ckptstore.bench.run.run_bench", run_bench)
    return asked


def test_flags_reach_the_bench(made_up: list[BenchOptions], tmp_path: Path) -> None:
    flags = ("--size", "2GiB", "--state", "small", "--peers", "orbax", "--rounds", "7")
    assert run("bench", str(tmp_path), *flags).code == 0
    assert made_up == [
        BenchOptions(place=str(tmp_path), nbytes=2 << 30, state="small", peers=("orbax",), rounds=7)
    ]


def test_json_alone_is_on_stdout(made_up: list[BenchOptions], tmp_path: Path) -> None:
    ended = run("bench", str(tmp_path), "--json")
    assert ended.code == 0 and "a library talks" in ended.err
    assert {
        **make_result({("durable", "dcp"): (0.01, 0.02, 0.03)}).to_json(),
        "next": ended.json["next"],
    } == (ended.json)


def test_the_table_says_who_wins_and_ends_with_what_to_do(
    made_up: list[BenchOptions], tmp_path: Path
) -> None:
    picture = tmp_path / "b.svg"
    ended = run("bench", str(tmp_path), "--picture", str(picture))
    assert "DCP wins: save to durable" in ended.out
    assert ended.out.splitlines()[-1] == f"next: open {picture} in a browser"
    assert picture.read_text(encoding="utf-8").startswith("<svg ")


@pytest.mark.parametrize(
    "arguments",
    [
        "--size 4GB",
        "--state odd",
        "--peers numpy",
        "--rounds 0",
        "--picture /nowhere/x.svg",
        "/nowhere/at/all",
    ],
)
def test_usage_errors_are_2_and_import_nothing_heavy(arguments: str) -> None:
    code = (
        "import sys\nfrom ckptstore.cli.app import app\n"
        f"try: app(['bench', *{arguments!r}.split()])\nexcept SystemExit as e: print(e.code)\nprint(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, _, modules = ended.stdout.partition("\n")
    assert first == "2" and ended.stderr.startswith("ckptstore: ") and ended.stderr.count("\n") == 1
    assert {"torch", "pyarrow", "orbax"}.isdisjoint(modules.split())


def test_help_teaches() -> None:
    told = run("bench", "--help").out
    for words in ("DURABLE", "NO SAVE", "1,764 tensors", "--peers none", "Examples:", "Ctrl-C"):
        assert words in told


def interrupted(how: signal.Signals, place: Path, running: subprocess.Popen[str]) -> str:
    """Stop it in the middle of a save, while a thread writes; what it said on stderr."""
    try:
        until = time.monotonic() + 60
        while not list(place.glob("*/ckptstore-0/data/**/*")):
            assert running.poll() is None and time.monotonic() < until
            os.sched_yield()
        running.send_signal(how)
        return running.communicate(timeout=60)[1]
    finally:
        running.kill()


def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    flags = ("--size", "32MiB", "--state", "large", "--peers", "none")
    for how in (signal.SIGINT, signal.SIGTERM):
        place = tmp_path / how.name
        place.mkdir()
        running = subprocess.Popen(
            command("bench", str(place), *flags),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=hear_interrupts,
        )  # fmt: skip
        told = interrupted(how, place, running)
        assert told.strip().endswith("ckptstore: interrupted")
        assert running.returncode == 130
        assert list(place.iterdir()) == []
