"""The system calls of a local store, recorded, and what they promise if the power fails at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CALLS = ("mkdir", "open", "writev", "pwritev", "ftruncate", "fsync", "link", "replace", "unlink")


@dataclass(frozen=True, slots=True)
class Event:
    """`path` is the file or folder that the call is about, `new` the name that it gives."""

    call: str
    path: str
    new: str = ""


Around = Callable[[int, Event, Callable[[], Any]], Any]


class Recorder:
    """Records the calls in and under `folder` that change it; `around` may fail them, by number."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, around: Around | None = None) -> None:
        self.events: list[Event] = []
        self._folder = str(folder)
        self._around = around
        for name in CALLS:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0]
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
            changes = name != "open" or args[1] & os.O_CREAT
            if not path.startswith(self._folder) or not changes:
                return real(*args, **kwargs)
            event = Event(name, path, os.fspath(args[1]) if name in ("link", "replace") else "")
            self.events.append(event)
            if self._around is None:
                return real(*args, **kwargs)
            return self._around(len(self.events) - 1, event, lambda: real(*args, **kwargs))

        return call


def check_power_cuts(events: list[Event], key_path: Path) -> None:
    """Whatever the file system keeps of what was not yet synced, the object is absent or whole at every
    moment, and whole from the last event on."""
    final = str(key_path)
    synced_files: set[str] = set()
    entries: dict[str, bool] = {}  # name -> durable
    for event in events:
        match event.call:
            case "mkdir" | "open":
                entries[event.path] = False
            case "writev" | "pwritev" | "ftruncate":
                synced_files.discard(event.path)
            case "fsync" if event.path in entries and not os.path.isdir(event.path):
                synced_files.add(event.path)
            case "fsync":
                for name in entries:
                    if os.path.dirname(name) == event.path:
                        entries[name] = True
            case "link" | "replace":
                assert event.path in synced_files, f"{event}: a name was given to bytes that may be lost"
                entries[event.new] = False
            case "unlink":
                entries.pop(event.path, None)
    name = final
    while name in entries:
        assert entries[name], f"{name} may be lost after the create has returned"
        name = os.path.dirname(name)
    assert final in entries
