"""The Store Protocol: what every place that keeps objects must promise, and how a URL finds one.

It stands apart because everything above is argued from these promises alone: whoever implements them
(`ckptstore.testing.StoreConformance` asks for each) can hold a run. Why create-if-absent is enough, and
why no reply is believed without reading back: docs/reference/format-v1.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

import numpy as np

from ckptstore.errors import CorruptError, InvalidInputError

Buffer: TypeAlias = bytes | bytearray | memoryview | np.ndarray[Any, Any]
"""Contiguous memory, taken as bytes whatever its element type."""

BLOCK_NBYTES: Final = 16 << 20  # of an upload: large enough for direct I/O and S3, few enough calls
KEY_NBYTES_MAX: Final = 1024  # the limit of S3
SEGMENT_NBYTES_MAX: Final = 255  # the limit of a file name
TEMPORARY_PREFIX: Final = ".tmp-"  # file names of local stores, never keys

_SEGMENT: Final = re.compile(r"[A-Za-z0-9._-]+")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as a listing shows it."""

    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Way:
    """How an upload's bytes go to the store: "direct" (past the page cache), "buffered", "parts", "whole" or "memory".

    `reason` says why it is not in a better one, without what differs from object to object; None if there is none.
    """

    name: str
    reason: str | None = None


class Upload(Protocol):
    """One object in the making, by blocks of `BLOCK_NBYTES`; nothing of it shows before `finish`.

    `write` may be called by several threads at once, each block once and in any order, but block 0 last (it holds
    what is known last: a segment's header). Whoever made the upload ends it by `abort`, finished or not.
    """

    def write(self, block: int, data: Buffer) -> None:
        """Take a whole block; only the last may be shorter. The memory may be reused on return.

        Raises StoreUnavailableError (a full disk included): the upload is then of no use.
        """

    def finish(self, nbytes: int) -> None:
        """Make the object, `nbytes` long, durable at its key, all or nothing, as `Store.create` and with its errors.

        May be called again after OutcomeUnknownError and StoreUnavailableError.
        """

    @property
    def way(self) -> Way:
        """How the blocks are written, as far as is known; final once `finish` has returned."""

    def abort(self) -> None:
        """Give up what was not finished, and release what is held. Never raises; may be called again."""


