"""Restore under other names and in other arrangements: element by element what a slow reference gives."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import LayoutMismatchError, MissingTensorError, Sharded, TensorMap
from ckptstore.arrangement import concat, stack, transpose

from .runs import bits, ids, new_url, restore, save

EXPERTS, HIDDEN, INNER = 4, 6, 5
STACKED_FROM_EXPERTS = TensorMap.declare(
    {
        "embed.weight": "model.embed_tokens.weight",
        stack(
            concat("layers.{i}.experts.{e}.w1.weight", "layers.{i}.experts.{e}.w3.weight"), over="e"
        ): "model.layers.{i}.experts.gate_up_proj",
        stack(transpose("layers.{i}.experts.{e}.w2.weight"), over="e"): "model.layers.{i}.experts.down_proj",
    }
)
EXPERTS_FROM_STACKED = STACKED_FROM_EXPERTS.inverse()


class Experts(nn.Module):
    """One module an expert, of some experts, under their global numbers."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, HIDDEN)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].experts = nn.ModuleDict({str(e): self.expert() for e in numbers})

    @staticmethod
    def expert() -> nn.Module:
        one = nn.Module()
        one.w1 = nn.Linear(HIDDEN, INNER, bias=False)
        one.w3 = nn.Linear(HIDDEN, INNER, bias=False)
        one.w2 = nn.Linear(INNER, HIDDEN, bias=False)
        return one


class Stacked(nn.Module):
    """All experts of a layer in two parameters, the second one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(7, HIDDEN)
        self.model.layers = nn.ModuleList([nn.Module()])
        experts = self.model.layers[0].experts = nn.Module()
        experts.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, HIDDEN))
        experts.down_proj = nn.Parameter(torch.zeros(EXPERTS, INNER, HIDDEN))


def trained(model: nn.Module) -> ckptstore.interop.torch_state.TorchState:
    """The model with AdamW after two steps, each element of its own value."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            parameter.copy_(ids(parameter.shape, torch.float32) + 1000 * n)
    for step in range(2):
        for n, parameter in enumerate(model.parameters()):
            parameter.grad = torch.sin(ids(parameter.shape, torch.float32) + n + step)
        optimizer.step()
    return ckptstore.torch_state(model, optimizer)


def fresh(model: nn.Module) -> Any:
    return ckptstore.torch_state(model, torch.optim.AdamW(model.parameters(), lr=1.0))


