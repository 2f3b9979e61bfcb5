"""What every store must do, as tests: subclass, give a `store` fixture, run pytest.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self) -> Iterator[Store]:
            yield MyStore(...)  # empty, and only for this test

The memory store is the reference: where two stores differ, this suite should ask.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import AlreadyExistsError, CorruptError, InternalError, InvalidInputError, NotFoundError
from ckptstore.store.base import BLOCK_NBYTES, Buffer, ObjectInfo, Store, open_store
from ckptstore.store.direct import aligned
from ckptstore.store.download import DOWNLOAD_ALIGN, block_room, open_download
from ckptstore.store.probe import probe

BAD_KEYS = (
    *("", "/a", "a/", "a//b", ".", "a/../b", "a/./b"),
    *("a b", "ä", "a\n", "a\0", ".tmp-1", "a/.tmp-1"),
    *("x" * 256, "a/" * 520 + "a"),
)


class StoreConformance:
    """Subclasses give the fixture `store`; `again` opens the same objects a second time."""

    def again(self, store: Store) -> Store:
        """Another handle to the same objects; override where the URL alone does not open them."""
        return open_store(store.url)

    def test_what_was_created_is_read_back(self, store: Store) -> None:
        for value in (b"", b"x", secrets.token_bytes(100_003)):
            key = f"data/f0001/{len(value)}"
            store.create(key, value)
            assert store.read(key) == value
            assert store.size(key) == len(value)
            assert self.again(store).read(key) == value

    def test_many_buffers_of_any_kind_are_laid_end_to_end(self, store: Store) -> None:
        rng = np.random.default_rng(0)
        pieces = [rng.bytes(int(size)) for size in rng.integers(0, 50, 5_000)]
        kinds: tuple[Callable[[bytes], Buffer], ...] = (
            bytes,
            bytearray,
            memoryview,
            lambda piece: np.frombuffer(piece, np.uint8),
        )
        store.create("many", [kinds[index % 4](piece) for index, piece in enumerate(pieces)])
        assert store.read("many") == b"".join(pieces)
        targets = [bytearray(len(piece)) for piece in pieces]
        store.read_into("many", 0, targets)
        assert targets == pieces

    def test_arrays_of_any_shape_and_type_are_bytes(self, store: Store) -> None:
        arrays: list[np.ndarray[Any, Any]] = [
            np.arange(6, dtype=np.float32).reshape(2, 3),
            np.ones((), np.complex128),
            np.zeros((0, 4)),
        ]
        store.create("arrays", arrays)
        assert store.read("arrays") == b"".join(array.tobytes() for array in arrays)
        targets = [np.empty_like(array) for array in arrays]
        store.read_into("arrays", 0, targets)
        for array, target in zip(arrays, targets, strict=True):
            np.testing.assert_array_equal(array, target)

    def test_memory_that_is_not_contiguous_is_refused(self, store: Store) -> None:
        with pytest.raises(InvalidInputError, match="contiguous"):
            store.create("a", np.zeros((4, 4), np.uint8)[:, 1])
        with pytest.raises(NotFoundError):
            store.read("a")

    def test_memory_may_be_reused_after_create(self, store: Store) -> None:
        memory = bytearray(b"first")
        store.create("a", memory)
        memory[:] = b"other"
        assert store.read("a") == b"first"

    def test_a_taken_key_is_refused_and_keeps_its_bytes(self, store: Store) -> None:
        store.create("journal/0", b"first")
        for value in (b"first", b"second", b""):
            with pytest.raises(AlreadyExistsError) as caught:
                self.again(store).create("journal/0", value)
            assert caught.value.key == "journal/0"
        assert store.read("journal/0") == b"first"

    @pytest.mark.parametrize("nbytes", [0, 5, 4096, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 12_345])
    def test_an_upload_in_any_order_is_the_object_of_its_blocks(self, store: Store, nbytes: int) -> None:
        value = np.random.default_rng(nbytes).bytes(nbytes)
        upload = store.upload("data/up", nbytes + 5_000_000)
        blocks = [value[at : at + BLOCK_NBYTES] for at in range(0, nbytes, BLOCK_NBYTES)]
        memory = bytearray(BLOCK_NBYTES)
        for number in reversed(range(len(blocks))):
            memory[: len(blocks[number])] = blocks[number]
            upload.write(number, memoryview(memory)[: len(blocks[number])])
            memory[:] = bytes(BLOCK_NBYTES)  # it may be reused
        assert list(store.list("")) == []
        upload.finish(nbytes)
        assert upload.way.name in ("direct", "buffered", "parts", "whole", "memory")
        upload.abort()
        assert self.again(store).read("data/up") == value

    def test_an_upload_that_is_aborted_leaves_nothing(self, store: Store) -> None:
        upload = store.upload("data/up", 100)
        upload.write(0, b"x" * 100)
        upload.abort()
        upload.abort()
        assert list(store.list("")) == []
        store.create("data/up", b"free")

    def test_an_upload_to_a_taken_key_is_refused(self, store: Store) -> None:
        upload = store.upload("data/up", 100)
        upload.write(0, b"x" * 100)
        self.again(store).create("data/up", b"first")
        with pytest.raises(AlreadyExistsError):
            upload.finish(100)
        upload.abort()
        assert store.read("data/up") == b"first"

    def test_an_upload_with_a_hole_is_refused(self, store: Store) -> None:
        upload = store.upload("data/up", 2 * BLOCK_NBYTES)
        upload.write(1, bytes(BLOCK_NBYTES))
        with pytest.raises(InternalError, match=r"blocks \[0\]"):
            upload.finish(2 * BLOCK_NBYTES)
        upload.abort()
        assert list(store.list("")) == []

    def test_racing_creates_have_one_winner(self, store: Store) -> None:
        probe(store)
        assert list(store.list("")) == []

    def test_racing_creates_in_new_folders_all_land(self, store: Store) -> None:
        together = threading.Barrier(8)

        def write(index: int) -> None:
            together.wait(60)
            store.create(f"a/b/c/{index}", b"x")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(8)))
        assert {info.key for info in store.list("")} == {f"a/b/c/{index}" for index in range(8)}

    def test_a_reader_sees_nothing_or_all(self, store: Store) -> None:
        value, done = secrets.token_bytes(1 << 20), threading.Event()

        def write() -> None:
            for index in range(8):
                store.create(f"seen/{index}", [value] * 4)
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not (done.is_set() or writing.done()):
                assert {info.nbytes for info in store.list("seen/")} <= {4 << 20}
            writing.result()
        assert len(list(store.list("seen/"))) == 8

    def test_ranges(self, store: Store) -> None:
        value = secrets.token_bytes(1_000)
        store.create("a", value)
        assert store.read("a", start=10) == value[10:]
        assert store.read("a", start=10, nbytes=90) == value[10:100]
        assert store.read("a", start=1_000) == b""
        assert store.read("a", start=1_000, nbytes=0) == b""
        first, second = bytearray(3), np.empty(997 - 10, np.uint8)
        store.read_into("a", 10, [first, bytearray(0), second])
        assert bytes(first) + second.tobytes() == value[10:]
        store.read_into("a", 1_000, [])

    def test_a_range_beyond_the_end_is_corrupt(self, store: Store) -> None:
        store.create("a", b"0123456789")
        attempts: list[Callable[[], object]] = [
            lambda: store.read("a", start=11),
            lambda: store.read("a", start=5, nbytes=6),
            lambda: store.read_into("a", 5, [bytearray(3), bytearray(3)]),
        ]
        for attempt in attempts:
            with pytest.raises(CorruptError, match="ends at byte 10"):
                attempt()

    def test_downloads_give_what_ranges_give(self, store: Store) -> None:
        value = secrets.token_bytes(1_000_003)
        store.create("data/f0001/a", value)
        with open_download(store, "data/f0001/a") as download:
            for start, nbytes in ((0, 1), (1, 4_096), (4_095, 600_000), (4_096, 300_000), (0, 1_000_003)):
                window = download.window(start, nbytes)
                assert window is None or window > 0
                block = aligned(block_room(start, nbytes) + DOWNLOAD_ALIGN)
                found = download.read_block(start, nbytes, block.data)
                assert bytes(found) == value[start : start + nbytes]
                # Elements lie in the block as in the object.
                assert (np.frombuffer(found, np.uint8).ctypes.data - start) % DOWNLOAD_ALIGN == 0
                first, second = (
                    np.empty(nbytes // 2 + 1, np.uint8),
                    np.empty(nbytes - nbytes // 2 - 1, np.uint8),
                )
                download.read_into(start, [each.data for each in (first, second) if each.nbytes])
                assert first.tobytes() + second.tobytes() == value[start : start + nbytes]

    def test_downloads_beyond_the_end_or_of_nothing_are_refused(self, store: Store) -> None:
        store.create("a", secrets.token_bytes(300_000))
        block = aligned(1 << 20)
        with open_download(store, "a") as download:
            for start, nbytes in ((0, 300_001), (299_999, 2), (300_000, 262_144), (400_000, 1)):
                with pytest.raises(CorruptError, match="ends at byte 300000"):
                    download.read_block(start, nbytes, block.data)
                with pytest.raises(CorruptError, match="ends at byte 300000"):
                    download.read_into(start, [block[:nbytes].data])
        with pytest.raises(NotFoundError), open_download(store, "b") as download:
            download.read_block(0, 1, block.data)

    def test_impossible_ranges_and_targets_are_refused(self, store: Store) -> None:
        store.create("a", b"0123456789")
        for start, nbytes in ((-1, None), (-1, 2), (0, -1)):
            with pytest.raises(InvalidInputError):
                store.read("a", start=start, nbytes=nbytes)
        with pytest.raises(InvalidInputError, match="read-only"):
            store.read_into("a", 0, [b"012"])

    def test_absent_keys_are_not_found(self, store: Store) -> None:
        store.create("a/b", b"x")
        attempts: list[Callable[[str], object]] = [
            store.read,
            store.size,
            lambda key: store.read_into(key, 0, [bytearray(1)]),
            lambda key: store.read_into(key, 0, []),
        ]
        for key in ("b", "a/c", "a", "a/b/c", "z/z/z"):
            for attempt in attempts:
                with pytest.raises(NotFoundError) as caught:
                    attempt(key)
                assert caught.value.key == key

    def test_lists_what_starts_with_the_prefix(self, store: Store) -> None:
        keys = ["a", "ab/c", "ab/d/e", "abc", "b/.hidden", "b/x.y-z_0"]
        for index, key in enumerate(keys):
            store.create(key, bytes(index))
        for prefix in ("", "a", "ab", "ab/", "ab/d", "ab/d/e", "b/.", "b/x", "c", "ab/c/", "z/z/z"):
            wanted = {
                ObjectInfo(key=key, nbytes=index) for index, key in enumerate(keys) if key.startswith(prefix)
            }
            found = list(store.list(prefix))
            assert set(found) == wanted and len(found) == len(wanted), prefix

    def test_deleted_keys_are_gone_and_free_again(self, store: Store) -> None:
        store.create("a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/there")
        with pytest.raises(NotFoundError):
            store.read("a/b")
        assert list(store.list("")) == []
        store.create("a/b", b"2")
        assert store.read("a/b") == b"2"

    def test_replace_shows_old_or_new(self, store: Store) -> None:
        store.replace("alive/f0001", b"0" * 1_000)
        done = threading.Event()

        def write() -> None:
            for index in range(50):
                store.replace("alive/f0001", [str(index % 10).encode() * 500] * 2)
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not (done.is_set() or writing.done()):
                seen = store.read("alive/f0001")
                assert len(seen) == 1_000 and len(set(seen)) == 1
            writing.result()
        assert store.read("alive/f0001") == b"9" * 1_000
        assert [info.key for info in store.list("")] == ["alive/f0001"]

    def test_settle_takes_present_and_absent_keys(self, store: Store) -> None:
        store.create("parts/f0001/a", b"x")
        self.again(store).settle(["parts/f0001/a", "parts/f0002/b", "a"])
        store.settle([])
        assert store.read("parts/f0001/a") == b"x"
        store.create("parts/f0002/b", b"y")

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_that_some_store_cannot_hold_are_refused(self, store: Store, key: str) -> None:
        attempts: list[Callable[[], object]] = [
            lambda: store.create(key, b"x"),
            lambda: store.replace(key, b"x"),
            lambda: store.read(key),
            lambda: store.read_into(key, 0, []),
            lambda: store.size(key),
            lambda: store.delete(key),
            lambda: store.settle([key]),
        ]
        for attempt in attempts:
            with pytest.raises(InvalidInputError):
                attempt()
        assert list(store.list("")) == []

    def test_bad_prefixes_are_refused(self, store: Store) -> None:
        for prefix in ("/", "/a", "../a", "a/../b", "a b", "a//"):
            with pytest.raises(InvalidInputError):
                list(store.list(prefix))

    def test_objects_outlive_the_handle(self, store: Store) -> None:
        store.create("a", b"x")
        other = self.again(store)
        store.close()
        assert other.read("a") == b"x"
