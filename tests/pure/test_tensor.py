"""Box algebra, as properties against numpy."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import InvalidInputError
from ckptstore.tensor import Box, Shape, Shard, TensorSpec, cut_flat_range, halve, itemsize
from ckptstore.testing.strategies import boxes, shapes, tilings

QUICK = settings(max_examples=100)


def marked(shape: Shape, *parts: Box) -> np.ndarray:
    """How many of `parts` hold each element."""
    hits = np.zeros(shape, np.int64)
    for box in parts:
        hits[box.slices] += 1
    return hits


@QUICK
@given(data=st.data(), shape=shapes(min_side=0))
def test_intersection_is_what_both_boxes_hold(data: st.DataObject, shape: Shape) -> None:
    left, right = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = left.intersection(right)
    assert both == right.intersection(left)
    expected = marked(shape, left, right) == 2
    if both is None:
        assert not expected.any()
        return
    assert both.numel > 0 and left.contains(both) and right.contains(both)
    assert np.array_equal(marked(shape, both) == 1, expected)
    assert left.contains(right) == (both == right) or not right.numel


@QUICK
@given(data=st.data(), shape=shapes(min_side=0))
def test_place_in_an_outer_box_is_the_flat_index_of_numpy(data: st.DataObject, shape: Shape) -> None:
    outer = data.draw(boxes(shape))
    within = data.draw(boxes(outer.shape))
    inner = Box(
        offset=tuple(a + b for a, b in zip(outer.offset, within.offset, strict=True)), shape=within.shape
    )
    assert inner.relative_to(outer) == within
    ids = np.arange(outer.numel).reshape(outer.shape)[within.slices].reshape(-1)
    if inner.numel:
        assert inner.start_in(outer) == ids[0]
    assert inner.is_contiguous_in(outer) == bool((np.diff(ids) == 1).all())


@pytest.mark.parametrize("method", ["relative_to", "start_in", "is_contiguous_in"])
def test_a_box_outside_the_outer_one_is_refused(method: str) -> None:
    with pytest.raises(InvalidInputError, match="does not lie in"):
        getattr(Box(offset=(3,), shape=(2,)), method)(Box.whole((4,)))


@QUICK
@given(data=st.data(), shape=shapes(min_side=0))
def test_flat_range_is_cut_into_few_boxes_in_order(data: st.DataObject, shape: Shape) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    parts = cut_flat_range(shape, start, stop)
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    ids = np.arange(prod(shape)).reshape(shape)
    flat = [ids[box.slices].reshape(-1) for box in parts]
    assert all(piece.size for piece in flat)
    assert np.array_equal(np.concatenate([*flat, np.zeros(0, np.int64)]), np.arange(start, stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 7)])
def test_flat_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(InvalidInputError, match="flat range"):
        cut_flat_range((2, 3), start, stop)


@QUICK
@given(data=st.data(), shape=shapes(min_side=0), limit=st.integers(1, 40))
def test_halving_tiles_the_box_in_order_with_contiguous_pieces(
    data: st.DataObject, shape: Shape, limit: int
) -> None:
    box = data.draw(boxes(shape))
    pieces = halve(box, limit)
    if not box.numel:
        assert pieces == (box,)
        return
    ids = np.arange(prod(shape)).reshape(shape)
    assert np.array_equal(
        np.concatenate([ids[piece.slices].reshape(-1) for piece in pieces]), ids[box.slices].reshape(-1)
    )
    for piece in pieces:
        assert 0 < piece.numel <= limit and piece.is_contiguous_in(box)


@QUICK
@given(rows=st.integers(1, 64), columns=st.integers(1, 5), limit=st.integers(1, 40))
def test_halves_of_a_doubled_degree_are_pieces_of_the_whole(rows: int, columns: int, limit: int) -> None:
    """A shard of half the rows is cut where the whole was, so a reader of one finds whole chunks."""
    whole = halve(Box.whole((2 * rows, columns)), limit)
    for half in (Box.whole((rows, columns)), Box(offset=(rows, 0), shape=(rows, columns))):
        if 2 * rows * columns > limit:
            assert set(halve(half, limit)) <= set(whole)


@QUICK
@given(data=st.data(), shape=shapes(min_side=0))
def test_strategy_tilings_are_tilings(data: st.DataObject, shape: Shape) -> None:
    assert (marked(shape, *data.draw(tilings(shape))) == 1).all()


def test_scalars_have_one_element_and_one_box() -> None:
    scalar = Box.whole(())
    assert (scalar.numel, scalar.stop, scalar.slices) == (1, (), ())
    assert scalar.intersection(scalar) == scalar
    assert scalar.start_in(scalar) == 0 and scalar.is_contiguous_in(scalar)
    assert cut_flat_range((), 0, 1) == (scalar,) and cut_flat_range((), 0, 0) == ()
    assert TensorSpec(name="step", dtype="complex128", shape=()).nbytes == 16


def test_packed_float4_counts_bytes_as_torch_does() -> None:
    assert itemsize("float4_e2m1fn_x2") == 1
    with pytest.raises(InvalidInputError, match="qint8"):
        itemsize("qint8")


@pytest.mark.parametrize(
    ("offset", "shape", "replicas"),
    [((3,), (2,), ()), ((0, 0), (1, 1), ()), ((0,), (1,), (1, 0)), ((0,), (1,), (0, 0)), ((0,), (1,), (-1,))],
)
def test_shards_that_cannot_be_are_refused(offset: Shape, shape: Shape, replicas: tuple[int, ...]) -> None:
    spec = TensorSpec(name="w", dtype="int8", shape=(4,))
    with pytest.raises(InvalidInputError, match="w"):
        Shard(spec=spec, box=Box(offset=offset, shape=shape), replicas=replicas)


@pytest.mark.parametrize(("offset", "shape"), [((0,), ()), ((-1,), (1,)), ((0,), (-1,))])
def test_boxes_that_cannot_be_are_refused(offset: Shape, shape: Shape) -> None:
    with pytest.raises(InvalidInputError, match="box offset"):
        Box(offset=offset, shape=shape)


def test_specs_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="negative extent"):
        TensorSpec(name="w", dtype="int8", shape=(-1,))
    with pytest.raises(InvalidInputError, match="empty name"):
        TensorSpec(name="", dtype="int8", shape=())
    with pytest.raises(InvalidInputError, match="at most 0"):
        halve(Box.whole((2,)), 0)
    with pytest.raises(InvalidInputError, match="dimensions"):
        Box.whole((2,)).intersection(Box.whole((2, 2)))
