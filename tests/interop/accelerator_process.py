"""Save and restore tensors of a device that torch knows as its accelerator, with the streams and events of torch.

Run as a process of its own, since a backend stays registered. Its memory is the host's and its streams do nothing, so
this shows that the calls exist and fit together; that they are needed is shown with the fake of `tests/save`.
Such a backend has no events to wait for: `waits` as second argument gives it some, else the save must do without
streams. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import ckptstore
from ckptstore import Checkpointer
from ckptstore.interop import torch_device

_setup_privateuseone_for_python_backend("npy")


class OnDevice(torch.Tensor):
    """A tensor of the device: `host` has its elements."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="npy:0",
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS.append(
            (str(func), bool((kwargs or {}).get("non_blocking")), torch.accelerator.current_stream())
        )
        found = func(*tree_map(_host, args), **tree_map(_host, kwargs or {}))
        if str(func).startswith("aten.copy_"):
            return args[0]
        return tree_map(lambda each: cls(each) if isinstance(each, torch.Tensor) else each, found)


CALLS: list[tuple[str, bool, torch.Stream]] = []


def _host(value: Any) -> Any:
    return value.host if isinstance(value, OnDevice) else value


def _wait(arrival: torch_device.TorchArrival) -> None:
    assert isinstance(arrival._event, torch.Event)
    WAITS.append(arrival._event)


WAITS: list[torch.Event] = []


def main(url: str, waits: bool) -> None:
    if waits:
        torch_device.TorchArrival.wait = _wait  # type: ignore[method-assign]  # see above
    state: dict[str, Any] = {
        "large": torch.randn(300, 1001),
        "turned": torch.randn(70, 50).t(),
        "one": torch.arange(6.0)[::5][:1],
        "complex": torch.randn(9, dtype=torch.complex64),
        "wide": torch.randn(5, dtype=torch.complex128)[::2],
        "fp8": torch.randn(33).to(torch.float8_e4m3fnuz),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "host": torch.ones(3),
        **{f"small{n}": torch.full((n % 7 + 1,), n, dtype=torch.bfloat16) for n in range(200)},
        **{f"flag{n}": torch.full((n % 3 + 1,), n % 2 == 0) for n in range(200)},
    }
    placed = {name: value if name == "host" else OnDevice(value) for name, value in state.items()}
    with (
        warnings.catch_warnings(record=True) as caught,
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        warnings.simplefilter("always")
        CALLS.clear()
        ckpt.save(1, placed).result(60)
        calls = list(CALLS)
        ckpt.save(2, placed, lazy=True).result(60)
        streams = ckpt._contributor._streams
    read = ckptstore.open(url).read(1)
    assert isinstance(streams, torch_device.TorchStreams)
    print(
        json.dumps(
            {
                "different": [n for n, v in state.items() if not _same(read[n], v)],
                "sides": [str(device) for device, side in streams._sides.items() if side is not None],
                "waits": len(WAITS),
                "copies": sum(name.startswith("aten.copy_") for name, _, _ in calls),
                "said": [str(each.message) for each in caught],
                "verified": ckptstore.open(url).verify(2).ok,
            }
        )
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    if one.dtype == torch.float8_e4m3fnuz:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one.resolve_conj(), other.resolve_conj())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["waits"])
