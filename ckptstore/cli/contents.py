"""What one checkpoint holds, as the plain value that `ckptstore show --json` prints.

Read from the journal, the index and the parts; no chunk is read. Apart from `show.py`, which draws it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ckptstore.catalog import checkpoint_info, read_part
from ckptstore.chunkbase import nbytes_of_bases
from ckptstore.cli.ls import checkpoint_json
from ckptstore.cli.prefixes import prefix_rows
from ckptstore.errors import MissingTensorError, NotFoundError
from ckptstore.history import History
from ckptstore.manifest import AttemptId, Index, Part
from ckptstore.plainvalue import kind_of, plain_value, value_leaves
from ckptstore.run import Run
from ckptstore.skeleton import union
from ckptstore.tensor import TensorSpec

PREFIX_ROWS = 60  # of each role: a screen


def contents(
    run: Run,
    url: str,
    *,
    step: int | None,
    role: str | None,
    tensors: bool,
    names: Sequence[str],
    io: bool = False,
) -> dict[str, Any]:
    """Everything that is known of one checkpoint. NoCheckpointError, NotFoundError (role), MissingTensorError
    (no name matches), CorruptError."""
    id = run.catalog.find(step)
    history, index = run.catalog.history, run.catalog.index(id)
    roles = list(dict.fromkeys(ref.member.role for ref in index.parts))
    if role is not None and role not in roles:
        raise NotFoundError(
            f"checkpoint {id} has no role {role!r}; choose one of {', '.join(roles)}", role=role
        )
    shown = [each for each in roles if role in (None, each)]
    refs = [ref for ref in index.parts if ref.member.role in shown]
    parts = [(ref.object, read_part(run.catalog.store, ref)) for ref in refs]
    patterns = list(names) or ["*"]
    told: dict[str, Any] = {
        "url": run.url,
        "run": run.id,
        "checkpoint": {
            **checkpoint_json(history, checkpoint_info(history, id)),
            "nbytes_saved": index.table.nbytes_saved,  # also where the journal does not have it
        },
        "roles": [_role(name, index, [p for _, p in parts if p.member.role == name]) for name in shown],
    }
    if not names:
        told["fences"] = [_fence(history, fence, id) for fence in history.fold.fences]
        told["parts"] = [_part(ref.key, ref.nbytes, part) for ref, part in parts]
    if io:
        told["io"] = [_io(part) for _, part in parts]
    rows = [
        n
        for n, spec in enumerate(index.table.tensors)
        if _role_of(spec) in shown and _matches(_name_of(spec), patterns)
    ]
    told["segments"] = _segments(index, id, rows)
    told["values"] = [v for each in shown for v in _values(each, [p for _, p in parts], patterns)]
    if tensors or names:
        told["tensors"] = _tensors(index, rows, {s["key"]: s["number"] for s in told["segments"]})
        if names and not told["tensors"] and not told["values"]:
            raise MissingTensorError(
                f"no name in checkpoint {id} matches {' or '.join(names)}; list them with ckptstore show "
                f"{shlex.quote(url)} --tensors",
                names=tuple(names),
            )
    else:
        specs = [index.table.tensors[n] for n in rows]
        told["prefixes"] = [row for each in shown for row in _prefixes(each, specs)]
    told["next"] = f"ckptstore verify {shlex.quote(url)} --step {id.step}"
    return told


def _role_of(spec: TensorSpec) -> str:
    return spec.name.partition("/")[0]


def _name_of(spec: TensorSpec) -> str:
    return spec.name.partition("/")[2]


def _fence(history: History, fence: int, id: AttemptId) -> dict[str, Any]:
    """One incarnation; `restores` is the checkpoint it began from, `holds` whether its past has this one."""
    fold = history.fold
    entry = fold.fences[fence]
    restores = history.restores(fence)
    lineage = {number for number, _ in history.chain()}
    return {
        "fence": fence,
        "origin": entry.origin.kind,
        "restores": None if restores is None else str(restores),
        "restores_this": restores == id,
        "on_lineage": fence in lineage,
        "reason": entry.reason,
        "roster": dict(entry.roster.roles),
        "job": entry.job,
        "released": fence in fold.released,
        "checkpoints": sum(each.fence == fence for each in history.live()),
        "publications": sum(each.fence == fence for each in fold.publications),
    }


def _role(name: str, index: Index, parts: Sequence[Part]) -> dict[str, Any]:
    chosen = np.array([_role_of(spec) == name for spec in index.table.tensors], bool)
    rows = chosen[index.table.tensor] if len(index.table) else np.zeros(0, bool)
    return {
        "role": name,
        "ranks": len(parts),
        "tensors": int(chosen.sum()),
        "chunks": int(rows.sum()),
        "nbytes": int(index.table.nbytes[rows].sum()),
        "nbytes_decoded": int(index.table.sizes[rows].sum()),
        "nbytes_restore": int(index.table.nbytes[rows].sum())
        + nbytes_of_bases(index.table, np.flatnonzero(rows).tolist()),
        "policy_version": next((p.policy_version for p in parts if p.policy_version is not None), None),
    }


def _part(key: str, nbytes: int, part: Part) -> dict[str, Any]:
    return {
        "member": str(part.member),
        "key": key,
        "nbytes": nbytes,
        "chunks": len(part.table),
        "segments": len(part.segments),
        "nbytes_written": part.nbytes_written,
        "nbytes_reused": part.nbytes_reused,
        "nbytes_saved": part.table.nbytes_saved,
    }


def _io(part: Part) -> dict[str, Any]:
    """How a member wrote; `written` is None where that was not recorded, `nbytes_per_s` where nothing says it."""
    told: dict[str, Any] = {"member": str(part.member), "seconds": None, "nbytes": None, "nbytes_per_s": None}
    if part.io is None:
        return {**told, "written": None}
    nbytes = sum(each.nbytes for each in part.io.written)
    fast = nbytes / part.io.seconds if nbytes and part.io.seconds else None
    return {**told, **part.io.to_json(), "nbytes": nbytes, "nbytes_per_s": fast}


def _segments(index: Index, id: AttemptId, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Segments that hold bytes of these tensors, numbered; `reused` ones were written for an earlier checkpoint."""
    own = f"data/{id}/"
    table = index.table
    used = {table.segments[n] for n in np.unique(table.segment[np.isin(table.tensor, rows)]).tolist()}
    found = [ref for ref in index.segments if ref.key in used]
    return [
        {"number": number, "key": ref.key, "nbytes": ref.nbytes, "reused": not ref.key.startswith(own)}
        for number, ref in enumerate(sorted(found, key=lambda ref: ref.key))
    ]


