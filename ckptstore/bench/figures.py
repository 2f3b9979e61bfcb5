"""What is measured, what each figure is held against, and how figures are compared: values, no measuring.

A ratio is the median of a figure over the median of its limit in the same run; minimum and maximum are
divided by the same median. Where there is no limit the figure is told in its own unit.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.bench.limits import CACHED, COPY, GET, PUT, READ, WRITE

OURS = "ckptstore"
NO_SAVE = "none"  # the contestant that never saves: what a loop loses to the machine's own noise
AIMS_FROM = 1000 << 20  # aims are set for states of 1 GiB and 4 GiB
FOUR = 4000 << 20
LIMIT_WORDS = {
    COPY: "memory copy",
    WRITE: "disk write",
    READ: "disk read",
    CACHED: "page cache",
    PUT: "object put",
    GET: "object get",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class What:
    """One row: `limit` is the id of what it is held against, None for a figure in `unit`."""

    id: str
    words: str
    limit: str | None
    unit: str = "s"

    def aim(self, state: str, nbytes: int) -> float | None:
        """The ratio to reach, or the value where there is no limit; None where none is set."""
        if nbytes < AIMS_FROM:
            return None
        if self.id == "block":
            return 1.35 if state == "small" else 1.10
        if self.id == "durable":
            return 1.10 if nbytes >= FOUR else 1.25
        return _AIMS.get(self.id)


_AIMS = {
    "load_cold": 1.10,
    "load_warm": 1.30,
    "lost_matmul_1": 1.2,
    "lost_matmul_2": 2.4,
    "lost_small_ops": 1.5,
    "worst_matmul_1": 1.5,
    "worst_matmul_2": 1.5,
    "worst_small_ops": 1.5,
    "memory_save": 1.05,
    "cpu": 0.15,
    "half": 1.02,
    "block_lazy": 0.05,
    "put": 1.15,
    "get": 1.15,
}

LOCAL = (
    What(id="block_first", words="save blocks, first", limit=COPY),
    What(id="block", words="save blocks, warm", limit=COPY),
    What(id="block_lazy", words="save blocks, lazy", limit=COPY),
    What(id="durable", words="save to durable", limit=WRITE),
    What(id="load_cold", words="load, cold", limit=READ),
    What(id="load_warm", words="load, from page cache", limit=CACHED),
    What(id="lost_matmul_1", words="lost: 1-thread matmul", limit=COPY),
    What(id="lost_matmul_2", words="lost: 2-thread matmul", limit=COPY),
    What(id="lost_small_ops", words="lost: small operations", limit=COPY),
    What(id="lazy_matmul_1", words="lost, lazy: 1-thread matmul", limit=COPY),
    What(id="lazy_matmul_2", words="lost, lazy: 2-thread matmul", limit=COPY),
    What(id="lazy_small_ops", words="lost, lazy: small operations", limit=COPY),
    What(id="worst_matmul_1", words="worst step: 1-thread", limit=None, unit="× a step"),
    What(id="worst_matmul_2", words="worst step: 2-thread", limit=None, unit="× a step"),
    What(id="worst_small_ops", words="worst step: small", limit=None, unit="× a step"),
    What(id="memory_save", words="extra memory, save", limit=None, unit="states"),
    What(id="memory_load", words="extra memory, load", limit=None, unit="states"),
    What(id="cpu", words="CPU of a save", limit=None, unit="s/GiB"),
    What(id="half", words="written, half frozen", limit=None, unit="× the rest"),
)
_ON_STORES = {"durable": ("put", PUT), "load_cold": ("get", GET)}
REMOTE = tuple(
    What(
        id=_ON_STORES[each.id][0] if each.id in _ON_STORES else each.id,
        words=each.words.replace(", cold", ""),
        limit=_ON_STORES[each.id][1] if each.id in _ON_STORES else each.limit,
        unit=each.unit,
    )
    for each in LOCAL
    if each.id != "load_warm"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One figure in all rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self, over: float | None) -> dict[str, Any]:
        """The values, and what they are divided by `over`."""
        median, low, high = self.median, min(self.values), max(self.values)
        found: dict[str, Any] = {"values": [round(v, 6) for v in self.values], "median": round(median, 6)}
        if over:
            found |= {
                "ratio": round(median / over, 3),
                "ratio_min": round(low / over, 3),
                "ratio_max": round(high / over, 3),
            }
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The variant with the smallest median, and all variants."""

    id: str
    variants: Mapping[str, Series]

    @property
    def best(self) -> str:
        return min(self.variants, key=lambda name: self.variants[name].median)

    @property
    def median_s(self) -> float:
        return self.variants[self.best].median

    def to_json(self, nbytes: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "best": self.best,
            "median_s": round(self.median_s, 6),
            "gib_s": round(nbytes / 2**30 / self.median_s, 3),
            "variants": {name: series.to_json(None) for name, series in self.variants.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A contestant as the result tells it. `problem`: why it has no figures; `help`: what to do about it."""

    id: str
    words: str
    version: str | None = None
    durable: str | None = None
    checksums: str | None = None
    problem: str | None = None
    help: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "words": self.words,
            "version": self.version,
            "durable": self.durable,
            "checksums": self.checksums,
            "problem": self.problem,
            "help": self.help,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One contestant's figure in one row: a ratio, or a value in the row's unit."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table: cells by contestant, who is first, whether the aim is met."""

    what: What
    limit: Limit | None
    cells: Mapping[str, Cell]
    aim: float | None

    @property
    def best(self) -> str | None:
        """The contestant with the smallest median; equal ones go to the first. Not the one that never saves."""
        known = [name for name in self.cells if name != NO_SAVE]
        return min(known, key=lambda name: self.cells[name].median) if known else None

    @property
    def met(self) -> bool | None:
        if self.aim is None or OURS not in self.cells:
            return None
        return round(self.cells[OURS].median, 2) <= self.aim

    @property
    def is_clear(self) -> bool:
        """Is the winner ahead by more than the noise: do its values and ours not overlap?"""
        ours, best = self.cells.get(OURS), self.best
        if ours is None or best is None or best == OURS:
            return True
        return self.cells[best].high < ours.low


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that a bench found out."""

    machine: Mapping[str, Any]
    place: str
    state: str
    nbytes: int
    tensors: int
    seed: int
    rounds: int
    seconds: float
    entrants: Sequence[Entrant]
    limits: Mapping[str, Limit]
    figures: Mapping[tuple[str, str], Series]  # by id of what, id of contestant
    whats: Sequence[What]

    @property
    def rows(self) -> list[Row]:
        return [self._row(what) for what in self.whats]

    def _row(self, what: What) -> Row:
        limit = self.limits[what.limit] if what.limit is not None else None
        over = limit.median_s if limit is not None else 1.0
        cells = {}
        for name in [*(each.id for each in self.entrants), NO_SAVE]:
            series = self.figures.get((what.id, name))
            if series is not None:
                low, high = min(series.values), max(series.values)
                cells[name] = Cell(median=series.median / over, low=low / over, high=high / over)
        return Row(what=what, limit=limit, cells=cells, aim=what.aim(self.state, self.nbytes))

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "state": self.state,
            "nbytes": self.nbytes,
            "tensors": self.tensors,
            "seed": self.seed,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "machine": dict(self.machine),
            "contestants": [each.to_json() for each in self.entrants],
            "limits": [limit.to_json(self.nbytes) for limit in self.limits.values()],
            "figures": [self._row_json(row) for row in self.rows],
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        over = row.limit.median_s if row.limit is not None else None
        return {
            "what": row.what.id,
            "words": row.what.words,
            "unit": row.what.unit,
            "limit": row.what.limit,
            "aim": row.aim,
            "met": row.met,
            "best": row.best,
            "clear": row.is_clear,
            "by": {name: self.figures[(row.what.id, name)].to_json(over) for name in row.cells},
        }
