"""What a demo command found out, on the terminal: the same tables as the page's, and the verdict last."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ckptstore.demo.result import DemoOutcome
from ckptstore.demo.rows import RUNS, Table, tables
from ckptstore.demo.verdict import is_success, summary, verdict

ROWS_MAX = 24  # of a table; more of them are in the page and in --json


def print_outcome(console: Console, outcome: DemoOutcome, *, following: str) -> None:
    """Print tables, what did not hold, and the verdict with what to do next."""
    console.print(Group(*_parts(outcome)))
    console.print(Text(f"next: {following}"), soft_wrap=True)  # one line, to be copied


def _parts(outcome: DemoOutcome) -> Iterator[RenderableType]:
    for table in tables(outcome):
        yield _drawn(table)
        if len(table.rows) > ROWS_MAX:
            yield Text(f"… and {len(table.rows) - ROWS_MAX:,} more: --report or --json", style="dim")
        yield Text()
    if outcome.run.evaluations:
        yield Text("Evaluations (step:accuracy)", style="bold")
        yield Text(f"{_evaluations(outcome)}\n")
    for problem in outcome.problems:
        yield Text(f"problem: {problem}", style="red")
    yield Text(summary(outcome))
    yield Text(verdict(outcome), style="bold green" if is_success(outcome) else "bold red")


def _evaluations(outcome: DemoOutcome) -> str:
    told = [f"{each.step}:{each.accuracy:.3f}" for each in outcome.run.evaluations]
    if len(told) > ROWS_MAX:
        told = [*told[:1], "…", *told[2 - ROWS_MAX :]]
    return "  ".join(told)


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(
        title=table.name,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, head in enumerate(table.heads):
        drawn.add_column(head, justify="left" if number == 0 else "right", no_wrap=table.name != RUNS)
    for row in table.rows[:ROWS_MAX]:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
