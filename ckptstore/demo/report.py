"""The page that a demo command leaves: one HTML file with everything in it, readable without a network.

Light and dark, wide and narrow. Each figure is drawn twice, for a desk and for a phone, so that text keeps
its size; style sheets show one of them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from html import escape
from pathlib import Path

import ckptstore
from ckptstore.demo.bars import blocking_figure, bytes_figure, ledger_figure, recovery_figure
from ckptstore.demo.curves import evaluation_figure, reward_figure, timeline_figure
from ckptstore.demo.result import DemoOutcome
from ckptstore.demo.rows import RUNS, Table, tables
from ckptstore.demo.style import STYLE
from ckptstore.demo.verdict import (
    count_text,
    is_success,
    layout_text,
    median_ms,
    median_s,
    ms_text,
    s_text,
    size_text,
    summary,
    verdict,
)

WIDE, HALF, NARROW = 1040.0, 500.0, 350.0  # px of figures: across the page, half of it, on a phone


def write_report(outcome: DemoOutcome, target: str | os.PathLike[str]) -> None:
    """Write the page, whole or not at all. OSError when `target` cannot be written."""
    path = Path(target)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(report_html(outcome), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def report_html(outcome: DemoOutcome) -> str:
    """The page."""
    body = [_header(outcome), _tiles(outcome), *_figures(outcome), *_tables(outcome), _footer(outcome)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>ckptstore demo: {escape(verdict(outcome))}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(body)}\n</main>\n</body>\n</html>\n"
    )


def _header(outcome: DemoOutcome) -> str:
    kind = "good" if is_success(outcome) else "bad"
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in outcome.problems)
    return (
        f'<header class="{kind}"><p class="eyebrow">ckptstore demo · {escape(layout_text(outcome.run))} · '
        f"{count_text(outcome.run.steps, 'step')} · seed {outcome.run.seed}</p>"
        f"<h1>{escape(verdict(outcome))}</h1><p>{escape(summary(outcome))}</p>"
        + (f"<h2>What did not hold</h2><ul>{problems}</ul>" if problems else "")
        + "</header>"
    )


def _tiles(outcome: DemoOutcome) -> str:
    run = outcome.run
    fired = sum(kill.fired for kill in run.kills)
    slowest = max((save.blocking_ms for save in run.saves), default=0.0)
    tiles = [
        (f"{fired:,}", "kills", f"of {len(run.kills)} planned" if run.kills else "none planned"),
        (
            f"{len(run.recoveries):,}",
            "recoveries",
            f"median {s_text(median_s(run.recoveries))}" if run.recoveries else "none needed",
        ),
        (
            f"{run.account.lost:,} / {run.account.doubled:,}",
            "lost / trained twice",
            f"of {run.account.issued:,} sample groups issued",
        ),
        (ms_text(median_ms(run.saves)), "median blocking time", f"slowest {ms_text(slowest)}"),
        (size_text(run.nbytes_written), "written", f"{size_text(run.nbytes_reused)} reused, not rewritten"),
        (
            f"{run.reward_first10:.2f} → {run.reward_last10:.2f}",
            "mean reward",
            "first 10 and last 10 steps",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(more)}</small></div>'
        for value, name, more in tiles
    )
    return f'<section class="tiles">{cells}</section>'


# -- figures


def _figures(outcome: DemoOutcome) -> list[str]:
    same = " Lines that are equal lie on each other." if outcome.undisturbed is not None else ""
    found = [
        _figure(
            "Reward",
            f"Mean reward of the samples of each update.{same}",
            lambda width: reward_figure(outcome, width),
            wide=True,
        ),
        _figure(
            "What happened when",
            f"Updates applied against the clock of the {outcome.run.label} run; a save that a death kept from its "
            "commit is red.",
            lambda width: timeline_figure(outcome, width),
            wide=True,
        ),
        _figure(
            "Evaluation",
            "Greedy accuracy on held-out rows.",
            lambda width: evaluation_figure(outcome, width),
        ),
        _figure(
            "Blocking time of each save",
            "The longest that save() held a trainer rank up; the rest happens in the background.",
            lambda width: blocking_figure(outcome, width),
        ),
        _figure(
            "Bytes of each save",
            "Unchanged chunks are referenced, not rewritten.",
            lambda width: bytes_figure(outcome, width),
        ),
        _figure(
            "Ledger",
            "Sample groups by ordinal, counted from the store on the lineage of the final checkpoint.",
            lambda width: ledger_figure(outcome.run, width),
        ),
    ]
    if outcome.run.recoveries:
        found.append(
            _figure(
                "Where recovery time went",
                "By fence, from the kill to the moment all engines serve the restored policy.",
                lambda width: recovery_figure(outcome.run, width),
                wide=True,
            )
        )
    return ['<div class="figures">', *found, "</div>"]


def _figure(name: str, words: str, draw: Callable[[float], str], *, wide: bool = False) -> str:
    desk, phone = draw(WIDE if wide else HALF), draw(NARROW)
    return (
        f"<figure{' class=across' if wide else ''}><figcaption><h2>{escape(name)}</h2><p>{escape(words)}</p>"
        f'</figcaption><div class="desk">{desk}</div><div class="phone">{phone}</div></figure>'
    )


# -- tables


def _tables(outcome: DemoOutcome) -> list[str]:
    across = len(outcome.runs) > 2
    found = [_table(each, across=across and each.name == RUNS) for each in tables(outcome)]
    return ['<div class="tables">', *found, "</div>"]


def _table(table: Table, *, across: bool) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    kind = " class=across" if across else ""
    return (
        f'<section{kind}><h2>{escape(table.name)}</h2><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _footer(outcome: DemoOutcome) -> str:
    return (
        f"<footer><p>ckptstore {escape(ckptstore.__version__)}, {s_text(outcome.wall_s)} in all. Do it again: "
        f"<code>{escape(command_text(outcome))}</code></p></footer>"
    )


def command_text(outcome: DemoOutcome) -> str:
    """The command that made this outcome."""
    run = outcome.run
    words = [
        "ckptstore",
        "demo",
        "--steps",
        str(run.steps),
        "--every",
        str(run.every),
        "--seed",
        str(run.seed),
    ]
    words += ["--trainers", str(run.trainers), "--rollouts", str(run.rollouts)]
    if run.kills:
        words += ["--kill", ",".join(kill.at for kill in run.kills)]
    resizes = [f"{resize.step}:{resize.trainers}" for each in outcome.runs for resize in each.resizes]
    if resizes:
        words += ["--resize", ",".join(resizes)]
    return shlex.join(words)
