"""Create optimizer states that torch would create at a parameter's first gradient.

A parameter that never had a gradient has no moments, so what an optimizer holds would depend on what
was trained. Creating all states first makes a fresh and a trained optimizer hold the same. It stands
apart because it must act on the live optimizer of a run and may change nothing that a later update
could see: training after it equals, bit for bit, training without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ckptstore.errors import InvalidInputError

CHUNK_NBYTES: Final = 64 << 20
"""Zero gradients (and copies of parameters) that exist at one time, unless one parameter is larger."""


def fill_lazy_states(optimizer: Optimizer) -> None:
    """Create the state of every parameter that requires a gradient and has none.

    No parameter, gradient, hook, hyper-parameter or existing state changes. Raises InvalidInputError for
    an optimizer whose states come only from real gradients.
    """
    # By id, since torch hashes tensors in Python, and this is asked at every save.
    states = {id(parameter): state for parameter, state in optimizer.state.items()}
    momentum = isinstance(optimizer, SGD)
    for group in optimizer.param_groups:
        if momentum and group["momentum"] == 0:
            continue
        wanting = [
            p
            for p in group["params"]
            if (not (state := states.get(id(p))) or (momentum and state.get("momentum_buffer") is None))
            and p.requires_grad
        ]
        for chunk in _chunks(wanting):
            try:
                _fill(optimizer, group, chunk)
            except InvalidInputError:
                raise
            except Exception as error:  # a third party's step may raise anything
                raise InvalidInputError(
                    f"{type(optimizer).__name__} has no state yet for {len(wanting)} parameters and cannot "
                    f"make it from zero gradients ({error}): save and restore after a first step",
                    optimizer=type(optimizer).__name__,
                ) from error


def _chunks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    nbytes = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if chunk and nbytes + size > CHUNK_NBYTES:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(parameter)
        nbytes += size
    if chunk:
        yield chunk


def _fill(optimizer: Optimizer, group: dict[str, Any], chunk: list[Tensor]) -> None:
    if isinstance(optimizer, SGD):
        _fill_momentum(optimizer, group, chunk)
        return
    gradients = [p.grad for p in chunk]
    try:
        for parameter in chunk:
            parameter.grad = torch.zeros_like(parameter)
        alone = {**group, "params": chunk}
        if not _init_alone(optimizer, alone):
            _step_alone(optimizer, alone)
    except BaseException:
        for parameter in chunk:
            optimizer.state.pop(parameter, None)
        raise
    finally:
        for parameter, gradient in zip(chunk, gradients, strict=True):
            parameter.grad = gradient


def _fill_momentum(optimizer: SGD, group: dict[str, Any], chunk: list[Tensor]) -> None:
    """SGD takes its first gradient as the buffer. A buffer of -0.0 gives just that: -0.0 * m + g is g, also
    where g is -0.0; with dampening no buffer does, since the first gradient alone is not damped."""
    if group["dampening"] != 0:
        raise InvalidInputError(
            f"SGD with dampening {group['dampening']} has no momentum yet for {len(chunk)} parameters, and none "
            "made beforehand gives the same first step: use dampening=0, or save and restore after a first step",
            dampening=group["dampening"],
        )
    for parameter in chunk:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, -0.0, requires_grad=False)


def _init_alone(optimizer: Optimizer, alone: dict[str, Any]) -> bool:
    """Let torch's optimizers do what they do before an update, and no update. False if that made no state."""
    initialise = getattr(optimizer, "_init_group", None)
    if initialise is None:
        return False
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(initialise).parameters)[1:]]
    with torch.no_grad():
        initialise(alone, *lists)
    return all(optimizer.state.get(parameter) for parameter in alone["params"])


def _step_alone(optimizer: Optimizer, alone: dict[str, Any]) -> None:
    """One update by zero gradients at rate 0 of a group that holds the wanting parameters alone."""
    step = type(optimizer).step  # not the instance's: schedulers count through it
    if getattr(step, "hooked", False):
        step = inspect.unwrap(
            step, stop=lambda outer: not getattr(outer, "hooked", False)
        )  # without hooks: they belong to real updates
    parameters = alone["params"]
    before = [p.detach().clone() for p in parameters]
    groups, rate = optimizer.param_groups, alone.get("lr")
    still = {"lr": torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0}
    optimizer.param_groups = [{**alone, **still}]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        if isinstance(count := state.get("step"), Tensor):
            count.zero_()
        elif count is not None:
            state["step"] = type(count)(0)
