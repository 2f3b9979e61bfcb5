"""Experts keep their global numbers, whatever rank holds them; a lost or doubled one is refused by name and rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import (
    CkptStoreError,
    ExpertParallel,
    HeldBy,
    InconsistentCutError,
    InvalidInputError,
    LayoutMismatchError,
    MissingTensorError,
    Sharded,
)
from ckptstore.experts import deal_experts
from tests.save.runs import bits, new_url, restore, save

ONE = "layers.*.experts.{expert}"
STACKED = "layers.*.stack"


class Layer(nn.Module):
    """Experts as modules and as a stack, and a router that all ranks hold."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(count))
        self.stack = nn.Parameter(torch.zeros(count, 2, 3))


class Model(nn.Module):
    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(len(numbers)) for _ in range(2))


def trained(numbers: Sequence[int], *, blank: bool = False) -> tuple[Model, torch.optim.Optimizer]:
    """A model whose every weight, moment and count tells which expert it is of; equal on whatever rank."""
    model = Model(numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if blank else 0.25)
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    with torch.no_grad():
        for name, p in model.named_parameters():
            slots = {"": p, **optimizer.state[p]}
            for place, value in enumerate(slots.values()):
                mark = -1.0 if blank else sum(name.split(".experts.")[0].encode()) + 1000.0 * place
                value.fill_(mark)
                if not blank and ".experts." in name:
                    expert = int(name.split(".experts.")[1].split(".")[0])
                    value.fill_(mark + numbers[expert])
                elif not blank and "stack" in name and value.dim():
                    value += torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1, 1)
    return model, optimizer


def state_of(
    numbers: Sequence[int], total: int, *, replicas: Sequence[int] | None = None, blank: bool = False
) -> dict[str, Any]:
    model, optimizer = trained(numbers, blank=blank)
    return {
        "all": ExpertParallel(
            ckptstore.torch_state(model, optimizer), [ONE, STACKED], total, experts=numbers, replicas=replicas
        )
    }


def told(state: dict[str, Any]) -> Any:
    return bits(state["all"].state.state_dict())


DEALS: dict[str, list[Sequence[int]]] = {
    "one": [range(5)],
    "two": [range(3), range(3, 5)],
    "uneven, one has none": [range(4), [], [4]],
    "scattered": [[4, 0], [2], [1, 3]],
}


@pytest.mark.parametrize("saved", DEALS)
@pytest.mark.parametrize("wanted", DEALS)
def test_experts_move_with_weights_moments_and_counts(saved: str, wanted: str) -> None:
    url = new_url()
    save(url, *(state_of(numbers, 5) for numbers in DEALS[saved]))
    targets = [state_of(numbers, 5, blank=True) for numbers in DEALS[wanted]]
    restore(url, *targets)
    for numbers, target in zip(DEALS[wanted], targets, strict=True):
        assert told(target) == told(state_of(numbers, 5))
    model, optimizer = trained(range(5), blank=True)  # and without any wrapper
    restore(url, {"all": ckptstore.torch_state(model, optimizer)})
    expected = state_of(range(5), 5)["all"].state
    assert bits(ckptstore.torch_state(model, optimizer).state_dict()) == bits(expected.state_dict())


