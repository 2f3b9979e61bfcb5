"""What is noted while one part's segments are written, for its `IoRecord`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptstore.clock import Clock
from ckptstore.encoder import DeviceMeter
from ckptstore.iorecord import IoRecord, Written
from ckptstore.store.base import Way


class WriteLog:
    """Of one part. Thread-safe. `device` is told as well: what it measures goes on over many parts."""

    def __init__(self, clock: Clock, device: DeviceMeter | None = None) -> None:
        self._meter = DeviceMeter(clock.monotonic)
        self._device = device
        self._lock = threading.Lock()
        self._written: dict[Way, tuple[int, int]] = {}

    @contextmanager
    def busy(self, nbytes: int) -> Iterator[None]:
        """Around each call that writes; `nbytes` of it."""
        with self._meter.busy(nbytes):
            if self._device is None:
                yield
            else:
                with self._device.busy(nbytes):
                    yield

    def note(self, way: Way, nbytes: int) -> None:
        """A segment of `nbytes` is durable."""
        with self._lock:
            count, before = self._written.get(way, (0, 0))
            self._written[way] = count + 1, before + nbytes

    def record(self) -> IoRecord:
        with self._lock:
            found = sorted(self._written.items(), key=lambda each: (each[0].name, each[0].reason or ""))
        return IoRecord(
            seconds=round(self._meter.busy_s, 6),
            written=tuple(
                Written(way=way.name, reason=way.reason, segments=count, nbytes=nbytes)
                for way, (count, nbytes) in found
            ),
        )
