"""`ls`, `show` and `verify`: what they tell, that both forms tell the same, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore.cli.output import size_text
from ckptstore.manifest import Index
from tests.cli.commands import Ended, command, run, spawn
from tests.cli.runs import ROSTER

READING = ("ls", "show", "verify", "diff")


def section(text: str, title: str) -> list[list[str]]:
    """Cells of the rows of one section of `show`."""
    lines = text.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[1:]]


# -- what they tell


def test_ls_tells_every_checkpoint_and_what_comes_next(run_url: str) -> None:
    told = run("ls", run_url, "--json").json
    assert [(c["step"], c["fence"], c["status"]) for c in told["checkpoints"]] == [
        (5, 1, "ok"), (10, 1, "ok"), (15, 1, "abandoned"), (15, 2, "ok"),
    ]  # fmt: skip
    assert [c["roles"] for c in told["checkpoints"]] == [ROSTER] * 4
    assert told["newest"] == 15 and told["fence"] == 2
    info = ckptstore.open(run_url).checkpoints()[1]
    assert told["checkpoints"][1]["nbytes_reused"] == info.nbytes_reused > 0


def test_ls_tells_the_same_to_a_person(run_url: str) -> None:
    ended, told = run("ls", run_url), run("ls", run_url, "--json").json
    lines = ended.out.splitlines()
    assert ended.code == 0 and ended.err == ""
    rows = [re.split(r" {2,}", line.strip()) for line in lines[1:-1]]
    assert rows == [
        [
            str(c["step"]),
            str(c["fence"]),
            c["committed_at"],
            size_text(c["nbytes"]),
            size_text(c["nbytes_written"]),
            size_text(c["nbytes_reused"]),
            size_text(c["nbytes_saved"]),
            "-",
            c["status"],
            c["id"],
            ", ".join(f"{role} {size}" for role, size in c["roles"].items()),
        ]
        for c in told["checkpoints"]
    ]
    assert lines[-1] == f"newest loadable: 15; next: {told['next']}"


def test_the_next_command_runs(run_url: str) -> None:
    following = run("ls", run_url).out.splitlines()[-1].split("next: ckptstore ")[1]
    shown = run(*following.split())
    assert shown.code == 0
    following = shown.out.splitlines()[-1].split("next: ckptstore ")[1]
    assert run(*following.split()).code == 0


def test_show_tells_the_same_in_both_forms(run_url: str) -> None:
    text, told = run("show", run_url, "--tensors").out, run("show", run_url, "--tensors", "--json").json
    names = [row[0] for row in section(text, "10 tensors")]
    assert names == [f"{t['role']}/{t['name']}" for t in told["tensors"]]
    assert [row[0] for row in section(text, "values")] == [f"{v['role']}/{v['name']}" for v in told["values"]]
    assert [row[0] for row in section(text, "parts")] == [p["member"] for p in told["parts"]]
    assert [row[-1] for row in section(text, "segments")] == [s["key"] for s in told["segments"]]
    assert [row[0] for row in section(text, "fences")] == [str(f["fence"]) for f in told["fences"]]
    assert told["checkpoint"]["id"] in text


def test_show_tells_what_was_saved(run_url: str) -> None:
    told = run("show", run_url, "--tensors", "--json").json
    assert told["checkpoint"]["step"] == 15 and told["checkpoint"]["fence"] == 2
    assert [(f["fence"], f["restores"], f["on_lineage"]) for f in told["fences"]] == [
        (1, None, True), (2, "f0001/s00000010-000", True),
    ]  # fmt: skip
    by_name = {t["name"]: t for t in told["tensors"]}
    assert by_name["model.layers.1.w"]["dtype"] == "float32"
    assert by_name["model.layers.1.w"]["shape"] == [4, 8]
    assert by_name["model.layers.1.w"]["nbytes"] == 128
    reused = {s["number"] for s in told["segments"] if s["reused"]}
    assert set(by_name["reference.w"]["segments"]) <= reused, "frozen tensors are not written again"
    assert not set(by_name["model.layers.0.w"]["segments"]) & reused
    values = {v["name"]: v["value"] for v in told["values"]}
    assert values["step"] == 15 and values["worst"] == "nan" and values["names"] == ["a", "b"]
    assert values["ledger"]["issued"] == 60 and values["ledger"]["seed"] == 7
    assert [rank["draws"] for rank in values["rng"]] == [0, 1]
    assert len(values["evaluations"]) == 15


def test_show_sums_up_by_prefix_unless_asked(run_url: str) -> None:
    told = run("show", run_url, "--json").json
    assert "tensors" not in told
    rows = {row["name"]: row for row in told["prefixes"]}
    assert rows["model.layers.*.w"]["tensors"] == 3
    assert rows["model.layers.*.w"]["nbytes"] == 3 * 128
    assert sum(row["tensors"] for row in told["prefixes"] if row["depth"] == 0) == 10


def test_names_choose_tensors_values_and_their_segments(run_url: str) -> None:
    told = run("show", run_url, "--names", "*.layers.0.*", "--names", "st*", "--json").json
    assert [t["name"] for t in told["tensors"]] == ["model.layers.0.b", "model.layers.0.w"]
    assert [v["name"] for v in told["values"]] == ["step"]
    assert {n for t in told["tensors"] for n in t["segments"]} == {s["number"] for s in told["segments"]}
    read = ckptstore.open(run_url).read(names=["*.layers.0.*", "st*"])
    assert set(read) == {"model", "step"}


def test_a_role_or_step_can_be_chosen(run_url: str) -> None:
    told = run("show", run_url, "--step", "5", "--role", "loop", "--json").json
    assert told["checkpoint"]["step"] == 5
    assert (
        {r["role"] for r in told["roles"]} == {p["member"].split("/")[0] for p in told["parts"]} == {"loop"}
    )


def test_verify_reads_every_checkpoint(run_url: str) -> None:
    told = run("verify", run_url, "--json").json
    assert told["ok"] and told["damage"] == [] and told["newest_whole"] == 15
    assert len(told["checkpoints"]) == 4 and told["chunks"] == 28
    one = run("verify", run_url, "--step", "5", "--full", "--json").json
    assert one["ok"] and one["full"] and [c["step"] for c in one["checkpoints"]] == [5]
    assert run("verify", run_url).out.splitlines()[-1].startswith("all digests are right (28 chunks, ")


# -- problems


def test_verify_names_a_damaged_segment_and_who_needs_it(own_run: Path) -> None:
    (path,) = own_run.glob("data/f0001/s00000015-000/trainer-00001-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    ended = spawn("verify", str(own_run))
    key = path.relative_to(own_run).as_posix()
    assert ended.code == 1 and key in ended.out
    told = run("verify", str(own_run), "--json").json
    (found,) = told["damage"]
    assert found["key"] == key and found["tensor"].startswith("trainer/model.")
    assert [c["damaged"] for c in told["checkpoints"]] == [False, False, True, False]
    assert told["newest_whole"] == 15 and not told["ok"]
    assert f"{found['key']}, {found['tensor']}: {found['problem']}" in ended.out.splitlines()


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("data/f0001/s00000005-000/trainer-00000-*", None),  # the frozen reference, which all of them need
        ("parts/f0002/s00000015-000/loop-00000.parquet", 10),
        ("index/f0002/s00000015-000-????????????????.parquet", 10),
        ("index/f0002/s00000015-000-*.tensors.parquet", 10),
        ("index/f0002/s00000015-000-*.segments.parquet", 10),
        ("journal/00000000000000000002.json", None),
    ],
)
@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_verify_finds_every_kind_of_damage(own_run: Path, pattern: str, whole: int | None, how: str) -> None:
    (path,) = own_run.glob(pattern)
    data = path.read_bytes()
    path.unlink()
    if how != "missing":
        changed = data[: len(data) // 2] if how == "cut" else data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
        path.write_bytes(changed)
    ended = run("verify", str(own_run), "--json")
    key = path.relative_to(own_run).as_posix()
    if key.startswith("journal/") and how == "missing":
        # slots have no gaps: a read that failed, or, where it is known from a listing, damage
        assert ended.code in (1, 3) and key in ended.out + ended.err
        return
    assert ended.code == 1
    assert key in [d["key"] for d in ended.json["damage"]]
    assert ended.json["newest_whole"] == whole


def test_a_damaged_journal_is_an_error_of_ls_and_a_finding_of_verify(own_run: Path) -> None:
    path = own_run / "journal" / f"{2:020d}.json"
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"').replace(b"commit", b"kommit"))
    ended = run("ls", str(own_run))
    assert ended.code == 1 and ended.out == "" and path.name in ended.err
    assert run("verify", str(own_run), "--json").json["damage"][0]["key"] == f"journal/{path.name}"


def test_full_finds_what_digests_cannot(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer's bug: an index that lost a row, with every digest right."""
    from ckptstore.indexfile import decode_index as real

    def lose_a_row(data: bytes, what: str, read: Any) -> Index:
        index = real(data, what, read)
        return replace(index, table=index.table.take(np.arange(len(index.table) - 1)))

    monkeypatch.setattr("ckptstore.index.decode_index", lose_a_row)
    assert run("verify", str(own_run), "--step", "5").code == 0
    ended = run("verify", str(own_run), "--step", "5", "--full", "--json")
    problems = " ".join(d["problem"] for d in ended.json["damage"])
    assert ended.code == 1 and "rows of its parts" in problems and "cover" in problems


