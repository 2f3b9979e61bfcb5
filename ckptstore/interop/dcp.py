"""torch.distributed.checkpoint over ckptstore: a writer, a reader, and the import of torch's own checkpoints.

The public names, for whoever changes one line of a program that calls `dcp.save`, `async_save` or `load`.
How to use them, and what differs from torch's own file system writer: docs/how-to/torch-dcp.md.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from ckptstore.interop.dcp_names import step_of
from ckptstore.interop.dcp_reader import StorageReader
from ckptstore.interop.dcp_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "import_checkpoint"]


def import_checkpoint(
    folder: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    step: int | None = None,
    role: str = "trainer",
    **options: Any,
) -> int:
    """Save a checkpoint that torch's own FileSystemWriter made as the next checkpoint of a run; its step.

    The step is `step`, else the number in which the folder's name ends, else the run's next. The whole state
    passes through this process's memory. torch unpickles its own files here: import only what you trust.
    `options` go to StorageWriter.
    """
    state: dict[str, Any] = {}
    everything = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch's planner has no types
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=everything, no_dist=True)
    wanted = step if step is not None else step_of(folder)
    with StorageWriter(url, step=wanted, role=role, **options) as writer:
        save(state, storage_writer=writer, no_dist=True)
        return writer.saved_step
