"""Bytes that may be in use at once, leased and given back: one number bounds what a save or a load takes.

It stands apart because everyone who allocates for bytes in flight shares it, and because a test reads its
high-water mark instead of the machine's memory. Leases are granted strictly in the order of asking, so a
large one is not passed over by small ones for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from ckptstore.errors import BudgetExceededError, InvalidInputError

LEASE_TIMEOUT_S = 600.0


class Lease:
    """`nbytes` of a budget until `release`, or until its `with` is left."""

    __slots__ = ("_budget", "_held", "nbytes")

    def __init__(self, budget: ByteBudget, nbytes: int) -> None:
        self._budget = budget
        self._held = True
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the bytes back; what was given back already stays so. From any thread."""
        self._budget._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Waiting:
    __slots__ = ("granted", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.granted = threading.Event()


class ByteBudget:
    """At most `nbytes` leased at any moment. Thread-safe; not for use across a fork.

    `high_water` is the most that was ever leased at once.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise InvalidInputError(
                f"a budget of {nbytes} bytes holds nothing; give 1 or more", nbytes=nbytes
            )
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._leased = 0
        self._high_water = 0

    @property
    def leased(self) -> int:
        """Bytes leased now."""
        with self._lock:
            return self._leased

    @property
    def high_water(self) -> int:
        with self._lock:
            return self._high_water

    def lease(self, nbytes: int, *, timeout_s: float = LEASE_TIMEOUT_S) -> Lease:
        """`nbytes`, once those who asked before have theirs and as many are free.

        BudgetExceededError at once if the whole budget is smaller, or if they are not free after `timeout_s`.
        """
        if nbytes < 0:
            raise InvalidInputError(f"cannot lease {nbytes} bytes; ask for 0 or more", nbytes=nbytes)
        if nbytes > self.nbytes:
            raise BudgetExceededError(
                f"{nbytes} bytes are needed at once, more than the memory budget of {self.nbytes}: raise the budget",
                wanted_nbytes=nbytes,
                budget_nbytes=self.nbytes,
            )
        mine = _Waiting(nbytes)
        with self._lock:
            self._waiting.append(mine)
            self._grant()
        try:
            if not mine.granted.wait(timeout_s) and self._leave(mine):
                raise BudgetExceededError(
                    f"{nbytes} bytes of the memory budget of {self.nbytes} were not free within {timeout_s} s: "
                    f"raise the budget, or find who holds {self.leased} bytes of it",
                    wanted_nbytes=nbytes,
                    budget_nbytes=self.nbytes,
                    waited_s=timeout_s,
                )
        except BudgetExceededError:
            raise
        except BaseException:  # an interrupt: nobody would ever give these bytes back
            if not self._leave(mine):
                self._release(Lease(self, nbytes))
            raise
        return Lease(self, nbytes)

    def try_lease(self, nbytes: int) -> Lease | None:
        """As `lease`, but None at once where that would wait."""
        with self._lock:
            if self._waiting or self._leased + nbytes > self.nbytes:
                return None
            self._take(nbytes)
        return Lease(self, nbytes)

    def _leave(self, mine: _Waiting) -> bool:
        """Wait no longer; False if the bytes were granted meanwhile."""
        with self._lock:
            if mine.granted.is_set():
                return False
            self._waiting.remove(mine)
            self._grant()  # whoever asked after us may need less
            return True

    def _grant(self) -> None:
        while self._waiting and self._leased + self._waiting[0].nbytes <= self.nbytes:
            first = self._waiting.popleft()
            self._take(first.nbytes)
            first.granted.set()

    def _take(self, nbytes: int) -> None:
        self._leased += nbytes
        self._high_water = max(self._high_water, self._leased)

    def _release(self, lease: Lease) -> None:
        with self._lock:
            if lease._held:
                lease._held = False
                self._leased -= lease.nbytes
                self._grant()
