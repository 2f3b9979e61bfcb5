"""One request to a server that keeps objects: who makes it, and the ways in which it fails.

It stands apart from the store because the two judge different things: a client knows what a reply means on
its wire, the store (`ckptstore.store.remote`) what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from ckptstore.store.base import ObjectInfo

Kind: TypeAlias = Literal[
    "absent",  # there is no such object
    "taken",  # the condition of the create was refused: an object is there, perhaps our own
    "beyond",  # the range ends behind the end of the object
    "again",  # certainly not done; worth another try
    "maybe",  # done or not; worth another try
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


class Client(Protocol):
    """One request a call, bounded in time; every failure is a RequestError. Thread-safe, of one process."""

    def get(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill non-empty `views` with the bytes from `start` on; "beyond" if there are fewer."""

    def get_rest(self, key: str, start: int) -> bytes:
        """All bytes from `start` on; may be "beyond" if there are none."""

    def size(self, key: str) -> int:
        """Bytes of the object."""

    def put(self, key: str, views: Sequence[memoryview], *, exclusive: bool) -> None:
        """Make the object, whole or not at all; `exclusive`: only if there is none, decided by the server."""

    def begin_parts(self, key: str) -> str:
        """The id of a new upload, of which nothing shows before `end_parts`."""

    def put_part(self, key: str, upload: str, number: int, views: Sequence[memoryview]) -> str:
        """Send part `number` (from 1 on); its tag."""

    def end_parts(self, key: str, upload: str, tags: Sequence[str], *, exclusive: bool) -> None:
        """Make the object of its parts; `exclusive` as for `put`."""

    def drop_parts(self, key: str, upload: str) -> None:
        """Forget an upload that was not completed."""

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
