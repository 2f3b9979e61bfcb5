"""The figures of learning and of time: reward, evaluation, and what happened when.

Runs that are bitwise equal lie on each other, so the undisturbed one is drawn broad and pale and the other
thin on top of it. Kills stand in lanes above the plot; what a recovery threw away is shaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil

from ckptstore.demo.chart import (
    LINE,
    Frame,
    Scale,
    bar,
    box_sign,
    dot,
    inner_ticks,
    label,
    legend,
    line_sign,
    mark,
    mark_sign,
    path,
    plain,
    rule,
    text_px,
    tick_labels,
    ticks,
    title,
)
from ckptstore.demo.result import DemoOutcome, Kill, Recovery, RunResult
from ckptstore.demo.verdict import cause_text, kill_kind, kill_step, s_text

KINDS = ("trainer", "rollout", "coordinator")
LANE = 13  # px of a row of kill marks
LANES_MAX = 4
HOVERS_MAX = 250  # columns that tell a value; more steps share one
DOTS_MAX = 120
PLOT = 190
SPAN = 0.1  # the least that an axis of rewards shows: smaller changes are no news

Points = Sequence[tuple[float, float]]


def reward_figure(outcome: DemoOutcome, width: float) -> str:
    """Reward of each step, of all runs, with kills, rollbacks and resizes."""
    run = outcome.run
    lines = [
        (each, [(float(r.step), r.mean) for r in each.rewards if r.step >= _begins(outcome, each)])
        for each in outcome.runs
    ]
    kills = [(float(kill_step(kill.at)), kill) for kill in run.kills]
    drawn = _Curves(outcome, width, lines, kills, words="reward")
    parts = drawn.bands(run.recoveries) + drawn.resizes() + drawn.lines() + drawn.hovers() + drawn.marks()
    return drawn.svg(parts, "step", f"Mean reward of each of {run.steps} steps")


def evaluation_figure(outcome: DemoOutcome, width: float) -> str:
    """Greedy accuracy on the held-out rows."""
    lines = [
        (each, [(float(e.step), e.accuracy) for e in each.evaluations if e.step >= _begins(outcome, each)])
        for each in outcome.runs
    ]
    drawn = _Curves(outcome, width, lines, [], words="accuracy")
    return drawn.svg(
        drawn.resizes() + drawn.lines(dots=True) + drawn.hovers(), "step", "Accuracy on held-out rows"
    )


def _begins(outcome: DemoOutcome, run: RunResult) -> int:
    """A run that continues another is drawn from there on."""
    return run.resizes[0].step if run is outcome.resized and run.resizes else 0


def colour_of(outcome: DemoOutcome, run: RunResult) -> tuple[str, float]:
    """Variable and width of a run's line."""
    if run is outcome.undisturbed:
        return "other", 6.0
    return ("resized", 1.8) if run is outcome.resized else ("run", 1.8)


def lanes(places: Iterable[float], gap: float) -> list[int]:
    """For marks at these pixels, in rising order, the row of each, so that none covers another if rows suffice."""
    free = [float("-inf")] * LANES_MAX
    rows = []
    for place in places:
        row = next(
            (n for n in range(LANES_MAX) if free[n] <= place), min(range(LANES_MAX), key=free.__getitem__)
        )
        free[row] = place + gap
        rows.append(row)
    return rows


