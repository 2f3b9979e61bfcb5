"""Meshes and layouts: inverses, digests, hostile JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.layout import Layout, Mesh, shards_from_json, shards_to_json
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
def test_a_layout_survives_json(layout: Layout) -> None:
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


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
