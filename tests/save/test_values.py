"""Every kind of leaf comes back as it was, bit by bit and type by type."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckptstore
from ckptstore import Frozen, Ledger, PerRank, Sharded
from ckptstore.tensor import DTYPES
from tests.save.runs import bits, new_url, restore, save, save_steps, tensor_bytes

TORCH_DTYPES = sorted(name for name in DTYPES if hasattr(torch, name))
NUMPY_DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def scrambled(tensor: torch.Tensor) -> torch.Tensor:
    """A target of the same dtype, shape and strides with every bit flipped."""
    out = copy.deepcopy(tensor.detach())
    if out.numel():
        out.untyped_storage().copy_(
            torch.tensor(
                [255 - b for b in out.untyped_storage().tolist()], dtype=torch.uint8
            ).untyped_storage()
        )
    return out


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern of the dtype (bool: 0 and 1)."""
    size = DTYPES[dtype]
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, (*shape, size), np.uint8)
    if dtype == "bool":
        return torch.from_numpy(numbers.reshape(shape)).bool()
    data = torch.from_numpy(numbers.reshape(-1))
    if not numbers.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return data.view(getattr(torch, dtype)).view(shape)


# -- values

finite = st.floats(allow_nan=False, allow_infinity=False)
any_text = st.text(st.characters(exclude_categories=()))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    any_text,
    st.binary(),
)
numpy_dtypes = st.sampled_from(NUMPY_DTYPES)


@st.composite
def arrays(draw: st.DrawFn, max_ndim: int = 3) -> np.ndarray[Any, Any]:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=max_ndim)))
    dtype = np.dtype(draw(numpy_dtypes))
    seed = draw(st.integers(0, 9))
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    value = data.view(dtype).reshape(shape) if data.size else np.zeros(shape, dtype)
    return value.T if draw(st.booleans()) else value


