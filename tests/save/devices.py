"""An accelerator that does each thing as late, or as early, as it may be done; its memory is the host's.

A stream is a list of things to do. The trainer's runs when it is given something (`early`) or when somebody needs
it; the side stream likewise. Whoever waits for an event runs the side stream up to it. So a save that forgets to wait
for something finds the bytes of another time, at every run and not at some.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ckptstore import contribution
from ckptstore.staging import Block, StagingMemory
from ckptstore.structure import FlatState
from tests.save.runs import WAIT_S


@dataclass(slots=True, eq=False)
class Stream:
    """Things to do in order, of which `done` are done."""

    early: bool
    todo: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0

    def give(self, do: Callable[[], None]) -> None:
        self.todo.append(do)
        if self.early:
            self.run(len(self.todo))

    def run(self, upto: int) -> None:
        while self.done < upto:
            self.done += 1  # first: a thing may fail, and is not done twice
            self.todo[self.done - 1]()


@dataclass(slots=True, eq=False)
class Target:
    """Where a queued copy will write."""

    block: Block
    copied: bool = False


class Event:
    def __init__(self, devices: Devices, name: str) -> None:
        self._devices, self._name = devices, name
        self._upto = len(devices.side[name].todo)

    def wait(self) -> None:
        self._devices.wait(self._name, self._upto)


class Devices:
    """`DeviceStreams` of a few devices. What breaks a promise is told in `broken`."""

    def __init__(self, *, early_kernels: bool = True, early_copies: bool = False, count: int = 1) -> None:
        names = [f"fake:{n}" for n in range(count)]
        self.caller = {name: Stream(early_kernels) for name in names}
        self.side = {name: Stream(early_copies) for name in names}
        self.targets: list[Target] = []
        self.copies: list[int] = []  # parts of each
        self.broken: list[str] = []
        self.pinned_nbytes = 0
        self.pins = True
        self.fail_at = -1  # the copy that raises when it is queued
        self.waiting: Callable[[], None] = lambda: None  # who waits does this first
        self._lock = threading.RLock()
        self._homes: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}

    # -- the trainer's side

    def put(self, tensor: torch.Tensor, number: int = 0) -> torch.Tensor:
        """From now on this tensor, and every view of it, lies on a device."""
        self._homes[tensor.untyped_storage().data_ptr()] = (f"fake:{number}", weakref.ref(tensor))
        return tensor

    def kernel(self, tensor: torch.Tensor, do: Callable[[torch.Tensor], Any]) -> None:
        """The trainer's stream computes something of a tensor."""
        with self._lock:
            name = self.device_of(tensor)
            if name is None:
                do(tensor)
            else:
                torch.autograd.graph.increment_version(tensor)  # at the call, as torch does
                self.caller[name].give(lambda: do(tensor.data))

    def synchronize(self) -> None:
        with self._lock:
            for stream in (*self.caller.values(), *self.side.values()):
                stream.run(len(stream.todo))

    # -- DeviceStreams

    def device_of(self, data: Any) -> str | None:
        if not isinstance(data, torch.Tensor) or not data.numel():
            return None
        home = self._homes.get(data.untyped_storage().data_ptr())
        return None if home is None else home[0]

    def follow(self, device: Any) -> None:
        with self._lock:
            caller = self.caller[device]
            upto = len(caller.todo)
            self.side[device].give(lambda: caller.run(upto))

    def copy(self, device: Any, parts: Sequence[torch.Tensor], block: Block, at: int) -> None:
        with self._lock:
            self.copies.append(len(parts))
            if len(self.copies) - 1 == self.fail_at:
                raise RuntimeError("the device is gone")
            target = Target(block)
            self.targets.append(target)
            owners = [self._homes[part.untyped_storage().data_ptr()][1] for part in parts]
            self.side[device].give(lambda: self._copy(parts, owners, target, at))

    def _copy(self, parts: Any, owners: Any, target: Target, at: int) -> None:
        if not all(owner() is not None for owner in owners):
            self.broken.append("a tensor is gone before it was copied")
        if not target.block.users:
            self.broken.append("a block is nobody's when a device copies to it")
        for part in parts:
            raw = (
                torch.empty(part.numel(), dtype=part.dtype).copy_(part.reshape(-1)).view(torch.uint8).numpy()
            )
            target.block.memory[at : at + raw.nbytes] = raw
            at += raw.nbytes
        target.copied = True

    def record(self, device: Any) -> Event:
        with self._lock:
            return Event(self, device)

    def wait(self, name: str, upto: int) -> None:
        self.waiting()
        with self._lock:
            self.side[name].run(upto)

    # -- memory

    def pin(self, nbytes: int) -> torch.Tensor | None:
        if not self.pins:
            return None
        self.pinned_nbytes += nbytes
        return torch.empty(nbytes // 8, dtype=torch.int64).fill_(-1)

    def check_free(self, block: Block) -> None:
        with self._lock:
            if any(target.block is block and not target.copied for target in self.targets):
                self.broken.append("a block is free before a device has copied to it")

    @contextmanager
    def installed(self) -> Iterator[Devices]:
        """Every Checkpointer that is made here has these devices."""
        flatten, drop = contribution.flatten, StagingMemory.drop

        def flatten_as_devices(*args: Any, **more: Any) -> FlatState:
            flat = flatten(*args, **more)
            if flat.places is None:
                return flat
            places = tuple(
                [-1 if self.device_of(data) else at for at, data in zip(flat.places, flat.data, strict=True)]
            )
            return FlatState(structure=flat.structure, skeleton=flat.skeleton, places=places, data=flat.data)

        def checked(memory: StagingMemory, block: Block) -> None:
            with memory._changed:  # once it is free, another thread may have it
                if block.users == 1:
                    self.check_free(block)
                drop(memory, block)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contribution, "flatten", flatten_as_devices)
            patch.setattr(contribution, "streams_of_torch", lambda: self)
            patch.setattr(contribution, "pin", self.pin)
            patch.setattr(StagingMemory, "drop", checked)
            yield self


class Gate:
    """Threads with other names than `lets` wait until it is opened; `reached` by those that begin with `tells`."""

    def __init__(self, *lets: str, tells: str = "") -> None:
        self.reached, self.open, self._lets, self._tells = threading.Event(), threading.Event(), lets, tells

    def __call__(self) -> None:
        name = threading.current_thread().name
        if not name.startswith(self._lets):
            if name.startswith(self._tells):
                self.reached.set()
            assert self.open.wait(WAIT_S)
