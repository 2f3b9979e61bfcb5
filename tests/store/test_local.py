from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import (
    AlreadyExistsError,
    CkptStoreError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from ckptstore.store import file
from ckptstore.store.base import BLOCK_NBYTES, Store, open_store
from ckptstore.store.local import LocalStore
from ckptstore.testing.conformance import StoreConformance
from ckptstore.testing.faults import SimulatedCrash
from tests.store.recording import Event, Recorder, check_power_cuts

KEY = "journal/a/0"
VALUE = b"value" * 1_000


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        yield LocalStore(root=tmp_path / "new" / "run")


class TestLocalStoreWithoutHardLinks(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        monkeypatch.setattr(os, "link", _no_links)
        yield LocalStore(root=tmp_path / "run")


def _no_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def files_under(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# -- durability -----------------------------------------------------------------------------------


def test_a_create_is_whole_or_absent_at_any_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "new" / "run"
    store = LocalStore(root=root)
    recorder = Recorder(monkeypatch, tmp_path)
    store.create(KEY, VALUE)
    check_power_cuts(recorder.events, root / KEY)
    assert [event.call for event in recorder.events[-6:]] == [
        "open",
        "writev",
        "fsync",
        "link",
        "fsync",
        "unlink",
    ]


def test_a_folder_that_another_process_has_just_made_is_made_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    (root / "journal" / "a").mkdir(parents=True)
    recorder = Recorder(monkeypatch, tmp_path)
    LocalStore(root=root).create(KEY, VALUE)
    synced = [event.path for event in recorder.events if event.call == "fsync"]
    assert synced[:3] == [str(tmp_path), str(root), str(root / "journal")]


def test_a_second_create_in_a_known_folder_costs_two_fsyncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root=tmp_path)
    store.create("journal/a/1", VALUE)
    recorder = Recorder(monkeypatch, tmp_path)
    store.create(KEY, VALUE)
    assert [event.call for event in recorder.events] == ["open", "writev", "fsync", "link", "fsync", "unlink"]


def test_a_replace_is_old_or_new_at_any_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    recorder = Recorder(monkeypatch, tmp_path)
    LocalStore(root=root).replace(KEY, VALUE)
    check_power_cuts(recorder.events, root / KEY)


def test_settle_makes_the_names_of_others_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    (root / "journal" / "a").mkdir(parents=True)
    (root / KEY).write_bytes(VALUE)
    recorder = Recorder(monkeypatch, tmp_path)
    LocalStore(root=root).settle([KEY, "parts/none"])
    synced = {event.path for event in recorder.events if event.call == "fsync"}
    assert synced >= {str(tmp_path), str(root), str(root / "journal"), str(root / "journal" / "a")}
    assert not (root / "parts").exists()


def test_settling_a_folder_that_is_not_there_proves_nothing_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    store = LocalStore(root=root)
    store.settle([KEY])
    (root / "journal" / "a").mkdir(parents=True)  # by another process, not yet durable
    recorder = Recorder(monkeypatch, tmp_path)
    store.create(KEY, VALUE)
    synced = [event.path for event in recorder.events if event.call == "fsync"]
    assert synced[:3] == [str(tmp_path), str(root), str(root / "journal")]


@pytest.mark.parametrize("made_before", [True, False])
def test_a_parent_that_may_not_be_opened_is_fine_only_above_a_root_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_before: bool
) -> None:
    root, real = tmp_path / "run", file.fsync_folder
    if made_before:
        root.mkdir()

    def forbidden_above_the_root(path: str) -> None:
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(path)

    monkeypatch.setattr(file, "fsync_folder", forbidden_above_the_root)
    store = LocalStore(root=root)
    if made_before:
        store.create(KEY, VALUE)
    else:
        with pytest.raises(StoreUnavailableError, match="Permission denied"):
            store.create(KEY, VALUE)
    assert files_under(root) == ({KEY} if made_before else set())


def _skip(*_: object) -> None:
    return None


def _write_without_fsync(path: str, views: list[memoryview]) -> None:
    with open(path, "xb", buffering=0) as target:
        for view in views:
            os.writev(target.fileno(), [view])


def _fsync_then_write(path: str, views: list[memoryview]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.fsync(fd)
    os.writev(fd, views)
    os.close(fd)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("fsync_folder", _skip),
        ("write_durable", _write_without_fsync),
        ("write_durable", _fsync_then_write),
        ("link", os.replace),
    ],
)
def test_planted_bugs_of_durability_and_naming_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., None]
) -> None:
    with monkeypatch.context() as patch, pytest.raises((AssertionError, pytest.fail.Exception)):
        patch.setattr(file, name, mutant)
        test_a_create_is_whole_or_absent_at_any_power_cut(tmp_path, patch)
        TestLocalStore().test_a_taken_key_is_refused_and_keeps_its_bytes(LocalStore(root=tmp_path / "other"))


