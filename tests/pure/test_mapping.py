"""Mappings: random rules over random shapes give, element by element, what slow array operations give; and back."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.moe import FLASH, model
from ckptstore.arrangement import Concat, Named, Side, Stack, Transpose, concat, place, stack, transpose
from ckptstore.deepseek_v4 import (
    HF_FROM_MEGATRON,
    HF_FROM_NATIVE,
    MEGATRON_FROM_HF,
    MEGATRON_FROM_NATIVE,
    NATIVE_FROM_HF,
    NATIVE_FROM_MEGATRON,
)
from ckptstore.errors import InvalidInputError
from ckptstore.mapping import TensorMap
from ckptstore.stored_leaves import view_of
from ckptstore.tensor import Box, TensorSpec
from ckptstore.testing.strategies import boxes
from ckptstore.translation import Translation

Array = npt.NDArray[np.int64]


@st.composite
def sides(draw: st.DrawFn, ndim: int, tag: str) -> Side:
    """An arrangement whose array has `ndim` dimensions."""
    names, fields = iter(range(100)), iter(range(100))

    def make(ndim: int, depth: int, over: tuple[str, ...]) -> Side:
        kinds = ["named", "concat", "transpose", "stack"][: 1 if not depth else 3 if ndim == 1 else 4]
        kind = draw(st.sampled_from(kinds))
        if kind == "concat":
            dim, first = draw(st.integers(0, ndim - 1)), make(ndim, depth - 1, over)
            return concat(first, renamed(first), dim=dim)
        if kind == "transpose":
            return transpose(make(ndim, depth - 1, over), draw(st.permutations(range(ndim))))
        if kind == "stack":
            field = f"{tag}e{next(fields)}"
            return stack(
                make(ndim - 1, depth - 1, (*over, field)), over=field, dim=draw(st.integers(0, ndim - 1))
            )
        return Named(pattern=f"{tag}{next(names)}.{{i}}." + ".".join(f"{{{field}}}" for field in over))

    def renamed(side: Side) -> Side:
        """The same arrangement of other tensors; it shares the fields, since names of one side must."""
        if isinstance(side, Named):
            return Named(pattern=f"{tag}{next(names)}.{side.pattern.split('.', 1)[1]}")
        if isinstance(side, Stack):
            return stack(renamed(side.part), over=side.over, dim=side.dim)
        if isinstance(side, Transpose):
            return transpose(renamed(side.part), side.order)
        return concat(*map(renamed, side.parts), dim=side.dim)

    return make(ndim, 2, ())


def assemble(side: Side, tensors: dict[str, Array], fields: dict[str, str], counts: dict[str, int]) -> Array:
    """The array of an arrangement, by numpy."""
    if isinstance(side, Named):
        return tensors[side.pattern.format(**fields)]
    if isinstance(side, Concat):
        return np.concatenate([assemble(part, tensors, fields, counts) for part in side.parts], axis=side.dim)
    if isinstance(side, Stack):
        parts = [
            assemble(side.part, tensors, {**fields, side.over: str(n)}, counts)
            for n in range(counts[side.over])
        ]
        return np.stack(parts, axis=side.dim)
    return assemble(side.part, tensors, fields, counts).transpose(side.order)


def translate(mapping: TensorMap, tensors: dict[str, Array]) -> Translation:
    specs = {
        f"r/m.{name}": TensorSpec(name=f"r/m.{name}", dtype="int64", shape=array.shape)
        for name, array in tensors.items()
    }
    skeleton = {"d": [["m", {"d": [[name, {"N": f"m.{name}"}] for name in tensors]}]]}
    return Translation(mapping, skeleton, specs, role="r")


def names_of(translation: Translation) -> list[str]:
    return [key for key, _ in translation.skeleton["d"][0][1]["d"]]


def read_box(translation: Translation, tensors: dict[str, Array], name: str, box: Box) -> Array:
    """The elements of one box, moved as a restore moves them; each is written once."""
    out = np.full(box.shape, -1, np.int64)
    for source in translation.sources(f"r/m.{name}", box):
        view = view_of(out, box, source)
        assert view.shape == source.box.shape and (view == -1).all()
        view[...] = tensors[source.tensor.removeprefix("r/m.")][source.box.slices]
    return out


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    made, at = {}, 0
    for name, shape in shapes.items():
        made[name] = np.arange(at, at + prod(shape)).reshape(shape)
        at += prod(shape)
    return made


@given(data=st.data(), ndim=st.integers(1, 3))
def test_any_rule_gives_each_element_of_any_box_and_its_inverse_gives_it_back(
    data: st.DataObject, ndim: int
) -> None:
    left, right = (data.draw(sides(ndim, tag), label=tag) for tag in "ab")
    # Extents that two concats, one within the other, can divide.
    shape = tuple(data.draw(st.lists(st.sampled_from((4, 8)), min_size=ndim, max_size=ndim), label="shape"))
    counts = _counts(left, shape) | _counts(right, shape)
    i = {"i": str(data.draw(st.integers(0, 12), label="i"))}
    stored = numbered({name: placed.shape for name, placed in place(left, shape, i)})
    mapping = TensorMap.declare({left: right})
    there = translate(mapping, stored)
    assert there.problems == () and there.untaken == ()
    whole = {name: read_box(there, stored, name, Box.whole(_shape(there, name))) for name in names_of(there)}
    assert there.problems == ()
    assert np.array_equal(assemble(right, whole, i, counts), assemble(left, stored, i, counts))
    name = data.draw(st.sampled_from(sorted(whole)), label="name")
    box = data.draw(boxes(whole[name].shape), label="box")
    assert np.array_equal(read_box(there, stored, name, box), whole[name][box.slices])
    back = translate(mapping.inverse(), whole)
    assert sorted(names_of(back)) == sorted(stored)
    both = translate(mapping.then(mapping.inverse()), stored)
    for name, array in stored.items():
        every = Box.whole(array.shape)
        assert np.array_equal(read_box(back, whole, name, every), array)
        assert np.array_equal(read_box(both, stored, name, every), array)


def _shape(translation: Translation, name: str) -> tuple[int, ...]:
    spec = translation.spec(f"r/m.{name}")
    assert spec is not None
    return spec.shape


def _counts(side: Side, shape: tuple[int, ...]) -> dict[str, int]:
    """How many parts each stack of a side has when its array has `shape`; equal for all parts of a concat."""
    if isinstance(side, Named):
        return {}
    if isinstance(side, Stack):
        inner = shape[: side.dim] + shape[side.dim + 1 :]
        return {side.over: shape[side.dim]} | _counts(side.part, inner)
    if isinstance(side, Transpose):
        inner = tuple(shape[side.order.index(dim)] for dim in range(len(side.order)))
        return _counts(side.part, inner)
    cut = (*shape[: side.dim], shape[side.dim] // len(side.parts), *shape[side.dim + 1 :])
    return _counts(side.parts[0], cut)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"a.{i}": "b"}, "differ in fields"),
        ({stack("a.{e}", over="f"): "b"}, "stacked over"),
        ({concat("a.{i}", "b"): "c.{i}"}, "have the same fields"),
        ({concat("a", "a"): "c"}, "names of one side must differ"),
        ({"a": "c", "b": "c"}, "two rules have the wanted name c"),
        ({"a{": "c"}, "is no name"),
        ({"{rest*}": "c.{rest*}"}, "is no name"),
    ],
)
def test_rules_without_an_inverse_are_refused(rules: dict[Side | str, Side | str], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        TensorMap.declare(rules)


def test_concats_of_unequal_parts_state_their_sizes() -> None:
    stored = numbered({"q": (4, 3), "k": (2, 3), "v": (2, 3)})
    fused = TensorMap.declare({concat("q", "k", "v", sizes=(4, 2, 2)): "qkv"})
    there = translate(fused, stored)
    assert np.array_equal(
        read_box(there, stored, "qkv", Box.whole((8, 3))), np.concatenate(list(stored.values()))
    )
    unstated = translate(TensorMap.declare({concat("q", "k", "v"): "qkv"}), stored)
    assert unstated.spec("r/m.qkv") is None
    assert unstated.problems == (
        "r/m.qkv cannot be made: r/m.k is [2, 3], not [4, 3], r/m.v is [2, 3], not [4, 3]",
    )


def test_a_stack_with_a_hole_names_it() -> None:
    stored = numbered({f"experts.{e}.w": (2,) for e in range(20) if e != 17})
    translation = translate(TensorMap.declare({stack("experts.{e}.w", over="e"): "experts"}), stored)
    assert translation.spec("r/m.experts") is None
    (problem,) = translation.problems
    assert "experts.17.w of 20 tensors are not saved beside experts.0.w, experts.1.w" in problem


# -- DeepSeek-V4


def native() -> dict[str, tuple[int, ...]]:
    """Every tensor of V4-Flash but those of multi-token prediction, by its published name."""
    return {param.name: param.shape for param in model(FLASH).params}


def mapped(mapping: TensorMap, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    specs = {
        f"r/{name}": TensorSpec(name=f"r/{name}", dtype="bfloat16", shape=shape)
        for name, shape in shapes.items()
    }
    translation = Translation(mapping, {"d": [[name, {"T": name}] for name in shapes]}, specs, role="r")
    names = [key for key, _ in translation.skeleton["d"]]
    made = {name: translation.spec(f"r/{name}") for name in names}
    assert len(made) == len(names) and translation.problems == () and translation.untaken == ()
    return {name: spec.shape for name, spec in made.items() if spec is not None}


def test_every_name_of_deepseek_v4_maps_to_each_naming_and_back() -> None:
    shapes = native()
    assert len(shapes) == 1199 + 43 * 256 * 3
    hugging_face, megatron = mapped(HF_FROM_NATIVE, shapes), mapped(MEGATRON_FROM_NATIVE, shapes)
    assert len(hugging_face) == 1199 + 43 * 2
    assert len(megatron) == 1199 - 43 + 43 * 256 * 2
    for there in (hugging_face, megatron):
        assert sum(map(prod, there.values())) == sum(map(prod, shapes.values()))
    assert mapped(NATIVE_FROM_HF, hugging_face) == shapes == mapped(NATIVE_FROM_MEGATRON, megatron)
    assert megatron["module.module.decoder.layers.42.mlp.experts.linear_fc1.weight255"] == (4096, 4096)


def first_layers() -> dict[str, tuple[int, ...]]:
    """The native tensors of the first five layers: every kind of layer is among them."""
    return {
        name: shape
        for name, shape in native().items()
        if not name.startswith("layers.") or int(name.split(".")[1]) < 5
    }


def test_mappings_follow_each_other() -> None:
    shapes = first_layers()
    hugging_face, megatron = mapped(HF_FROM_NATIVE, shapes), mapped(MEGATRON_FROM_NATIVE, shapes)
    assert mapped(MEGATRON_FROM_HF, hugging_face) == megatron
    assert mapped(HF_FROM_MEGATRON, megatron) == hugging_face


def test_hugging_face_names_and_shapes_are_those_of_the_model_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    kinds = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention", 0: "sliding_attention"}
    config = transformers.DeepseekV4Config(
        num_hidden_layers=5,
        layer_types=[kinds[ratio] for ratio in (0, 0, 4, 128, 4)],
        mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 2,
    )
    with torch.device("meta"):
        theirs = transformers.DeepseekV4ForCausalLM(config).state_dict()
    assert mapped(HF_FROM_NATIVE, first_layers()) == {
        name: tuple(tensor.shape) for name, tensor in theirs.items()
    }
