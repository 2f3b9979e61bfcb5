"""Models and optimizers saved by name: a restored run goes on bit for bit, whatever had a gradient before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptstore.errors import InvalidInputError, LayoutMismatchError, MissingTensorError
from ckptstore.interop.torch_state import TorchState, torch_state

Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """A third party's optimizer: states made in `step`, a count, weight decay that ignores the rate."""

    def __init__(self, params: Any, zero: Any = 0) -> None:
        super().__init__(params, {"lr": 0.01})
        self.zero = zero

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"], state["step"] = torch.zeros_like(p), copy.deepcopy(self.zero)
                    state["step"] += 1
                    p.mul_(0.99).add_(state["mean"].lerp(p.grad, 0.1).sign_(), alpha=-group["lr"])
                    state["mean"].lerp_(p.grad, 0.01)


MAKERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "third party": Lion,
    "third party, count in a tensor": lambda p: Lion(p, torch.tensor(0.0)),
}


class Net(nn.Module):
    """`late` gets its first gradient at step 3, `never` none; `frozen` requires none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.late, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        with torch.no_grad():
            self.late.bias.fill_(-0.0)
            self.never.bias.fill_(-0.0)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.frozen(self.norm(self.first(x)))
        return self.late(x) if step >= 3 else x


def groups(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": [*net.first.parameters(), *net.never.parameters(), *net.frozen.parameters()]},
        {"params": [*net.late.parameters(), *net.norm.parameters()], "lr": 0.005},
    ]


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        net(x, step).square().mean().backward()
        optimizer.step()


def bits(value: Any) -> Any:
    """The state with tensors as (dtype, bytes): -0.0 differs from 0.0."""
    if isinstance(value, Tensor):
        return (
            value.dtype,
            tuple(value.shape),
            value.detach().reshape(-1).contiguous().view(torch.uint8).tolist(),
        )
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(bits(inner) for inner in value)
    return value


def build(make: Make, seed: int = 0) -> tuple[Net, torch.optim.Optimizer, TorchState]:
    net = Net(seed)
    optimizer = make(groups(net))
    return net, optimizer, torch_state(net, optimizer)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("saved_at", [0, 2, 4])
def test_a_fresh_run_goes_on_bit_for_bit(kind: str, saved_at: int) -> None:
    straight, its_optimizer, _ = build(MAKERS[kind])
    train(straight, its_optimizer, range(6))  # never asked for its state: nothing is made beforehand here

    net, optimizer, state = build(MAKERS[kind])
    train(net, optimizer, range(saved_at))
    saved = copy.deepcopy(state.state_dict())
    fresh, fresh_optimizer, fresh_state = build(MAKERS[kind], seed=1)
    fresh_state.load_state_dict(saved)
    assert bits(fresh_state.state_dict()) == bits(saved)
    train(net, optimizer, range(saved_at, 6))
    train(fresh, fresh_optimizer, range(saved_at, 6))

    assert bits(net.state_dict()) == bits(straight.state_dict()), "telling the state changed the run"
    assert bits(fresh.state_dict()) == bits(straight.state_dict())
    final = bits(state.state_dict())
    assert bits(fresh_state.state_dict()) == final
    told = bits(torch_state(straight, its_optimizer).state_dict())
    assert told == final


@pytest.mark.parametrize("kind", MAKERS)
def test_writing_into_the_told_tensors_restores(kind: str) -> None:
    net, optimizer, state = build(MAKERS[kind])
    train(net, optimizer, range(4))
    saved = copy.deepcopy(state.state_dict())
    _, _, fresh_state = build(MAKERS[kind], seed=1)
    target = fresh_state.state_dict()

    def overwrite(own: Any, given: Any) -> Any:
        if isinstance(own, Tensor):
            own.copy_(given)
            return own
        if isinstance(own, dict):
            assert own.keys() == given.keys()
            return {key: overwrite(own[key], given[key]) for key in own}
        return given

    with torch.no_grad():
        fresh_state.load_state_dict(overwrite(target, saved))
    assert bits(fresh_state.state_dict()) == bits(saved)


@pytest.mark.parametrize("kind", MAKERS)
def test_lazy_states_are_made_without_touching_anything(kind: str) -> None:
    net, optimizer, state = build(MAKERS[kind])
    train(net, optimizer, range(2))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    gradients = {name: p.grad for name, p in net.named_parameters()}
    before = bits(net.state_dict()), bits([p.grad for p in net.parameters() if p.grad is not None])
    states = {id(p): bits(dict(s)) for p, s in optimizer.state.items()}
    shape = bits([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    told = state.state_dict()
    after = bits(net.state_dict()), bits([p.grad for p in net.parameters() if p.grad is not None])
    assert before == after
    assert all(p.grad is gradients[name] for name, p in net.named_parameters())
    assert {
        id(p): bits(dict(s)) for p, s in optimizer.state.items() if id(p) in states and states[id(p)]
    } == {key: value for key, value in states.items() if value}
    assert shape == bits([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    assert calls == []
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert set(told["optimizer"]["state"]) == (set() if kind == "sgd" else trained | adagrad_frozen(kind))
    for name in told["optimizer"]["state"]:
        if "step" in told["optimizer"]["state"][name]:
            expected = 2 if name.startswith(("first", "norm")) else 0
            assert float(told["optimizer"]["state"][name]["step"]) == expected
    assert "scratch" not in told["model"]


def adagrad_frozen(kind: str) -> set[str]:
    return {"frozen.weight", "frozen.bias"} if kind == "adagrad" else set()  # it makes all states at once


@pytest.mark.parametrize("foreach", [False, True])
def test_the_first_momentum_is_the_gradient_to_the_sign_of_zero(foreach: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    model = nn.ParameterDict({"w": parameter})
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=foreach)
    torch_state(model, optimizer).state_dict()
    parameter.grad = torch.tensor([-0.0, 0.0, 2.0])
    optimizer.step()
    assert bits(optimizer.state[parameter]["momentum_buffer"]) == bits(parameter.grad)


def test_fp32_moments_of_bf16_parameters_stay_fp32() -> None:
    net = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    saved = copy.deepcopy(torch_state(net, optimizer).state_dict())
    fresh = nn.Linear(4, 4).bfloat16()
    state = torch_state(fresh, torch.optim.AdamW(fresh.parameters()))
    state.load_state_dict(saved)
    assert bits(state.state_dict()) == bits(saved)
    assert saved["optimizer"]["state"]["weight"]["exp_avg"].dtype == torch.float32


def test_rates_and_schedulers_are_restored() -> None:
    def run() -> tuple[Net, torch.optim.Optimizer, TorchState, Any]:
        net, optimizer, _ = build(MAKERS["adamw"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return net, optimizer, torch_state(net, optimizer, scheduler=scheduler), scheduler

    net, optimizer, state, scheduler = run()
    for step in range(3):
        train(net, optimizer, range(step, step + 1))
        scheduler.step()
    saved = copy.deepcopy(state.state_dict())
    _, fresh, fresh_state, fresh_scheduler = run()
    fresh_state.load_state_dict(saved)
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert fresh_scheduler.last_epoch == 3
    assert isinstance(fresh.param_groups[0]["betas"], tuple)
    fresh_state.load_state_dict({**saved, "optimizer": as_lists(saved["optimizer"])})
    assert isinstance(fresh.param_groups[0]["betas"], tuple)


def as_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [as_lists(inner) for inner in value]
    return {key: as_lists(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def test_several_optimizers_by_name() -> None:
    def run(seed: int) -> tuple[dict[str, torch.optim.Optimizer], TorchState]:
        net = Net(seed)
        both: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon([net.first.weight, net.late.weight]),
            "rest": torch.optim.AdamW([net.first.bias, net.late.bias]),
        }
        return both, torch_state(net, both)

    _, state = run(0)
    saved = copy.deepcopy(state.state_dict())
    assert set(saved["optimizer"]["muon"]["state"]) == {"first.weight", "late.weight"}
    _, fresh = run(1)
    fresh.load_state_dict(saved)
    assert bits(fresh.state_dict()) == bits(saved)
    del saved["optimizer"]["muon"]
    with pytest.raises(MissingTensorError, match="muon"):
        fresh.load_state_dict(saved)


def test_what_does_not_fit_is_all_named_and_nothing_changes() -> None:
    net, optimizer, state = build(MAKERS["adamw"])
    train(net, optimizer, range(2))
    saved = copy.deepcopy(state.state_dict())
    _, _, fresh_state = build(MAKERS["adamw"], seed=1)
    before = bits(copy.deepcopy(fresh_state.state_dict()))
    del saved["model"]["first.bias"]
    saved["optimizer"]["state"]["late.weight"]["exp_avg"] = torch.zeros(3)
    saved["optimizer"]["groups"][1]["params"].pop("norm.bias")
    saved["model"]["late.weight"] = saved["model"]["late.weight"].double()
    with pytest.raises(LayoutMismatchError) as found:
        fresh_state.load_state_dict(saved)
    for named in ("first.bias", "late.weight.exp_avg", "norm.bias", "torch.float64"):
        assert named in str(found.value)
    assert bits(fresh_state.state_dict()) == before


def test_parameters_that_are_not_the_models_are_named_by_index() -> None:
    net = Net(0)
    stray = nn.Parameter(torch.zeros(7))
    with pytest.raises(InvalidInputError, match=r"parameter 1 of group 0 \(7,\)"):
        torch_state(net, torch.optim.SGD([net.first.weight, stray], lr=0.1))


def test_what_cannot_be_made_beforehand_is_refused() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
        lambda p: torch.optim.LBFGS([q for group in p for q in group["params"]]),
    ):
        net, _, state = build(make)
        before = bits(net.state_dict())
        with pytest.raises(InvalidInputError, match="first step"):
            state.state_dict()
        assert bits(net.state_dict()) == before and all(p.grad is None for p in net.parameters())


class Counting(nn.Linear):
    """A module with extra state, which is no tensor."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_extra_state_and_tied_weights_and_wrappers() -> None:
    def run() -> tuple[nn.Sequential, TorchState]:
        model = nn.Sequential(Counting(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        wrapped = torch.compile(model)
        assert isinstance(wrapped, nn.Module)
        return model, torch_state(wrapped, torch.optim.AdamW(wrapped.parameters()))

    model, state = run()
    model[0].seen = 4
    saved = copy.deepcopy(state.state_dict())
    assert set(saved["optimizer"]["state"]) == {"0.weight", "0.bias", "1.bias"}
    fresh, fresh_state = run()
    fresh_state.load_state_dict(saved)
    assert fresh[0].seen == 4 and fresh[1].weight is fresh[0].weight
    assert bits(fresh_state.state_dict()) == bits(saved)


def test_sharded_states_pass_through_as_they_are() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))

        def run(seed: int) -> tuple[nn.Module, TorchState]:
            torch.manual_seed(seed)
            model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
            assert isinstance(model, nn.Module)
            return model, torch_state(model, torch.optim.AdamW(model.parameters()))

        model, state = run(0)
        told = state.state_dict()
        moment = told["optimizer"]["state"]["1.weight"]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.placements == model[1].weight.placements
        assert isinstance(told["model"]["0.weight"], DTensor)
        with torch.no_grad():
            moment.to_local().fill_(0.5)
        saved = copy.deepcopy(told)
        fresh, fresh_state = run(1)
        fresh_state.load_state_dict(saved)
        assert torch.equal(fresh[0].weight.full_tensor(), model[0].weight.full_tensor())
        assert fresh_state.state_dict()["optimizer"]["state"]["1.weight"]["exp_avg"].to_local().eq(0.5).all()
    finally:
        torch.distributed.destroy_process_group()
