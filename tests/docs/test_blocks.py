"""Every document keeps its word: blocks run, links and names resolve, the glossary is in use.

Python blocks of one page share a namespace and a temporary folder and run in order, as a reader would
run them. Console blocks run their `ckptstore` commands there; numbers, ids and times may differ from the
page. Nothing is left out but transcripts whose reason is in TRANSCRIPTS.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckptstore

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN_ONLY = (
    "text",
    "json",
)  # they are not commands, and what they show is compared elsewhere or is a picture
# Why a console block is not run: `<!-- transcript: reason -->` on the line before it.
TRANSCRIPTS = {
    "tools": "installs an environment and runs for minutes; the commands themselves are what CI runs",
    "install": "needs a package index",
    "bench": "measures for minutes, or needs a package index",
}
COMMAND = str(Path(sys.executable).with_name("ckptstore"))
COMMAND_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str
    transcript: str | None


def blocks(page: Path, text: str | None = None) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    at = 0
    while at < len(lines):
        opened = re.fullmatch(r"```(.*)", lines[at])
        if opened is None:
            at += 1
            continue
        stop = lines.index("```", at + 1)
        before = lines[at - 1] if at else ""
        marked = re.fullmatch(r"<!-- transcript: (\w+) -->", before)
        yield Block(
            page=page,
            line=at + 1,
            kind=opened[1],
            text="\n".join(lines[at + 1 : stop]),
            transcript=marked[1] if marked else None,
        )
        at = stop + 1


def named(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


# -- running a page


def run_page(page: Path, text: str | None = None) -> None:
    """Run all blocks in the current folder. AssertionError or the block's own error names page and line."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, text):
        place = f"{named(page)}:{block.line}"
        if block.kind == "python":
            # Compiled at its place, so that a traceback shows page and line.
            tree = ast.parse(block.text, place)
            ast.increment_lineno(tree, block.line)
            exec(compile(tree, str(page), "exec"), names)
        elif block.kind == "console" and block.transcript is None:
            run_console(block.text, place)
        elif block.kind == "console":
            assert block.transcript in TRANSCRIPTS, (
                f"{place}: {block.transcript!r} is no reason to skip a block"
            )
        else:
            assert block.kind in SHOWN_ONLY, (
                f"{place}: a block of kind {block.kind!r} is neither run nor shown"
            )


def run_console(text: str, place: str) -> None:
    for command, shown in commands(text):
        words = shlex.split(command)
        assert words[0] == "ckptstore", (
            f"{place}: {command!r} is not run, so it may be wrong: mark a transcript"
        )
        ended = subprocess.run(
            [COMMAND, *words[1:]],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env={**os.environ, "COLUMNS": "160"},
        )
        told = (ended.stdout + ended.stderr).splitlines()
        assert matches(shown, told), f"{place}: {command}\nthe page shows\n{shown}\nbut it says\n{told}"


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    command: str | None = None
    shown: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, shown
            command, shown = line[2:], []
        else:
            assert command is not None, f"output before a command: {line!r}"
            shown.append(line)
    if command is not None:
        yield command, shown


