"""One flipped bit, a cut, a deletion or a swap, in any object: the right data or the right error, never other data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import (
    Checkpointer,
    CkptStoreError,
    CorruptError,
    Frozen,
    NotFoundError,
    PerRank,
    Publisher,
    Sharded,
    StoreUnavailableError,
    Subscriber,
    UnsupportedFormatError,
)
from ckptstore.indexfile import decode_index, encode_index
from ckptstore.manifest import ObjectRef
from ckptstore.store.memory import MemoryStore
from ckptstore.tablefile import check_seal, decode_part, encode_part
from ckptstore.testing import FakeClock
from ckptstore.wire import canonical, decode_entry, decode_run
from tests.save.runs import WAIT_S, bits, new_url, save_all, store_of

DAMAGED = (CorruptError, NotFoundError, UnsupportedFormatError, StoreUnavailableError)
HELPERS = ("layouts/", "members/", "alive/")  # read by nobody once the attempt is committed


def state(rank: int, step: int) -> dict[str, Any]:
    return {
        "moving": torch.full((7,), float(step)),
        "still": Sharded.dim0(
            torch.arange(12.0).reshape(6, 2)[3 * rank : 3 * rank + 3].clone(), start=3 * rank, size=6
        ),
        "frozen": Frozen({"w": np.arange(5)}),
        "rank": PerRank(rank),
        "note": "text",
        "step": step,
    }


@dataclass(frozen=True)
class Whole:
    """An undamaged run and what it holds."""

    objects: dict[str, bytes]
    reads: dict[int, Any]
    publication: Any
    published: Any


@pytest.fixture(scope="module")
def whole() -> Whole:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        publishers = [Publisher(inc, role="trainer", rank=rank) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            weights = {"w": torch.arange(9.0)}
            (id, _) = pool.map(lambda p: p.publish(0, weights), publishers)
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        for step in (1, 2):
            handles = [m.save(step, state(rank, step), policy_version=0) for rank, m in enumerate(members)]
            for handle in handles:
                handle.result(WAIT_S)
        for member in members:
            member.close(WAIT_S)
    store = store_of(url)
    run = ckptstore.open(url)
    assert run.verify(full=True).ok
    into = {"w": torch.zeros(9)}
    Subscriber(url).load(id, into)
    return Whole(
        objects={info.key: store.read(info.key) for info in store.list("")},
        reads={step: bits(run.read(step)) for step in (1, 2)},
        publication=id,
        published=bits(into),
    )


def with_objects(objects: dict[str, bytes]) -> str:
    url = new_url()
    store = store_of(url)
    store._objects.update(objects)
    return url


def drop(url: str) -> None:
    MemoryStore._named.pop(url.removeprefix("memory://"))


def outcome(whole: Whole, objects: dict[str, bytes], told: tuple[str, ...]) -> None:
    """Read, load and verify a run that has `objects`; `told` are the keys one of which must be named."""
    url = with_objects(objects)
    try:
        run = ckptstore.open(url, clock=FakeClock())
    except DAMAGED as error:
        assert any(key in str(error) for key in told), error
        return
    else:
        read_all(whole, url, run, told)
    finally:
        drop(url)


def read_all(whole: Whole, url: str, run: Any, told: tuple[str, ...]) -> None:
    for step, truth in whole.reads.items():
        try:
            assert bits(run.read(step)) == truth
        except DAMAGED as error:
            assert any(key in str(error) for key in told), error
    into = {"w": torch.zeros(9)}
    try:
        Subscriber(url, clock=FakeClock()).load(whole.publication, into)
        assert bits(into) == whole.published
    except DAMAGED as error:
        assert any(key in str(error) for key in told), error
    report = run.verify(full=True)
    if all(key.startswith(HELPERS) for key in told):
        assert report.ok
    else:
        assert not report.ok, told
        assert any(damage.key in told for damage in report.damage), (told, report.damage)


def flips(data: bytes, count: int, rng: random.Random) -> Iterator[tuple[int, bytes]]:
    """Bytes with one bit flipped: at both ends, around 4096-byte borders, and at random."""
    borders = {0, 7, 8, 4096, len(data) - 1}
    offsets = sorted(
        at for at in borders | {rng.randrange(len(data)) for _ in range(count)} if 0 <= at < len(data)
    )
    for at in offsets:
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        yield at, bytes(flipped)


KINDS = ["run.json", "journal/", "data/", "parts/", "index/", "layouts/", "members/"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_gives_the_right_data_or_names_the_object(whole: Whole, kind: str) -> None:
    rng = random.Random(kind)
    keys = [key for key in whole.objects if key.startswith(kind)]
    assert keys
    count = 0 if kind in HELPERS else 30 // len(keys)
    for key in keys:
        for at, flipped in flips(whole.objects[key], count, rng):
            if key == "run.json" and b'"write":' in whole.objects[key][max(at - 25, 0) : at + 1]:
                continue  # the write id is compared with nothing once the run is made
            # A damaged entry is met when its successor does not follow it, too.
            told = (key, f"journal/{int(key[8:28]) + 1:020d}.json") if kind == "journal/" else (key,)
            told = ("run.json", "journal/" + "0" * 20) if kind == "run.json" else told
            outcome(whole, {**whole.objects, key: flipped}, told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_or_missing_object_is_named(whole: Whole, kind: str) -> None:
    for key in [key for key in whole.objects if key.startswith(kind)]:
        data = whole.objects[key]
        for left in (0, 7, len(data) // 2, len(data) - 1):
            outcome(whole, {**whole.objects, key: data[:left]}, (key,))
        rest = {other: value for other, value in whole.objects.items() if other != key}
        if key.startswith("journal/") and key == max(k for k in whole.objects if k.startswith("journal/")):
            continue  # a journal that ends one entry earlier is a journal
        told = (key, "memory://") if kind == "run.json" else (key,)
        outcome(whole, rest, told)


def test_two_objects_that_changed_places_are_named(whole: Whole) -> None:
    keys = sorted(key for key in whole.objects if not key.startswith(HELPERS))
    rng = random.Random(1)
    pairs = [pair for pair in combinations(keys, 2) if whole.objects[pair[0]] != whole.objects[pair[1]]]
    for one, other in [pair for pair in pairs if pair[0][:5] == pair[1][:5]] + rng.sample(pairs, 20):
        outcome(whole, {**whole.objects, one: whole.objects[other], other: whole.objects[one]}, (one, other))


def test_a_helper_object_does_not_matter_once_the_attempt_is_committed(whole: Whole) -> None:
    objects = {key: value for key, value in whole.objects.items() if not key.startswith(HELPERS)}
    assert len(objects) < len(whole.objects)
    url = with_objects(objects)
    assert ckptstore.open(url).verify(full=True).ok


# -- each decoder alone


def one_part(whole: Whole) -> bytes:
    return next(value for key, value in whole.objects.items() if key.startswith("parts/f0001/s00000002"))


def index_key_of(whole: Whole, table: str = "") -> str:
    """The chunk table of step 2's index, or the table that it names."""
    end = f".{table}.parquet" if table else ".parquet"
    keys = [key for key in whole.objects if key.startswith("index/f0001/s00000002") and key.endswith(end)]
    return min(keys, key=len)


