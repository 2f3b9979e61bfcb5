from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from ckptstore.errors import InvalidInputError
from ckptstore.store.base import Store, open_store
from ckptstore.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        yield open_store(f"memory://{secrets.token_hex(8)}")


def test_one_name_is_one_store_in_this_process() -> None:
    name = secrets.token_hex(8)
    open_store(f"memory://{name}").create("a", b"x")
    assert open_store(f"memory://{name}").read("a") == b"x"
    assert list(open_store(f"memory://{name}-other").list("")) == []


def test_memory_needs_a_name() -> None:
    with pytest.raises(InvalidInputError, match="memory://NAME"):
        open_store("memory://")
