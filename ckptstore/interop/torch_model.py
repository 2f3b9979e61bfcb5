"""What a module holds, by name, as torch tells it and in a fraction of the time.

`state_dict` and `named_parameters` pass each name up through every level of modules, and the first detaches
each tensor, which takes a DTensor longer than all else. Both are asked at every save. Where a module, or what
hangs on it, has its own way, torch is asked; apart from `torch_state.py`, which says what is saved of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_METHODS = {
    name: getattr(nn.Module, name)
    for name in (
        *("state_dict", "_save_to_state_dict", "get_extra_state"),
        *("named_parameters", "named_modules", "_named_members"),
    )
}


def bare(model: nn.Module) -> nn.Module:
    """The model without wrappers that only prefix its names, so that a run can go on with or without them."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = inner
        else:
            return model


def model_state(model: nn.Module) -> tuple[dict[str, Any], dict[int, str]]:
    """`model.state_dict()`, but with the live parameters instead of detached ones; and `parameter_names`."""
    walk = _Walk()
    if walk.enter(model, ""):
        return walk.state, walk.names
    # A hook that is given tensors was written for detached ones.
    hooked = any(module._state_dict_hooks for module in model.modules())
    return dict(model.state_dict(keep_vars=not hooked)), parameter_names(model)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by id: right as long as the model has it."""
    walk = _Walk()
    if walk.enter(model, ""):
        return walk.names
    return {id(parameter): name for name, parameter in model.named_parameters()}


class _Walk:
    """The order of both `state_dict` and `named_parameters`: a module's own, then those in it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self._kinds: dict[type, bool] = {}

    def enter(self, module: nn.Module, prefix: str) -> bool:
        """False if the module, or one in it, has its own way; then nothing found is of use."""
        if module._state_dict_hooks or module._state_dict_pre_hooks or not self._is_plain(module):
            return False
        state, names = self.state, self.names
        for name, parameter in module._parameters.items():
            if parameter is not None:
                told = prefix + name
                state[told] = parameter
                names.setdefault(id(parameter), told)
        if module._buffers:
            left_out = module._non_persistent_buffers_set
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in left_out:
                    state[prefix + name] = buffer
        for name, child in module._modules.items():
            if child is not None and not self.enter(child, f"{prefix}{name}."):
                return False
        return True

    def _is_plain(self, module: nn.Module) -> bool:
        kind = type(module)
        plain = self._kinds.get(kind)
        if plain is None:
            plain = all(getattr(kind, name) is method for name, method in _METHODS.items())
            self._kinds[kind] = plain
        return plain and module.__dict__.keys().isdisjoint(_METHODS)
