"""How commands speak: tables of text, JSON, sizes, progress, and errors with their exit codes.

Apart from the commands so that all of them speak alike. Every command first builds one plain value;
`--json` prints that value and the human form is drawn from it, so the two cannot tell different things.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec

import typer

from ckptstore.errors import CkptStoreError, InvalidInputError, OutcomeUnknownError, StoreUnavailableError

FINE, PROBLEM, USAGE, UNAVAILABLE = 0, 1, 2, 3
INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended
PIPE_CLOSED = 141  # as a shell reports a process that a closed pipe ended
TRACEBACK = "CKPTSTORE_TRACEBACK"
UNBROKEN = "\N{NO-BREAK SPACE}"  # in a cell: a space at which it is not wrapped
NARROWEST = 16  # a last column is never wrapped to less

P = ParamSpec("P")


# -- numbers


def size_text(nbytes: int) -> str:
    """Bytes in binary units with three significant digits: `1.31 TiB`."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if value < 999.5 or unit == "EiB":
            break
        value /= 1024
    if unit == "B":
        return f"{nbytes} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """`1 tensor`, `73,164 tensors`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


# -- tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table. `optional` ones are left out, the last first, where the terminal is too narrow."""

    title: str
    right: bool = False
    optional: bool = False


def terminal_width() -> int | None:
    """What COLUMNS says, else the columns of the terminal on stdout; None without either: nothing is cut or wrapped."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None = None
) -> list[str]:
    """Rows of text under their titles. Within `width` optional columns go first, then the last one is wrapped."""
    kept = list(range(len(columns)))
    widths = [max([len(c.title), *(len(row[n]) for row in rows)]) for n, c in enumerate(columns)]
    for n in reversed(range(len(columns))):
        if width is None or sum(widths[k] + 2 for k in kept) - 2 <= width:
            break
        if columns[n].optional:
            kept.remove(n)
    lines = []
    for row in ([c.title for c in columns], *rows):
        cells = [row[n].rjust(widths[n]) if columns[n].right else row[n].ljust(widths[n]) for n in kept[:-1]]
        before = "".join(f"{cell}  " for cell in cells)
        last = row[kept[-1]]
        if columns[kept[-1]].right:
            last = last.rjust(widths[kept[-1]])
        room = None if width is None else max(width - len(before), NARROWEST)
        wrapped = [last] if room is None or len(last) <= room else _wrap(last, room)
        lines += [(start + text).rstrip().replace(UNBROKEN, " ") for start, text in _hang(before, wrapped)]
    return lines


def _wrap(text: str, room: int) -> list[str]:
    """Wrap at spaces alone: what is too long for a line (a key) stays whole, so that it can be copied."""
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _hang(before: str, wrapped: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(wrapped):
        yield (before if number == 0 else " " * len(before)), text


def pair_lines(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """`name  value` lines, the values in one column."""
    room = max(len(name) for name, _ in pairs)
    return [f"{name.ljust(room)}  {value}".rstrip().replace(UNBROKEN, " ") for name, value in pairs]


# -- stdout


def json_text(told: Mapping[str, Any]) -> str:
    """JSON that both a program and a person can read: one item of a list a line."""
    lines = []
    for key, value in told.items():
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            items = ",\n".join(f"    {_compact(item)}" for item in value)
            lines.append(f"  {_compact(key)}: [\n{items}\n  ]")
        else:
            lines.append(f"  {_compact(key)}: {_compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def emit(told: Mapping[str, Any], lines: Callable[[], Sequence[str]], *, as_json: bool) -> None:
    """Print the value as JSON, or the lines drawn from it."""
    text = json_text(told) if as_json else "\n".join(lines())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# -- stderr


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Whatever is printed goes to stderr, also by libraries and child processes that know only descriptor 1."""
    sys.stdout.flush()
    kept, printed = os.dup(1), sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = printed
        os.dup2(kept, 1)
        os.close(kept)


def say(sentence: str) -> None:
    """One line for the person at the terminal."""
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()


@contextmanager
def progress_bar(
    title: str, *, amount: Callable[[int], str] = size_text, after_s: float = 1.0
) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, fed with (done, total, words) from any thread; nothing when stderr is no terminal.

    It appears after `after_s`, so that what is quick stays quiet, and leaves nothing behind.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, words: None
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.fields[amount]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[words]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    task = bar.add_task(title, total=None, amount="", words="")
    began, started, lock = time.monotonic(), threading.Event(), threading.Lock()

    def update(done: int, total: int, words: str) -> None:
        bar.update(
            task,
            completed=done,
            total=total or None,
            amount=f"{amount(done)} of {amount(total)}",
            words=words,
        )
        with lock:
            if not started.is_set() and time.monotonic() - began >= after_s:
                started.set()
                bar.start()

    if after_s == 0:
        started.set()
        bar.start()
    try:
        yield update
    finally:
        if started.is_set():
            bar.stop()


# -- errors


def exit_code(error: CkptStoreError) -> int:
    """What a script should do about it: 2 change the command, 3 try again later, 1 look at the run."""
    if isinstance(error, InvalidInputError):
        return USAGE
    return UNAVAILABLE if isinstance(error, (StoreUnavailableError, OutcomeUnknownError)) else PROBLEM


def fail(sentence: str, code: int) -> NoReturn:
    """Say what is wrong and end with `code`."""
    say(f"ckptstore: {sentence}")
    raise typer.Exit(code)


def reporting(command: Callable[P, int]) -> Callable[P, None]:
    """Wrap a command that returns its exit code: errors become one sentence on stderr, never a traceback.

    With CKPTSTORE_TRACEBACK set the exception is raised as it is.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            close_stdout()
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as error:
            if os.environ.get(TRACEBACK):
                raise
            if isinstance(error, CkptStoreError):
                fail(str(error), exit_code(error))
            fail(
                f"failed unexpectedly: {type(error).__name__}: {error}; set {TRACEBACK}=1 to see where, and report it",
                PROBLEM,
            )
        raise typer.Exit(code)

    return run


def close_stdout() -> None:
    """Let what Python still wants to flush go nowhere: the reader of the pipe has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
