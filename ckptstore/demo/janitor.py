"""Clean up after a command that was killed: a tiny process that outlives it.

It reads from a pipe what belongs to the session (folders, processes) and waits for the end of it. If that
comes without `done`, the command was killed: it ends what is left of those processes and of any
that names the session's own folder, removes the folders, and exits. Run as a file, with the standard
library alone, so that it costs a few megabytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping

ROUND_S = 0.25
QUIET_ROUNDS = 4  # in a row without anything left to end
DEADLINE_S = 45.0

Process = tuple[int, str]
"""Process id and start time: ids are used again, the pair is not."""


def started(pid: int) -> str | None:
    """When a process was started, in ticks since boot; None when there is no such process, or only its ashes."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def parents() -> dict[int, int]:
    """Each living process's parent."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                found[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked
    return found


def descendants(roots: Iterable[int], tree: Mapping[int, int]) -> set[int]:
    """All below `roots`, without them."""
    found: set[int] = set()
    edge = set(roots)
    while edge:
        edge = {pid for pid, parent in tree.items() if parent in edge and pid not in found}
        found |= edge
    return found


def naming(folders: Iterable[str], tree: Mapping[int, int]) -> set[int]:
    """Processes whose command line or environment names one of `folders`; this one is not meant."""
    marks = [folder.encode() for folder in folders]
    found = set()
    for pid in tree:
        if pid == os.getpid():
            continue
        for place in ("cmdline", "environ"):
            try:
                with open(f"/proc/{pid}/{place}", "rb") as file:
                    text = file.read()
            except OSError:
                continue
            if any(mark in text for mark in marks):
                found.add(pid)
    return found


def end(processes: Iterable[Process]) -> int:
    """SIGKILL those that still are what they were; their number."""
    count = 0
    for pid, start in processes:
        if started(pid) == start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                count += 1
    return count


def clean(known: set[Process], session: list[str], folders: list[str]) -> None:
    """End what belongs to the session and remove its folders, for at most DEADLINE_S."""
    deadline_s, quiet = time.monotonic() + DEADLINE_S, 0
    while quiet < QUIET_ROUNDS and time.monotonic() < deadline_s:
        tree = parents()
        alive = {pid for pid, start in known if started(pid) == start} | naming(session, tree)
        alive |= descendants(alive, tree) - {os.getpid()}
        known |= {(pid, start) for pid in alive if (start := started(pid)) is not None}
        quiet = 0 if end(known) else quiet + 1
        for folder in (*session, *folders):
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(ROUND_S)


def main() -> None:
    """Read `session FOLDER`, `folder FOLDER`, `process PID START` and `done`, one a line, until the pipe ends."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the end of the pipe is the only signal
    known: set[Process] = set()
    session: list[str] = []
    folders: list[str] = []
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "done":
            return
        if word == "session":
            session.append(rest)
        elif word == "folder":
            folders.append(rest)
        elif word == "process":
            pid, _, start = rest.partition(" ")
            known.add((int(pid), start))
    clean(known, session, folders)


if __name__ == "__main__":
    main()
