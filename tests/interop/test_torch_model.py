"""A module's state and names are those that torch tells, whatever hangs on the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ckptstore.interop.torch_model import model_state, parameter_names
from ckptstore.pieces import memory_of


class Own(nn.Module):
    """With a buffer that is kept, one that is not, an absent parameter and an absent module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("dropped", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)
        self.register_module("none", None)
        self.more = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in range(3)])


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Saving(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more"] = torch.ones(1)


class Named(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return [(f"own.{name}", each) for name, each in super().named_parameters(*args, **kwargs)]


def tied() -> nn.Module:
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    net["c"] = net["b"]
    return net


def with_post_hook() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2))

    def hook(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for name in list(state):
            assert not state[name].requires_grad  # as hooks know it
            state[f"{name}.seen"] = state[name] + 1

    net[0]._register_state_dict_hook(hook)
    return net


def with_pre_hook() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_state_dict_pre_hook(lambda module, prefix, keep: module.bias.data.fill_(7))
    return net


def with_own_method() -> nn.Module:
    net: Any = nn.Sequential(nn.Linear(2, 2))
    net[0].state_dict = lambda *args, destination, prefix, keep_vars: destination.update({prefix + "x": 3})
    return net  # type: ignore[no-any-return]  # torch.compile has no types


def parametrized() -> nn.Module:
    net = nn.Linear(2, 2)
    parametrize.register_parametrization(net, "weight", nn.Identity())
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Own,
    "nested": lambda: nn.Sequential(Own(), nn.ModuleList([Own(), nn.Embedding(3, 2)])),
    "tied": tied,
    "extra state": lambda: nn.Sequential(Extra(2, 2), nn.Linear(2, 2)),
    "saves more": lambda: nn.Sequential(Saving(2, 2), nn.Linear(2, 2)),
    "own names": lambda: Named(2, 2),
    "own names within": lambda: nn.Sequential(Named(2, 2)),
    "hook behind": with_post_hook,
    "hook before": with_pre_hook,
    "method of an instance": with_own_method,
    "parametrized": parametrized,
    "lstm": lambda: nn.LSTM(2, 3),
}


@pytest.mark.parametrize("kind", MODELS)
def test_state_and_names_are_as_torch_tells_them(kind: str) -> None:
    model = MODELS[kind]()
    found, names = model_state(model)
    told = model.state_dict()
    assert list(found) == list(told)
    for name, value in told.items():
        if isinstance(value, torch.Tensor) and not name.endswith((".seen", "more")):
            assert memory_of(found[name].detach()) == memory_of(value)
        elif not isinstance(value, torch.Tensor):
            assert found[name] == value
    wanted = {id(parameter): name for name, parameter in model.named_parameters()}
    assert parameter_names(model) == wanted == names


def test_what_is_changed_between_two_saves_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model_state(model)
    model[0].register_buffer("new", torch.ones(1))
    model[0].bias = None
    model.append(nn.Linear(1, 1))
    assert list(model_state(model)[0]) == ["0.weight", "0.new", "1.weight", "1.bias"]
