"""What is settled by digests and what is paired: every element of a common tensor exactly once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import InvalidInputError
from ckptstore.chunktable import ChunkTable
from ckptstore.grouping import REST, Grouping, natural_order
from ckptstore.plan import diff as module
from ckptstore.plan.diff import plan_diff
from ckptstore.tensor import TensorSpec
from ckptstore.testing.strategies import chunk_table, specs, tilings


def with_digests(draw: Any, table: ChunkTable) -> ChunkTable:
    """Few different digests, so that some boxes have equal ones."""
    digest = np.zeros_like(table.digest)
    digest[:, 0] = draw(st.lists(st.integers(0, 1), min_size=len(table), max_size=len(table)))
    return replace(table, digest=digest)


@given(data=st.data(), candidates=st.sampled_from((1, 7, 1 << 20)))
def test_every_element_is_settled_or_paired_once(data: st.DataObject, candidates: int) -> None:
    found = data.draw(specs(prefix="trainer/"))
    one = {spec: data.draw(tilings(spec.shape)) for spec in found}
    other = {s: one[s] if data.draw(st.booleans()) else data.draw(tilings(s.shape)) for s in found}
    a, b = (with_digests(data.draw, chunk_table(tiles)) for tiles in (one, other))
    module.CANDIDATES, kept = candidates, module.CANDIDATES
    try:
        plan = plan_diff(a, b, lambda _: True)
    finally:
        module.CANDIDATES = kept
    assert not plan.added and not plan.removed and not plan.altered
    boxes = [{(t.spec(n).name, t.box(n)): bytes(t.digest[n]) for n in range(len(t))} for t in (a, b)]
    equal = {key for key in boxes[0] if boxes[1].get(key) == boxes[0][key]}
    for number, spec in enumerate(plan.common):
        hits = np.zeros(spec.shape, int)
        for name, box in equal:
            if name == spec.name:
                hits[box.slices] += 1
        assert plan.settled[number] == hits.sum() * spec.nbytes / max(spec.numel, 1)
        for pair in np.flatnonzero(plan.tensor == number).tolist():
            box = plan.box(pair)
            hits[box.slices] += 1
            assert box.numel, "a pair that shares nothing is read for nothing"
            assert a.box(int(plan.before[pair])).contains(box) and b.box(int(plan.after[pair])).contains(box)
        assert (hits == 1).all()


def test_names_that_came_went_and_changed_their_kind() -> None:
    def table(*specs: TensorSpec) -> ChunkTable:
        return chunk_table({spec: (module.Box.whole(spec.shape),) for spec in specs})

    def spec(name: str, dtype: str = "int8", *shape: int) -> TensorSpec:
        return TensorSpec(name=f"trainer/{name}", dtype=dtype, shape=shape)

    old = table(spec("gone"), spec("shape", "int8", 2), spec("dtype"), spec("same", "int8", 3, 2))
    new = table(spec("came"), spec("shape", "int8", 3), spec("dtype", "uint8"), spec("same", "int8", 3, 2))
    plan = plan_diff(old, new, lambda _: True)
    assert [s.name for s in plan.added] == ["trainer/came"] and [s.name for s in plan.removed] == [
        "trainer/gone"
    ]
    assert [a.name for a, _ in plan.altered] == ["trainer/dtype", "trainer/shape"]
    assert [s.name for s in plan.common] == ["trainer/same"] and plan.settled.tolist() == [6]
    assert len(plan.tensor) == 0
    assert plan_diff(old, new, lambda name: name.endswith("same")).altered == ()


@pytest.mark.parametrize(
    ("by", "name", "key"),
    [
        ("layer", "model.layers.3.mlp.w", "model.layers.3"),
        ("layer", "model.embed.w", REST),
        ("layer", "mylayers.3.w", REST),
        ("expert", "layers.3.experts.12.w1", "layers.3.experts.12"),
        ("blocks.h.{}", "blocks.h.7.w", "blocks.h.7"),
        ("prefix", "layers.3.experts.12.w1", "layers.*.experts.*.w1"),
        ("tensor", "layers.3.w", "layers.3.w"),
    ],
)
def test_names_are_grouped(by: str, name: str, key: str) -> None:
    assert Grouping(by=by).key(name) == key


def test_rows_of_stacked_experts_join_the_experts_of_their_module() -> None:
    by = Grouping(by="expert")
    assert by.row_key("layers.3.experts.w13", 5) == "layers.3.experts.5" == by.key("layers.3.experts.5.w13")
    assert by.row_key("layers.3.moe", 5) == "layers.3.moe[5]"


def test_groups_come_in_the_order_of_their_numbers() -> None:
    assert natural_order(["l.10.w", REST, "l.9.w", "a"]) == ["a", "l.9.w", "l.10.w", REST]


@pytest.mark.parametrize("by", ["", "layers", "layers.{}.{}", "{}", "layers.{n}", "{}.x"])
def test_patterns_that_name_no_number_are_refused(by: str) -> None:
    with pytest.raises(InvalidInputError, match=r"blocks\.\{\}"):
        Grouping(by=by)