leaves = st.one_of(
    scalars,
    arrays(),
    arrays(max_ndim=0).map(lambda a: a[()]),
    st.builds(
        lambda dtype, shape, seed: random_tensor(dtype, tuple(shape), seed),
        st.sampled_from(TORCH_DTYPES),
        st.lists(st.integers(0, 3), max_size=3),
        st.integers(0, 9),
    ),
)
keys = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), st.integers(-(2**62), 2**62))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def paths(value: Any, path: str = "") -> list[str]:
    """Dotted names of the tensors, to leave out states whose names collide."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [path]
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return []
    return [p for key, item in items for p in paths(item, f"{path}.{key}" if path else str(key))]


# Eight states an example, because opening a run costs more than a step of it.
@settings(max_examples=25)
@given(states=st.lists(st.dictionaries(keys, trees, max_size=4), min_size=1, max_size=8))
def test_any_nested_state_is_read_back_bit_by_bit(states: list[dict[Any, Any]]) -> None:
    states = [state for state in states if len(set(paths(state))) == len(paths(state))]
    if not states:
        return
    url = new_url()
    save_steps(url, {step: [state] for step, state in enumerate(states)})
    run = ckptstore.open(url)
    for step, state in enumerate(states):
        assert bits(run.read(step)) == bits(state)


def blank(value: Any) -> Any:
    """A target that asks for `value`: other bits in its tensors, other values in its containers."""
    if isinstance(value, torch.Tensor):
        return scrambled(value)
    if isinstance(value, np.ndarray):
        return np.frombuffer(bytes(255 - b for b in value.tobytes()), value.dtype).reshape(value.shape).copy()
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank(item) for item in value)
    return "another value"


@settings(max_examples=60)
@given(state=st.dictionaries(keys, trees, max_size=5))
def test_any_nested_state_is_restored_in_place_bit_by_bit(state: dict[Any, Any]) -> None:
    if len(set(paths(state))) != len(paths(state)):
        return
    url = new_url()
    save(url, state)
    target = blank(state)
    before = {id(leaf) for leaf in tensors(target)}
    restore(url, target)
    assert bits(target) == bits(state)
    assert {id(leaf) for leaf in tensors(target)} == before  # in place


def tensors(value: Any) -> list[Any]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in tensors(item)] if isinstance(value, (list, tuple)) else []


VALUES: list[Any] = [
    0, 1, True, False, 1.0, 0.0, -0.0, float("inf"), -float("inf"), 5e-324, 2**63, -(2**64), 10**5000,
    -(10**5000), "", "a.b@c#d%e/f __metadata__ ü漢🙂", "\ud800", "\ude00\ud83d", "\ud83d\ude00", "\0",
    b"", b"\0\xff", None, 1e308 * 10 - 1e308 * 10, complex(-0.0, float("inf")), [], {}, (), [[]], ((),),
    {"": {}}, {1: "int", "1": "text"},
    np.float32("nan"), np.float16(-0.0), np.int8(-128), np.uint64(2**64 - 1), np.bool_(True),
    np.complex64(1 - 2j), np.float64(0.1),
]  # fmt: skip


def test_values_keep_their_type_and_every_bit() -> None:
    url = new_url()
    state = {"v": dict(enumerate(VALUES)), "nested": [dict(enumerate(VALUES))]}
    save(url, state)
    target: dict[str, Any] = {"v": dict.fromkeys(range(len(VALUES)), "other"), "nested": [{}]}
    restore(url, target)
    read = ckptstore.open(url).read()
    for n, value in enumerate(VALUES):
        for found in (target["v"][n], target["nested"][0][n], read["v"][n], read["nested"][0][n]):
            assert bits(found) == bits(value), n


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_torch_dtype_in_every_form(dtype: str) -> None:
    base = random_tensor(dtype, (4, 6))
    state = {
        "whole": base,
        "scalar": random_tensor(dtype, ()),
        "empty": random_tensor(dtype, (0, 3)),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "shifted": base[1:, 1:],
        "row": base[2],
        "permuted": random_tensor(dtype, (2, 3, 4)).permute(2, 0, 1),
    }
    url = new_url()
    save(url, {**state, "expanded": base[:1].expand(3, 6)})
    target = {key: scrambled(value) for key, value in state.items()} | {
        "expanded": random_tensor(dtype, (3, 6), 9)
    }
    restore(url, target)
    for key, value in state.items():
        assert tensor_bytes(target[key]) == tensor_bytes(value), key
    assert tensor_bytes(target["expanded"]) == tensor_bytes(base[:1].expand(3, 6))
    read = ckptstore.open(url).read()
    assert all(bits(read[key]) == bits(value) for key, value in state.items())


@pytest.mark.parametrize("dtype", ["complex32", "complex64", "complex128"])
def test_conjugate_and_negative_views_are_saved_as_the_values_they_show(dtype: str) -> None:
    base = torch.randn(3, 4, dtype=torch.complex64).to(getattr(torch, dtype))
    state = {"conj": base.conj(), "conj.t": base.conj().t(), "neg": base.conj().imag, "real": base.real}
    url = new_url()
    save(url, state)
    read = ckptstore.open(url).read()
    assert bits(read) == bits({key: value.resolve_conj().resolve_neg() for key, value in state.items()})
    back = torch.zeros(3, 4, dtype=base.dtype)
    restore(url, {**read, "conj": back.conj()})
    assert tensor_bytes(back) == tensor_bytes(base)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_numpy_dtype_in_every_form(dtype: str) -> None:
    raw = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 480, np.uint8)
    base = raw.view(dtype)[:24].reshape(4, 6)
    state = {
        "whole": base,
        "scalar": np.array(base[1, 1]),
        "empty": base[:0],
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::-1],
        "broadcast": np.broadcast_to(base[0], (3, 6)),
        "number": base[0, 0],
    }
    url = new_url()
    save(url, state)
    assert bits(ckptstore.open(url).read()) == bits(state)
    target = {key: np.zeros_like(value) for key, value in state.items() if key != "broadcast"}
    target["broadcast"], target["number"] = np.zeros((6, 3), dtype).T, None
    restore(url, target)
    assert bits(dict(sorted(target.items()))) == bits(dict(sorted(state.items())))


def test_generators_go_on_where_they_were_saved() -> None:
    numpy_rng, legacy = np.random.default_rng(3), np.random.RandomState(4)
    mersenne = np.random.Generator(np.random.MT19937(5))
    python = random.Random(6)
    generator = torch.Generator().manual_seed(7)

    def states() -> dict[str, Any]:
        return {
            "torch": PerRank(generator.get_state()),
            "python": PerRank(python.getstate()),
            "numpy": PerRank(numpy_rng.bit_generator.state),
            "mersenne": mersenne.bit_generator.state,
            "legacy": PerRank(legacy.get_state()),
        }

    def draw() -> list[Any]:
        return [
            torch.rand(3, generator=generator).tolist(),
            [python.random(), python.gauss(0, 1)],
            numpy_rng.normal(size=3).tolist(),
            mersenne.normal(size=3).tolist(),
            legacy.normal(size=3).tolist(),
        ]

    draw()
    url = new_url()
    save(url, states())
    expected = draw()
    draw()
    target = states()
    restore(url, target)
    generator.set_state(target["torch"].value)
    python.setstate(target["python"].value)
    numpy_rng.bit_generator.state = target["numpy"].value
    mersenne.bit_generator.state = target["mersenne"]
    legacy.set_state(target["legacy"].value)
    assert draw() == expected


def test_parameters_modules_and_schedulers_are_restored_through_their_state() -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).requires_grad_(False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)

    def train(parts: tuple[nn.Module, torch.optim.Optimizer, Any], steps: range) -> None:
        model, optimizer, scheduler = parts
        for step in steps:
            model(torch.full((5, 3), 1.0 + step) * torch.arange(5.0)[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def state(parts: tuple[nn.Module, torch.optim.Optimizer, Any], ledger: Ledger) -> dict[str, Any]:
        model, optimizer, scheduler = parts
        return {
            "model": model,
            "all": ckptstore.torch_state(model, optimizer, scheduler=scheduler),
            "scheduler": scheduler,
            "weight": nn.Parameter(torch.ones(3) * 7),
            "ledger": ledger,
            "frozen": Frozen({"reference": torch.ones(3), "note": "kept"}),
        }

    first, ledger = make(0), Ledger(seed=11)
    train(first, range(3))
    ledger.consume(ledger.issue(4)[1:3], step=3)
    url = new_url()
    save(url, state(first, ledger), step=3)
    second, restored = make(1), Ledger()
    target = state(second, restored)
    target["frozen"].tree["note"] = ""
    restore(url, target)
    assert restored == ledger and restored.consumed_at(2) == 3
    assert target["frozen"].tree["note"] == "kept"
    train(first, range(3, 6))
    train(second, range(3, 6))
    assert bits(dict(second[0].state_dict())) == bits(dict(first[0].state_dict()))
    assert second[2].state_dict() == first[2].state_dict()


ODD_NAMES = [
    "a.b", "@", "x@0,0", "#", "x#0", "%", "%25", "%40", "__metadata__", "__metadata__x", "%5F_metadata__", "/",
    "trainer/w", "a b", " ", "", "\n\0", "ü漢🙂", "w" * 3000, "..", ".", '"', "\\",
]  # fmt: skip


def test_any_name_is_saved_and_told_from_every_other() -> None:
    state: dict[str, Any] = {name: torch.full((2, 2), float(n)) for n, name in enumerate(ODD_NAMES)}
    state["numbers"] = {n: np.array([n]) for n in (0, -1, 7)}
    url = new_url()
    save(url, {**state, "per rank": PerRank({"x": torch.ones(2)})})
    read = ckptstore.open(url).read()
    del read["per rank"]
    assert bits(read) == bits(state)
    target = {**blank(state), "per rank": PerRank({"x": torch.zeros(2)})}
    restore(url, target)
    assert bits({key: target[key] for key in state}) == bits(state)
    assert bits(target["per rank"].value["x"]) == bits(torch.ones(2))
    assert ckptstore.open(url).verify().ok


def test_names_hold_when_every_tensor_is_cut_in_boxes() -> None:
    halves = [
        {
            "t": {name: Sharded.dim0(torch.full((2, 3), float(n + 100 * rank)), start=2 * rank, size=4)
                  for n, name in enumerate(ODD_NAMES)}
        }
        for rank in range(2)
    ]  # fmt: skip
    url = new_url()
    save(url, *halves)
    read = ckptstore.open(url).read()["t"]
    for n, name in enumerate(ODD_NAMES):
        assert read[name][:, 0].tolist() == [n, n, n + 100, n + 100], name


def test_a_state_as_deep_as_allowed_can_be_restored() -> None:
    from ckptstore.state import MAX_DEPTH

    state: dict[str, Any] = {}
    inner = state
    for _ in range(MAX_DEPTH - 1):
        inner["d"] = {}
        inner = inner["d"]
    inner["w"] = torch.ones(2)
    url = new_url()
    save(url, state)
    inner["w"].zero_()
    restore(url, state)
    assert inner["w"].tolist() == [1, 1]
    ckptstore.open(url).read()