def _tensors(index: Index, rows: Sequence[int], numbers: dict[str, int]) -> list[dict[str, Any]]:
    """`chunks` counts a tensor's rows in the table; `segments` are the numbers of those that hold them."""
    table = index.table
    chunks = np.bincount(table.tensor, minlength=len(table.tensors))
    chosen = np.isin(table.tensor, rows)
    pairs = np.unique(np.stack([table.tensor[chosen], table.segment[chosen]], axis=1), axis=0)
    segments: dict[int, list[int]] = {}
    for tensor, segment in pairs.tolist():
        segments.setdefault(tensor, []).append(numbers[table.segments[segment]])
    return [
        {
            "role": _role_of(spec),
            "name": _name_of(spec),
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "nbytes": spec.nbytes,
            "chunks": int(chunks[n]),
            "segments": sorted(segments.get(n, [])),
        }
        for n, spec in ((n, table.tensors[n]) for n in rows)
    ]


def _prefixes(role: str, specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    own = [(_name_of(spec), spec) for spec in specs if _role_of(spec) == role]
    return [{"role": role, **row} for row in prefix_rows(own, most=PREFIX_ROWS)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return "*" in patterns or any(fnmatchcase(name.partition("#")[0], pattern) for pattern in patterns)


# -- values


def _values(role: str, parts: Sequence[Part], patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every leaf that is no tensor, with its dotted name; PerRank ones as a list, an item a rank."""
    own = sorted((p for p in parts if p.member.role == role), key=lambda p: p.member.rank)
    node = union([part.state for part in own], by_rank=True)
    for name, value in value_leaves(node):
        if _matches(name, patterns):
            yield {"role": role, "name": name, "kind": kind_of(value), "value": plain_value(value)}
