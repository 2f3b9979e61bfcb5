"""Whatever way a store chooses for a range, the bytes are those that `read` gives."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptError, StoreUnavailableError
from ckptstore.store import file, filedownload
from ckptstore.store.base import Store
from ckptstore.store.direct import aligned
from ckptstore.store.download import Downloads, block_room, open_download
from ckptstore.store.local import LocalStore
from ckptstore.store.memory import MemoryStore
from ckptstore.testing import FaultStore

KEY = "data/f0001/x"
VALUE = secrets.token_bytes(1_000_003)


def forget(path: Path) -> None:
    """Drop the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    store = LocalStore(root=tmp_path_factory.mktemp("download"))
    store.create(KEY, VALUE)
    return store


@pytest.fixture(params=["local", "memory", "faults"])
def store(request: pytest.FixtureRequest, local: LocalStore) -> Iterator[Store]:
    memory = MemoryStore()
    memory.create(KEY, VALUE)
    yield {"local": local, "memory": memory, "faults": FaultStore(memory)}[request.param]


def block_of(store: Store, start: int, nbytes: int, *, room: int = 0) -> bytes:
    with open_download(store, KEY) as download:
        block = aligned(block_room(start, nbytes) + room).data
        return bytes(download.read_block(start, nbytes, block))


@given(
    start=st.integers(0, len(VALUE)), nbytes=st.integers(1, 600_000), room=st.sampled_from([0, 4096, 8192])
)
@settings(deadline=None)
def test_any_range_in_a_block_is_what_read_gives(start: int, nbytes: int, room: int) -> None:
    nbytes = min(nbytes, len(VALUE) - start)
    for store in _stores:
        assert block_of(store, start, nbytes, room=room) == VALUE[start : start + nbytes]


_stores: list[Store] = []


@pytest.fixture(autouse=True)
def _all_stores(local: LocalStore) -> Iterator[None]:
    memory = MemoryStore()
    memory.create(KEY, VALUE)
    _stores[:] = [local, memory]
    yield
    _stores.clear()


def test_a_range_read_into_targets_is_what_read_gives(store: Store) -> None:
    first, second = bytearray(70_001), np.empty(12_345, np.uint8)
    with open_download(store, KEY) as download:
        download.read_into(17, [memoryview(first), second.data])
    assert bytes(first) + second.tobytes() == VALUE[17 : 17 + 82_346]


# -- the page cache -----------------------------------------------------------------------------------


def test_what_is_cached_is_read_from_the_cache_and_all_else_from_the_disk(
    local: LocalStore, tmp_path: Path
) -> None:
    path = Path(local._path(KEY))
    if os.stat(path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("the tests' folder is in memory")
    forget(path)
    with open_download(local, KEY) as download:
        assert download.window(0, len(VALUE)) is None
        assert download.window(0, 1000) is not None, "small reads are not worth the trouble"
        local.read(KEY)
        assert download.window(0, len(VALUE)) == filedownload.CACHED_WINDOW_NBYTES
        assert download.window(5, len(VALUE) - 5) == filedownload.CACHED_WINDOW_NBYTES
        assert download.window(len(VALUE) + 5, 1 << 20) != filedownload.CACHED_WINDOW_NBYTES


def test_direct_reads_leave_the_page_cache_alone(local: LocalStore) -> None:
    path = Path(local._path(KEY))
    forget(path)
    assert block_of(local, 0, len(VALUE)) == VALUE
    with open_download(local, KEY) as download:
        direct = local._refusals
        if os.stat(path).st_dev not in direct:
            assert download.window(0, len(VALUE)) is None


def test_a_range_that_is_cached_in_part_is_read_from_the_disk(tmp_path: Path) -> None:
    store, value = LocalStore(root=tmp_path), secrets.token_bytes(8 << 20)
    store.create(KEY, value)
    forget(tmp_path / KEY)
    fd = os.open(tmp_path / KEY, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
    os.pread(fd, 1 << 20, 0)
    os.close(fd)
    with open_download(store, KEY) as download:
        if download.window(1 << 20, 7 << 20) is not None:
            pytest.skip("the tests' folder is in memory")
        assert download.window(0, 1 << 20) == filedownload.CACHED_WINDOW_NBYTES
        assert download.window(0, 8 << 20) is None


def test_strangers_files_are_not_believed_to_be_cached(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.read(KEY)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with open_download(local, KEY) as download:
        assert download.window(0, len(VALUE)) is None


# -- without direct I/O -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("at", ["open", "read"])
def test_a_file_system_without_direct_reads_is_asked_once(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, at: str
) -> None:
    store, asked = LocalStore(root=local._root), list[str]()
    real_open, real_preadv = file.open_direct, os.preadv
    direct: list[int] = []

    def refuse_open(path: str) -> int:
        asked.append(path)
        if at == "open":
            raise OSError(code, "refused")
        direct.append(real_open(path))
        return direct[-1]

    def refuse_read(fd: int, views: Any, start: int) -> int:
        if fd in direct:
            raise OSError(code, "refused")
        return real_preadv(fd, views, start)

    monkeypatch.setattr(file, "open_direct", refuse_open)
    monkeypatch.setattr(os, "preadv", refuse_read)
    forget(Path(local._path(KEY)))
    with open_download(store, KEY) as download:
        assert download.window(0, len(VALUE)) is None
    assert block_of(store, 5, 500_000) == VALUE[5:500_005]
    forget(Path(local._path(KEY)))
    for _ in range(2):
        with open_download(store, KEY) as download:
            window = download.window(0, len(VALUE))
            assert window is not None
            target = bytearray(len(VALUE))
            download.read_into(0, [memoryview(target)])
            assert target == VALUE
    assert len(asked) == 1


def test_memory_file_systems_are_read_as_any_other() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = LocalStore(root=folder)
        store.create(KEY, VALUE)
        assert block_of(store, 3, 700_000) == VALUE[3:700_003]
        with open_download(store, KEY) as download:
            assert download.window(0, len(VALUE)) is not None, "it is in memory"


def test_short_direct_reads_are_gone_on_with(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = os.preadv, iter([8192, 100, 4096 * 3, 7])

    def few(fd: int, views: Any, start: int) -> int:
        limit = next(sizes, 1 << 30)
        got = real(fd, views, start)
        return min(got, limit)

    monkeypatch.setattr(os, "preadv", few)
    assert block_of(local, 10, 900_000) == VALUE[10:900_010]


def test_a_read_error_in_the_middle_is_unavailable(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.preadv, list[int]()

    def broken(fd: int, views: Any, start: int) -> int:
        calls.append(start)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        return min(real(fd, views, start), 8192)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        block_of(local, 0, 900_000)


def test_a_file_cut_while_it_is_open_is_corrupt(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path)
    store.create(KEY, VALUE)
    with open_download(store, KEY) as download:
        os.truncate(tmp_path / KEY, 500_000)
        for start in (0, 499_999, 600_000):
            with pytest.raises(CorruptError, match="truncated"):
                download.read_block(start, 300_000 if start else 900_000, aligned(1 << 20).data)
        assert bytes(download.read_block(0, 500_000, aligned(1 << 20).data)) == VALUE[:500_000]


def test_descriptors_are_closed(local: LocalStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        block_of(local, 0, 400_000)
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_stores_that_have_a_choice_offer_it(local: LocalStore) -> None:
    assert isinstance(local, Downloads) and not isinstance(MemoryStore(), Downloads)
