"""Any filesystem of fsspec as a store: what every store must do where it is honest, and a refusal where it is not."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ckptstore
from ckptstore.errors import (
    AlreadyExistsError,
    InvalidInputError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.store.base import Store, open_store
from ckptstore.store.probe import probe
from ckptstore.testing.conformance import StoreConformance
from tests.store.lossy import LossyProxy


class HonestFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's memory with an exclusive create that one lock decides, as a server does."""

    protocol = "honest"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("honest://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        with self.lock:
            if mode == "create" and self.exists(path):
                raise FileExistsError(path)
            with self.open(path, "wb", data=value):
                pass

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        with self.lock:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, **options)


class IgnoringFileSystem(HonestFileSystem):
    """It takes the option, and overwrites all the same."""

    protocol = "ignoring"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        super().pipe_file(path, value)


class FailingFileSystem(HonestFileSystem):
    """Every write fails with `error`, after it was done if `lands`."""

    protocol = "failing"
    error: ClassVar[Exception]
    lands: ClassVar[bool]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if self.lands:
            super().pipe_file(path, value, mode)
        raise self.error


for each in (HonestFileSystem, IgnoringFileSystem, FailingFileSystem):
    fsspec.register_implementation(each.protocol, each, clobber=True)


class TestFilesystemStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        HonestFileSystem.store.clear()
        yield open_store(f"honest://runs/{secrets.token_hex(8)}")


class TestS3fsStore:
    """s3fs, on a real server: what `gs://` and the others go through, as `s3a://`.

    Only what a server and its client decide; the rest is the same code as above, and a client takes half a second.
    """

    @pytest.fixture
    def store(self, s3_url: str) -> Iterator[Store]:
        store = open_store(s3_url.replace("s3:", "s3a:"))
        yield store
        store.close()

    again = StoreConformance.again
    test_taken = StoreConformance.test_a_taken_key_is_refused_and_keeps_its_bytes
    test_upload = StoreConformance.test_an_upload_to_a_taken_key_is_refused
    test_races = StoreConformance.test_racing_creates_have_one_winner
    test_ranges = StoreConformance.test_ranges
    test_beyond = StoreConformance.test_a_range_beyond_the_end_is_corrupt
    test_absent = StoreConformance.test_absent_keys_are_not_found
    test_list = StoreConformance.test_lists_what_starts_with_the_prefix
    test_delete = StoreConformance.test_deleted_keys_are_gone_and_free_again
    test_replace = StoreConformance.test_replace_shows_old_or_new


def test_a_run_through_fsspec_is_as_any_other() -> None:
    url = f"honest://runs/{secrets.token_hex(8)}"
    with (
        ckptstore.begin(url, {"trainer": 1}) as inc,
        ckptstore.Checkpointer(inc, role="trainer", rank=0) as c,
    ):
        c.save(1, {"step": 1}).result(60)
    assert ckptstore.open(url).read(1) == {"step": 1}
    assert ckptstore.open(url).verify(1).ok


def test_both_ways_to_s3_see_the_same_objects(s3_url: str) -> None:
    ours, theirs = open_store(s3_url), open_store(s3_url.replace("s3:", "s3a:"))
    theirs.create("a/b", b"x" * 5_000)
    assert [info.key for info in ours.list("")] == ["a/b"] and ours.read("a/b", start=4_999) == b"x"
    ours.delete("a/b")
    assert list(theirs.list("")) == []
    theirs.create("a/b", b"y")


def test_a_filesystem_that_looks_and_then_writes_can_be_read_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    store = open_store(f"local://{tmp_path}")
    assert store.read("a") == b"x" and [info.key for info in store.list("")] == ["a"]
    for act in (
        lambda: store.create("b", b"x"),
        lambda: store.upload("b", 5),
        lambda: ckptstore.begin(store.url, {"trainer": 1}),
    ):
        with pytest.raises(InvalidInputError, match="looks for a key and then writes it"):
            act()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_filesystem_that_ignores_the_condition_fails_the_probe() -> None:
    with pytest.raises(InvalidInputError, match="cannot hold a run"):
        probe(open_store(f"ignoring://runs/{secrets.token_hex(8)}"))


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize(
    "error", [TimeoutError("late"), OSError(22, "told so"), ValueError("told so")], ids=repr
)
def test_whatever_a_filesystem_says_of_a_write_is_settled_by_reading_back(
    error: Exception, lands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingFileSystem, "error", error, raising=False)
    monkeypatch.setattr(FailingFileSystem, "lands", lands, raising=False)
    store = open_store(f"failing://runs/{secrets.token_hex(8)}", {"retry_s": 0.1})
    if lands:
        store.create("a", b"mine")
        with pytest.raises(AlreadyExistsError):
            store.create("a", b"other")
    else:
        with pytest.raises(OutcomeUnknownError, match=r"late|told so"):
            store.create("a", b"mine")


@pytest.mark.parametrize("error", [PermissionError("no"), FileNotFoundError("no such bucket")], ids=repr)
def test_what_may_not_be_repeated_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingFileSystem, "error", error, raising=False)
    monkeypatch.setattr(FailingFileSystem, "lands", False, raising=False)
    with pytest.raises(StoreUnavailableError, match=r"credentials|correct the URL"):
        open_store("failing://runs").create("a", b"x")


def test_a_create_through_s3fs_whose_reply_was_lost_has_landed(proxy: LossyProxy, s3_url: str) -> None:
    url = s3_url.replace("s3:", "s3a:")
    store = open_store(url, {"endpoint_url": proxy.endpoint, "retry_s": 5})
    count = iter(range(100))
    proxy.lose = lambda line: line.startswith("PUT ") and next(count) == 0
    with contextlib.suppress(
        AlreadyExistsError
    ):  # s3fs repeated it unseen; the journal knows its own entries
        store.create("a", b"mine")
    assert len(proxy.lost) == 1 and store.read("a") == b"mine"


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("nowhere://a/b", {}, "no store has the scheme"),
        ("gs://bucket/run", {}, r"ckptstore\[gcs\]"),
        ("honest://user:secret@host/run", {}, "has a password"),
        ("honest://runs/a?x=1", {}, "a query"),
        ("honest://runs", {"timeout_s": 0}, "timeout_s=0"),
        ("honest://runs", {"retry_s": True}, "retry_s=True"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_what_to_do(
    url: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidInputError, match=match) as caught:
        open_store(url, options)
    assert "secret" not in str(caught.value)
