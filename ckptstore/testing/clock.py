"""A clock for tests: time passes only when somebody sleeps or the test says so."""

from __future__ import annotations

import threading

from ckptstore.clock import Clock, utc_label

_REAL_S_MAX = 60.0  # so that a mistake in a test ends as a failure and not as a hang


class FakeClock:
    """Virtual seconds. By default a sleep moves the time itself and returns at once.

    With `auto_advance=False` a sleep blocks its thread until `advance` has moved the time far enough;
    `wait_for_sleepers` tells when threads have come to rest.
    """

    def __init__(self, *, unix_s: float = 1_767_225_600.0, auto_advance: bool = True) -> None:
        self._unix_s = unix_s
        self._auto_advance = auto_advance
        self._elapsed_s = 0.0
        self._sleepers = 0
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        with self._changed:
            return self._elapsed_s

    def now(self) -> str:
        with self._changed:
            return utc_label(self._unix_s + self._elapsed_s)

    def sleep(self, duration_s: float) -> None:
        if duration_s < 0:
            raise ValueError(f"cannot sleep {duration_s} s")
        if self._auto_advance:
            self.advance(duration_s)
            return
        with self._changed:
            until_s = self._elapsed_s + duration_s
            self._sleepers += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._elapsed_s >= until_s, _REAL_S_MAX):
                    raise TimeoutError(f"nobody advanced the clock to {until_s} s")
            finally:
                self._sleepers -= 1

    def advance(self, duration_s: float) -> None:
        """Let `duration_s` pass and wake who has slept enough."""
        with self._changed:
            self._elapsed_s += duration_s
            self._changed.notify_all()

    def wait_for_sleepers(self, count: int = 1) -> None:
        """Return when at least `count` threads sleep."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._sleepers >= count, _REAL_S_MAX):
                raise TimeoutError(f"{self._sleepers} threads sleep, not {count}")


def _conforms(clock: FakeClock) -> Clock:
    return clock  # checked by mypy
