"""The tables of a demo command: what the page and the terminal both show, as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptstore.demo.result import PHASES, DemoOutcome, RunResult
from ckptstore.demo.verdict import cause_text, median_ms, ms_text, s_text, size_text

RUNS = "Runs"
DIGEST = 12  # characters of a digest that a person compares


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The first column names the row."""

    name: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(outcome: DemoOutcome) -> list[Table]:
    """Those that have rows, the comparison of runs first."""
    run = outcome.run
    found = [
        Table(name=RUNS, heads=("", *(each.label for each in outcome.runs)), rows=_run_rows(outcome.runs)),
        Table(name="Kills", heads=("kill", "fired", "at"), rows=_kill_rows(run)),
        Table(
            name="Recoveries, in seconds",
            heads=("fence", "died", "steps", *PHASES, "total"),
            rows=tuple(
                (
                    str(each.fence),
                    cause_text(each),
                    f"{each.reached} → {each.restored}",
                    *(f"{getattr(each, f'{phase}_s'):.2f}" for phase in PHASES),
                    f"{each.total_s:.2f}",
                )
                for each in run.recoveries
            ),
        ),
        Table(
            name="Engines replaced",
            heads=("engine", "at step", "ready after"),
            rows=tuple(
                (
                    each.engine.replace("/", ":"),
                    str(each.step),
                    "-" if each.ready_s is None else s_text(each.ready_s),
                )
                for each in run.engines_replaced
            ),
        ),
        Table(
            name="Resizes",
            heads=("run", "after step", "trainers", "restored as saved"),
            rows=_resizes(outcome),
        ),
        Table(
            name="Saves",
            heads=("step", "fence", "blocking", "written", "reused", "committed"),
            rows=tuple(
                (
                    str(each.step),
                    str(each.fence),
                    ms_text(each.blocking_ms),
                    size_text(each.nbytes_written) if each.committed else "-",
                    size_text(each.nbytes_reused) if each.committed else "-",
                    "yes" if each.committed else "no",
                )
                for each in run.saves
            ),
        ),
    ]
    return [table for table in found if table.rows]


def _kill_rows(run: RunResult) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (kill.at, "yes" if kill.fired else "NO", "-" if kill.at_s is None else s_text(kill.at_s))
        for kill in run.kills
    )


def _resizes(outcome: DemoOutcome) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            each.label,
            str(resize.step),
            str(resize.trainers),
            "bitwise" if resize.equal else f"NO: {resize.saved[:DIGEST]} became {resize.restored[:DIGEST]}",
        )
        for each in outcome.runs
        for resize in each.resizes
    )


def _trainers(run: RunResult) -> str:
    return ", ".join(
        [f"{run.trainers:,}", *(f"{each.trainers} from step {each.step}" for each in run.resizes)]
    )


def _run_rows(runs: Sequence[RunResult]) -> tuple[tuple[str, ...], ...]:
    def row(name: str, value: Callable[[RunResult], str]) -> tuple[str, ...]:
        return (name, *(value(each) for each in runs))

    return (
        row("trainers", _trainers),
        row("engines", lambda run: f"{run.rollouts:,}"),
        row("steps", lambda run: f"{run.steps:,}"),
        row("wall time", lambda run: s_text(run.wall_s)),
        row("tensors (digest)", lambda run: run.digest[:DIGEST]),
        row("consumed (digest)", lambda run: run.consumed[:DIGEST]),
        row("recoveries", lambda run: f"{len(run.recoveries):,}"),
        row("engines replaced", lambda run: f"{len(run.engines_replaced):,}"),
        row("steps redone", lambda run: f"{run.steps_redone:,}"),
        row("groups issued", lambda run: f"{run.account.issued:,}"),
        row("trained on", lambda run: f"{run.account.consumed:,}"),
        row("lost", lambda run: f"{run.account.lost:,}"),
        row("trained twice", lambda run: f"{run.account.doubled:,}"),
        row("reward, first 10", lambda run: f"{run.reward_first10:.3f}"),
        row("reward, last 10", lambda run: f"{run.reward_last10:.3f}"),
        row("last evaluation", lambda run: f"{run.evaluations[-1].accuracy:.3f}" if run.evaluations else "-"),
        row("saves", lambda run: f"{len(run.saves):,}"),
        row("median blocking", lambda run: ms_text(median_ms(run.saves))),
        row("bytes written", lambda run: size_text(run.nbytes_written)),
        row("bytes reused", lambda run: size_text(run.nbytes_reused)),
    )
