"""How much memory this process may use, and how much of it is left: of the machine, or of its control group.

A container is killed at the limit of its group, whatever the machine has, so both are asked.
"""

from __future__ import annotations

import os
from typing import Final

SHARE: Final = 2  # snapshots may take this part (a half) of what the process may use
RESERVE: Final = 16  # and never the last part (a sixteenth), which is the trainer's

_GROUP: Final = "/sys/fs/cgroup"
_UNLIMITED: Final = 1 << 60


def limit_nbytes() -> int:
    """Bytes that this process and its neighbours in the group may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _groups())])


def available_nbytes() -> int:
    """Bytes that can be taken now without pushing anybody out; the page cache counts as free."""
    return min([_machine_available(), *(limit - used for limit, used in _groups())])


def default_budget_nbytes() -> int:
    """The budget for snapshots of who names none."""
    return limit_nbytes() // SHARE


def is_left(nbytes: int) -> bool:
    """May `nbytes` more be taken, and the reserve stay?"""
    return available_nbytes() - nbytes >= limit_nbytes() // RESERVE


def _machine_available() -> int:
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return _UNLIMITED


def _groups() -> list[tuple[int, int]]:
    """(limit, used) of the control groups with a limit that this process is in; version 2, then version 1."""
    found = []
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _chain(_GROUP, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            found += _chain(
                f"{_GROUP}/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return found


def _chain(root: str, path: str, limit: str, used: str, cached: str) -> list[tuple[int, int]]:
    """The group itself and those above it: any of them may hold the limit."""
    found, folder = [], path.strip("/")
    while True:
        at = os.path.join(root, folder)
        most, now = _number(os.path.join(at, limit)), _number(os.path.join(at, used))
        if most is not None and now is not None and most < _UNLIMITED:
            free = [
                int(line.split()[1])
                for line in _lines(os.path.join(at, "memory.stat"))
                if line.startswith(f"{cached} ")
            ]
            found.append((most, now - sum(free)))
        if not folder:
            return found
        folder = os.path.dirname(folder)


def _number(path: str) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    """The lines of a file that the kernel makes; none where there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError:
        return []
