"""How the segments of one part were written: past the page cache or through it, in parts or whole, and how fast.

For people who ask why a save is slow; no rule reads it. It stands apart from the part that carries it, since parts
from before it was recorded have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Segments that were written in one way. `reason` says why in no better one; `nbytes` counts headers too."""

    way: str
    reason: str | None
    segments: int
    nbytes: int

    def __post_init__(self) -> None:
        if not self.way or self.segments < 1 or self.nbytes < 0:
            raise ValueError(
                f"{self.segments} segments of {self.nbytes} bytes written {self.way!r} cannot be"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class IoRecord:
    """`seconds` in which a block was being written or a segment made durable; `written` is empty if nothing was."""

    seconds: float
    written: tuple[Written, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"{self.seconds} seconds of writing cannot be")

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "written": [
                {"way": each.way, "reason": each.reason, "segments": each.segments, "nbytes": each.nbytes}
                for each in self.written
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> IoRecord:
        """ValueError, TypeError or KeyError for what cannot be a record."""
        return cls(
            seconds=float(value["seconds"]),
            written=tuple(
                Written(
                    way=str(each["way"]),
                    reason=None if each["reason"] is None else str(each["reason"]),
                    segments=int(each["segments"]),
                    nbytes=int(each["nbytes"]),
                )
                for each in value["written"]
            ),
        )
