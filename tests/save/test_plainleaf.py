"""The fast ways over plain tensors say what the general ones say of each, or leave it to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.binding import Binding
from ckptstore.errors import InvalidInputError
from ckptstore.fill import host_address, host_addresses
from ckptstore.held import Where
from ckptstore.memoryspan import is_contiguous, repeats
from ckptstore.pieces import describe
from ckptstore.plainleaf import PlainLeaves
from ckptstore.state import flatten
from ckptstore.tensor import TensorSpec
from ckptstore.tensors import Tensors
from ckptstore.testing.strategies import shapes


class Marked(torch.Tensor):
    pass


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda t: t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "turned": lambda t: t.T if t.dim() == 2 else t,
    "every other": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[None].expand(3, *t.shape),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "negative": lambda t: torch.complex(t.float(), t.float()).conj().imag,
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "subclass": lambda t: t.as_subclass(Marked),
    "uninitialized": lambda t: torch.nn.UninitializedParameter(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "array": lambda t: t.numpy(),
}
DTYPES = (torch.float32, torch.int16, torch.bool, torch.float64)


def tensors(kinds: Sequence[str] = tuple(KINDS)) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda kind, dtype, shape: KINDS[kind](torch.zeros(shape, dtype=dtype)),
        st.sampled_from(kinds),
        st.sampled_from(DTYPES),
        shapes(max_elements=64),
    )


@given(values=st.lists(tensors(), max_size=8))
def test_a_plain_leaf_is_what_describe_says(values: list[Any]) -> None:
    plain = PlainLeaves()
    for n, value in enumerate(values):
        leaf = plain.leaf(value, f"r/{n}")
        if leaf is None:
            continue
        spec, (piece,) = describe(value, f"r/{n}", str(n), 0, Where())
        assert (leaf.spec, leaf.box) == (spec, piece.box)
        assert leaf.data is piece.data and leaf.replicas is None and not leaf.frozen
        assert type(leaf.spec.shape) is tuple, "a shape is written to JSON and compared"
        assert is_contiguous(value) and not repeats(value)


@pytest.mark.parametrize("kind", ["plain", "parameter"])
@given(data=st.data())
def test_nearly_all_leaves_are_plain(kind: str, data: st.DataObject) -> None:
    assert PlainLeaves().leaf(data.draw(tensors([kind])), "r/x") is not None


@pytest.mark.parametrize("kind", ["sparse", "meta", "uninitialized", "quantized"])
def test_what_has_no_bytes_is_left_to_the_way_that_refuses_it(kind: str) -> None:
    value = KINDS[kind](torch.zeros(2, 2))
    assert PlainLeaves().leaf(value, "r/x") is None
    with pytest.raises(InvalidInputError):
        describe(value, "r/x", "x", 0, Where())


@given(values=st.lists(tensors(["plain", "parameter", "turned", "every other", "array"]), max_size=8))
def test_binding_takes_the_same_leaves_either_way(values: list[Any]) -> None:
    state = {"model": {f"w{n}": value for n, value in enumerate(values)}, "step": 3}
    saved = flatten(state, role="r", rank=0).skeleton
    quick, slow = (Binding(role="r", rank=0, per_rank=True) for _ in range(2))
    slow._plain.leaf = lambda value, name: None  # type: ignore[method-assign]
    for binding in (quick, slow):
        binding.bind(state, saved)
    assert [(x.spec, x.box, id(x.data)) for x in quick.leaves] == [
        (x.spec, x.box, id(x.data)) for x in slow.leaves
    ]
    assert (quick.missing, quick.mismatched, quick.unasked) == (slow.missing, slow.mismatched, slow.unasked)


@given(
    values=st.lists(
        tensors(["plain", "parameter", "turned", "every other", "conjugate", "negative", "subclass"])
    ),
    others=st.lists(tensors(["array", "plain"]), max_size=2),
    wrong=st.integers(0, 3),
)
def test_addresses_of_many_are_those_of_each(values: list[Any], others: list[Any], wrong: int) -> None:
    for data in (values, values + others, others):
        nbytes = np.array([each.nbytes for each in data], np.int64)
        nbytes[wrong : wrong + 1] += 1
        each = [host_address(one, n) for one, n in zip(data, nbytes.tolist(), strict=True)]
        assert host_addresses(data, nbytes).tolist() == each


@given(names=st.lists(st.text("ab", max_size=4), unique=True), wanted=st.lists(st.text("ab", max_size=4)))
def test_many_names_are_found_as_each_is(names: list[str], wanted: list[str]) -> None:
    of = Tensors.of([TensorSpec(name=f"n{name}", dtype="bool", shape=()) for name in sorted(names)])
    asked = [f"n{name}" for name in wanted]
    assert of.find_all(asked).tolist() == [of.find(name) for name in asked]
