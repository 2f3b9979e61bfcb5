"""Ranks that have different kinds of things under one name are refused: no reader could be given both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import ExpertParallel, Frozen, HeldBy, InconsistentCutError, PerRank, Sharded
from tests.save.runs import new_url, restore, save


def rows() -> Sharded:
    return Sharded(torch.arange(3.0), (3,), (0,))


PAIRS: dict[str, tuple[Any, Any]] = {
    "dict, value": ({"b": 1}, 5),
    "dict, list": ({"b": 1}, [1]),
    "empty dict, value": ({}, 5),
    "dict with tensors, value": ({"b": rows()}, 5),
    "tensor, value": (rows(), 5),
    "tensor, None": (rows(), None),
    "tensor, no boxes": ([rows()], []),
    "PerRank, value": (PerRank(1), 5),
    "PerRank, tensor": (PerRank(torch.zeros(1)), rows()),
    "PerRank, dict": (PerRank(1), {"b": 5}),
    "PerRank, dict with tensors": (PerRank({"b": torch.zeros(1)}), {"b": rows()}),
    "list, tuple": ([rows(), 1], (1, 1)),
    "list, value": ([HeldBy(torch.ones(2), [0])], "text"),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kinds", PAIRS)
def test_other_kinds_under_one_name_are_refused_by_it(kinds: str, swapped: bool) -> None:
    first, second = PAIRS[kinds]
    if swapped and kinds == "list, value":
        first = [HeldBy(torch.ones(2), [1])]
    states = [{"x": {"a": value}} for value in ((second, first) if swapped else (first, second))]
    with pytest.raises(InconsistentCutError, match=r"x\.a is a.* on trainer/0 and a.* on trainer/1") as error:
        save(new_url(), *states)
    assert error.value.path == "x.a"


def test_what_ranks_have_beside_each_other_is_fine() -> None:
    url = new_url()
    states = [
        {
            "a": {},
            "ab": 1,
            "ab.c": 7,
            "ab.w": torch.ones(1),
            "a.b": 2,
            "": {"": 1},
            "a\x1fb": 1,
            "a\x1f": {"b": 1, 1: 1, "1": {}, "\x1e1": 1},
            "f": Frozen({"w": torch.ones(1)}),
            "p": PerRank({"w": torch.ones(1) * n}),
        }
        for n in range(2)
    ]
    states[1] |= {
        "a": {"c": 3},
        "s": rows(),
        "e": ExpertParallel({"1": {"n": 1}}, "x.{expert}", 0, rank=0, size=1),
    }
    save(url, *states)
    read = ckptstore.open(url).read()
    assert read["a"] == {"c": 3} and read["ab"] == 1 and read["a.b"] == 2 and read["ab.c"] == 7
    assert read["s"].tolist() == [0, 1, 2]


def test_values_of_some_ranks_stand_in_the_places_of_those_ranks() -> None:
    url = new_url()
    save(url, {"s": 1}, {"s": 1, "in": {"r": PerRank(5)}}, {"s": 1, "in": {"r": PerRank(None)}}, {"s": 1})
    assert ckptstore.open(url).read()["in"]["r"].value == [None, 5, None, None]
    targets: list[dict[str, Any]] = [
        {"s": 0} if n in (0, 3) else {"s": 0, "in": {"r": PerRank(7)}} for n in range(4)
    ]
    restore(url, *targets)
    assert targets[1]["in"]["r"].value == 5 and targets[2]["in"]["r"].value is None
