"""Objects on any filesystem of fsspec: `gs://`, `abfs://` and every scheme that it knows and we have no store for.

Create-if-absent is taken only from a filesystem that has it itself. fsspec's own way, which most inherit, is to look
and then to write: two writers can both win, also where no probe sees it. Such a filesystem can be read here, and
every create is refused with the reason, `begin` included. The requests are those of `ckptstore.store.remote`;
fsspec's filesystems repeat some unseen, so whatever they say of a failed write is settled by reading back.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from ckptstore.errors import InvalidInputError
from ckptstore.store.base import ObjectInfo, is_key_segment
from ckptstore.store.remote import RemoteStore
from ckptstore.store.request import Client, Kind, RequestError

TIMEOUT_S: Final = 60.0
RETRY_S: Final = 60.0
_EXTRAS: Final = {"gs": "gcs", "gcs": "gcs"}  # of this package; other schemes' packages are named by fsspec


def open_filesystem(url: str, storage_options: Mapping[str, Any]) -> RemoteStore:
    """The store of a URL of fsspec. `timeout_s` and `retry_s` are ours, all other options the filesystem's.

    InvalidInputError if fsspec has no such scheme, its package is missing, or the options are refused.
    """
    import fsspec

    given = dict(storage_options)
    timeout_s = _seconds(url, "timeout_s", given.pop("timeout_s", TIMEOUT_S))
    retry_s = _seconds(url, "retry_s", given.pop("retry_s", RETRY_S))
    parts = urlsplit(url)
    scheme = parts.scheme
    if parts.password is not None or parts.query or parts.fragment:
        raise InvalidInputError(  # the URL may hold a password, so the message does not
            f"a URL of {scheme}:// has a password or a query; write {scheme}://place/prefix, and give "
            "credentials in the environment or storage_options",
            url=scheme,
        )
    try:
        made = fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise InvalidInputError(
            f"{url}: no store has the scheme {scheme}; use a local path, file://, s3:// or a scheme of fsspec",
            url=url,
        ) from error
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        advice = f"pip install 'ckptstore[{extra}]'" if extra else str(error)
        raise InvalidInputError(
            f"{url} needs a package that is not installed: {advice}", url=url, package=error.name
        ) from error

    def open_client() -> Client:
        return FilesystemClient(_make(url, made, given), url, timeout_s=timeout_s)

    return RemoteStore(url=url.rstrip("/"), open_client=open_client, retry_s=retry_s)


def _make(url: str, made: Any, options: Mapping[str, Any]) -> Any:
    try:
        # Listings must show what others did, and a forked process must not meet its parent's connections.
        return made(**options, use_listings_cache=False, skip_instance_cache=True)
    except (TypeError, ValueError, ImportError) as error:
        raise InvalidInputError(
            f"{url}: fsspec's {made.__name__} cannot be made: {error}; correct storage_options or the environment",
            url=url,
        ) from error


def _seconds(url: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidInputError(f"{url}: {name}={value!r} is no number of seconds above 0; give one", url=url)
    return float(value)


def exclusive_option(filesystem: Any) -> dict[str, Any] | None:
    """The option with which `pipe_file` creates only what is absent; None where the class has no way of its own."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    name = "_pipe_file" if isinstance(filesystem, AsyncFileSystem) else "pipe_file"
    own = getattr(type(filesystem), name)
    if own in (AbstractFileSystem.pipe_file, AsyncFileSystem._pipe_file):
        return None
    taken = inspect.signature(own).parameters
    if "mode" in taken:
        return {"mode": "create"}
    if "overwrite" in taken:  # Azure's
        return {"overwrite": False}
    return None


