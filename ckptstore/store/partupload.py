"""An upload whose blocks are sent as parts of one object while others are yet to come, several at a time.

It stands apart from the store as the one place that keeps count of what is on its way: a bounded number of copies,
and a failure of any of them, which every later call raises. Block 0 is part 1 and is sent last, since it is known
last; the parts show as an object at the end of them, or never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final, Protocol, TypeVar

import numpy as np

from ckptstore.errors import OutcomeUnknownError
from ckptstore.store.base import Buffer, Upload, Way, byte_views
from ckptstore.store.collected import check_blocks
from ckptstore.store.request import Parts

PARTS_ON_THEIR_WAY: Final = 4  # of one upload, each a copy of a block
_T = TypeVar("_T")


class Sender(Protocol):
    """What `ckptstore.store.remote.RemoteStore` does for it."""

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None: ...

    def begin_parts(self, key: str) -> Parts: ...

    def put_part(self, parts: Parts, number: int, views: Sequence[memoryview]) -> str: ...

    def end_parts(self, parts: Parts, tags: Sequence[str], *, unsure: bool) -> None: ...

    def drop_parts(self, parts: Parts) -> None: ...

    def submit(self, act: Callable[[], _T]) -> Future[_T]: ...


class PartUpload:
    """An Upload that holds at most `PARTS_ON_THEIR_WAY` blocks of its own; an object of one block is sent whole."""

    def __init__(self, sender: Sender, key: str) -> None:
        self._sender = sender
        self._key = key
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(PARTS_ON_THEIR_WAY)
        self._parts: Parts | None = None
        self._first: bytearray | None = None  # block 0 of what may stay the only one
        self._sizes: dict[int, int] = {}
        self._sent: dict[int, Future[str]] = {}
        self._unsure = self._done = False

    def write(self, block: int, data: Buffer) -> None:
        views = byte_views(data)
        with self._lock:
            if block == 0 and self._parts is None:
                self._first = _copy(views)
                self._sizes[0] = len(self._first)
                return
            if self._parts is None:
                self._parts = self._sender.begin_parts(self._key)
            failed = [sent for sent in self._sent.values() if sent.done() and sent.exception() is not None]
        if failed:
            failed[0].result()  # the upload is of no use any more
        self._room.acquire()
        try:
            self._send(self._parts, block, _copy(views))
        except BaseException:
            self._room.release()
            raise

    def _send(self, parts: Parts, block: int, copy: bytearray) -> None:
        sent = self._sender.submit(lambda: self._sender.put_part(parts, block + 1, [memoryview(copy)]))
        sent.add_done_callback(lambda _: self._room.release())
        with self._lock:
            self._sizes[block] = len(copy)
            self._sent[block] = sent

    def finish(self, nbytes: int) -> None:
        with self._lock:
            parts, first = self._parts, self._first
            check_blocks(dict(self._sizes), nbytes)
        if parts is None:
            self._sender.create(self._key, first if first is not None else b"")
        else:
            if first is not None and 0 not in self._sent:
                self._room.acquire()
                self._send(parts, 0, first)
            tags = [self._sent[block].result() for block in range(len(self._sizes))]
            try:
                self._sender.end_parts(parts, tags, unsure=self._unsure)
            except OutcomeUnknownError:
                self._unsure = True
                raise
        self._done = True

    @property
    def way(self) -> Way:
        with self._lock:
            return Way("whole", "no larger than a part") if self._parts is None else Way("parts")

    def abort(self) -> None:
        with self._lock:
            parts, self._parts = self._parts, None
            sent = list(self._sent.values())
        for each in sent:
            each.cancel()
        wait(sent)  # a part that came after the upload was dropped would stay, and cost money
        if parts is not None and not self._done:
            self._sender.drop_parts(parts)
        self._first = None


def _copy(views: Sequence[memoryview]) -> bytearray:
    copy = bytearray(sum(view.nbytes for view in views))
    for view in views:  # one, or none for an empty block; numpy copies without the interpreter's lock
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(view, np.uint8))
    return copy


def _conforms(upload: PartUpload) -> Upload:
    return upload  # checked by mypy
