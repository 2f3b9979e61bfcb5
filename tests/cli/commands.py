"""Run the command as a person does: a process of its own, or in this one through typer's runner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from ckptstore.cli.app import app


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: str) -> Ended:
    """In this process."""
    ended = CliRunner().invoke(app, list(arguments), prog_name="ckptstore")
    return Ended(code=ended.exit_code, out=ended.stdout, err=ended.stderr)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from ckptstore.cli import main; main()", *arguments]


def spawn(*arguments: str, **variables: str) -> Ended:
    """In a process of its own."""
    ended = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, env={**os.environ, **variables}
    )
    return Ended(code=ended.returncode, out=ended.stdout, err=ended.stderr)


def hear_interrupts() -> None:
    """Of a child. A shell that starts the tests in the background has them ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
