"""One request to a server that keeps objects: who makes it, and the ways in which it fails.

It stands apart from the store because the two judge different things: a client knows what a reply means on
its wire, the store (`ckptstore.store.remote`) what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from ckptstore.store.base import ObjectInfo

Kind: TypeAlias = Literal[
    "absent",  # there is no such object
    "taken",  # the condition of the create was refused: an object is there, perhaps our own
    "beyond",  # the range ends behind the end of the object
    "again",  # certainly not done; worth another try
    "maybe",  # done or not; worth another try
    "unclear",  # done or not, and another try would end the same
    "refused",  # not done, and another try would end the same
]


class RequestError(Exception):
    """How one request failed. It never leaves the store; `advice` says what a person can do."""

    def __init__(
        self, kind: Kind, reason: str, advice: str = "see that the server can be reached, and try again"
    ) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.reason = reason
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One object that is sent in parts. `mark` is random and shows at the object, so that its writer knows it again."""

    key: str
    upload: str
    mark: str


class PartsClient(Protocol):
    """The requests of objects that are sent in parts; as those of a Client."""

    def begin_parts(self, key: str, mark: str) -> str:
        """The id of a new upload, of which nothing shows before `end_parts`."""

    def put_part(self, parts: Parts, number: int, views: Sequence[memoryview]) -> str:
        """Send part `number` (from 1 on); its tag."""

    def end_parts(self, parts: Parts, tags: Sequence[str], *, exclusive: bool) -> None:
        """Make the object of its parts; `exclusive` as for `put`."""

    def drop_parts(self, parts: Parts) -> None:
        """Forget an upload that was not completed."""

    def mark(self, key: str) -> str | None:
        """The mark of the object that is there; None if it has none."""


class Client(Protocol):
    """One request a call, bounded in time; every failure is a RequestError. Thread-safe, of one process."""

    @property
    def parts(self) -> PartsClient | None:
        """What sends objects in parts; None where they are sent whole."""

    @property
    def no_create(self) -> str | None:
        """Why nothing can be created only if it is absent; None if it can."""

    def get(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill non-empty `views` with the bytes from `start` on; "beyond" if there are fewer."""

    def get_rest(self, key: str, start: int) -> bytes:
        """All bytes from `start` on; may be "beyond" if there are none."""

    def size(self, key: str) -> int:
        """Bytes of the object."""

    def put(self, key: str, views: Sequence[memoryview], *, exclusive: bool) -> None:
        """Make the object, whole or not at all; `exclusive`: only if there is none, decided by the server."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, as they are now; several requests."""

    def delete(self, key: str) -> None:
        """Remove the object; fine if there is none."""

    def close(self) -> None:
        """Give connections back."""


def split(views: Sequence[memoryview], nbytes_max: int) -> Iterator[tuple[int, Sequence[memoryview]]]:
    """Pieces of at most `nbytes_max` bytes, end to end, each with its place in the whole; no copy."""
    at = start = 0
    pieces: list[memoryview] = []
    for view in views:
        while view.nbytes:
            piece = view[: nbytes_max - (at - start)]
            pieces.append(piece)
            at, view = at + piece.nbytes, view[piece.nbytes :]
            if at - start == nbytes_max:
                yield start, pieces
                start, pieces = at, []
    if pieces:
        yield start, pieces


def joined(views: Sequence[memoryview]) -> bytes | bytearray:
    """All of `views` in one piece of memory, that of the only one where a client takes it as it is.

    numpy copies without the interpreter's lock, `bytes.join` does not.
    """
    only = views[0].obj if len(views) == 1 else None
    if isinstance(only, bytes | bytearray) and len(only) == views[0].nbytes:
        return only
    whole = bytearray(sum(view.nbytes for view in views))
    target, at = np.frombuffer(whole, np.uint8), 0
    for view in views:
        np.copyto(target[at : at + view.nbytes], np.frombuffer(view, np.uint8))
        at += view.nbytes
    return whole
