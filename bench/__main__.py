"""Measure one area and print its table: what, to reach, measured, met. `--json` prints the rows alone.

Figures are of this machine at this moment; which of them are ratios, their units say. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from importlib import import_module

from rich.console import Console
from rich.table import Table

from bench.rows import Row

AREAS = {
    "codecs": ("bench.codecs",),
    "flatten": ("bench.flatten",),
    "planning": ("bench.planning", "bench.commit"),
    "reading": ("bench.reading",),
    "replicas": ("bench.replicas",),
    "s3": ("bench.s3",),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__)
    parser.add_argument("area", choices=sorted(AREAS), help="what to measure")
    parser.add_argument(
        "--json", action="store_true", help="print the rows as JSON on stdout, and nothing else"
    )
    given = parser.parse_args()
    progress = Console(stderr=True)
    found: list[Row] = []
    with progress.status("measuring") as status:
        for name in AREAS[given.area]:
            measure: Callable[[], Iterable[Row]] = import_module(name).rows
            for row in measure():
                found.append(row)
                status.update(f"measured: {row.what}")
    if given.json:
        json.dump([row.to_json() for row in found], sys.stdout, indent=1)
        print()
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(found))
    raise SystemExit(1 if any(row.met is False for row in found) else 0)


def table(found: Iterable[Row]) -> Table:
    made = Table("what", "to reach", "measured", "met", "", box=None, header_style="bold")
    for row in found:
        at_most = "" if row.at_most is None else f"≤ {row.at_most:g}"
        met = {None: "", True: "yes", False: "[bold red]no[/]"}[row.met]
        made.add_row(row.what, at_most, f"{row.value:.4g} {row.unit}", met, row.note)
    return made


main()
