"""One rank of three that restore together over gloo. `python -m tests.save.share_rank RANK SIZE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptstore
from ckptstore import Checkpointer, Sharded
from ckptstore.errors import CkptStoreError, CorruptError, MissingTensorError
from ckptstore.fetch import Fetcher
from ckptstore.interop.torch_share import Together
from ckptstore.plan.share import Batch

SHAPE = (300, 500)
EXPERTS = 6


def main(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    url = str(folder / "run")
    save(url, rank, size)
    together(url, rank, size)
    one_rank_asks_for_more(url, rank, size)
    changed_on_the_way(url, rank, size)
    damaged(url, folder, rank, size)
    dist.destroy_process_group()
    print("fine")


def state_of(rank: int, size: int, *, blank: bool) -> dict[str, Any]:
    """Plain tensors, one column-major, and two experts a rank, of which each is held by two ranks."""
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    experts = torch.arange(EXPERTS * 40, dtype=torch.bfloat16).reshape(EXPERTS, 40)
    start = 2 * rank
    pair = Sharded(experts[start : start + 2].clone(), global_shape=(EXPERTS, 40), offset=(start, 0))
    state: dict[str, Any] = {
        "dense": whole.clone(),
        "turned": whole.clone().T,
        "small": [torch.full((5,), n) for n in range(30)],
        "experts": pair,
        "step": 7,
    }
    if blank:
        for tensor in (state["dense"], state["turned"], *state["small"], pair.tensor):
            tensor.zero_()
        state["step"] = 0
    return state


def begin(url: str, size: int) -> str:
    tokens: list[Any] = [None]
    if dist.get_rank() == 0:
        inc = ckptstore.begin(url, {"trainer": size}, takeover=True)
        tokens = [inc.token]
    dist.broadcast_object_list(tokens)
    return str(tokens[0])


def save(url: str, rank: int, size: int) -> None:
    with Checkpointer(begin(url, size), role="trainer", rank=rank) as ckpt:
        ckpt.save(1, state_of(rank, size, blank=False)).result(60)


def counted(folder_reads: list[int]) -> None:
    real = Fetcher.read

    def fetch(self: Fetcher, read: Any, *args: Any) -> None:
        folder_reads.append(read.nbytes)
        real(self, read, *args)

    Fetcher.read = fetch  # type: ignore[method-assign]  # the fault of this test


def together(url: str, rank: int, size: int) -> None:
    reads: list[int] = []
    counted(reads)
    state, wanted = state_of(rank, size, blank=True), state_of(rank, size, blank=False)
    ckpt = Checkpointer(begin(url, size), role="trainer", rank=rank)
    assert ckpt.restore(state, share=True) == 1
    assert torch.equal(state["dense"], wanted["dense"]) and torch.equal(state["turned"], wanted["turned"])
    assert all(map(torch.equal, state["small"], wanted["small"]))
    assert torch.equal(state["experts"].tensor, wanted["experts"].tensor) and state["step"] == 7
    total = torch.tensor([sum(reads)])
    dist.all_reduce(total)
    assert int(total) == ckptstore.open(url).latest().nbytes, "each stored byte is read once"
    most = torch.tensor([sum(reads)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert int(most) < int(total) / 2, "the ranks share the reading"


def one_rank_asks_for_more(url: str, rank: int, size: int) -> None:
    """All raise, and no target of any rank has changed."""
    state = state_of(rank, size, blank=True)
    if rank == 1:
        state["absent"] = torch.zeros(3)
    ckpt = Checkpointer(begin(url, size), role="trainer", rank=rank)
    try:
        ckpt.restore(state, share=True)
    except MissingTensorError:
        assert rank == 1
    except CkptStoreError as error:
        assert rank != 1 and error.ranks == (1,), error
    else:
        raise AssertionError("rank 1 asks for what is not there")
    assert not state["dense"].any() and state["step"] == 0


def changed_on_the_way(url: str, rank: int, size: int) -> None:
    """What arrives is proven again: the rank that got other bytes names the tensor, the others the rank."""
    real = Together._receive

    def receive(self: Together, batch: Batch) -> Any:
        data = real(self, batch)
        if rank == 2 and data is not None and data.size:
            data[0] ^= 1
        return data

    Together._receive = receive  # type: ignore[method-assign]  # the fault of this test
    ckpt = Checkpointer(begin(url, size), role="trainer", rank=rank)
    try:
        ckpt.restore(state_of(rank, size, blank=True), share=True)
    except CkptStoreError as error:
        assert not isinstance(error, CorruptError), "what is stored is whole, and must not be marked bad"
        assert "arrived from rank" in str(error) if rank == 2 else error.ranks == (2,), error
    else:
        raise AssertionError("a batch was changed on its way to rank 2")
    Together._receive = real  # type: ignore[method-assign]  # the fault of this test
    dist.barrier()


def damaged(url: str, folder: Path, rank: int, size: int) -> None:
    """One flipped bit: whoever reads it tells all, and nobody waits for what will not come."""
    token = begin(url, size)
    if rank == 0:
        largest = max((folder / "run" / "data").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[-1000] ^= 4
        largest.chmod(0o644)
        largest.write_bytes(data)
    dist.barrier()
    ckpt = Checkpointer(token, role="trainer", rank=rank)
    try:
        ckpt.restore(state_of(rank, size, blank=True), share=True)
    except CkptStoreError as error:
        told = torch.tensor([int(isinstance(error, CorruptError))])
    else:
        raise AssertionError("a chunk is damaged")
    dist.all_reduce(told)
    assert int(told) == 1, "the rank that read it names it, the others name the rank"
    dist.barrier()
    if rank == 0:
        assert [info.status for info in ckptstore.open(url).checkpoints()] == ["bad"]


main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
