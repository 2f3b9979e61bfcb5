"""The process outside the loop that shoots planned victims and keeps what the loop tells.

Victims report at marked points and wait for the answer, so the moment of a kill is exact while the kill
itself comes from outside, as SIGKILL. Only processes that enlisted here are ever shot. It is no target,
so what it keeps survives every death in the loop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, Protocol

from ckptstore.demo.kills import Kill
from ckptstore.demo.notes import Note, Shot


class Outside(Protocol):
    """What a member of the loop sees of the world outside."""

    def at(self, who: str, step: int, phase: str) -> None:
        """Report a marked point. Does not return when the caller is to die here."""

    def note(self, *notes: Note) -> None:
        """Tell what happened."""


class Chaos:
    """Ray actor: planned kills, who is alive, and the notes of the run."""

    def __init__(self) -> None:
        self._planned: list[Kill] = []
        self._pids: dict[str, int] = {}
        self._notes: list[Note] = []

    def plan(self, kills: Sequence[Kill]) -> None:
        """Begin a new run: these kills, each once, and no notes."""
        self._planned = list(kills)
        self._notes = []

    def enlist(self, who: str, pid: int) -> None:
        """`who` now runs as process `pid` of this machine."""
        self._pids[who] = pid

    def pids(self) -> tuple[int, ...]:
        """The processes that have enlisted last under each name."""
        return tuple(self._pids.values())

    def at(self, who: str, step: int, phase: str) -> None:
        """Shoot `who` if a kill is planned for this moment; else return at once."""
        for kill in self._planned:
            if kill.hits(who, step, phase):
                self._planned.remove(kill)  # before the shot: it fires once, also after a rollback
                self._notes.append(Shot(kill=str(kill), who=who.replace(":", "/")))
                os.kill(self._pids[who], signal.SIGKILL)
                return

    def note(self, *notes: Note) -> None:
        self._notes.extend(notes)

    def told(self, since: int) -> list[Note]:
        """Notes of this run from number `since` on."""
        return self._notes[since:]


class ChaosClient:
    """A member's way to the chaos actor. `at` waits for the answer, notes are sent off without."""

    def __init__(self, actor: Any, who: str) -> None:
        self._actor = actor
        self._who = who

    def enlist(self) -> None:
        """Name this process; returns when it is known."""
        self._call("enlist", self._who, os.getpid())

    def at(self, who: str, step: int, phase: str) -> None:
        self._call("at", who, step, phase)

    def note(self, *notes: Note) -> None:
        self._actor.note.remote(*notes)

    def _call(self, verb: str, *arguments: Any) -> None:
        import ray

        ray.get(getattr(self._actor, verb).remote(*arguments), timeout=CHAOS_S)


CHAOS_S = 30.0  # a report that is not answered within this is an error of the demo
