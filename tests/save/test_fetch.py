"""Every way to fetch chunks gives, bit by bit, what reading the whole object and slicing it gives."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.chunktable import ChunkTable, make_table
from ckptstore.damage import find_damage
from ckptstore.errors import BudgetExceededError, CorruptError, StoreUnavailableError, UnsupportedFormatError
from ckptstore.fetch import Fetcher
from ckptstore.fill import Fill
from ckptstore.plan.load import plan_load
from ckptstore.reader import Buffers, fetch_chunks, fetch_plan, read_leaves
from ckptstore.state import TensorLeaf
from ckptstore.store.download import Download
from ckptstore.store.local import LocalStore
from ckptstore.store.memory import MemoryStore
from ckptstore.tensor import Box, TensorSpec, halve, itemsize

SEGMENTS = ("data/f1/a", "data/f1/b")
DTYPES = ("float32", "uint8", "float64", "int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Tensors cut into chunks, in two segments with gaps; `whole` are their elements."""

    objects: dict[str, bytes]
    table: ChunkTable
    whole: dict[str, np.ndarray[Any, Any]]


def stored(
    shapes: Sequence[tuple[str, tuple[int, ...]]], *, most: int, gap: int, columns: bool = False
) -> Stored:
    rng = np.random.default_rng(0)
    images = {key: bytearray(rng.bytes(8 + 8 * n)) for n, key in enumerate(SEGMENTS)}
    whole, rows = dict[str, np.ndarray[Any, Any]](), list[tuple[TensorSpec, Box, str, int, bytes]]()
    turn = itertools.cycle(SEGMENTS)
    for n, (dtype, shape) in enumerate(shapes):
        spec = TensorSpec(name=f"r/t{n:03}", dtype=dtype, shape=shape)
        data = rng.integers(0, 256, max(spec.nbytes, 1), np.uint8)[: spec.nbytes]
        whole[spec.name] = data.view(dtype).reshape(shape)
        key = next(turn)
        for box in tiles(shape, most, columns) if spec.numel else ():
            image = images[key]
            image += bytes(-len(image) % itemsize(dtype)) + bytes(gap * itemsize(dtype))
            chunk = np.ascontiguousarray(whole[spec.name][box.slices]).tobytes()
            rows.append((spec, box, key, len(image), chunk))
            image += chunk
    table = make_table(
        specs=[row[0] for row in rows] + [],
        boxes=[row[1] for row in rows],
        segments=[row[2] for row in rows],
        starts=[row[3] for row in rows],
        nbytes=[len(row[4]) for row in rows],
        digests=[xxhash.xxh3_128_digest(row[4]) for row in rows],
    )
    return Stored(objects={key: bytes(image) for key, image in images.items()}, table=table, whole=whole)


