"""Training goes on in real processes on another number of them, with every moment in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 4
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """FSDP2 on 2, 3, 1; FSDP2 over TP on 4, 2; torch's own state dicts; experts on 4, 2, 1: see reshard_rank.py."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.save.reshard_rank", str(rank), str(SIZE), str(tmp_path)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0 and "fine" in output, f"rank {number}:\n{output[-3000:]}"
