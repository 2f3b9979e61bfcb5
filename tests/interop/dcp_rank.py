"""One of three processes of test_dcp_ranks.py: `python -m tests.interop.dcp_rank RANK SIZE FOLDER`.

The ranks form worlds of 1 to 3 by subgroups, so that torch is imported three times in all.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    init_from_local_shards,  # type: ignore[attr-defined]  # torch does not list it
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor, zeros
from torch.distributed.tensor import Shard as Split

import ckptstore
from ckptstore.interop.dcp import StorageReader, StorageWriter
from tests.save.dtensor_rank import full, make, train
from tests.save.runs import bits, ids

warnings.simplefilter("ignore")


class World:
    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.group = dist.new_group(ranks)  # every rank makes every group
        self.mesh = DeviceMesh.from_group(self.group, "cpu") if dist.get_rank() in ranks else None

    def save(self, state: dict[str, Any], writer: StorageWriter, **options: Any) -> Any:
        return dcp.save(state, storage_writer=writer, process_group=self.group, **options)

    def load(self, state: dict[str, Any], reader: StorageReader) -> dict[str, Any]:
        dcp.load(state, storage_reader=reader, process_group=self.group)
        return state


def parts(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def fsdp(rank: int, worlds: dict[int, World], url: str) -> None:
    """FSDP2 and AdamW: 2 ranks to 3 to 1, moments and hyper-parameters included, every bit."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    saved = None
    for step, size in enumerate((2, 3, 1)):
        if rank < size:
            world = worlds[size]
            model, optimizer = make(world.mesh, seed=step)  # type: ignore[arg-type]  # the mesh is there on every rank
            if step:
                state = world.load(parts(model, optimizer), StorageReader(url))
                set_state_dict(
                    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
                )
            else:
                train(model, optimizer, range(3))
            held = full(model, optimizer)
            assert saved in (None, held), f"{size} ranks"  # a rank that joins has nothing to compare with
            saved = held
            with StorageWriter(url) as writer:
                world.save(parts(model, optimizer), writer)
        dist.barrier()
    if rank == 0:
        infos = ckptstore.open(url).checkpoints()
        assert [(info.step, dict(info.roles)) for info in infos] == [
            (1, {"trainer": 2}),
            (2, {"trainer": 3}),
            (3, {"trainer": 1}),
        ]
        reads = [ckptstore.open(url).read(step=step) for step in (1, 2, 3)]
        assert [sorted_bits(read) for read in reads[1:]] == [sorted_bits(reads[0])] * 2
        assert ckptstore.open(url).verify(full=True).ok


def sorted_bits(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: sorted_bits(value) for key, value in state.items()}
    return bits(state)


def coordinators(rank: int, world: World, url: str) -> None:
    """A group without global rank 0, whose coordinator is its second rank; the reader's is its first."""
    if rank not in world.ranks:
        return
    rows = ids((5, 2), torch.float32)
    state = {
        "w": distribute_tensor(rows, world.mesh, [Split(0)]),
        "n": [1, 2],
        "deep": [{"a": rank * 0, "b": 4}],
    }
    writer = StorageWriter(url)
    for step in (1, 2):
        _save_state_dict(state, writer, process_group=world.group, coordinator_rank=1)
        assert step in (1, 2)
    target = {
        "w": zeros(5, 2, device_mesh=world.mesh, placements=[Replicate()]),
        "n": None,
        "deep": [{"a": 0, "b": 0}],
    }
    _load_state_dict(target, StorageReader(url, step=2), process_group=world.group, coordinator_rank=0)
    assert (
        bits(target["w"].to_local()) == bits(rows)
        and target["n"] == [1, 2]
        and target["deep"] == [{"a": 0, "b": 4}]
    )
    assert bits(ckptstore.open(url).read()) == bits({"w": rows, "n": [1, 2], "deep": [{"a": 0, "b": 4}]})
    inc = ckptstore.open(url).catalog.history.fold.fences[1]
    assert inc.roster.size("trainer") == 2
    dist.barrier(world.group)
    writer.close()


