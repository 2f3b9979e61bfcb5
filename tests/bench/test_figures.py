"""Ratios, who is first, aims: from made-up figures, so that each rule is seen alone."""

from __future__ import annotations

import io
import time
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from ckptstore.bench.figures import BenchResult, Row
from ckptstore.bench.loops import lost_to
from ckptstore.bench.picture import draw
from ckptstore.bench.table import print_result, sentences
from tests.bench.made_up import GIB, make_result


def row(result: BenchResult, what: str) -> Row:
    return next(each for each in result.rows if each.what.id == what)


def text_of(result: BenchResult, width: int = 160) -> str:
    printed = io.StringIO()
    print_result(Console(width=width, file=printed), result, following="look")
    return printed.getvalue()


def test_a_ratio_is_a_median_over_the_best_variants_median() -> None:
    cell = row(make_result({("block", "ckptstore"): (0.2, 0.6, 0.3)}), "block").cells["ckptstore"]
    assert (cell.low, cell.median, cell.high) == pytest.approx((1.0, 1.5, 3.0))
    assert row(make_result({("cpu", "ckptstore"): (0.1, 0.2, 0.4)}), "cpu").cells["ckptstore"].median == 0.2


def test_a_peer_that_is_ahead_is_said_to_be() -> None:
    assert "No other library is ahead in any row." in sentences(make_result())
    won = make_result({("durable", "dcp"): (0.01, 0.02, 0.03)})
    assert "DCP wins: save to durable (0.10 against 1.05 for ckptstore)" in sentences(won)
    assert "DCP wins: save to durable" in text_of(won)
    near = make_result({("durable", "dcp"): (0.15, 0.2, 0.3)})
    assert any(each.startswith("DCP is ahead, within the noise: save to durable") for each in sentences(near))
    assert next(f for f in won.to_json()["figures"] if f["what"] == "durable")["best"] == "dcp"


def test_the_loop_without_a_save_wins_nothing() -> None:
    result = make_result()
    assert row(result, "lost_matmul_1").best == "ckptstore"
    assert "none" in row(result, "lost_matmul_1").cells


@pytest.mark.parametrize(
    ("what", "state_nbytes", "value", "met"),
    [
        ("durable", GIB, 0.25, True),
        ("durable", GIB, 0.26, False),
        ("durable", 4 * GIB, 0.25, False),
        ("durable", 4 * GIB, 0.22, True),
        ("durable", GIB >> 4, 9.0, None),
        ("block_first", GIB, 9.0, None),
        ("cpu", GIB, 0.15, True),
        ("half", GIB, 1.03, False),
    ],
)
def test_aims_are_judged_at_the_sizes_they_are_set_for(
    what: str, state_nbytes: int, value: float, met: bool | None
) -> None:
    result = make_result({(what, "ckptstore"): (value,)}, nbytes=state_nbytes)
    assert row(result, what).met is met
    missed = " ".join(each for each in sentences(result) if each.startswith("Aims that ckptstore misses"))
    assert (row(result, what).what.words in missed) is (met is False)


def test_who_is_missing_and_who_does_not_fsync_is_told() -> None:
    told = text_of(make_result(rounds=2))
    assert "not installed: pip install gone" in told
    assert "2 rounds: too few to rely on" in told and "leave fsync to their user" in told
    assert told.splitlines()[-1] == "next: look"


def test_the_json_has_every_figure_of_the_table() -> None:
    result = make_result()
    told = result.to_json()
    assert [each["what"] for each in told["figures"]] == [each.what.id for each in result.rows]
    for figure, each in zip(told["figures"], result.rows, strict=True):
        assert set(figure["by"]) == set(each.cells)
        for name, cell in each.cells.items():
            key = "ratio" if figure["limit"] is not None else "median"
            assert figure["by"][name][key] == pytest.approx(cell.median, abs=1e-3)
    assert told["limits"][0]["best"] == "2 threads" and told["limits"][0]["gib_s"] == 5.0


@pytest.mark.parametrize("peers", [0, 1, 5])
def test_a_picture_is_well_formed_and_names_all(peers: int) -> None:
    result = make_result(peers=peers)
    text = draw(result)
    root = ET.fromstring(text)
    words = " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))
    for each in result.entrants:
        assert (each.words in words) is (each.problem is None)
    for what in ("save blocks, warm", "load, cold", "lost: small operations"):
        assert what in words
    high = float(root.attrib["height"])
    assert all(float(each.attrib["y"]) <= high for each in root.iter("{http://www.w3.org/2000/svg}text"))


class Counted:
    """Over after it was asked `asks` times."""

    def __init__(self, asks: int) -> None:
        self.asks, self.waited = asks, False

    def done(self) -> bool:
        self.asks -= 1
        return self.asks < 0

    def wait(self) -> None:
        self.waited = True


def test_lost_time_is_what_steps_take_beyond_the_normal_until_the_save_is_done() -> None:
    taken = iter([0.10, 0.30, 0.10, 9.0])
    pending = Counted(3)
    lost = lost_to(lambda: next(taken), lambda: pending, 0.1)
    assert lost.steps == 3 and pending.waited
    assert lost.slower_s == pytest.approx(0.2) and lost.worst == pytest.approx(3.0)
    assert lost.total_s == lost.blocking_s + lost.slower_s >= 0.2


def test_a_save_that_is_over_at_once_costs_what_it_blocked() -> None:
    lost = lost_to(lambda: 1 / 0, lambda: Counted(0), 0.1)
    assert lost.steps == 0 and lost.slower_s == 0 and lost.worst == 1


def test_what_an_update_waits_for_blocks_too() -> None:
    held: list[float] = []

    def hold() -> None:
        held.append(time.perf_counter())
        while time.perf_counter() - held[0] < 0.01:
            pass

    lost = lost_to(lambda: 0.1, lambda: Counted(0), 0.1, hold=hold)
    assert len(held) == 1 and lost.steps == 1 and lost.blocking_s >= 0.01


def test_failures_of_a_save_beside_a_loop_are_raised() -> None:
    class Failed(Counted):
        def wait(self) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        lost_to(lambda: 0.1, lambda: Failed(1), 0.1)
