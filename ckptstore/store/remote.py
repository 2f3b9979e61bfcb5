"""A Store on a server that is reached by requests: retries, reading back, ranges and parts in parallel.

Whoever speaks to the server (`Client`) makes one request a call and says how it failed; here it is decided
what that means. No reply is believed on its own: a create whose reply was lost, or that was refused after
one was lost, is settled by comparing the object with what was to be written (docs/reference/format-v1.md).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import tenacity

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.store.base import (
    Buffer,
    ObjectInfo,
    Store,
    Upload,
    byte_views,
    check_key,
    check_prefix,
    check_range,
    writable_views,
)
from ckptstore.store.collected import CollectedUpload
from ckptstore.store.request import Client, RequestError, split

RANGE_NBYTES: Final = 16 << 20  # one request of a larger read
PART_NBYTES: Final = 32 << 20  # one request of a larger create
WHOLE_NBYTES_MAX: Final = 64 << 20  # created by a single request
PARTS_MAX: Final = 10_000  # the limit of S3
REQUESTS_MAX: Final = 8  # side by side, of one read or create
WAIT_S_FIRST: Final = 0.05  # at most, before the second try; doubled for each one after it
WAIT_S_MAX: Final = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What one process holds: a fork shares its parent's sockets and has none of its threads."""

    pid: int
    client: Client
    pool: ThreadPoolExecutor


