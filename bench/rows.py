"""One measured figure and what it is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`value` in `unit`; `at_most` is what it must reach, None where it is only reported."""

    what: str
    value: float
    unit: str
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.at_most is None else self.value <= self.at_most

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "at_most": self.at_most,
            "met": self.met,
            "note": self.note,
        }


def median_s(call: Callable[[], object], *, times: int = 5) -> float:
    """Seconds of one call, the median of `times`."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
