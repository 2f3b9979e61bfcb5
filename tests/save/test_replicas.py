"""One flipped bit in one replica is found at the next save, named by tensor, box and rank, and that save refused."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import (
    Checkpointer,
    Frozen,
    InconsistentCutError,
    PerRank,
    Sharded,
    digester,
)
from ckptstore.replicaset import ROWS
from ckptstore.structure import FlatState
from ckptstore.tensor import Box
from ckptstore.testing import strategies
from tests.save.runs import WAIT_S, bits, new_url, restore, save_all

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex64", "complex128", "uint16"]


class Job:
    """Checkpointers of one role, driven in turn."""

    def __init__(self, size: int, checks: Sequence[bool] | None = None) -> None:
        self.url = new_url()
        self.inc = ckptstore.begin(self.url, {"trainer": size})
        checks = checks or [True] * size
        self.members = [
            Checkpointer(self.inc, role="trainer", rank=rank, check_replicas=checks[rank])
            for rank in range(size)
        ]

    def save(self, step: int, states: Sequence[dict[str, Any]]) -> None:
        save_all(self.members, step, states)

    def refused(self, step: int, states: Sequence[dict[str, Any]]) -> list[InconsistentCutError]:
        """The error of every member; none may be missing."""
        handles = [member.save(step, state) for member, state in zip(self.members, states, strict=True)]
        errors = []
        for handle in handles:
            with pytest.raises(InconsistentCutError) as caught:
                handle.result(WAIT_S)
            errors.append(caught.value)
        return errors

    def latest(self) -> int | None:
        info = ckptstore.open(self.url).latest()
        return None if info is None else info.step

    def close(self) -> None:
        for member in self.members:
            member.close(WAIT_S)
        self.inc.close()


def memory(shape: Sequence[int], dtype: str, seed: int, *, strided: bool) -> torch.Tensor:
    """Random bits; `strided`: every other element of a larger tensor."""
    kind = getattr(torch, dtype)
    raw = torch.randint(
        0, 2, (math.prod(shape) * kind.itemsize,), generator=torch.Generator().manual_seed(seed)
    )
    tensor = raw.to(torch.uint8).view(kind).view(tuple(shape))
    if not strided:
        return tensor
    wide = torch.zeros((*shape, 2), dtype=kind)
    wide.select(-1, 0).copy_(tensor)
    return wide.select(-1, 0)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Turn over one bit of the elements, counted row-major; bools by value."""
    nbits = tensor.element_size() * 8
    place = np.unravel_index(bit // nbits, tuple(tensor.shape)) if tensor.dim() else ()
    one = tensor[tuple(int(n) for n in place)].clone().reshape(1)
    data = (torch.view_as_real(one) if one.is_complex() else one).view(torch.uint8).view(-1)
    data[(bit % nbits) // 8] ^= 1 if tensor.dtype == torch.bool else 1 << (bit % 8)
    tensor[tuple(int(n) for n in place)] = one[0]


@st.composite
def replicated(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, Box, tuple[int, ...]]]]:
    """A state a rank, and its replicated boxes: plain tensors, arrays, and tiles held by some of the ranks."""
    size = draw(st.integers(2, 4))
    states: list[dict[str, Any]] = [{"step": 1, "r": PerRank(torch.full((2,), rank))} for rank in range(size)]
    boxes: list[tuple[str, Box, tuple[int, ...]]] = []
    everyone = tuple(range(size))
    for n in range(draw(st.integers(1, 4))):
        name, dtype = f"t{n}", draw(st.sampled_from(DTYPES))
        shape = draw(strategies.shapes(max_elements=60, max_ndim=3))
        seed = draw(st.integers(0, 99))
        if draw(st.booleans()):
            for state in states:
                state[name] = memory(shape, dtype, seed, strided=draw(st.booleans()))
            boxes.append((name, Box.whole(shape), everyone))
            continue
        for state in states:
            state[name] = []
        for box in draw(strategies.tilings(shape)):
            holders = tuple(sorted(draw(st.sets(st.sampled_from(everyone), min_size=1))))
            for rank in holders:
                tensor = memory(box.shape, dtype, seed, strided=draw(st.booleans()))
                states[rank][name].append(
                    Sharded(tensor, global_shape=shape, offset=box.offset, replicas=holders)
                )
            if len(holders) > 1:
                boxes.append((name, box, holders))
        for state in states:
            if not state[name]:
                del state[name]
    return states, boxes