def tiles(shape: tuple[int, ...], most: int, columns: bool) -> Iterator[Box]:
    """By rows, as ckptstore cuts; or first in two halves by columns, so that chunks are no runs of the whole."""
    whole = Box.whole(shape)
    if columns and len(shape) > 1 and shape[-1] % 2 == 0:
        half = (*shape[:-1], shape[-1] // 2)
        zeros = (0,) * (len(shape) - 1)
        for column in (Box(offset=(*zeros, 0), shape=half), Box(offset=(*zeros, shape[-1] // 2), shape=half)):
            yield from halve(column, most)
    else:
        yield from halve(whole, most)


class Ways(MemoryStore):
    """A memory store that is read in the way a test chooses; what a block holds besides its bytes is rubbish."""

    def __init__(self, objects: dict[str, bytes], window: int | None) -> None:
        super().__init__()
        for key, value in objects.items():
            self.create(key, value)
        self.way = window

    @contextlib.contextmanager
    def download(self, key: str) -> Iterator[Download]:
        yield _Way(self, key)


class _Way:
    def __init__(self, store: Ways, key: str) -> None:
        self.store, self.key = store, key

    def window(self, start: int, nbytes: int) -> int | None:
        return self.store.way

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        assert targets and all(target.nbytes for target in targets)
        self.store.read_into(self.key, start, targets)

    def read_block(self, start: int, nbytes: int, block: memoryview) -> memoryview:
        assert nbytes and start % 4096 + nbytes <= block.nbytes, "the block is too small"
        np.frombuffer(block, np.uint8)[:] = 0xAA
        found = block[start % 4096 : start % 4096 + nbytes]
        self.store.read_into(self.key, start, [found])
        return found


WAYS = (None, 64, 5_000, 1 << 24)


def target(kind: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """An empty target of a kind: contiguous or strided, at any address, of numpy or torch."""
    size = itemsize(dtype)
    numel = int(np.prod(shape))
    if kind == "odd":
        return np.zeros(numel * size + 3, np.uint8)[3:].view(dtype).reshape(shape)
    if kind == "turned":
        return np.zeros(shape[::-1], dtype).T
    if kind == "torch":
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    if kind == "torch every other":
        return torch.zeros((*shape, 2), dtype=getattr(torch, dtype))[..., 0]
    return np.zeros(shape, dtype)


KINDS = ("plain", "odd", "turned", "torch", "torch every other")


def leaf_of(spec: TensorSpec, box: Box, kind: str) -> TensorLeaf:
    return TensorLeaf(
        spec=spec, box=box, data=target(kind, spec.dtype, box.shape), replicas=None, frozen=False
    )


def bits(data: Any) -> bytes:
    return np.ascontiguousarray(data.numpy() if isinstance(data, torch.Tensor) else data).tobytes()


def fill_slowly(given: Stored, leaf: TensorLeaf) -> bytes:
    return np.ascontiguousarray(given.whole[leaf.spec.name][leaf.box.slices]).tobytes()


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_every_way_gives_the_same_bits(data: st.DataObject) -> None:
    # At most some thousand elements: pieces of three are hundreds of reads then, not tens of thousands.
    extents = st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 2_000)),
        st.tuples(st.integers(0, 40), st.integers(0, 40)),
        st.tuples(*[st.integers(0, 12)] * 3),
    )
    shapes = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), extents), min_size=1, max_size=6))
    has = stored(
        shapes,
        most=data.draw(st.sampled_from([3, 100, 900])),
        gap=data.draw(st.sampled_from([0, 1, 9])),
        columns=data.draw(st.booleans()),
    )
    leaves = []
    for spec in has.table.tensors:
        for _ in range(data.draw(st.integers(1, 2))):
            lo = [data.draw(st.integers(0, n - 1)) for n in spec.shape]
            n = [data.draw(st.integers(1, e - o)) for e, o in zip(spec.shape, lo, strict=True)]
            whole = data.draw(st.booleans())
            box = Box.whole(spec.shape) if whole else Box(offset=tuple(lo), shape=tuple(n))
            leaves.append(leaf_of(spec, box, data.draw(st.sampled_from(KINDS))))
    way, block = data.draw(st.sampled_from(WAYS)), data.draw(st.sampled_from([8192, 12_288, 1 << 20]))
    plan = plan_load(has.table, leaves, batch_nbytes=data.draw(st.sampled_from([100, 9_000, 1 << 24])))
    fill = Fill.of(has.table, leaves, plan)
    store = Ways(has.objects, way)
    budget = 600_000
    with Fetcher(
        store, has.table, plan.reads, fill.without_memory, block_nbytes=block, memory_budget=budget
    ) as fetcher:
        fetch_plan(fetcher, plan, fill)
    assert fetcher.budget.high_water <= budget and fetcher.budget.leased == 0
    for leaf in leaves:
        assert bits(leaf.data) == fill_slowly(has, leaf), (leaf.spec, leaf.box, way, block)


LARGE = [
    ("float32", (50, 100)),
    ("uint8", (3,)),
    ("float64", (7, 300)),
    ("int16", (60, 70)),
    ("uint8", (33,)),
]


@pytest.fixture(scope="module")
def large() -> Stored:
    return stored(LARGE, most=100_000, gap=0)


def whole_leaves(has: Stored, kind: str) -> list[TensorLeaf]:
    return [leaf_of(spec, Box.whole(spec.shape), kind) for spec in has.table.tensors]


def read_with(has: Stored, store: Any, leaves: Sequence[TensorLeaf], *, block: int = 8192) -> None:
    plan = plan_load(has.table, leaves)
    fill = Fill.of(has.table, leaves, plan)
    with Fetcher(store, has.table, plan.reads, fill.without_memory, block_nbytes=block) as fetcher:
        fetch_plan(fetcher, plan, fill)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "turned"])
def test_damage_in_any_byte_is_found_by_every_way(large: Stored, way: int | None, kind: str) -> None:
    rng = np.random.default_rng(1)
    names = [large.table.spec(row).name for row in range(len(large.table))]
    for row, (start, nbytes) in enumerate(
        zip(large.table.start.tolist(), large.table.nbytes.tolist(), strict=True)
    ):
        segment = large.table.segments[int(large.table.segment[row])]
        places = {0, nbytes - 1, nbytes // 2, *(n for n in (63, 64, 4999, 5000, 8191, 8192) if n < nbytes)}
        edges = {at - start for at in range(0, start + nbytes, 4096) if at >= start}
        for at in sorted(places | edges | set(rng.integers(0, nbytes, 3).tolist())):
            image = bytearray(large.objects[segment])
            image[start + at] ^= 1 << int(rng.integers(8))
            with pytest.raises(CorruptError, match="has digest") as caught:
                read_with(
                    large, Ways({**large.objects, segment: bytes(image)}, way), whole_leaves(large, kind)
                )
            assert (caught.value.tensor, caught.value.segment) == (names[row], segment)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "turned"])
