"""A whole bench, tiny: every figure is there, the place is left as it was, and others' failures are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.bench import loops, run, turn
from ckptstore.bench.contestants import Facts
from ckptstore.bench.figures import LOCAL, REMOTE
from ckptstore.bench.loops import Pending
from ckptstore.bench.options import BenchOptions, check_room, parse
from ckptstore.bench.peers import PEERS, Over, Peer, Safetensors
from ckptstore.bench.run import run_bench
from ckptstore.bench.states import State
from ckptstore.errors import InvalidInputError
from ckptstore.store.base import open_store
from ckptstore.store.memory import MemoryStore

MIB = 1 << 20


@pytest.fixture(autouse=True)
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MATMUL", 64)
    monkeypatch.setattr(loops, "SMALL_OPS", 60)
    quick: Callable[..., float] = loops.normal_step_s
    for module in (run, turn):
        monkeypatch.setattr(module, "normal_step_s", lambda step: quick(step, quiet_s=0.01))


@pytest.fixture
def one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run, turn):
        monkeypatch.setattr(module, "LOOPS", loops.LOOPS[:1])


def options(place: str, **changed: Any) -> BenchOptions:
    given = {"nbytes": 2 * MIB, "state": "large", "peers": (), "rounds": 1, **changed}
    return BenchOptions(place=place, **given)


def test_a_bench_has_every_figure_of_everyone_and_leaves_nothing(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    result = run_bench(options(str(tmp_path), peers=("dcp", "safetensors")), lambda *each: said.append(each))
    assert list(tmp_path.iterdir()) == []
    assert {each.id for each in result.entrants} == {"ckptstore", "dcp", "dcp-async", "safetensors"}
    assert not any(each.problem for each in result.entrants)
    for row in result.rows:
        everyone = {each.id for each in result.entrants}
        if row.what.id.startswith("worst"):
            everyone -= {"dcp", "safetensors"}  # nothing steps while they save
        if "lazy" in row.what.id:
            everyone = {"ckptstore"}
        assert set(row.cells) - {"none"} == everyone, row.what
        assert all(cell.low <= cell.median <= cell.high for cell in row.cells.values())
    assert [row.what for row in result.rows] == list(LOCAL)
    assert all(
        len(series.values) == 1 for limit in result.limits.values() for series in limit.variants.values()
    )
    half = next(row for row in result.rows if row.what.id == "half").cells
    assert half["ckptstore"].median < 1.2 and half["dcp"].median > 1.9
    assert [done for done, _, _ in said] == list(range(len(said))) and len(said) == said[-1][1]


def test_a_store_that_is_no_folder_is_measured_by_put_and_get() -> None:
    result = run_bench(options("memory://bench-test", peers=("safetensors",), rounds=1))
    assert list(MemoryStore.named("bench-test").list("")) == []
    assert [row.what for row in result.rows] == list(REMOTE)
    assert all("ckptstore" in row.cells for row in result.rows)
    assert set(result.limits) == {"copy", "put", "get"}
    (peer,) = [each for each in result.entrants if each.id == "safetensors"]
    assert peer.problem == "measured on local paths only"


@pytest.mark.slow
@pytest.mark.usefixtures("one_loop")
def test_a_bench_on_s3_is_held_against_tensorstore_alone_and_leaves_nothing(s3_url: str) -> None:
    result = run_bench(options(s3_url))
    assert list(open_store(s3_url).list("")) == []
    assert all("tensorstore" in result.limits[name].best for name in ("put", "get"))
    assert all(row.cells["ckptstore"].median > 0 for row in result.rows if row.cells)


class Odd(Safetensors):
    """A library with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.saves = fault, 0

    @property
    def facts(self) -> Facts:
        return Facts(
            id="odd",
            words="Odd",
            version="1",
            durable="no",
            checksums="none",
            background=False,
            extra_memory=0,
        )

    def save(self, number: int, state: State) -> Pending:
        self.saves += 1
        if self.fault == "at once" or (self.fault == "later" and self.saves == 3):
            raise OSError(28, "No space left on device")
        super().save(number, state)
        return Over()

    def load(self, into: State) -> None:
        super().load(into)
        if self.fault == "wrong bits":
            next(iter(into.tensors.values())).view(-1)[0] += 1