def test_replicas_of_experts_share_the_work() -> None:
    deal = [range(2), range(2), range(2, 4), range(2, 4)]
    url = new_url()
    info = save(url, *(state_of(n, 4, replicas=[r // 2 * 2, r // 2 * 2 + 1]) for r, n in enumerate(deal)))
    alone = save(new_url(), state_of(range(4), 4))
    assert info.nbytes == alone.nbytes  # nothing twice
    target = state_of(range(4), 4, blank=True)
    restore(url, target)
    assert told(target) == told(state_of(range(4), 4))


def test_ranks_are_dealt_experts_as_torch_chunks() -> None:
    for total in range(9):
        for size in range(1, 5):
            chunks = torch.arange(total).chunk(size)
            dealt = [deal_experts(total, rank=rank, size=size) for rank in range(size)]
            assert [tuple(c.tolist()) for c in chunks if c.numel()] == [d for d in dealt if d]


def weights(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    return {f"layers.0.experts.{local}.w": torch.full((2,), float(n)) for local, n in enumerate(numbers)}


def refused(*states: dict[str, Any]) -> str:
    url = new_url()
    with pytest.raises((InconsistentCutError, LayoutMismatchError)) as error:
        save(url, *states)
    assert not ckptstore.open(url).checkpoints()
    return str(error.value)


def test_an_expert_that_no_rank_has_is_named_with_who_has_the_others() -> None:
    text = refused(
        *({"m": ExpertParallel(weights(n), ONE, 6, experts=n)} for n in ([0, 1], [4], [5])),
    )
    assert "experts 2 to 3 of m.layers.0.experts.{expert}.w" in text
    assert "trainer/0 has 0 to 1, trainer/1 has 4, trainer/2 has 5" in text


def test_moments_that_no_rank_has_are_named() -> None:
    states = [
        {"m": ExpertParallel({"w": weights(n), "exp_avg": weights(n)}, ONE, 4, experts=n)}
        for n in ([0, 1], [2, 3])
    ]
    del states[1]["m"].state["exp_avg"]["layers.0.experts.1.w"]
    assert "expert 3 of m.exp_avg.layers.0.experts.{expert}.w" in refused(*states)


def test_an_expert_that_two_ranks_claim_is_named_with_both() -> None:
    text = refused(*({"m": ExpertParallel(weights(n), ONE, 3, experts=n)} for n in ([0, 1], [1, 2])))
    assert "trainer/m.layers.0.experts.1.w: 2 chunks overlap" in text
    assert "written by trainer/0, trainer/1" in text


def test_a_family_that_no_rank_has_is_named() -> None:
    assert "layers.*.mlp" in refused(
        {"m": ExpertParallel(weights([0]), "layers.*.mlp.{expert}", 1, rank=0, size=1)}
    )


def test_ranks_must_agree_how_many_experts_there_are() -> None:
    states = [{"m": ExpertParallel(weights([n]), ONE, 2 + n, experts=[n])} for n in range(2)]
    assert "experts of m differs" in refused(*states)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: ExpertParallel(weights([0]), ONE, 4, rank=4, size=4), "rank 4 is not among 4"),
        (lambda: ExpertParallel(weights([0]), ONE, 4), "both or neither"),
        (lambda: ExpertParallel(weights([0]), ONE, 4, experts=[4]), "not distinct numbers from 0 to 3"),
        (lambda: ExpertParallel(weights([0]), ONE, 4, experts=[1, 1]), "not distinct numbers"),
        (lambda: ExpertParallel(weights([0, 1]), ONE, 4, experts=[1]), "expert 1 of a rank that holds 1"),
        (lambda: ExpertParallel(weights([0]), "layers.{expert}.w", 4, experts=[1]), "ends with {expert}"),
        (lambda: ExpertParallel({"layers": [{"stack": torch.ones(3)}]}, STACKED, 4, experts=[1]), "3 rows"),
        (
            lambda: ExpertParallel({"layers": {"0": {"experts": [torch.ones(1)]}}}, ONE, 4, experts=[1]),
            "a list of experts",
        ),
        (lambda: HeldBy({"w": torch.ones(1)}, ranks=[1]), "held by ranks .1., and this is rank 0"),
    ],
)
def test_what_contradicts_itself_is_refused(wrong: Any, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        save(new_url(), {"m": wrong()})


def test_pipeline_stages_hold_their_layers() -> None:
    """Plain tensors of some ranks alone, with values and hyper-parameters of each stage."""

    def stage(number: int, seed: int) -> tuple[nn.Module, ckptstore.interop.torch_state.TorchState]:
        torch.manual_seed(seed)
        model = nn.Module()
        model.layers = nn.ModuleDict({str(number): nn.Linear(3, 3)})
        return model, ckptstore.torch_state(model, torch.optim.AdamW(model.parameters()))

    stages = [stage(n, n) for n in range(2)]
    url = new_url()
    save(url, *({"m": HeldBy(stages[r // 2][1], ranks=[r // 2 * 2, r // 2 * 2 + 1])} for r in range(4)))
    again = [stage(n, 7) for n in range(2)]
    restore(url, *({"m": HeldBy(again[r][1], ranks=[r])} for r in range(2)))
    for (_, one), (_, two) in zip(stages, again, strict=True):
        assert bits(one.state_dict()) == bits(two.state_dict())


def test_a_restore_that_wants_other_experts_than_were_saved_names_them() -> None:
    url = new_url()
    save(url, *({"m": ExpertParallel(weights(n), ONE, 4, experts=n)} for n in ([0, 1], [2, 3])))
    with pytest.raises(MissingTensorError, match=r"layers\.0\.experts\.4\.w"):
        restore(url, {"m": ExpertParallel(weights([4]), ONE, 5, experts=[4])})
    read = ckptstore.open(url).read()
    assert [read["m"][f"layers.0.experts.{n}.w"].tolist() for n in range(4)] == [[n, n] for n in range(4)]


def test_values_of_experts_and_other_holders_within() -> None:
    """Numbers per expert go by global number too; a Sharded expert is as it says."""

    def make(numbers: Sequence[int], blank: bool = False) -> dict[str, Any]:
        experts: dict[int, Any] = {
            local: {
                "tokens": -1 if blank else 10 * n,
                "w": Sharded.dim0(torch.full((2,), -1.0 if blank else float(n)), start=0, size=2),
            }
            for local, n in enumerate(numbers)
        }
        return {
            "m": ExpertParallel(
                {"experts": experts, "note": "" if blank else "same"}, "experts.{expert}", 3, experts=numbers
            )
        }

    url = new_url()
    save(url, make([2, 0]), make([1]))
    target = make([1, 2, 0], blank=True)
    restore(url, target)
    state = target["m"].state
    assert [state["experts"][n]["tokens"] for n in range(3)] == [10, 20, 0] and state["note"] == "same"
    assert [state["experts"][n]["w"].tensor.tolist() for n in range(3)] == [[1, 1], [2, 2], [0, 0]]
    assert set(state["experts"]) == {0, 1, 2}
    two = make([1, 2], blank=True)
    restore(url, two)
    assert set(two["m"].state["experts"]) == {0, 1}
    assert copy.copy(two["m"]).num_experts == 3
    assert issubclass(InvalidInputError, CkptStoreError)


def test_numbers_of_other_ranks_experts_are_not_given_to_this_rank() -> None:
    """An expert's global number means another one here, so a dict of values gets none but its own."""

    def make(numbers: Sequence[int], blank: bool = False) -> dict[str, Any]:
        tokens = {f"experts.{local}": -1 if blank else 10 * n for local, n in enumerate(numbers)}
        weights = {f"experts.{local}": {"w": torch.ones(1)} for local in range(len(numbers))}
        return {"m": ExpertParallel({"tokens": tokens, "w": weights}, "experts.{expert}", 3, experts=numbers)}

    url = new_url()
    save(url, make([0, 1, 2]))
    targets = [make([1], blank=True), make([2, 0], blank=True)]
    restore(url, *targets)
    assert [target["m"].state["tokens"] for target in targets] == [
        {"experts.0": 10},
        {"experts.0": 20, "experts.1": 0},
    ]