@pytest.mark.parametrize("left_out", range(5))
def test_no_single_fsync_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: int
) -> None:
    root = tmp_path / "run"
    recorder = Recorder(monkeypatch, tmp_path)
    LocalStore(root=root).create(KEY, VALUE)
    fsyncs = [index for index, event in enumerate(recorder.events) if event.call == "fsync"]
    assert len(fsyncs) == 5  # three new names of folders, the bytes, the name of the key
    del recorder.events[fsyncs[left_out]]
    with pytest.raises(AssertionError):
        check_power_cuts(recorder.events, root / KEY)


# -- crashes and failing calls --------------------------------------------------------------------


def recorded_calls(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, tmp_path)
        LocalStore(root=tmp_path / "count").create(KEY, VALUE)
    return len(recorder.events)


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_crash_at_any_call_leaves_nothing_or_all(tmp_path: Path, lost: str) -> None:
    for crash_at in range(recorded_calls(tmp_path)):
        root = tmp_path / f"{lost}-{crash_at}"

        def die(number: int, event: Event, act: Callable[[], Any], crash_at: int = crash_at) -> Any:
            if number == crash_at and lost == "reply":
                act()
            if number >= crash_at:
                raise SimulatedCrash(str(event))
            return act()

        with pytest.MonkeyPatch.context() as patch:
            recorder = Recorder(patch, tmp_path, die)
            with pytest.raises(SimulatedCrash):
                LocalStore(root=root).create(KEY, VALUE)
        named = any(event.call == "link" for event in recorder.events[: crash_at + (lost == "reply")])
        after = LocalStore(root=root)
        assert [info.key for info in after.list("")] == ([KEY] if named else []), crash_at
        if named:
            assert after.read(KEY) == VALUE
        else:
            after.create(KEY, b"next")  # what the dead writer left is in nobody's way
            assert after.read(KEY) == b"next"


@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ETIMEDOUT, errno.EEXIST]
)
def test_every_failing_call_is_told_truthfully(tmp_path: Path, code: int, lost: str) -> None:
    for fail_at in range(recorded_calls(tmp_path)):
        root = tmp_path / str(fail_at)
        done: list[Event] = []

        def fail(
            number: int, event: Event, act: Callable[[], Any], at: int = fail_at, done: list[Event] = done
        ) -> Any:
            if number != at:
                return act()
            if lost == "reply" and event.call != "open":  # an open whose reply is lost leaks its number
                act()
            done.append(event)
            raise OSError(code, os.strerror(code))

        said: CkptStoreError | None = None
        with pytest.MonkeyPatch.context() as patch:
            Recorder(patch, tmp_path, fail)
            try:
                LocalStore(root=root).create(KEY, VALUE)
            except CkptStoreError as error:
                said = error
        found = files_under(root) if root.exists() else set()
        context = (fail_at, done, said)
        match said:
            case None:
                assert KEY in found, context
            case OutcomeUnknownError():
                assert done[0].call in ("link", "fsync"), context
            case StoreUnavailableError() | AlreadyExistsError():
                assert found == set(), context
                assert said.values.get("errno", code) == code
            case _:
                pytest.fail(f"{context}")
        assert found <= {KEY} or done[0].call == "unlink", context
        if KEY in found:
            assert (root / KEY).read_bytes() == VALUE, context


def failing(
    call: str, code: int, *, act_first: bool = False, times: int = 1, on: str = "", not_on: str = "?"
) -> Any:
    left = [times]

    def around(number: int, event: Event, act: Callable[[], Any]) -> Any:
        if event.call != call or on not in event.path or not_on in event.path or not left[0]:
            return act()
        left[0] -= 1
        if act_first:
            act()
        raise OSError(code, os.strerror(code))

    return around