@pytest.mark.usefixtures("one_loop")
@pytest.mark.parametrize("fault", ["at once", "later", "wrong bits"])
def test_what_another_library_does_wrong_is_told_and_the_rest_goes_on(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(id="odd", modules=(), package="odd", ways=(lambda: Odd(fault),))
    monkeypatch.setattr(run, "PEERS", {**PEERS, "odd": peer})
    result = run_bench(options(str(tmp_path), peers=("odd",)))
    (odd,) = [each for each in result.entrants if each.id == "odd"]
    assert odd.problem is not None
    assert ("gave other bits back" if fault == "wrong bits" else "No space left") in odd.problem
    assert not any("odd" in row.cells for row in result.rows)
    assert all("ckptstore" in row.cells for row in result.rows if row.cells)
    assert list(tmp_path.iterdir()) == []


def test_our_own_failure_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: object, into: State) -> None:
        """Loads nothing."""

    monkeypatch.setattr("ckptstore.bench.contestants.Ours.load", wrong)
    with pytest.raises(Exception, match="gave other bits back"):
        run_bench(options(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_not_installed_is_named_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(id="orbax", modules=("no_such.module",), package="orbax-checkpoint", ways=())
    monkeypatch.setattr(run, "PEERS", {**PEERS, "orbax": peer})
    entrants, contestants = run._line_up(options(str(tmp_path), peers=("orbax",)))
    assert len(contestants) == 1
    assert (entrants["orbax"].problem, entrants["orbax"].help) == (
        "not installed",
        "pip install orbax-checkpoint",
    )


def test_too_little_room_is_refused_with_values(tmp_path: Path) -> None:
    wanted = options(str(tmp_path), nbytes=1 << 30)
    check_room(wanted, extra_memory=[1.05, 2.1], memory_nbytes=8 << 30, disk_nbytes=4 << 30)
    with pytest.raises(InvalidInputError, match=r"needs 5.1 GiB of memory .* 4.0 GiB are free") as refused:
        check_room(wanted, extra_memory=[1.05, 2.1], memory_nbytes=4 << 30, disk_nbytes=4 << 30)
    assert refused.value.values["free_nbytes"] == 4 << 30
    smaller = str(refused.value).rpartition("--size ")[2]
    fits = parse(url=str(tmp_path), size=smaller, state="moe", peers="none", rounds=1)
    check_room(fits, extra_memory=[2.1], memory_nbytes=4 << 30, disk_nbytes=4 << 30)
    with pytest.raises(InvalidInputError, match="of disk"):
        check_room(wanted, extra_memory=[1.05], memory_nbytes=8 << 30, disk_nbytes=2 << 30)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": "4GB"}, "4GiB"),
        ({"size": "-1GiB"}, "no size"),
        ({"size": "1MiB"}, "at least 16MiB"),
        ({"state": "huge"}, "moe, large, small"),
        ({"peers": "dcp,numpy"}, "numpy: not known"),
        ({"rounds": 0}, "at least 1"),
    ],
)
def test_what_can_never_work_is_refused(changed: dict[str, Any], said: str) -> None:
    given = {"url": ".", "size": "1GiB", "state": "moe", "peers": "none", "rounds": 5, **changed}
    with pytest.raises(InvalidInputError, match=said):
        parse(**given)


def test_sizes_are_binary() -> None:
    parsed = parse(url=".", size="1.5 GiB", state="small", peers="dcp, dcp,orbax", rounds=1)
    assert parsed.nbytes == 3 << 29 and parsed.peers == ("dcp", "orbax")
