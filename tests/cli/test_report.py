"""The demo's page and tables: true to the outcome, self-contained, and sound for awkward outcomes."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ckptstore.demo.bars import recovery_figure
from ckptstore.demo.chart import inner_ticks, tick_labels, ticks
from ckptstore.demo.curves import LANES_MAX, lanes, progress_points
from ckptstore.demo.report import command_text, report_html, write_report
from ckptstore.demo.result import PHASES, DemoOutcome
from ckptstore.demo.style import STYLE
from ckptstore.demo.table import print_outcome
from ckptstore.demo.verdict import summary, verdict
from tests.cli.outcomes import make_outcome

CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "resized": {"resizes": ((40, 1), (55, 3))},
    "one step": {"steps": 1, "kills": 0, "compared": False},
    "no kill": {"kills": 0, "compared": False},
    "only resized": {"kills": 0, "compared": False, "resizes": ((40, 1),)},
    "40 kills": {"kills": 40},
    "failed": {"unfired": 2, "equal": False, "lost": 32},
    "1000 steps": {"steps": 1000, "kills": 12},
}
VOID = {"meta", "br"}


@pytest.fixture(params=CASES, scope="module")
def outcome(request: pytest.FixtureRequest) -> DemoOutcome:
    return make_outcome(**CASES[request.param])


class Page(HTMLParser):
    """Checks that tags nest, and keeps what is in the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def figures(page: str) -> list[ElementTree.Element]:
    """All drawings, which are XML as well."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def marks(page: str, where: str) -> int:
    return len(re.findall(rf'data-kill="{where}"', page))


# -- the page


def test_the_page_is_whole_and_needs_nothing_else(outcome: DemoOutcome) -> None:
    text = report_html(outcome)
    page = Page(text)
    assert text.startswith("<!doctype html>") and page.attributes[0][0] == "html"
    tags = {tag for tag, _ in page.attributes}
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tags)
    for _, attributes in page.attributes:
        assert {"src", "href", "srcset", "onclick", "onload"}.isdisjoint(attributes)
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    viewports = [
        a.get("content") for tag, a in page.attributes if tag == "meta" and a.get("name") == "viewport"
    ]
    assert viewports == ["width=device-width, initial-scale=1"]


def test_the_page_tells_the_verdict_first(outcome: DemoOutcome) -> None:
    text = report_html(outcome)
    heading = re.search(r"<h1>(.*?)</h1>", text)
    assert heading is not None and heading[1] == verdict(outcome)
    assert ('<header class="good">' in text) == (not outcome.problems)
    words = " ".join(Page(text).words)
    assert all(problem in words for problem in outcome.problems)


def test_every_kill_is_marked_once_in_each_drawing(outcome: DemoOutcome) -> None:
    text, run = report_html(outcome), outcome.run
    fired = sum(kill.fired for kill in run.kills)
    assert marks(text, "step") == 2 * len(run.kills), "on the reward, for the desk and for the phone"
    assert marks(text, "time") == 2 * fired, "on the timeline"
    hovers = [e.text for figure in figures(text) for e in figure.iter("title")]
    for kill in run.kills:
        assert any(h is not None and h.startswith(f"{kill.at}") for h in hovers)


def test_drawings_stay_within_their_frames(outcome: DemoOutcome) -> None:
    for figure in figures(report_html(outcome)):
        _, _, width, height = map(float, figure.attrib["viewBox"].split())
        for element in figure:  # a legend's signs are groups, moved into place
            for name, limit in (("x", width), ("x1", width), ("cx", width), ("y", height), ("cy", height)):
                if name in element.attrib:
                    assert -1 <= float(element.attrib[name]) <= limit + 1, ElementTree.tostring(element)
            for pair in element.attrib.get("points", "").split():
                x, y = map(float, pair.split(","))
                assert -1 <= x <= width + 1 and -1 <= y <= height + 1
            if element.tag == "rect":
                assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 1


def test_axis_labels_do_not_touch(outcome: DemoOutcome) -> None:
    for figure in figures(report_html(outcome)):
        rows: dict[float, list[tuple[float, float]]] = {}
        for element in figure.iter("text"):
            if element.attrib.get("text-anchor") == "middle" and element.text is not None:
                x, half = float(element.attrib["x"]), len(element.text) * 6.5 / 2
                rows.setdefault(float(element.attrib["y"]), []).append((x - half, x + half))
        for row in rows.values():
            ordered = sorted(row)
            assert all(one[1] <= other[0] for one, other in pairwise(ordered))


def test_every_colour_is_of_both_palettes(outcome: DemoOutcome) -> None:
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", report_html(outcome)))
    light, dark = STYLE.split("prefers-color-scheme: dark", 1)
    dark = dark.split("}", 1)[0]
    assert used <= set(re.findall(r"--([a-z0-9-]+):", light))
    assert used <= set(re.findall(r"--([a-z0-9-]+):", dark))


def test_saves_are_drawn_once_each() -> None:
    outcome = make_outcome(kills=8)
    text = report_html(outcome)
    told = [e.text for f in figures(text) for e in f.iter("title") if e.text is not None and " ms" in e.text]
    blocked = [t for t in told if re.fullmatch(r"step \d+, fence \d+: [\d.,]+ ms(, never committed)?", t)]
    assert len(blocked) == 2 * len(outcome.run.saves)
    assert sum("never" in t for t in blocked) == 2 * sum(not save.committed for save in outcome.run.saves) > 0


def test_recovery_bars_add_up() -> None:
    run = make_outcome(kills=4).run
    figure = ElementTree.fromstring(recovery_figure(run, 500))
    for recovery in run.recoveries:
        for phase in PHASES:
            start = f"fence {recovery.fence}, {phase}: "
            assert sum(e.text is not None and e.text.startswith(start) for e in figure.iter("title")) == 1


def test_what_users_name_cannot_break_the_page() -> None:
    outcome = make_outcome(kills=1)
    nasty = replace(outcome.run, label='<script>alert("x")</script>&', url="</style><b>")
    page = report_html(replace(outcome, run=nasty))
    Page(page)
    assert "<script" not in page and len(figures(page)) > 0


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.html"
    outcome = make_outcome(kills=1)
    write_report(outcome, target)
    assert target.read_text(encoding="utf-8") == report_html(outcome)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(make_outcome(kills=2), target)
    assert target.read_text(encoding="utf-8") == report_html(outcome)
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


# -- sentences and tables


def test_verdicts() -> None:
    assert verdict(make_outcome(kills=3)) == "Bitwise equal to the undisturbed run after 3 kills."
    assert verdict(make_outcome(kills=1)) == "Bitwise equal to the undisturbed run after 1 kill."
    assert verdict(make_outcome(equal=False)).startswith(
        "Not equal to the undisturbed run after 4 kills: tensors"
    )
    assert "no other run" in verdict(make_outcome(kills=0, compared=False))
    assert "1 after step 40" in verdict(make_outcome(kills=0, compared=False, resizes=((40, 1),)))
    assert "32 sample groups lost" in summary(make_outcome(equal=False, lost=32))


def test_the_table_tells_the_same_numbers(outcome: DemoOutcome) -> None:
    for width in (80, 120):
        told = io.StringIO()
        print_outcome(Console(file=told, width=width), outcome, following="open x")
        lines = told.getvalue().splitlines()
        assert all(len(line) <= width for line in lines[:-1])
        text = " ".join(told.getvalue().split())
        assert verdict(outcome) in text and summary(outcome) in text
        assert lines[-1] == "next: open x"
        for each in outcome.runs:
            assert each.digest[:12] in text
        assert f"{outcome.run.account.consumed:,}" in text
        for recovery in outcome.run.recoveries[:20]:
            assert f"{recovery.reached} → {recovery.restored}" in text
            assert f"{recovery.total_s:.2f}" in text


def test_the_command_is_one_that_makes_it_again() -> None:
    text = command_text(make_outcome(kills=2, resizes=((40, 1),)))
    assert text.startswith(
        "ckptstore demo --steps 75 --every 5 --seed 0 --trainers 2 --rollouts 2 --kill trainer:1@"
    )
    assert text.endswith("--resize 40:1")


# -- pieces


numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(low=numbers, span=st.floats(1e-6, 1e6), most=st.integers(2, 10), whole=st.booleans())
def test_ticks_are_few_round_and_enclose_the_data(low: float, span: float, most: int, whole: bool) -> None:
    found = ticks(low, low + span, most, whole=whole)
    assert 2 <= len(found) <= most + 2
    tolerance = 1e-6 * max(abs(low), span, 1)
    assert found[0] <= low + tolerance and found[-1] >= low + span - tolerance
    step = found[1] - found[0]
    digits = f"{step:.0e}"[0]
    assert digits in "125"
    if whole:
        assert all(tick == int(tick) for tick in found)
    assert set(inner_ticks(low, low + span, most, whole=whole)) <= set(found)


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=8, unique=True))
def test_tick_labels_tell_ticks_apart(values: list[int]) -> None:
    shown = [value / 100 for value in values]
    labels = tick_labels(shown)
    assert len(set(labels)) == len(labels)
    assert len({len(text.partition(".")[2]) for text in labels}) == 1


@given(st.lists(st.floats(0, 1000), max_size=60).map(sorted))
def test_marks_do_not_cover_each_other_where_rows_suffice(places: list[float]) -> None:
    rows = lanes(places, 11)
    assert len(rows) == len(places) and all(0 <= row < LANES_MAX for row in rows)
    for n, place in enumerate(places):
        near = [m for m in range(n) if places[m] > place - 11]
        if len(near) < LANES_MAX:
            taken = {rows[m] for m in near if rows[m] == rows[n]}
            assert not taken


def test_progress_falls_back_and_ends_at_the_last_step() -> None:
    run = make_outcome(kills=6).run
    points = progress_points(run)
    assert [at_s for at_s, _ in points] == sorted(at_s for at_s, _ in points)
    assert points[-1] == (run.wall_s, run.steps)
    for recovery in run.recoveries:
        assert (recovery.at_s - recovery.detect_s, recovery.restored) in points
