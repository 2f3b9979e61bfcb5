"""What cannot be saved or restored is refused by its path, and then nothing has changed anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import (
    Checkpointer,
    Frozen,
    InvalidInputError,
    LayoutMismatchError,
    Ledger,
    MissingTensorError,
    PerRank,
    Sharded,
)
from tests.save.runs import WAIT_S, bits, new_url, restore, save, store_of


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class Pair(NamedTuple):
    a: int
    b: int


class Endless:
    def state_dict(self) -> dict[str, Any]:
        return {"again": self}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Wrapping(torch.Tensor):
    """A tensor whose bytes are another tensor's."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Wrapping(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


UNSAVABLE: dict[str, Callable[[], Any]] = {
    "set": lambda: {1, 2},
    "lambda": lambda: lambda: 1,
    "object": object,
    "class": lambda: nn.Linear,
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "csr tensor": lambda: torch.eye(3).to_sparse_csr(),
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "jagged tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "wrapping tensor": lambda: Wrapping(torch.ones(2)),
    "lazy parameter": nn.parameter.UninitializedParameter,
    "shard outside": lambda: Sharded(torch.ones(3, 2), global_shape=(4, 2), offset=(2, 0)),
    "shard of other rank": lambda: Sharded(torch.ones(3), global_shape=(4, 2), offset=(0, 0)),
    "negative offset": lambda: Sharded(torch.ones(3), global_shape=(4,), offset=(-1,)),
    "fractional offset": lambda: Sharded(torch.ones(3), global_shape=(4,), offset=(0.5,)),  # type: ignore[arg-type]  # wrong on purpose
    "shard of array": lambda: Sharded(np.ones(3), global_shape=(4,), offset=(0,)),  # type: ignore[arg-type]  # wrong on purpose
    "shard per rank": lambda: PerRank(Sharded.dim0(torch.ones(1), start=0, size=1)),
    "unlike shards": lambda: [
        Sharded(torch.ones(2), global_shape=(4,), offset=(0,)),
        Sharded(torch.ones(2), global_shape=(5,), offset=(2,)),
    ],
    "per rank twice": lambda: PerRank({"a": PerRank(1)}),
    "recursive list": recursive,
    "endless object": Endless,
    "object array": lambda: np.array([None]),
    "text array": lambda: np.array(["a"]),
    "structured array": lambda: np.zeros(2, [("a", "i4")]),
    "swapped array": lambda: np.arange(3, dtype=">i4"),
    "masked array": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "long double": lambda: np.longdouble(1),
    "date": lambda: np.datetime64("2026-01-01"),
    "named tuple": lambda: Pair(1, 2),
    "float key": lambda: {1.5: 0},
    "bool key": lambda: {True: 0},
    "none key": lambda: {None: 0},
    "surrogate key": lambda: {"\ud800": 0},
    "huge key": lambda: {10**5000: 0},
    "int and text key": lambda: {1: torch.ones(1), "1": torch.zeros(1)},
    "dotted key": lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
}


@pytest.mark.parametrize("kind", UNSAVABLE)
def test_what_cannot_be_saved_is_refused_by_its_path_and_nothing_is_stored(kind: str) -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        good = {"outer": [{"w": torch.ones(2)}]}
        ckpt.save(1, good).result(WAIT_S)
        before = {info.key for info in store_of(url).list("") if not info.key.startswith("alive/")}
        with pytest.raises(InvalidInputError, match=r"outer\.0"):
            ckpt.save(2, {"outer": [{"w": torch.ones(2), "bad": UNSAVABLE[kind]()}]})
        assert {i.key for i in store_of(url).list("") if not i.key.startswith("alive/")} == before
        ckpt.save(2, good).result(WAIT_S)
    assert [info.step for info in ckptstore.open(url).checkpoints()] == [1, 2]


def test_states_that_are_refused_as_a_whole() -> None:
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        for state, told in (
            ([torch.ones(1)], "dict of names"),
            ({"": {"w": torch.ones(1)}, "w": torch.ones(1)}, "both named w"),
            ({"w": torch.ones(0), "": {"": {"w": torch.ones(0)}}}, "both named w"),
        ):
            with pytest.raises(InvalidInputError, match=told):
                ckpt.save(1, state)  # type: ignore[arg-type]  # wrong on purpose


