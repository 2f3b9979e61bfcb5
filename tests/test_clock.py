from __future__ import annotations

import re
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.clock import SystemClock, tries
from ckptstore.testing import FakeClock


def test_the_system_clock_never_goes_back_and_labels_in_utc() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    clock.sleep(0)
    assert clock.monotonic() >= before
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", clock.now())


def test_virtual_time_moves_by_sleeping() -> None:
    clock = FakeClock(unix_s=0)
    clock.sleep(90)
    assert clock.monotonic() == 90
    assert clock.now() == "1970-01-01T00:01:30Z"


def test_a_sleeper_wakes_when_its_time_has_come_and_not_before() -> None:
    clock, woken = FakeClock(auto_advance=False), threading.Event()

    def sleep() -> None:
        clock.sleep(10)
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    clock.wait_for_sleepers()
    clock.advance(9)
    clock.wait_for_sleepers()
    assert not woken.is_set()
    clock.advance(1)
    sleeper.join(60)
    assert woken.is_set()


@given(
    deadline_s=st.floats(0, 1e4),
    first_s=st.floats(0.001, 10),
    most_s=st.floats(0.001, 100),
    growth=st.floats(1.0, 3.0),
)
def test_tries_begin_at_once_end_at_the_deadline_and_are_bounded(
    deadline_s: float, first_s: float, most_s: float, growth: float
) -> None:
    clock = FakeClock()
    first_s, most_s = max(first_s, deadline_s / 1e3), max(most_s, deadline_s / 1e3)
    moments = [
        (clock.monotonic(), left_s)
        for left_s in tries(clock, deadline_s=deadline_s, first_s=first_s, most_s=most_s, growth=growth)
    ]
    assert moments[0] == (0, deadline_s)
    assert moments[-1][0] == pytest.approx(deadline_s) and moments[-1][1] == 0
    assert all(left_s > 0 for _, left_s in moments[:-1])
    waits = [later - sooner for (sooner, _), (later, _) in pairwise(moments)]
    assert all(wait_s <= max(first_s, most_s) * (1 + 1e-6) for wait_s in waits)


def test_what_comes_true_in_the_last_wait_is_seen() -> None:
    clock = FakeClock()
    assert any(clock.monotonic() >= 5 for _ in tries(clock, deadline_s=5))
