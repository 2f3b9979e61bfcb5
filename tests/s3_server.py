"""A SeaweedFS server for the tests of object stores, started once a session, and a bucket in its environment."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.seaweed import Seaweed
from tests.store.lossy import LossyProxy

BUCKET = "runs"
IMPATIENT: dict[str, Any] = {"timeout_s": 1.0, "retry_s": 0.3}


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    pytest.importorskip("botocore", reason="the extra s3 is not installed")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.kill()


@pytest.fixture
def s3_url(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place in the bucket; the environment names the server and its keys."""
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def proxy(seaweed: Seaweed, s3_url: str) -> Iterator[LossyProxy]:
    """Its `endpoint` is the server of `s3_url`."""
    proxy = LossyProxy(seaweed.port)
    yield proxy
    proxy.close()