class _Curves:
    """Lines over steps, in one frame."""

    def __init__(
        self,
        outcome: DemoOutcome,
        width: float,
        lines: Sequence[tuple[RunResult, Points]],
        kills: Sequence[tuple[float, Kill]],
        *,
        words: str,
    ) -> None:
        self.outcome, self.data, self.words = outcome, lines, words
        self.kills = sorted(kills, key=lambda kill: kill[0])
        values = [y for _, points in lines for _, y in points] or [0.0, 1.0]
        middle = (min(values) + max(values)) / 2
        self.ticks = ticks(min(*values, middle - SPAN / 2), max(*values, middle + SPAN / 2), 4)
        left = 16 + max(map(text_px, tick_labels(self.ticks)))
        self.key, high = legend(self._signs(), left, 0, width - left - 8)
        steps = max(outcome.run.steps, 1)
        x = Scale(low=0, high=float(steps), start=left, stop=width - 6 - text_px(plain(steps)) / 2)
        self.rows = lanes([x(place) for place, _ in self.kills], 11)
        self.top = high + (max(self.rows) + 1) * LANE + 6 if self.rows else high + 6
        bottom = self.top + PLOT
        self.frame = Frame(
            width=width,
            height=bottom + 2 * LINE + 8,
            x=x,
            y=Scale(low=self.ticks[0], high=self.ticks[-1], start=bottom, stop=self.top),
        )

    def _signs(self) -> list[tuple[str, str]]:
        found = [
            (line_sign(colour, size), each.label)
            for each, _ in self.data
            for colour, size in [colour_of(self.outcome, each)]
        ]
        present = {kill_kind(kill.at) for _, kill in self.kills}
        found += [(mark_sign(kind), f"{kind} killed") for kind in KINDS if kind in present]
        if self.kills and any(r.reached > r.restored for r in self.outcome.run.recoveries):
            found.append((box_sign("band"), "redone"))
        return found

    def lines(self, *, dots: bool = False) -> list[str]:
        found = []
        for each, points in self.data:
            colour, size = colour_of(self.outcome, each)
            places = [(self.frame.x(x), self.frame.y(y)) for x, y in points]
            if places:
                found.append(path(places, colour, width=size))
            if dots and len(places) <= DOTS_MAX and colour != "other":
                found += [dot(x, y, colour) for x, y in places]
        return found

    def bands(self, recoveries: Sequence[Recovery]) -> list[str]:
        """Steps that were made twice."""
        frame, found = self.frame, []
        for each in recoveries:
            start, stop = frame.x(each.restored), frame.x(max(each.reached, each.restored))
            hover = f"fence {each.fence}: {cause_text(each)}; back from step {each.reached} to "
            found.append(
                bar(
                    start,
                    frame.top,
                    max(stop - start, 1.0),
                    frame.bottom - frame.top,
                    "band",
                    hover=f"{hover}{each.restored}",
                )
            )
        return found

    def resizes(self) -> list[str]:
        frame, found = self.frame, []
        for each in (resize for run in self.outcome.runs for resize in run.resizes):
            at = frame.x(each.step)
            text = f"{each.trainers} trainer{'s' if each.trainers != 1 else ''}"
            found.append(rule(at, frame.top, at, frame.bottom, "resize"))
            near = at + 4 + text_px(text) > frame.right
            found.append(
                label(
                    at + (-4 if near else 4),
                    frame.bottom - 6,
                    text,
                    anchor="end" if near else "start",
                    kind="note",
                )
            )
        return found

    def hovers(self) -> list[str]:
        """Invisible columns that tell the values of a step."""
        told: dict[float, list[str]] = {}
        for each, points in self.data:
            for x, y in points:
                told.setdefault(x, []).append(f"{each.label} {y:.3f}")
        frame, steps = self.frame, sorted(told)
        share = ceil(len(steps) / HOVERS_MAX) or 1
        found = []
        for n in range(0, len(steps), share):
            group = steps[n : n + share]
            before = steps[n - 1] if n else group[0] - 1
            after = steps[n + share] if n + share < len(steps) else group[-1] + 1
            start = max(frame.x((before + group[0]) / 2), frame.left)
            stop = min(frame.x((group[-1] + after) / 2), frame.right)
            hover = f"step {plain(group[0])}: {self.words} {', '.join(told[group[0]])}"
            found.append(
                f'<rect class="hover" x="{start:.1f}" y="{frame.top:.1f}" width="{max(stop - start, 1):.1f}" '
                f'height="{PLOT}">{title(hover)}</rect>'
            )
        return found

    def marks(self) -> list[str]:
        found = []
        for (place, kill), row in zip(self.kills, self.rows, strict=True):
            hover = f"{kill.at}: killed" if kill.fired else f"{kill.at}: did not fire"
            at, y = self.frame.x(place), self.top - 8 - row * LANE
            if kill.fired:
                found.append(rule(at, y, at, self.frame.bottom, f"drop {kill_kind(kill.at)}"))
            found.append(
                mark(at, y, kill_kind(kill.at), hover=hover, hollow=not kill.fired, extra=' data-kill="step"')
            )
        return found

    def svg(self, parts: list[str], name: str, describes: str) -> str:
        frame = self.frame
        axes = frame.y_axis(self.ticks, tick_labels(self.ticks))
        whole = inner_ticks(
            0, self.outcome.run.steps, max(int((frame.right - frame.left) / 60), 2), whole=True
        )
        axes += frame.x_axis(whole, [plain(tick) for tick in whole], name)
        return frame.svg([*axes, *parts, *self.key], describes=describes)


# -- the timeline


