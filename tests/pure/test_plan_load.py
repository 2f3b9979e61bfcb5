"""Any layout to any layout, with element ids as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.chunktable import ChunkTable, make_table
from ckptstore.errors import CorruptError, InvalidInputError, LayoutMismatchError, MissingTensorError
from ckptstore.layout import Layout
from ckptstore.plan.load import LoadPlan, Piece, plan_load
from ckptstore.plan.save import plan_save
from ckptstore.tensor import Box, Shape, Shard, TensorSpec, itemsize
from ckptstore.testing.strategies import boxes, chunk_table, chunk_tables, layouts, specs, tilings

QUICK = settings(max_examples=100)


def spec_of(shape: Shape, name: str = "trainer/w", dtype: str = "int8") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def ids(specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Every element of every tensor with a number of its own."""
    data, first = {}, 1
    for spec in specs:
        data[spec.name] = np.arange(first, first + spec.numel).reshape(spec.shape)
        first += spec.numel
    return data


def pieces_of(table: ChunkTable, plan: LoadPlan, place: int) -> list[Piece]:
    first, last = plan.pieces.bounds[place : place + 2].tolist()
    ndim = len(table.spec(int(plan.pieces.row[first])).shape)
    return [plan.pieces.piece(n, ndim) for n in range(first, last)]


def deliver(
    table: ChunkTable, data: Mapping[str, np.ndarray], wanted: Sequence[Shard], plan: LoadPlan
) -> None:
    """Act the plan out as a reader would, and check that each wanted element arrives once, rightly."""
    targets = [np.zeros(shard.box.shape, np.int64) for shard in wanted]
    arrivals = [np.zeros(shard.box.shape, np.int64) for shard in wanted]
    for read in plan.reads:
        for place, row in enumerate(read.rows.tolist(), read.first):
            pieces = pieces_of(table, plan, place)
            assert table.segments[table.segment[row]] == read.segment
            at = int(table.start[row]) - read.start
            assert at >= 0 and at + int(table.nbytes[row]) <= read.nbytes
            chunk_box = table.box(row)
            chunk = data[table.spec(row).name][chunk_box.slices]
            assert pieces
            for piece in pieces:
                shard = wanted[piece.target]
                assert piece.row == row and shard.spec == table.spec(row)
                inner = piece.box.relative_to(shard.box).slices
                targets[piece.target][inner] = chunk[piece.box.relative_to(chunk_box).slices]
                arrivals[piece.target][inner] += 1
    for shard, target, arrived in zip(wanted, targets, arrivals, strict=True):
        assert (arrived == 1).all(), shard
        assert np.array_equal(target, data[shard.spec.name][shard.box.slices])


@QUICK
@given(
    data=st.data(),
    tensors=specs(prefix="trainer/"),
    gap=st.sampled_from((0, 1, 40, 10**6)),
    batch=st.sampled_from((1, 30, 200, 10**6)),
)
def test_any_tiling_loads_into_any_other(
    data: st.DataObject, tensors: list[TensorSpec], gap: int, batch: int
) -> None:
    table = data.draw(chunk_tables({spec: data.draw(tilings(spec.shape)) for spec in tensors}))
    wanted = [Shard(spec=spec, box=box) for spec in tensors for box in data.draw(tilings(spec.shape))]
    wanted = data.draw(st.permutations(wanted))
    plan = plan_load(table, wanted, gap_nbytes=gap, batch_nbytes=batch)
    deliver(table, ids(tensors), wanted, plan)
    assert plan.nbytes_wanted == sum(spec.nbytes for spec in tensors)
    check_reads(table, plan, gap, batch)


