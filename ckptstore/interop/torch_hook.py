"""Hold the next optimizer step of this process until what is staged lazily has been copied.

One hook for all optimizers, registered once and never removed: torch iterates over its hooks while they run, so
one that comes and goes with each save would break a step of another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

_lock = threading.Lock()
_waits: list[Callable[[], None]] = []
_registered = False


def hold_steps(wait: Callable[[], None]) -> None:
    """Every optimizer of this process calls `wait` before its next step, until `release_steps` is called with it."""
    global _registered
    with _lock:
        if not _registered:
            register_optimizer_step_pre_hook(_before_step)
            _registered = True
        _waits.append(wait)


def release_steps(wait: Callable[[], None]) -> None:
    """Safe to call twice."""
    with _lock:
        if wait in _waits:
            _waits.remove(wait)


def _before_step(*_: Any) -> None:
    with _lock:
        waits = list(_waits)
    for wait in waits:
        wait()
