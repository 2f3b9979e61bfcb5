"""Nothing is left of a session: no process, shared memory, socket or folder, however its command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.demo import janitor
from tests.cli.commands import hear_interrupts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = """
import sys, tempfile, time
import ray
from ckptstore.demo.session import RaySession

class Writer:
    # Saves until it is ended, as a coordinator does: what is removed before that comes back.
    def start(self, folder):
        import os, threading
        def write():
            n = 0
            while True:
                os.makedirs(f"{folder}/run", exist_ok=True)
                open(f"{folder}/run/{n % 50}", "w").close()
                n += 1
        threading.Thread(target=write, daemon=True).start()
        return 1

    def wait(self):
        time.sleep(200)

store = tempfile.mkdtemp(prefix="ck-test-")
with RaySession() as session:
    session.own_folder(store)
    actor = ray.remote(Writer).options(num_cpus=0, name="writer", lifetime="detached").remote()
    ray.get(actor.start.remote(store))
    session.survey(at_once=True)
    print(session._folder, store, file=sys.stderr, flush=True)
    if sys.argv[1] == "drop":
        class Dropped:
            def __del__(self):
                time.sleep(30)  # what a signal raises in here is printed and dropped
        Dropped()
    if sys.argv[1] != "end":
        forever = actor.wait.remote()
        while True:
            ray.wait([forever], timeout=0.2)
print("result")
"""


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def begin(*arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start the script; its process and the folders it has made, once its actor runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=hear_interrupts,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("/tmp/ck-"):
            return process, line.split()
    pytest.fail(f"the session did not start: {''.join(lines)}")


def left(folders: list[str]) -> list[str]:
    """What is left of a session: processes that name its folder, and the folders."""
    processes = [f"process {pid}" for pid in janitor.naming(folders[:1], janitor.parents())]
    return processes + [folder for folder in folders if Path(folder).exists()]


def wait_until_gone(folders: list[str], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while left(folders):
        assert time.monotonic() < deadline_s, left(folders)
        time.sleep(0.2)


def test_a_session_that_ends_leaves_nothing_and_keeps_stdout_for_results() -> None:
    before = shared_memory()
    process, folders = begin("end")
    stdout, _ = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (0, "result\n")
    assert left(folders) == []
    assert shared_memory() <= before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_command_that_is_told_to_stop_leaves_nothing(number: signal.Signals, code: int) -> None:
    before = shared_memory()
    process, folders = begin("wait")
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    assert left(folders) == []
    assert shared_memory() <= before


def test_a_signal_whose_exception_is_dropped_is_heard_all_the_same() -> None:
    process, folders = begin("drop")
    time.sleep(0.5)  # into the destructor: there is nothing to wait for
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert left(folders) == []


def test_a_signal_to_the_whole_process_group_leaves_nothing_either() -> None:
    """As `timeout` sends it: parts of Ray die at the same moment as the command is told to stop."""
    before = shared_memory()
    process, folders = begin("wait")
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert left(folders) == []
    assert shared_memory() <= before


def test_the_janitor_cleans_up_after_a_command_that_was_killed() -> None:
    before = shared_memory()
    process, folders = begin("wait")
    assert any(part.startswith("process") for part in left(folders))
    process.kill()
    process.communicate(timeout=30)
    wait_until_gone(folders, 60.0)
    assert shared_memory() <= before


def test_the_janitor_ends_only_what_it_was_told_of(tmp_path: Path) -> None:
    """An id that another process has by now is left alone."""
    with subprocess.Popen(["sleep", "60"]) as bystander, subprocess.Popen(["sleep", "60"]) as mine:
        start = janitor.started(mine.pid)
        known = {(bystander.pid, "1"), (mine.pid, str(start))}
        janitor.clean(known, [str(tmp_path / "no-such-session")], [])
        assert mine.wait(timeout=10) == -signal.SIGKILL
        assert bystander.poll() is None
        bystander.kill()