def one_index(whole: Whole) -> bytes:
    return whole.objects[index_key_of(whole)]


@pytest.mark.parametrize("table", ["part", "", "tensors", "segments"])
def test_a_table_proves_itself_whatever_bit_is_flipped(whole: Whole, table: str) -> None:
    data = one_part(whole) if table == "part" else whole.objects[index_key_of(whole, table)]
    check_seal(data, "a table")
    rng = random.Random(2)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        with pytest.raises((CorruptError, UnsupportedFormatError), match="the table"):
            check_seal(bytes(flipped), "the table")


def read_of(whole: Whole) -> Callable[[ObjectRef], bytes]:
    return lambda ref: whole.objects[ref.key]


def test_what_is_encoded_again_is_the_same_to_the_byte(whole: Whole) -> None:
    assert encode_part(decode_part(one_part(whole), "part")) == one_part(whole)
    index = decode_index(one_index(whole), "index", read_of(whole))
    again = encode_index(index, index_key_of(whole))
    assert again.chunks == one_index(whole)
    assert all(data == whole.objects[ref.key] for ref, data in again.side)


def test_an_entry_is_refused_at_every_byte_and_bit(whole: Whole) -> None:
    for key in [key for key in whole.objects if key.startswith("journal/")]:
        data = whole.objects[key]
        for at in range(len(data)):
            for bit in (0, at % 8):
                flipped = bytearray(data)
                flipped[at] ^= 1 << bit
                with pytest.raises(CorruptError, match="journal"):
                    decode_entry(bytes(flipped), key)


# -- restore


