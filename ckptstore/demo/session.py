"""One local Ray session for all runs of a command, and nothing left of it afterwards.

Ray prints on stdout, runs workers at nice 15, kills processes when memory is short, leaves its folder
behind, and leaves agents when its driver is killed: each is dealt with here. A janitor process cleans up if
this one is killed. The traps: docs/explanation/recovery.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from ckptstore.cli.signals import Signals, interrupt
from ckptstore.demo import janitor

OBJECT_STORE_NBYTES = 100 * 1024**2
LEAVE_S = 5.0  # for Ray's processes to end by themselves after shutdown
SURVEY_S = 1.0
AGAIN_S = 3.0  # longer than an exception takes to reach the session's end
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}

_TOKEN = secrets.token_hex(32)  # one a process: Ray keeps the first it reads


class RaySession:
    """Use with `with`. `namespace` is that of the session's actors."""

    def __init__(self) -> None:
        self.namespace = f"ckptstore-{secrets.token_hex(4)}"
        self._folder: str | None = None
        self._janitor: subprocess.Popen[str] | None = None
        self._known: set[janitor.Process] = set()
        self._owned: list[str] = []
        self._surveyed_s = 0.0
        self._stopped: int | None = None
        self._signals = Signals({signal.SIGINT: interrupt, signal.SIGTERM: self._stop}, again_s=AGAIN_S)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RaySession:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            stack.callback(self._tidy)
            self._start_janitor()
            # Short, because the path of a socket has at most 107 bytes.
            folder = f"/tmp/ck-{secrets.token_hex(4)}"
            self._tell(f"session {folder}")
            self._folder = folder
            os.mkdir(folder, mode=0o700)
            # Ray prints on stdout, from a thread, whatever it is told: stdout is for results, and deaths are
            # planned here.
            talk = stack.enter_context(open(os.path.join(folder, "ray.out"), "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(talk))
            stack.enter_context(_environment(_variables(folder)))
            self._start_ray(folder)
            stack.callback(self._stop_ray)
            self.survey(at_once=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.deafen()
        self._stack.close()
        if self._stopped is not None and isinstance(error, SystemExit):
            raise SystemExit(128 + self._stopped) from None  # Ray's waits make another one of it

    def _stop(self, number: int) -> NoReturn:
        self._stopped = number
        raise SystemExit(128 + number)

    def own_folder(self, path: str) -> None:
        """This folder goes with the session, once nobody is left who writes to it: say so before it is made.

        The janitor removes it if the command is killed.
        """
        self._tell(f"folder {path}")
        self._owned.append(path)

    def survey(self, *, at_once: bool = False) -> None:
        """Tell the janitor of processes that are new; often called, it looks once a second."""
        now_s = time.monotonic()
        if not at_once and now_s - self._surveyed_s < SURVEY_S:
            return
        self._surveyed_s = now_s
        if self._folder is None:
            return
        tree = janitor.parents()
        marked = janitor.naming([self._folder], tree)  # not: all children of this process, it may have others
        for pid in marked | janitor.descendants({*marked, *(pid for pid, _ in self._known)}, tree):
            start = janitor.started(pid)
            if start is not None and (pid, start) not in self._known:
                self._known.add((pid, start))
                self._tell(f"process {pid} {start}")

    # -- steps

    def _start_janitor(self) -> None:
        command = [sys.executable, "-I", "-S", str(janitor.__file__)]
        self._janitor = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def _tell(self, line: str) -> None:
        assert self._janitor is not None and self._janitor.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: only a kill of this process would miss it
            self._janitor.stdin.write(line + "\n")
            self._janitor.stdin.flush()

    def _start_ray(self, folder: str) -> None:
        import ray

        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="local",
                num_cpus=0,
                namespace=self.namespace,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                object_store_memory=OBJECT_STORE_NBYTES,
                _temp_dir=folder,
            )
        except BaseException:
            self._stop_ray()
            raise
        finally:
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGTERM, before)  # Ray sets its own, which leaves without cleaning up

    def _stop_ray(self) -> None:
        """End Ray, its actors with it, and whatever does not end by itself.

        Nothing is asked of Ray: a signal to the whole process group has ended parts of it by now, and a
        question to a dead one hangs for a minute and then ends this process.
        """
        import ray

        self._signals.deafen()
        self.survey(at_once=True)
        try:
            ray.shutdown()
            self._wait_until_gone()
        finally:
            if janitor.end(self._known):
                self._wait_until_gone()  # a process that is being killed may still write

    def _wait_until_gone(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        while self._alive() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def _alive(self) -> bool:
        return any(janitor.started(pid) == start for pid, start in self._known)

    def _tidy(self) -> None:
        """Remove the folders, then tell the janitor that there is nothing to do."""
        self._signals.deafen()
        for folder in (*self._owned, *([self._folder] if self._folder is not None else [])):
            shutil.rmtree(folder, ignore_errors=True)
        if self._janitor is not None and self._janitor.stdin is not None:
            self._tell("done")
            with contextlib.suppress(BrokenPipeError):
                self._janitor.stdin.close()
            self._janitor.wait(timeout=10)


def _variables(folder: str) -> dict[str, str]:
    """What Ray and its workers find in their environment; the folder marks all of them as this session's."""
    # A token of our own: Ray would make one and leave it in the home directory. It reads the mode when it is
    # imported; in a process that has done so it chooses this mode itself, with a warning.
    mode = {} if "ray" in sys.modules else {"RAY_AUTH_MODE": "token"}
    return {**_ENVIRONMENT, **mode, "RAY_AUTH_TOKEN": _TOKEN, "CKPTSTORE_DEMO_SESSION": folder}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set these variables, which Ray and its workers inherit, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
