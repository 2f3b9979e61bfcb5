"""Shared by the tests of the demo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.demo.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Three processes that can meet as one, two or three ranks."""
    three = Ranks()
    yield three
    three.close()
