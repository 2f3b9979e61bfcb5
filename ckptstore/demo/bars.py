"""The figures of cost: blocking time and bytes of each save, and where the time of each recovery went."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptstore.demo.chart import (
    LINE,
    Frame,
    Scale,
    bar,
    box_sign,
    inner_ticks,
    label,
    legend,
    line_sign,
    plain,
    rule,
    svg,
    text_px,
    tick_labels,
    ticks,
)
from ckptstore.demo.result import PHASES, DemoOutcome, Recovery, RunResult, Save
from ckptstore.demo.verdict import cause_text, median_ms, ms_text, s_text

PLOT = 170
ROW, ROW_MANY = 22, 16  # px of a recovery, and of one among many
MANY = 14
RECOVERIES_MAX = 60
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def blocking_figure(outcome: DemoOutcome, width: float) -> str:
    """How long each save held the trainer up."""
    saves = outcome.run.saves
    typical = median_ms(saves)
    signs = [(box_sign("run"), "blocking"), (line_sign("ink", 1.2), f"median {ms_text(typical)}")]
    if not all(save.committed for save in saves):
        signs.append((box_sign("faint"), "never committed"))
    y_ticks = ticks(0, max((save.blocking_ms for save in saves), default=1.0), 4)
    frame, parts = _frame(saves, signs, y_ticks, tick_labels(y_ticks, " ms"), width)

    def column(save: Save, left: float, wide: float) -> list[str]:
        top = frame.y(save.blocking_ms)
        hover = f"step {save.step}, fence {save.fence}: {ms_text(save.blocking_ms)}"
        hover += "" if save.committed else ", never committed"
        return [bar(left, top, wide, frame.bottom - top, "run" if save.committed else "faint", hover=hover)]

    parts += _columns(saves, frame, column)
    if saves:
        parts.append(rule(frame.left, frame.y(typical), frame.right, frame.y(typical), "median"))
    return frame.svg(parts, describes=f"Blocking time of {len(saves)} saves, median {ms_text(typical)}")


def bytes_figure(outcome: DemoOutcome, width: float) -> str:
    """Bytes that each save wrote, and those that it referenced instead."""
    saves = outcome.run.saves
    signs = [(box_sign("written"), "written"), (box_sign("reused"), "reused")]
    most = max((save.nbytes_written + save.nbytes_reused for save in saves), default=1)
    place = min((max(most, 1).bit_length() - 1) // 10, len(UNITS) - 1)
    unit = 1024**place
    units = ticks(0, most / unit, 4)
    y_ticks, labels = [tick * unit for tick in units], tick_labels(units, f" {UNITS[place]}")
    frame, parts = _frame(saves, signs, y_ticks, labels, width)

    def column(save: Save, left: float, wide: float) -> list[str]:
        middle = frame.y(save.nbytes_written)
        top = frame.y(save.nbytes_written + save.nbytes_reused)
        hover = (
            f"step {save.step}, fence {save.fence}: {save.nbytes_written / unit:.2f} {UNITS[place]} written, "
        )
        hover += f"{save.nbytes_reused / unit:.2f} {UNITS[place]} reused"
        hover = hover if save.committed else f"step {save.step}, fence {save.fence}: never committed"
        return [
            bar(left, middle, wide, frame.bottom - middle, "written", hover=hover),
            bar(left, top, wide, middle - top, "reused", hover=hover),
        ]

    return frame.svg(
        parts + _columns(saves, frame, column), describes=f"Bytes written and reused by {len(saves)} saves"
    )


def _frame(
    saves: Sequence[Save],
    signs: Sequence[tuple[str, str]],
    y_ticks: Sequence[float],
    labels: Sequence[str],
    width: float,
) -> tuple[Frame, list[str]]:
    """Axes and legend of a figure with a column for each save, in the order they were made."""
    left = 16 + max(map(text_px, labels))
    key, high = legend(signs, left, 0, width - left - 8)
    top = high + 8
    frame = Frame(
        width=width,
        height=top + PLOT + 2 * LINE + 8,
        x=Scale(low=0, high=max(len(saves), 1), start=left, stop=width - 16),
        y=Scale(low=0, high=y_ticks[-1], start=top + PLOT, stop=top),
    )
    parts = [*frame.y_axis(y_ticks, labels), *key]
    places, steps = [], []
    for number, save in _round_steps(saves, most=int((frame.right - frame.left) / 40)):
        places.append(number + 0.5)
        steps.append(plain(save.step))
    return frame, parts + frame.x_axis(places, steps, "save of step (repeated after a rollback)")


def _round_steps(saves: Sequence[Save], *, most: int) -> list[tuple[int, Save]]:
    """Those that get a label: all, or of many the first of each round step."""
    if len(saves) <= most:
        return list(enumerate(saves))
    first = {save.step: (number, save) for number, save in reversed(list(enumerate(saves)))}
    wanted = inner_ticks(0, max(first), most, whole=True)
    return sorted((first[int(tick)] for tick in wanted if int(tick) in first), key=lambda each: each[0])


def _columns(
    saves: Sequence[Save], frame: Frame, column: Callable[[Save, float, float], list[str]]
) -> list[str]:
    each = (frame.right - frame.left) / max(len(saves), 1)
    wide = min(each * 0.78 if each > 4 else each, 36.0)
    if not saves:
        return [
            label((frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2, "no save", anchor="middle")
        ]
    return [
        part
        for number, save in enumerate(saves)
        for part in column(save, frame.x(number + 0.5) - wide / 2, wide)
    ]


# -- recoveries


def recovery_figure(run: RunResult, width: float) -> str:
    """A bar for each recovery, a colour for each phase."""
    shown = run.recoveries[:RECOVERIES_MAX]
    names = [_name(each, 22) for each in shown]
    longest = max((each.total_s for each in shown), default=1.0)
    x_ticks = ticks(0, longest, 4)
    left = 12 + max(map(text_px, names), default=0)
    room = text_px(s_text(longest)) + 10
    signs = [(box_sign(f"phase{n}"), phase) for n, phase in enumerate(PHASES)]
    key, high = legend(signs, 0, 0, width - 8)
    row = ROW if len(shown) <= MANY else ROW_MANY
    top = high + 8
    frame = Frame(
        width=width,
        height=top + row * len(shown) + 2 * LINE + 8,
        x=Scale(low=0, high=x_ticks[-1], start=left, stop=width - room),
        y=Scale(low=0, high=1, start=top + row * len(shown), stop=top),
    )
    parts = [rule(frame.x(tick), frame.top, frame.x(tick), frame.bottom, "grid") for tick in x_ticks]
    parts += frame.x_axis(x_ticks, tick_labels(x_ticks), "seconds")
    for number, (each, name) in enumerate(zip(shown, names, strict=True)):
        parts += _row(each, name, frame, top + number * row, row)
    return svg(frame.width, frame.height, [*parts, *key], describes=f"Phases of {len(shown)} recoveries")


def _row(each: Recovery, name: str, frame: Frame, top: float, row: float) -> list[str]:
    found = [label(frame.left - 8, top + row / 2 + 4, name, anchor="end")]
    at_s = 0.0
    for number, phase in enumerate(PHASES):
        took_s = getattr(each, f"{phase}_s")
        start, stop = frame.x(at_s), frame.x(at_s + took_s)
        hover = f"fence {each.fence}, {phase}: {s_text(took_s)}"
        if took_s > 0:
            found.append(bar(start, top + row * 0.15, stop - start, row * 0.7, f"phase{number}", hover=hover))
        at_s += took_s
    found.append(label(frame.x(at_s) + 6, top + row / 2 + 4, s_text(at_s)))
    return found


def _name(each: Recovery, most: int) -> str:
    text = f"{each.fence} · {cause_text(each)}"
    return text if len(text) <= most else text[: most - 1] + "…"


# -- the ledger


def ledger_figure(run: RunResult, width: float) -> str:
    """What became of the prompts: a bar for each number, against those that were issued."""
    account = run.account
    rows = (
        ("issued", account.issued, "faint"),
        ("trained on", account.consumed, "resized"),
        ("lost", account.lost, "trainer"),
        ("trained twice", account.doubled, "trainer"),
    )
    left = 12 + max(text_px(name) for name, _, _ in rows)
    room = text_px(f"{account.issued:,}") + 12
    x = Scale(low=0, high=max(account.issued, 1), start=left, stop=width - room)
    parts, high = [], 34.0
    for number, (name, count, colour) in enumerate(rows):
        top = 8 + number * high
        parts.append(label(left - 8, top + high / 2 + 4, name, anchor="end"))
        parts.append(bar(left, top + 7, x(count) - left, high - 14, colour, hover=f"{count:,} {name}"))
        parts.append(label(max(x(count), left) + 6, top + high / 2 + 4, f"{count:,}"))
    parts.append(rule(left, 8, left, 8 + high * len(rows), "axis"))
    return svg(
        width, 16 + high * len(rows), parts, describes=f"{account.lost} lost, {account.doubled} trained twice"
    )
