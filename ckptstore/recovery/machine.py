"""The order of recovery as a pure table: (state, event) -> (state, actions).

fence -> restart -> regroup -> restore -> ledger -> publish -> converge -> admit -> run, always in this
order; a fresh start takes the same path with the origin `start`. Apart from the coordinator that acts it
out, so that every pair can be enumerated and every sequence replayed: it sees no clock, store or process.
Why each row is as it is: protocol, the recovery table; docs/explanation/recovery.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class State(Enum):
    """Where a recovery stands; the value is the phase it belongs to in reports."""

    FENCING = ("Fencing", 0)
    RESTARTING = ("Restarting", 0)
    REGROUPING = ("Restarting", 1)
    RESTORING = ("Restarting", 2)
    REBUILDING = ("Resuming", 0)
    PUBLISHING = ("Resuming", 1)
    CONVERGING = ("Resuming", 2)
    RUNNING = ("Running", 0)
    HALTED = ("Halted", 0)

    @property
    def phase(self) -> str:
        """One of Fencing, Restarting, Resuming, Running, Halted."""
        return self.value[0]


# -- what can happen


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDied:
    """Members of the roster are gone, or do not answer, or lost their peers; `members` may be empty then."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDied:
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDown:
    """The store did not do what was asked, after its own retries."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRaised:
    """`lives` counts fences in a row with this origin and no commit, this one included.

    `older` tells whether there is an older checkpoint to fall back to.
    """

    fence: int
    lives: int
    older: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceLost:
    """Another incarnation raised a newer fence."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Every trainer rank is alive and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The ranks have met under the new fence, and refuse calls of older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """All ranks hold the origin, or the initial state of a fresh start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCorrupt:
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRebuilt:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The restored policy is the newest publication, under the new fence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converged:
    """`engines` serve the newest publication, proven by its digest."""

    engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetriesSpent:
    """A bounded wait or a row of tries ended without success: a person must look."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The job has done what it was asked to do."""


Event = (
    TrainerDied
    | RolloutDied
    | StoreDown
    | FenceRaised
    | FenceLost
    | Gathered
    | Met
    | Restored
    | RestoreCorrupt
    | LedgerRebuilt
    | Published
    | Converged
    | RetriesSpent
    | Finished
)
EVENTS: tuple[type[Any], ...] = Event.__args__


# -- what is to be done


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseFence:
    """Begin a new incarnation. `fall_back`: from a checkpoint older than the last origin."""

    reason: str
    fall_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartMembers:
    """Start what is dead, then ask all whether they answer: nobody may wait for a peer that still starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Tell all the new fence, free whoever waits in the old group, and let the ranks meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """All ranks, from the incarnation's origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkBad:
    """Read the origin again; if it is damaged, say so in the journal."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildLedger:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Announce the cut's publication again, or make the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergeEngines:
    """Bring engines to the newest publication, replacing the dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceEngines:
    """Start engines anew beside the running loop; their leases are issued again."""

    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAdmission:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutAdmission:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Wait a little longer than the last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Append `release`, so that the next `begin` need not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandDown:
    """Exit without touching any process: they belong to whoever raised the newer fence."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Stop the members, append `release`, and report: a person must choose."""

    report: str


Action = (
    RaiseFence
    | RestartMembers
    | Regroup
    | Restore
    | MarkBad
    | RebuildLedger
    | Publish
    | ConvergeEngines
    | ReplaceEngines
    | OpenAdmission
    | ShutAdmission
    | Backoff
    | Release
    | StandDown
    | Halt
)

