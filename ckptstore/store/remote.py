"""A Store on a server that is reached by requests: retries, reading back, ranges and parts in parallel.

Whoever speaks to the server (`Client`) makes one request a call and says how it failed; here it is decided
what that means. No reply is believed on its own: a create whose reply was lost, or that was refused after
one was lost, is settled by comparing the object with what was to be written (docs/reference/format-v1.md).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.store.base import (
    BLOCK_NBYTES,
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
from ckptstore.store.connection import Connection
from ckptstore.store.partupload import PartUpload
from ckptstore.store.request import Client, Parts, PartsClient, RequestError, split

RANGE_NBYTES: Final = 16 << 20  # one request of a larger read
PART_NBYTES: Final = 32 << 20  # one request of a larger create
WHOLE_NBYTES_MAX: Final = 64 << 20  # created by a single request
PARTS_MAX: Final = 10_000  # the limit of S3
_T = TypeVar("_T")


class RemoteStore:
    """A Store over the client that `open_client` makes, once a process.

    A failed request that may be repeated is repeated for `retry_s` seconds, counted from the first one.
    """

    def __init__(self, *, url: str, open_client: Callable[[], Client], retry_s: float) -> None:
        self._url = url
        self._connection = Connection(open_client=open_client, retry_s=retry_s)

    @property
    def url(self) -> str:
        return self._url

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        check_key(key)
        views = byte_views(data)
        self._check_create(key)
        self._write("create", key, views, exclusive=True)

    def upload(self, key: str, nbytes_max: int) -> Upload:
        check_key(key)
        self._check_create(key)
        if self._client.parts is None:
            return CollectedUpload(lambda blocks: self.create(key, blocks))
        if nbytes_max > PARTS_MAX * BLOCK_NBYTES:
            raise InvalidInputError(
                f"{key} of {nbytes_max} bytes would be more than {PARTS_MAX} parts of {BLOCK_NBYTES}, which no S3 "
                "takes; write smaller segments",
                key=key,
                nbytes=nbytes_max,
            )
        return PartUpload(self, key)

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
                return self._connection.attempt(lambda: self._client.get_rest(key, start))
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
                self._connection.attempt(lambda: self._client.get(key, place, pieces))
            except RequestError as error:
                self._raise_unless_beyond(key, error)
                check_range(self.url, key, self.size(key), start, wanted)
                raise self._unavailable("read", key, error) from error  # the server contradicts itself

        self._connection.all([partial(get, start + at, pieces) for at, pieces in split(views, RANGE_NBYTES)])

    def size(self, key: str) -> int:
        check_key(key)
        try:
            return self._connection.attempt(lambda: self._client.size(key))
        except RequestError as error:
            raise self._unreadable(key, error) from error

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        try:
            # Whole before the first is given: a page that is asked for again must not show a key twice.
            found = self._connection.attempt(lambda: tuple(self._client.list(prefix)))
        except RequestError as error:
            raise self._unavailable("list", prefix, error) from error
        yield from found

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._connection.attempt(lambda: self._client.delete(key))
        except RequestError as error:
            if error.kind != "absent":
                raise self._unavailable("delete", key, error) from error

    def settle(self, keys: Sequence[str]) -> None:
        for key in keys:  # what can be seen on an object store is durable there
            check_key(key)

    def close(self) -> None:
        self._connection.close()

    # -- writing ----------------------------------------------------------------------------------

    def _check_create(self, key: str) -> None:
        problem = self._opened("create", key).no_create
        if problem is not None:
            raise InvalidInputError(
                f"{self.url} cannot hold a run: {problem}, so two jobs could both believe to have committed; use "
                "another store (reading works)",
                url=self.url,
                problem=problem,
            )

    def _write(self, verb: str, key: str, views: Sequence[memoryview], *, exclusive: bool) -> None:
        nbytes = sum(view.nbytes for view in views)
        if nbytes <= WHOLE_NBYTES_MAX or self._opened(verb, key).parts is None:
            self._settled(
                verb,
                key,
                lambda: self._client.put(key, views, exclusive=exclusive),
                lambda: self._holds(key, views),
                exclusive=exclusive,
            )
            return
        parts = self.begin_parts(key, verb)
        try:
            pieces = list(split(views, max(PART_NBYTES, -(-nbytes // PARTS_MAX))))
            tags = [""] * len(pieces)

            def put(number: int, part: Sequence[memoryview]) -> None:
                tags[number] = self.put_part(parts, number + 1, part, verb)

            self._connection.all([partial(put, number, part) for number, (_, part) in enumerate(pieces)])
            self.end_parts(parts, tags, verb, exclusive=exclusive)
        except BaseException:
            self.drop_parts(parts)
            raise

    def begin_parts(self, key: str, verb: str = "create") -> Parts:
        """An object that is sent in parts. Nothing of it shows before `end_parts`."""
        mark = secrets.token_hex(16)
        upload = self._sent(verb, key, lambda: self._parts.begin_parts(key, mark))
        return Parts(key=key, upload=upload, mark=mark)

    def put_part(self, parts: Parts, number: int, views: Sequence[memoryview], verb: str = "create") -> str:
        """The tag of part `number`, from 1 on, once it is there."""
        return self._sent(verb, parts.key, lambda: self._parts.put_part(parts, number, views))

    def end_parts(
        self,
        parts: Parts,
        tags: Sequence[str],
        verb: str = "create",
        *,
        exclusive: bool = True,
        unsure: bool = False,
    ) -> None:
        """Make the object, with the errors of `create`. `unsure`: an earlier call may have done so."""
        self._settled(
            verb,
            parts.key,
            lambda: self._parts.end_parts(parts, tags, exclusive=exclusive),
            lambda: self._is_marked(parts),
            exclusive=exclusive,
            unsure=unsure,
        )

    def drop_parts(self, parts: Parts) -> None:
        """Forget what was sent; what cannot be forgotten now is left to the rules of the bucket."""
        with contextlib.suppress(RequestError):
            self._parts.drop_parts(parts)

    def submit(self, act: Callable[[], _T]) -> Future[_T]:
        """Do it beside other requests."""
        return self._connection.submit(act)

    def _sent(self, verb: str, key: str, act: Callable[[], _T]) -> _T:
        """A request of which nothing shows, so that it can be repeated freely."""
        try:
            return self._connection.attempt(act)
        except RequestError as error:
            raise self._unavailable(verb, key, error) from error

    def _settled(
        self,
        verb: str,
        key: str,
        act: Callable[[], None],
        ours: Callable[[], bool],
        *,
        exclusive: bool,
        unsure: bool = False,
    ) -> None:
        """The request that makes the object show, and what became of it, whatever was heard.

        `ours` looks whether the object there is that of `act`. Errors of it as for `read`.
        """

        def once() -> None:
            nonlocal unsure
            try:
                act()
            except RequestError as error:
                unsure = unsure or error.kind in ("maybe", "unclear")
                raise

        try:
            self._connection.attempt(once)
            return
        except RequestError as error:
            failure = error
        if not unsure:
            if exclusive and failure.kind == "taken":
                raise self._taken(key) from failure
            raise self._unavailable(verb, key, failure) from failure
        try:
            if ours():
                return
        except NotFoundError:
            pass  # it may still be on its way
        except CkptStoreError as error:
            raise self._unknown(key, failure) from error
        else:
            if exclusive:
                raise self._taken(key) from failure
        raise self._unknown(key, failure) from failure

    def _is_marked(self, parts: Parts) -> bool:
        """Whether the object is the one that was sent so. Errors as for `read`."""
        try:
            return self._connection.attempt(lambda: self._parts.mark(parts.key)) == parts.mark
        except RequestError as error:
            raise self._unreadable(parts.key, error) from error

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
        return self._connection.client

    @property
    def _parts(self) -> PartsClient:
        found = self._client.parts
        assert found is not None  # parts are begun only where the client sends some
        return found

    def _opened(self, verb: str, key: str) -> Client:
        """The client, whose settings may be wrong."""
        return self._sent(verb, key, lambda: self._client)

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


def _conforms(store: RemoteStore) -> Store:
    return store  # checked by mypy
