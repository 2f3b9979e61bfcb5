"""Who saves and loads in a bench: one interface for ckptstore and for other libraries, and ckptstore's side of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

import ckptstore
from ckptstore.bench.loops import Pending
from ckptstore.bench.states import State
from ckptstore.checkpointer import Checkpointer
from ckptstore.incarnation import Incarnation
from ckptstore.savehandle import SaveHandle
from ckptstore.store.base import open_store

WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a library is and promises. `durable`: does it fsync what it wrote before it says that it is done?
    Where it does not, the bench does, and counts the time."""

    id: str
    words: str
    version: str
    durable: str  # "yes", "files" (not the folders that name them), "no"
    checksums: str
    background: bool  # does save return before the bytes are written?
    extra_memory: (
        float  # most extra memory that a save or load takes, in states: for the check before the start
    )


class Contestant(Protocol):
    """One library at work in a place of its own. Calls come from one thread, in this order:
    open, save…, reload, load…, close."""

    @property
    def facts(self) -> Facts: ...

    def open(self, place: str) -> None:
        """Begin in `place`, an empty folder or an unused URL."""
        ...

    def save(self, number: int, state: State) -> Pending:
        """Returns once the caller may change the state; numbers grow."""
        ...

    def nbytes_written(self, number: int) -> int:
        """Bytes that the save wrote, once it is done."""
        ...

    def keep_only(self, number: int) -> None:
        """Delete what older saves wrote."""
        ...

    def reload(self) -> None:
        """Get ready to load the newest save."""
        ...

    def load(self, into: State) -> None:
        """Fill the tensors of `into` with those of the newest save."""
        ...

    def close(self) -> None:
        """Wait for what is under way and free all memory. Safe to call twice."""
        ...


class _Save:
    """A save of ours: done once it is committed."""

    def __init__(self, handle: SaveHandle) -> None:
        self.handle = handle

    def done(self) -> bool:
        return self.handle.done()

    def wait(self) -> None:
        self.handle.result(WAIT_S)


class Ours:
    """ckptstore as users call it: begin, save, restore, with every default."""

    def __init__(self) -> None:
        self._place = ""
        self._inc: Incarnation | None = None
        self._ckpt: Checkpointer | None = None
        self._saves: dict[int, _Save] = {}

    @property
    def facts(self) -> Facts:
        return Facts(
            id="ckptstore",
            words="ckptstore",
            version=ckptstore.__version__,
            durable="yes",
            checksums="XXH3-128",
            background=True,
            extra_memory=1.05,
        )

    def open(self, place: str) -> None:
        self._place = place
        self.reload()

    def save(self, number: int, state: State, *, lazy: bool = False) -> Pending:
        if self._ckpt is None:
            raise RuntimeError("not open")
        self._saves[number] = found = _Save(self._ckpt.save(number, state.nested(), lazy=lazy))
        return found

    def wait_staged(self, number: int) -> None:
        """What an optimizer waits for before it changes anything, after a lazy save."""
        self._saves[number].handle.wait_staged(WAIT_S)

    def nbytes_written(self, number: int) -> int:
        attempt = str(self._saves[number].handle.attempt)
        return sum(info.nbytes for info in open_store(self._place).list("") if attempt in info.key)

    def keep_only(self, number: int) -> None:
        # There is no gc yet. Nothing of these segments is referenced any more: every chunk has changed since.
        kept = str(self._saves[number].handle.attempt)
        store = open_store(self._place)
        for info in store.list("data/"):
            if kept not in info.key:
                store.delete(info.key)

    def reload(self) -> None:
        self._end()
        self._inc = ckptstore.begin(self._place, {"trainer": 1})
        self._ckpt = ckptstore.Checkpointer(self._inc, role="trainer", rank=0)

    def load(self, into: State) -> None:
        if self._ckpt is None:
            raise RuntimeError("not open")
        self._ckpt.restore(into.nested())

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        ckpt, inc, self._ckpt, self._inc = self._ckpt, self._inc, None, None
        with contextlib.ExitStack() as stack:
            if inc is not None:
                stack.callback(inc.close)
            if ckpt is not None:
                stack.callback(ckpt.close)