@pytest.mark.parametrize("name", READING)
def test_a_missing_run_is_a_problem(tmp_path: Path, name: str) -> None:
    ended = spawn(name, str(tmp_path / "nothing"))
    assert_one_sentence(ended, 1, "holds no run")


@pytest.mark.parametrize("name", READING)
def test_an_unreadable_store_is_unavailable(tmp_path: Path, name: str) -> None:
    os.symlink(tmp_path / "loop", tmp_path / "loop")  # as root, nothing but the file system can refuse
    ended = spawn(name, str(tmp_path / "loop"))
    assert_one_sentence(ended, 3, "loop")


@pytest.mark.parametrize("name", READING)
def test_a_store_that_goes_away_is_unavailable_not_damaged(
    run_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptstore.store.local import LocalStore

    real = LocalStore.read

    def read(self: LocalStore, key: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        if key.startswith("index/"):
            raise ckptstore.StoreUnavailableError(f"{key}: gone", key=key)
        return real(self, key, start=start, nbytes=nbytes)

    monkeypatch.setattr(LocalStore, "read", read)
    ended = run(name, run_url)
    assert ended.code == (0 if name == "ls" else 3), "ls needs the journal alone"
    assert "damage" not in ended.out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("lz",),
        ("ls",),
        ("ls", "a", "b"),
        ("show", "a", "--step", "x"),
        ("verify", "a", "--wrong"),
        ("ls", "nowhere://bucket/run"),
    ],
)
def test_bad_usage_is_2(arguments: tuple[str, ...]) -> None:
    ended = spawn(*arguments)
    assert ended.code == 2 and "Traceback" not in ended.err


