"""Objects whose digests are right and whose contents cannot be: an error of ours, whatever is read.

Digests find damage. What is written by a broken tool, or put together by hand, is sealed as well. So each
number, name and tag of parts, indexes and entries is replaced by what it can never be, and everything that
refers to it is sealed anew.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ckptstore
from ckptstore import Checkpointer, CkptStoreError
from ckptstore.store.memory import MemoryStore
from ckptstore.tablefile import seal
from ckptstore.testing import FakeClock
from ckptstore.wire import canonical, digest_of
from tests.save.runs import WAIT_S, bits, new_url, restore, save_all, store_of
from tests.save.test_damage import state

ABSURD: list[Any] = [-1, 0, 2**31, 2**62, 2**63 - 1, 2**64, 10**30, 1.5, 1e300, "x", "../../up", "9" * 50]
ABSURD += [None, True, [], {}, [1, 2, 3], {"T": 3}, {"d": 1}, {"new": {}}]
NUMBERS = (-1, 0, 1, 1000, 2**62, 2**63 - 1, -(2**63), 2**31)
CASES = 50  # a kind, drawn by its seed
SIDES = ("tensors", "segments")
Objects = dict[str, bytes]


@pytest.fixture(scope="module")
def run() -> Objects:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        save_all(members, 1, [state(rank, 1) for rank in range(2)])
        for member in members:
            member.close(WAIT_S)
    return {info.key: store_of(url).read(info.key) for info in store_of(url).list("")}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*at, key))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    out = copy.copy(value)
    out[at[0]] = put(value[at[0]], at[1:], new)
    return out


def opened(data: bytes) -> tuple[pa.Table, dict[str, Any]]:
    file = pq.ParquetFile(pa.BufferReader(data))
    return file.read(), json.loads(file.metadata.metadata[b"ckptstore"])


def sealed(table: pa.Table, meta: dict[str, Any]) -> tuple[bytes, int]:
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    texts = [n for n in ("tensor", "dtype", "segment", "codec", "base") if n in columns]
    told = {k: v for k, v in meta.items() if k not in ("rows", "groups", "check", "format")}
    dictionary = [name for name in texts if pa.types.is_string(columns[name].type)]
    return seal(told, columns, dictionary=dictionary, group_rows=4096)


def ref(key: str, data: bytes, tail: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = {"key": key, "nbytes": len(data), "digest": digest_of(data)}
    return {**told, "tail": {"nbytes": tail, "digest": digest_of(data[-tail:])}} if tail else told


def chained(objects: Objects, entries: dict[str, Any]) -> Objects:
    """The objects with these journal entries, each sealed and followed by the next."""
    out, prev = dict(objects), ""
    for key in sorted(key for key in objects if key.startswith("journal/")):
        value = {**entries.get(key, json.loads(objects[key])), "prev": prev}
        value.pop("check", None)
        out[key] = canonical({**value, "check": digest_of(canonical(value))})
        prev = digest_of(out[key])
    return out


def commit_of(objects: Objects) -> tuple[str, dict[str, Any]]:
    keys = [key for key in sorted(objects) if key.startswith("journal/")]
    return next((k, v) for k in keys if (v := json.loads(objects[k]))["kind"] == "commit")


def with_index(objects: Objects, table: pa.Table, meta: dict[str, Any]) -> Objects:
    key, entry = commit_of(objects)
    data, tail = sealed(table, meta)
    index = entry["index"]["key"]
    return chained({**objects, index: data}, {key: {**entry, "index": ref(index, data, tail)}})


def with_table(objects: Objects, kind: str, table: pa.Table, meta: dict[str, Any]) -> Objects:
    """The run in which one table is another, and all that names it says so."""
    index = commit_of(objects)[1]["index"]["key"]
    if kind == "index":
        return with_index(objects, table, meta)
    rows, head = opened(objects[index])
    data, _ = sealed(table, meta)
    if kind in SIDES:
        key = head[kind]["key"]
        head = {**head, kind: ref(key, data)}
    else:
        key = head["parts"][0]["key"]
        head = put(head, ("parts", 0), {**head["parts"][0], **ref(key, data)})
    return with_index({**objects, key: data}, rows, head)


def table_of(objects: Objects, kind: str) -> tuple[pa.Table, dict[str, Any]]:
    index = commit_of(objects)[1]["index"]["key"]
    table, head = opened(objects[index])
    if kind == "index":
        return table, head
    return opened(objects[head[kind]["key"] if kind in SIDES else head["parts"][0]["key"]])


def other_table(table: pa.Table, rng: random.Random) -> pa.Table:
    """The table with another number, text or digest in one place, another type of a column, or less of it."""
    name = rng.choice(table.column_names)
    at, column = table.column_names.index(name), table.column(name)
    if rng.random() < 0.3:
        whole = pa.array([rng.choice((1.5, "x"))] * table.num_rows)
        less = (
            table.drop_columns([name]),
            table.slice(0, table.num_rows - 1),
            table.set_column(at, name, whole),
        )
        return rng.choice(less)
    values = column.to_pylist()
    if pa.types.is_integer(column.type):
        limit = 2 ** (column.type.bit_width - 1)
        new: Any = rng.choice([n for n in NUMBERS if -limit <= n < limit])
    else:
        new = rng.choice(
            ("", "x", "../up", None, "zz" * 500) if pa.types.is_string(column.type) else (None, b"\0" * 16)
        )
    values[rng.randrange(len(values))] = new
    return table.set_column(at, name, pa.array(values, column.type))


def changed(objects: Objects, kind: str, rng: random.Random) -> Objects:
    if kind == "journal":
        key = rng.choice([key for key in sorted(objects) if key.startswith("journal/")])
        value = json.loads(objects[key])
        at = rng.choice([p for p in places(value) if p and p[0] not in ("check", "prev")])
        return chained(objects, {key: put(value, at, rng.choice(ABSURD))})
    table, meta = table_of(objects, kind)
    if rng.random() < 0.5:
        at = rng.choice([p for p in places(meta) if p and p[0] not in ("check", "rows", "groups", "format")])
        return with_table(objects, kind, table, put(meta, at, rng.choice(ABSURD)))
    return with_table(objects, kind, other_table(table, rng), meta)


def read_everything(url: str) -> None:
    """Each way of reading, which may only raise what ckptstore raises."""

    def restored() -> None:
        restore(url, *(state(rank, 0) for rank in range(2)))

    ways = (
        lambda: ckptstore.open(url, clock=FakeClock()).read(),
        lambda: ckptstore.open(url, clock=FakeClock()).checkpoints(),
        lambda: ckptstore.open(url, clock=FakeClock()).tensor("still")[0].read().result(),
        lambda: ckptstore.open(url, clock=FakeClock()).verify(full=True),
        restored,
    )
    for way in ways:
        with suppress(CkptStoreError):
            way()


def test_sealing_anew_changes_nothing(run: Objects) -> None:
    for kind in ("part", "index", *SIDES):
        url = new_url()
        store_of(url)._objects.update(with_table(run, kind, *table_of(run, kind)))
        assert bits(ckptstore.open(url).read()["still"])
        assert ckptstore.open(url).verify(full=True).ok


@pytest.mark.parametrize("kind", ["journal", "part", "index", "tensors", "segments"])
def test_what_cannot_be_is_an_error_of_ours_whatever_is_read(run: Objects, kind: str) -> None:
    rng = random.Random(kind)
    for n in range(CASES):
        url = new_url()
        store_of(url)._objects.update(changed(run, kind, rng))
        try:
            read_everything(url)
        except Exception as error:
            raise AssertionError(f"case {n} of {kind}") from error
        finally:
            MemoryStore._named.pop(url.removeprefix("memory://"))
