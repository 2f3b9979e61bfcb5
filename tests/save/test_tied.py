"""Tied weights are stored once, and come back under every name, tied or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import FlatShard, LayoutMismatchError, PerRank, Sharded
from tests.save.runs import ids, new_url, restore, save

KINDS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "plain": lambda tensor, rank: tensor,
    "numpy": lambda tensor, rank: tensor.numpy(),
    "sharded": lambda tensor, rank: Sharded.dim0(tensor[3 * rank : 3 * rank + 3], start=3 * rank, size=6),
    "flat": lambda tensor, rank: FlatShard(tensor.view(-1)[11 * rank : 11 + 13 * rank], (6, 4), 11 * rank),
}


def values(kind: str, state: dict[str, Any], rank: int) -> torch.Tensor:
    value = state["tensor"]
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_under_two_names_is_stored_once(kind: str) -> None:
    weight, wrap = ids((6, 4)), KINDS[kind]
    states = []
    for rank in range(2):
        again = weight.view(6, 4)  # another object that shows the same memory
        states.append(
            {"a": wrap(weight, rank), "m": {"b": wrap(again, rank)}, "c": wrap(weight.clone(), rank)}
        )
    url = new_url()
    assert save(url, *states).nbytes == 2 * 6 * 4 * 8  # a and c
    read = ckptstore.open(url).read()
    assert read["m"]["b"] is read["a"] and np.array_equal(read["a"], weight) and read["c"] is not read["a"]

    tied, apart, other = (torch.zeros_like(weight) for _ in range(3))
    targets = [{"a": wrap(tied, rank), "m": {"b": wrap(tied, rank)}} for rank in range(2)]
    restore(url, *targets)
    assert torch.equal(tied, weight)
    restore(
        url,
        {"a": apart, "m": {"b": other}}
        if kind != "numpy"
        else {"a": apart.numpy(), "m": {"b": other.numpy()}},
    )
    assert torch.equal(apart, weight) and torch.equal(other, weight)
    alone = torch.zeros_like(weight)
    (member,) = restore(url, {"m": {"b": alone}})
    assert torch.equal(alone, weight)
    assert member.last_restore is not None and member.last_restore.unasked == ("a", "c")


def test_tied_targets_need_equal_values() -> None:
    url = new_url()
    save(url, {"a": ids((6, 4)), "b": ids((6, 4)), "c": ids((6, 4)) + 1})
    tied = torch.full((6, 4), -1)
    with pytest.raises(LayoutMismatchError, match="trainer/a and trainer/c are one tensor"):
        restore(url, {"a": tied, "c": tied})
    assert (tied == -1).all()
    restore(url, {"a": tied, "b": tied})
    assert torch.equal(tied, ids((6, 4)))


def test_equal_values_that_were_cut_differently_are_equal() -> None:
    url = new_url()
    whole = ids((6, 4))
    save(
        url,
        *(
            {"a": whole, "b": Sharded.dim0(whole[3 * r : 3 * r + 3].clone(), start=3 * r, size=6)}
            for r in range(2)
        ),
    )
    tied = torch.zeros_like(whole)
    restore(url, {"a": tied, "b": tied})
    assert torch.equal(tied, whole)


def test_empty_slices_of_one_bucket_are_not_tied() -> None:
    """They lie at one place of one memory, and are of different tensors."""
    url = new_url()
    bucket = ids((8,))
    states: list[dict[str, Any]] = [
        {"a": FlatShard(bucket[:4], (4,), 0), "b": FlatShard(bucket[4:], (4,), 0)},
        {"a": FlatShard(bucket[:0], (4,), 4), "b": FlatShard(bucket[:0], (4,), 4)},
    ]
    save(url, *states)
    first, second = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    restore(url, {}, {"a": first, "b": second})  # by the part of the rank that had nothing
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [4, 5, 6, 7]


def test_tied_modules_and_values_of_one_rank() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    def make() -> tuple[Tied, dict[str, Any]]:
        model = Tied()
        tensor = torch.rand(2)
        return model, {
            "all": ckptstore.torch_state(model, torch.optim.AdamW(model.parameters())),
            "rng": PerRank({"x": tensor, "y": tensor}),
        }

    model, state = make()
    url = new_url()
    info = save(url, state)
    assert info.nbytes == 3 * 15 * 4 + 4 + 8  # the weight, two moments, a step, what is this rank's
    other, target = make()
    restore(url, target)
    assert torch.equal(other.head.weight, model.embed.weight) and other.head.weight is other.embed.weight
    assert torch.equal(target["rng"].value["y"], state["rng"].value["x"])
