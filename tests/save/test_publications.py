"""Numbered versions of the policy: published by all ranks, loaded whole by anyone, announced again after a restore."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import (
    Checkpointer,
    CorruptError,
    InconsistentCutError,
    LayoutMismatchError,
    MissingTensorError,
    NotFoundError,
    PerRank,
    PublicationId,
    Publisher,
    Sharded,
    Subscriber,
)
from ckptstore.incarnation import Incarnation
from ckptstore.store.memory import MemoryStore
from tests.save.runs import WAIT_S, bits, new_url, store_of


def weights(rank: int, number: int) -> dict[str, Any]:
    return {
        "experts": Sharded.dim0(torch.full((2, 3), float(10 * rank + number)), start=2 * rank, size=4),
        "dense": torch.full((5,), float(number), dtype=torch.bfloat16),
        "version": number,
    }


def blank() -> dict[str, Any]:
    return {"experts": torch.zeros(4, 3), "dense": torch.zeros(5, dtype=torch.bfloat16), "version": -1}


def loaded(number: int) -> dict[str, Any]:
    halves = [torch.full((2, 3), float(10 * rank + number)) for rank in range(2)]
    return {"experts": torch.cat(halves), "dense": weights(0, number)["dense"], "version": number}


def publishers(inc: Incarnation) -> list[Publisher]:
    return [Publisher(inc, role="trainer", rank=rank) for rank in range(2)]


def publish(members: Sequence[Publisher], number: int) -> PublicationId:
    with ThreadPoolExecutor(len(members)) as pool:
        ids = list(
            pool.map(lambda item: item[1].publish(number, weights(item[0], number)), enumerate(members))
        )
    assert len(set(ids)) == 1
    return ids[0]


def cut(inc: Incarnation, step: int, version: int | None) -> None:
    members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
    handles = [m.save(step, weights(rank, step), policy_version=version) for rank, m in enumerate(members)]
    for handle in handles:
        handle.result(WAIT_S)


def check_load(subscriber: Subscriber, id: PublicationId, number: int) -> None:
    into = blank()
    report = subscriber.load(id, into)
    assert bits(into) == bits(loaded(number))
    assert report.id == id and report.nbytes == 4 * 3 * 4 + 5 * 2


def test_two_ranks_publish_and_one_process_loads_everything() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        subscriber = Subscriber(url)
        assert subscriber.newest() is None
        members = publishers(inc)
        for number in range(3):
            assert members[0].due() == members[1].due() == number
            id = publish(members, number)
            assert (
                (id.fence, id.number) == (1, number)
                and subscriber.newest() == id
                and subscriber.is_current(id)
            )
            check_load(subscriber, id, number)
        half = {"experts": Sharded.dim0(torch.zeros(1, 3), start=2, size=4)}
        subscriber.load(id, half)
        assert half["experts"].tensor.tolist() == [[12.0] * 3]


def test_a_number_that_is_not_due_is_refused_and_the_due_one_still_goes() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = publishers(inc)
        publish(members, 0)
        for number in (0, 2):
            with pytest.raises(InconsistentCutError, match="publish 1"):
                publish(members, number)
        assert publish(members, 1).number == 1


def test_equal_weights_have_equal_digests_and_ids_that_differ() -> None:
    ids = []
    url = new_url()
    for _ in range(2):
        with ckptstore.begin(url, {"trainer": 2}, resume="never") as inc:
            ids.append(publish(publishers(inc), 0))
    assert ids[0].digest == ids[1].digest and ids[0] != ids[1]
    with ckptstore.begin(url, {"trainer": 2}, resume="never") as inc:
        members = publishers(inc)
        publish(members, 0)
        assert publish(members, 1).digest != ids[0].digest


def test_the_digest_does_not_depend_on_whose_part_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's part is not seen before the third's; their states differ."""

    def published() -> str:
        with ckptstore.begin(new_url(), {"trainer": 3}) as inc:
            members = [Publisher(inc, role="trainer", rank=rank) for rank in range(3)]
            with ThreadPoolExecutor(3) as pool:
                calls = [
                    pool.submit(member.publish, 0, {"w": torch.ones(3), "rank": PerRank(rank)})
                    for rank, member in enumerate(members)
                ]
                return {call.result(WAIT_S) for call in calls}.pop().digest

    in_order = published()
    real, third_seen = MemoryStore.read, threading.Event()

    def read(self: MemoryStore, key: str, **span: Any) -> bytes:
        if key.startswith("parts/") and "trainer-00001" in key and not third_seen.is_set():
            raise NotFoundError("not yet", key=key)
        data = real(self, key, **span)
        if key.startswith("parts/") and "trainer-00002" in key:
            third_seen.set()
        return data

    monkeypatch.setattr(MemoryStore, "read", read)
    assert published() == in_order
    assert third_seen.is_set()


