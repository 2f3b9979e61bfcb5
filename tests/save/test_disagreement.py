"""Ranks whose declarations contradict each other: no checkpoint, and tensor and ranks are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Checkpointer, InconsistentCutError, LayoutMismatchError, Sharded
from ckptstore.errors import CkptStoreError
from tests.save.runs import WAIT_S, ids, new_url

States = list[dict[str, Any]]


def rows(start: int, stop: int, *, size: int = 6, dtype: torch.dtype = torch.float32, **more: Any) -> Sharded:
    data = ids((size, 2), dtype)[start:stop].clone()
    return Sharded(data, global_shape=(size, 2), offset=(start, 0), **more)


@pytest.mark.parametrize(
    ("states", "kind", "told"),
    [
        pytest.param(
            [{"w": rows(0, 2)}, {"w": rows(2, 4)}, {"w": rows(3, 6)}],
            InconsistentCutError,
            r"trainer/w: 2 chunks overlap at offset \(3, 0\), shape \(1, 2\), written by trainer/1, trainer/2",
            id="overlap",
        ),
        pytest.param(
            [{"w": rows(0, 2)}, {"w": rows(2, 3)}, {"w": rows(4, 6)}],
            InconsistentCutError,
            r"gap at offset \(3, 0\), shape \(1, 2\), the rest of it by trainer/0, trainer/1, trainer/2",
            id="gap",
        ),
        pytest.param(
            [{"w": rows(0, 6)}, {"w": rows(0, 6)}, {}],
            InconsistentCutError,
            r"trainer/w: 2 chunks overlap at offset \(0, 0\), shape \(6, 2\), written by trainer/0, trainer/1",
            id="one box by two that do not call each other replicas",
        ),
        pytest.param(
            [{"w": rows(0, 3)}, {"w": rows(3, 7, size=7)}, {}],
            InconsistentCutError,
            r"trainer/w is float32\[6, 2\] in trainer/0 and float32\[7, 2\] in trainer/1",
            id="two shapes",
        ),
        pytest.param(
            [{"w": rows(0, 3)}, {}, {"w": rows(3, 6, dtype=torch.int32)}],
            InconsistentCutError,
            r"trainer/w is float32\[6, 2\] in trainer/0 and int32\[6, 2\] in trainer/2",
            id="two dtypes",
        ),
        pytest.param(
            [{"w": rows(0, 6, replicas=(0, 1))}, {"w": rows(0, 6)}, {}],
            LayoutMismatchError,
            r"trainer/w at .* with replicas \[0, 1\] on rank 0, with no replicas on rank 1",
            id="replicas that one does not know of",
        ),
        pytest.param(
            [{"w": torch.zeros(4)}, {"w": torch.zeros(4)}, {}],
            LayoutMismatchError,
            r"trainer/w at .* on ranks \[0, 1\], absent on rank 2",
            id="a plain tensor that one lacks",
        ),
        pytest.param(
            [{"w": torch.zeros(4)}, {"w": torch.zeros(4)}, {"w": torch.zeros(4, dtype=torch.int16)}],
            LayoutMismatchError,
            r"trainer/w at .*: float32\[4\] .* on ranks \[0, 1\], int16\[4\] .* on rank 2",
            id="a plain tensor of two dtypes",
        ),
    ],
)
def test_ranks_that_contradict_each_other_commit_nothing_and_are_named(
    states: States, kind: type[CkptStoreError], told: str
) -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 3}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(3)]
        handles = [member.save(1, state) for member, state in zip(members, states, strict=True)]
        with pytest.raises(kind, match=told):
            handles[0].result(WAIT_S)
        for handle in handles[1:]:
            with pytest.raises(CkptStoreError):
                handle.result(WAIT_S)
        good = [{"w": rows(n, n + 2)} for n in (0, 2, 4)]
        handles = [member.save(2, state) for member, state in zip(members, good, strict=True)]
        assert [handle.result(WAIT_S).step for handle in handles] == [2, 2, 2]
        for member in members:
            member.close(WAIT_S)
    assert [info.step for info in ckptstore.open(url).checkpoints()] == [2]