def check_reads(table: ChunkTable, plan: LoadPlan, gap: int, batch: int) -> None:
    """Bounds on what is read: whole chunks, each once, near ones together."""
    rows = [row for read in plan.reads for row in read.rows]
    assert len(set(rows)) == len(rows), "a chunk is read twice"
    assert plan.nbytes_read == sum(read.nbytes for read in plan.reads)
    for read in plan.reads:
        starts, ends = (
            [int(n) for n in table.start[list(read.rows)]],
            [int(n) for n in (table.start + table.nbytes)[list(read.rows)]],
        )
        assert (read.start, read.start + read.nbytes) == (starts[0], ends[-1])
        assert all(0 <= start - end <= gap for start, end in zip(starts[1:], ends[:-1], strict=True))
        assert read.nbytes <= batch or len(read.rows) == 1
    for one, two in zip(plan.reads, plan.reads[1:], strict=False):
        assert (one.segment, one.start) < (two.segment, two.start)
        near = one.segment == two.segment and two.start - (one.start + one.nbytes) <= gap
        first = int(table.start[two.rows[0]] + table.nbytes[two.rows[0]])
        assert not near or first - one.start > batch, "near chunks are read apart"


@QUICK
@given(data=st.data(), tensors=specs(prefix="trainer/", max_tensors=3))
def test_any_boxes_can_be_wanted_also_by_several_targets(
    data: st.DataObject, tensors: list[TensorSpec]
) -> None:
    table = data.draw(chunk_tables({spec: data.draw(tilings(spec.shape)) for spec in tensors}))
    wanted = [
        Shard(spec=spec, box=data.draw(boxes(spec.shape)))
        for spec in data.draw(st.lists(st.sampled_from(tensors), max_size=5))
    ]
    plan = plan_load(table, wanted, gap_nbytes=0, batch_nbytes=64)
    deliver(table, ids(tensors), wanted, plan)
    needed = {
        row
        for row in range(len(table))
        for shard in wanted
        if table.spec(row) == shard.spec and table.box(row).intersection(shard.box)
    }
    assert {row for read in plan.reads for row in read.rows} == needed
    assert plan.nbytes_read == sum(int(table.nbytes[row]) for row in needed), "no byte beyond whole chunks"


@QUICK
@given(data=st.data(), stored=layouts(max_ranks=4, max_tensors=3))
def test_a_planned_save_loads_into_another_layout(data: st.DataObject, stored: Layout) -> None:
    plan = plan_save(stored, chunk_nbytes=64, slice_nbytes_min=8)
    rows = [
        (stored.ranks[rank][chunk.shard].spec, chunk.box, f"rank{rank}")
        for rank, chunks in enumerate(plan)
        for chunk in chunks
    ]
    table = make_table(
        specs=[spec for spec, _, _ in rows],
        boxes=[box for _, box, _ in rows],
        segments=[key for _, _, key in rows],
        starts=[n * 4096 for n in range(len(rows))],
        nbytes=[box.numel * itemsize(spec.dtype) for spec, box, _ in rows],
        digests=[bytes(16)] * len(rows),
    )
    for n in range(data.draw(st.integers(1, 3))):
        wanted = [
            Shard(spec=spec, box=box)
            for spec in table.tensors
            for box in data.draw(tilings(spec.shape), label=f"rank {n}")
        ]
        deliver(table, ids(table.tensors), wanted, plan_load(table, wanted))


def test_aligned_chunks_are_read_without_a_byte_too_many() -> None:
    spec = spec_of((64, 32), dtype="float32")
    rows = [Box(offset=(n, 0), shape=(4, 32)) for n in range(0, 64, 4)]
    table = chunk_table({spec: rows})
    wanted = [Shard(spec=spec, box=Box(offset=(16, 0), shape=(32, 32)))]
    plan = plan_load(table, wanted)
    assert len(plan.reads) == 1 and plan.nbytes_read == plan.nbytes_wanted == 32 * 32 * 4
    apart = plan_load(table, wanted, batch_nbytes=1)
    assert len(apart.reads) == 8 and apart.nbytes_read == plan.nbytes_read


def test_nothing_wanted_reads_nothing() -> None:
    spec = spec_of((4, 4))
    table = chunk_table({spec: [Box.whole((4, 4))]})
    empty = Shard(spec=spec, box=Box(offset=(4, 0), shape=(0, 4)))
    for wanted in ([], [empty]):
        plan = plan_load(table, wanted)
        assert (plan.reads, len(plan.pieces), plan.nbytes_wanted, plan.nbytes_read) == ((), 0, 0, 0)
    with pytest.raises(MissingTensorError):
        plan_load(table, [Shard(spec=spec_of((0,), "trainer/v"), box=Box.whole((0,)))])


