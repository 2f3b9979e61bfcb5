"""Objects as files under one folder of a local or shared file system.

A create writes a temporary in the folder of its key, makes the bytes durable, gives them their name
with file.link(2), which fails if the name is taken, and makes the name durable. So a name never shows half
an object, however the process or the machine dies. A writer that dies leaves a file `.tmp-<id>` that
no listing shows and nothing reads; it may be deleted whenever no writer is alive.
The order of these calls, and the harm of leaving one out: docs/reference/format-v1.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.store import file
from ckptstore.store.base import (
    BLOCK_NBYTES,
    TEMPORARY_PREFIX,
    Buffer,
    ObjectInfo,
    Store,
    Upload,
    Way,
    byte_views,
    check_key,
    check_prefix,
    check_range,
    is_key_segment,
    writable_views,
)
from ckptstore.store.collected import check_blocks
from ckptstore.store.direct import DirectFile
from ckptstore.store.download import Download
from ckptstore.store.filedownload import FileDownload, Refusals

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
# After these the name was certainly not given; after any other error it may have been.
_NOT_NAMED: Final = (*_FULL, *_FORBIDDEN, errno.ENOENT, errno.ENOTDIR, errno.EMLINK, errno.ENAMETOOLONG)
# A failed fsync may have dropped the pages, and a later one of the same file would report success:
# the bytes are written to a new file. A folder that has gone is made again.
_WRITE_ANEW: Final = (errno.EIO, errno.ENOENT, errno.ESTALE)


class LocalStore:
    """A Store in the folder `root`, which is made by the first create."""

    def __init__(self, *, root: str | os.PathLike[str]) -> None:
        text = os.fspath(root)
        if not text or "\0" in text:
            raise InvalidInputError(f"{text!r} is not a path; give the folder of the run", url=text)
        self._root = os.path.abspath(text)
        self._lock = threading.Lock()
        self._refusals = Refusals()
        self._durable: set[str] = set()  # folders whose own names this process has made durable

    @property
    def url(self) -> str:
        return Path(self._root).as_uri()

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        path, views = self._path(key), byte_views(data)
        temporary = self._temporary(key, path, views)
        try:
            self._give_name(key, temporary, path, _nbytes(views))
            self._settle_name(key, path)
        finally:
            file.remove(temporary)

    def upload(self, key: str, nbytes_max: int) -> Upload:
        return LocalUpload(self, key, nbytes_max)

    def replace(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        path, views = self._path(key), byte_views(data)
        temporary = self._temporary(key, path, views)
        try:
            os.replace(temporary, path)
        except OSError as error:
            if error.errno in (*_NOT_NAMED, errno.EISDIR):
                raise self._unavailable("replace", key, error, _nbytes(views)) from error
            raise self._unknown(key, error) from error
        finally:
            file.remove(temporary)
        self._settle_name(key, path)

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        with self._opened(key) as (fd, size):
            wanted = check_range(self.url, key, size, start, nbytes)
            value = file.read(fd, start, wanted)
            if len(value) < wanted:  # truncated since it was opened
                check_range(self.url, key, start + len(value), start, wanted)
        return value

    def read_into(self, key: str, start: int, targets: Sequence[Buffer]) -> None:
        views = writable_views(targets)
        with self._opened(key) as (fd, size):
            wanted = check_range(self.url, key, size, start, _nbytes(views))
            done = file.read_into(fd, start, views)
            if done < wanted:  # truncated since it was opened
                check_range(self.url, key, start + done, start, wanted)

    @contextlib.contextmanager
    def download(self, key: str) -> Iterator[Download]:
        where = self._path(key)
        with (
            self._opened(key) as (fd, _),
            contextlib.closing(
                FileDownload(fd, where, key=key, url=self.url, refusals=self._refusals)
            ) as opened,
        ):
            yield opened

    def size(self, key: str) -> int:
        path = self._path(key)
        try:
            found = os.stat(path)
        except OSError as error:
            raise self._unreadable(key, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise self._not_found(key)
        return found.st_size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        folder, slash, start = prefix.rpartition("/")
        try:
            yield from self._walk(folder + slash, start)
        except OSError as error:
            raise self._unavailable("list", prefix, error) from error

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._unavailable("delete", key, error) from error

    def settle(self, keys: Sequence[str]) -> None:
        folders = {os.path.dirname(self._path(key)) for key in keys}
        for folder in sorted(folders):
            try:
                self._make_durable(folder, make=False)
                file.fsync_folder(folder)
            except (FileNotFoundError, NotADirectoryError):
                continue  # nothing is there that could be lost
            except OSError as error:
                raise self._unavailable("settle", os.path.relpath(folder, self._root), error) from error

    def close(self) -> None:
        """Nothing is held between calls."""

    # -- creating ---------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    def _temporary(self, key: str, path: str, views: Sequence[memoryview]) -> str:
        """Write a durable temporary beside `path`, in a folder whose name is durable; errors leave none."""
        folder = os.path.dirname(path)
        last: OSError | None = None
        for _ in range(2):
            temporary = os.path.join(folder, TEMPORARY_PREFIX + secrets.token_hex(16))
            try:
                self._make_durable(folder, make=True)
                file.write_durable(temporary, views)
                return temporary
            except OSError as error:
                last = error
                file.remove(temporary)
                if error.errno not in _WRITE_ANEW:
                    break
                self._forget_durable()
            except BaseException:
                file.remove(temporary)
                raise
        raise self._uncreated(key, last, _nbytes(views)) from last

    def _forget_durable(self) -> None:
        with self._lock:
            self._durable.clear()

    def _make_durable(self, folder: str, *, make: bool) -> None:
        """Make the names of `folder` and of all its parents down from the root durable, once a process.

        Also those that were there already: whoever made them may not have come to its fsync yet.
        """
        if folder in self._durable:
            return
        chain = [self._root]
        if folder != self._root:
            for segment in os.path.relpath(folder, self._root).split(os.sep):
                chain.append(os.path.join(chain[-1], segment))
        while make and not os.path.isdir(os.path.dirname(chain[0])):
            chain.insert(0, os.path.dirname(chain[0]))
        for each in chain:
            if each not in self._durable:
                made = make and file.make_folder(each)
                os.stat(each)  # a folder that is not there cannot be called durable
                try:
                    file.fsync_folder(os.path.dirname(each))
                except PermissionError:
                    # A parent above the root that we may pass but not open: its owner made the root.
                    if made or each != self._root:
                        raise
                with self._lock:
                    self._durable.add(each)

    def _give_name(self, key: str, temporary: str, path: str, nbytes: int) -> None:
        try:
            file.link(temporary, path)
        except OSError as error:
            if file.has_second_name(temporary):
                return  # a network file system repeated our request and met our own name
            if error.errno == errno.EEXIST:
                if os.path.isdir(path):
                    raise InvalidInputError(
                        f"{key} is a folder of other keys in {self.url}; choose another key", key=key
                    ) from error
                raise AlreadyExistsError(
                    f"{key} in {self.url} is taken; read it to see by whom", url=self.url, key=key
                ) from error
            if error.errno in _NOT_NAMED:
                raise self._unavailable("create", key, error, nbytes) from error
            raise self._unknown(key, error) from error

    def _settle_name(self, key: str, path: str) -> None:
        try:
            file.fsync_folder(os.path.dirname(path))
        except OSError as error:
            # The name is visible and others may have read it: it stays, and the caller decides.
            raise self._unknown(key, error) from error

    # -- reading ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(key, error) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise self._not_found(key)
            yield fd, found.st_size
        except OSError as error:
            raise self._unavailable("read", key, error) from error
        finally:
            os.close(fd)

    def _walk(self, folder: str, start: str) -> Iterator[ObjectInfo]:
        try:
            entries = os.scandir(os.path.join(self._root, folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        with entries:
            for entry in entries:
                if not entry.name.startswith(start) or not is_key_segment(entry.name):
                    continue
                try:
                    found = entry.stat()
                except FileNotFoundError:
                    continue  # deleted since
                if stat.S_ISDIR(found.st_mode):
                    yield from self._walk(f"{folder}{entry.name}/", "")
                elif stat.S_ISREG(found.st_mode):
                    yield ObjectInfo(key=folder + entry.name, nbytes=found.st_size)

    # -- errors -----------------------------------------------------------------------------------

    def _not_found(self, key: str) -> NotFoundError:
        return NotFoundError(f"there is no {key} in {self.url}", url=self.url, key=key)

    def _unreadable(self, key: str, error: OSError) -> CkptStoreError:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return self._not_found(key)
        return self._unavailable("read", key, error)

    def _unknown(self, key: str, error: OSError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{key} in {self.url} may or may not have been created: {error.strerror}; read it back before "
            "deciding anything",
            url=self.url,
            key=key,
            errno=error.errno,
        )

    def _unavailable(
        self, verb: str, key: str, error: OSError | None, wanted: int | None = None
    ) -> StoreUnavailableError:
        code = error.errno if error else None
        text = error.strerror if error else "no reason given"
        values: dict[str, object] = {"url": self.url, "key": key, "errno": code}
        if code in _FULL:
            values |= {"wanted_nbytes": wanted, "free_nbytes": file.free_nbytes(self._root)}
            said = "its quota is spent" if code == errno.EDQUOT else "its disk is full"
            return StoreUnavailableError(
                f"cannot {verb} {key} in {self.url}: {said} ({text}): {wanted} bytes were wanted, "
                f"{values['free_nbytes']} are free; free space and try again",
                **values,
            )
        advice = "mend the file system and try again"
        if code in _FORBIDDEN:
            advice = "give this user access, or use another folder"
        return StoreUnavailableError(f"cannot {verb} {key} in {self.url}: {text}; {advice}", **values)

    def _uncreated(self, key: str, error: OSError | None, wanted: int) -> CkptStoreError:
        if error is not None and error.errno == errno.ENOTDIR:
            return InvalidInputError(
                f"{key} cannot be in {self.url}: a part of its path is a file; choose another key", key=key
            )
        return self._unavailable("create", key, error, wanted)


class LocalUpload:
    """An Upload into a temporary beside the key's path, past the page cache where the file system allows it."""

    def __init__(self, store: LocalStore, key: str, nbytes_max: int) -> None:
        self._store = store
        self._key = key
        self._path = store._path(key)
        folder = os.path.dirname(self._path)
        self._temporary = os.path.join(folder, TEMPORARY_PREFIX + secrets.token_hex(16))
        self._sizes: dict[int, int] = {}
        self._durable = False
        self._file = self._make(folder, nbytes_max)

    def _make(self, folder: str, nbytes_max: int) -> DirectFile:
        for last in (False, True):
            try:
                self._store._make_durable(folder, make=True)
                return DirectFile(self._temporary, nbytes_max)
            except OSError as error:
                file.remove(self._temporary)
                if last or error.errno != errno.ENOENT:
                    raise self._store._uncreated(self._key, error, nbytes_max) from error
                self._store._forget_durable()  # a folder that has gone is made again
        raise AssertionError("the last try returns or raises")

    @property
    def way(self) -> Way:
        return Way("direct") if self._file.direct else Way("buffered", self._file.reason)

    def write(self, block: int, data: Buffer) -> None:
        for view in byte_views(data):
            try:
                self._file.write(block * BLOCK_NBYTES, view)
            except OSError as error:
                raise self._store._unavailable("create", self._key, error, view.nbytes) from error
            self._sizes[block] = view.nbytes

    def finish(self, nbytes: int) -> None:
        check_blocks(self._sizes, nbytes)
        if not self._durable:
            try:
                self._file.finish(nbytes)
            except OSError as error:
                # A later fsync of the same file might report success for pages that were dropped: without the file
                # there is none (a second call fails too).
                self._file.close()
                raise self._store._unavailable("create", self._key, error, nbytes) from error
            self._durable = True
        self._store._give_name(self._key, self._temporary, self._path, nbytes)
        self._store._settle_name(self._key, self._path)

    def abort(self) -> None:
        self._file.close()
        file.remove(self._temporary)


def _nbytes(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def _conforms(store: LocalStore, upload: LocalUpload) -> tuple[Store, Upload]:
    return store, upload  # checked by mypy
