"""Targets that share memory: filled only where what was saved is equal there, else refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import LayoutMismatchError, Publisher, Sharded, Subscriber, begin
from ckptstore.memoryspan import Span, agree, overlapping, repeats, span_of
from tests.save.runs import bits, ids, new_url, restore, save


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Any elements of 2 or 4 bytes: rows, columns and blocks of one array, or any steps at all."""
    size = draw(st.sampled_from((2, 4)))
    if draw(st.booleans()):
        steps = draw(st.permutations((24 * size, 6 * size, size)))
        shape = tuple(draw(st.integers(1, 4)) for _ in steps)
    else:
        shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
        steps = [draw(st.integers(-9, 9)) for _ in shape]
    kept = [(n, step) for n, step in zip(shape, steps, strict=True) if n > 1]
    return Span(
        device=draw(st.sampled_from(("cpu", "other"))),
        start=1000 + draw(st.integers(0, 60)),
        itemsize=size,
        shape=tuple(n for n, _ in kept),
        steps=tuple(step for _, step in kept),
    )


def bytes_of(span: Span) -> list[tuple[str, int]]:
    """Every byte of every element, as often as elements have it."""
    return [
        (span.device, span.start + sum(n * step for n, step in zip(at, span.steps, strict=True)) + byte)
        for at in product(*map(range, span.shape))
        for byte in range(span.itemsize)
    ]


@given(some=st.lists(spans(), max_size=4))
def test_spans_are_grouped_exactly_when_they_share_a_byte(some: list[Span]) -> None:
    grouped = {n for group in overlapping(some) for n in group}
    sets = [set(bytes_of(span)) for span in some]
    for a, b in combinations(range(len(some)), 2):
        if sets[a] & sets[b]:
            assert any(a in group and b in group for group in overlapping(some))
    alone = all(len(bytes_of(span)) == len(held) for span, held in zip(some, sets, strict=True))
    if alone and not any(a & b for a, b in combinations(sets, 2)):
        assert not grouped
    for span, held in zip(some, sets, strict=True):
        assert (span.low, span.stop) == (min(at for _, at in held), max(at for _, at in held) + 1)


@given(view=spans())
def test_an_array_repeats_itself_exactly_when_two_elements_share_a_byte(view: Span) -> None:
    memory = np.zeros(1000, np.uint8)
    array = view.within(memory, view.start - 400)
    found = span_of(array)
    assert found is not None and (found.shape, found.steps) == (view.shape, view.steps)
    assert repeats(array) == (len(set(bytes_of(view))) < len(bytes_of(view)))


def test_memory_can_be_filled_with_what_agrees() -> None:
    whole = np.arange(6, dtype=np.int16).reshape(2, 3)
    both = [span for data in (whole, whole.T) if (span := span_of(data)) is not None]
    for other, right in ((whole.T.copy(), True), (whole.T + 1, False)):
        contents = [np.ascontiguousarray(data).view(np.uint8).reshape(-1) for data in (whole, other)]
        assert agree(both, contents) is right


BUFFERS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    # What is saved, and how the target lies in one memory; "b" is then saved once equal and once not.
    "flat": lambda: (
        {"a": ids((6,)), "b": ids((2, 2))},
        (lambda x: {"a": x, "b": x[:4].view(2, 2)})(ids((6,)) - 99),
    ),
    "transposed": lambda: (
        {"a": ids((2, 3)), "b": ids((2, 3)).t()},
        (lambda x: {"a": x, "b": x.t()})(ids((2, 3)) - 99),
    ),
    "another dtype": lambda: (
        {"a": ids((4,)), "b": ids((4,)).view(torch.float32)},
        (lambda x: {"a": x, "b": x.view(torch.float32)})(ids((4,)) - 99),
    ),
    "array and tensor": lambda: (
        {"a": ids((4,)), "b": ids((4,)).numpy()},
        (lambda x: {"a": x, "b": x.numpy()})(ids((4,)) - 99),
    ),
    "conjugate": lambda: (
        {"a": torch.full((3,), 1 + 2j), "b": torch.full((3,), 1 - 2j)},
        (lambda x: {"a": x, "b": x.conj()})(torch.zeros(3, dtype=torch.complex64)),
    ),
    "overlapping boxes": lambda: (
        {"a": ids((6,)), "b": ids((6,))},
        (
            lambda x: {
                "a": [Sharded(x[:4], (6,), (0,)), Sharded(x[2:], (6,), (2,))],
                "b": Sharded(x[1:5], (6,), (1,)),
            }
        )(ids((6,)) - 99),
    ),
}


def flat_bits(state: dict[str, Any]) -> Any:
    shards = [s for value in state.values() for s in (value if isinstance(value, list) else [value])]
    return bits([shard.tensor if isinstance(shard, Sharded) else shard for shard in shards])


@pytest.mark.parametrize("by", ["restore", "subscriber"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_targets_that_overlap_are_filled_only_with_what_was_saved_equal(kind: str, by: str) -> None:
    for equal in (True, False):
        saved, target = BUFFERS[kind]()
        if not equal:
            saved["b"] = saved["b"] + saved["b"] + 1
        before = flat_bits(target)
        url = new_url()

        def load(url: str = url, saved: dict[str, Any] = saved, target: dict[str, Any] = target) -> None:
            if by == "restore":
                save(url, saved)
                restore(url, target)
                return
            with begin(url, {"trainer": 1}) as inc:
                id = Publisher(inc, role="trainer", rank=0).publish(0, saved)
            Subscriber(url).load(id, target)

        if equal:
            load()
            assert flat_bits(target) != before
            for name, value in target.items():
                for shard in value if isinstance(value, list) else [value]:
                    if isinstance(shard, Sharded):
                        (first,), rows = shard.offset, len(shard.tensor)
                        assert torch.equal(shard.tensor, saved[name][first : first + rows])
                    else:
                        assert bits(shard) == bits(saved[name])
        else:
            with pytest.raises(LayoutMismatchError, match=r"trainer/a, trainer/b share memory"):
                load()
            assert flat_bits(target) == before


def test_slices_of_one_tensor_that_do_not_overlap_are_filled_each() -> None:
    """Columns of a fused projection, and whatever else lies between each other in memory."""
    url = new_url()
    parts = {name: ids((4, 3)) + 100 * n for n, name in enumerate("qkv")}
    save(url, parts)
    fused = torch.zeros(4, 9, dtype=torch.int64)
    restore(url, {name: fused[:, 3 * n : 3 * n + 3] for n, name in enumerate("qkv")})
    assert torch.equal(fused, torch.cat(list(parts.values()), dim=1))
    turned = torch.zeros(3, 4, 3, dtype=torch.int64)
    restore(url, {name: turned[:, :, n].t() for n, name in enumerate("qkv")})
    assert all(torch.equal(turned[:, :, n].t(), parts[name]) for n, name in enumerate("qkv"))


@pytest.mark.parametrize("as_array", [False, True])
def test_a_target_whose_elements_overlap_each_other_is_refused(as_array: bool) -> None:
    url = new_url()
    saved, memory = ids((2, 3)), torch.zeros(4, dtype=torch.int64)
    save(url, {"w": saved.numpy() if as_array else saved})
    target: Any = memory.as_strided((2, 3), (1, 1))
    if as_array:
        target = np.lib.stride_tricks.as_strided(memory.numpy(), (2, 3), (8, 8))
    with pytest.raises(LayoutMismatchError, match="w cannot be written to"):
        restore(url, {"w": target})
    assert not memory.any()