class FilesystemClient:
    """A Client of the objects below a URL of `filesystem`, which sends each in its own way."""

    parts = None

    def __init__(self, filesystem: Any, url: str, *, timeout_s: float) -> None:
        self._filesystem = filesystem
        self._root = str(filesystem._strip_protocol(url)).rstrip("/")
        self._exclusive = exclusive_option(filesystem)
        self._limit = {"timeout": timeout_s} if filesystem.async_impl else {}

    @property
    def no_create(self) -> str | None:
        if self._exclusive is not None:
            return None
        return f"fsspec's {type(self._filesystem).__name__} looks for a key and then writes it"

    def get(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        wanted = sum(view.nbytes for view in views)
        found = self._cat(key, start, start + wanted)
        if len(found) < wanted:
            raise RequestError("beyond", f"{len(found)} of {wanted} bytes are there")
        held, at = np.frombuffer(found, np.uint8), 0
        for view in views:
            np.copyto(np.frombuffer(view, np.uint8), held[at : at + view.nbytes])
            at += view.nbytes

    def get_rest(self, key: str, start: int) -> bytes:
        found = self._cat(key, start or None, None)
        if not found and start:
            raise RequestError("beyond", "no bytes are there")
        return found

    def _cat(self, key: str, start: int | None, end: int | None) -> bytes:
        try:
            with _told(writes=False):
                found: bytes = self._filesystem.cat_file(self._path(key), start=start, end=end, **self._limit)
        except RequestError as error:
            # A range that no byte is in is refused by each in its own way.
            if error.kind != "absent" and start and self.size(key) <= start:
                raise RequestError("beyond", error.reason) from error
            raise
        return found

    def size(self, key: str) -> int:
        with _told(writes=False):
            found = self._filesystem.info(self._path(key), **self._limit)
        if found.get("type") != "file":
            raise RequestError("absent", "it is a folder")
        return int(found["size"])

    def put(self, key: str, views: Sequence[memoryview], *, exclusive: bool) -> None:
        option = (self._exclusive or {}) if exclusive else {}
        with _told(writes=True):
            self._filesystem.pipe_file(self._path(key), b"".join(views), **option, **self._limit)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        place = self._path(folder) if folder else self._root
        try:
            with _told(writes=False):
                found = self._filesystem.find(place, detail=True, **self._limit)
        except RequestError as error:
            if error.kind == "absent":
                return
            raise
        for name, info in found.items():
            key = str(name).removeprefix(f"{self._root}/")
            shown = key.startswith(prefix) and all(map(is_key_segment, key.split("/")))
            if shown and info.get("type") == "file":
                yield ObjectInfo(key=key, nbytes=int(info["size"]))

    def delete(self, key: str) -> None:
        with _told(writes=False):
            self._filesystem.rm_file(self._path(key), **self._limit)

    def close(self) -> None:
        """fsspec's filesystems end with the process."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


@contextlib.contextmanager
def _told(*, writes: bool) -> Iterator[None]:
    """Whatever the filesystem or the library below it raises, as a RequestError."""
    try:
        yield
    except FileNotFoundError as error:
        # A write that misses something misses the bucket, not the object.
        raise RequestError(
            "refused" if writes else "absent", _text(error), "make the place, or correct the URL"
        ) from error
    except FileExistsError as error:
        raise RequestError("taken", _text(error)) from error
    except PermissionError as error:
        advice = "correct the credentials, or let them read, write, list and delete there"
        raise RequestError("refused", _text(error), advice) from error
    except OSError as error:  # time-outs and lost connections among them
        if _is_refused_condition(error):
            raise RequestError("taken", _text(error)) from error
        kind: Kind = "unclear" if error.errno in (errno.EINVAL, errno.EISDIR) else "maybe"
        raise RequestError(kind if writes or kind == "maybe" else "refused", _text(error)) from error
    except Exception as error:  # each cloud's library has its own classes, and has retried by itself
        if _is_refused_condition(error):
            raise RequestError("taken", _text(error)) from error
        advice = "see what it says, and correct it"
        raise RequestError("unclear" if writes else "refused", _text(error), advice) from error


def _is_refused_condition(error: BaseException) -> bool:
    """Whether a server said 412, or Azure 409, in the words of botocore, gcsfs or azure-core."""
    said = getattr(
        error.__cause__, "response", None
    )  # s3fs knows AWS's wording only, and makes EINVAL of others'
    if isinstance(said, dict) and said.get("Error", {}).get("Code") == "PreconditionFailed":
        return True
    return 412 in (getattr(error, "code", None), getattr(error, "status_code", None)) or (
        getattr(error, "error_code", None) == "BlobAlreadyExists"
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())[:300]}".strip()


def _conforms(client: FilesystemClient) -> Client:
    return client  # checked by mypy