def test_after_a_failed_fsync_the_bytes_go_to_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, tmp_path, failing("fsync", errno.EIO, on=".tmp-"))
    LocalStore(root=tmp_path).create(KEY, VALUE)
    written = [event.path for event in recorder.events if event.call == "writev"]
    linked = [event.path for event in recorder.events if event.call == "link"]
    assert len(written) == 2 and written[0] != written[1]
    assert linked == [written[1]]
    assert files_under(tmp_path) == {KEY}


def test_fsyncs_that_go_on_failing_end_the_create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, tmp_path, failing("fsync", errno.EIO, on=".tmp-", times=99))
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        LocalStore(root=tmp_path).create(KEY, VALUE)
    assert sum(event.call == "writev" for event in recorder.events) == 2
    assert files_under(tmp_path) == set()


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO])
def test_a_link_that_landed_has_landed_whatever_the_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    Recorder(monkeypatch, tmp_path, failing("link", code, act_first=True))
    LocalStore(root=tmp_path).create(KEY, VALUE)
    assert files_under(tmp_path) == {KEY}


def test_an_error_after_the_link_is_unknown_and_the_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root=tmp_path)
    store.create("journal/a/1", VALUE)
    Recorder(monkeypatch, tmp_path, failing("fsync", errno.EIO, on="journal/a", not_on=".tmp-"))
    with pytest.raises(OutcomeUnknownError, match="read it back"):
        store.create(KEY, VALUE)
    assert files_under(tmp_path) == {KEY, "journal/a/1"}


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path / "run")
    store.create(KEY, VALUE)
    store.delete(KEY)
    os.removedirs(tmp_path / "run" / "journal" / "a")
    store.create(KEY, VALUE)
    assert store.read(KEY) == VALUE


def test_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.writev, []

    def few_bytes(fd: int, views: list[memoryview]) -> int:
        calls.append(len(views))
        return real(fd, [b"".join(views)[: 1 + 7 * len(calls)]])

    monkeypatch.setattr(os, "writev", few_bytes)
    pieces = [bytes([index % 251]) * (index % 13) for index in range(3_000)]
    LocalStore(root=tmp_path).create(KEY, pieces)
    assert (tmp_path / KEY).read_bytes() == b"".join(pieces)
    assert max(calls) <= os.sysconf("SC_IOV_MAX") and len(calls) > 3


def test_partial_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(root=tmp_path)
    store.create(KEY, VALUE)
    real_preadv, real_pread = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda fd, views, start: real_preadv(fd, [views[0][:7]], start))
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, start: real_pread(fd, min(nbytes, 11), start))
    targets = [bytearray(100) for _ in range(10)]
    store.read_into(KEY, 5, targets)
    assert b"".join(targets) == VALUE[5:1_005]
    assert store.read(KEY, start=1) == VALUE[1:]


def test_a_file_system_that_takes_no_bytes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda fd, views: 0)
    with pytest.raises(StoreUnavailableError, match="took no bytes"):
        LocalStore(root=tmp_path).create(KEY, VALUE)


def test_an_object_cut_short_while_it_is_read_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root=tmp_path)
    store.create(KEY, VALUE)
    monkeypatch.setattr(os, "preadv", lambda fd, views, start: 0)
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, start: b"")
    with pytest.raises(CorruptError, match="truncated"):
        store.read(KEY)
    with pytest.raises(CorruptError, match="truncated"):
        store.read_into(KEY, 0, [bytearray(10)])


# -- full disks and forbidden folders ---------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "open", "writev", "fsync", "link"])
def test_a_full_disk_is_named_with_bytes_wanted_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    Recorder(monkeypatch, tmp_path, failing(call, code))
    with pytest.raises(StoreUnavailableError, match=r"(disk is full|quota is spent)") as caught:
        LocalStore(root=tmp_path).create(KEY, VALUE)
    assert caught.value.errno == code
    assert caught.value.wanted_nbytes == len(VALUE)
    assert caught.value.free_nbytes > 0
    assert files_under(tmp_path) == set()


