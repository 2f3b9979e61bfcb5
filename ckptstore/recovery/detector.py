"""Who died? Tell a dead member from a survivor that failed because of it.

When a rank is killed, its peers' collectives fail within milliseconds, often before the launcher hears
of the death itself. Blaming the first error would restart the wrong process, so the outcomes of all
calls are judged together. Pure but for reading exceptions; measured delays: docs/explanation/recovery.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CkptStoreError
from ckptstore.manifest import Member
from ckptstore.recovery.launcher import MemberDiedError, PeerLostError

# Named by text, so that this module imports neither torch nor ray.
_PEER_CLASSES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "wait timeout",
    "application timeout",
    "gloo/transport",
)
_DEAD_CLASSES = frozenset(
    {
        "ActorDiedError",
        "ActorUnavailableError",
        "RayActorError",
        "WorkerCrashedError",
        "OutOfMemoryError",
        "NodeDiedError",
        "LocalRayletDiedError",
        "OwnerDiedError",
        "ObjectLostError",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The call raised; the member lives."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """No answer yet. `alive`: it answered a ping."""

    alive: bool


Outcome = Answered | Died | Failed | Silent


def is_peer_failure(error: BaseException) -> bool:
    """Does this error of torch.distributed tell of another process, and not of a mistake in this one?"""
    if any(kind.__name__ in _PEER_CLASSES for kind in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(part in text for part in _PEER_TEXTS)


def is_death(error: BaseException) -> bool:
    """Does this error of the transport say that the process called is gone, out of memory included?"""
    return any(kind.__name__ in _DEAD_CLASSES for kind in type(error).__mro__)


@contextmanager
def peers_blamed(what: str) -> Iterator[None]:
    """Within a member: make a failed collective a PeerLostError, which a caller without torch can read."""
    try:
        yield
    except Exception as error:
        if not is_peer_failure(error):
            raise
        raise PeerLostError(
            f"{what} failed because a peer was lost ({type(error).__name__}: {str(error)[:300]}); "
            f"regroup under a new fence",
            what=what,
        ) from None


def judge(outcomes: Mapping[Member, Outcome]) -> dict[Member, Any]:
    """Give the values if all answered; else raise for what went wrong, the cause before its effects.

    Deaths first, all of them in one MemberDiedError. Then an error that no peer explains, as it is. Then,
    for members that are silent or lost a peer while all live, MemberDiedError with no members: regroup.
    Who is silent and answers no ping counts as dead.
    """
    dead = {m: o.why for m, o in outcomes.items() if isinstance(o, Died)}
    dead |= {m: "no answer" for m, o in outcomes.items() if isinstance(o, Silent) and not o.alive}
    if dead:
        told = ", ".join(f"{member} ({why})" for member, why in sorted(dead.items()))
        raise MemberDiedError(f"members died: {told}; restore under a new fence", members=tuple(sorted(dead)))
    failures = [o.error for _, o in sorted(outcomes.items()) if isinstance(o, Failed)]
    own = [error for error in failures if not isinstance(error, PeerLostError)]
    if own:
        raise min(own, key=lambda error: not isinstance(error, CkptStoreError))
    lost = sorted(str(m) for m, o in outcomes.items() if not isinstance(o, Answered))
    if lost:
        raise MemberDiedError(
            f"{', '.join(lost)} lost a peer while every member lives; regroup under a new fence", members=()
        ) from (failures[0] if failures else None)
    return {member: outcome.value for member, outcome in outcomes.items() if isinstance(outcome, Answered)}