def timeline_figure(outcome: DemoOutcome, width: float) -> str:
    """Updates applied against the clock, with kills, recoveries, saves and replaced engines below."""
    run = outcome.run
    unit, of = (60.0, "minutes") if run.wall_s > 600 else (1.0, "seconds")
    signs = [
        (line_sign(c, w), r.label)
        for r in outcome.runs
        for c, w in [colour_of(outcome, r)]
        if r.resizes == ()
    ]
    if run.recoveries:
        signs.append((box_sign("band"), "recovering"))
    signs += [
        (mark_sign(k), f"{k} killed")
        for k in KINDS
        if any(kill_kind(x.at) == k and x.fired for x in run.kills)
    ]
    y_ticks = ticks(0, max(run.steps, 1), 4, whole=True)
    left = 66.0
    key, high = legend(signs, left, 0, width - left - 8)
    longest = max([run.wall_s, *(each.wall_s for each in (outcome.undisturbed,) if each is not None)])
    x = Scale(low=0, high=max(longest, 1e-3), start=left, stop=width - 12)
    fired = sorted((kill.at_s, kill) for kill in run.kills if kill.at_s is not None)
    rows = lanes([x(at_s) for at_s, _ in fired], 11)
    top = high + (max(rows) + 1) * LANE + 6 if rows else high + 6
    plot_bottom = top + PLOT - 20
    y = Scale(low=y_ticks[0], high=y_ticks[-1], start=plot_bottom, stop=top)
    strips = ["recovery", "engines", "saves"]
    bottom = plot_bottom + 8 + len(strips) * LINE
    frame = Frame(
        width=width, height=bottom + 2 * LINE + 8, x=x, y=Scale(low=0, high=1, start=bottom, stop=top)
    )
    upper = Frame(width=width, height=plot_bottom, x=x, y=y)
    parts = upper.y_axis(y_ticks, [plain(tick) for tick in y_ticks])
    most = max(int((frame.right - frame.left) / 60), 2)
    seconds = [tick * unit for tick in inner_ticks(0, longest / unit, most)]
    parts += frame.x_axis(seconds, tick_labels([s / unit for s in seconds]), of)
    for each in outcome.runs:
        if each is not outcome.resized:
            colour, size = colour_of(outcome, each)
            parts.append(
                path([(x(at_s), y(step)) for at_s, step in progress_points(each)], colour, width=size)
            )
    parts += [_strip(text, left, plot_bottom + 8 + n * LINE) for n, text in enumerate(strips)]
    parts += _strips(run, x, plot_bottom + 8, top, plot_bottom)
    for (at_s, kill), row in zip(fired, rows, strict=True):
        place, up = x(at_s), top - 8 - row * LANE
        kind = kill_kind(kill.at)
        parts.append(rule(place, up, place, plot_bottom, f"drop {kind}"))
        parts.append(mark(place, up, kind, hover=f"{kill.at}, at {s_text(at_s)}", extra=' data-kill="time"'))
    return frame.svg([*parts, *key], describes=f"What happened in {s_text(run.wall_s)}")


def _strip(text: str, left: float, top: float) -> str:
    return label(left - 8, top + 13, text, anchor="end")


def _strips(
    run: RunResult, x: Callable[[float], float], strips: float, top: float, bottom: float
) -> list[str]:
    found = []
    for recovery in run.recoveries:
        began_s = recovery.at_s - recovery.detect_s
        start, stop = x(began_s), x(began_s + recovery.total_s)
        hover = f"fence {recovery.fence}, {cause_text(recovery)}: back at step "
        hover += f"{recovery.restored} after {s_text(recovery.total_s)}"
        found.append(bar(start, top, max(stop - start, 1), bottom - top, "band", hover=hover))
        found.append(bar(start, strips + 3, max(stop - start, 2), LINE - 6, "phase1", hover=hover))
    for engine in run.engines_replaced:
        start = x(engine.at_s)
        stop = x(engine.at_s + (engine.ready_s if engine.ready_s is not None else run.wall_s - engine.at_s))
        end = (
            f"ready after {s_text(engine.ready_s)}" if engine.ready_s is not None else "not ready at the end"
        )
        hover = f"{engine.engine.replace('/', ':')} replaced at step {engine.step}, {end}"
        found.append(bar(start, strips + LINE + 3, max(stop - start, 2), LINE - 6, "rollout", hover=hover))
    for save in run.saves:
        hover = (
            f"step {save.step}, fence {save.fence}: {'committed' if save.committed else 'never committed'}"
        )
        kind = "written" if save.committed else "trainer"
        found.append(bar(x(save.at_s) - 1, strips + 2 * LINE + 3, 2, LINE - 6, kind, hover=hover))
    return found


def progress_points(run: RunResult) -> list[tuple[float, int]]:
    """(seconds, updates applied), as saves, rollbacks and the end tell it."""
    told = [(save.at_s, 0, [(save.at_s, save.step)]) for save in run.saves]
    for each in run.recoveries:
        began_s = each.at_s - each.detect_s
        ended_s = began_s + each.total_s
        told.append(
            (began_s, 1, [(began_s, each.reached), (began_s, each.restored), (ended_s, each.restored)])
        )
    points = [point for _, _, some in sorted(told) for point in some]
    return [*points, (max([run.wall_s, *(at_s for at_s, _ in points)]), run.steps)]
