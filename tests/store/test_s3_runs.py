"""Whole runs on a real S3 server: saved, restored, looked at, raced for, and through what servers do at their worst."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import (
    Checkpointer,
    CkptStoreError,
    FencedError,
    OutcomeUnknownError,
    Publisher,
    StoreUnavailableError,
    Subscriber,
    incarnation,
)
from ckptstore.store.base import open_store
from ckptstore.store.s3 import S3Client
from tests.cli.commands import run
from tests.s3_server import IMPATIENT
from tests.save.runs import WAIT_S, bits, restore, save_all, save_steps
from tests.seaweed import Seaweed
from tests.store.lossy import LossyProxy


@pytest.fixture(autouse=True)
def without_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a second of each `begin`; the conformance suite and the how-to page run it."""
    monkeypatch.setattr(incarnation, "probe", lambda store: None)


def state(rank: int, step: int) -> dict[str, Any]:
    """Two ranks' halves of a tensor of 4 MiB, so that segments are large objects."""
    half = torch.arange(1 << 19, dtype=torch.float32) + rank * (1 << 19) + step
    return {"w": ckptstore.Sharded.dim0(half, start=rank << 19, size=1 << 20), "step": step}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(1 << 20), "step": -1}


def whole(step: int) -> dict[str, Any]:
    return {"w": torch.arange(1 << 20, dtype=torch.float32) + step, "step": step}


def saved(url: str, *steps: int) -> None:
    save_steps(url, {step: [state(rank, step) for rank in range(2)] for step in steps})


def test_a_run_is_saved_restored_and_looked_at(s3_url: str) -> None:
    saved(s3_url, 1, 2)
    target = blank()
    restore(s3_url, target)
    assert bits(target) == bits(whole(2))
    assert [info.step for info in ckptstore.open(s3_url).checkpoints()] == [1, 2]
    listed = run("ls", s3_url, "--json")
    assert listed.code == 0 and s3_url in listed.out, listed
    assert run("verify", s3_url).code == 0


def test_a_segment_that_is_missing_is_named(s3_url: str) -> None:
    saved(s3_url, 1)
    store = open_store(s3_url)
    (gone, *_) = sorted(info.key for info in store.list("data/"))
    store.delete(gone)
    told = run("verify", s3_url)
    assert told.code != 0 and gone in told.out + told.err
    with pytest.raises(CkptStoreError, match=gone):
        ckptstore.open(s3_url).read(step=1)


def test_publications(s3_url: str) -> None:
    with ckptstore.begin(s3_url, {"trainer": 1}) as inc:
        subscriber, publisher = Subscriber(s3_url), Publisher(inc, role="trainer", rank=0)
        for number in range(2):
            id = publisher.publish(number, whole(number))
            into = blank()
            assert subscriber.newest() == id
            subscriber.load(id, into)
            assert bits(into) == bits(whole(number))


def test_of_incarnations_that_race_for_a_fence_one_commits(s3_url: str) -> None:
    saved(s3_url, 1)

    def begin(who: int) -> ckptstore.Incarnation | FencedError:
        try:
            return ckptstore.begin(s3_url, {"trainer": 1}, job=f"job{who}", takeover=True)
        except FencedError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        begun = [inc for inc in pool.map(begin, range(2)) if not isinstance(inc, FencedError)]
    assert begun
    newest = max(begun, key=lambda inc: inc.fence)
    for inc in sorted(begun, key=lambda inc: inc.fence):
        member = Checkpointer(inc, role="trainer", rank=0)
        if inc is newest:
            member.save(2, whole(2)).result(WAIT_S)
        else:
            with pytest.raises(FencedError):
                member.save(2, whole(2)).result(WAIT_S)
        inc.close()
    assert [info.step for info in ckptstore.open(s3_url).checkpoints()] == [1, 2]


def test_a_run_whose_every_third_reply_is_lost_is_as_any_other(proxy: LossyProxy, s3_url: str) -> None:
    options = {"endpoint_url": proxy.endpoint}
    seen: dict[str, int] = {}

    def lose(line: str) -> bool:
        method = line.split(" ", 1)[0]
        seen[method] = seen.get(method, 0) + 1
        return seen[method] % 3 == 0

    proxy.lose = lose
    with ckptstore.begin(s3_url, {"trainer": 2}, storage_options=options) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        for step in (1, 2, 3):
            save_all(members, step, [state(rank, step) for rank in range(2)])
        for member in members:
            member.close(WAIT_S)
    assert len(proxy.lost) > 10
    proxy.lose = lambda line: False
    target = blank()
    restore(s3_url, target)
    assert bits(target) == bits(whole(3))
    assert [info.step for info in ckptstore.open(s3_url).checkpoints()] == [1, 2, 3]
    assert run("verify", s3_url).code == 0


@pytest.fixture
def killed_and_started(seaweed: Seaweed) -> Iterator[Seaweed]:
    yield seaweed
    if not seaweed.runs:
        seaweed.start()


@pytest.mark.slow
def test_a_server_that_dies_in_a_save_costs_that_save_only(
    killed_and_started: Seaweed, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, real = killed_and_started, S3Client.put
    saved(s3_url, 1)

    def put(client: S3Client, key: str, views: Any, *, exclusive: bool) -> None:
        if key.startswith("parts/") and server.runs:
            server.kill()
        real(client, key, views, exclusive=exclusive)

    with ckptstore.begin(s3_url, {"trainer": 2}, storage_options=IMPATIENT) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(S3Client, "put", put)
            handles = [member.save(2, state(rank, 2)) for rank, member in enumerate(members)]
            for handle in handles:
                with pytest.raises((StoreUnavailableError, OutcomeUnknownError), match=s3_url):
                    handle.result(WAIT_S)
        server.start()
        assert [info.step for info in ckptstore.open(s3_url).checkpoints()] == [1]
        save_all(members, 3, [state(rank, 3) for rank in range(2)])
    target = blank()
    restore(s3_url, target)
    assert bits(target) == bits(whole(3))
