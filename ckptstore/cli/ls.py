"""`ckptstore ls`: the checkpoints of a run, as its journal tells them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import ckptstore
from ckptstore.cli.output import (
    FINE,
    PROBLEM,
    UNBROKEN,
    Column,
    emit,
    size_text,
    table_lines,
    terminal_width,
)
from ckptstore.history import History
from ckptstore.manifest import CheckpointInfo
from ckptstore.run import Run

COLUMNS = (
    Column(title="STEP", right=True),
    Column(title="FENCE", right=True),
    Column(title="COMMITTED"),
    Column(title="SIZE", right=True),
    Column(title="WRITTEN", right=True, optional=True),
    Column(title="REUSED", right=True, optional=True),
    Column(title="SAVED", right=True, optional=True),
    Column(title="PUB", right=True),
    Column(title="STATE"),
    Column(title="ID", optional=True),
    Column(title="ROLES"),
)


def list_checkpoints(url: str, *, as_json: bool) -> int:
    """Print all live checkpoints; 1 when there are some and none can be restored."""
    run = ckptstore.open(url)
    told = listing(run, url)
    emit(told, lambda: lines(told), as_json=as_json)
    return PROBLEM if told["checkpoints"] and told["newest"] is None else FINE


def listing(run: Run, url: str) -> dict[str, Any]:
    """What `--json` prints; `url` as it was typed, for the command that comes next."""
    history, infos, latest = run.catalog.history, run.checkpoints(), run.latest()
    place = shlex.quote(url)
    if latest is not None:
        following = f"ckptstore show {place} --step {latest.step}"
    elif infos:
        following = f"ckptstore verify {place}"
    else:
        following = f"ckptstore ls {place}, once a save has been committed"
    return {
        "url": run.url,
        "run": run.id,
        "fence": history.fence,
        "checkpoints": [checkpoint_json(history, info) for info in infos],
        "newest": None if latest is None else latest.step,
        "next": following,
    }


def checkpoint_json(history: History, info: CheckpointInfo) -> dict[str, Any]:
    """One checkpoint; `reason` says why one is bad."""
    publication = info.publication
    order = dict.fromkeys([*dict(history.fold.fences[info.fence].roster.roles), *info.roles])
    return {
        "step": info.step,
        "fence": info.fence,
        "id": str(info.id),
        "committed_at": info.committed_at,
        "nbytes": info.nbytes,
        "nbytes_written": info.nbytes_written,
        "nbytes_reused": info.nbytes_reused,
        "nbytes_saved": info.nbytes_saved,
        "publication": None if publication is None else {"number": publication[0], "digest": publication[1]},
        "status": info.status,
        "reason": history.fold.bad.get(info.id),
        "roles": {role: info.roles[role] for role in order if role in info.roles},
    }


def lines(told: Mapping[str, Any]) -> list[str]:
    checkpoints: Sequence[Mapping[str, Any]] = told["checkpoints"]
    found = []
    if checkpoints:
        found = table_lines(COLUMNS, [_row(each) for each in checkpoints], width=terminal_width())
    found += [f"{each['id']} is bad: {each['reason']}" for each in checkpoints if each["reason"]]
    if told["newest"] is not None:
        return [*found, f"newest loadable: {told['newest']}; next: {told['next']}"]
    if checkpoints:
        return [*found, f"none of these can be restored; next: {told['next']}"]
    return [f"no checkpoint yet (run {told['run']}, fence {told['fence']}); next: {told['next']}"]


def _row(each: Mapping[str, Any]) -> list[str]:
    publication = each["publication"]
    return [
        str(each["step"]),
        str(each["fence"]),
        each["committed_at"],
        size_text(each["nbytes"]),
        size_text(each["nbytes_written"]),
        size_text(each["nbytes_reused"]),
        "-" if each["nbytes_saved"] is None else size_text(each["nbytes_saved"]),
        "-" if publication is None else str(publication["number"]),
        each["status"],
        each["id"],
        roles_text(each["roles"]),
    ]


def roles_text(roles: Mapping[str, int]) -> str:
    """`trainer 8, loop 1`; a role and its size stay on one line."""
    return ", ".join(f"{role}{UNBROKEN}{size}" for role, size in roles.items())