def tensor_at(state: dict[str, Any], name: str, box: Box) -> torch.Tensor:
    value = state[name]
    if isinstance(value, list):
        value = next(s.tensor for s in value if s.offset == box.offset and tuple(s.tensor.shape) == box.shape)
    assert isinstance(value, torch.Tensor)
    return value


@settings(max_examples=40)
@given(data=st.data(), made=replicated(), on_device=st.booleans())
def test_one_flipped_bit_is_named_by_tensor_box_and_rank_and_the_save_refused(
    data: st.DataObject, made: tuple[Any, Any], on_device: bool
) -> None:
    states, boxes = made
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            patch.setattr(digester, "kind_of", lambda data: ROWS)
        job = Job(len(states))
        job.save(1, states)
        assert job.latest() == 1
        if not boxes:
            return job.close()
        name, box, holders = data.draw(st.sampled_from(boxes))
        rank = data.draw(st.sampled_from(holders))
        tensor = tensor_at(states[rank], name, box)
        bit = data.draw(st.integers(0, tensor.numel() * tensor.element_size() * 8 - 1))
        flip(tensor, bit)
        errors = job.refused(2, states)
        judged = errors[0]  # rank 0 commits; the others are told in words
        assert judged.tensors == (f"trainer/{name}",)
        assert judged.ranks == ((rank,) if len(holders) > 2 else holders)
        named = f"trainer/{name} at offset {box.offset}, shape {box.shape}: "
        assert all(named in str(error) for error in errors)
        assert re.search(rf"{re.escape(named)}.*\brank {rank}\b", str(judged))
        assert job.latest() == 1
        flip(tensor, bit)
        job.save(2, states)
        job.save(3, states)
        assert job.latest() == 3
        job.close()


def two_ranks(**tensors: torch.Tensor) -> list[dict[str, Any]]:
    return [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(2)]


