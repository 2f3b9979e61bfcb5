"""Time as the library sees it: a monotonic clock for waits, and the wall clock as a label.

It stands apart so that tests wait in virtual time, and so that no decision can rest on a wall clock:
deadlines run on one process's monotonic clock and may start a report, an abandon or a fence, never a
commit or a delete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Thread-safe."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment of this process; never goes back."""

    def now(self) -> str:
        """The wall clock in UTC, `2026-05-04T10:22:31Z`: a label for people, compared by nobody."""

    def sleep(self, duration_s: float) -> None:
        """Return after at least `duration_s`."""


class SystemClock:
    """The clock of the operating system."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> str:
        return utc_label(time.time())

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


def utc_label(unix_s: float) -> str:
    """`2026-05-04T10:22:31Z` for seconds since 1970."""
    return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def tries(
    clock: Clock, *, deadline_s: float, first_s: float = 0.001, most_s: float = 0.5, growth: float = 1.5
) -> Iterator[float]:
    """Yield before each try of a bounded wait, with the seconds left (0 before the last try).

    The first comes at once; waits between grow from `first_s` to `most_s`. There is always a try at or
    after the deadline, so what came true in the last wait is seen.
    """
    start, wait_s = clock.monotonic(), first_s
    while True:
        left_s = max(start + deadline_s - clock.monotonic(), 0.0)
        yield left_s
        if left_s == 0.0:
            return
        clock.sleep(min(wait_s, left_s))
        wait_s = min(wait_s * growth, most_s)


def _conforms(clock: SystemClock) -> Clock:
    return clock  # checked by mypy
