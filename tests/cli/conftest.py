"""One run for all tests of the command; tests that damage it take a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.runs import make_run


@pytest.fixture(scope="session")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("runs") / "seven")


@pytest.fixture
def own_run(run_url: str, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(run_url, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def without_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's COLUMNS, if it is exported, would wrap what tests read."""
    monkeypatch.delenv("COLUMNS", raising=False)
