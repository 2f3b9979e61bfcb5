"""Plant a bug: the real function's source with one line changed, compiled in its own module."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *edits: tuple[str, str]) -> None:
    """Replace `owner.name` by itself with each `old` text, found exactly once, exchanged for `new`."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}: plant the bug anew"
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, vars(sys.modules[function.__module__]), made)
    monkeypatch.setattr(owner, name, made[name])
