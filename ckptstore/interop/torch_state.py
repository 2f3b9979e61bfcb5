"""The state of a torch model with its optimizers, by parameter name.

A torch optimizer numbers its parameters, creates their states at the first gradient and casts FP32
moments to BF16 when it loads. Here names are the keys, every state exists before it is told (so a
fresh optimizer asks for exactly what a trained one has saved) and each tensor keeps its dtype. It
stands apart from `torch_lazy.py`, which creates those states. Argued in the design, section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckptstore.errors import InvalidInputError, LayoutMismatchError, MissingTensorError

from .torch_lazy import fill_lazy_states
from .torch_model import bare, model_state, parameter_names

# How a step is computed, not what: a restart on other hardware keeps its own choice.
_IMPLEMENTATION = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
_NAMED_AT_MOST = 20


class Scheduler(Protocol):
    """Any learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class TorchState:
    """A leaf of any state that is saved. Made by `torch_state`, which also checks what it is given.

    `state_dict()` gives {"model", "optimizer", "scheduler"} (those that exist). Its tensors are the live
    ones, so writing into them restores; an optimizer is {"state": {parameter: {key: value}}, "groups":
    {number: hyper-parameters, with "params": {name of a parameter: True}}}. All are dicts, so that ranks with
    other parameters (stages of a pipeline, experts) join. Non-persistent buffers are not in it.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer] | None,
        scheduler: Scheduler | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """The live state. Lazy optimizer states are created first; no parameter, gradient or existing state
        changes by a bit. InvalidInputError if an optimizer's states cannot be made or named."""
        model, names = model_state(bare(self.model))
        state: dict[str, Any] = {"model": model}
        if isinstance(self.optimizer, Mapping):
            state["optimizer"] = {key: _told(each, names) for key, each in self.optimizer.items()}
        elif self.optimizer is not None:
            state["optimizer"] = _told(self.optimizer, names)
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state`, in place; tensors that are already the live ones are not copied.

        Moments whose dtype differs from the saved one are replaced in the saved dtype, never cast. Raises
        MissingTensorError or LayoutMismatchError, all differences listed, and then has changed nothing.
        """
        current = self.state_dict()
        differs = _Differences()
        differs.keys("state", current, state)
        differs.stop()
        self._compare_model(current["model"], state["model"], differs)
        writes: list[Callable[[], None]] = []
        for name, optimizer, own, given in self._optimizers(current, state, differs):
            writes += self._plan(name, optimizer, own, given, differs)
        differs.stop()
        self._load_model(current["model"], state["model"])
        with torch.no_grad():
            for write in writes:
                write()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(state["scheduler"]))

    def _optimizers(
        self, current: Mapping[str, Any], state: Mapping[str, Any], differs: _Differences
    ) -> Iterator[tuple[str, Optimizer, Any, Any]]:
        if isinstance(self.optimizer, Mapping):
            differs.keys("optimizer", current["optimizer"], state["optimizer"])
            for key, optimizer in self.optimizer.items():
                if key in state["optimizer"]:
                    yield f"optimizer.{key}", optimizer, current["optimizer"][key], state["optimizer"][key]
        elif self.optimizer is not None:
            yield "optimizer", self.optimizer, current["optimizer"], state["optimizer"]

    def _compare_model(self, own: Mapping[str, Any], given: Mapping[str, Any], differs: _Differences) -> None:
        differs.keys("model", own, given)
        for name in own.keys() & given.keys():
            if isinstance(own[name], Tensor):
                differs.tensor(f"model.{name}", own[name], given[name])

    def _load_model(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Extra states, and tensors that hooks of the model made anew, only the model can take back."""
        if not all(_same_memory(value, given[name]) for name, value in own.items()):
            bare(self.model).load_state_dict(given, strict=True)

    def _plan(
        self, name: str, optimizer: Optimizer, own: Any, given: Any, differs: _Differences
    ) -> list[Callable[[], None]]:
        """What is to be written into one optimizer; differences are collected, nothing is changed yet."""
        parameters = {told: p for p, told in name_parameters(self.model, optimizer).items()}
        writes: list[Callable[[], None]] = []
        differs.keys(f"{name}.state", own["state"], given["state"])
        for told in own["state"].keys() & given["state"].keys():
            states, wanted = own["state"][told], given["state"][told]
            differs.keys(f"{name}.state.{told}", states, wanted)
            holder = optimizer.state[parameters[told]]
            for key in states.keys() & wanted.keys():
                if isinstance(states[key], Tensor):
                    differs.tensor(f"{name}.state.{told}.{key}", states[key], wanted[key], any_dtype=True)
                writes.append(_write(holder, key, wanted[key]))
        if len(own["groups"]) != len(given["groups"]):
            differs.wrong.append(
                f"{name} has {len(own['groups'])} groups, not the saved {len(given['groups'])}"
            )
            return writes
        for at, (group, wanted) in enumerate(
            zip(own["groups"].values(), given["groups"].values(), strict=True)
        ):
            # The saved group may list more: those of other pipeline stages or other ranks' experts.
            if odd := sorted(group["params"].keys() - wanted["params"].keys()):
                differs.wrong.append(
                    f"{name} group {at} was saved without parameters {', '.join(odd[:_NAMED_AT_MOST])}"
                )
            for key, value in wanted.items():
                if key not in _IMPLEMENTATION:
                    writes.append(_write(optimizer.param_groups[at], key, value))
        return writes


def _told(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    _check_known(optimizer, names)
    fill_lazy_states(optimizer)
    # A tensor is hashed by Python code, five times as slowly as its id.
    states = {id(parameter): state for parameter, state in optimizer.state.items()}
    state = {
        names[at]: dict(states[at])
        for group in optimizer.param_groups
        for at in map(id, group["params"])
        if states.get(at)
    }
    groups = {
        at: {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
        | {"params": {names[key]: True for key in map(id, group["params"])}}
        for at, group in enumerate(optimizer.param_groups)
    }
    return {"state": state, "groups": groups}


def torch_state(
    model: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    scheduler: Scheduler | None = None,
) -> TorchState:
    """The state of `model` and its optimizer (several: by name), as one leaf to save and restore.

    Raises InvalidInputError if an optimizer holds parameters that are not the model's.
    """
    optimizers = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
    names = parameter_names(bare(model))
    for each in optimizers:
        if each is not None:
            _check_known(each, names)
    return TorchState(model=model, optimizer=optimizer, scheduler=scheduler)


def name_parameters(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """The model's name of each parameter of `optimizer`; one shared by modules has its first name.

    Raises InvalidInputError naming, by group and index, all that the model does not have.
    """
    names = parameter_names(bare(model))
    _check_known(optimizer, names)
    return {p: names[id(p)] for group in optimizer.param_groups for p in group["params"]}


def _check_known(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    unknown = [
        f"parameter {index} of group {at} {tuple(parameter.shape)}"
        for at, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in names
    ]
    if unknown:
        told = ", ".join(unknown[:_NAMED_AT_MOST])
        raise InvalidInputError(
            f"{type(optimizer).__name__} holds {len(unknown)} parameters that are not the model's ({told}): "
            "pass the module that has them all, and make the optimizer after it was wrapped, sharded or moved",
            unknown=tuple(unknown),
        )


class _Differences:
    """What keeps a state from being loaded, collected so that all of it is told at once."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def keys(self, path: str, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.missing += sorted(f"{path}.{key}" for key in own.keys() - given.keys())
        self.wrong += sorted(f"{path}.{key} is not in this process" for key in given.keys() - own.keys())

    def tensor(self, path: str, own: Tensor, given: Any, *, any_dtype: bool = False) -> None:
        if not isinstance(given, Tensor):
            self.wrong.append(f"{path} is a {type(given).__name__}, not a tensor")
        elif own.shape != given.shape or (own.dtype != given.dtype and not any_dtype):
            saved = f"{given.dtype} {tuple(given.shape)}"
            self.wrong.append(f"{path} is saved as {saved}, but is {own.dtype} {tuple(own.shape)} here")

    def stop(self) -> None:
        """Raise what was collected, if anything was."""
        found = [f"{path} is missing" for path in self.missing] + self.wrong
        if found:
            kind = LayoutMismatchError if self.wrong else MissingTensorError
            more = f"; and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
            raise kind(
                f"the state does not fit: {'; '.join(found[:_NAMED_AT_MOST])}{more}; build the same model "
                "and optimizer as the saved run",
                problems=tuple(found),
            )


def _write(holder: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    """Set one entry: in place where the tensor keeps its dtype, and as the same kind of sequence."""

    def write() -> None:
        own = holder.get(key)
        if not isinstance(value, Tensor):
            holder[key] = tuple(value) if isinstance(own, tuple) else value
        elif not isinstance(own, Tensor) or own.dtype != value.dtype or own.shape != value.shape:
            device = own.device if isinstance(own, Tensor) else value.device
            holder[key] = value.detach().clone().to(device=device)
        elif not _same_memory(own, value):
            own.copy_(value)

    return write


def _same_memory(own: Any, given: Any) -> bool:
    if not isinstance(own, Tensor) or not isinstance(given, Tensor):
        return False
    one, two = (getattr(tensor, "_local_tensor", tensor) for tensor in (own, given))  # a DTensor's own part
    return (one.data_ptr(), one.shape, one.stride(), one.dtype, one.device) == (
        two.data_ptr(),
        two.shape,
        two.stride(),
        two.dtype,
        two.device,
    ) and one.device.type != "meta"
