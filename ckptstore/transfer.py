"""Copies out of accelerators, beside what the trainer's own streams do.

One side stream a device: it begins after all that the caller's stream was given before the save, copies block by
block into pinned memory, and marks the end of each block, for the writer, and the end of all, for the caller. What a
device does is behind `DeviceStreams`, so that a fake can do each copy as late as it may be done. Why the
caller waits, and not only its stream: docs/explanation/performance.md.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol

from ckptstore.errors import InternalError
from ckptstore.held import torch_module
from ckptstore.staging import Block
from ckptstore.tensor import cut_flat_range

Device = Hashable
NO_DEVICES: Final[Mapping[int, Device]] = {}


class Arrival(Protocol):
    """A point in the order of one side stream."""

    def wait(self) -> None:
        """Return once everything that was queued before it has been copied; by any thread, any number of times.

        Raises what the device failed of; then nobody knows what has been copied, or still will be.
        """


class DeviceStreams(Protocol):
    """One side stream for each accelerator. What is queued in one is done in that order. Thread-safe."""

    def device_of(self, data: Any) -> Device | None:
        """The accelerator that holds a tensor; None for host memory, and for a device without streams."""

    def follow(self, device: Device) -> None:
        """What is queued from now on begins after all that the calling thread's current stream was given until now."""

    def copy(self, device: Device, parts: Sequence[Any], block: Block, at: int) -> None:
        """Queue a copy of the elements of `parts`, each row-major, end to end to byte `at` of `block`.

        Several parts are joined on the device and copied as one. Parts and block may be changed, and given to
        others, only after an Arrival recorded later was waited for.
        """

    def record(self, device: Device) -> Arrival:
        """Behind what has been queued so far."""


class Transfer:
    """What one snapshot copies out of accelerators; `devices` says where each leaf lies that is not in host memory."""

    def __init__(self, streams: DeviceStreams, devices: Mapping[int, Device]) -> None:
        self.devices = devices
        self._streams = streams
        self._all = sorted(set(devices.values()), key=str)
        self._follows = False

    @classmethod
    def of(
        cls, streams: DeviceStreams, data: Sequence[Any], places: tuple[int, ...] | None
    ) -> Transfer | None:
        """None where all leaves are in host memory. Only those that are no run of it (`places`) are looked at."""
        if places is not None and (not places or min(places) >= 0):
            return None
        numbers = range(len(data)) if places is None else [n for n, at in enumerate(places) if at < 0]
        found = {n: streams.device_of(data[n]) for n in numbers}
        devices = {n: device for n, device in found.items() if device is not None}
        return cls(streams, devices) if devices else None

    def follow(self) -> None:
        """To be called by the thread that saves, whose streams are computing what is to be copied."""
        for device in self._all:
            self._streams.follow(device)
        self._follows = True

    def copy(self, device: Device, parts: Sequence[Any], block: Block, at: int) -> None:
        if not self._follows:
            raise InternalError("a device is read before its stream follows the caller's: report this")
        self._streams.copy(device, parts, block, at)

    def devices_of(self, leaves: Collection[int]) -> list[Device]:
        return sorted({self.devices[n] for n in leaves if n in self.devices}, key=str)

    def record(self, devices: Collection[Device]) -> tuple[Arrival, ...]:
        return tuple([self._streams.record(device) for device in devices])

    def finish(self) -> None:
        """Return once all is copied that was queued: one event a device to wait for."""
        for arrival in self.record(self._all):
            arrival.wait()


def streams_of_torch() -> DeviceStreams | None:
    """None in a process without torch, or whose torch has no accelerator."""
    if torch_module() is None:
        return None
    from ckptstore.interop.torch_device import TorchStreams

    return TorchStreams.find()


def pin(nbytes: int) -> Any:
    """Pinned memory as a torch tensor of words; None, with a warning, where there is none."""
    from ckptstore.interop.torch_device import pinned_words

    return pinned_words(nbytes)


def parts_of(data: Any, shape: tuple[int, ...], start: int, nbytes: int) -> list[Any]:
    """Views of `nbytes` bytes from byte `start` of a tensor's row-major elements, in order."""
    size = data.element_size()
    first, last = start // size, (start + nbytes) // size
    whole = data.detach()
    if not nbytes:
        return []
    if nbytes == whole.numel() * size:
        return [whole]
    if whole.is_contiguous():
        return [whole.view(-1)[first:last]]
    return [whole[box.slices] for box in cut_flat_range(shape, first, last)]
