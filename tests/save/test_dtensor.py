"""DTensors and FSDP2 in real processes: saved by one world, restored by others."""

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
def test_distributed_tensors_are_saved_by_one_world_and_restored_by_others(tmp_path: Path) -> None:
    """2 ranks to 1, 3 and 4; a mesh of 2 x 2; FSDP2 with AdamW on 2, to 2 and to 1: see dtensor_rank.py."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.save.dtensor_rank", str(rank), str(SIZE), str(tmp_path)],
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
