"""Every pair is defined, and no sequence of events opens admission before the policy is published."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.recovery import machine as m
from ckptstore.recovery.machine import State

LIMITS = m.Limits(max_lives=3, min_engines=2)
SAMPLES: dict[type, tuple[m.Event, ...]] = {
    m.TrainerDied: (m.TrainerDied(members=("trainer/1",)), m.TrainerDied(members=())),
    m.RolloutDied: (m.RolloutDied(engines=("rollout/0",)),),
    m.StoreDown: (m.StoreDown(why="disk full"),),
    m.FenceRaised: tuple(
        m.FenceRaised(fence=2, lives=lives, older=older) for lives in (1, 3, 4) for older in (False, True)
    ),
    m.FenceLost: (m.FenceLost(why="fence 9"),),
    m.Gathered: (m.Gathered(),),
    m.Met: (m.Met(),),
    m.Restored: (m.Restored(),),
    m.RestoreCorrupt: (m.RestoreCorrupt(why="a chunk"),),
    m.LedgerRebuilt: (m.LedgerRebuilt(),),
    m.Published: (m.Published(),),
    m.Converged: (m.Converged(engines=0), m.Converged(engines=1), m.Converged(engines=2)),
    m.RetriesSpent: (m.RetriesSpent(why="no answer"),),
    m.Finished: (m.Finished(),),
}
ALL = [event for events in SAMPLES.values() for event in events]
# In this order, each only after the one before it under the same fence.
ORDER = (
    m.RaiseFence,
    m.RestartMembers,
    m.Regroup,
    m.Restore,
    m.RebuildLedger,
    m.Publish,
    m.ConvergeEngines,
    m.OpenAdmission,
)
WAITED_FOR = {
    State.FENCING: m.RaiseFence,
    State.RESTARTING: m.RestartMembers,
    State.REGROUPING: m.Regroup,
    State.RESTORING: m.Restore,
    State.REBUILDING: m.RebuildLedger,
    State.PUBLISHING: m.Publish,
    State.CONVERGING: m.ConvergeEngines,
}
SUCCESS: dict[type, m.Event] = {
    m.RaiseFence: m.FenceRaised(fence=1, lives=1, older=False),
    m.RestartMembers: m.Gathered(),
    m.Regroup: m.Met(),
    m.Restore: m.Restored(),
    m.RebuildLedger: m.LedgerRebuilt(),
    m.Publish: m.Published(),
    m.ConvergeEngines: m.Converged(engines=2),
}


def test_the_samples_name_every_event() -> None:
    assert set(SAMPLES) == set(m.EVENTS)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", ALL, ids=str)
def test_every_pair_is_defined_and_leaves_exactly_one_thing_to_wait_for(state: State, event: m.Event) -> None:
    after, actions = m.step(state, event, LIMITS)
    # A state that waits for an event has the action that causes it last in the row, or under way already.
    if actions and after in WAITED_FOR:
        assert type(actions[-1]) is WAITED_FOR[after]
        assert not any(type(action) in SUCCESS for action in actions[:-1])
    if after is not state and after in WAITED_FOR:
        assert actions


def test_nothing_happens_after_a_halt() -> None:
    assert all(m.step(State.HALTED, event, LIMITS) == (State.HALTED, ()) for event in ALL)


def test_a_start_takes_the_whole_path_in_order() -> None:
    state, actions = m.start("the first")
    taken = [type(action) for action in actions]
    while state is not State.RUNNING:
        state, actions = m.step(state, SUCCESS[type(actions[-1])], LIMITS)
        taken += [type(action) for action in actions]
    assert tuple(taken) == ORDER


class Checker:
    """Follows a run of the machine and refuses an action out of order."""

    def __init__(self) -> None:
        self.done: set[type] = set()
        self.admitted = False
        self.state, actions = m.start("test")
        self.act(actions)

    def act(self, actions: tuple[m.Action, ...]) -> None:
        for action in actions:
            kind = type(action)
            if kind is m.RaiseFence:
                self.done = set()
            elif kind in ORDER:
                before = ORDER[ORDER.index(kind) - 1]
                assert before in self.done, f"{kind.__name__} before {before.__name__}"
            if kind is m.OpenAdmission:
                self.admitted = True
            if kind in (m.ShutAdmission, m.Halt, m.StandDown):
                self.admitted = False
        self.pending = {type(action) for action in actions}

    def event(self, event: m.Event) -> None:
        for action, success in SUCCESS.items():
            if type(event) is type(success) and self.state is next(
                (state for state, kind in WAITED_FOR.items() if kind is action), None
            ):
                self.done.add(action)
        self.state, actions = m.step(self.state, event, LIMITS)
        self.act(actions)
        assert not (self.state in WAITED_FOR and self.admitted)


@given(events=st.lists(st.sampled_from(ALL), max_size=60))
def test_no_sequence_of_events_breaks_the_order(events: list[m.Event]) -> None:
    checker = Checker()
    for event in events:
        checker.event(event)


def test_every_short_sequence_of_events_keeps_the_order() -> None:
    for events in itertools.product(ALL, repeat=3):
        checker = Checker()
        for event in events:
            checker.event(event)


@given(
    events=st.lists(
        st.sampled_from([e for e in ALL if type(e) not in (m.RetriesSpent, m.FenceLost, m.Finished)]),
        max_size=40,
    )
)
def test_whatever_happened_before_a_recovery_that_is_left_alone_ends_running(events: list[m.Event]) -> None:
    state, _ = m.start("test")
    for event in events:
        state, _ = m.step(state, event, LIMITS)
    for _ in range(10):
        if state in (State.RUNNING, State.HALTED):
            break
        state, _ = m.step(state, SUCCESS[WAITED_FOR[state]], LIMITS)
    assert state in (State.RUNNING, State.HALTED)


def test_a_rollout_death_needs_no_fence() -> None:
    for state in State:
        _, actions = m.step(state, m.RolloutDied(engines=("rollout/1",)), LIMITS)
        assert not any(isinstance(action, m.RaiseFence) for action in actions)
    assert m.step(State.RUNNING, m.RolloutDied(engines=("rollout/1",)), LIMITS) == (
        State.RUNNING,
        (m.ReplaceEngines(engines=("rollout/1",)),),
    )


def test_a_crash_loop_falls_back_to_an_older_checkpoint_and_then_halts() -> None:
    fence = m.FenceRaised(fence=5, lives=4, older=True)
    state, actions = m.step(State.FENCING, fence, LIMITS)
    assert state is State.FENCING
    (action,) = actions
    assert isinstance(action, m.RaiseFence)
    assert action.fall_back
    fence = m.FenceRaised(fence=5, lives=4, older=False)
    state, actions = m.step(State.FENCING, fence, LIMITS)
    assert state is State.HALTED
    assert isinstance(actions[0], m.Halt)


def test_a_lost_fence_stands_down_without_touching_a_process() -> None:
    for state in State:
        after, actions = m.step(state, m.FenceLost(why="fence 9"), LIMITS)
        assert after is State.HALTED
        assert all(isinstance(action, m.StandDown) for action in actions)


def test_too_few_engines_keep_admission_shut() -> None:
    state, actions = m.step(State.CONVERGING, m.Converged(engines=1), LIMITS)
    assert state is State.CONVERGING
    assert actions == (m.Backoff(), m.ConvergeEngines())


def test_phases_are_the_five_of_the_design() -> None:
    assert {state.phase for state in State} == {"Running", "Fencing", "Restarting", "Resuming", "Halted"}