def test_after_a_restore_the_cut_is_announced_again_and_the_abandoned_suffix_is_not_current() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = publishers(inc)
        first = [publish(members, number) for number in range(2)]
        cut(inc, 10, 1)
        suffix = publish(members, 2)
        assert Subscriber(url).is_current(suffix)
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        subscriber, members = Subscriber(url), publishers(inc)
        assert subscriber.newest() is None  # none is served between a fence and its first publish
        assert [subscriber.is_current(id) for id in (*first, suffix)] == [True, True, False]
        assert members[0].due() == 1
        again = members[0].reannounce()
        assert again is not None and (again.fence, again.number, again.digest) == (2, 1, first[1].digest)
        assert members[1].reannounce() == again  # also twice
        assert subscriber.newest() == again and subscriber.is_current(again)
        check_load(subscriber, again, 1)
        check_load(subscriber, suffix, 2)  # whatever it is, it can still be looked at
        # The number of the abandoned suffix comes again, as another publication.
        cut_before = publish(members, 2)
        assert cut_before.number == 2 and cut_before != suffix and not subscriber.is_current(suffix)


def test_a_cut_of_the_step_that_publishes_never_names_the_abandoned_publication() -> None:
    """Fence 2 commits version 2 before it publishes it: the 2 of fence 1 was left behind and is not it."""
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = publishers(inc)
        publish(members, 0)
        publish(members, 1)
        cut(inc, 1, 1)
        publish(members, 2)
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        Publisher(inc, role="trainer", rank=0).reannounce()
        cut(inc, 2, 2)
    assert ckptstore.open(url).latest().publication == (2, None)  # type: ignore[union-attr]  # it was just saved
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = publishers(inc)
        assert members[0].reannounce() is None and members[0].due() == 2
        assert publish(members, 2).number == 2


def test_a_fresh_start_has_nothing_to_announce() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        assert Publisher(inc, role="trainer", rank=0).reannounce() is None
        cut(inc, 1, None)
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        member = Publisher(inc, role="trainer", rank=0)
        assert member.reannounce() is None and member.due() == 0


def test_an_older_incarnation_neither_publishes_nor_announces() -> None:
    url = new_url()
    old = ckptstore.begin(url, {"trainer": 2})
    members = publishers(old)
    publish(members, 0)
    with ckptstore.begin(url, {"trainer": 2}, takeover=True):
        with pytest.raises(ckptstore.FencedError):
            publish(members, 1)
        with pytest.raises(ckptstore.FencedError):
            members[0].reannounce()
        assert Subscriber(url).newest() is None
    old.close()


def test_damage_and_misfits_are_found_before_weights_are_used() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        id = publish(publishers(inc), 0)
    subscriber = Subscriber(url)
    with pytest.raises(NotFoundError, match="is not in the journal"):
        subscriber.load(PublicationId(fence=1, number=7, digest=id.digest), blank())
    for wrong, kind in (
        ({"dense": torch.zeros(6, dtype=torch.bfloat16)}, LayoutMismatchError),
        ({"dense": torch.zeros(5)}, LayoutMismatchError),
        ({"other": torch.zeros(5)}, MissingTensorError),
    ):
        before = bits(wrong)
        with pytest.raises(kind):
            subscriber.load(id, wrong)
        assert bits(wrong) == before
    store = store_of(url)
    for info in list(store.list("data/")):
        data = store.read(info.key)
        store.replace(info.key, data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptError, match=info.key):
            subscriber.load(id, blank())
        assert info.key in {damage.key for damage in ckptstore.open(url).verify().damage}
        store.replace(info.key, data)
    check_load(subscriber, id, 0)
    assert ckptstore.open(url).verify(full=True).ok