def test_ranks_that_hold_unlike_tensors_are_told_the_name() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        handles = [member.save(1, {"a": {"w": torch.ones(2 + n)}}) for n, member in enumerate(members)]
        for handle in handles:
            with pytest.raises(LayoutMismatchError, match=r"trainer/a\.w"):
                handle.result(WAIT_S)
        handles = [member.save(2, {"a": {"w": torch.ones(2)}}) for member in members]
        for handle in handles:
            handle.result(WAIT_S)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(1, 1.0), (True, 1), ("a", "b"), ([1], [1, 2]), (b"a", "a"), (0.0, -0.0), (np.int8(1), np.int16(1))],
)
def test_values_that_differ_between_ranks_are_refused_by_path(mine: Any, theirs: Any) -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        states = [{"a": {"lr": value}, "w": torch.ones(2)} for value in (mine, theirs)]
        handles = [member.save(1, state) for member, state in zip(members, states, strict=True)]
        for handle in handles:
            with pytest.raises(ckptstore.InconsistentCutError, match=r"a\.lr"):
                handle.result(WAIT_S)
    assert ckptstore.open(url).checkpoints() == []


@pytest.mark.parametrize("whole", [False, True], ids=["gap", "overlap"])
def test_boxes_that_do_not_tile_their_tensor_are_refused_by_name(whole: bool) -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        rows = 3 if whole else 1
        handles = [
            member.save(1, {"w": Sharded.dim0(torch.ones(rows, 2), start=n * (4 - rows), size=4)})
            for n, member in enumerate(members)
        ]
        for handle in handles:
            with pytest.raises(ckptstore.InconsistentCutError, match="trainer/w"):
                handle.result(WAIT_S)


# -- restore


def saved_state() -> dict[str, Any]:
    return {
        "w": torch.arange(4.0),
        "v": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "number": 3,
        "array": np.arange(3.0),
        "list": [torch.ones(2), torch.zeros(1)],
        "per": PerRank({"t": torch.ones(2), "n": 1}),
        "plain": 5,
        "ledger": Ledger(3),
        "nested": {"a": {"b": torch.ones(1)}},
        "pair": (torch.ones(1), 2),
    }


def wrong_target() -> tuple[dict[str, Any], list[str], list[str]]:
    """A target, what it asks for that is missing, and what in it is of another kind."""
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    target = {
        "w": torch.full((4,), 7.0),
        "v": torch.full((3, 2), 7, dtype=torch.int32),
        "half": torch.full((2,), 7.0, dtype=torch.float16),
        "number": torch.tensor(7),
        "array": read_only,
        "list": [torch.ones(2)],
        "per": {"t": torch.full((2,), 7.0), "n": 7},
        "plain": PerRank(7),
        "ledger": 7,
        "nested": {"a": 7, "x": torch.full((2,), 7.0), "y": {"deep": [torch.ones(1)], "z": 1}},
        "pair": [torch.ones(1), 7],
        "gone": Frozen({"a": torch.full((2,), 7.0), "b": PerRank(torch.ones(1))}),
        "linear": nn.Linear(2, 2),
    }
    missing = ["nested.x", "nested.y.deep", "nested.y.z", "gone.a", "gone.b", "linear.weight", "linear.bias"]
    return target, missing, ["v", "half", "number", "array", "list", "per", "plain", "nested.a", "pair"]


def test_all_that_does_not_fit_is_listed_at_once_and_no_target_changes() -> None:
    url = new_url()
    save(url, saved_state())
    target, missing, mismatched = wrong_target()
    del target["linear"]
    before = bits({key: target[key].tree if key == "gone" else target[key] for key in target})
    with pytest.raises(MissingTensorError) as caught:
        restore(url, target)
    assert bits({key: target[key].tree if key == "gone" else target[key] for key in target}) == before
    assert set(caught.value.missing) == {name for name in missing if not name.startswith("linear")}
    for name in mismatched:
        assert any(text.split(" ")[0].split("/")[-1] == name for text in caught.value.mismatched), name
    assert all(name in str(caught.value) for name in [*missing[:5], *mismatched])
    info = ckptstore.open(url).latest()
    assert info is not None and info.status == "ok"


