"""What one process holds to make requests to a server: a client, threads, and patience.

It stands apart from the store because it decides nothing about objects: it repeats what may be repeated within a bound,
and makes everything anew in a forked process, which shares its parent's sockets and has none of its threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, TypeVar

import tenacity

from ckptstore.store.request import Client, RequestError

REQUESTS_MAX: Final = 8  # side by side, of one store
WAIT_S_FIRST: Final = 0.05  # at most, before the second try; doubled for each one after it
WAIT_S_MAX: Final = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    pid: int
    client: Client
    pool: ThreadPoolExecutor


class Connection:
    """The client that `open_client` makes, once a process, and what is done with it."""

    def __init__(self, *, open_client: Callable[[], Client], retry_s: float) -> None:
        self._open_client = open_client
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._held: _Held | None = None

    @property
    def client(self) -> Client:
        return self._hold().client

    def submit(self, act: Callable[[], _T]) -> Future[_T]:
        """Do it beside other requests."""
        return self._hold().pool.submit(act)

    def close(self) -> None:
        """May be used again: all is made anew then."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None and held.pid == os.getpid():
            held.pool.shutdown()
            held.client.close()

    def _hold(self) -> _Held:
        with self._lock:
            if self._held is None or self._held.pid != os.getpid():
                pool = ThreadPoolExecutor(REQUESTS_MAX, thread_name_prefix="ckptstore-request")
                self._held = _Held(pid=os.getpid(), client=self._open_client(), pool=pool)
            return self._held

    def all(self, acts: Sequence[Callable[[], None]]) -> None:
        """Do all side by side; the first failure, once none is running any more: they use the caller's memory."""
        if len(acts) == 1:
            acts[0]()
            return
        pool = self._hold().pool
        futures = [pool.submit(act) for act in acts]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()

    def attempt(self, act: Callable[[], _T]) -> _T:
        """Until it is done, refused, or `retry_s` is over: the last failure then."""
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=WAIT_S_FIRST, max=WAIT_S_MAX),
            stop=tenacity.stop_before_delay(self._retry_s),
            reraise=True,
        )
        return again(act)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, RequestError) and error.kind in ("again", "maybe")
