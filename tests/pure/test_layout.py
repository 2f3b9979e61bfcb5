"""Meshes and layouts: inverses, digests, hostile JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.layout import Layout, Mesh, layout_digest, shards_digest, shards_from_json, shards_to_json
from ckptstore.tensor import Box, Shard, TensorSpec
from ckptstore.testing.strategies import layouts

QUICK = settings(max_examples=50)


@QUICK
@given(sizes=st.lists(st.integers(1, 4), max_size=4))
def test_mesh_rank_and_coordinate_are_inverse_and_row_major(sizes: list[int]) -> None:
    mesh = Mesh(axes=tuple((f"axis{n}", size) for n, size in enumerate(sizes)))
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert [tuple(place.values()) for place in places] == sorted(tuple(p.values()) for p in places)
    assert all(list(place) == [name for name, _ in mesh.axes] for place in places)


@pytest.mark.parametrize("axes", [(("dp", 2), ("dp", 2)), (("dp", 0),)])
def test_impossible_meshes_are_refused(axes: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(InvalidInputError, match="mesh axes"):
        Mesh(axes=axes)


def test_places_outside_a_mesh_are_refused() -> None:
    mesh = Mesh(axes=(("dp", 2), ("tp", 3)))
    with pytest.raises(InvalidInputError, match="rank 6"):
        mesh.coordinate(6)
    for place in ({"dp": 0}, {"dp": 0, "tp": 3}, {"dp": 0, "tp": 0, "pp": 0}):
        with pytest.raises(InvalidInputError, match="coordinate"):
            mesh.rank(place)


@QUICK
@given(layout=layouts())
def test_a_layout_survives_json_with_its_digest(layout: Layout) -> None:
    back = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert back == layout and back.digest == layout.digest
    assert layout.digest == layout_digest(layout.role, [shards_digest(shards) for shards in layout.ranks])


@QUICK
@given(left=layouts(max_ranks=2, max_tensors=2), right=layouts(max_ranks=2, max_tensors=2))
def test_unequal_layouts_have_unequal_digests(left: Layout, right: Layout) -> None:
    assert (left.digest == right.digest) == (left == right)


def test_the_digest_stays_the_same_in_every_version() -> None:
    spec = TensorSpec(name="w\N{GREEK SMALL LETTER ALPHA}", dtype="float32", shape=(4, 2))
    shards = tuple(Shard(spec=spec, box=box, replicas=(0, 1)) for box in (Box.whole((2, 2)),))
    layout = Layout(role="trainer", ranks=(shards, shards))
    assert layout.digest == "b7c0b0ab6cb2aebcfde0b7baf40fa0cd"


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [[]],
        {},
        "ab",
        [[[True]], []],
        [[["0"]], []],
        [[[]], ["abcdef"]],
        [[[]], [["w", "int8", [4], [0], [2]]]],
        [[[]], [["w", "int8", [4], [0], [2], 1]]],
        [[[]], [["w", "int8", [4], [0], [2], -1]]],
        [[[]], [["w", "int8", [4], [0], [2], True]]],
        [[[]], [["w", "int7", [4], [0], [2], 0]]],
        [[[]], [["w", "int8", [4], [3], [2], 0]]],
        [[[]], [["w", "int8", [4], [0, 0], [2], 0]]],
        [[[]], [["w", "int8", 4, [0], [2], 0]]],
        [[[]], [["w", "int8", [4.0], [0], [2], 0]]],
        [[[]], [[["w"], "int8", [4], [0], [2], 0]]],
        [[[1, 0]], [["w", "int8", [4], [0], [2], 0]]],
    ],
)
def test_malformed_shards_are_corrupt(value: Any) -> None:
    assert shards_to_json(shards_from_json([[[0, 1]], [["w", "int8", [4], [0], [2], 0]]]))
    with pytest.raises(CorruptError):
        shards_from_json(value)


@pytest.mark.parametrize("value", [None, {}, {"role": "trainer"}, {"role": 1, "ranks": []}])
def test_malformed_layouts_are_corrupt(value: Any) -> None:
    with pytest.raises(CorruptError):
        Layout.from_json(value)


def test_numbers_that_are_not_plain_are_refused_by_the_digest() -> None:
    import numpy as np

    spec = TensorSpec(name="w", dtype="int8", shape=(np.int64(4),))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="plain Python int"):
        shards_digest([Shard(spec=spec, box=Box.whole((4,)))])