@pytest.mark.parametrize("name", ["v", "half", "number", "array", "list", "per", "plain", "nested.a", "pair"])
def test_each_mismatch_alone_is_refused_also_when_not_strict(name: str) -> None:
    url = new_url()
    save(url, saved_state())
    key, _, inner = name.partition(".")
    wrong = wrong_target()[0][key]
    target: dict[str, Any] = {"w": torch.zeros(4), key: {inner: wrong[inner]} if inner else wrong}
    before = bits(target)
    for strict in (True, False):
        with pytest.raises(LayoutMismatchError, match=name):
            restore(url, target, strict=strict)
        assert bits(target) == before


def test_targets_that_share_memory_among_their_elements_are_refused() -> None:
    url = new_url()
    save(url, {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(2)})
    target = {"w": torch.zeros(1, 3).expand(2, 3), "v": torch.zeros(2)}
    with pytest.raises(LayoutMismatchError, match="w"):
        restore(url, target)
    assert target["v"].tolist() == [0, 0]


def test_not_strict_skips_what_is_missing_and_lists_it() -> None:
    url = new_url()
    save(url, saved_state())
    model = nn.Linear(2, 2)
    target = {"w": torch.zeros(4), "new": {"x": torch.full((2,), 7.0), "n": 7}, "model": model, "number": 0}
    before = bits([target["new"], dict(model.state_dict())])
    (member,) = restore(url, target, strict=False)
    report = member.last_restore
    assert report is not None
    assert set(report.skipped) == {"new.x", "new.n", "model.weight", "model.bias"}
    assert bits([target["new"], dict(model.state_dict())]) == before
    assert target["w"].tolist() == [0, 1, 2, 3] and target["number"] == 3
    assert {"v", "half", "list.0", "array"} <= set(report.unasked)


def test_per_rank_values_are_given_back_to_equal_counts_only() -> None:
    url = new_url()
    save(
        url,
        *(
            {"w": torch.ones(2), "r": PerRank({"n": rank, "t": ids})}
            for rank, ids in enumerate((torch.zeros(2), torch.ones(3)))
        ),
    )
    same = [{"w": torch.zeros(2), "r": PerRank({"n": -1, "t": torch.zeros(2 + rank)})} for rank in range(2)]
    restore(url, *same)
    assert [target["r"].value["n"] for target in same] == [0, 1]
    assert same[1]["r"].value["t"].tolist() == [1, 1, 1]
    other = [{"w": torch.zeros(2), "r": PerRank({"n": -1, "t": torch.zeros(1)})} for _ in range(3)]
    members = restore(url, *other)
    for member, target in zip(members, other, strict=True):
        assert member.last_restore is not None
        assert member.last_restore.per_rank_not_given_back == ("r",)
        assert target["r"].value["n"] == -1 and target["w"].tolist() == [1, 1]


def test_what_only_another_rank_saved_is_found_also_in_lists() -> None:
    """Pipeline stages: each rank holds other layers, at other places of the same list."""
    url = new_url()
    states: list[dict[str, Any]] = [
        {"layers": [{"w": Sharded.dim0(torch.ones(2), start=0, size=2)}, {}], "head": {}},
        {"layers": [{}, {"w": Sharded.dim0(torch.ones(3), start=0, size=3)}, {}],
         "head": {"w": Sharded.dim0(torch.ones(4), start=0, size=4)}},
    ]  # fmt: skip
    save(url, *states)
    read = ckptstore.open(url).read()
    assert [layer["w"].tolist() if layer else None for layer in read["layers"]] == [[1, 1], [1, 1, 1], None]
    target = {"layers": [{"w": torch.zeros(2)}, {"w": torch.zeros(3)}, {}], "head": {"w": torch.zeros(4)}}
    restore(url, target)
    assert target["layers"][1]["w"].sum() == 3 and target["head"]["w"].sum() == 4
