"""Lazy arrays: any slice equals numpy's, exactly the chunks that it touches are read, every one verified."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count, pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.chunktable import ChunkTable, make_table
from ckptstore.errors import CorruptError, InvalidInputError, MissingTensorError
from ckptstore.interop.tensorstore import lazy_tensor
from ckptstore.plan.grid import Grid, Mosaic, Tiling, arrange
from ckptstore.store.memory import MemoryStore
from ckptstore.tensor import DTYPES, Box, TensorSpec, cut_flat_range
from ckptstore.testing.strategies import shapes, tilings
from tests.save.runs import ids, new_url, save, store_of, tensor_bytes

OFFERED = sorted(set(DTYPES) - {"complex32"})
_names = count()


class CountingStore:
    """Passes reads on and writes down each range."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_into(self, key: str, start: int, targets: Sequence[Any]) -> None:
        self.ranges.append((key, start, sum(memoryview(t).nbytes for t in targets)))
        self.inner.read_into(key, start, targets)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.uint8) if dtype.startswith("float4") else ts.dtype(dtype).numpy_dtype


def stored(spec: TensorSpec, boxes: Sequence[Box]) -> tuple[CountingStore, ChunkTable, np.ndarray[Any, Any]]:
    """A store with the chunks of one tensor in one segment, with gaps; and the tensor, whose bytes are random."""
    raw = np.random.default_rng(7).integers(0, 256, spec.nbytes, np.uint8)
    if spec.dtype == "bool":
        raw &= 1
    whole = raw.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
    image, starts = bytearray(b"header"), []
    chunks = [np.ascontiguousarray(whole[box.slices]).tobytes() for box in boxes]
    for chunk in chunks:
        image += b"gap"
        starts.append(len(image))
        image += chunk
    store = MemoryStore.named(f"lazy-{next(_names)}")
    store.create("segment", bytes(image))
    table = make_table(
        specs=[spec] * len(boxes),
        boxes=boxes,
        segments=["segment"] * len(boxes),
        starts=starts,
        nbytes=[len(chunk) for chunk in chunks],
        digests=[xxhash.xxh3_128_digest(chunk) for chunk in chunks],
    )
    return CountingStore(store), table, whole


