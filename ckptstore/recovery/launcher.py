"""What a coordinator needs of whatever runs the members' processes.

A Protocol, so that the coordinator is tested with members in its own process and run with Ray actors
(`ray.py`). A launcher acts and never decides: which members, when, and under which fence is the
coordinator's to say. It touches only processes of its own job (protocol R26).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptstore.errors import CkptStoreError
from ckptstore.manifest import Member


class MemberDiedError(CkptStoreError):
    """Members are gone, or were stopped because they did not answer: `members`; empty when only a
    connection between living ones was lost. Raise a new fence (roster) or replace them (engines)."""


class PeerLostError(CkptStoreError):
    """A collective failed in this member because of another one. The member itself lives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call that is under way; `handle` belongs to the launcher."""

    member: Member
    verb: str
    handle: Any


class Launcher(Protocol):
    """Starts, asks and stops members. Used by one thread."""

    def start(self, members: Sequence[Member]) -> None:
        """Begin to start those that are not known to run; returns before they answer."""

    def ensure(self, members: Sequence[Member], *, deadline_s: float) -> None:
        """Return once every one of `members` answers.

        The dead are started anew, as often as the deadline allows. Who is still silent after
        `deadline_s` is stopped, and MemberDiedError names it.
        """

    def call(self, member: Member, verb: str, *arguments: Any) -> Call:
        """Send a call. Calls of one member are made in the order sent."""

    def ready(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        """Those of `calls` that have ended, waiting at most `timeout_s` for the first one."""

    def result(self, call: Call) -> Any:
        """The value of a call that has ended; raises what it raised, or MemberDiedError."""

    def gather(self, calls: Sequence[Call], *, deadline_s: float) -> list[Any]:
        """The values of all calls, one a member, in order; they may depend on each other (collectives).

        One failure ends the waiting for the others soon: a dead member is named by MemberDiedError even
        where survivors failed first because of it. Who is silent until `deadline_s` and does not answer
        a ping either is stopped, and named likewise.
        """

    def stop(self, members: Sequence[Member]) -> None:
        """End these members' processes, without waiting for what they do. Unknown ones are ignored."""
