"""`ckptstore verify`: read everything, compare every digest, say what is damaged and what can be restored."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import ckptstore
from ckptstore.cli.ls import checkpoint_json
from ckptstore.cli.output import (
    FINE,
    PROBLEM,
    Column,
    count_text,
    emit,
    progress_bar,
    size_text,
    table_lines,
    terminal_width,
)
from ckptstore.damage import Damage
from ckptstore.errors import CorruptError
from ckptstore.manifest import CheckpointInfo, Index
from ckptstore.run import Run, VerifyReport

MANY = 40  # damaged things that are listed for a person


def verify_run(url: str, *, step: int | None, full: bool, as_json: bool) -> int:
    """Print what was read and what is wrong; 1 when anything is."""
    began = time.monotonic()
    try:
        run = ckptstore.open(url)
    except CorruptError as error:
        told = _unreadable(url, error)
    else:
        with progress_bar("reading") as bar:
            report = run.verify(step, full=full, progress=lambda done, total: bar(done, total, ""))
        told = _told(run, url, report, full=full, seconds=time.monotonic() - began)
    emit(told, lambda: lines(told), as_json=as_json)
    return FINE if told["ok"] else PROBLEM


def _told(run: Run, url: str, report: VerifyReport, *, full: bool, seconds: float) -> dict[str, Any]:
    history, place = run.catalog.history, shlex.quote(url)
    reached = {info.id: _reaches(run, info, report.damage) for info in report.checkpoints}
    good = set(history.good())
    whole = [info for info in report.checkpoints if not reached[info.id] and info.id in good]
    newest = whole[-1].step if whole else None
    if report.ok and newest is not None:
        following = f"ckptstore show {place} --step {newest}"
    elif newest is not None:
        following = f"restore step {newest} with ckptstore.begin(url, roster, resume={newest})"
    elif report.ok:
        following = f"ckptstore ls {place}"
    else:
        following = "put back the damaged objects from a copy of the store, then verify again"
    return {
        "url": run.url,
        "run": run.id,
        "ok": report.ok,
        "full": full,
        "nbytes": report.nbytes,
        "chunks": report.chunks,
        "seconds": round(seconds, 3),
        "checkpoints": [
            {**checkpoint_json(history, info), "damaged": reached[info.id]} for info in report.checkpoints
        ],
        "damage": [
            {"key": each.key, "tensor": each.tensor, "problem": each.problem} for each in report.damage
        ],
        "newest_whole": newest,
        "next": following,
    }


def _unreadable(url: str, error: CorruptError) -> dict[str, Any]:
    """A run whose journal or `run.json` is damaged: nothing below can be judged."""
    key = error.values.get("key", error.values.get("what"))
    return {
        "url": url,
        "run": None,
        "ok": False,
        "full": False,
        "nbytes": 0,
        "chunks": 0,
        "seconds": 0.0,
        "checkpoints": [],
        "damage": [{"key": key, "tensor": None, "problem": str(error)}],
        "newest_whole": None,
        "next": "put back the damaged object from a copy of the store, then verify again",
    }


def _reaches(run: Run, info: CheckpointInfo, damage: Sequence[Damage]) -> bool:
    """Does any of the damage lie in something that this checkpoint needs?"""
    if not damage:
        return False
    commit = run.catalog.history.fold.commits[info.id]
    keys = {each.key for each in damage}
    stem = commit.index.key.removesuffix("parquet")  # of its three objects
    if any(key.startswith(stem) for key in keys) or any(key.startswith("journal/") for key in keys):
        return True
    index = run.catalog.index(info.id)
    if any(ref.object.key in keys for ref in index.parts):
        return True
    segments = {ref.key for ref in index.segments}
    return any(each.key in segments and _needs(index, each) for each in damage)


def _needs(index: Index, damage: Damage) -> bool:
    """Of a damaged segment, only the chunks of the named tensor are lost; without a name, all of it."""
    if damage.tensor is None:
        return True
    table = index.table
    tensors = [n for n, spec in enumerate(table.tensors) if spec.name == damage.tensor]
    segment = table.segments.index(damage.key) if damage.key in table.segments else -1
    return bool((np.isin(table.tensor, tensors) & (table.segment == segment)).any())


def lines(told: Mapping[str, Any]) -> list[str]:
    found = [*_checkpoints(told), *_damage(told["damage"])]
    read = f"{count_text(told['chunks'], 'chunk')}, {size_text(told['nbytes'])} in {told['seconds']:.1f} s"
    if told["ok"]:
        found.append(f"all digests are right ({read}); next: {told['next']}")
        return found
    count = count_text(len(told["damage"]), "problem")
    whole = (
        "no checkpoint is whole" if told["newest_whole"] is None else f"newest whole: {told['newest_whole']}"
    )
    return [*found, f"{count} found ({read}); {whole}; next: {told['next']}"]


def _checkpoints(told: Mapping[str, Any]) -> list[str]:
    columns = (
        Column(title="STEP", right=True),
        Column(title="FENCE", right=True),
        Column(title="COMMITTED"),
        Column(title="SIZE", right=True),
        Column(title="STATE"),
        Column(title="VERIFIED"),
    )
    rows = [
        [
            str(each["step"]),
            str(each["fence"]),
            each["committed_at"],
            size_text(each["nbytes"]),
            each["status"],
            "DAMAGED" if each["damaged"] else "ok",
        ]
        for each in told["checkpoints"]
    ]
    return table_lines(columns, rows, width=terminal_width()) if rows else []


def _damage(damage: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for each in damage[:MANY]:
        where = each["key"] if each["tensor"] is None else f"{each['key']}, {each['tensor']}"
        found.append(f"{where}: {each['problem']}")
    if len(damage) > MANY:
        found.append(f"… and {len(damage) - MANY:,} more: --json")
    return found
