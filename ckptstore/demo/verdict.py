"""What came of a demo command, in one sentence and a few numbers; shared by the table and the page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ckptstore.demo.result import DemoOutcome, Recovery, RunResult, Save


def verdict(outcome: DemoOutcome) -> str:
    """The sentence at the top: does the run equal the undisturbed one, after how much?"""
    run = outcome.run
    fired = sum(kill.fired for kill in run.kills)
    kills = count_text(fired, "kill")
    if outcome.bitwise_equal is None:
        if run.resizes and all(resize.equal for resize in run.resizes):
            told = " and ".join(f"{resize.trainers} after step {resize.step}" for resize in run.resizes)
            return f"Restored bitwise on another number of trainers: {told}."
        if run.resizes:
            return "The tensors restored on another number of trainers are not those that were saved."
        return f"{count_text(run.steps, 'step')} undisturbed; no other run to compare with."
    if outcome.differences:
        return f"Not equal to the undisturbed run after {kills}: {_and(outcome.differences)} differ."
    if fired == 0:
        return "Bitwise equal to the undisturbed run, but nothing was killed."
    return f"Bitwise equal to the undisturbed run after {kills}."


def summary(outcome: DemoOutcome) -> str:
    """The sentence below it: what it took, and what became of the samples."""
    run = outcome.run
    parts = []
    if run.recoveries:
        parts.append(
            f"{count_text(len(run.recoveries), 'recovery', 'recoveries')} from the newest whole checkpoint"
        )
    if run.engines_replaced:
        parts.append(f"{count_text(len(run.engines_replaced), 'rollout engine')} replaced without a rollback")
    if run.steps_redone:
        parts.append(f"{count_text(run.steps_redone, 'step')} redone")
    account = run.account
    if account.lost or account.doubled:
        parts.append(f"{count_text(account.lost, 'sample group')} lost and {account.doubled:,} trained twice")
    else:
        parts.append(f"each of {count_text(account.consumed, 'sample group')} trained exactly once")
    text = ", ".join(parts)
    return text[0].upper() + text[1:] + "."


def is_success(outcome: DemoOutcome) -> bool:
    return not outcome.problems


def median_ms(saves: Sequence[Save]) -> float:
    """Median of the blocking times; 0 without a save."""
    return median(save.blocking_ms for save in saves) if saves else 0.0


def median_s(recoveries: Sequence[Recovery]) -> float:
    return median(recovery.total_s for recovery in recoveries) if recoveries else 0.0


def kill_step(at: str) -> int:
    """The step of a kill as it is written: 17 for `trainer:1@17`."""
    return int(at.partition("@")[2].removesuffix("+save"))


def kill_kind(at: str) -> str:
    """`trainer`, `rollout` or `coordinator`."""
    return at.partition("@")[0].partition(":")[0]


def cause_text(recovery: Recovery) -> str:
    """Who died, written as kills are (`trainer:1`), or why else there is a new fence."""
    return ", ".join(who.replace("/", ":") for who in recovery.died) or recovery.reason


def layout_text(run: RunResult) -> str:
    """`2 trainers, 2 engines`, with the resizes that followed."""
    text = f"{count_text(run.trainers, 'trainer')}, {count_text(run.rollouts, 'engine')}"
    for resize in run.resizes:
        text += f"; {resize.trainers} from step {resize.step}"
    return text


def ms_text(value: float) -> str:
    """Milliseconds with three significant digits."""
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def s_text(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s" if value < 10 else f"{value:,.1f} s"


def size_text(nbytes: int) -> str:
    """Bytes in binary units with three significant digits."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def count_text(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _and(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
