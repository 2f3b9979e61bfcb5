"""The S3 store on a real server: what every store must do, large objects, long listings, lost replies, refusals."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import secrets
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from ckptstore.store import remote, s3
from ckptstore.store.base import BLOCK_NBYTES, Store, Upload, open_store
from ckptstore.store.request import Parts
from ckptstore.testing.conformance import StoreConformance
from ckptstore.writer import create_own
from tests.s3_server import BUCKET, IMPATIENT
from tests.seaweed import Seaweed
from tests.store.lossy import LossyProxy

LARGE = 2 << 20  # carried by tensorstore


class TestS3Store(StoreConformance):
    @pytest.fixture
    def store(self, s3_url: str) -> Iterator[Store]:
        store = open_store(s3_url)
        yield store
        store.close()


@pytest.fixture
def store(s3_url: str) -> Iterator[Store]:
    store = open_store(s3_url)
    yield store
    store.close()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of more than 5 MiB are made of parts, the smallest that S3 takes."""
    monkeypatch.setattr(remote, "PART_NBYTES", 5 << 20)
    monkeypatch.setattr(remote, "WHOLE_NBYTES_MAX", 5 << 20)


def uploads(store: Store) -> list[Any]:
    """Those that were begun and neither completed nor dropped."""
    client: Any = store._client  # type: ignore[attr-defined]  # only the S3 store has a client
    found = client._requests.list_multipart_uploads(Bucket=BUCKET, Prefix=client._prefix)
    return list(found.get("Uploads", ()))


# -- large objects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_large_objects_are_read_in_ranges_and_each_client_gives_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(remote, "RANGE_NBYTES", 3 << 20)
    if not fast:
        monkeypatch.setattr(s3, "FAST_NBYTES_MIN", 1 << 40)
    value = secrets.token_bytes(7 * LARGE // 2 + 11)
    store.create("large", [value[:1_000], value[1_000:]])
    targets = [bytearray(5), bytearray(4 << 20), bytearray(len(value) - 5 - (4 << 20) - 1)]
    store.read_into("large", 1, targets)
    assert b"".join(targets) == value[1:]
    with pytest.raises(CorruptError, match=f"ends at byte {len(value)}"):
        store.read("large", start=1, nbytes=len(value))
    with pytest.raises(NotFoundError):
        store.read("larger", nbytes=LARGE)
    with pytest.raises(AlreadyExistsError):
        store.create("large", bytes(LARGE))
    store.replace("large", value[::-1])
    assert store.read("large") == value[::-1]


def test_parts_make_one_object_or_none(store: Store, parts: None) -> None:
    value = secrets.token_bytes((12 << 20) + 7)
    store.create("parts", [value[: 6 << 20], value[6 << 20 :]])
    assert store.read("parts", nbytes=len(value)) == value
    with pytest.raises(AlreadyExistsError):
        store.create("parts", bytes(6 << 20))
    assert store.read("parts", nbytes=len(value)) == value
    assert uploads(store) == []


def test_a_part_that_cannot_be_sent_leaves_nothing(
    store: Store, parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = s3.S3Client.put_part

    def put_part(client: s3.S3Client, parts: Parts, number: int, views: Any) -> str:
        assert list(store.list("")) == []
        if number == 2:
            raise s3.RequestError("refused", "planted")
        return real(client, parts, number, views)

    monkeypatch.setattr(s3.S3Client, "put_part", put_part)
    with pytest.raises(StoreUnavailableError):
        store.create("parts", bytes(12 << 20))
    assert list(store.list("")) == [] and uploads(store) == []


def test_of_four_racing_creates_one_wins(store: Store) -> None:
    for size in (100, LARGE):
        together = threading.Barrier(4)

        def race(who: int, size: int = size, together: threading.Barrier = together) -> bool:
            together.wait(60)
            try:
                store.create(f"race/{size}", bytes([who]) * size)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(race, range(4)))
        assert won.count(True) == 1
        assert store.read(f"race/{size}") == bytes([won.index(True)]) * size


# -- listings --------------------------------------------------------------------------------------


def test_a_listing_of_many_pages_is_whole_and_fresh(
    store: Store, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PAGE_KEYS", 7)
    keys = {f"n/{index:02d}{end}" for index in range(20) for end in ("", "-b", "-b.d/c")}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.create(key, b""), keys))
    found = [info.key for info in store.list("")]
    assert set(found) == keys and len(found) == len(keys) == 60
    other = open_store(store.url)
    other.delete("n/00")
    other.create("n/99", b"x")
    assert {info.key for info in store.list("n/")} == (keys - {"n/00"}) | {"n/99"}
    assert {info.key for info in store.list("n/1")} == {key for key in keys if key.startswith("n/1")}


