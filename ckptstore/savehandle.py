"""One save under way, as its caller sees it.

Stands apart because whoever waits for a save needs nothing of what saves.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from ckptstore.lazy import LazyStaging
from ckptstore.manifest import AttemptId, CheckpointInfo


class SaveHandle:
    """One save under way. Waiting for it raises its failure."""

    def __init__(self, attempt: AttemptId) -> None:
        self.attempt = attempt
        self.step = attempt.step
        self._written = threading.Event()
        self._done: Future[CheckpointInfo] = Future()
        self._after: SaveHandle | None = None  # the save before, while it is in flight
        self._staging: LazyStaging | None = None
        self._part_durable = False
        self._told = False

    def wait_staged(self, timeout_s: float = 600.0) -> None:
        """Return once the state is copied and may be changed: at once, unless it was saved with `lazy=True`.

        Optimizers of this process wait by themselves. A failure to copy is raised by `result`.
        """
        if self._staging is not None:
            self._staging.wait(timeout_s)

    def written(self, timeout_s: float = 600.0) -> None:
        """Return once this member's part is durable. Raises the save's failure, or TimeoutError."""
        if not self._written.wait(timeout_s):
            raise TimeoutError(f"step {self.step}: this member's part is not durable after {timeout_s:g} s")
        if self._done.done() and self._done.exception() is not None and not self._part_durable:
            self.result(0)

    def result(self, timeout_s: float = 600.0) -> CheckpointInfo:
        """The committed checkpoint. Raises IncompleteSaveError or InconsistentCutError (abandoned), FencedError,
        OutcomeUnknownError, or TimeoutError while the attempt is still open."""
        try:
            info = self._done.result(timeout_s)
        except FutureTimeoutError:
            if self._done.done():
                self._told = True
                raise
            raise TimeoutError(f"step {self.step} is still being saved after {timeout_s:g} s") from None
        except BaseException:
            self._told = self._done.done()  # an interrupted wait has told nothing: `close` will
            raise
        return info

    def done(self) -> bool:
        """Is the outcome known, one way or the other?"""
        return self._done.done()
