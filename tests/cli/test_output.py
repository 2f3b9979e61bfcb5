"""Sizes, tables and trees of prefixes: properties of the small pieces that commands are drawn with."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.cli.output import Column, progress_bar, size_text, table_lines, terminal_width
from ckptstore.cli.prefixes import prefix_rows
from ckptstore.grouping import pattern_of
from ckptstore.tensor import TensorSpec

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@given(nbytes=st.integers(0, 2**63 - 1))
def test_a_size_is_short_and_right_to_three_digits(nbytes: int) -> None:
    number, unit = size_text(nbytes).split(" ")
    assert len(number) <= 4
    assert abs(float(number) * 1024 ** UNITS.index(unit) - nbytes) <= nbytes * 0.006


def test_sizes() -> None:
    assert [size_text(n) for n in (0, 1, 999, 1000, 1536, 1_440_000_000_000)] == [
        "0 B", "1 B", "999 B", "0.98 KiB", "1.50 KiB", "1.31 TiB",
    ]  # fmt: skip


words = st.text("abcdefgh ", min_size=1, max_size=12).map(str.strip).filter(bool)


@given(rows=st.lists(st.tuples(words, words, words), max_size=6), width=st.integers(40, 80))
def test_a_table_fits_its_width_and_keeps_the_last_column(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    columns = (Column(title="A"), Column(title="B", optional=True), Column(title="C"))
    lines = table_lines(columns, rows, width=width)
    assert all(len(line) <= width for line in lines)
    told = " ".join(lines).split()
    assert all(word in told for row in rows for word in row[2].split())


@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "layers", "0", "1", "12"]), min_size=1, max_size=5).map(".".join),
        st.integers(0, 50),
        max_size=40,
    ),
    st.integers(1, 20),
)
def test_prefixes_count_every_tensor_once(numels: dict[str, int], most: int) -> None:
    tensors = [(n, TensorSpec(name=f"r/{n}", dtype="int8", shape=(size,))) for n, size in numels.items()]
    rows = prefix_rows(tensors, most=most)
    top = [row for row in rows if row["depth"] == 0]
    assert sum(row["tensors"] for row in top) == len(numels)
    assert sum(row["nbytes"] for row in top) == sum(numels.values())
    assert len(rows) <= max(most, len(top))
    for at, row in enumerate(rows):
        below = []
        for other in rows[at + 1 :]:
            if other["depth"] <= row["depth"]:
                break
            if other["depth"] == row["depth"] + 1:
                below.append(other)
        assert not below or sum(child["tensors"] for child in below) == row["tensors"]
    whole = prefix_rows(tensors, most=1000)
    patterns = {pattern_of(name) for name in numels}
    assert {row["name"] for row in whole if not row["name"].endswith(".")} == patterns


def test_numbers_and_ranks_become_stars() -> None:
    assert pattern_of("model.layers.12.experts.3.w1") == "model.layers.*.experts.*.w1"
    assert pattern_of("rng.state#12") == "rng.state#*"


def test_a_bar_is_for_terminals_and_for_what_takes_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(after_s: float) -> str:
        with progress_bar("reading", after_s=after_s) as update:
            update(1024, 4096, "half way")
        return capsys.readouterr().err

    assert work(0) == "", "stderr is no terminal here"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert work(60) == "", "too quick to show"
    shown = work(0)
    assert "reading" in shown and "1.00 KiB of 4.00 KiB" in shown and "half way" in shown
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("told", "width"), [("72", 72), ("", None), ("0", None), ("wide", None)])
def test_columns_of_the_environment_are_the_width(
    told: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", told)
    assert terminal_width() == width


def test_the_package_can_be_run_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptstore", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: ckptstore" in done.stdout
