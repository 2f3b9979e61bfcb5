"""Ranks that restore together read each stored byte once, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 3
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_that_restore_together_read_each_byte_once_and_fail_together(tmp_path: Path) -> None:
    """Equal to a restore of each alone; a missing tensor and a damaged chunk raise on all: see share_rank.py."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.save.share_rank", str(rank), str(SIZE), str(tmp_path)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0 and "fine" in output, f"rank {number}:\n{output[-3000:]}"