REAL_FULL_DISK = """
import subprocess, sys
from ckptstore.errors import StoreUnavailableError
from ckptstore.store.local import LocalStore
folder = sys.argv[1]
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode:
    sys.exit(77)
store = LocalStore(root=folder)
store.create("small", b"x" * 1000)
try:
    store.create("data/large", [b"x" * 1000] * 10_000)
except StoreUnavailableError as error:
    assert error.wanted_nbytes == 10_000_000 and 0 < error.free_nbytes < 1 << 20, error
    assert "disk is full" in str(error), error
else:
    sys.exit("no error")
assert [info.key for info in store.list("")] == ["small"]
store.create("data/small", b"y" * 100_000)  # the space of the temporary was given back
"""


def test_a_disk_that_really_is_full(tmp_path: Path) -> None:
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", REAL_FULL_DISK, str(tmp_path)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip(f"no file system can be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr


def test_a_file_larger_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
    try:
        with pytest.raises(StoreUnavailableError, match="File too large") as caught:
            store.create(KEY, [VALUE, VALUE])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert files_under(tmp_path) == set()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    Recorder(monkeypatch, tmp_path, failing("open", code, times=99))
    with pytest.raises(StoreUnavailableError, match="give this user access"):
        LocalStore(root=tmp_path).create(KEY, VALUE)


# -- names ----------------------------------------------------------------------------------------


def test_without_links_and_without_exclusive_rename_the_store_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _no_links)
    monkeypatch.setattr(file.ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(InvalidInputError, match="neither hard links nor rename"):
        LocalStore(root=tmp_path).create(KEY, VALUE)
    assert files_under(tmp_path) == set()


def test_temporaries_and_strange_files_are_not_objects(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path)
    store.create("a/b", b"x")
    for name in (".tmp-0123", "with space", "ümlaut"):
        (tmp_path / "a" / name).write_bytes(b"?")
    (tmp_path / "a" / ".tmp-folder").mkdir()
    for prefix in ("", "a/", "a/.", "a/.tmp-"):
        assert {info.key for info in store.list(prefix)} <= {"a/b"}
    with pytest.raises(InvalidInputError):
        store.read("a/.tmp-0123")


def test_a_key_cannot_be_both_an_object_and_a_folder(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path)
    store.create("a/b", b"x")
    with pytest.raises(InvalidInputError, match="folder of other keys"):
        store.create("a", b"x")
    with pytest.raises(InvalidInputError, match="a part of its path is a file"):
        store.create("a/b/c", b"x")
    with pytest.raises(NotFoundError):
        store.read("a/b/c")


def test_reading_a_store_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path / "none")
    assert list(store.list("")) == []
    store.settle(["a/b"])
    with pytest.raises(NotFoundError):
        store.read("a")
    assert not (tmp_path / "none").exists()


def test_urls_of_all_spellings_open_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "with space%41"
    LocalStore(root=root).create("a", b"x")
    monkeypatch.chdir(tmp_path)
    for url in (str(root), root, root.name, root.as_uri(), LocalStore(root=root).url, f"{root}/"):
        assert open_store(url).read("a") == b"x"


