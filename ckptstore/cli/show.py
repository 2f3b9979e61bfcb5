"""`ckptstore show`: draw what one checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import ckptstore
from ckptstore.cli.contents import contents
from ckptstore.cli.ls import roles_text
from ckptstore.cli.output import (
    FINE,
    UNBROKEN,
    Column,
    count_text,
    emit,
    pair_lines,
    size_text,
    table_lines,
    terminal_width,
)
from ckptstore.cli.prefixes import shape_text

Rows = Sequence[Mapping[str, Any]]

MANY = 20  # rows of a section, unless its items were asked for
WIDEST_VALUE = 64


def show_checkpoint(
    url: str,
    *,
    step: int | None,
    role: str | None,
    tensors: bool,
    names: Sequence[str],
    io: bool,
    as_json: bool,
) -> int:
    """Print the contents of the checkpoint of `step`, or of the newest good one."""
    told = contents(ckptstore.open(url), url, step=step, role=role, tensors=tensors, names=names, io=io)
    emit(told, lambda: lines(told, all_values=bool(names)), as_json=as_json)
    return FINE


def lines(told: Mapping[str, Any], *, all_values: bool) -> list[str]:
    found = _head(told)
    found += _section("fences", _fences(told.get("fences", [])))
    found += _section("roles", _roles(told["roles"]))
    found += _section("parts", _parts(told.get("parts", [])))
    found += _section("how segments were written", _io(told.get("io", [])))
    listed = "tensors" in told
    found += _section("segments", _segments(told["segments"], most=None if listed else MANY))
    if listed:
        found += _section(count_text(len(told["tensors"]), "tensor"), _tensors(told["tensors"]))
    else:
        found += _section(
            "tensors, by prefix (list them: --tensors, or --names GLOB)", _prefixes(told["prefixes"])
        )
    values = told["values"]
    found += _section("values", _values(values, most=None if all_values else MANY, whole=all_values))
    return [*found, f"next: {told['next']}"]


def _section(title: str, body: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in body), ""] if body else []


def _width() -> int | None:
    width = terminal_width()
    return None if width is None else width - 2


def _head(told: Mapping[str, Any]) -> list[str]:
    each = told["checkpoint"]
    publication = each["publication"]
    chunks, tensors = sum(r["chunks"] for r in told["roles"]), sum(r["tensors"] for r in told["roles"])
    parts = f"{count_text(tensors, 'tensor')}, {count_text(chunks, 'chunk')}, "
    parts += count_text(len(told["segments"]), "segment")
    state = each["status"] if each["reason"] is None else f"{each['status']}: {each['reason']}"
    if publication is None:
        published = "none"
    elif publication["digest"] is None:
        published = f"{publication['number']}, made by this very step"
    else:
        published = f"{publication['number']}, digest {publication['digest']}"
    return [
        *pair_lines(
            [
                ("checkpoint", each["id"]),
                ("step", f"{each['step']:,} updates applied"),
                ("fence", str(each["fence"])),
                ("committed", each["committed_at"]),
                ("state", state),
                ("size", f"{size_text(each['nbytes'])} in {parts}"),
                ("written", _written_text(each)),
                *_restore_cost(told["roles"]),
                ("roles", roles_text(each["roles"])),
                ("publication", published),
                ("run", f"{told['run']} at {told['url']}"),
            ]
        ),
        "",
    ]


def _written_text(each: Mapping[str, Any]) -> str:
    """What became of the bytes of all tensors: the three are their sum."""
    written, reused, saved = (size_text(each[f"nbytes_{name}"]) for name in ("written", "reused", "saved"))
    return f"{written}, reused {reused}, saved {saved} by encoding"


def _fences(fences: Rows) -> list[str]:
    columns = (
        Column(title="FENCE", right=True),
        Column(title="FROM"),
        Column(title="CHECKPOINTS", right=True),
        Column(title="PUBLICATIONS", right=True, optional=True),
        Column(title="LINEAGE"),
        Column(title="RELEASED", optional=True),
        Column(title="JOB", optional=True),
        Column(title="ROSTER"),
    )
    if not fences:
        return []
    rows = [
        [
            str(each["fence"]),
            _origin(each),
            str(each["checkpoints"]),
            str(each["publications"]),
            "yes" if each["on_lineage"] else "no",
            "yes" if each["released"] else "no",
            each["job"],
            roles_text(each["roster"]) + (f" ({each['reason']})" if each["reason"] else ""),
        ]
        for each in fences[-MANY:]
    ]
    return [*_earlier(len(fences) - MANY), *table_lines(columns, rows, width=_width())]


def _origin(each: Mapping[str, Any]) -> str:
    if each["origin"] == "adopt":
        return "adopted"
    if each["restores"] is None:
        return "start"
    return "this one" if each["restores_this"] else str(each["restores"])


def _earlier(count: int) -> list[str]:
    return [f"({count:,} earlier ones: --json)"] if count > 0 else []


def _roles(roles: Rows) -> list[str]:
    columns = (
        Column(title="ROLE"),
        Column(title="RANKS", right=True),
        Column(title="TENSORS", right=True),
        Column(title="CHUNKS", right=True),
        Column(title="SIZE", right=True),
        Column(title="POLICY VERSION", right=True),
    )
    rows = [
        [
            each["role"],
            str(each["ranks"]),
            f"{each['tensors']:,}",
            f"{each['chunks']:,}",
            size_text(each["nbytes"]),
            "-" if each["policy_version"] is None else str(each["policy_version"]),
        ]
        for each in roles
    ]
    return table_lines(columns, rows, width=_width())


def _restore_cost(roles: Rows) -> list[tuple[str, str]]:
    """What a restore of all reads, where chunks are encoded: their stored bytes, and the bases of deltas."""
    wanted = sum(each["nbytes_decoded"] for each in roles)
    read = sum(each["nbytes_restore"] for each in roles)
    if read == wanted:
        return []
    return [
        (
            "restore",
            f"reads {size_text(read)} for {size_text(wanted)} ({read / max(wanted, 1):.2f} x), encoded",
        )
    ]


def _parts(parts: Rows) -> list[str]:
    columns = (
        Column(title="MEMBER"),
        Column(title="WRITTEN", right=True),
        Column(title="REUSED", right=True),
        Column(title="SAVED", right=True),
        Column(title="CHUNKS", right=True),
        Column(title="SEGMENTS", right=True),
        Column(title="PART", right=True),
        Column(title="KEY", optional=True),
    )
    rows = [
        [
            each["member"],
            size_text(each["nbytes_written"]),
            size_text(each["nbytes_reused"]),
            size_text(each["nbytes_saved"]),
            f"{each['chunks']:,}",
            str(each["segments"]),
            size_text(each["nbytes"]),
            each["key"],
        ]
        for each in parts[:MANY]
    ]
    if not rows:
        return []
    return [*table_lines(columns, rows, width=_width()), *_more(len(parts) - MANY, "--json")]


def _io(members: Rows) -> list[str]:
    """A line for each way in which a member wrote; the time is that of all its ways."""
    columns = (
        Column(title="MEMBER"),
        Column(title="SEGMENTS", right=True),
        Column(title="SIZE", right=True),
        Column(title="SECONDS", right=True),
        Column(title="GB/S", right=True),
        Column(title="HOW"),
    )
    rows = []
    for each in members:
        if not each["written"]:
            rows.append(
                [each["member"], "-", "-", "-", "-", "not recorded" if each["written"] is None else "nothing"]
            )
            continue
        fast = each["nbytes_per_s"]
        took = [f"{each['seconds']:.3f}", "-" if fast is None else f"{fast / 1e9:.2f}"]
        for n, one in enumerate(each["written"]):
            how = one["way"] if one["reason"] is None else f"{one['way']}: {one['reason']}"
            head, times = (each["member"], took) if n == 0 else ("", ["", ""])
            rows.append([head, f"{one['segments']:,}", size_text(one["nbytes"]), *times, how])
    return table_lines(columns, rows, width=_width()) if rows else []


def _more(count: int, how: str) -> list[str]:
    return [f"… and {count:,} more: {how}"] if count > 0 else []


def _segments(segments: Rows, *, most: int | None) -> list[str]:
    columns = (
        Column(title="NO", right=True),
        Column(title="SIZE", right=True),
        Column(title="WRITTEN FOR", optional=True),
        Column(title="KEY"),
    )
    rows = [
        [
            str(each["number"]),
            size_text(each["nbytes"]),
            "earlier" if each["reused"] else "this one",
            each["key"],
        ]
        for each in segments[:most]
    ]
    if not rows:
        return []
    left = 0 if most is None else len(segments) - most
    return [*table_lines(columns, rows, width=_width()), *_more(left, "--tensors")]


def _prefixes(prefixes: Rows) -> list[str]:
    columns = (
        Column(title="NAME"),
        Column(title="TENSORS", right=True),
        Column(title="SIZE", right=True),
        Column(title="SHAPE"),
        Column(title="DTYPE"),
    )
    rows, role, above = [], None, list[str]()
    for each in prefixes:
        if each["role"] != role:
            role = each["role"]
            own = [row for row in prefixes if row["role"] == role and row["depth"] == 0]
            rows.append(
                [
                    f"{role}/",
                    f"{sum(r['tensors'] for r in own):,}",
                    size_text(sum(r["nbytes"] for r in own)),
                    "",
                    "",
                ]
            )
        del above[each["depth"] :]
        rows.append(
            [
                "  " * (each["depth"] + 1) + each["name"].removeprefix(above[-1] if above else ""),
                f"{each['tensors']:,}",
                size_text(each["nbytes"]),
                shape_text(each["shape"]),
                ", ".join(each["dtypes"]),
            ]
        )
        above.append(each["name"])
    return table_lines(columns, rows, width=_width()) if rows else []


def _tensors(tensors: Rows) -> list[str]:
    columns = (
        Column(title="NAME"),
        Column(title="DTYPE"),
        Column(title="SHAPE"),
        Column(title="SIZE", right=True),
        Column(title="CHUNKS", right=True, optional=True),
        Column(title="SEGMENTS"),
    )
    rows = [
        [
            f"{each['role']}/{each['name']}",
            each["dtype"],
            shape_text(each["shape"]),
            size_text(each["nbytes"]),
            f"{each['chunks']:,}",
            ", ".join(map(str, each["segments"])),
        ]
        for each in tensors
    ]
    return table_lines(columns, rows, width=_width()) if rows else []


def _values(values: Rows, *, most: int | None, whole: bool) -> list[str]:
    columns = (Column(title="NAME"), Column(title="KIND"), Column(title="VALUE"))
    rows = [
        [f"{each['role']}/{each['name']}", each["kind"], _value_text(each, whole=whole)]
        for each in values[:most]
    ]
    if not rows:
        return []
    left = 0 if most is None else len(values) - most
    return [*table_lines(columns, rows, width=_width()), *_more(left, "--names '*'")]


def _value_text(each: Mapping[str, Any], *, whole: bool) -> str:
    value = each["value"]
    if each["kind"] == "ledger":
        return ", ".join(f"{name}{UNBROKEN}{count:,}" for name, count in value.items())
    text = json.dumps(value, ensure_ascii=False)
    if whole or len(text) <= WIDEST_VALUE:
        return text
    size = f" ({len(value)} items)" if isinstance(value, (list, dict)) else ""
    return text[: WIDEST_VALUE - len(size) - 1] + "…" + size