def test_a_passing_error_is_read_over(large: Stored, way: int | None, kind: str) -> None:
    class OnceWrong(Ways):
        def __init__(self) -> None:
            super().__init__(large.objects, way)
            self.seen: set[tuple[str, int]] = set()

        def read_into(self, key: str, start: int, targets: Any) -> None:
            super().read_into(key, start, targets)
            if (key, start) not in self.seen:
                self.seen.add((key, start))
                targets[0][0] ^= 1

    leaves = whole_leaves(large, kind)
    chunks = plan_load(large.table, leaves)
    assert len(chunks.rows) == len(LARGE)
    # Each chunk in a read of its own: a read that begins at a chunk's second try is not wrong again.
    plan = plan_load(large.table, leaves, batch_nbytes=1, gap_nbytes=0)
    fill = Fill.of(large.table, leaves, plan)
    store = OnceWrong()
    with Fetcher(store, large.table, plan.reads, fill.without_memory, block_nbytes=8192) as fetcher:
        fetch_plan(fetcher, plan, fill)
    assert store.seen
    assert all(bits(leaf.data) == fill_slowly(large, leaf) for leaf in leaves)


@pytest.mark.parametrize("way", WAYS)
def test_a_segment_that_is_cut_or_gone_is_named(large: Stored, way: int | None) -> None:
    store = Ways(large.objects, way)
    store.replace(SEGMENTS[1], large.objects[SEGMENTS[1]][:-1])
    with pytest.raises(CorruptError, match="was cut, so r/t003 cannot be read") as caught:
        read_with(large, store, [leaf for leaf in whole_leaves(large, "plain") if leaf.spec.name == "r/t003"])
    assert (caught.value.tensor, caught.value.segment) == ("r/t003", SEGMENTS[1])
    store.delete(SEGMENTS[1])
    with pytest.raises(CorruptError, match="is not there, so r/t001 cannot be read"):
        read_with(large, store, whole_leaves(large, "plain"))


def test_a_table_with_another_size_than_its_box_is_damaged(large: Stored) -> None:
    bad = replace(large.table, nbytes=large.table.nbytes + np.where(np.arange(len(large.table)) == 2, 1, 0))
    leaves = whole_leaves(large, "plain")
    with pytest.raises(CorruptError, match="table is damaged"):
        read_leaves(Ways(large.objects, None), bad, leaves)


def test_overlapping_rows_of_a_table_are_read_each_for_itself(large: Stored) -> None:
    """Two rows may name the same bytes: a table can be odd without being damaged."""
    both = replace(
        large.table, start=large.table.start[[0, 0, 2, 3, 4]], nbytes=large.table.nbytes[[0, 0, 2, 3, 4]]
    )
    found = [np.empty(int(both.nbytes[0]), np.uint8)] * 2
    plan = plan_load(large.table, whole_leaves(large, "plain")).reads[0]
    read = replace(plan, rows=np.array([0, 0]), start=int(both.start[0]), nbytes=int(both.nbytes[0]))
    fetch_chunks(Ways(large.objects, None), large.table, read, found)
    assert found[0].tobytes() == large.whole["r/t000"].tobytes()


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "turned"])
def test_a_load_takes_no_more_than_its_budget(large: Stored, way: int | None, kind: str) -> None:
    biggest = int(large.table.nbytes.max())
    for budget in (8192 + biggest, 20_000 + biggest, 1 << 20):
        leaves = whole_leaves(large, kind)
        report = read_leaves(Ways(large.objects, way), large.table, leaves, memory_budget=budget)
        assert report.nbytes_leased <= budget
        assert all(bits(leaf.data) == fill_slowly(large, leaf) for leaf in leaves)


def test_what_goes_straight_into_its_target_takes_no_memory() -> None:
    has = stored([("float32", (50, 100)), ("float32", (3,)), ("float32", (40,))], most=1_000, gap=0)
    leaves = whole_leaves(has, "torch")
    assert read_leaves(Ways(has.objects, 5_000), has.table, leaves).nbytes_leased == 0
    assert all(bits(leaf.data) == fill_slowly(has, leaf) for leaf in leaves)


