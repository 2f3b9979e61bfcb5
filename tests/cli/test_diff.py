"""`ckptstore diff` and `ckptstore.diff`: counts and distances are numpy's, and equal chunks are not read."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import difference
from ckptstore.cli.diff import bar_text
from ckptstore.elements import carrier
from tests.cli.commands import run
from tests.save.runs import new_url, save, save_steps

LAYERS, EXPERTS = 3, 4
FLOATS = ("float32", "bfloat16", "float64")


# -- random states, saved in different layouts


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))


def shard(tensor: torch.Tensor, rank: int, size: int, dim: int) -> ckptstore.Sharded:
    """This rank's share of an uneven cut along `dim`."""
    ends = [n * tensor.shape[dim] // size for n in range(size + 1)]
    offset = [0] * tensor.ndim
    offset[dim] = ends[rank]
    own = tensor.narrow(dim, ends[rank], ends[rank + 1] - ends[rank]).contiguous()
    return ckptstore.Sharded(own, offset=tuple(offset), global_shape=tuple(tensor.shape))


def save_sharded(
    url: str, tensors: dict[str, torch.Tensor], cuts: dict[str, int], ranks: int, **values: Any
) -> None:
    states = [
        {"m": {name: shard(t, rank, ranks, cuts[name]) for name, t in tensors.items()}, **values}
        for rank in range(ranks)
    ]
    save(url, *states)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(carrier(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)


@given(data=st.data(), bounds=st.sampled_from(((1, 0), (64, 40), (1 << 25, 1 << 25))))
@settings(max_examples=25, deadline=None)
def test_counts_and_distances_are_numpy_s_whatever_the_layouts(
    data: st.DataObject, bounds: tuple[int, int]
) -> None:
    old: dict[str, torch.Tensor] = {}
    new: dict[str, torch.Tensor] = {}
    for n in range(data.draw(st.integers(1, 3))):
        shape = data.draw(shapes())
        dtype = getattr(torch, data.draw(st.sampled_from(FLOATS)))
        old[f"t{n}"] = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
        new[f"t{n}"] = old[f"t{n}"].clone()
        for place in data.draw(st.sets(st.integers(0, old[f"t{n}"].numel() - 1), max_size=4)):
            new[f"t{n}"].view(-1)[place] = data.draw(st.sampled_from((-7.0, 0.5, float("nan"), float("inf"))))
    urls = new_url(), new_url()
    for url, tensors in zip(urls, (old, new), strict=True):
        cuts = {name: data.draw(st.integers(0, t.ndim - 1)) for name, t in tensors.items()}
        save_sharded(url, tensors, cuts, data.draw(st.integers(1, 3)))
    kept = difference.UNIT_NBYTES, difference.HELD_NBYTES
    difference.UNIT_NBYTES, difference.HELD_NBYTES = bounds
    try:
        found = ckptstore.diff(*urls, rows="*")
    finally:
        difference.UNIT_NBYTES, difference.HELD_NBYTES = kept
    changed = {each.spec.name.removeprefix("trainer/m."): each for each in found.changed}
    total = sum(t.numel() * t.element_size() for t in old.values())
    assert found.nbytes_settled + found.nbytes_compared == total
    for name, tensor in old.items():
        differ = bits(tensor) != bits(new[name])
        assert (name in changed) == bool(differ.any())
        if name not in changed:
            continue
        a, b = tensor.double().numpy(), new[name].double().numpy()
        known = differ & ~np.isnan(a) & ~np.isnan(b)
        each = changed[name].elements
        assert (each.elements, each.changed) == (tensor.numel(), int(differ.sum()))
        assert each.nan == int((differ & ~known).sum())
        assert each.largest == (float(np.abs(a - b)[known].max()) if known.any() else None)
        by_row = {r: int(row.sum()) for r, row in enumerate(differ) if row.any()}
        assert {r: row.changed for r, row in changed[name].rows.items()} == by_row


def expert_state(step: int) -> dict[str, Any]:
    """Layer n: experts by module, and the same stacked; step 2 changes expert 1 of layer 0 and expert 2 of layer 2."""
    layers: dict[str, Any] = {}
    for layer in range(LAYERS):
        stack = torch.arange(EXPERTS * 6).reshape(EXPERTS, 2, 3).float()
        if step == 2 and layer == 0:
            stack[1, 0, 0] += 10
        if step == 2 and layer == 2:
            stack[2] = -1.0
        own = {str(e): {"w": stack[e].clone()} for e in range(EXPERTS)}
        layers[str(layer)] = {"experts": own, "stacked": {"experts": {"w": stack}}, "norm": torch.ones(4)}
    return {"model": {"layers": layers, "head": torch.full((5,), float(step))}, "step": step, "rate": 0.1}


@pytest.fixture(scope="module")
def experts_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("diff") / "run")
    save_steps(url, {1: [expert_state(1)], 2: [expert_state(2)]})
    return url


def groups(url: str, *arguments: str) -> dict[str, dict[str, Any]]:
    ended = run("diff", url, "--json", *arguments)
    assert ended.code == 1, ended.err
    told = ended.json
    assert sum(g["elements"] for g in told["groups"]) == told["elements"]
    assert sum(g["elements_changed"] for g in told["groups"]) == told["elements_changed"]
    return {g["name"]: g for g in told["groups"]}


def test_groups_add_up_by_layer_by_expert_and_by_row(experts_url: str) -> None:
    by_layer = groups(experts_url, "--by", "layer")
    assert [by_layer[f"model.layers.{n}"]["elements_changed"] for n in range(3)] == [2, 0, 12]
    assert by_layer["(no such number)"]["elements_changed"] == 5
    by_expert = groups(experts_url, "--by", "expert", "--stacked", "*.stacked.experts.w")
    for prefix in ("model.layers.{}.experts.{}", "model.layers.{}.stacked.experts.{}"):
        found = {
            (layer, e): by_expert[prefix.format(layer, e)]["elements_changed"]
            for layer, e in itertools.product(range(LAYERS), range(EXPERTS))
        }
        assert {key: count for key, count in found.items() if count} == {(0, 1): 1, (2, 2): 6}
    assert by_expert["model.layers.0.stacked.experts.1"]["largest"] == 10
    assert {g["elements"] for name, g in by_expert.items() if ".experts." in name} == {6}
    assert groups(experts_url, "--by", "stacked.experts.{}", "--stacked", "*.stacked.experts.w")


def test_what_equal_checksums_settle_is_not_read(experts_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.fetch import Fetcher

    real, ranges = Fetcher.read, list[tuple[str, int]]()

    def fetch(self: Fetcher, read: Any, *args: Any) -> None:
        ranges.append((read.segment, read.nbytes))
        real(self, read, *args)

    monkeypatch.setattr(Fetcher, "read", fetch)
    told = run("diff", experts_url, "--names", "*.norm", "--json")
    assert told.code == 0 and told.json["equal"] and not ranges
    assert told.json["nbytes_settled"] == LAYERS * 16 and told.json["nbytes_read"] == 0
    told = run("diff", experts_url, "--names", "model.head", "--json").json
    assert told["nbytes_compared"] == 20 and told["nbytes_read"] == 40 == sum(n for _, n in ranges)


def test_chunks_of_another_tiling_are_read_once_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": torch.arange(48 * 48).reshape(48, 48).float()}
    urls = new_url(), new_url()
    save_sharded(urls[0], tensors, {"w": 0}, 4)
    save_sharded(urls[1], tensors, {"w": 1}, 4)
    found = ckptstore.diff(*urls)
    assert found.equal and found.nbytes_settled == 0
    assert found.nbytes_read == 2 * found.nbytes_compared == 2 * 48 * 48 * 4
    monkeypatch.setattr(difference, "UNIT_NBYTES", 1)
    assert ckptstore.diff(*urls).nbytes_read == 2 * 48 * 48 * 4, "held until the last pair has met"
    monkeypatch.setattr(difference, "HELD_NBYTES", 0)
    assert ckptstore.diff(*urls).nbytes_read > 4 * 48 * 48 * 4, "read again instead of held"


def test_what_came_what_went_and_what_was_reshaped(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    save(a, {"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(3), "n": 1, "old": [1], "p": True})
    save(b, {"y": torch.ones(2, 1), "z": torch.ones(3).bfloat16(), "w": torch.ones(1), "n": 1.0, "p": True})
    ended = run("diff", a, b, "--json")
    told = ended.json
    assert ended.code == 1 and told["groups"] == []
    assert [t["name"] for t in told["added"]] == ["w"] and [t["name"] for t in told["removed"]] == ["x"]
    assert [(t["name"], t["before"], t["after"]) for t in told["altered"]] == [
        ("y", {"dtype": "float32", "shape": [2]}, {"dtype": "float32", "shape": [2, 1]}),
        ("z", {"dtype": "float32", "shape": [3]}, {"dtype": "bfloat16", "shape": [3]}),
    ]
    assert {v["name"]: v["change"] for v in told["values"]} == {"n": "changed", "old": "removed"}
    assert told["values_unchanged"] == 1
    text = run("diff", a, b).out
    for title in ("added tensors", "removed tensors", "tensors of another shape or dtype", "values"):
        assert f"\n{title}\n" in text
    assert "float32 3  " in text and "bfloat16 3" in text


def test_both_forms_tell_the_same(experts_url: str) -> None:
    text, told = run("diff", experts_url).out, run("diff", experts_url, "--json").json
    body = text.split("changed, by prefix\n")[1].split("\n\n")[0].splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in body[1:-1]]
    shown = [g for g in told["groups"] if g["elements_changed"]]
    assert [row[0] for row in rows] == [f"trainer/{g['name']}" for g in shown]
    assert [row[2] for row in rows] == [f"{g['elements_changed']:,}" for g in shown]
    assert f"{told['elements_changed']} of {told['elements']} changed" in text
    assert text.splitlines()[-1] == f"they differ; next: {told['next']}"
    assert "trainer/step  changed  1       2" in text and "1 value unchanged" in text
    following = told["next"].split("ckptstore ")[1].split()
    assert run(*following).code == 1 and "model.layers.2" in run(*following).out


# -- which checkpoints, exit codes


def test_steps_choose_the_checkpoints(run_url: str, experts_url: str) -> None:
    def chosen(*arguments: str) -> tuple[str, str]:
        told = run("diff", *arguments, "--json").json
        return told["before"]["checkpoint"]["id"], told["after"]["checkpoint"]["id"]

    newest, before, oldest = "f0002/s00000015-000", "f0001/s00000010-000", "f0001/s00000005-000"
    assert chosen(run_url) == (before, newest)
    assert chosen(run_url, "--step", "5") == (oldest, newest)
    assert chosen(run_url, "--step", "15", "--step", "5") == (newest, oldest)
    assert chosen("--step", "10", run_url, "--step", "10", run_url) == (before, before)
    assert chosen(run_url, experts_url) == (newest, "f0001/s00000002-000")
    assert chosen(run_url, run_url, "--step", "5") == (oldest, oldest)


def test_exit_codes(run_url: str, tmp_path: Path) -> None:
    assert run("diff", run_url, "--step", "5", "--step", "5").code == 0
    assert run("diff", run_url).code == 1
    for arguments in (
        ("--step", "15"),
        ("--step", "5", "--step", "10", "--step", "15"),
        ("--by", "nothing"),
        ("--stacked", "*"),
    ):
        ended = run("diff", run_url, *arguments)
        assert ended.code == 2 and ended.out == "" and ended.err.count("\n") == 1, arguments
    for arguments in (("--role", "rollout"), ("--names", "nothing*"), ("--step", "7")):
        ended = run("diff", run_url, *arguments)
        assert ended.code == 1 and ended.out == "" and ended.err.count("\n") == 1, arguments
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    assert run("diff", run_url, str(tmp_path / "loop")).code == 3


def test_the_first_checkpoint_has_none_before_it(tmp_path: Path) -> None:
    save(str(tmp_path / "one"), {"n": 1})
    ended = run("diff", str(tmp_path / "one"))
    assert ended.code == 1 and "no good checkpoint before step 1" in ended.err


def test_damage_is_named_when_it_lies_in_what_must_be_read(own_run: Path) -> None:
    (path,) = own_run.glob("data/f0002/s00000015-000/trainer-00000-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    ended = run("diff", str(own_run))
    assert ended.code == 1 and ended.out == "" and path.name in ended.err


@pytest.mark.parametrize(("share", "text"), [(0, ""), (1e-9, "▏"), (0.5, "██████"), (1, "█" * 12)])
def test_a_bar_is_as_long_as_the_share(share: float, text: str) -> None:
    assert bar_text(share) == text
