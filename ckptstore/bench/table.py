"""What a bench found out, on the terminal: limits, ratios, who is first, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ckptstore.bench.figures import LIMIT_WORDS, NO_SAVE, OURS, BenchResult, Cell, Row
from ckptstore.cli.output import count_text, size_text

ROUNDS_ENOUGH = 5


def print_result(console: Console, result: BenchResult, *, following: str) -> None:
    """Print the tables, where another library is ahead, and what to do next."""
    console.print(Group(*_parts(result)))
    console.print(Text(f"next: {following}"), soft_wrap=True)  # one line, to be copied


def _parts(result: BenchResult) -> Iterator[RenderableType]:
    what = f"{result.state}: {size_text(result.nbytes)} in {count_text(result.tensors, 'tensor')}"
    machine = (
        f"{count_text(result.machine['cores'], 'core')}, torch {result.machine['torch'].partition('+')[0]}"
    )
    yield Text(f"{what}, {count_text(result.rounds, 'round')}; {machine}; {result.place}\n")
    yield _limits(result)
    yield Text()
    yield _contestants(result)
    yield Text()
    yield _figures(result)
    yield Text()
    for sentence in sentences(result):
        yield Text(sentence)


def _drawn(title: str, *heads: str, left: int = 1) -> Table:
    drawn = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, head in enumerate(heads):
        drawn.add_column(head, justify="left" if number < left else "right")
    return drawn


def _limits(result: BenchResult) -> Table:
    drawn = _drawn(
        "Limits of this machine, measured in this run", "LIMIT", "BEST OF", "TIME", "SPEED", left=2
    )
    for limit in result.limits.values():
        speed = size_text(int(result.nbytes / limit.median_s))
        drawn.add_row(LIMIT_WORDS[limit.id], limit.best, time_text(limit.median_s), f"{speed}/s")
    return drawn


def _contestants(result: BenchResult) -> Table:
    drawn = _drawn("Who saves", "LIBRARY", "VERSION", "DURABLE", "CHECKSUMS", "", left=5)
    for each in result.entrants:
        note = "" if each.problem is None else f"{each.problem}: {each.help}"
        drawn.add_row(each.words, each.version or "-", each.durable or "-", each.checksums or "-", Text(note))
    return drawn


def _figures(result: BenchResult) -> Table:
    shown = [each for each in result.entrants if any(each.id in row.cells for row in result.rows)]
    heads = [*(each.words for each in shown), "NO SAVE"]
    with_aims = any(row.aim is not None for row in result.rows)
    drawn = _drawn(
        "Medians as multiples of the limit (below: the least and the most); less is better",
        *("WHAT", "OVER", *heads, *["AIM"] * with_aims),
        left=2,
    )
    for row in result.rows:
        over = LIMIT_WORDS[row.what.limit] if row.what.limit is not None else row.what.unit
        cells = [_cell(row, each.id) for each in shown]
        aim = "" if row.aim is None else f"≤ {row.aim:g}"
        style = {None: "", True: "green", False: "red"}[row.met]
        told = [Text(aim, style=style)] * with_aims
        drawn.add_row(row.what.words, over, *cells, _cell(row, NO_SAVE), *told)
    return drawn


def _cell(row: Row, who: str) -> Text:
    cell = row.cells.get(who)
    if cell is None:
        return Text("")
    style = "bold green" if row.best == who else "bold" if who == OURS else ""
    found = Text(ratio_text(cell.median), style=style)
    if cell.low != cell.high:
        found.append(f"\n{range_text(cell)}", style="dim")
    return found


def ratio_text(value: float) -> str:
    """Three significant digits: `0.08`, `1.25`, `12.5`."""
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def range_text(cell: Cell) -> str:
    return f"{ratio_text(cell.low)}–{ratio_text(cell.high)}"


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def sentences(result: BenchResult) -> list[str]:
    """Where another library is ahead, and what else a reader must know of these figures."""
    words = {each.id: each.words for each in result.entrants}
    found = []
    for row in result.rows:
        if row.best in (None, OURS) or OURS not in row.cells:
            continue
        assert row.best is not None
        ahead = "wins" if row.is_clear else "is ahead, within the noise"
        figures = f"{ratio_text(row.cells[row.best].median)} against {ratio_text(row.cells[OURS].median)}"
        found.append(f"{words[row.best]} {ahead}: {row.what.words} ({figures} for ckptstore)")
    if not found and len([each for each in result.entrants if each.problem is None]) > 1:
        found.append("No other library is ahead in any row.")
    missed = [row.what.words for row in result.rows if row.met is False]
    if missed:
        found.append(f"Aims that ckptstore misses here: {', '.join(missed)}.")
    if result.rounds < ROUNDS_ENOUGH:
        found.append(
            f"{count_text(result.rounds, 'round')}: too few to rely on; {ROUNDS_ENOUGH} or more are."
        )
    if any(each.durable == "no" for each in result.entrants):
        found.append("Libraries that leave fsync to their user: the bench calls it, and its time is counted.")
    return found