def per_expert(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What stacked tensors are, one expert a tensor: cut with torch alone."""
    made = {"embed.weight": states["model.embed_tokens.weight"]}
    gate_up, down = (states[f"model.layers.0.experts.{name}_proj"] for name in ("gate_up", "down"))
    for e in range(EXPERTS):
        at = f"layers.0.experts.{e}"
        if gate_up.dim() == 0:  # a counter
            made |= {f"{at}.{name}.weight": gate_up for name in ("w1", "w2", "w3")}
            continue
        made[f"{at}.w1.weight"], made[f"{at}.w3.weight"] = gate_up[e, :INNER], gate_up[e, INNER:]
        made[f"{at}.w2.weight"] = down[e].T
    return made


def told(state: Any) -> dict[str, Any]:
    """Weights, moments and counters of a torch state, by kind and name."""
    full = state.state_dict()
    kinds = {"weight": full["model"]}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        kinds[key] = {name: held[key] for name, held in full["optimizer"]["state"].items()}
    return kinds


def test_stacked_experts_restore_into_modules_of_two_expert_ranks_with_adamw() -> None:
    source, url = trained(Stacked()), new_url()
    save(url, {"trainer": source})
    ranks = [fresh(Experts(range(0, 2))), fresh(Experts(range(2, 4)))]
    restore(url, *({"trainer": rank} for rank in ranks), mapping=EXPERTS_FROM_STACKED)
    for rank in ranks:
        for kind, tensors in told(rank).items():
            expected = per_expert(told(source)[kind])
            assert tensors.keys() <= expected.keys()
            for name, tensor in tensors.items():
                assert bits(tensor) == bits(expected[name].contiguous()), (kind, name)
        group = rank.optimizer.param_groups[0]
        assert (group["lr"], group["betas"]) == (0.125, (0.5, 0.75))
    assert len(told(ranks[0])["exp_avg"]) == 1 + 2 * 3


def test_experts_of_modules_restore_into_stacked_parameters_with_adamw() -> None:
    source, url = trained(Experts(range(EXPERTS))), new_url()
    save(url, {"trainer": source})
    target = fresh(Stacked())
    (ckpt,) = restore(url, {"trainer": target}, mapping=STACKED_FROM_EXPERTS)
    for kind, tensors in told(target).items():
        for name, tensor in per_expert(tensors).items():
            assert bits(tensor.contiguous()) == bits(told(source)[kind][name]), (kind, name)
    assert target.optimizer.param_groups[0]["lr"] == 0.125
    assert ckpt.last_restore is not None and ckpt.last_restore.untaken == ()
    for parameter in (source, target):  # training goes on
        parameter.optimizer.step()


def test_counters_that_differ_do_not_become_one() -> None:
    source, url = trained(Experts(range(EXPERTS))), new_url()
    source.optimizer.state[source.model.layers[0].experts["2"].w3.weight]["step"].fill_(9.0)
    save(url, {"trainer": source})
    target = fresh(Stacked())
    before = bits(told(target))
    with pytest.raises(
        LayoutMismatchError,
        match=r"gate_up_proj\.step stands for .*experts\.2\.w3\.weight\.step, which differ",
    ):
        restore(url, {"trainer": target}, mapping=STACKED_FROM_EXPERTS)
    assert bits(told(target)) == before


def experts() -> dict[str, torch.Tensor]:
    return {
        f"layers.0.experts.{e}.{name}.weight": ids((INNER, HIDDEN) if name != "w2" else (HIDDEN, INNER))
        for e, name in itertools.product(range(EXPERTS), ("w1", "w2", "w3"))
    }


def test_all_that_does_not_fit_is_listed_before_anything_changes() -> None:
    state = experts()
    del state["layers.0.experts.2.w3.weight"]
    state["layers.0.experts.1.w2.weight"] = ids((HIDDEN, INNER + 1))
    url = new_url()
    save(url, {"model": state})
    target = {
        "model.layers.0.experts.gate_up_proj": torch.zeros(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.int64),
        "model.layers.0.experts.down_proj": torch.zeros(EXPERTS, INNER, HIDDEN, dtype=torch.int64),
        "model.norm": torch.zeros(3),
    }
    with pytest.raises(MissingTensorError) as caught:
        restore(url, {"model": target}, mapping=STACKED_FROM_EXPERTS)
    assert caught.value.missing == ("model.model.norm",)
    hole, misfit = caught.value.mismatched
    assert "layers.0.experts.2.w3.weight of 8 tensors are not saved" in hole
    assert "experts.1.w2.weight is [6, 6], not [6, 5]" in misfit
    assert not any(tensor.any() for tensor in target.values())


def test_another_dtype_is_refused_and_names_that_no_rule_takes_are_kept_and_told() -> None:
    url = new_url()
    save(url, {"model": {**experts(), "odd": ids((3,))}})
    target: dict[str, Any] = {
        "model.layers.0.experts.down_proj": torch.zeros(EXPERTS, INNER, HIDDEN),
        "odd": ids((3,)) * 0,
    }
    with pytest.raises(
        LayoutMismatchError, match=r"was saved as int64\[4, 5, 6\], the target is float32\[4, 5, 6\]"
    ):
        restore(url, {"model": target}, mapping=STACKED_FROM_EXPERTS)
    del target["model.layers.0.experts.down_proj"]
    (ckpt,) = restore(url, {"model": target}, mapping=STACKED_FROM_EXPERTS)
    assert target["odd"].tolist() == [0, 1, 2]
    assert ckpt.last_restore is not None and ckpt.last_restore.untaken == ("model.odd",)


def test_names_given_twice_or_taken_twice_are_refused() -> None:
    url = new_url()
    save(url, {"a": ids((2,)), "b": ids((2,)), "x.1": ids((2,))})
    for rules, text in (
        ({"a": "b"}, "b is given twice"),
        ({"x.{i}": "y.{i}", "x.1": "z"}, r"x\.1 is taken by 2 rules"),
    ):
        with pytest.raises(LayoutMismatchError, match=text):
            restore(url, {"b": ids((2,))}, mapping=TensorMap.declare(rules))


def test_parameters_of_two_optimizer_groups_do_not_become_one() -> None:
    model = Experts(range(EXPERTS))
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if (".w3." in name) is third],
            "lr": 1.0 + third,
        }
        for third in (False, True)
    ]
    url = new_url()
    save(url, {"trainer": ckptstore.torch_state(model, torch.optim.AdamW(groups))})
    with pytest.raises(
        LayoutMismatchError, match=r"w3\.weight is in group 1 .* becomes one with is in group 0"
    ):
        restore(url, {"trainer": fresh(Stacked())}, mapping=STACKED_FROM_EXPERTS)


def test_shards_of_either_naming_meet_any_cut_of_the_other() -> None:
    """Stacked experts saved by two ranks in halves of the inner dimension, read as experts in row and column shards."""
    whole = ids((EXPERTS, 2 * INNER, HIDDEN))
    url = new_url()
    halves = [(0, 7), (7, 3)]
    save(
        url,
        *(
            {
                "m": {
                    "model.layers.3.experts.gate_up_proj": Sharded(
                        whole[:, at : at + n], tuple(whole.shape), (0, at, 0)
                    )
                }
            }
            for at, n in halves
        ),
    )
    target = torch.zeros(2, 4, dtype=torch.int64)
    name = "layers.3.experts.2.w3.weight"
    restore(url, {"m": {name: Sharded(target, (INNER, HIDDEN), (1, 2))}}, mapping=EXPERTS_FROM_STACKED)
    assert torch.equal(target, whole[2, INNER + 1 : INNER + 3, 2:])


def test_run_read_and_a_subscriber_give_the_state_under_the_mappings_names() -> None:
    url, state = new_url(), experts()
    save(url, {"model": state, "step": 3})
    read = ckptstore.open(url).read(mapping=STACKED_FROM_EXPERTS, names=["*gate_up_proj", "step"])
    name = "model.layers.0.experts.gate_up_proj"
    whole = torch.stack(
        [
            torch.cat([state[f"layers.0.experts.{e}.w1.weight"], state[f"layers.0.experts.{e}.w3.weight"]])
            for e in range(EXPERTS)
        ]
    )
    assert read.keys() == {"model", "step"} and read["model"].keys() == {name} and read["step"] == 3
    assert torch.equal(read["model"][name], whole)
    with ckptstore.begin(url, {"trainer": 1}) as inc:
        id = ckptstore.Publisher(inc, role="trainer", rank=0).publish(
            ckptstore.Publisher(inc, role="trainer", rank=0).due(), {"model": state}
        )
    into = {"model": {name: torch.zeros_like(whole)}}
    ckptstore.Subscriber(url).load(id, into, mapping=STACKED_FROM_EXPERTS)
    assert torch.equal(into["model"][name], whole)


def test_arrays_and_non_contiguous_targets_are_filled_in_place() -> None:
    url = new_url()
    a, b = np.arange(6).reshape(2, 3), np.arange(10, 16).reshape(2, 3)
    save(url, {"a": a, "b": b, "s.0": np.array([7]), "s.1": np.array([8])})
    mapping = TensorMap.declare({transpose(concat("a", "b", dim=1)): "c", stack("s.{n}", over="n"): "s"})
    target = {"c": np.zeros((6, 4), np.int64)[:, ::2], "s": np.zeros((2, 1), np.int64)}
    restore(url, target, mapping=mapping)
    assert target["c"].tolist() == np.concatenate([a, b], 1).T.tolist()
    assert target["s"].tolist() == [[7], [8]]


def test_checkpointer_of_another_rank_count_takes_experts_that_many_ranks_saved() -> None:
    url, state = new_url(), experts()
    names = sorted(state)
    save(
        url,
        *(
            {"m": {n: Sharded(state[n], tuple(state[n].shape), (0, 0)) for n in names[r::3]}}
            for r in range(3)
        ),
    )
    into = {"m": {"model.layers.0.experts.down_proj": torch.zeros(EXPERTS, INNER, HIDDEN, dtype=torch.int64)}}
    restore(url, into, mapping=STACKED_FROM_EXPERTS)
    expected = torch.stack([state[f"layers.0.experts.{e}.w2.weight"].T for e in range(EXPERTS)])
    assert torch.equal(into["m"]["model.layers.0.experts.down_proj"], expected)


def test_local_experts_of_expert_parallel_ranks_and_flat_ranges_meet_under_a_mapping() -> None:
    """Experts numbered from 0 on two ranks go into flat ranges of the stacked tensor, and to one expert a rank."""
    state, url, pattern = experts(), new_url(), "layers.*.experts.{expert}"

    def local(rank: int, held: int, numbers: int) -> dict[str, torch.Tensor]:
        return {
            f"layers.0.experts.{e}.{name}.weight": state[
                f"layers.0.experts.{rank * held + e}.{name}.weight"
            ].clone()
            for e in range(numbers)
            for name in ("w1", "w2", "w3")
        }

    save(
        url,
        *(
            {
                "m": ckptstore.ExpertParallel(
                    local(rank, 2, 2), pattern, num_experts=EXPERTS, rank=rank, size=2
                )
            }
            for rank in range(2)
        ),
    )
    whole = torch.stack(
        [
            torch.cat([state[f"layers.0.experts.{e}.w1.weight"], state[f"layers.0.experts.{e}.w3.weight"]])
            for e in range(EXPERTS)
        ]
    )
    name, cut = "model.layers.0.experts.gate_up_proj", 101
    flat = [torch.zeros(n, dtype=torch.int64) for n in (cut, whole.numel() - cut)]
    targets = [
        {"m": {name: ckptstore.FlatShard(part, tuple(whole.shape), start)}}
        for part, start in zip(flat, (0, cut), strict=True)
    ]
    restore(url, *targets, mapping=STACKED_FROM_EXPERTS)
    assert torch.equal(torch.cat(flat), whole.flatten())
    ranks = [
        {key: torch.zeros_like(tensor) for key, tensor in local(rank, 1, 1).items()}
        for rank in range(EXPERTS)
    ]
    both = STACKED_FROM_EXPERTS.then(EXPERTS_FROM_STACKED)
    restore(
        url,
        *(
            {"m": ckptstore.ExpertParallel(rank, pattern, num_experts=EXPERTS, rank=n, size=EXPERTS)}
            for n, rank in enumerate(ranks)
        ),
        mapping=both,
    )
    for n, rank in enumerate(ranks):
        assert bits(rank) == bits(local(n, 1, 1))
