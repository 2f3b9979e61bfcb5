"""What the tests of save and restore share."""

from __future__ import annotations

import pytest

from ckptstore import incarnation


@pytest.fixture(autouse=True)
def without_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe has tests of its own, and these begin some thousand runs."""
    monkeypatch.setattr(incarnation, "probe", lambda store: None)
