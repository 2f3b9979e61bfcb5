"""How a command hears that it is to end (Ctrl-C, a request to end, a closed terminal) and cleans up on the way out.

It stands apart as the one place that sets handlers: what raises, what is raised again, and when nothing is heard any
more are decided together or not at all.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

Act = Callable[[int], NoReturn]


def interrupt(number: int) -> NoReturn:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


class Signals:
    """Within a `with`, each of the signals does what `acts` says: it raises what ends the command.

    With `again_s` it is raised again every so many seconds until `deafen`: what is raised while a library calls
    back, or in a destructor, is printed and dropped there, and the command would run on. What whoever started the
    command has it ignore (nohup, a shell's background) stays ignored. Only the main thread can hear; in any other
    nothing is done.
    """

    def __init__(self, acts: Mapping[int, Act], *, again_s: float | None = None) -> None:
        self._acts = acts
        self._again_s = again_s
        self._before: dict[int, Any] = {}
        self._deaf = self._raised = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self._acts:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        self.deafen()
        if self._raised:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def deafen(self) -> None:
        """Hear nothing from now on: cleaning up is bounded, and a second signal must not cut it short."""
        self._deaf = True

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if self._deaf:
            return
        if self._again_s is not None:
            self._raised = True
            before = signal.signal(signal.SIGALRM, lambda _, frame: self._tell(number, frame))
            self._before.setdefault(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, self._again_s)
        self._acts[number](number)
