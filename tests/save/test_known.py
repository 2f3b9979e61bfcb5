"""A state that is only compared with the last one is flattened as though it had been walked anew."""

from __future__ import annotations

import ctypes
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ckptstore.digester import Digester
from ckptstore.errors import CkptStoreError
from ckptstore.held import ExpertParallel, FlatShard, Frozen, HeldBy, PerRank, Sharded
from ckptstore.image import make_images
from ckptstore.interop import torch_signature
from ckptstore.pieces import memory_of
from ckptstore.snapshot import CopyPlan, whole_leaves
from ckptstore.sources import places_of
from ckptstore.staging import Block
from ckptstore.state import FlatState, Known, Structure, flatten
from tests.save.states import Box, Made


@pytest.fixture(scope="module")
def distributed() -> Iterator[Callable[[torch.Tensor], Any]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def make(tensor: torch.Tensor) -> Any:
        placement = Shard(0) if tensor.dim() and tensor.numel() % 2 else Replicate()
        return distribute_tensor(tensor.resolve_conj().resolve_neg(), mesh, [placement])

    yield make
    dist.destroy_process_group()


def result(state: Any, known: Known | None) -> FlatState | tuple[type, str]:
    try:
        return flatten(state, role="trainer", rank=0, known=known)
    except (CkptStoreError, TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)


def check_equal(fast: Any, slow: Any) -> None:
    if isinstance(slow, tuple):
        assert fast == slow
        return
    assert isinstance(fast, FlatState), fast
    assert fast.structure == slow.structure
    assert json.dumps(fast.skeleton) == json.dumps(slow.skeleton)
    assert list(map(memory_of, fast.data)) == list(map(memory_of, slow.data))
    for place, leaf in zip(fast.places or (), slow.leaves, strict=fast.places is not None):
        if place != -1 and leaf.box.numel:
            data = leaf.data if isinstance(leaf.data, np.ndarray) else leaf.data.detach()
            whole = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data.contiguous()
            address = memory_of(whole)[0]
            assert ctypes.string_at(place, leaf.nbytes) == ctypes.string_at(address, leaf.nbytes)


def check_random_states(
    distributed: Callable[[torch.Tensor], Any], data: st.DataObject, changes: int
) -> None:
    made, known = Made(data.draw, distributed), Known()
    while isinstance(result(made.state, None), tuple):  # else most would be refused again and again
        made.state.popitem()
    earlier: list[tuple[FlatState, str]] = []
    for n in range(changes + 2):
        if n > 1:
            made.change()
        fast = result(made.state, known)
        check_equal(fast, result(made.state, None))
        assert all(json.dumps(flat.skeleton) == text for flat, text in earlier)
        if isinstance(fast, FlatState):
            earlier.append((fast, json.dumps(fast.skeleton)))


@pytest.mark.parametrize("by", ["torch's guard", "plain Python"])
def test_a_compared_state_is_flattened_as_a_walked_one(
    distributed: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "plain Python":
        monkeypatch.setattr(torch_signature, "_guard_works", lambda: False)
    assert torch_signature._guard_works() is (by == "torch's guard")
    check = partial(check_random_states, distributed)
    drawn = given(data=st.data(), changes=st.integers(1, 4))(lambda data, changes: check(data, changes))
    settings(max_examples=100 if by == "torch's guard" else 30, deadline=None)(drawn)()


# -- what must not be missed, and what must not cost a walk


def again(state: Any, change: Callable[[], object]) -> tuple[FlatState, FlatState]:
    """(before, after) a change, the second compared with a walk anew."""
    known = Known()
    before = flatten(state, role="trainer", rank=0, known=known)
    change()
    after = flatten(state, role="trainer", rank=0, known=known)
    check_equal(after, result(state, None))
    return before, after


def many() -> dict[str, Any]:
    tensors = [torch.arange(n + 1.0) for n in range(600)]
    tied = torch.ones(7)
    return {
        "model": {f"w{n}": each for n, each in enumerate(tensors)}
        | {"one": tied, "two": tied.detach(), "three": tied},
        "rng": torch.zeros(16, dtype=torch.uint8),
        "array": np.arange(4),
        "shard": Sharded(torch.ones(2, 3), global_shape=(4, 3), offset=(0, 0)),
        "flat": [FlatShard(torch.ones(8), global_shape=(3, 4), start=n) for n in (0, 4)][:1],
        "square": np.arange(4).reshape(2, 2),
        "held": HeldBy({"x": torch.ones(2)}, ranks=(0, 1)),
        "experts": ExpertParallel(
            {"experts": {0: {"w": torch.ones(1)}}}, "experts.{expert}", num_experts=2, rank=0, size=2
        ),
        "frozen": Frozen({"table": torch.ones(3)}),
        "own": PerRank({"cursor": torch.ones(1), "step": 3}),
        "object": Box({"lr": 0.1, "betas": (0.9, 0.95), "names": {"a": True, "b": True}, "seen": [1]}),
    }


def test_values_cost_no_walk_and_all_else_is_the_same_object() -> None:
    state = many()

    def change() -> None:
        state["object"].inner["seen"].append(2)
        state["object"].inner["lr"] = 0.2
        state["own"].value["step"] = 4
        state["model"]["w3"].add_(1)

    before, after = again(state, change)
    assert after.structure is before.structure and after.places is before.places
    told = dict(before.skeleton["d"]), dict(after.skeleton["d"])
    assert told[0]["model"] is told[1]["model"] and told[0]["object"] is not told[1]["object"]
    kept = [dict(each["object"]["o"]["d"]) for each in told]
    assert kept[0]["names"] is kept[1]["names"]
    assert (kept[0]["seen"], kept[1]["seen"]) == ({"l": [1]}, {"l": [1, 2]})


@pytest.mark.parametrize("move_all", [False, True])
def test_tensors_that_were_made_anew_cost_no_walk(move_all: bool) -> None:
    state = many()

    def change() -> None:
        state["rng"], state["array"] = state["rng"].clone(), state["array"].copy()
        if move_all:
            fresh = {name: each.clone() for name, each in state["model"].items()}
            state["model"] = fresh | {"two": fresh["one"].detach(), "three": fresh["one"]}

    old = dict(state["model"]), state["rng"], state["array"]  # alive, so that no address is used again
    before, after = again(state, change)
    assert old and after.structure is before.structure
    moved = {
        after.structure.specs[n].name
        for n, (was, now) in enumerate(zip(before.places or (), after.places or (), strict=True))
        if was != now
    }
    assert moved >= {"trainer/rng", "trainer/array"}
    assert len(moved) == (603 if move_all else 2)


def tie(state: dict[str, Any]) -> None:
    state["model"]["w6"] = state["model"]["one"]  # as many elements, but w6 was its own


def untie(state: dict[str, Any]) -> None:
    state["model"]["two"] = state["model"]["one"].clone()


def untie_the_same_object(state: dict[str, Any]) -> None:
    state["model"]["three"] = state["model"]["one"].clone()


def tie_to_what_moved(state: dict[str, Any]) -> None:
    state["model"]["w6"] = state["model"]["w6"].clone()
    state["model"]["one"] = state["model"]["w6"]


def reuse_an_address(state: dict[str, Any]) -> None:
    """Another tensor where an old one lay: as many bytes, another shape."""
    place = state["model"]["w5"].data_ptr()
    state["model"]["w5"].data = torch.empty(0)
    buffer = (ctypes.c_float * 6).from_address(place)  # the arena of malloc: still mapped
    state["model"]["w5"] = torch.frombuffer(buffer, dtype=torch.float32).view(2, 3)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "tie made": tie,
    "tie broken": untie,
    "tie of one object broken": untie_the_same_object,
    "tie made to what moved": tie_to_what_moved,
    "address used again": reuse_an_address,
    "dtype": lambda state: state["model"].update(w3=state["model"]["w3"].to(torch.int32)),
    "dtype in place": lambda state: setattr(
        state["model"]["w3"], "data", state["model"]["w3"].view(torch.int32)
    ),
    "smaller": lambda state: state["model"]["w3"].resize_(2),
    "set": lambda state: state["model"]["w3"].set_(torch.ones(4).view(2, 2)),
    "parameter": lambda state: state["model"].update(w3=torch.nn.Parameter(state["model"]["w3"])),
    "order": lambda state: state["model"].update(w3=state["model"].pop("w3")),
    "key": lambda state: state["model"].update(other=state["model"].pop("w599")),
    "array dtype": lambda state: state.update(array=state["array"].astype(np.int32)),
    "offset": lambda state: setattr(state["shard"], "offset", (1, 0)),
    "replicas": lambda state: setattr(state["shard"], "replicas", (0, 1)),
    "start": lambda state: setattr(state["flat"][0], "start", 2),
    "array turned": lambda state: state.update(square=state["square"].T),
    "holders": lambda state: setattr(state["held"], "ranks", (0, 2)),
    "experts": lambda state: setattr(state["experts"], "rank", 1),
    "per rank": lambda state: state.update(own=state["own"].value),
    "thawed": lambda state: state.update(frozen=state["frozen"].tree),
    "value to tensor": lambda state: state["object"].inner.update(lr=torch.ones(1)),
    "tensor to value": lambda state: state.update(rng=1),
    "key's type": lambda state: state["object"].inner["names"].update({1: True}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_a_structure_follows_from_is_seen(name: str) -> None:
    state = many()
    before, after = again(state, lambda: CHANGES[name](state))
    if name not in ("parameter", "key's type", "array turned"):
        assert (after.structure, after.skeleton) != (before.structure, before.skeleton)


@pytest.mark.parametrize(
    ("old", "new"), [(0.0, -0.0), (1, True), (1, 1.0), ("a", np.str_("b")), (float("nan"), 0.0), (None, 0)]
)
def test_values_that_are_equal_and_yet_not_the_same_are_encoded_anew(old: Any, new: Any) -> None:
    state = {"all": {"a": old, "b": 1}, "one": old, "list": [old]}

    def change() -> None:
        state.update(all={"a": new, "b": 1}, one=new, list=[new])

    known = Known()
    flatten(state, role="trainer", rank=0, known=known)
    change()
    check_equal(result(state, known), result(state, None))


@pytest.mark.parametrize("guard", [True, False])
def test_a_tie_of_tensors_without_elements_is_one_of_objects(
    monkeypatch: pytest.MonkeyPatch, guard: bool
) -> None:
    monkeypatch.setattr(torch_signature, "_guard_works", lambda: guard)
    empty = torch.ones(0, 3)
    state = {"a": empty, "b": empty, "c": torch.ones(0, 3)}
    before, after = again(state, lambda: state.update(b=torch.ones(0, 3)))
    assert (len(before.data), len(after.data)) == (2, 3)
    before, after = again(state, lambda: state.update(a=state["c"]))
    assert (len(before.data), len(after.data)) == (3, 2)


def test_shards_that_say_the_same_in_other_ways_cost_no_walk() -> None:
    bucket = torch.ones(8)
    state: dict[str, Any] = {"a": FlatShard(bucket, global_shape=(80, 40), start=300, replicas=(0, 1))}
    for shape, start, replicas in (([80, 40], 300, [1, 0]), ((80, np.int64(40)), np.int64(300), (0, 1, 1))):
        other = FlatShard(bucket, global_shape=shape, start=start, replicas=replicas)  # type: ignore[arg-type]  # wrong on purpose, or no tuple
        before, after = again(state, partial(state.update, a=other))
        assert after.structure is before.structure
    known = Known()
    flatten({"a": FlatShard(bucket, global_shape=(8, 4), start=0)}, role="trainer", rank=0, known=known)
    wrong = {"a": FlatShard(bucket, global_shape=(8.0, 4), start=0)}  # type: ignore[arg-type]  # wrong on purpose, or no tuple
    check_equal(result(wrong, known), result(wrong, None))


def test_tensors_without_elements_that_are_made_anew_cost_no_walk() -> None:
    state = {"a": torch.ones(0, 3), "b": torch.ones(0, 3)}
    before, after = again(state, lambda: state.update(a=state["a"].detach(), b=state["b"].detach()))
    assert after.structure is before.structure


def test_a_freed_storage_is_never_at_an_address() -> None:
    state = {"a": torch.ones(4), "b": torch.ones(4)}
    known = Known()
    flatten(state, role="trainer", rank=0, known=known)
    state["a"].untyped_storage().resize_(0)
    assert flatten(state, role="trainer", rank=0, known=known).places is None


@pytest.mark.parametrize("comparable", [True, False])
def test_no_tensor_is_kept_alive(comparable: bool) -> None:
    """Nor in a cycle, which would live until it is collected."""
    state, known = many(), Known()
    if not comparable:
        state["expanded"] = [state["shard"], type("Other", (torch.Tensor,), {})(torch.ones(2))]
    tensors = [*state["model"].values(), state["shard"].tensor, state["flat"][0].tensor, state["array"]]
    held = [weakref.ref(each) for each in tensors]
    storages = [weakref.ref(each.untyped_storage()) for each in tensors[:-1]]
    gc.collect()
    gc.disable()
    try:
        for last in (known, known, None):
            flatten(state, role="trainer", rank=0, known=last)
        state.clear()
        tensors.clear()
        assert not [each for each in (*held, *storages) if each() is not None]
    finally:
        gc.enable()
    assert (known._last is not None) is comparable


class Failing(Box):
    def state_dict(self) -> Any:
        self.asked += 1
        raise ValueError(f"asked {self.asked} times")


def test_an_object_is_asked_once_also_where_its_state_is_given_up() -> None:
    state = {"one": Box({"a": 1}), "two": Box({"a": torch.ones(1)}), "end": torch.ones(3)}
    known = Known()
    flatten(state, role="trainer", rank=0, known=known)
    state["two"].inner = {"b": torch.ones(1)}
    flatten(state, role="trainer", rank=0, known=known)
    state["end"] = torch.ones(4)
    flatten(state, role="trainer", rank=0, known=known)
    state["one"] = failing = Failing(None)
    with pytest.raises(ValueError, match="asked 1 times"):
        flatten(state, role="trainer", rank=0, known=known)
    assert (state["two"].asked, failing.asked) == (3, 1)


def test_another_member_is_not_known() -> None:
    state, known = {"a": PerRank(torch.ones(1))}, Known()
    for rank in (0, 1):
        found = flatten(state, role="trainer", rank=rank, known=known)
        assert found.structure.specs[0].name == f"trainer/a#{rank}"


def test_a_structure_gives_the_same_shards_and_compares_by_identity_first() -> None:
    state, known = {"a": torch.ones(3)}, Known()
    one = flatten(state, role="trainer", rank=0, known=known).structure
    two = flatten({"a": torch.ones(3)}, role="trainer", rank=0).structure
    assert (
        one == two
        and hash(one) == hash(two)
        and one.shards(2) is one.shards(2)
        and one.shards(2) == two.shards(2)
    )
    state["a"] = torch.ones(4)
    other = flatten(state, role="trainer", rank=0, known=known).structure
    assert other != one


# -- what is kept by place


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_digests_by_place_are_those_that_are_taken_anew(data: st.DataObject) -> None:
    made, known, digester = Made(data.draw, lambda tensor: tensor), Known(), Digester(0)
    while isinstance(result(made.state, None), tuple):
        made.state.popitem()
    for n in range(4):
        if n > 1:
            made.change()
        flat = result(made.state, known)
        if isinstance(flat, FlatState):
            digester.forget()  # else frozen ones are as they were, also where they are not
            assert digester.take(flat, 2) == Digester(0).take(flatten(made.state, role="trainer", rank=0), 2)


def test_a_copy_by_place_is_one_of_where_the_tensors_lie_now() -> None:
    """Three blocks and a half; in each round other tensors are made anew, and all get new values."""
    state: dict[str, torch.Tensor] = {f"large{n}": torch.zeros(9 << 20, dtype=torch.uint8) for n in range(6)}
    state |= {f"small{n}": torch.zeros(1000 + n, dtype=torch.uint8) for n in range(40)}
    known, plan = Known(), None
    for moved in ([], [], ["small3"], ["large0", "small3", "small39"], list(state)):
        for name in moved:
            state[name] = state[name].clone()
        if len(moved) == 1:
            state[moved[0]] = torch.zeros(2006, dtype=torch.uint8)[::2]  # no run of memory any more
        for each in state.values():
            each.random_()
        flat = flatten(state, role="trainer", rank=0, known=known)
        if plan is None or plan[0] is not flat.structure:
            plan = flat.structure, copy_plan(flat.structure)
        assert flat.places is not None
        plan[1].sources.look(flat.places)
        fresh = copy_plan(flat.structure)
        fresh.sources.look(places_of(flat.data))
        for number, copies in enumerate(plan[1].blocks):
            one, two = Block(np.zeros(copies.size, np.uint8)), Block(np.zeros(copies.size, np.uint8))
            plan[1].sources.copy(number, flat.data, one)
            fresh.sources.copy(number, flat.data, two)
            assert one.memory.any() and np.array_equal(one.memory, two.memory)


def copy_plan(structure: Structure) -> CopyPlan:
    return CopyPlan.of(structure, whole_leaves(structure), make_images(structure.specs, structure.boxes))


@pytest.mark.parametrize(("old", "new"), [(1, True), (1, 1.0), (0, False), ("a", np.str_("a"))])
@pytest.mark.parametrize("inner", [3, torch.ones(2)])
def test_a_key_that_is_equal_and_yet_not_the_same_is_told_anew(old: Any, new: Any, inner: Any) -> None:
    known = Known()
    flatten({"a": {old: inner}}, role="trainer", rank=0, known=known)
    state = {"a": {new: inner}}
    check_equal(result(state, known), result(state, None))


def test_a_placement_that_cannot_be_saved_is_refused_also_where_the_last_one_could(
    distributed: Callable[[torch.Tensor], Any],
) -> None:
    whole, known = distributed(torch.ones(4)), Known()
    flatten({"a": whole}, role="trainer", rank=0, known=known)
    state = {"a": DTensor.from_local(torch.ones(4), whole.device_mesh, [Partial()])}
    refused = result(state, known)
    assert isinstance(refused, tuple) and "sums" in refused[1]
    check_equal(refused, result(state, None))