def test_runs_in_one_bucket_do_not_see_each_other(s3_url: str) -> None:
    first, second = open_store(f"{s3_url}/run"), open_store(f"{s3_url}/run-2/")
    first.create("a", b"1")
    assert list(second.list("")) == [] and second.url == f"{s3_url}/run-2"
    assert [info.key for info in open_store(s3_url).list("")] == ["run/a"]


# -- lost replies ----------------------------------------------------------------------------------


def through(proxy: LossyProxy, url: str, **options: Any) -> Store:
    return open_store(url, {"endpoint_url": proxy.endpoint, **IMPATIENT, **options})


def once(method: str, part: str = "") -> Any:
    counted = itertools.count()
    return lambda line: line.startswith(f"{method} ") and part in line and next(counted) == 0


def test_a_create_whose_reply_was_lost_has_landed(proxy: LossyProxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    proxy.lose = once("PUT")
    store.create("a", b"mine")
    assert len(proxy.lost) == 1 and store.read("a") == b"mine"


def test_a_lost_refusal_is_a_refusal(proxy: LossyProxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    open_store(s3_url).create("a", b"theirs")
    proxy.lose = once("PUT")
    with pytest.raises(AlreadyExistsError):
        store.create("a", b"mine!!")
    assert len(proxy.lost) == 1 and store.read("a") == b"theirs"


def test_when_every_reply_is_lost_the_object_is_read_back(proxy: LossyProxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    proxy.lose = lambda line: line.startswith("PUT ")
    store.create("a", b"mine")
    store.replace("b", b"mine")
    assert len(proxy.lost) > 3
    with pytest.raises(AlreadyExistsError):
        store.create("a", b"other")


def test_what_cannot_be_read_back_is_unknown(proxy: LossyProxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    proxy.lose = lambda line: True
    for write in (store.create, store.replace):
        with pytest.raises(OutcomeUnknownError, match="read it back"):
            write("a", b"mine")
    assert open_store(s3_url).read("a") == b"mine"


@pytest.mark.parametrize("lost", ["POST", "PUT"])
def test_lost_replies_of_parts(proxy: LossyProxy, s3_url: str, parts: None, lost: str) -> None:
    store, value = through(proxy, s3_url, timeout_s=10.0), secrets.token_bytes(6 << 20)
    proxy.lose = once(lost, "uploadId=")
    store.create("a", value)
    assert len(proxy.lost) == 1 and store.read("a") == value
    assert uploads(store) == []


def uploaded(store: Store, key: str, blocks: int) -> tuple[Upload, int]:
    """An upload whose blocks, of one byte each, are all written."""
    upload = store.upload(key, blocks * BLOCK_NBYTES)
    for block in reversed(range(blocks)):
        upload.write(block, bytes([block]) * (BLOCK_NBYTES if block < blocks - 1 else 5))
    return upload, (blocks - 1) * BLOCK_NBYTES + 5


@pytest.mark.parametrize("blocks", [1, 2])
def test_an_upload_whose_last_reply_was_lost_has_landed(proxy: LossyProxy, s3_url: str, blocks: int) -> None:
    store = through(proxy, s3_url, timeout_s=10.0)
    upload, nbytes = uploaded(store, "a", blocks)
    proxy.lose = once("PUT" if blocks == 1 else "POST", "/a")
    upload.finish(nbytes)
    upload.abort()
    assert len(proxy.lost) == 1 and store.size("a") == nbytes and uploads(store) == []


def test_an_upload_of_which_nothing_is_heard_is_settled_by_finishing_again(
    proxy: LossyProxy, s3_url: str
) -> None:
    store = through(proxy, s3_url, timeout_s=10.0)
    upload, nbytes = uploaded(store, "a", 2)
    proxy.lose = lambda line: line.startswith(("POST", "HEAD"))
    with pytest.raises(OutcomeUnknownError, match="read it back"):
        upload.finish(nbytes)
    proxy.lose = lambda line: False
    upload.finish(nbytes)
    assert store.size("a") == nbytes and uploads(store) == []


def test_an_object_with_equal_bytes_is_not_taken_for_our_upload(proxy: LossyProxy, s3_url: str) -> None:
    """Of the same size and content, but another's: only the mark tells them apart."""
    store = through(proxy, s3_url, timeout_s=10.0)
    theirs, nbytes = uploaded(open_store(s3_url), "a", 2)
    ours, _ = uploaded(store, "a", 2)
    theirs.finish(nbytes)
    proxy.lose = once("POST", "/a")
    with pytest.raises(AlreadyExistsError):
        ours.finish(nbytes)
    ours.abort()
    assert len(proxy.lost) == 1 and uploads(store) == []


@pytest.mark.parametrize("lost", [3, 1])  # told by a later write, or at the end
def test_a_block_that_cannot_be_sent_spoils_its_upload_only(
    store: Store, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    real = s3.S3Client.put_part

    def put_part(client: s3.S3Client, parts: Parts, number: int, views: Any) -> str:
        if number == lost:
            raise s3.RequestError("refused", "planted")
        return real(client, parts, number, views)

    monkeypatch.setattr(s3.S3Client, "put_part", put_part)
    upload = store.upload("a", 4 * BLOCK_NBYTES)
    with pytest.raises(StoreUnavailableError, match="planted"):
        for block in (3, 2, 1, 0):
            upload.write(block, bytes(BLOCK_NBYTES))
        upload.finish(4 * BLOCK_NBYTES)
    upload.abort()
    assert list(store.list("")) == [] and uploads(store) == []
    store.create("a", b"free")


def test_an_upload_of_more_parts_than_s3_takes_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInputError, match="smaller segments"):
        store.upload("a", 10_001 * BLOCK_NBYTES)


def test_a_large_create_whose_reply_was_lost_is_known_by_its_writer(proxy: LossyProxy, s3_url: str) -> None:
    """tensorstore may send it again unseen and meet its own object: keys of one writer alone settle that."""
    store, value = through(proxy, s3_url, timeout_s=10.0), secrets.token_bytes(LARGE)
    for key in ("first", "on-a-used-connection"):
        proxy.lose = once("PUT")
        create_own(store, key, value)
        assert store.read(key) == value
    assert len(proxy.lost) == 2


def test_reads_and_listings_are_asked_for_again(proxy: LossyProxy, s3_url: str) -> None:
    store = through(proxy, s3_url, timeout_s=10.0)
    value = secrets.token_bytes(LARGE)
    store.create("a", value)
    for act in (lambda: store.read("a"), lambda: store.read("a", start=5, nbytes=LARGE - 5)):
        proxy.lose = once("GET")
        assert act() in (value, value[5:])
    proxy.lose = once("HEAD")
    assert store.size("a") == LARGE
    proxy.lose = once("GET")
    assert [info.key for info in store.list("")] == ["a"]
    proxy.lose = once("DELETE")
    store.delete("a")
    assert len(proxy.lost) == 5 and list(store.list("")) == []


# -- servers that do not answer ---------------------------------------------------------------------


def test_a_stalled_server_is_named_in_bounded_time(seaweed: Seaweed, s3_url: str) -> None:
    open_store(s3_url).create("a", b"x" * LARGE)
    store = open_store(s3_url, {"timeout_s": 0.4, "retry_s": 0.2})
    start = time.monotonic()
    with seaweed.stalled(), ThreadPoolExecutor(4) as pool:
        acts = [
            pool.submit(store.read, "a", nbytes=LARGE),
            pool.submit(store.size, "a"),
            pool.submit(lambda: list(store.list(""))),
        ]
        writing = [pool.submit(store.create, key, bytes(size)) for key, size in (("b", 9), ("c", LARGE))]
        for act in acts:
            assert isinstance(act.exception(), StoreUnavailableError)
        for act in writing:  # the requests may be waiting in the server
            assert isinstance(act.exception(), OutcomeUnknownError)
    assert time.monotonic() - start < 30
    assert store.size("a") == LARGE


def test_no_server_is_said_to_be_so(s3_url: str) -> None:
    store = open_store(s3_url, {**IMPATIENT, "endpoint_url": "http://127.0.0.1:9"})
    for act in (lambda: store.create("a", b"x"), lambda: store.read("a"), lambda: list(store.list(""))):
        with pytest.raises(StoreUnavailableError, match="AWS_ENDPOINT_URL"):
            act()


# -- refusals --------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(status: int, code: str) -> Iterator[tuple[str, list[str]]]:
    """The endpoint of a server that refuses everything alike, and the requests that it was sent."""
    told: list[str] = []
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told so</Message></Error>".encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            told.append(self.requestline)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815  # the names that http.server calls

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", told
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "AccessDenied", "let these credentials read, write, list and delete"),
        (403, "InvalidAccessKeyId", "correct AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "correct AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", "renew the credentials"),
        (404, "NoSuchBucket", "make the bucket"),
        (400, "AuthorizationHeaderMalformed", "set AWS_DEFAULT_REGION"),
        (501, "NotImplemented", "use another"),
    ],
)
def test_what_may_not_be_repeated_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, advice: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with answering(status, code) as (endpoint, told):
        store = open_store("s3://bucket/run", {"endpoint_url": endpoint, **IMPATIENT})
        acts = [
            lambda: store.create("a", b"x"),
            lambda: store.create("a", bytes(LARGE)),
            lambda: store.replace("a", b"x"),
            lambda: store.read("a"),
            lambda: store.read("a", nbytes=LARGE),
            lambda: list(store.list("")),
        ]
        for act in acts:
            with pytest.raises(CkptStoreError) as caught:
                act()
            assert isinstance(caught.value, StoreUnavailableError), caught.value
            assert advice in str(caught.value) and "s3://bucket/run" in str(caught.value)
            assert len(told) <= 4, told  # the two clients ask for themselves, none twice
            told.clear()


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_what_may_pass_is_tried_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with answering(status, code) as (endpoint, told):
        store = open_store("s3://bucket/run", {"endpoint_url": endpoint, "timeout_s": 1, "retry_s": 0.3})
        with pytest.raises(StoreUnavailableError, match=code):
            store.read("a")
        with pytest.raises(OutcomeUnknownError, match=code):
            store.create("a", b"x")
        assert len(told) > 3


def test_wrong_keys_are_refused_by_a_real_server(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(s3_url, IMPATIENT)
    for act in (
        lambda: store.create("a", b"x"),
        lambda: store.create("a", bytes(LARGE)),
        lambda: store.read("a"),
    ):
        with pytest.raises(StoreUnavailableError, match=r"credentials|AWS_SECRET_ACCESS_KEY"):
            act()


def test_without_credentials_it_says_what_to_set(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreUnavailableError, match="set AWS_ACCESS_KEY_ID"):
        open_store(s3_url, IMPATIENT).create("a", b"x")
    with pytest.raises(StoreUnavailableError, match="a profile"):
        open_store(s3_url, {**IMPATIENT, "profile": "absent"}).create("a", b"x")


# -- opening ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///run", "s3://b/a//b", "s3://b/ü", "s3://b/a?x=1", "s3://k:s@b/a"]
)
def test_urls_without_a_bucket_or_with_other_parts_are_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_store(url)


def test_options_are_judged_all_at_once() -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_store("s3://b/run", {"key": "a", "timeout_s": 0, "anonymous": 1, "retry_s": True, "region": "r"})
    assert len(caught.value.wrong) == 4 and "keys belong into the environment" in str(caught.value)


@pytest.mark.parametrize("package", ["botocore", "tensorstore"])
def test_a_package_that_is_missing_is_named_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidInputError, match=r"ckptstore\[s3\]"):
        open_store("s3://bucket/run")


def test_neither_client_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, ckptstore.store.base, ckptstore; "
        "sys.exit('botocore' in sys.modules or 'tensorstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


FORKED = """
import os, sys
from ckptstore.store.base import open_store
store = open_store(sys.argv[1])
store.create("a", bytes(2 << 20))
pid = os.fork()
if not pid:
    store.create("b", store.read("a", nbytes=2 << 20))
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_process_has_connections_of_its_own(s3_url: str) -> None:
    assert subprocess.run([sys.executable, "-c", FORKED, s3_url], timeout=60).returncode == 0
    assert open_store(s3_url).size("b") == 2 << 20


TLS = """
import sys
from ckptstore.store.base import open_store
store = open_store(sys.argv[1], {"timeout_s": 5, "retry_s": 0.1})
store.create("a", bytes(2 << 20))
assert store.read("a", nbytes=2 << 20) == bytes(2 << 20)
"""


def test_certificates_are_taken_from_the_environment(
    seaweed: Seaweed, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-keyout",
        "key",
        "-out",
        "cert",
        "-subj",
        "/CN=localhost",
    ]
    try:
        subprocess.run(
            [*command, "-addext", "subjectAltName=IP:127.0.0.1"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("no openssl command")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    proxy = LossyProxy(seaweed.port, tls=context)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    told = subprocess.run([sys.executable, "-c", TLS, s3_url], timeout=60, capture_output=True, text=True)
    assert "set AWS_CA_BUNDLE" in told.stderr
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "cert"))
    told = subprocess.run([sys.executable, "-c", TLS, s3_url], timeout=60, capture_output=True, text=True)
    proxy.close()
    assert told.returncode == 0, told.stderr