def test_a_budget_that_one_chunk_exceeds_is_refused_before_anything_is_touched(large: Stored) -> None:
    leaves = whole_leaves(large, "turned")
    biggest = int(large.table.nbytes.max())
    with pytest.raises(BudgetExceededError) as caught:
        read_leaves(Ways(large.objects, None), large.table, leaves, memory_budget=biggest + 8191)
    assert caught.value.wanted_nbytes == biggest + 8192
    assert not any(np.any(leaf.data) for leaf in leaves)
    read_leaves(Ways(large.objects, None), large.table, leaves, memory_budget=biggest + 8192)


def test_what_is_leased_is_what_is_allocated(large: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore import fetch

    leaves = whole_leaves(large, "turned")
    plan = plan_load(large.table, leaves)
    fill = Fill.of(large.table, leaves, plan)
    real, made = fetch.aligned, list[int]()
    with Fetcher(
        Ways(large.objects, None), large.table, plan.reads, fill.without_memory, lanes=1, block_nbytes=8192
    ) as fetcher:

        def watched(nbytes: int) -> Any:
            # One lane has its one block, and at most one chunk's scratch memory.
            made.append(nbytes)
            assert fetcher.budget.leased == made[0] + (nbytes if len(made) > 1 else 0)
            return real(nbytes)

        monkeypatch.setattr(fetch, "aligned", watched)
        fetch_plan(fetcher, plan, fill)
    assert made[0] == 8192 and len(made) > 1 and fetcher.budget.high_water == made[0] + max(made[1:])


# -- encoded chunks -----------------------------------------------------------------------------------


def encoded(has: Stored, *, wrong: bool = False) -> tuple[dict[str, bytes], ChunkTable]:
    """Every second chunk stored backwards with seven bytes before it: a codec that only these tests know."""
    objects, starts, sizes, digests, codecs = {}, [], [], [], []
    images = {key: bytearray(b"header") for key in SEGMENTS}
    for row in range(len(has.table)):
        key, start = has.table.segments[int(has.table.segment[row])], int(has.table.start[row])
        chunk = has.objects[key][start : start + int(has.table.nbytes[row])]
        value = b"sevenby" + chunk[::-1] if row % 2 == 0 else chunk
        starts.append(len(images[key]))
        images[key] += value
        sizes.append(len(value))
        digests.append(xxhash.xxh3_128_digest(value) if row % 2 == 0 else bytes(16))
        codecs.append(1 if row % 2 == 0 else 0)
    objects = {key: bytes(image) for key, image in images.items()}
    return objects, replace(
        has.table,
        codecs=("raw", "backwards"),
        codec=np.array(codecs, np.int16),
        start=np.array(starts),
        nbytes=np.array(sizes),
        stored_digest=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16),
    )


def backwards(table: ChunkTable, row: int, stored: memoryview, out: np.ndarray[Any, Any]) -> None:
    np.copyto(out, np.frombuffer(stored, np.uint8)[:6:-1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "turned", "torch"])
def test_encoded_chunks_are_decoded_into_their_targets(large: Stored, way: int | None, kind: str) -> None:
    objects, table = encoded(large)
    leaves = whole_leaves(large, kind)
    plan = plan_load(table, leaves)
    fill = Fill.of(table, leaves, plan)
    for budget in (None, 100_000):
        with Fetcher(
            Ways(objects, way), table, plan.reads, plan.rows,
            block_nbytes=8192, memory_budget=budget, decode=backwards,
        ) as fetcher:  # fmt: skip
            fetch_plan(fetcher, plan, fill)
        assert fetcher.budget.high_water <= fetcher.budget.nbytes and not fetcher.budget.leased
        assert all(bits(leaf.data) == fill_slowly(large, leaf) for leaf in leaves)


def test_what_decodes_to_other_bytes_is_damage(large: Stored) -> None:
    objects, table = encoded(large)

    def wrong(table: ChunkTable, row: int, stored: memoryview, out: np.ndarray[Any, Any]) -> None:
        backwards(table, row, stored, out)
        out[-1] ^= 1

    read = plan_load(table, whole_leaves(large, "plain")).reads[0]
    buffers = Buffers([np.empty(spec.nbytes, np.uint8) for spec in (table.spec(int(r)) for r in read.rows)])
    with (
        Fetcher(Ways(objects, None), table, [read], read.rows, decode=wrong) as fetcher,
        pytest.raises(CorruptError, match="decodes to bytes with digest"),
    ):
        fetcher.read(read, buffers, range(len(read.rows)))


