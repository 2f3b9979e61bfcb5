"""Signals that end a command: raised until heard, never while it cleans up, and forgotten afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

import pytest

from ckptstore.cli.signals import Signals, interrupt

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
LATER_S = 1000.0  # never comes in a test: the alarm is raised by hand


class ToldError(Exception):
    """What the tests' signals raise."""


def tell(number: int) -> NoReturn:
    raise ToldError(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, object]]:
    """Those before the test, which must be those after it. The runner's own alarm waits meanwhile."""
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0)
    before: dict[int, object] = {number: signal.getsignal(number) for number in ALL}
    yield before
    after: dict[int, object] = {number: signal.getsignal(number) for number in ALL}
    left = signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number in ALL:
        signal.signal(number, before[number])  # type: ignore[arg-type]  # what getsignal gave
    signal.setitimer(signal.ITIMER_REAL, *timer)
    assert after == before and left == (0.0, 0.0)


@pytest.mark.parametrize("again_s", [None, LATER_S])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_what_was_asked_for(number: signal.Signals, again_s: float | None) -> None:
    with pytest.raises(ToldError, match=str(int(number))), Signals({number: tell}, again_s=again_s):
        signal.raise_signal(number)


def test_it_is_raised_again_until_nothing_is_to_be_heard() -> None:
    with Signals({signal.SIGTERM: tell}, again_s=LATER_S) as signals:
        with suppress(ToldError):  # as a destructor drops it
            signal.raise_signal(signal.SIGTERM)
        for _ in range(3):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
            with pytest.raises(ToldError):
                signal.raise_signal(signal.SIGALRM)
        signals.deafen()
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.raise_signal(number)


def test_without_again_no_alarm_is_set() -> None:
    with Signals({signal.SIGTERM: tell}):
        with suppress(ToldError):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_was_to_be_ignored_stays_ignored(handlers: dict[int, object]) -> None:
    """As under nohup, or in a shell's background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals({signal.SIGHUP: tell, signal.SIGTERM: tell}):
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(ToldError):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, handlers[signal.SIGHUP])  # type: ignore[arg-type]  # what getsignal gave


def test_other_threads_leave_signals_alone(handlers: dict[int, object]) -> None:
    def inside() -> object:
        with Signals({signal.SIGTERM: tell}):
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(inside).result() == handlers[signal.SIGTERM]


def test_interrupt_is_what_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), Signals({signal.SIGTERM: interrupt}):
        signal.raise_signal(signal.SIGTERM)