def rows_of(table: ChunkTable, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """For each element the row of its chunk."""
    rows = np.full(shape, -1)
    for row in range(len(table)):
        rows[table.box(row).slices] = row
    return rows


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index that means the same to numpy and TensorStore: slices with steps of both signs, numbers, new axes,
    and numbers, or one array of numbers or of bools (numpy moves axes where numbers and an array meet)."""
    terms: list[Any] = []
    arrays, single = 0, draw(st.sampled_from(("number", "array", "mask")))
    for size in shape:
        kind = draw(st.sampled_from(("slice", "slice", "back", single, "all")))
        if kind in ("array", "mask") and arrays:
            kind = "slice"
        if kind == "all" or size == 0:
            terms.append(slice(None))
        elif kind == "slice":
            start = draw(st.integers(0, size - 1))
            terms.append(slice(start, draw(st.integers(start, size)), draw(st.integers(1, 3))))
        elif kind == "back":
            start = draw(st.integers(0, size - 1))
            terms.append(slice(start, None, -draw(st.integers(1, 3))))
        elif kind == "number":
            terms.append(draw(st.integers(0, size - 1)))
        elif kind == "array":
            arrays += 1
            terms.append(np.array(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))))
        else:
            arrays += 1
            mask = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
            terms.append(np.array(mask, bool))
        if draw(st.integers(0, 5)) == 0:
            terms.append(None)
    return tuple(terms)


def as_bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@given(data=st.data(), dtype=st.sampled_from(OFFERED), shape=shapes(min_side=0, max_elements=300))
@settings(max_examples=250, deadline=None)
def test_any_slice_of_any_tiling_equals_numpy_s_and_reads_the_chunks_that_it_touches(
    data: st.DataObject, dtype: str, shape: tuple[int, ...]
) -> None:
    spec = TensorSpec(name="trainer/w", dtype=dtype, shape=shape)
    store, table, whole = stored(spec, data.draw(tilings(shape), label="boxes"))
    # Without a cache TensorStore asks twice for a chunk in two cells of an overlay, if the first read is over then.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 20}})
    array = lazy_tensor(store, table, spec, context=context)
    assert array.shape == shape and array.dtype.numpy_dtype == whole.dtype and not array.writable
    index = data.draw(indices(shape), label="index")
    wanted = whole[index]
    found = array[index].read().result()
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert as_bytes(found) == as_bytes(wanted)
    touched = np.unique(rows_of(table, shape)[index]) if wanted.size else []
    ranges = sorted(("segment", int(table.start[row]), int(table.nbytes[row])) for row in touched)
    assert sorted(store.ranges) == ranges
    store.ranges.clear()
    assert as_bytes(lazy_tensor(store, table, spec)[index].read().result()) == as_bytes(wanted)
    assert sorted(set(store.ranges)) == ranges


@given(data=st.data(), shape=shapes(max_elements=200))
@settings(max_examples=100, deadline=None)
def test_any_tiling_is_arranged_into_grids_of_its_very_boxes(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = data.draw(tilings(shape))
    assert sorted(map(repr, _boxes(arrange(boxes)))) == sorted(map(repr, boxes))


def _boxes(tiling: Tiling) -> list[Box]:
    if isinstance(tiling, Mosaic):
        return [box for tile in tiling.tiles for box in _boxes(tile)]
    box, step = tiling.box, tiling.step
    counts = [-(-n // s) for n, s in zip(box.shape, step, strict=True)]
    return [
        Box(
            offset=tuple(o + k * s for o, k, s in zip(box.offset, place, step, strict=True)),
            shape=tuple(min(s, n - k * s) for n, k, s in zip(box.shape, place, step, strict=True)),
        )
        for place in np.ndindex(*counts)
    ]


def test_flat_ranges_become_few_nested_slabs() -> None:
    shape, ranks = (997, 31), 256
    ends = [n * prod(shape) // ranks for n in range(ranks + 1)]
    boxes = [b for lo, hi in pairwise(ends) for b in cut_flat_range(shape, lo, hi)]
    tiling = arrange(boxes)
    assert isinstance(tiling, Mosaic)
    assert all(isinstance(tile, Grid) or len(tile.tiles) == 2 for tile in tiling.tiles)


def test_the_chunk_layout_follows_a_regular_grid() -> None:
    spec = TensorSpec(name="trainer/w", dtype="bfloat16", shape=(10, 6))
    grid = [Box(offset=(r, c), shape=(min(4, 10 - r), 3)) for r in (0, 4, 8) for c in (0, 3)]
    store, table, _ = stored(spec, grid)
    assert lazy_tensor(store, table, spec).chunk_layout.read_chunk.shape == (4, 3)


def flip(store: CountingStore, start: int) -> None:
    data = bytearray(store.inner.read("segment"))
    data[start] ^= 1
    store.inner.replace("segment", bytes(data))


def test_a_damaged_chunk_raises_when_it_is_touched_and_only_then() -> None:
    spec = TensorSpec(name="trainer/w", dtype="float8_e4m3fn", shape=(10, 4))
    store, table, whole = stored(spec, [Box(offset=(n, 0), shape=(2, 4)) for n in range(0, 10, 2)])
    array = lazy_tensor(store, table, spec)
    flip(store, int(table.start[2]) + 3)
    assert as_bytes(array[:4].read().result()) == as_bytes(whole[:4])
    assert as_bytes(array[6:].read().result()) == as_bytes(whole[6:])
    with pytest.raises(CorruptError, match="trainer/w"):
        array[3:5, 0].read().result()


def test_chunks_are_kept_by_the_cache_that_is_given() -> None:
    spec = TensorSpec(name="trainer/w", dtype="float32", shape=(9, 8))
    store, table, whole = stored(spec, cut_flat_range((9, 8), 0, 29) + cut_flat_range((9, 8), 29, 72))
    plain = lazy_tensor(store, table, spec)
    assert as_bytes(plain[2].read().result()) == as_bytes(plain[2].read().result()) == as_bytes(whole[2])
    assert len(store.ranges) == 2, "without a cache each read reads"
    store.ranges.clear()
    context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 20}})
    cached = lazy_tensor(store, table, spec, context=context)
    for _ in range(3):
        assert as_bytes(cached.read().result()) == as_bytes(whole)
        assert as_bytes(cached[2:4, ::2].read().result()) == as_bytes(whole[2:4, ::2])
    assert len(store.ranges) == len(table)


def test_many_reads_at_once_come_to_an_end() -> None:
    spec = TensorSpec(name="trainer/w", dtype="int64", shape=(64, 8))
    store, table, whole = stored(spec, [Box(offset=(n, 0), shape=(1, 8)) for n in range(64)])
    context = ts.Context({"data_copy_concurrency": {"limit": 2}})
    array = lazy_tensor(store, table, spec, context=context)
    futures = [array[n : n + 3].read() for n in range(62) for _ in range(4)]
    for n, future in enumerate(futures):
        assert as_bytes(future.result(timeout=60)) == as_bytes(whole[n // 4 : n // 4 + 3])
    total = ts.concat([array[:32], array[32:]], axis=0).read().result(timeout=60)
    assert as_bytes(total) == as_bytes(whole)


# -- through the public names


def saved_run() -> tuple[ckptstore.Run, dict[str, torch.Tensor]]:
    tensors = {
        "bf16": ids((6, 5), torch.bfloat16),
        "fp8": ids((12,)).to(torch.float8_e5m2fnuz),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "half": torch.zeros(2, dtype=torch.complex32),
    }
    url = new_url()
    first = {"b": ckptstore.Sharded.dim0(tensors["bf16"][:4], start=0, size=6), "rest": tensors}
    second = {"b": ckptstore.Sharded.dim0(tensors["bf16"][4:], start=4, size=6), "rest": tensors}
    save(url, first, second, step=3)
    return ckptstore.open(url), tensors


def test_run_tensor_gives_what_run_read_gives() -> None:
    run, tensors = saved_run()
    read = run.read()["rest"]
    for name in set(tensors) - {"half"}:
        assert as_bytes(run.tensor(f"rest.{name}", step=3).read().result()) == tensor_bytes(read[name])
    assert as_bytes(run.tensor("b").read().result()) == tensor_bytes(tensors["bf16"])
    assert as_bytes(run.tensor("b")[3:5, 1].read().result()) == tensor_bytes(tensors["bf16"][3:5, 1])


def test_what_cannot_be_given_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = saved_run()
    with pytest.raises(InvalidInputError, match=r"complex32.*run\.read\(names='rest\.half'\)"):
        run.tensor("rest.half")
    with pytest.raises(MissingTensorError, match=r"near: rest\.scalar"):
        run.tensor("rest.scaler")
    with pytest.raises(MissingTensorError, match=r"near: rest\.scalar"):
        run.tensor("trainer/rest.scalar")  # as show prints it
    with pytest.raises(MissingTensorError, match="role 'loop'"):
        run.tensor("b", role="loop")
    with pytest.raises(ckptstore.NoCheckpointError, match="step 4"):
        run.tensor("b", step=4)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'ckptstore\[tensorstore\]'"):
        run.tensor("b")


def test_a_segment_that_is_gone_is_named_when_it_is_read() -> None:
    run, _ = saved_run()
    array = run.tensor("b")
    store = store_of(run.url)
    for info in list(store.list("data/")):
        store.delete(info.key)
    with pytest.raises(CorruptError, match="is not there"):
        array[0].read().result()