def test_buffers_keep_the_promise_of_places() -> None:
    """A fetcher gives `put` only what has no memory, and these have; whoever calls it all the same is served."""
    buffers = Buffers([np.zeros(3, np.uint8), np.zeros(2, np.uint8)])
    buffers.put(1, np.array([7, 8], np.uint8))
    assert [each.tolist() for each in buffers.memory([1, 0]) if each is not None] == [[7, 8], [0, 0, 0]]


def test_an_unknown_codec_is_refused_before_anything_is_touched(large: Stored) -> None:
    objects, table = encoded(large)
    leaves = whole_leaves(large, "plain")
    with pytest.raises(UnsupportedFormatError, match="backwards"):
        read_leaves(Ways(objects, None), table, leaves)
    assert not any(np.any(leaf.data) for leaf in leaves)


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_files_are_read_as_they_lie(tmp_path: Path, cached: bool) -> None:
    has = stored([("float32", (700, 1000)), ("int16", (3, 5)), ("float64", (900, 100))], most=1 << 18, gap=1)
    store = LocalStore(root=tmp_path)
    for key, value in has.objects.items():
        store.create(key, value)
        if not cached:
            fd = os.open(tmp_path / key, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    for kind in KINDS:
        leaves = whole_leaves(has, kind)
        read_leaves(store, has.table, leaves)
        assert all(bits(leaf.data) == fill_slowly(has, leaf) for leaf in leaves)


def test_an_io_error_in_the_middle_of_a_load_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = stored([("float32", (1000, 1000))], most=1 << 17, gap=0)
    store = LocalStore(root=tmp_path)
    for key, value in has.objects.items():
        store.create(key, value)
    real = os.preadv

    def broken(fd: int, views: Any, start: int) -> int:
        if start > 2_000_000:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, start)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        read_leaves(store, has.table, whole_leaves(has, "plain"))


# -- verify -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_verify_names_every_damaged_chunk_and_no_other(large: Stored, way: int | None) -> None:
    assert find_damage(Ways(large.objects, way), large.table, ()) == []
    for rows in ([0], [2, 3], [0, 1, 2, 3, 4]):
        images = {key: bytearray(value) for key, value in large.objects.items()}
        for row in rows:
            key = large.table.segments[int(large.table.segment[row])]
            images[key][int(large.table.start[row] + large.table.nbytes[row]) - 1] ^= 4
        store = Ways({key: bytes(image) for key, image in images.items()}, way)
        told = list[int]()
        found = find_damage(store, large.table, (), progress=told.append)
        assert {one.tensor for one in found} == {large.table.spec(row).name for row in rows}
        assert sum(told) >= int(large.table.nbytes.sum())


# -- what a second look at the budget and at the store must keep --------------------------------------


@pytest.mark.parametrize("budget", [8192, 20_000, 100_000, None])
def test_all_lanes_blocks_and_the_largest_scratch_fit_the_budget(large: Stored, budget: int | None) -> None:
    """Else a lane could wait for a block that no other ever gives back."""
    plan = plan_load(large.table, whole_leaves(large, "turned"))
    biggest = int(large.table.nbytes.max())
    total = None if budget is None else budget + biggest
    with Fetcher(
        Ways(large.objects, None), large.table, plan.reads, plan.rows, lanes=7, memory_budget=total
    ) as fetcher:
        assert fetcher.lanes >= 1
        assert fetcher.lanes * fetcher.block_nbytes + biggest <= fetcher.budget.nbytes


@pytest.mark.parametrize("way", [None, 1 << 24])
def test_a_segment_that_is_cut_before_a_second_reading_names_whose_that_is(
    large: Stored, way: int | None
) -> None:
    row = next(row for row in range(len(large.table)) if large.table.spec(row).name == "r/t003")
    at, image = int(large.table.start[row]), bytearray(large.objects[SEGMENTS[1]])
    image[at] ^= 1

    class Going(Ways):
        def read_into(self, key: str, start: int, targets: Any) -> None:
            if start == at:
                self.replace(key, bytes(image[:at]))
            super().read_into(key, start, targets)

    leaves = [leaf for leaf in whole_leaves(large, "plain") if leaf.spec.name in ("r/t001", "r/t003")]
    with pytest.raises(CorruptError, match="was cut, so r/t003 cannot be read") as caught:
        read_with(large, Going({**large.objects, SEGMENTS[1]: bytes(image)}, way), leaves, block=1 << 20)
    assert (caught.value.tensor, caught.value.segment) == ("r/t003", SEGMENTS[1])
