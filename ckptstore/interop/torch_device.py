"""Side streams and pinned memory of whatever accelerator this torch has.

Stands apart as the only module that speaks of streams and events, and it speaks of them through `torch.accelerator`,
`torch.Stream` and `torch.Event` alone: no kind of device is named here, or anywhere else.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ckptstore.staging import Block

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class TorchStreams:
    """`transfer.DeviceStreams` of torch's accelerator."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._sides: dict[torch.device, torch.Stream | None] = {}

    @classmethod
    def find(cls) -> TorchStreams | None:
        """None where torch has no accelerator."""
        accelerator = torch.accelerator.current_accelerator()
        return None if accelerator is None else cls(accelerator.type)

    def device_of(self, data: Any) -> torch.device | None:
        if not isinstance(data, torch.Tensor) or data.is_cpu or data.device.type != self._kind:
            return None
        return data.device if self._side(data.device) is not None else None

    def _side(self, device: torch.device) -> torch.Stream | None:
        with self._lock:
            if device not in self._sides:
                self._sides[device] = _make_stream(device)
            return self._sides[device]

    def _stream(self, device: Any) -> torch.Stream:
        side = self._sides[device]
        assert side is not None  # device_of gave this device
        return side

    def follow(self, device: Any) -> None:
        self._stream(device).wait_stream(torch.accelerator.current_stream(device))

    def copy(self, device: Any, parts: Sequence[Any], block: Block, at: int) -> None:
        # What is made here on the device is of the side stream's memory, which the next copy on it may have again.
        with torch.no_grad(), self._stream(device):
            flat = [_words(part) for part in parts]
            if len({each.dtype for each in flat}) > 1:  # or torch would convert them to one type
                flat = [each.view(torch.uint8) for each in flat]
            joined = flat[0] if len(flat) == 1 else torch.cat(flat)
            target = _tensor(block).view(joined.dtype)
            first = at // joined.element_size()
            # A copy to memory that is not pinned may fall behind or not, as the device likes: let it be waited for.
            target[first : first + joined.numel()].copy_(joined, non_blocking=block.pinned)

    def record(self, device: Any) -> TorchArrival:
        return TorchArrival(self._stream(device).record_event())


class TorchArrival:
    """`transfer.Arrival`: an event, which is waited for without the interpreter's lock."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def _make_stream(device: torch.device) -> torch.Stream | None:
    """None, with a warning, where one of the calls that a save needs is missing: backends have not all of them."""
    try:
        side = torch.Stream(device=device)
        TorchArrival(side.record_event()).wait()
        side.wait_stream(torch.accelerator.current_stream(device))
        return side
    except RuntimeError as error:
        warnings.warn(
            f"{device} gives no side stream ({error}): its tensors are copied one by one, by calls that wait",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _words(part: torch.Tensor) -> torch.Tensor:
    """The elements in order, as integers: a lazy conjugate would be taken by the host, and before the copy is done."""
    plain = part.detach()
    if plain.is_complex():
        plain = plain.resolve_conj()
    plain = plain.resolve_neg() if plain.is_neg() else plain
    flat = plain.reshape(-1).contiguous()
    if flat.stride(0) != 1:  # a single element that was one of many is contiguous all the same
        flat = flat.as_strided((1,), (1,))
    return flat.view(_WORDS[plain.element_size()])


def _tensor(block: Block) -> torch.Tensor:
    """The block's memory as words. Of pinned memory torch's own tensor, by which a device knows that it is pinned."""
    if block.torch is None:
        block.torch = torch.from_numpy(block.memory).view(torch.int64)
    words: torch.Tensor = block.torch
    return words


def pinned_words(nbytes: int) -> torch.Tensor | None:
    """`nbytes` of memory that a device copies into by itself, as words; None, with a warning, where there is none.

    No byte more, since torch rounds up to the next power of two. It is of whole pages then, which direct I/O wants.
    """
    try:
        return torch.empty(nbytes // 8, dtype=torch.int64, pin_memory=True)
    except RuntimeError as error:  # NotImplementedError is one: a backend without pinned memory
        warnings.warn(
            f"no pinned memory for copies from the accelerator ({error}): ordinary memory is used, which is slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
