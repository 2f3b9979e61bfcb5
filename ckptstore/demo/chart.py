"""Small pieces of SVG: scales with round ticks, axes, lines, bars, marks and legends.

Hand-made, so that the report is one file that opens anywhere. Colours are CSS variables of the page
(light and dark); sizes are pixels; every mark can carry a `<title>`, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

CHAR = 6.9  # px, the width of a digit at the 12 px of axis labels; a little too wide, so labels keep apart
LINE = 18


def text_px(text: str) -> float:
    """About how wide a label is."""
    return CHAR * len(text)


def number(value: float) -> str:
    """A coordinate, short."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps [low, high] to pixels [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.start + share * (self.stop - self.start)


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """At most `most` + 1 round numbers from the one at or below `low` to the one at or above `high`.

    Steps are 1, 2 or 5 times a power of ten; `whole` ones at least 1.
    """
    span = max(high - low, 1.0 if whole else 1e-9)
    step = 10.0 ** math.floor(math.log10(span / most)) if span else 1.0
    for factor in (1, 2, 5, 10, 20, 50, 100):
        wide = max(step * factor, 1.0) if whole else step * factor
        first, last = math.floor(low / wide + 1e-9), math.ceil(high / wide - 1e-9)
        if last - first <= most:
            break
    last = max(last, first + 1)
    return [round(n * wide, 12) for n in range(first, last + 1)]


def inner_ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers that lie within [low, high]: for an axis that begins and ends with its data."""
    return [tick for tick in ticks(low, high, most, whole=whole) if low - 1e-9 <= tick <= high + 1e-9]


def plain(value: float) -> str:
    """A tick's label: no needless zeros, thousands apart."""
    return f"{value:,.6f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


def tick_labels(values: Sequence[float], unit: str = "") -> list[str]:
    """Labels with equally many decimals, as few as tell the ticks apart."""
    decimals = max((len(plain(round(value, 6)).partition(".")[2]) for value in values), default=0)
    return [f"{value:,.{decimals}f}{unit}" for value in values]


# -- elements; all text is escaped here


def title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def label(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{classes}>{escape(text)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" class="{kind}"/>'


def bar(
    x: float, y: float, width: float, height: float, colour: str, *, hover: str = "", extra: str = ""
) -> str:
    shape = f'<rect x="{number(x)}" y="{number(y)}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
    shape += f' style="fill:var(--{colour})"{extra}'
    return f"{shape}>{title(hover)}</rect>" if hover else f"{shape}/>"


def path(points: Sequence[tuple[float, float]], colour: str, *, width: float, extra: str = "") -> str:
    """A line through the points; a dot when there is one."""
    if len(points) == 1:
        return dot(*points[0], colour, radius=width + 1)
    steps = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{steps}" class="line" style="stroke:var(--{colour});stroke-width:{width}"{extra}/>'


def dot(x: float, y: float, colour: str, *, radius: float = 3.0, hover: str = "") -> str:
    shape = f'<circle cx="{number(x)}" cy="{number(y)}" r="{radius}" style="fill:var(--{colour})"'
    return f"{shape}>{title(hover)}</circle>" if hover else f"{shape}/>"


SHAPES = {
    # a cross, a diamond, a triangle: told apart without colour; each about 9 px wide around (0, 0)
    "trainer": "M-4 -2 L-2 -4 L0 -2 L2 -4 L4 -2 L2 0 L4 2 L2 4 L0 2 L-2 4 L-4 2 L-2 0 Z",
    "rollout": "M0 -5 L5 0 L0 5 L-5 0 Z",
    "coordinator": "M0 -5 L5 4 L-5 4 Z",
}


def mark(x: float, y: float, kind: str, *, hover: str = "", hollow: bool = False, extra: str = "") -> str:
    """The sign of a kill: its shape tells the kind of process; hollow when it did not fire."""
    fill = "fill:none" if hollow else f"fill:var(--{kind})"
    shape = f'<path d="{SHAPES[kind]}" transform="translate({number(x)} {number(y)})"'
    shape += f' style="{fill};stroke:var(--{kind});stroke-width:1.2"{extra}'
    return f"{shape}>{title(hover)}</path>" if hover else f"{shape}/>"


# -- frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A figure with its plot area. Pixels; `x` and `y` map data into the plot."""

    width: float
    height: float
    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        return self.x.start

    @property
    def right(self) -> float:
        return self.x.stop

    @property
    def top(self) -> float:
        return self.y.stop

    @property
    def bottom(self) -> float:
        return self.y.start

    def y_axis(self, values: Sequence[float], labels: Sequence[str]) -> list[str]:
        """Grid lines and labels left of the plot."""
        found = []
        for value, text in zip(values, labels, strict=True):
            at = self.y(value)
            found.append(rule(self.left, at, self.right, at, "grid"))
            found.append(label(self.left - 8, at + 4, text, anchor="end"))
        return found

    def x_axis(self, values: Sequence[float], labels: Sequence[str], name: str) -> list[str]:
        """Ticks and labels below the plot; a label that would touch the one before it is left out."""
        found, free = [rule(self.left, self.bottom, self.right, self.bottom, "axis")], -math.inf
        for value, text in zip(values, labels, strict=True):
            at, half = self.x(value), text_px(text) / 2
            found.append(rule(at, self.bottom, at, self.bottom + 4, "axis"))
            if at - half < free:
                continue
            found.append(label(at, self.bottom + LINE, text, anchor="middle"))
            free = at + half + CHAR
        found.append(label(self.right, self.bottom + 2 * LINE, name, anchor="end", kind="name"))
        return found

    def svg(self, parts: Sequence[str], *, describes: str) -> str:
        return svg(self.width, self.height, parts, describes=describes)


def svg(width: float, height: float, parts: Sequence[str], *, describes: str) -> str:
    """A figure of its own; `describes` is what a screen reader says."""
    size = f'viewBox="0 0 {number(width)} {number(height)}" style="max-width:{number(width)}px"'
    return f'<svg {size} role="img" aria-label="{escape(describes)}">{"".join(parts)}</svg>'


def legend(items: Sequence[tuple[str, str]], left: float, top: float, room: float) -> tuple[list[str], float]:
    """(marks and words, height): (svg of a 14 px sign at (0, 0), words) in as many rows as `room` needs."""
    found, x, y = [], left, top + 8
    for sign, words in items:
        wide = 14 + 6 + text_px(words) * 0.94
        if x > left and x + wide > left + room:
            x, y = left, y + LINE
        found.append(f'<g transform="translate({number(x)} {number(y)})">{sign}</g>')
        found.append(label(x + 20, y + 4, words))
        x += wide + 16
    return found, (y - top + 10 if items else 0.0)


def line_sign(colour: str, width: float) -> str:
    return f'<line x1="0" y1="0" x2="14" y2="0" style="stroke:var(--{colour});stroke-width:{width}"/>'


def box_sign(colour: str) -> str:
    return f'<rect x="1" y="-5" width="11" height="11" rx="2" style="fill:var(--{colour})"/>'


def mark_sign(kind: str) -> str:
    return f'<g transform="translate(7 0)">{mark(0, 0, kind)}</g>'
