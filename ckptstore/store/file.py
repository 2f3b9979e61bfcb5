"""Files that survive the machine: what a local store asks of the operating system, call by call.

It stands apart so that the order of the calls (store/local.py) can be read and tested without them, and
so that another way to write the same bytes can take the place of this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Sequence
from typing import Final

from ckptstore.errors import InvalidInputError

_IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
_READ_NBYTES_MAX: Final = 1 << 30  # Linux moves at most 2 GiB a call
_RENAME_NOREPLACE: Final = 1
_AT_FDCWD: Final = -100
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def write_durable(path: str, views: Sequence[memoryview]) -> None:
    """Make a new file of non-empty `views`, end to end, durable on return. It stays, spoiled, on errors."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        while views:
            # Python itself goes on after a signal (PEP 475); a short count is left to us.
            done = os.writev(fd, views[:_IOV_MAX])
            if not done:
                raise OSError(errno.EIO, "the file system took no bytes and gave no error")
            views = _after(views, done)
        os.fsync(fd)
    finally:
        os.close(fd)


def read(fd: int, start: int, nbytes: int) -> bytes:
    """The bytes from `start` on, fewer than `nbytes` only where the file ends."""
    pieces = []
    while nbytes:
        piece = os.pread(fd, min(nbytes, _READ_NBYTES_MAX), start)
        if not piece:
            break
        pieces.append(piece)
        start, nbytes = start + len(piece), nbytes - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_into(fd: int, start: int, views: Sequence[memoryview]) -> int:
    """Fill non-empty `views` in order; the bytes read, fewer than wanted only where the file ends."""
    total = 0
    while views:
        done = os.preadv(fd, views[:_IOV_MAX], start + total)
        if not done:
            break
        total += done
        views = _after(views, done)
    return total


def open_direct(path: str) -> int:
    """A descriptor for reads past the page cache; EINVAL where the file system has none."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


def _after(views: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of non-empty `views` after their first `done` bytes."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


def free_nbytes(folder: str) -> int | None:
    """Bytes that an unprivileged user may still write where `folder` is or would be; None if nobody can tell."""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def make_folder(path: str) -> bool:
    """Whether it was us who made it."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    return True


def fsync_folder(path: str) -> None:
    """Make durable which names the folder holds."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def link(temporary: str, path: str) -> None:
    """Give the file its name unless the name is taken (EEXIST)."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_noreplace(temporary, path)


def _rename_noreplace(temporary: str, path: str) -> None:
    """For file systems without hard links. InvalidInputError where the kernel cannot do this either."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        done = renameat2(
            _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), ctypes.c_uint(_RENAME_NOREPLACE)
        )
        if done == 0:
            return
        code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise InvalidInputError(
            f"the file system of {os.path.dirname(path)} has neither hard links nor rename without "
            "replacing, so two writers could both win; use another file system",
            path=path,
        )
    raise OSError(code, os.strerror(code), temporary, None, path)


def has_second_name(temporary: str) -> bool:
    """Whether a link of the file landed, whatever the reply said."""
    try:
        return os.stat(temporary).st_nlink > 1
    except OSError:
        return False


def remove(temporary: str) -> None:
    """Remove the file if that is possible."""
    # What stays behind is never listed and never read; the outcome of the create is already decided.
    with contextlib.suppress(OSError):
        os.unlink(temporary)
