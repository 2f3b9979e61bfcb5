"""torch.distributed.checkpoint over ckptstore in real processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 3
ROOT = Path(__file__).parents[2]


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "localhost"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def all_end_fine(processes: list[subprocess.Popen[str]]) -> None:
    try:
        outputs = [each.communicate(timeout=240)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    for number, (each, output) in enumerate(zip(processes, outputs, strict=True)):
        assert each.returncode == 0 and "fine" in output, f"process {number}:\n{output[-3000:]}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_save_and_load_through_dcp_whatever_their_number(tmp_path: Path) -> None:
    """FSDP2 2 to 3 to 1, coordinators other than 0, cached plans, a rank that fails, ShardedTensors: dcp_rank.py."""
    all_end_fine([start("tests.interop.dcp_rank", str(n), str(SIZE), str(tmp_path)) for n in range(SIZE)])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchs_checkpoint_process_and_the_program_itself_save_in_turn(tmp_path: Path) -> None:
    all_end_fine([start("tests.interop.dcp_process", str(tmp_path))])