def test_all_that_does_not_fit_is_listed_at_once() -> None:
    half = Box.whole((2,))
    table = chunk_table(
        {
            spec_of((4,), f"trainer/{name}"): [half if name == "gap" else Box.whole((4,))]
            for name in ("b", "c", "gap")
        }
    )

    def want(name: str, shape: Shape = (4,), dtype: str = "int8") -> Shard:
        return Shard(spec=spec_of(shape, f"trainer/{name}", dtype), box=Box.whole(shape))

    everything = [want("a"), want("z"), want("b", (5,)), want("c", dtype="uint8"), want("gap")]
    with pytest.raises(MissingTensorError, match="trainer/a is not in the checkpoint") as caught:
        plan_load(table, everything)
    error = caught.value
    assert error.missing == ("trainer/a", "trainer/z")
    assert error.mismatched == ("trainer/b", "trainer/c")
    assert error.uncovered == ("trainer/gap",)
    with pytest.raises(
        LayoutMismatchError, match=r"trainer/b is stored as int8\[4\], not as int8\[5\]"
    ) as other:
        plan_load(table, everything[2:])
    assert other.value.missing == () and other.value.uncovered == ("trainer/gap",)
    with pytest.raises(CorruptError, match=r"trainer/gap has, within offset .* gap at offset") as gap:
        plan_load(table, everything[4:])
    assert gap.value.uncovered == ("trainer/gap",)
    # What lies in the part that is there can be had.
    part = Shard(spec=spec_of((4,), "trainer/gap"), box=half)
    assert plan_load(table, [part]).nbytes_read == 2


def test_overlapping_chunks_in_a_wanted_box_are_corrupt() -> None:
    spec = spec_of((4,))
    table = chunk_table({spec: [Box.whole((3,)), Box(offset=(2,), shape=(2,))]})
    with pytest.raises(CorruptError, match="2 chunks overlap"):
        plan_load(table, [Shard(spec=spec, box=Box.whole((4,)))])
    plan_load(table, [Shard(spec=spec, box=Box.whole((2,)))])


def test_a_chunk_larger_than_a_batch_is_read_alone() -> None:
    spec = spec_of((100,))
    tiles = [Box.whole((10,)), Box(offset=(10,), shape=(80,)), Box(offset=(90,), shape=(10,))]
    plan = plan_load(chunk_table({spec: tiles}), [Shard(spec=spec, box=Box.whole((100,)))], batch_nbytes=50)
    assert [(read.start, read.nbytes) for read in plan.reads] == [(0, 10), (10, 80), (90, 10)]


@pytest.mark.parametrize(
    ("gap", "batch", "reads"), [(10, 30, 1), (9, 30, 2), (10, 29, 2), (15, 30, 1), (9, 10**6, 2)]
)
def test_chunks_are_read_together_up_to_both_limits_and_no_further(gap: int, batch: int, reads: int) -> None:
    """Two chunks of ten bytes, ten bytes apart."""
    spec = spec_of((20,))
    table = chunk_table({spec: [Box.whole((10,)), Box(offset=(10,), shape=(10,))]}, gap_nbytes=10)
    plan = plan_load(table, [Shard(spec=spec, box=Box.whole((20,)))], gap_nbytes=gap, batch_nbytes=batch)
    assert (len(plan.reads), plan.nbytes_read) == (reads, 30 if reads == 1 else 20)


def test_impossible_limits_and_unsorted_tables_are_refused() -> None:
    table = chunk_table({spec_of((2,), name): [Box.whole((2,))] for name in ("a", "b")})
    with pytest.raises(InvalidInputError, match="gap"):
        plan_load(table, [], gap_nbytes=-1)
    with pytest.raises(CorruptError, match="unsorted"):
        plan_load(table.take(np.array([1, 0])), [])