class Store(Protocol):
    """Objects by key: created once, never changed, deleted only by gc.

    Safe for use by many threads and many processes at once; every method blocks until it is done.
    Keys are `/`-joined segments of `[A-Za-z0-9._-]`, none empty, `.`, `..` or beginning with `.tmp-`;
    any other key raises InvalidInputError before anything happens. Every method may raise
    StoreUnavailableError, and then has changed nothing.
    """

    @property
    def url(self) -> str:
        """Opens the same objects again through `open_store`."""

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Make `data` (several buffers: end to end) durable at `key`, all or nothing, before returning.

        Of any number of concurrent creates of one key exactly one lands. Raises AlreadyExistsError if
        the key is taken, OutcomeUnknownError if it may or may not have landed (read the key back
        before deciding anything), StoreUnavailableError if it did not land (a full disk included).
        """

    def upload(self, key: str, nbytes_max: int) -> Upload:
        """Begin an object of at most `nbytes_max` bytes whose blocks are written while others are yet to come.

        Raises StoreUnavailableError, and InvalidInputError for a key as `create` does.
        """

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """The bytes from `start`, all the rest for None.

        Raises NotFoundError, and CorruptError if the range goes beyond the end of the object.
        """

    def read_into(self, key: str, start: int, targets: Sequence[Buffer]) -> None:
        """Fill all targets in order with the bytes from `start` on.

        Raises NotFoundError, and CorruptError if the object is too short: the targets then hold
        anything.
        """

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotFoundError."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix` (also in mid-segment), in any order.

        What is created or deleted meanwhile may or may not be shown; nothing half-made ever is.
        """

    def delete(self, key: str) -> None:
        """Remove the object; fine if there is none. For gc and for scratch keys only.

        After a power cut the object may be there again.
        """

    def replace(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Make `data` durable at `key` in place of what is there; readers see old or new, whole.

        For `alive/` and for repair with equal bytes only. Errors as for `create`, but none that the
        key is taken.
        """

    def settle(self, keys: Sequence[str]) -> None:
        """Make durable that these keys, made visible by any process, exist. Absent keys are fine."""

    def close(self) -> None:
        """Release what the store holds in this process. Objects stay."""


def check_key(key: str) -> str:
    """`key`, if every store can hold it; InvalidInputError otherwise."""
    problem = None
    if len(key) > KEY_NBYTES_MAX:
        problem = f"longer than {KEY_NBYTES_MAX} characters"
    for segment in key.split("/"):
        if problem is None:
            problem = _segment_problem(segment)
    if problem is not None:
        raise InvalidInputError(
            f"key {key[:200]!r} cannot be stored: {problem}; use segments of letters, digits, '.', '_' "
            "and '-' joined by '/'",
            key=key,
        )
    return key


def _segment_problem(segment: str) -> str | None:
    if segment in ("", ".", ".."):
        return f"segment {segment!r}"
    if not _SEGMENT.fullmatch(segment):
        return f"other characters in {segment[:50]!r}"
    if len(segment) > SEGMENT_NBYTES_MAX:
        return f"a segment longer than {SEGMENT_NBYTES_MAX} characters"
    if segment.startswith(TEMPORARY_PREFIX):
        return f"{TEMPORARY_PREFIX!r} begins the names of temporaries"
    return None


def is_key_segment(name: str) -> bool:
    """Whether a file of this name can be an object (a temporary or a stranger's file cannot)."""
    return _segment_problem(name) is None


def check_prefix(prefix: str) -> str:
    """`prefix`, if a key could start with it; InvalidInputError otherwise."""
    folder, _, start = prefix.rpartition("/")
    if folder:
        check_key(folder)
    if (prefix.startswith("/")) or (start and not _SEGMENT.fullmatch(start)):
        raise InvalidInputError(
            f"no key can start with {prefix[:200]!r}; give the beginning of a key", prefix=prefix
        )
    return prefix


def byte_views(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """The non-empty buffers of `data` as one-dimensional views of bytes, without a copy."""
    single = isinstance(data, bytes | bytearray | memoryview | np.ndarray)
    return [view for buffer in ([data] if single else data) if (view := _byte_view(buffer)).nbytes]  # type: ignore[arg-type]  # a single buffer is no sequence: mypy cannot tell


def _byte_view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy says so from Python 3.12 on
    if not view.c_contiguous:
        raise InvalidInputError(
            f"a buffer of shape {view.shape} is not contiguous; copy it first", shape=view.shape
        )
    if view.format == "B" and view.ndim == 1:
        return view
    # numpy reinterprets element types that memoryview.cast does not know (complex numbers)
    return memoryview(np.asarray(buffer).reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy says so from Python 3.12 on


def writable_views(targets: Sequence[Buffer]) -> list[memoryview]:
    """As `byte_views`, and InvalidInputError if one cannot be written to."""
    views = byte_views(targets)
    for view in views:
        if view.readonly:
            raise InvalidInputError(f"a target of {view.nbytes} bytes is read-only; give writable memory")
    return views


def check_range(url: str, key: str, size: int, start: int, nbytes: int | None) -> int:
    """How many bytes from `start` an object of `size` bytes gives; CorruptError if it is too short."""
    if start < 0 or (nbytes is not None and nbytes < 0):
        raise InvalidInputError(
            f"cannot read {nbytes} bytes from {start} of {key}: give numbers from 0 up", key=key, start=start
        )
    wanted = max(size - start, 0) if nbytes is None else nbytes
    if start + wanted > size:
        raise CorruptError(
            f"{key} in {url} ends at byte {size} but bytes {start} to {start + wanted} were asked for: it "
            "was truncated or its reference is wrong; run ckptstore verify",
            url=url,
            key=key,
            nbytes=size,
            start=start,
            wanted=wanted,
        )
    return wanted


def open_store(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store of `url`: a path or `file://` (local), `s3://bucket/prefix`, `memory://name` (this process only).

    Any other scheme is fsspec's, `gs://` among them. Nothing is read or written. `storage_options` are for object
    stores (docs/how-to/object-stores.md). Raises InvalidInputError for a scheme that is not known or not installed.
    """
    text = os.fspath(url)
    scheme = _SCHEME.match(text)
    kind = scheme[1].lower() if scheme else "file"
    if kind == "s3":
        from ckptstore.store.s3 import open_s3

        return open_s3(text, storage_options or {})
    if kind not in ("memory", "file"):
        from ckptstore.store.filesystem import open_filesystem

        return open_filesystem(text, storage_options or {})
    if storage_options:
        raise InvalidInputError(
            f"storage_options {sorted(storage_options)} mean nothing to {text}; leave them out", url=text
        )
    if kind == "memory":
        from ckptstore.store.memory import MemoryStore

        return MemoryStore.named(text[len("memory://") :])
    from ckptstore.store.local import LocalStore

    return LocalStore(root=_file_path(text) if scheme else text)


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InvalidInputError(f"{url} does not name a local path; write file:///path", url=url)
    return unquote(parts.path)