@pytest.mark.parametrize("kind", ["data/", "parts/", "index/"])
def test_a_restore_that_meets_damage_marks_the_step_and_the_next_life_takes_the_older_one(
    whole: Whole, kind: str
) -> None:
    rng = random.Random(3)
    # Of a part, rank 0's, which a single rank asks for its state; chunks may be anywhere.
    member = "-000/trainer-00000" if kind == "parts/" else ""
    key = next(key for key in whole.objects if key.startswith(f"{kind}f0001/s00000002{member}"))
    data = whole.objects[key]
    first = int.from_bytes(data[:8], "little") + 8 if kind == "data/" else 0
    for at in (first, len(data) - 1, rng.randrange(first, len(data))):
        flipped = bytearray(data)
        flipped[at] ^= 4
        url = with_objects({**whole.objects, key: bytes(flipped)})
        with ckptstore.begin(url, {"trainer": 1}, clock=FakeClock()) as inc:
            assert inc.step == (1 if kind == "index/" else 2)  # an index is met by begin itself
            if kind != "index/":
                ckpt = Checkpointer(inc, role="trainer", rank=0, clock=FakeClock())
                with pytest.raises(CorruptError, match=key):
                    ckpt.restore(single(state(0, 0)))
        with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
            target = single(state(0, 0))
            assert ckpt.restore(target) == 1
            assert target["moving"].tolist() == [1.0] * 7 and target["step"] == 1
            assert bits(target["still"]) == bits(torch.arange(12.0).reshape(6, 2))
            ckpt.save(2, target).result(WAIT_S)
        run = ckptstore.open(url)
        assert [(info.step, info.status) for info in run.checkpoints()] == [(1, "ok"), (2, "bad"), (2, "ok")]
        assert run.verify(2).ok
        drop(url)


def single(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "still": torch.zeros(6, 2)}


def test_a_passing_read_error_is_read_again_and_nothing_is_marked(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = with_objects(dict(whole.objects))
    read_into = MemoryStore.read_into
    seen: set[tuple[str, int]] = set()

    def once_wrong(self: MemoryStore, key: str, start: int, targets: Any) -> None:
        read_into(self, key, start, targets)
        if (key, start) not in seen:
            seen.add((key, start))
            targets[0][0] ^= 1

    monkeypatch.setattr(MemoryStore, "read_into", once_wrong)
    assert bits(ckptstore.open(url).read(2)) == whole.reads[2]
    assert seen


# -- newer formats


def test_a_newer_format_is_refused_as_such(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dict(decode_run(whole.objects["run.json"], "run.json"), format=2)
    url = with_objects({**whole.objects, "run.json": canonical(run)})
    for act in (lambda: ckptstore.open(url), lambda: ckptstore.begin(url, {"trainer": 2})):
        with pytest.raises(UnsupportedFormatError, match=r"run\.json has format 2"):
            act()
    part, index = (
        decode_part(one_part(whole), "part"),
        decode_index(one_index(whole), "index", read_of(whole)),
    )
    monkeypatch.setattr("ckptstore.tablefile.FORMAT", 2)
    newer = encode_part(part), encode_index(replace(index), "index").chunks
    monkeypatch.undo()
    with pytest.raises(UnsupportedFormatError, match="part has format 2"):
        decode_part(newer[0], "part")
    with pytest.raises(UnsupportedFormatError, match="index has format 2"):
        decode_index(newer[1], "index", read_of(whole))


def test_a_whole_run_of_a_newer_format_is_refused_at_read(monkeypatch: pytest.MonkeyPatch) -> None:
    url = new_url()
    monkeypatch.setattr("ckptstore.tablefile.FORMAT", 2)
    monkeypatch.setattr("ckptstore.wire.check_format", lambda number, what: None)
    monkeypatch.setattr("ckptstore.tablefile.check_format", lambda number, what: None)
    with ckptstore.begin(url, {"trainer": 1}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=0)]
        save_all(members, 1, [{"w": torch.ones(2)}])
    monkeypatch.undo()
    run = ckptstore.open(url)
    with pytest.raises(UnsupportedFormatError, match="index/"):
        run.read(1)
    assert not run.verify().ok
    with pytest.raises(CkptStoreError):
        ckptstore.begin(url, {"trainer": 1})


def test_a_tensor_of_another_shape_in_each_checkpoint_is_verified_in_each() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 1}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=0)]
        for step in (1, 2, 3):
            save_all(members, step, [{"w": torch.ones(step), "still": torch.ones(3)}])
    run = ckptstore.open(url)
    report = run.verify(full=True)
    assert report.ok and report.chunks == 4 and report.nbytes == 4 * (1 + 2 + 3 + 3)
    store = store_of(url)
    (segment,) = [info.key for info in store.list("data/f0001/s00000002")]
    store.replace(segment, store.read(segment)[:-1] + b"\1")
    (damage,) = run.verify().damage
    assert (damage.key, damage.tensor) == (segment, "trainer/w")
