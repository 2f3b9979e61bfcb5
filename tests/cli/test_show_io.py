"""`show --io`: how each member's segments were written, on every kind of store, and where nobody recorded it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore import Checkpointer
from ckptstore.cli.contents import contents
from ckptstore.cli.show import lines
from ckptstore.clock import Clock
from ckptstore.iorecord import IoRecord, Written
from ckptstore.store.base import BLOCK_NBYTES
from ckptstore.tablefile import encode_part as really_encode_part
from ckptstore.testing import FakeClock
from tests.cli.commands import run

FAST_S = 4.0


def save(url: str, *nbytes: int, clock: Clock | None = None) -> None:
    """One checkpoint a number, of a state of so many bytes."""
    with (
        ckptstore.begin(url, {"trainer": 1}, clock=clock) as inc,
        Checkpointer(inc, role="trainer", rank=0, clock=clock) as ckpt,
    ):
        for step, size in enumerate(nbytes):
            ckpt.save(step, {"w": np.full(size, step, np.uint8)}).result(60)


def told_of(url: str, step: int | None = None) -> dict[str, Any]:
    return contents(ckptstore.open(url), url, step=step, role=None, tensors=False, names=(), io=True)


def io_of(url: str) -> dict[str, Any]:
    (found,) = told_of(url)["io"]
    return dict(found)


def has_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_local_file_system_is_written_to_directly_where_it_can(tmp_path: Path) -> None:
    save(str(tmp_path / "run"), 3 << 20)
    found = io_of(str(tmp_path / "run"))
    (way,) = found["written"]
    assert way["way"] == ("direct" if has_direct(tmp_path) else "buffered")
    (segment,) = (tmp_path / "run").glob("data/**/*.safetensors")
    assert found["nbytes"] == way["nbytes"] == segment.stat().st_size and way["segments"] == 1
    assert found["seconds"] > 0 and found["nbytes_per_s"] == found["nbytes"] / found["seconds"]


def test_a_file_system_without_direct_writes_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    save(str(tmp_path / "run"), 100)
    (way,) = io_of(str(tmp_path / "run"))["written"]
    assert way["way"] == "buffered"
    assert way["reason"] == "the file system opens no file for direct I/O: Invalid argument"
    monkeypatch.setenv("COLUMNS", "160")
    (row,) = section(run("show", str(tmp_path / "run"), "--io").out)
    assert row[0] == "trainer/0" and row[-1] == f"buffered: {way['reason']}"


def test_the_memory_store_is_memory(request: pytest.FixtureRequest) -> None:
    save(f"memory://{request.node.name}", 100)
    (way,) = io_of(f"memory://{request.node.name}")["written"]
    assert (way["way"], way["reason"]) == ("memory", None)


def test_an_object_store_takes_parts_or_one_block_whole(s3_url: str) -> None:
    save(s3_url, BLOCK_NBYTES + 5, 100)
    large, small = ((told_of(s3_url, step)["io"][0])["written"][0] for step in (0, 1))
    assert (large["way"], large["reason"]) == ("parts", None)
    assert (small["way"], small["reason"]) == ("whole", "no larger than a part")


def test_the_time_is_that_of_the_clock_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment takes four seconds of it to become durable."""
    from ckptstore.store.memory import MemoryStore

    clock, create = FakeClock(), MemoryStore.create

    def slow(self: MemoryStore, key: str, data: Any) -> None:
        if key.startswith("data/"):
            clock.advance(FAST_S)
        create(self, key, data)

    monkeypatch.setattr(MemoryStore, "create", slow)
    save("memory://show-io-clock", 4_000_000, clock=clock)
    found = io_of("memory://show-io-clock")
    assert found["seconds"] == FAST_S and found["nbytes_per_s"] == found["nbytes"] / FAST_S


def test_a_checkpoint_that_reuses_everything_wrote_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": np.ones(5000)}).result(60)
    found = io_of(url)
    assert found["written"] == [] and found["nbytes"] == 0 and found["nbytes_per_s"] is None
    assert section(run("show", url, "--io").out) == [["trainer/0", "-", "-", "-", "-", "nothing"]]


def test_parts_from_before_it_was_recorded_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ckptstore.writer.encode_part", lambda part: really_encode_part(replace(part, io=None))
    )
    url = str(tmp_path / "run")
    save(url, 100)
    assert io_of(url)["written"] is None
    assert section(run("show", url, "--io").out) == [["trainer/0", "-", "-", "-", "-", "not recorded"]]


def section(text: str) -> list[list[str]]:
    found = text.split("\nhow segments were written\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in found[1:]]


def test_both_forms_tell_the_same_and_only_when_asked(run_url: str) -> None:
    assert "io" not in run("show", run_url, "--json").json
    assert "how segments were written" not in run("show", run_url).out
    told = run("show", run_url, "--io", "--role", "trainer", "--json").json
    rows = section(run("show", run_url, "--io", "--role", "trainer").out)
    assert [row[0] for row in rows] == [each["member"] for each in told["io"]] == ["trainer/0", "trainer/1"]
    for row, each in zip(rows, told["io"], strict=True):
        assert row[3] == f"{each['seconds']:.3f}" and row[5].startswith(each["written"][0]["way"])


@pytest.mark.parametrize("width", [80, 160])
def test_it_keeps_to_the_terminal(width: int, run_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    told = told_of(run_url)
    told["io"][0]["written"] = [
        {"way": "direct", "reason": None, "segments": 12, "nbytes": 24 << 30},
        {
            "way": "buffered",
            "reason": "a direct write ended between aligned blocks",
            "segments": 1,
            "nbytes": 5,
        },
    ]
    found = lines(told, all_values=False)
    start = found.index("how segments were written")
    assert all(len(line) <= width for line in found[start : found.index("", start)])


records = st.builds(
    IoRecord,
    seconds=st.floats(0, 1e9),
    written=st.lists(
        st.builds(
            Written,
            way=st.text(min_size=1),
            reason=st.none() | st.text(),
            segments=st.integers(1, 1 << 40),
            nbytes=st.integers(0, 1 << 60),
        )
    ).map(tuple),
)


@given(record=records)
def test_a_record_comes_back_and_later_fields_are_ignored(record: IoRecord) -> None:
    told = record.to_json()
    assert IoRecord.from_json(told) == record
    later = {**told, "more": 1, "written": [{**each, "more": 1} for each in told["written"]]}
    assert IoRecord.from_json(later) == record


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"seconds": -1.0, "written": []},
        {"seconds": float("inf"), "written": []},
        {"seconds": 1.0, "written": [{"way": "", "reason": None, "segments": 1, "nbytes": 1}]},
        {"seconds": 1.0, "written": [{"way": "direct", "reason": None, "segments": 0, "nbytes": 1}]},
        {"seconds": 1.0, "written": [{"way": "direct", "reason": None, "segments": 1, "nbytes": -1}]},
    ],
)
def test_a_record_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        IoRecord.from_json(value)