def caching(rank: int, world: World, url: str) -> None:
    """Plans cached by torch's planner, over new writers and new incarnations."""
    rows = ids((7, 3), torch.float32)
    writer = StorageWriter(url)
    for step, used in enumerate((writer, writer, StorageWriter(url)), 1):
        state = {"w": distribute_tensor(rows + step, world.mesh, [Split(0)]), "n": step}
        world.save(state, used, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        read = ckptstore.open(url).read()
        assert bits(read) == bits({"w": rows + step, "n": step}), step


def failing(rank: int, world: World, url: str) -> None:
    """One rank cannot write: all ranks raise, nothing is visible, and the next save is as any other."""

    class Broken(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                raise OSError("a broken rank")
            return super().resolve_data(write_item)

    def state(n: int) -> dict[str, Any]:
        return {"w": distribute_tensor(torch.full((6,), float(n)), world.mesh, [Split(0)])}

    writer = StorageWriter(url)
    world.save(state(1), writer)
    try:
        world.save(state(2), writer, planner=Broken())
    except CheckpointException as error:
        assert set(error.failures) == {1} and "a broken rank" in str(error)
    else:
        raise AssertionError("the save of a broken rank passed")
    run = ckptstore.open(url)
    assert run.latest().step == 1 and run.read()["w"].tolist() == [1.0] * 6  # type: ignore[union-attr]  # it was just saved
    assert [str(id) for id in run.catalog.history.fold.abandoned] == ["f0001/s00000002-000"]
    dist.barrier(world.group)
    world.save(state(2), writer)  # nothing is taken from what the ranks wrote for the save that failed
    assert [str(info.id) for info in run.checkpoints()] == ["f0001/s00000001-000", "f0001/s00000002-001"]
    assert run.read()["w"].tolist() == [2.0] * 6 and run.verify(full=True).ok


def sharded(rank: int, world: World, url: str) -> None:
    """ShardedTensors of uneven, unordered rows, saved on three ranks; loaded as others and as a plain tensor."""
    rows = ids((6, 2), torch.float64)

    def make_sharded(bounds: list[tuple[int, int]], fill: bool) -> ShardedTensor:
        a, b = bounds[rank]
        local = rows[a:b].clone() if fill else torch.zeros(b - a, 2, dtype=torch.float64)
        shards = [Shard.from_tensor_and_offsets(local, [a, 0], rank)]
        return init_from_local_shards(shards, 6, 2, process_group=world.group)

    world.save({"w": make_sharded([(4, 6), (0, 1), (1, 4)], True)}, StorageWriter(url))
    target = make_sharded([(0, 2), (2, 3), (3, 6)], False)
    state = world.load({"w": target}, StorageReader(url))
    (shard,) = state["w"].local_shards()
    a, b = [(0, 2), (2, 3), (3, 6)][rank]
    assert bits(shard.tensor) == bits(rows[a:b])
    plain: dict[str, Any] = {"w": torch.zeros(6, 2, dtype=torch.float64)}
    dcp.load(plain, storage_reader=StorageReader(url), no_dist=True)
    assert bits(plain["w"]) == bits(rows)


def empty_shards(rank: int, world: World, url: str) -> None:
    """Fewer rows than ranks, and tensors without elements."""
    tensors = {"few": ids((1, 2), torch.float32), "none": torch.zeros(3, 0), "zero": torch.zeros(0, 2)}
    state = {name: distribute_tensor(each, world.mesh, [Split(0)]) for name, each in tensors.items()}
    world.save(state, StorageWriter(url))
    assert bits(ckptstore.open(url).read()) == bits(tensors)
    blank = {
        name: zeros(each.shape, device_mesh=world.mesh, placements=[Split(0)]) for name, each in state.items()
    }
    world.load(blank, StorageReader(url))
    assert bits(blank["few"].full_tensor()) == bits(tensors["few"])


def in_background(rank: int, world: World, url: str) -> None:
    """async_save in a thread, over a group of its own, while the state changes."""
    rows = ids((6, 2), torch.float32)
    state = {"w": distribute_tensor(rows, world.mesh, [Split(0)]), "n": 1}
    done = dcp.async_save(state, storage_writer=StorageWriter(url), process_group=world.group)
    with torch.no_grad():
        state["w"].to_local().zero_()
    done.result()
    assert bits(ckptstore.open(url).read()) == bits({"w": rows, "n": 1})


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "rendezvous"), size), rank=rank, world_size=size
    )
    worlds = {n: World(list(range(n))) for n in (1, 2, 3)}
    last_two = World([1, 2])
    fsdp(rank, worlds, str(folder / "fsdp"))
    coordinators(rank, last_two, str(folder / "coordinators"))
    for case in (caching, failing, sharded, empty_shards, in_background):
        dist.barrier()
        case(rank, worlds[3], str(folder / case.__name__))
    dist.barrier()
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main()
