"""`ckptstore diff`: what differs between two checkpoints, as a value and as lines."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import ckptstore
from ckptstore.cli.ls import checkpoint_json
from ckptstore.cli.output import (
    FINE,
    PROBLEM,
    Column,
    count_text,
    emit,
    pair_lines,
    progress_bar,
    size_text,
    table_lines,
    terminal_width,
)
from ckptstore.cli.prefixes import shape_text
from ckptstore.difference import Difference, diff
from ckptstore.elements import ElementDiff
from ckptstore.errors import InvalidInputError
from ckptstore.grouping import Grouping, natural_order
from ckptstore.plainvalue import plain_value
from ckptstore.run import Run
from ckptstore.tensor import TensorSpec

MANY = 60  # rows of a section
WIDEST_VALUE = 48
BAR_CELLS = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"

Rows = Sequence[Mapping[str, Any]]


def diff_checkpoints(
    urls: Sequence[str],
    *,
    steps: Sequence[int],
    role: str | None,
    names: Sequence[str],
    by: str,
    stacked: Sequence[str],
    as_json: bool,
) -> int:
    """Print what differs; 1 when anything does."""
    began, grouping = time.monotonic(), Grouping(by=by)
    if len(steps) > 2:
        raise InvalidInputError(
            f"{len(steps)} steps were given: two checkpoints are compared, name at most two"
        )
    if stacked and by in ("prefix", "tensor"):
        raise InvalidInputError(
            f"--stacked says which rows are experts, but groups are by {by}: add --by expert"
        )
    runs = [ckptstore.open(url) for url in urls]
    with progress_bar("comparing") as bar:
        found = diff(
            runs[0],
            runs[1] if len(runs) > 1 else None,
            steps=_pair(steps, one=len(runs) == 1),
            role=role,
            names=names,
            rows=stacked,
            progress=lambda done, total: bar(done, total, ""),
        )
    told = _told(found, runs, urls, grouping, stacked, seconds=time.monotonic() - began)
    emit(told, lambda: lines(told), as_json=as_json)
    return FINE if found.equal else PROBLEM


def _pair(steps: Sequence[int], *, one: bool) -> tuple[int | None, int | None]:
    """One step: of one run it is compared with the newest, of two runs it is that of both."""
    if not steps:
        return None, None
    if len(steps) == 1:
        return steps[0], None if one else steps[0]
    return steps[0], steps[1]


# -- the value


def _told(
    found: Difference,
    runs: Sequence[Run],
    urls: Sequence[str],
    grouping: Grouping,
    stacked: Sequence[str],
    *,
    seconds: float,
) -> dict[str, Any]:
    total = sum((each.elements for each in found.changed), ElementDiff())
    groups = _groups(found, grouping, stacked)
    return {
        "before": _checkpoint(runs[0], found.before),
        "after": _checkpoint(runs[-1], found.after),
        "equal": found.equal,
        "tensors": {
            "added": len(found.added),
            "removed": len(found.removed),
            "altered": len(found.altered),
            "changed": len(found.changed),
            "unchanged": len(found.unchanged),
        },
        "elements": total.elements + sum(spec.numel for spec in found.unchanged),
        "elements_changed": total.changed,
        "largest": _number(total.largest),
        "nan": total.nan,
        "nbytes_settled": found.nbytes_settled,
        "nbytes_compared": found.nbytes_compared,
        "nbytes_read": found.nbytes_read,
        "seconds": round(seconds, 3),
        "by": grouping.by,
        "groups": groups,
        "added": [_tensor(spec) for spec in found.added],
        "removed": [_tensor(spec) for spec in found.removed],
        "altered": [{**_named(old), "before": _kind(old), "after": _kind(new)} for old, new in found.altered],
        "values": [
            {
                "role": each.role,
                "name": each.name,
                "change": each.kind,
                "before": plain_value(each.before),
                "after": plain_value(each.after),
            }
            for each in found.values
        ],
        "values_unchanged": found.values_unchanged,
        "next": _following(found, urls, grouping),
    }


def _checkpoint(run: Run, info: Any) -> dict[str, Any]:
    return {"url": run.url, "run": run.id, "checkpoint": checkpoint_json(run.catalog.history, info)}


def _named(spec: TensorSpec) -> dict[str, str]:
    role, _, name = spec.name.partition("/")
    return {"role": role, "name": name}


def _kind(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {**_named(spec), **_kind(spec), "nbytes": spec.nbytes}


def _number(value: float | int | None) -> float | int | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _following(found: Difference, urls: Sequence[str], grouping: Grouping) -> str:
    places = " ".join(map(shlex.quote, urls))
    if found.equal:
        return f"ckptstore show {shlex.quote(urls[-1])} --step {found.after.step}"
    steps = f"--step {found.before.step} --step {found.after.step}"
    if found.changed and grouping.by == "prefix":
        return f"ckptstore diff {places} {steps} --by layer"
    if found.changed and grouping.by != "tensor":
        largest = max(found.changed, key=lambda each: each.elements.changed)
        name = shlex.quote(largest.spec.name.partition("/")[2])
        return f"ckptstore diff {places} {steps} --by tensor --names {name}"
    return f"ckptstore show {shlex.quote(urls[-1])} --step {found.after.step} --tensors"


@dataclass(slots=True)
class _Group:
    tensors: int = 0
    tensors_changed: int = 0
    elements: ElementDiff = field(default_factory=ElementDiff)

    def add(self, elements: ElementDiff) -> None:
        self.tensors += 1
        self.tensors_changed += elements.changed > 0
        self.elements += elements


def _groups(found: Difference, grouping: Grouping, stacked: Sequence[str]) -> list[dict[str, Any]]:
    """Every group of the tensors that both have, also those without a change."""
    groups: dict[str, dict[str, _Group]] = defaultdict(lambda: defaultdict(_Group))
    for spec, elements, rows in _compared(found):
        named = _named(spec)
        own = groups[named["role"]]
        if not any(fnmatchcase(named["name"], glob) for glob in stacked):
            own[grouping.key(named["name"])].add(elements)
            continue
        for row in range(spec.shape[0]):
            of_row = ElementDiff(elements=spec.numel // spec.shape[0]) + rows.get(row, ElementDiff())
            own[grouping.row_key(named["name"], row)].add(of_row)
    return [
        {
            "role": role,
            "name": key,
            "tensors": own[key].tensors,
            "tensors_changed": own[key].tensors_changed,
            "elements": own[key].elements.elements,
            "elements_changed": own[key].elements.changed,
            "largest": _number(own[key].elements.largest),
            "nan": own[key].elements.nan,
        }
        for role, own in groups.items()
        for key in natural_order(own)
    ]


def _compared(found: Difference) -> Iterator[tuple[TensorSpec, ElementDiff, Mapping[int, ElementDiff]]]:
    for each in found.changed:
        yield each.spec, each.elements, each.rows
    for spec in found.unchanged:
        yield spec, ElementDiff(elements=spec.numel), {}


# -- the lines


def lines(told: Mapping[str, Any]) -> list[str]:
    found = _head(told)
    changed = [row for row in told["groups"] if row["elements_changed"]]
    noun = {"layer": "layer", "expert": "expert", "tensor": "tensor", "prefix": "prefix"}.get(
        told["by"], "group"
    )
    title = f"changed, by {told['by']}"
    found += _section(title, _group_lines(changed, left=len(told["groups"]) - len(changed), noun=noun))
    for name in ("added", "removed"):
        found += _section(f"{name} tensors", _tensor_lines(told[name]))
    found += _section("tensors of another shape or dtype", _altered_lines(told["altered"]))
    found += _section("values", _value_lines(told["values"], told["values_unchanged"]))
    verdict = "equal, bit by bit" if told["equal"] else "they differ"
    return [*found, f"{verdict}; next: {told['next']}"]


def _head(told: Mapping[str, Any]) -> list[str]:
    tensors = told["tensors"]
    words = ", ".join(f"{count:,} {kind}" for kind, count in tensors.items() if count) or "none"
    share = _share(told["elements_changed"], told["elements"])
    elements = f"{told['elements_changed']:,} of {told['elements']:,} changed ({share})"
    if told["largest"] is not None:
        elements += f", by {_amount(told['largest'])} at most"
    if told["nan"]:
        elements += f"; {told['nan']:,} of them NaN on a side"
    data = f"{size_text(told['nbytes_settled'])} settled by checksums, {size_text(told['nbytes_compared'])} compared"
    sides = [(side, told[side]["checkpoint"], told[side]["url"]) for side in ("before", "after")]
    return [
        *pair_lines(
            [
                *((side, f"step {each['step']}, {each['id']} at {url}") for side, each, url in sides),
                ("tensors", words),
                ("elements", elements),
                ("data", f"{data} ({size_text(told['nbytes_read'])} read in {told['seconds']:.1f} s)"),
            ]
        ),
        "",
    ]


def _section(title: str, body: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in body), ""] if body else []


def _width() -> int | None:
    width = terminal_width()
    return None if width is None else width - 2


def _more(count: int) -> list[str]:
    return [f"… and {count:,} more: --json"] if count > 0 else []


def _group_lines(groups: Rows, *, left: int, noun: str) -> list[str]:
    if not groups:
        return []
    nan = any(each["nan"] for each in groups)
    columns = (
        Column(title="NAME"),
        Column(title="TENSORS", right=True, optional=True),
        Column(title="CHANGED", right=True, optional=True),
        *([Column(title="NAN", right=True)] if nan else []),
        Column(title="LARGEST", right=True),
        Column(title="SHARE", right=True),
        Column(title=""),
    )
    rows = [
        [
            f"{each['role']}/{each['name']}",
            f"{each['tensors_changed']:,} of {each['tensors']:,}",
            f"{each['elements_changed']:,}",
            *([f"{each['nan']:,}"] if nan else []),
            "-" if each["largest"] is None else _amount(each["largest"]),
            _share(each["elements_changed"], each["elements"]),
            bar_text(each["elements_changed"] / each["elements"]),
        ]
        for each in groups[:MANY]
    ]
    plural = {"prefix": "prefixes"}.get(noun)
    rest = [f"{count_text(left, noun, plural)} unchanged"] if left else []
    return [*table_lines(columns, rows, width=_width()), *_more(len(groups) - MANY), *rest]


def bar_text(share: float) -> str:
    """A bar as long as the share; anything above nothing is seen."""
    eighths = max(round(share * BAR_CELLS * 8), 1 if share > 0 else 0)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")


def _share(part: int, whole: int) -> str:
    """`12.5 %`; only what is all is 100 %, and only what is nothing is 0 %."""
    if not whole or part in (0, whole):
        return "100 %" if part else "0 %"
    percent = 100 * part / whole
    if percent < 0.05:
        return "< 0.1 %"
    return "> 99.9 %" if percent >= 99.95 else f"{percent:.1f} %"


def _amount(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _tensor_lines(tensors: Rows) -> list[str]:
    columns = (
        Column(title="NAME"),
        Column(title="DTYPE"),
        Column(title="SHAPE"),
        Column(title="SIZE", right=True, optional=True),
    )
    rows = [
        [
            f"{each['role']}/{each['name']}",
            each["dtype"],
            shape_text(each["shape"]),
            size_text(each["nbytes"]),
        ]
        for each in tensors[:MANY]
    ]
    return [*table_lines(columns, rows, width=_width()), *_more(len(tensors) - MANY)] if rows else []


def _altered_lines(tensors: Rows) -> list[str]:
    columns = (Column(title="NAME"), Column(title="BEFORE"), Column(title="AFTER"))
    rows = [
        [
            f"{each['role']}/{each['name']}",
            *(f"{each[side]['dtype']} {shape_text(each[side]['shape'])}" for side in ("before", "after")),
        ]
        for each in tensors[:MANY]
    ]
    return [*table_lines(columns, rows, width=_width()), *_more(len(tensors) - MANY)] if rows else []


def _value_lines(values: Rows, unchanged: int) -> list[str]:
    columns = (Column(title="NAME"), Column(title="CHANGE"), Column(title="BEFORE"), Column(title="AFTER"))
    rows = [
        [
            f"{each['role']}/{each['name']}",
            each["change"],
            *_value_texts(each),
        ]
        for each in values[:MANY]
    ]
    if not rows:
        return []
    rest = [f"{count_text(unchanged, 'value')} unchanged"] if unchanged else []
    return [*table_lines(columns, rows, width=_width()), *_more(len(values) - MANY), *rest]


def _value_texts(each: Mapping[str, Any]) -> tuple[str, str]:
    """Both sides as short texts: of two dicts what differs, of lists their lengths when they are long."""
    before, after = each["before"], each["after"]
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if before.get(key, {}) != after.get(key, {})]
        before, after = ({key: side[key] for key in keys if key in side} for side in (before, after))
    old, new = _value_text(before), _value_text(after)
    return "-" if each["change"] == "added" else old, "-" if each["change"] == "removed" else new


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        text = ", ".join(f"{key} {json.dumps(item, ensure_ascii=False)}" for key, item in value.items())
        return text if len(text) <= WIDEST_VALUE else count_text(len(value), "item")
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= WIDEST_VALUE // 2 or isinstance(value, (bool, int, float)):
        return text
    return count_text(len(value), "item") if isinstance(value, list) else text[: WIDEST_VALUE - 1] + "…"
