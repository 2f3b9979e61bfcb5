"""The figures of a bench as one SVG picture: bars of each library, as multiples of the limit, on a log scale.

Bars begin at 1 ×, the limit. The picture stands alone (its own style sheet, light and dark) and shows no figure
that the table does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from ckptstore.bench.figures import LIMIT_WORDS, OURS, BenchResult, Cell, Entrant, Row
from ckptstore.bench.table import range_text, ratio_text, time_text
from ckptstore.cli.output import count_text, size_text
from ckptstore.demo.chart import LINE, Scale, bar, box_sign, label, legend, number, plain, rule, text_px

WIDTH = 960.0
BAR, GAP, GROUP = 13.0, 2.0, 12.0  # px: a bar, between bars, between rows
SHOWN = (
    *("block", "durable", "put", "load_cold", "get", "load_warm"),
    *("lost_matmul_1", "lost_matmul_2", "lost_small_ops"),
)
STYLE = """
svg { --page: #ffffff; --ink: #1b1f27; --muted: #5d6572; --grid: #e6e6e2; --axis: #9aa1ac; --aim: #b3261e;
  --c0: #2457d6; --c1: #b7791f; --c2: #d9a441; --c3: #00857a; --c4: #7a3fc4; --c5: #8a94a6;
  background: var(--page); font: 12px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
@media (prefers-color-scheme: dark) {
  svg { --page: #14171b; --ink: #e8eaed; --muted: #9aa3b0; --grid: #2a2f37; --axis: #69717e; --aim: #ff8a80;
    --c0: #7aa2ff; --c1: #e9b04f; --c2: #f3d08b; --c3: #35c4b5; --c4: #b48bf2; --c5: #97a1b3; }
}
text { fill: var(--muted); }
text.head { fill: var(--ink); font-size: 17px; font-weight: 600; }
text.row { fill: var(--ink); font-weight: 600; }
text.ours { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--grid); }
.axis, .least { stroke: var(--axis); }
.one { stroke: var(--ink); stroke-width: 1.4; }
.aim { stroke: var(--aim); stroke-width: 2; }
"""


def draw(result: BenchResult) -> str:
    """The picture as the text of an SVG file."""
    rows = [row for row in result.rows if row.what.id in SHOWN and row.what.limit is not None and row.cells]
    shown = [each for each in result.entrants if any(each.id in row.cells for row in rows)]
    left = 24 + max([text_px(row.what.words) for row in rows], default=0)
    signs = [(box_sign(_colour(n)), _named(each)) for n, each in enumerate(shown)]
    if any(row.aim is not None for row in rows):
        signs.append(('<line x1="6" y1="-6" x2="6" y2="6" class="aim"/>', "aim of ckptstore"))
    key, high = legend(signs, 16, 68, WIDTH - 32)
    top = 68 + high + 30
    height = top + sum(_height(row, shown) for row in rows) + 44
    x = _scale(rows, left, WIDTH - 130)
    parts = [*_head(result), *key, *_axis(x, top, height - 44), *_bars(rows, shown, x, top, left)]
    parts.append(label(16, height - 14, _foot(result)))
    described = f"Saves and loads of {len(shown)} libraries as multiples of the limit"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{number(WIDTH)}" height="{number(height)}" '
        f'viewBox="0 0 {number(WIDTH)} {number(height)}" role="img" aria-label="{escape(described)}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill:var(--page)"/>{"".join(parts)}</svg>\n'
    )


def _colour(n: int) -> str:
    return f"c{min(n, 5)}"


def _named(entrant: Entrant) -> str:
    lacks = (
        [] if entrant.durable == "yes" else ["no fsync" if entrant.durable == "no" else "files fsynced only"]
    )
    if entrant.checksums == "none":
        lacks.append("no checksums")
    return f"{entrant.words} ({', '.join(lacks)})" if lacks else f"{entrant.words} (durable, checksums)"


def _head(result: BenchResult) -> list[str]:
    state = f"{result.state} state, {size_text(result.nbytes)} in {count_text(result.tensors, 'tensor')}"
    return [
        label(16, 28, "What a save and a load cost, as multiples of what the machine can do", kind="head"),
        label(
            16, 50, f"{state}; {count_text(result.rounds, 'round')}, medians; less is better, 1 is the limit"
        ),
    ]


def _foot(result: BenchResult) -> str:
    limits = (f"{LIMIT_WORDS[each.id]} {time_text(each.median_s)}" for each in result.limits.values())
    return f"Limits in this run: {', '.join(limits)}. Thin lines: least to most."


class _Log:
    """A logarithmic scale; what is below its start is drawn at the start."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.high = low, high
        self._scale = Scale(low=math.log10(low), high=math.log10(high), start=start, stop=stop)

    def __call__(self, value: float) -> float:
        return self._scale(math.log10(min(max(value, self.low), self.high)))

    def ticks(self) -> list[float]:
        found = [m * 10.0**e for e in range(-3, 6) for m in (1, 2, 5)]
        return [tick for tick in found if self.low <= tick * 1.0001 and tick <= self.high * 1.0001]


def _scale(rows: Sequence[Row], start: float, stop: float) -> _Log:
    values = [cell.median for row in rows for cell in row.cells.values() if cell.median > 0]
    low = min([0.5, *values])
    return _Log(low=max(low / 1.2, 0.02), high=max([10.0, *values]) * 1.2, start=start, stop=stop)


def _axis(x: _Log, top: float, bottom: float) -> Iterator[str]:
    for tick in x.ticks():
        at = x(tick)
        yield rule(at, top - 6, at, bottom, "one" if tick == 1 else "grid")
        yield label(at, top - 12, f"{plain(tick)} ×", anchor="middle")


def _height(row: Row, shown: Sequence[Entrant]) -> float:
    return max(len([each for each in shown if each.id in row.cells]) * (BAR + GAP), LINE) + GROUP


def _bars(rows: Sequence[Row], shown: Sequence[Entrant], x: _Log, top: float, left: float) -> Iterator[str]:
    at = top + GROUP / 2
    for row in rows:
        high = _height(row, shown) - GROUP
        yield label(left - 8, at + high / 2 + 4, row.what.words, anchor="end", kind="row")
        y = at
        for n, each in enumerate(shown):
            cell = row.cells.get(each.id)
            if cell is not None:
                yield from _bar(cell, each, _colour(n), x, y, row)
                y += BAR + GAP
        if row.aim is not None:
            yield rule(x(row.aim), at - 2, x(row.aim), at + BAR + 2, "aim")
        at += high + GROUP


def _bar(cell: Cell, entrant: Entrant, colour: str, x: _Log, y: float, row: Row) -> Iterator[str]:
    start, stop = sorted((x(1.0), x(cell.median)))  # from the limit on: on a log scale nothing begins at 0
    middle = y + BAR / 2
    hover = f"{entrant.words}, {row.what.words}: {ratio_text(cell.median)} ({range_text(cell)})"
    yield bar(start, y, max(stop - start, 1.5), BAR, colour, hover=hover)
    yield rule(x(cell.low), middle, x(cell.high), middle, "least")
    kind = "ours" if entrant.id == OURS else ""
    yield label(max(x(cell.high), stop) + 6, y + BAR - 2.5, f"{ratio_text(cell.median)} ×", kind=kind)
