"""The states of a bench: the sizes asked for, equal from equal seeds, and nothing stays unless it is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.bench.limits import CopyLimit
from ckptstore.bench.states import KINDS, Bytes, blank_like, make, packed_nbytes, parameters, split

MIB = 1 << 20
CHUNK = 32 * MIB  # the library's own bound


@given(kind=st.sampled_from(KINDS), mib=st.integers(64, 64 << 10))
def test_a_state_has_the_size_asked_for(kind: str, mib: int) -> None:
    nbytes = sum(each.numel for each in parameters(kind, mib * MIB)) * 14
    assert abs(nbytes - mib * MIB) <= 0.01 * mib * MIB
    names = [each.name for each in parameters(kind, mib * MIB)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("kind", "count"), [("moe", 1764), ("large", 32), ("small", 20_000)])
def test_a_gib_has_the_tensors_that_the_figures_are_for(kind: str, count: int) -> None:
    assert 4 * len(parameters(kind, 1 << 30)) == count


@pytest.mark.parametrize("kind", ["moe", "large"])
def test_equal_seeds_give_equal_bits_and_a_step_changes_every_tensor(kind: str) -> None:
    first, second = make(kind, 4 * MIB, seed=3), make(kind, 4 * MIB, seed=3)
    assert first.differs_from(second) is None
    assert first.differs_from(make(kind, 4 * MIB, seed=4)) is not None
    for step in range(3):
        before = [memory.copy() for memory in first.bytes_of()]
        first.advance(step)
        after = first.bytes_of()
        assert not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_is_kept_stays_and_is_about_half() -> None:
    state = make("moe", 4 * MIB)
    names, nbytes = state.half()
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    state.advance(1, names)
    stayed = {name for name, tensor in state.tensors.items() if tensor.equal(before[name])}
    assert stayed == names
    assert nbytes == sum(state.tensors[name].nbytes for name in names)
    assert 0.45 <= nbytes / state.nbytes <= 0.5


def test_a_blank_has_the_shapes_and_not_the_bits() -> None:
    state = make("moe", 2 * MIB)
    memory: Bytes = np.zeros(packed_nbytes(state), np.uint8)
    blank = blank_like(state, memory)
    assert {n: (t.shape, t.dtype) for n, t in blank.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in state.tensors.items()
    }
    assert state.differs_from(blank) == next(iter(state.tensors))
    for name, tensor in blank.tensors.items():
        tensor.copy_(state.tensors[name])
    assert state.differs_from(blank) is None
    memory[-64] ^= 1  # in the last tensor
    assert state.differs_from(blank) == list(state.tensors)[-1]


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), ways=st.integers(1, 4))
def test_a_split_has_every_item_once(sizes: list[int], ways: int) -> None:
    runs = split(sizes, ways)
    assert len(runs) == ways
    assert [n for run in runs for n in range(len(sizes))[run]] == list(range(len(sizes)))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_copy_that_is_the_limit_copies_everything(threads: int) -> None:
    state = make("moe", 4 * MIB)
    memory: Bytes = np.zeros(packed_nbytes(state), np.uint8)
    copy = CopyLimit(state, memory)
    assert copy.seconds(threads) > 0
    copy.close()
    assert np.array_equal(memory[: state.nbytes], np.concatenate(state.bytes_of()))