Next = tuple[State, tuple[Action, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`max_lives` of one origin without a commit before an older one; engines that admission needs."""

    max_lives: int = 3
    min_engines: int = 1


def start(reason: str) -> Next:
    """Where every coordinator begins, the first and whoever replaces a dead one."""
    return State.FENCING, (RaiseFence(reason=reason),)


def step(state: State, event: Event, limits: Limits) -> Next:
    """Give the next state and what to do; the last action of a row is the one that causes the next event."""
    row = TABLE[state][type(event)]
    return row(state, event, limits)


# -- rows

Row = Callable[[State, Any, Limits], Next]


def _stay(state: State, event: Any, limits: Limits) -> Next:
    """Nothing to do: it is being taken care of, or it is a late report of something already over."""
    return state, ()


def _fence_again(state: State, event: TrainerDied, limits: Limits) -> Next:
    died = ", ".join(event.members) or "a peer's connection"
    return State.FENCING, (ShutAdmission(), RaiseFence(reason=f"lost {died}"))


def _raised(state: State, event: FenceRaised, limits: Limits) -> Next:
    if event.lives <= limits.max_lives:
        return State.RESTARTING, (RestartMembers(),)
    loop = f"{event.lives - 1} lives of one recovery point ended without a commit"
    if event.older:
        return State.FENCING, (RaiseFence(reason=f"crash loop: {loop}", fall_back=True),)
    return State.HALTED, (Halt(report=f"{loop}, and there is no older one to fall back to"),)


def _corrupt(state: State, event: RestoreCorrupt, limits: Limits) -> Next:
    return State.FENCING, (MarkBad(why=event.why), RaiseFence(reason=f"restore failed: {event.why}"))


def _converged(state: State, event: Converged, limits: Limits) -> Next:
    if event.engines >= limits.min_engines:
        return State.RUNNING, (OpenAdmission(),)
    return State.CONVERGING, (Backoff(), ConvergeEngines())


def _stand_down(state: State, event: FenceLost, limits: Limits) -> Next:
    return State.HALTED, (StandDown(why=event.why),)


def _halt(state: State, event: RetriesSpent | StoreDown, limits: Limits) -> Next:
    return State.HALTED, (Halt(report=event.why),)


def _refence_when_back(state: State, event: StoreDown, limits: Limits) -> Next:
    return State.FENCING, (Backoff(), RaiseFence(reason=f"the store was down: {event.why}"))


def _finish(state: State, event: Finished, limits: Limits) -> Next:
    return State.HALTED, (Release(),)


def _replace(state: State, event: RolloutDied, limits: Limits) -> Next:
    return State.RUNNING, (ReplaceEngines(engines=event.engines),)


def _to(state: State, *actions: Action) -> Row:
    return lambda _state, _event, _limits: (state, actions)


_ANYWHERE: dict[type[Any], Row] = {
    **{event: _stay for event in EVENTS},
    FenceLost: _stand_down,
    RetriesSpent: _halt,
    TrainerDied: _fence_again,
}

TABLE: Mapping[State, Mapping[type[Any], Row]] = {
    # Dead members are started after the fence, whoever they are.
    State.FENCING: {
        **_ANYWHERE,
        TrainerDied: _stay,
        FenceRaised: _raised,
        StoreDown: _refence_when_back,
    },
    # Engines that die before they are asked to converge are found missing then.
    State.RESTARTING: {
        **_ANYWHERE,
        Gathered: _to(State.REGROUPING, Regroup()),
        StoreDown: _refence_when_back,
    },
    State.REGROUPING: {**_ANYWHERE, Met: _to(State.RESTORING, Restore()), StoreDown: _refence_when_back},
    # A restore is made once a fence (R22): a second try is another life.
    State.RESTORING: {
        **_ANYWHERE,
        Restored: _to(State.REBUILDING, RebuildLedger()),
        RestoreCorrupt: _corrupt,
        StoreDown: _refence_when_back,
    },
    State.REBUILDING: {
        **_ANYWHERE,
        LedgerRebuilt: _to(State.PUBLISHING, Publish()),
        RestoreCorrupt: _corrupt,
        StoreDown: _to(State.REBUILDING, Backoff(), RebuildLedger()),
    },
    State.PUBLISHING: {
        **_ANYWHERE,
        Published: _to(State.CONVERGING, ConvergeEngines()),
        RestoreCorrupt: _corrupt,  # the cut's publication is part of what was to be restored
        StoreDown: _to(State.PUBLISHING, Backoff(), Publish()),
    },
    State.CONVERGING: {
        **_ANYWHERE,
        Converged: _converged,
        RestoreCorrupt: _corrupt,
        RolloutDied: _to(State.CONVERGING, ConvergeEngines()),
        StoreDown: _to(State.CONVERGING, Backoff(), ConvergeEngines()),
    },
    # The loop has its own backlog; StoreDown means that it is full, and stopping loses nothing.
    State.RUNNING: {**_ANYWHERE, RolloutDied: _replace, StoreDown: _halt, Finished: _finish},
    State.HALTED: {event: _stay for event in EVENTS},
}
