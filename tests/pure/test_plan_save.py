"""Save plans: everything written once, balanced, and the same whoever asks."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import InvalidInputError, LayoutMismatchError
from ckptstore.layout import Layout
from ckptstore.plan.save import PlannedChunk, plan_save
from ckptstore.tensor import Box, Shape, Shard, TensorSpec, itemsize
from ckptstore.testing.strategies import layouts

QUICK = settings(max_examples=100)


def layout_of(*ranks: list[Shard]) -> Layout:
    return Layout(role="trainer", ranks=tuple(tuple(shards) for shards in ranks))


def shard(
    name: str, shape: Shape, *, replicas: tuple[int, ...] = (), box: Box | None = None, dtype: str = "float32"
) -> Shard:
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    return Shard(spec=spec, box=box or Box.whole(shape), replicas=replicas)


def loads(layout: Layout, plan: tuple[tuple[PlannedChunk, ...], ...]) -> list[int]:
    """Bytes that each rank writes."""
    return [
        sum(chunk.box.numel * itemsize(shards[chunk.shard].spec.dtype) for chunk in chunks)
        for shards, chunks in zip(layout.ranks, plan, strict=True)
    ]


@QUICK
@given(layout=layouts(), chunk=st.sampled_from((1, 16, 64, 1000)), least=st.sampled_from((1, 16)))
def test_every_element_of_every_tensor_is_written_once(layout: Layout, chunk: int, least: int) -> None:
    plan = plan_save(layout, chunk_nbytes=chunk, slice_nbytes_min=least)
    assert len(plan) == layout.size
    specs = {held.spec.name: held.spec for shards in layout.ranks for held in shards}
    hits = {name: np.zeros(spec.shape, np.int64) for name, spec in specs.items()}
    chunks_of: Counter[str] = Counter()
    for shards, chunks in zip(layout.ranks, plan, strict=True):
        assert list(chunks) == sorted(chunks, key=lambda c: (c.shard, c.box.offset))
        for planned in chunks:
            held = shards[planned.shard]
            assert held.box.contains(planned.box) and planned.box.is_contiguous_in(held.box)
            assert planned.box.numel * itemsize(held.spec.dtype) <= max(chunk, itemsize(held.spec.dtype))
            hits[held.spec.name][planned.box.slices] += 1
            chunks_of[held.spec.name] += 1
            assert planned.box.numel or not held.spec.numel
    for name, spec in specs.items():
        assert (hits[name] == 1).all(), name
        assert spec.numel or chunks_of[name] == 1


@QUICK
@given(layout=layouts(), seed=st.integers(0, 2**32))
def test_the_plan_does_not_depend_on_the_order_of_shards(layout: Layout, seed: int) -> None:
    shuffle = random.Random(seed)
    orders = [shuffle.sample(range(len(shards)), len(shards)) for shards in layout.ranks]
    mixed = layout_of(
        *([shards[n] for n in order] for shards, order in zip(layout.ranks, orders, strict=True))
    )

    def written(of: Layout) -> list[set[tuple[str, Box]]]:
        plan = plan_save(of, chunk_nbytes=64, slice_nbytes_min=16)
        return [
            {(shards[c.shard].spec.name, c.box) for c in chunks}
            for shards, chunks in zip(of.ranks, plan, strict=True)
        ]

    # A tensor without elements may be held twice by one rank, so only its name is compared by the set.
    assert written(mixed) == written(layout)


@QUICK
@given(layout=layouts(max_ranks=3))
def test_the_plan_is_the_same_after_an_exchange(layout: Layout) -> None:
    assert plan_save(Layout.from_json(layout.to_json())) == plan_save(layout)


@QUICK
@given(
    rows=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    alone=st.lists(st.integers(0, 2000), min_size=2, max_size=8),
)
def test_replicas_balance_what_each_rank_must_write_alone(rows: list[int], alone: list[int]) -> None:
    """Within 2 % of the least that is possible, or a slice of it where tensors are small."""
    least = 16
    everyone = tuple(range(len(alone)))
    shared = [shard(f"shared{n}", (count, 4), replicas=everyone) for n, count in enumerate(rows)]
    layout = layout_of(*([*shared, shard(f"own{r}", (count, 4))] for r, count in enumerate(alone)))
    written = loads(layout, plan_save(layout, slice_nbytes_min=least))
    total = 16 * (sum(rows) + sum(alone))
    assert sum(written) == total
    bound = max(16 * max(alone), level(sorted(16 * n for n in alone), 16 * sum(rows)))
    assert max(written) <= max(1.02 * bound, bound + least)


def level(start: list[int], nbytes: int) -> float:
    """Where water ends that is poured over `start`, by bisection."""
    low, high = 0.0, float(max(start) + nbytes)
    for _ in range(80):
        middle = (low + high) / 2
        if sum(max(0.0, middle - load) for load in start) >= nbytes:
            high = middle
        else:
            low = middle
    return high


def test_nested_replica_sets_balance() -> None:
    """Dense tensors held by all, experts by pairs: what the pairs leave uneven, the dense level."""
    ranks: list[list[Shard]] = [[] for _ in range(4)]
    for n in range(6):
        for rank in range(4):
            ranks[rank].append(shard(f"dense{n}", (512, 256), replicas=(0, 1, 2, 3)))
    for pair, count in (((0, 1), 3), ((2, 3), 5)):
        for n in range(count):
            for rank in pair:
                ranks[rank].append(shard(f"expert{pair[0]}.{n}", (300, 256), replicas=pair))
    layout = layout_of(*ranks)
    written = loads(layout, plan_save(layout))
    assert max(written) <= 1.02 * sum(written) / 4


def test_tensors_are_cut_no_finer_than_balance_needs() -> None:
    same = [shard(f"w{n}", (1024, 1024), replicas=(0, 1)) for n in range(8)]
    layout = layout_of(same, same)
    assert [len(chunks) for chunks in plan_save(layout)] == [4, 4]
    small = [shard("w", (1024, 16), replicas=(0, 1))]
    assert [len(chunks) for chunks in plan_save(layout_of(small, small))] == [1, 0], "64 KiB is one slice"


def test_pieces_too_small_to_cut_go_largest_first() -> None:
    """One and one fill what two leaves; smallest first would end at three against one."""
    held = [shard(name, (count, 256), replicas=(0, 1)) for name, count in (("a", 1), ("b", 1), ("c", 2))]
    layout = layout_of(held, held)
    assert loads(layout, plan_save(layout)) == [2048, 2048]


def test_chunks_are_at_most_32_mib_and_a_power_of_two_of_them() -> None:
    (chunks,) = plan_save(layout_of([shard("w", (5 * 2**20, 16))]))
    assert len(chunks) == 16 and {chunk.box.numel for chunk in chunks} == {5 * 2**20}


def test_a_tensor_without_elements_has_one_empty_chunk() -> None:
    empty = shard("w", (0, 8), replicas=(0, 1))
    nothing_here = shard("v", (4,), box=Box(offset=(4,), shape=(0,)))
    whole = shard("v", (4,))
    plan = plan_save(layout_of([nothing_here, empty], [empty, whole]))
    assert plan == (
        (PlannedChunk(shard=1, box=Box.whole((0, 8))),),
        (PlannedChunk(shard=1, box=Box.whole((4,))),),
    )


BOTH = (0, 1)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (
            [[shard("w", (4,), replicas=BOTH)], [shard("w", (5,), replicas=BOTH)]],
            r"w at offset \(0,\), shape \(4,\): float32\[4\] with replicas \[0, 1\] on rank 0, absent on rank 1",
        ),
        (
            [[shard("w", (4,), replicas=BOTH)], [shard("w", (4,), dtype="int8", replicas=BOTH)]],
            r"float32\[4\] with replicas \[0, 1\] on rank 0, int8\[4\] with replicas \[0, 1\] on rank 1",
        ),
        (
            [[shard("w", (4,), replicas=BOTH)], [shard("w", (4,))]],
            r"float32\[4\] with replicas \[0, 1\] on rank 0, with no replicas on rank 1",
        ),
        ([[shard("w", (4,), replicas=BOTH)], []], r"with replicas \[0, 1\] on rank 0, absent on rank 1"),
        ([[shard("w", (4,), replicas=(1,))], []], r"w .*on rank 0 names replicas \[1\]"),
        ([[shard("w", (4,), replicas=(0, 2))], []], r"w on rank 0 names replica 2"),
        ([[shard("w", (4,)), shard("w", (4,))], []], r"w .*is held twice by rank 0"),
        ([[shard("w", (4,)), shard("w", (5,))], []], r"w is both float32\[4\] and float32\[5\] on rank 0"),
        (
            [[shard("w", (4,), replicas=BOTH)], [shard("w", (4,), replicas=(0, 1, 2))], []],
            r"with replicas \[0, 1\] on rank 0, with replicas \[0, 1, 2\] on rank 1",
        ),
        (
            [[shard("w", (0, 4), replicas=BOTH)], [shard("w", (0, 5), replicas=BOTH)]],
            r"w is float32\[0, 4\] on rank 0 but float32\[0, 5\] on rank 1",
        ),
    ],
)
def test_layouts_that_do_not_fit_together_are_refused(ranks: list[list[Shard]], says: str) -> None:
    with pytest.raises(LayoutMismatchError, match=says):
        plan_save(layout_of(*ranks))


def test_what_ranks_share_with_nobody_is_left_to_the_commit() -> None:
    """Each plans what it holds alone; that both did is seen by coverage, not by a thousand ranks' tensors."""
    alone = [shard("w", (4,))]
    assert [len(chunks) for chunks in plan_save(layout_of(alone, alone))] == [1, 1]


def test_all_problems_are_listed() -> None:
    names = [f"w{n}" for n in range(9)]
    mine, theirs = ([shard(name, (4,), replicas=of) for name in names] for of in (BOTH, ()))
    with pytest.raises(LayoutMismatchError, match="and 4 more") as caught:
        plan_save(layout_of(mine, theirs))
    assert [problem.split()[0] for problem in caught.value.problems] == names


def test_the_members_of_a_large_set_are_told_by_opinion() -> None:
    """One of a hundred ranks differs: it is named, and the others as one."""
    everyone = tuple(range(100))
    ranks = [[shard("w", (4,), replicas=everyone)] for _ in everyone]
    ranks[7] = [shard("w", (4,), dtype="int32", replicas=everyone)]
    with pytest.raises(
        LayoutMismatchError, match=r"on ranks \[0, 1, …, 99\] \(99 ranks\), int32.* on rank 7"
    ):
        plan_save(layout_of(*ranks))


def test_chunks_of_no_bytes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="too small"):
        plan_save(layout_of([]), chunk_nbytes=0)