def test_wrong_choices_name_what_there_is(run_url: str) -> None:
    assert_one_sentence(run("show", run_url, "--step", "7"), 1, "5, 10, 15")
    assert_one_sentence(run("show", run_url, "--role", "rollout"), 1, "trainer, loop")
    assert_one_sentence(run("show", run_url, "--names", "nothing*"), 1, "--tensors")


def assert_one_sentence(ended: Ended, code: int, words: str) -> None:
    assert ended.code == code
    assert ended.out == ""
    assert ended.err.startswith("ckptstore: ") and ended.err.count("\n") == 1
    assert words in ended.err and "Traceback" not in ended.err


def test_an_unexpected_error_is_one_sentence_unless_a_traceback_is_wanted(
    run_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise KeyError("boom")

    monkeypatch.setattr("ckptstore.cli.ls.listing", broken)
    assert_one_sentence(run("ls", run_url), 1, "CKPTSTORE_TRACEBACK=1")
    monkeypatch.setenv("CKPTSTORE_TRACEBACK", "1")
    with pytest.raises(KeyError, match="boom"):
        from ckptstore.cli.app import app

        app(["ls", run_url], standalone_mode=False)


# -- manners


def test_a_run_without_a_checkpoint_is_no_problem(tmp_path: Path) -> None:
    ckptstore.begin(str(tmp_path / "new"), roster={"trainer": 1}).close()
    ended = run("ls", str(tmp_path / "new"))
    assert ended.code == 0 and "no checkpoint yet" in ended.out
    assert run("show", str(tmp_path / "new")).code == 1


def test_reading_commands_import_nothing_heavy(run_url: str) -> None:
    for name in READING:
        code = (
            "import sys\nfrom ckptstore.cli.app import app\n"
            f"try: app([{name!r}, {run_url!r}])\nexcept SystemExit: pass\nprint(*sys.modules, file=sys.stderr)"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert {"torch", "ray", "transformers"}.isdisjoint(ended.stderr.split()), name
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", *command("--help")[1:]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert {"numpy", "pyarrow", "rich"}.isdisjoint(imported)


def test_a_closed_pipe_is_clean(run_url: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        command("show", run_url), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert ended.returncode == 141 and ended.stderr == ""


def test_ctrl_c_is_one_line(run_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptstore.run.Run.verify", interrupted)
    assert_one_sentence(run("verify", run_url), 130, "interrupted")


def test_version_and_help() -> None:
    assert run("--version").out == f"ckptstore {ckptstore.__version__}\n"
    for name in READING:
        told = run(name, "--help")
        assert told.code == 0 and "Examples:" in told.out and f"ckptstore {name} runs/7" in told.out


def test_json_is_json_alone(run_url: str) -> None:
    for name in READING:
        ended = spawn(name, run_url, "--json")
        told = json.loads(ended.out)
        assert told.get("before", told)["url"].startswith("file:///") and ended.err == ""
