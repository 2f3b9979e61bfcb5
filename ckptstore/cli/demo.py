"""`ckptstore demo`: run the loop, then tell what came of it, as tables, as JSON and as a page."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptstore.cli.output import FINE, PROBLEM, json_text, progress_bar, say, stdout_on_stderr
from ckptstore.demo.command import DemoOptions, run_demo
from ckptstore.demo.result import DemoOutcome
from ckptstore.errors import InvalidInputError

NEEDED = ("ray", "transformers")


def demo(
    *,
    steps: int,
    every: int,
    trainers: int,
    rollouts: int,
    seed: int,
    kill: str | None,
    resize: Sequence[str],
    url: str | None,
    keep: bool,
    report: Path | None,
    as_json: bool,
) -> int:
    """Run it; 1 when something did not hold. Whatever can never work is refused before anything starts."""
    options = DemoOptions.parse(
        steps=steps,
        every=every,
        trainers=trainers,
        rollouts=rollouts,
        seed=seed,
        kill=kill,
        resize=resize,
        url=url,
        keep=keep,
    )
    if report is not None:
        _check_report(report)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInputError(
            f"the demo needs {' and '.join(missing)}, which is not installed; run pip install 'ckptstore[demo]'",
            missing=tuple(missing),
        )
    with stdout_on_stderr(), progress_bar("demo", amount=lambda n: f"step {n}", after_s=0) as bar:
        outcome = run_demo(options, bar)
    if report is not None:
        _write(outcome, report)
    kept = outcome.run.url if keep or url is not None else None
    _tell(outcome, _following(kept, report), as_json=as_json)
    return PROBLEM if outcome.problems else FINE


def _check_report(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidInputError(
            f"no page can be written to {path}; give --report a file in a folder that exists", path=str(path)
        )


def _write(outcome: DemoOutcome, path: Path) -> None:
    from ckptstore.demo.report import write_report

    try:
        write_report(outcome, path)
    except OSError as error:  # minutes of work are told all the same
        say(f"ckptstore: the page {path} was not written: {error}")
    else:
        say(f"wrote {path}")


def _following(kept: str | None, report: Path | None) -> str:
    if report is not None:
        return f"open {shlex.quote(str(report))} in a browser"
    if kept is not None:
        return f"ckptstore ls {shlex.quote(kept)}"
    return "ckptstore demo --kill random:5 --report out.html"


def _tell(outcome: DemoOutcome, following: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json_text(outcome.to_json()) + "\n")
        return
    from rich.console import Console

    from ckptstore.demo.table import print_outcome

    print_outcome(Console(file=sys.stdout, highlight=False), outcome, following=following)