@pytest.mark.parametrize("url", ["nowhere://bucket/run", "file://host/x", "", "file://", "a\0b"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_store(url)


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="endpoint"):
        open_store(tmp_path, {"endpoint": "x"})


# -- processes ------------------------------------------------------------------------------------

RACER = """
import sys
from ckptstore.errors import AlreadyExistsError
from ckptstore.store.local import LocalStore
store, who = LocalStore(root=sys.argv[1]), sys.argv[2].encode()
print("ready", flush=True)
sys.stdin.readline()
for index in range(20):
    try:
        store.create(f"race/{index:02d}", [who] * 100)
    except AlreadyExistsError:
        continue
    print(index, flush=True)
"""


@pytest.mark.slow
def test_of_sixteen_racing_processes_one_wins_each_key(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        racers = []
        for who in range(16):
            command = [sys.executable, "-c", RACER, str(tmp_path / "run"), f"{who:02d}"]
            racer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(racer.kill)
            racers.append(racer)
        for racer in racers:
            assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        won = {who: racer.communicate(timeout=60)[0].split() for who, racer in enumerate(racers)}
    assert sorted(int(index) for indices in won.values() for index in indices) == list(range(20))
    store = LocalStore(root=tmp_path / "run")
    for who, indices in won.items():
        for index in indices:
            assert store.read(f"race/{int(index):02d}") == f"{who:02d}".encode() * 100
    assert len(files_under(tmp_path / "run")) == 20


# -- uploads --------------------------------------------------------------------------------------


def _upload(store: Store, value: bytes) -> None:
    upload = store.upload(KEY, len(value) + 10 * BLOCK_NBYTES)
    try:
        for number in reversed(range(-(-len(value) // BLOCK_NBYTES))):
            upload.write(number, value[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES])
        upload.finish(len(value))
    finally:
        upload.abort()


def test_an_upload_is_whole_or_absent_at_any_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "new" / "run"
    store = LocalStore(root=root)
    recorder = Recorder(monkeypatch, tmp_path)
    _upload(store, bytes(BLOCK_NBYTES + 5))
    check_power_cuts(recorder.events, root / KEY)
    last = [event.call for event in recorder.events[-6:]]
    assert last == ["pwritev", "ftruncate", "fsync", "link", "fsync", "unlink"]


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("open", errno.EINVAL),
        ("first write", errno.EINVAL),
        ("first write", errno.EFAULT),
        ("later write", errno.EOPNOTSUPP),
    ],
)
def test_an_upload_goes_through_the_cache_where_direct_writes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, code: int
) -> None:
    refused = OSError(code, os.strerror(code))
    really_open, really_write, writes = os.open, os.pwritev, []

    def fake_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if where == "open" and flags & os.O_DIRECT:
            raise refused
        return really_open(path, flags, *args, **kwargs)

    def fake_write(fd: int, *args: Any) -> int:
        writes.append(fd)
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if direct and (where == "first write" or len(writes) > 2):
            raise refused
        return really_write(fd, *args)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "pwritev", fake_write)
    store = LocalStore(root=tmp_path / "run")
    value = random.Random(where).randbytes(3 * BLOCK_NBYTES + 17)
    upload = store.upload(KEY, len(value))
    for number in range(3, -1, -1):
        upload.write(number, value[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES])
    assert upload.way.name == "buffered" and upload.way.reason is not None
    assert ("opens no file" if where == "open" else "refused a direct write") in upload.way.reason
    assert os.strerror(code) in upload.way.reason
    upload.finish(len(value))
    upload.abort()
    assert store.read(KEY) == value
    assert files_under(tmp_path / "run") == {KEY}


def test_an_upload_that_meets_a_full_disk_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = LocalStore(root=tmp_path / "run")
    upload = store.upload(KEY, 100)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StoreUnavailableError, match="disk is full"):
        upload.write(0, bytes(100))
    upload.abort()
    assert files_under(tmp_path / "run") == set()


def test_an_upload_that_may_be_larger_than_the_disk_takes_only_what_comes(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path / "run")
    upload = store.upload(KEY, shutil.disk_usage(tmp_path).free + (1 << 40))
    upload.write(0, b"little")
    upload.finish(6)
    upload.abort()
    assert store.read(KEY) == b"little"


def test_an_upload_is_not_finished_after_a_failed_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root=tmp_path / "run")
    upload = store.upload(KEY, 100)
    upload.write(0, bytes(100))
    real, failed = os.fsync, []

    def fail_once(fd: int) -> None:
        if failed:
            return real(fd)
        failed.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail_once)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            upload.finish(100)
    upload.abort()
    assert files_under(tmp_path / "run") == set()


def test_an_upload_is_finished_again_after_its_reply_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root=tmp_path / "run")
    upload = store.upload(KEY, 100)
    upload.write(0, bytes(100))
    real = file.fsync_folder
    monkeypatch.setattr(file, "fsync_folder", _no_links)
    with pytest.raises(OutcomeUnknownError):
        upload.finish(100)
    monkeypatch.setattr(file, "fsync_folder", real)
    upload.finish(100)
    upload.abort()
    assert store.read(KEY) == bytes(100)


def test_a_folder_that_has_gone_is_made_again_for_an_upload(tmp_path: Path) -> None:
    store = LocalStore(root=tmp_path / "run")
    store.create("journal/a/1", b"x")
    shutil.rmtree(tmp_path / "run")
    _upload(store, b"value")
    assert store.read(KEY) == b"value"