class RemoteStore:
    """A Store over the client that `open_client` makes, once a process.

    A failed request that may be repeated is repeated for `retry_s` seconds, counted from the first one.
    """

    def __init__(self, *, url: str, open_client: Callable[[], Client], retry_s: float) -> None:
        self._url = url
        self._open_client = open_client
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._held: _Held | None = None

    @property
    def url(self) -> str:
        return self._url

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        check_key(key)
        self._write("create", key, byte_views(data), exclusive=True)

    def upload(self, key: str, nbytes_max: int) -> Upload:
        check_key(key)
        return CollectedUpload(lambda blocks: self.create(key, blocks))

    def replace(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        check_key(key)
        self._write("replace", key, byte_views(data), exclusive=False)

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        check_key(key)
        if start < 0 or (nbytes is not None and nbytes < 0):
            check_range(self.url, key, 0, start, nbytes)
        if nbytes is None:
            # What is asked for without knowing its size (journal entries, parts) is small: one request.
            try:
                return self._try(lambda: self._client.get_rest(key, start))
            except RequestError as error:
                self._raise_unless_beyond(key, error)
            check_range(self.url, key, self.size(key), start, None)
            return b""
        target = bytearray(nbytes)
        self.read_into(key, start, [target])
        return bytes(target)

    def read_into(self, key: str, start: int, targets: Sequence[Buffer]) -> None:
        check_key(key)
        views = writable_views(targets)
        wanted = sum(view.nbytes for view in views)
        if not wanted or start < 0:
            check_range(self.url, key, self.size(key) if start >= 0 else 0, start, wanted)
            return

        def get(place: int, pieces: Sequence[memoryview]) -> None:
            try:
                self._try(lambda: self._client.get(key, place, pieces))
            except RequestError as error:
                self._raise_unless_beyond(key, error)
                check_range(self.url, key, self.size(key), start, wanted)
                raise self._unavailable("read", key, error) from error  # the server contradicts itself

        self._all([partial(get, start + at, pieces) for at, pieces in split(views, RANGE_NBYTES)])

    def size(self, key: str) -> int:
        check_key(key)
        try:
            return self._try(lambda: self._client.size(key))
        except RequestError as error:
            raise self._unreadable(key, error) from error

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        try:
            # Whole before the first is given: a page that is asked for again must not show a key twice.
            found = self._try(lambda: tuple(self._client.list(prefix)))
        except RequestError as error:
            raise self._unavailable("list", prefix, error) from error
        yield from found

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._try(lambda: self._client.delete(key))
        except RequestError as error:
            if error.kind != "absent":
                raise self._unavailable("delete", key, error) from error

    def settle(self, keys: Sequence[str]) -> None:
        for key in keys:  # what can be seen on an object store is durable there
            check_key(key)

    def close(self) -> None:
        with self._lock:
            held, self._held = self._held, None
        if held is not None and held.pid == os.getpid():
            held.pool.shutdown()
            held.client.close()

    # -- writing ----------------------------------------------------------------------------------

    def _write(self, verb: str, key: str, views: Sequence[memoryview], *, exclusive: bool) -> None:
        if sum(view.nbytes for view in views) <= WHOLE_NBYTES_MAX:
            self._settled(
                verb,
                key,
                views,
                lambda: self._client.put(key, views, exclusive=exclusive),
                exclusive=exclusive,
            )
            return
        upload = self._sent(verb, key, lambda: self._client.begin_parts(key))
        try:
            tags = self._put_parts(verb, key, upload, views)
            self._settled(
                verb,
                key,
                views,
                lambda: self._client.end_parts(key, upload, tags, exclusive=exclusive),
                exclusive=exclusive,
            )
        except BaseException:
            with contextlib.suppress(RequestError):  # the first failure is the one to tell
                self._client.drop_parts(key, upload)
            raise

    def _put_parts(self, verb: str, key: str, upload: str, views: Sequence[memoryview]) -> Sequence[str]:
        nbytes = sum(view.nbytes for view in views)
        pieces = list(split(views, max(PART_NBYTES, -(-nbytes // PARTS_MAX))))
        tags = [""] * len(pieces)

        def put(number: int, part: Sequence[memoryview]) -> None:
            tags[number] = self._sent(verb, key, lambda: self._client.put_part(key, upload, number + 1, part))

        self._all([partial(put, number, part) for number, (_, part) in enumerate(pieces)])
        return tags

    def _sent(self, verb: str, key: str, act: Callable[[], _T]) -> _T:
        """A request of which nothing shows, so that it can be repeated freely."""
        try:
            return self._try(act)
        except RequestError as error:
            raise self._unavailable(verb, key, error) from error

    def _settled(
        self, verb: str, key: str, views: Sequence[memoryview], act: Callable[[], None], *, exclusive: bool
    ) -> None:
        """The request that makes the object show, and what became of it, whatever was heard."""
        unsure = False

        def once() -> None:
            nonlocal unsure
            try:
                act()
            except RequestError as error:
                unsure = unsure or error.kind == "maybe"
                raise

        try:
            self._try(once)
            return
        except RequestError as error:
            failure = error
        if not unsure:
            if exclusive and failure.kind == "taken":
                raise self._taken(key) from failure
            raise self._unavailable(verb, key, failure) from failure
        try:
            if self._holds(key, views):
                return
        except NotFoundError:
            pass  # it may still be on its way
        except CkptStoreError as error:
            raise self._unknown(key, failure) from error
        else:
            if exclusive:
                raise self._taken(key) from failure
        raise self._unknown(key, failure) from failure

    def _holds(self, key: str, views: Sequence[memoryview]) -> bool:
        """Whether the object is what was to be written. Errors as for `read`."""
        if self.size(key) != sum(view.nbytes for view in views):
            return False
        for start, pieces in split(views, RANGE_NBYTES):
            held = memoryview(self.read(key, start=start, nbytes=sum(piece.nbytes for piece in pieces)))
            for piece in pieces:
                if held[: piece.nbytes] != piece:
                    return False
                held = held[piece.nbytes :]
        return True

    # -- requests ---------------------------------------------------------------------------------

    @property
    def _client(self) -> Client:
        return self._holding().client

    def _holding(self) -> _Held:
        with self._lock:
            if self._held is None or self._held.pid != os.getpid():
                pool = ThreadPoolExecutor(REQUESTS_MAX, thread_name_prefix="ckptstore-request")
                self._held = _Held(pid=os.getpid(), client=self._open_client(), pool=pool)
            return self._held

    def _all(self, acts: Sequence[Callable[[], None]]) -> None:
        """Do all side by side; the first failure, once none is running any more: they use the caller's memory."""
        if len(acts) == 1:
            acts[0]()
            return
        pool = self._holding().pool
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

    def _try(self, act: Callable[[], _T]) -> _T:
        """Until it is done, refused, or `retry_s` is over: the last failure then."""
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=WAIT_S_FIRST, max=WAIT_S_MAX),
            stop=tenacity.stop_before_delay(self._retry_s),
            reraise=True,
        )
        return again(act)

    # -- errors -----------------------------------------------------------------------------------

    def _raise_unless_beyond(self, key: str, error: RequestError) -> None:
        if error.kind != "beyond":
            raise self._unreadable(key, error) from error

    def _taken(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"{key} in {self.url} is taken; read it to see by whom", url=self.url, key=key
        )

    def _unreadable(self, key: str, error: RequestError) -> CkptStoreError:
        if error.kind == "absent":
            return NotFoundError(f"there is no {key} in {self.url}", url=self.url, key=key)
        return self._unavailable("read", key, error)

    def _unknown(self, key: str, error: RequestError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{key} in {self.url} may or may not have been written: {error.reason}; read it back before "
            "deciding anything",
            url=self.url,
            key=key,
            reason=error.reason,
        )

    def _unavailable(self, verb: str, key: str, error: RequestError) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"cannot {verb} {key or 'all'} in {self.url}: {error.reason}; {error.advice}",
            url=self.url,
            key=key,
            reason=error.reason,
        )


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, RequestError) and error.kind in ("again", "maybe")


def _conforms(store: RemoteStore) -> Store:
    return store  # checked by mypy
