"""A few real processes that run a function as the ranks of one gloo group.

They are started once a session, because importing torch and transformers takes seconds, and each call
makes a new group. What they run must be a module-level function, so that spawned processes find it.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 100.0  # a loaded machine needs tens of seconds to import torch


def _serve(line: Connection) -> None:
    torch.set_num_threads(1)
    while (order := line.recv()) is not None:
        work, rank, size, meeting, arguments = order
        try:
            if size > 1:
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
            line.send((True, work(rank, size, *arguments)))
        except Exception:  # it crosses to the test, which fails with it
            line.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Ranks:
    """Up to three ranks. `run` gives their results in order and raises the first failure."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.lines: list[Connection] = []
        self.processes = []
        for _ in range(3):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)

    def run(self, size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder) / "meeting")
            for rank, line in enumerate(self.lines[:size]):
                line.send((work, rank, size, meeting, arguments))
            answers = []
            for rank, line in enumerate(self.lines[:size]):
                if not line.poll(DEADLINE_S):
                    self.close()
                    raise AssertionError(f"rank {rank} of {size} hung in {work.__name__}")
                answers.append(line.recv())
        for done, answer in answers:
            assert done, answer
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for line in self.lines:
            line.close()
