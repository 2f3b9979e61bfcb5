"""What the tests of save and restore share."""

from __future__ import annotations

import pytest

from ckptstore import chunksource, contribution, incarnation, snapshot, sources, staging, stream
from ckptstore.store import base, collected, local

BLOCK = 8192


@pytest.fixture(autouse=True)
def without_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe has tests of its own, and these begin some thousand runs."""
    monkeypatch.setattr(incarnation, "probe", lambda store: None)


@pytest.fixture(params=["copies first", "writes beside"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two pages, so that small states cross many of them."""
    monkeypatch.setattr(contribution, "COPY_THREADS", 1 << 20 if request.param == "copies first" else 0)
    for module in (base, collected, local, staging, snapshot, stream, contribution, chunksource):
        monkeypatch.setattr(module, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(staging, "LIMIT_NBYTES_MIN", 8 * BLOCK)
    monkeypatch.setattr(staging, "_SMALL", 1024)
    monkeypatch.setattr(contribution, "LIMIT_NBYTES_MIN", 8 * BLOCK)
    monkeypatch.setattr(snapshot, "TWO_THREADS_NBYTES", 2 * BLOCK)
    monkeypatch.setattr(sources, "SMALL_NBYTES", 2000)