def matches(shown: list[str], told: list[str]) -> bool:
    """Equal lines but for numbers, ids, times, paths and spaces; `...` stands for any lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(loose(line)) + r"\n" for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{loose(line)}\n" for line in told)) is not None


def loose(line: str) -> str:
    line = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME", line)
    line = re.sub(r"file://\S+", "URL", line)
    line = re.sub(r"\b[0-9a-f]{16,32}\b", "ID", line)
    line = re.sub(r"\d[\d.,]*( ([KMGT]i)?B\b)?", "N", line)
    return " ".join(line.split())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name == "object-stores.md":
        request.getfixturevalue("s3_url")  # the environment names a server with the bucket `runs`
    run_page(page)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nimport ckptstore\nckptstore.begin('run', {})\n```",
        "```python\nassert 1 + 1 == 3\n```",
        "```console\n$ ckptstore ls nothing-here\nnewest loadable: 3\n```",
        "```console\n$ rm -rf run\n```",
        "<!-- transcript: because -->\n```console\n$ ckptstore ls run\n```",
        "```python no-run\n1 / 0\n```\n```python\n1 / 0\n```",
        "```bash\nckptstore ls\n```",
    ],
    ids=["refused", "wrong", "output", "command", "reason", "option", "kind"],
)
def test_a_broken_block_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, ckptstore.InvalidInputError, ZeroDivisionError)):
        run_page(tmp_path / "planted.md", text)


def test_every_reason_not_to_run_a_block_is_needed() -> None:
    used = {block.transcript for page in PAGES for block in blocks(page)} - {None}
    assert used == set(TRANSCRIPTS)


def test_output_is_compared_up_to_what_may_differ() -> None:
    assert matches(["step 10  5.06 KiB  2026-05-04T10:22:31Z"], ["step 7 12 B 2027-01-01T00:00:00Z"])
    assert matches(["a", "...", "z"], ["a", "b", "c", "z"])
    assert not matches(["state ok"], ["state bad"])
    assert not matches(["a"], ["a", "b"])


# -- links and names


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose(page)):
        link = target[0] or target[1]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        found = page if not path else (page.parent / path)
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(link)
    return broken


def is_symbol(name: str) -> bool:
    """Does `ckptstore.a.b` name a module, or something in one?"""
    words = name.split(".")
    for stop in range(len(words), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(words[:stop]))
        except ImportError:
            continue
        for word in words[stop:]:
            if not hasattr(value, word):
                return False
            value = getattr(value, word)
        return True
    return False


def unknown_symbols(page: Path) -> list[str]:
    names = re.findall(r"(?<![\w/.-])ckptstore(?:\.[A-Za-z_]\w*)+", page.read_text(encoding="utf-8"))
    return sorted({name for name in names if not is_symbol(name)})


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """The test functions and classes of a file, and the methods of conformance suites."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def guarantees(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(promise, [(file, test)]) of each row of the table whose last column is `proven by`."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        if rows[0][-1] == "proven by":
            for row in rows[2:]:
                yield row[0], re.findall(r"\[`(\w+)`\]\(([^)]+)\)", row[-1])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_and_names_of_a_page_resolve(page: Path) -> None:
    assert not broken_links(page)
    assert not unknown_symbols(page)


def test_every_guarantee_names_tests_that_exist() -> None:
    found = list(guarantees((ROOT / "README.md").read_text(encoding="utf-8")))
    assert len(found) >= 8
    for promise, proofs in found:
        assert proofs, f"{promise!r} is proven by nothing"
        for name, path in proofs:
            assert name in names_in(ROOT / path), f"{promise!r}: {path} has no {name}"


def test_every_document_that_the_code_names_exists() -> None:
    for path in (*ROOT.glob("ckptstore/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/*")):
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}, which is not there"


def test_links_and_names_that_are_wrong_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[x](gone.md) [y](#a-b) [z](#nowhere) `ckptstore.begin` `ckptstore.no_such.thing`\n"
    )
    assert broken_links(page) == ["gone.md", "#nowhere"]
    assert unknown_symbols(page) == ["ckptstore.no_such.thing"]


# -- the glossary


def glossary() -> list[str]:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    return [
        word for word in re.findall(r"^\| ([^|]+?) \|", text, re.M) if word != "word" and set(word) != {"-"}
    ]


def test_every_word_of_the_glossary_is_used() -> None:
    words = glossary()
    assert len(words) == len(set(words)) > 50
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page.name != "glossary.md"]
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("ckptstore/**/*.py")]
    text = "\n".join((*pages, *sources)).lower()
    spaced = [(word, word.lower().replace(" ", r"[\s_]+")) for word in words]
    assert not [word for word, pattern in spaced if not re.search(rf"\b{pattern}", text)]


# -- errors


def test_every_error_is_on_its_page() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+Error)` \|", text, re.M)
    assert sorted([*listed, "CkptStoreError"]) == sorted(n for n in ckptstore.__all__ if n.endswith("Error"))
    for name, means in re.findall(r"^\| `(\w+Error)` \| an? (\w+Error):", text, re.M):
        assert issubclass(getattr(ckptstore, name), getattr(ckptstore, means))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_tests_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {name for path in ROOT.glob("tests/**/*.py") for name in names_in(path)}
    assert {name for name in re.findall(r"`(test_\w+)`", text)} <= known
    assert not [
        name for name in re.findall(r"`((?:tests|tools)/[\w/.]+)`", text) if not (ROOT / name).exists()
    ]