@pytest.mark.parametrize("on_device", [False, True])
def test_what_counts_is_what_the_tensors_held_when_save_returned(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """Rank 0 trains on before rank 1 saves: its part cannot be written earlier, since it needs rank 1's layout."""
    if on_device:
        monkeypatch.setattr(digester, "kind_of", lambda data: ROWS)
    states = two_ranks(w=torch.arange(600.0), v=torch.ones(3))
    before = bits(states[1])
    job = Job(2)
    handles = []
    for member, state in zip(job.members, states, strict=True):
        handles.append(member.save(1, state))
        for tensor in state.values():
            flip(tensor, 1)
    assert [handle.result(WAIT_S).step for handle in handles] == [1, 1]
    job.close()
    targets = two_ranks(w=torch.zeros(600), v=torch.zeros(3))
    restore(job.url, *targets)
    assert [bits(target) for target in targets] == [before, before]


def test_without_the_check_a_flipped_replica_is_committed_unseen() -> None:
    states = two_ranks(a=torch.zeros(8), b=torch.ones(8))
    flip(states[1]["b"], 3)
    job = Job(2, checks=[False, False])
    job.save(1, states)
    assert job.latest() == 1
    job.close()


@pytest.mark.parametrize("odd", [0, 1])
def test_the_check_on_some_ranks_only_is_refused(odd: int) -> None:
    job = Job(2, checks=[rank != odd for rank in range(2)])
    for error in job.refused(1, two_ranks(a=torch.zeros(8))):
        assert re.search(rf"trainer/{odd} .*without digests.*check_replicas", str(error))
    assert job.latest() is None
    job.close()


def test_all_tensors_that_differ_are_listed_and_the_first_few_shown() -> None:
    states = two_ranks(**{f"t{n}": torch.full((3,), float(n)) for n in range(9)})
    for n in range(1, 9):
        flip(states[1][f"t{n}"], n)
    job = Job(2)
    error = job.refused(1, states)[0]
    assert error.tensors == tuple(f"trainer/t{n}" for n in range(1, 9))
    assert "trainer/t5 at" in str(error) and "trainer/t6 at" not in str(error) and "and 3 more" in str(error)
    job.close()


def test_equal_is_bitwise() -> None:
    """Zeros of two signs compare equal and NaNs never do; here only bits count."""
    zeros = two_ranks(w=torch.zeros(4), n=torch.full((4,), math.nan))
    job = Job(2)
    job.save(1, zeros)
    zeros[1]["w"][2] = -0.0
    assert job.refused(2, zeros)[0].tensors == ("trainer/w",)
    job.close()


def test_ranks_of_different_kinds_of_device_are_told_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    states = two_ranks(a=torch.zeros(8), b=torch.zeros(9))
    elsewhere = states[1]["b"]
    kind_of = digester.kind_of
    monkeypatch.setattr(digester, "kind_of", lambda data: ROWS if data is elsewhere else kind_of(data))
    job = Job(2)
    for error in job.refused(1, states):
        assert "trainer/b" in str(error) and "trainer/a" not in str(error)
        assert "one kind of device" in str(error) and "check_replicas=False" in str(error)
    job.close()


def test_arrays_are_compared_also_when_they_are_not_contiguous() -> None:
    array = np.arange(2_000_000, dtype=np.float32).reshape(1000, 2000)
    states: list[dict[str, Any]] = [
        {"x": array.copy(), "n": np.float32(3)},
        {"x": array.T.copy().T, "n": np.float32(3)},
    ]
    job = Job(2)
    job.save(1, states)
    states[1]["x"][999, 1999] += 1
    assert job.refused(2, states)[0].tensors == ("trainer/x",)
    job.close()


def test_large_states_are_shared_by_two_threads_with_the_same_digests() -> None:
    states = two_ranks(**{f"t{n}": torch.arange(n * 500_000) for n in range(5)})
    job = Job(2)
    job.save(1, states)
    flip(states[1]["t3"], 500_000 * 64)
    assert job.refused(2, states)[0].tensors == ("trainer/t3",)
    job.close()


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors whose digests are taken."""
    taken: list[str] = []
    host = digester.host_digests

    def count(sources: Sequence[digester.Source], flat: FlatState) -> list[bytes]:
        taken.extend(source.spec.name for source in sources)
        return host(sources, flat)

    monkeypatch.setattr(digester, "host_digests", count)
    return taken


def test_only_replicas_are_digested_and_frozen_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counting(monkeypatch)
    states = [
        {
            "w": torch.ones(4),
            "own": Sharded.dim0(torch.ones(2), start=2 * rank, size=4),
            "per": PerRank(torch.ones(3)),
            "none": torch.zeros(0, 3),
            "ref": Frozen({"f": torch.ones(5)}),
        }
        for rank in range(2)
    ]
    job = Job(2)
    for step in (1, 2, 3):
        job.save(step, states)
    assert sorted(taken) == ["trainer/ref.f"] * 2 + ["trainer/w"] * 6
    job.close()


def test_a_frozen_replica_is_compared_at_the_first_save_and_again_after_a_refusal() -> None:
    frozen = two_ranks(f=torch.ones(5))
    states = [{"ref": Frozen(state)} for state in frozen]
    flip(frozen[1]["f"], 7)
    job = Job(2)
    assert job.refused(1, states)[0].tensors == ("trainer/ref.f",)
    assert job.refused(1, states)[0].tensors == ("trainer/ref.f",)
    flip(frozen[1]["f"], 7)
    job.save(1, states)
    job.close()


def test_what_is_restored_after_a_refusal_is_the_checkpoint_before() -> None:
    states = two_ranks(w=torch.arange(6.0))
    job = Job(2)
    job.save(1, states)
    before = bits(states[0])
    flip(states[0]["w"], 0)
    job.refused(2, states)
    job.close()
    targets = two_ranks(w=torch.zeros(6))
    restore(job.url, *targets)
    assert [bits(target) for target in targets] == [before, before]


def test_one_rank_alone_has_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counting(monkeypatch)
    job = Job(1)
    job.save(1, [{"w": torch.ones(4)}])
    assert taken == []
    job.close()


def test_a_publication_of_unequal_replicas_is_refused_too() -> None:
    url = new_url()

    def publish(check: bool, number: int, states: Sequence[dict[str, Any]]) -> list[Any]:
        publishers = [
            ckptstore.Publisher(inc, role="trainer", rank=rank, check_replicas=check) for rank in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            return [
                pool.submit(publisher.publish, number, state)
                for publisher, state in zip(publishers, states, strict=True)
            ]

    states = two_ranks(w=torch.arange(6.0))
    flip(states[1]["w"], 0)
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        errors = [future.exception() for future in publish(True, 0, states)]
        assert all(isinstance(error, InconsistentCutError) for error in errors), errors
        assert "trainer/w at offset (0,), shape (6,)" in str(errors[0])
    with ckptstore.begin(url, {"trainer": 2}, takeover=True) as inc:
        assert len({future.result() for future in publish(False, 0, states)}) == 1
