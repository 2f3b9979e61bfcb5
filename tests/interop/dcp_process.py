"""Checkpoints written by torch's checkpoint process: `python -m tests.interop.dcp_process FOLDER`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckptstore
from ckptstore.interop.dcp import StorageWriter


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    store = dist.FileStore(str(folder / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    url = str(folder / "run")
    writer = StorageWriter(url)
    for n in (1, 2):
        done = dcp.async_save(
            {"w": torch.full((3,), float(n)), "n": n},
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        done.result()
    dcp.save({"w": torch.zeros(3), "n": 3}, storage_writer=writer)  # the last one is often made here
    run = ckptstore.open(url)
    assert [info.step for info in run.checkpoints()] == [1, 2, 3]
    assert [run.read(step=n)["n"] for n in (1, 2, 3)] == [1, 2, 3]
    assert run.read(step=2)["w"].tolist() == [2, 2, 2]
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main()
