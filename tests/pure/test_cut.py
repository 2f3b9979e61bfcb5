"""The proof of coverage against counting every element."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptstore.chunktable import ChunkTable
from ckptstore.cut import check_coverage
from ckptstore.errors import CorruptError, InconsistentCutError, InvalidInputError
from ckptstore.tensor import Box, Shape, TensorSpec
from ckptstore.testing.strategies import boxes, chunk_table, chunk_tables, shapes, specs, tilings

QUICK = settings(max_examples=150)


def spec_of(shape: Shape, name: str = "trainer/w") -> TensorSpec:
    return TensorSpec(name=name, dtype="int8", shape=shape)


def shifted(box: Box, axis: int, by: int) -> Box:
    offset = (*box.offset[:axis], box.offset[axis] + by, *box.offset[axis + 1 :])
    return Box(offset=offset, shape=box.shape)


def shrunk(box: Box, axis: int, by: int = 1) -> Box:
    shape = (*box.shape[:axis], box.shape[axis] - by, *box.shape[axis + 1 :])
    return Box(offset=box.offset, shape=shape)


@QUICK
@given(data=st.data(), tensors=specs(prefix="trainer/"))
def test_every_tiling_is_accepted(data: st.DataObject, tensors: list[TensorSpec]) -> None:
    check_coverage(data.draw(chunk_tables({spec: data.draw(tilings(spec.shape)) for spec in tensors})))


@QUICK
@given(data=st.data(), shape=shapes())
def test_boxes_are_accepted_just_when_each_element_is_held_once(data: st.DataObject, shape: Shape) -> None:
    """Any heap of boxes, tilings with boxes added and dropped included, against counting."""
    heap = list(data.draw(tilings(shape)))
    heap += data.draw(st.lists(boxes(shape, min_side=1), max_size=2))
    heap = [heap[n] for n in sorted(data.draw(st.sets(st.integers(0, len(heap) - 1), min_size=1)))]
    hits = np.zeros(shape, np.int64)
    for box in heap:
        hits[box.slices] += 1
    table = chunk_table({spec_of(shape): heap})
    if (hits == 1).all():
        check_coverage(table)
        return
    with pytest.raises(InconsistentCutError, match="trainer/w") as caught:
        check_coverage(table)
    ((name, covers, box),) = caught.value.problems
    assert name == "trainer/w" and covers != 1 and box.numel
    # The reported place is real: a gap is empty all over, an overlap is held by that many at its start.
    assert hits[box.slices].reshape(-1)[0] == covers
    assert (hits[box.slices] == 0).all() if covers == 0 else (hits[box.slices] > 1).all()
    # It is the first such place.
    first = np.flatnonzero(hits.reshape(-1) != 1)[0]
    assert box.offset == tuple(np.unravel_index(first, shape)) if covers == 0 else box.numel


@QUICK
@given(
    data=st.data(),
    shape=shapes(max_elements=128),
    fault=st.sampled_from(("dropped", "doubled", "moved", "shrunk", "grown", "twin")),
)
def test_a_tiling_with_one_wrong_box_is_refused(data: st.DataObject, shape: Shape, fault: str) -> None:
    tiles = list(data.draw(tilings(shape)))
    at = data.draw(st.integers(0, len(tiles) - 1))
    box = tiles[at]
    axis = data.draw(st.integers(0, len(shape) - 1)) if shape else 0
    if fault == "dropped":
        del tiles[at]
        assume(tiles)
    elif fault == "doubled":
        tiles.append(box)
    elif fault == "twin":
        # As many boxes and elements as before: one takes the place of another of the same size.
        alike = [n for n, other in enumerate(tiles) if n != at and other.shape == box.shape]
        assume(alike)
        tiles[alike[0]] = box
    else:
        assume(shape)
        if fault == "moved":
            by = data.draw(st.sampled_from((-1, 1)))
            assume(box.offset[axis] + by >= 0)
            tiles[at] = shifted(box, axis, by)
        else:
            tiles[at] = shrunk(box, axis, 1 if fault == "shrunk" else -1)
    others = {
        spec_of((2, 3), "trainer/a"): [Box.whole((2, 3))],
        spec_of((5,), "trainer/z"): [Box.whole((5,))],
    }
    with pytest.raises(InconsistentCutError) as caught:
        check_coverage(data.draw(chunk_tables({**others, spec_of(shape): tiles})))
    assert caught.value.tensors == ("trainer/w",)


def test_a_tensor_without_rows_is_named() -> None:
    table = chunk_table({spec_of((2,)): [Box.whole((2,))], spec_of((), "trainer/s"): [Box.whole(())]})
    check_coverage(table)
    for row, name in ((0, "trainer/s"), (1, "trainer/w")):
        with pytest.raises(InconsistentCutError, match=f"{name}: gap"):
            check_coverage(table.take(np.array([1 - row])))


def test_a_tensor_without_elements_needs_one_row() -> None:
    empty = spec_of((0, 3))
    once = chunk_table({empty: [Box.whole((0, 3))]})
    check_coverage(once)
    with pytest.raises(InconsistentCutError, match="trainer/w"):
        check_coverage(once.take(np.array([], np.int64)))
    with pytest.raises(InconsistentCutError, match="trainer/w"):
        check_coverage(chunk_table({empty: [Box.whole((0, 3))] * 2}))


def test_an_empty_row_of_a_tensor_with_elements_is_refused() -> None:
    rows = [Box.whole((4,)), Box(offset=(4,), shape=(0,))]
    with pytest.raises(InconsistentCutError, match="misplaced or empty"):
        check_coverage(chunk_table({spec_of((4,)): rows}))


def test_a_scalar_held_twice_is_refused() -> None:
    with pytest.raises(InconsistentCutError, match="2 chunks overlap"):
        check_coverage(chunk_table({spec_of(()): [Box.whole(())] * 2}))


def test_all_bad_tensors_are_named_in_order() -> None:
    """Whatever their number of dimensions, and whatever is wrong with each."""
    rows: dict[Shape, list[Box]] = {
        (5,): [Box.whole((9,))],  # leaves its tensor
        (1, 5): [Box.whole((1, 4))],  # a gap
        (6,): [Box.whole((5,))],
        (): [Box.whole(())] * 3,  # an overlap
        (1, 6): [Box.whole((2, 6))],
        (0,): [Box.whole((0,))] * 2,  # one row too many
        (7,): [Box.whole((7,)), Box.whole((1,))],
    }
    tiles = {spec_of(shape, f"trainer/w{n}"): boxes for n, (shape, boxes) in enumerate(rows.items())}
    good = {spec_of((4,), "trainer/good"): [Box.whole((4,))]}
    with pytest.raises(InconsistentCutError, match="and 2 more") as caught:
        check_coverage(chunk_table(good | tiles))
    assert list(caught.value.tensors) == [spec.name for spec in tiles]


def test_no_table_at_all_covers_nothing() -> None:
    check_coverage(chunk_table({}))


def damaged(table: ChunkTable, **columns: np.ndarray) -> ChunkTable:
    values = {name: getattr(table, name) for name in table.__dataclass_fields__}
    return ChunkTable(**{**values, **columns})


def test_damaged_tables_are_refused_whatever_the_numbers() -> None:
    good = chunk_table({spec_of((4, 4)): [Box.whole((4, 4))]})
    huge = np.iinfo(np.int64).max
    for offset, shape in (([-1, 0], [4, 4]), ([huge, 0], [huge, 4]), ([1, 0], [huge, 4]), ([0, 0], [-4, -4])):
        with pytest.raises(InconsistentCutError, match="trainer/w: misplaced"):
            check_coverage(damaged(good, offset=np.array([offset]), shape=np.array([shape])))
    with pytest.raises(CorruptError, match="tensors 3 to 3"):
        check_coverage(damaged(good, tensor=np.array([3], np.int32)))
    with pytest.raises(CorruptError, match="dimensions"):
        check_coverage(damaged(good, offset=good.offset[:, :1], shape=good.shape[:, :1]))


def test_a_tensor_too_large_to_number_its_corners_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="corners"):
        check_coverage(chunk_table({spec_of((2**32, 2**32)): [Box.whole((1, 1))]}))


def test_tensors_of_a_trillion_elements_are_proved() -> None:
    shape = (384, 7168, 2**20)
    rows = [Box(offset=(n, 0, 0), shape=(1, *shape[1:])) for n in range(384)]
    check_coverage(chunk_table({spec_of(shape): rows}))
    with pytest.raises(InconsistentCutError, match=r"gap at offset \(17, 0, 0\)"):
        check_coverage(chunk_table({spec_of(shape): rows[:17] + rows[18:]}))
    assert prod(shape) > 10**12
