"""One of four processes of test_dtensor.py: `python -m tests.save.dtensor_rank RANK SIZE FOLDER`.

The ranks form worlds of 1 to 4 by subgroups, so that torch is imported four times and not twelve.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros

import ckptstore
from ckptstore import Checkpointer, InvalidInputError
from tests.save.runs import bits, ids

Placements = tuple[Any, ...]

GLOBALS = {
    "rows": ids((7, 4), torch.float32),
    "columns": ids((3, 5), torch.bfloat16),
    "whole": ids((6,), torch.float64),
    "few": ids((1, 2), torch.int32),
    "numbers": ids((4, 4, 2)),
}
ONE_AXIS: dict[str, Placements] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "whole": (Replicate(),),
    "few": (Shard(0),),
    "numbers": (Shard(2),),
}
OTHER_AXIS: dict[str, Placements] = {
    "rows": (Shard(1),),
    "columns": (Replicate(),),
    "whole": (Shard(0),),
    "few": (Shard(1),),
    "numbers": (Shard(1),),
}
TWO_AXES: dict[str, Placements] = {
    "rows": (Shard(0), Shard(1)),
    "columns": (Replicate(), Shard(1)),
    "whole": (Replicate(), Replicate()),
    "few": (Shard(0), Replicate()),
    "numbers": (Shard(0), Shard(0)),
}


def distributed(mesh: DeviceMesh, placements: dict[str, Placements]) -> dict[str, Any]:
    return {name: distribute_tensor(GLOBALS[name], mesh, each) for name, each in placements.items()}


def blank(mesh: DeviceMesh, placements: dict[str, Placements]) -> dict[str, Any]:
    return {
        name: zeros(GLOBALS[name].shape, dtype=GLOBALS[name].dtype, device_mesh=mesh, placements=each)
        for name, each in placements.items()
    }


def check(state: dict[str, Any]) -> None:
    for name, value in state.items():
        assert bits(value.full_tensor()) == bits(GLOBALS[name]), name


def save(url: str, group: Any, state: dict[str, Any], step: int = 1, **options: Any) -> None:
    with Checkpointer.from_distributed(url, group, **options) as ckpt:
        assert ckpt.save(step, state).result(60).step == step


def restore(url: str, group: Any, state: dict[str, Any]) -> None:
    with Checkpointer.from_distributed(url, group) as ckpt:
        assert ckpt.restore(state) == 1


def reshard(rank: int, world: Callable[[int], tuple[Any, DeviceMesh]], url: str) -> None:
    """Saved on 2 ranks; restored on 1, 3 and 4, by other placements."""
    if rank < 2:
        group, mesh = world(2)
        save(url, group, distributed(mesh, ONE_AXIS))
        refused(mesh, rank)
    for size, placements in ((1, ONE_AXIS), (3, ONE_AXIS), (3, OTHER_AXIS), (4, OTHER_AXIS)):
        dist.barrier()
        if rank < size:
            group, mesh = world(size)
            state = blank(mesh, placements)
            restore(url, group, state)
            check(state)


def refused(mesh: DeviceMesh, rank: int) -> None:
    local = torch.ones(2, 2)
    ckpt_of = ckptstore.state.flatten
    for placement in (Partial(), Partial("max")):
        tensor = DTensor.from_local(local, mesh, (placement,), run_check=False, shape=(4, 2), stride=(2, 1))
        try:
            ckpt_of({"inner": {"bad": tensor}}, role="trainer", rank=rank)
        except InvalidInputError as error:
            assert "inner.bad" in str(error) and "redistribute" in str(error)
        else:
            raise AssertionError(f"{placement} was not refused")


def two_axes(rank: int, world: Callable[[int], tuple[Any, DeviceMesh]], url: str) -> None:
    """Saved on a mesh of 2 x 2, restored on one of 2."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("data", "tensor"))
    save(url, None, distributed(mesh, TWO_AXES))
    state = blank(mesh, TWO_AXES)
    restore(url, None, state)
    check(state)
    dist.barrier()
    if rank < 2:
        group, mesh = world(2)
        state = blank(mesh, ONE_AXIS)
        restore(url, group, state)
        check(state)


def make(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))  # uneven on any count but one
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    parameters = dict(model.named_parameters())
    moments = {
        f"{name}.{key}": optimizer.state[p][key].full_tensor()
        for name, p in parameters.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return bits({**{name: p.full_tensor() for name, p in parameters.items()}, **moments})


def fsdp(rank: int, world: Callable[[int], tuple[Any, DeviceMesh]], url: str, folder: Path) -> None:
    """FSDP2 and AdamW: saved on 2; goes on bit by bit on 2, and holds the same on 1."""
    if rank < 2:
        group, mesh = world(2)
        model, optimizer = make(mesh, 0)
        train(model, optimizer, range(3))
        saved = full(model, optimizer)
        save(url, group, {"all": ckptstore.torch_state(model, optimizer)})
        train(model, optimizer, range(3, 6))
        again, other = make(mesh, 1)
        restore(url, group, {"all": ckptstore.torch_state(again, other)})
        assert full(again, other) == saved
        train(again, other, range(3, 6))
        assert full(again, other) == full(model, optimizer)
    dist.barrier()
    if rank == 0:
        group, mesh = world(1)
        model, optimizer = make(mesh, 2)
        restore(url, group, {"all": ckptstore.torch_state(model, optimizer)})
        assert full(model, optimizer) == saved
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))  # and a model that is not sharded
        restore(url, group, {"all": ckptstore.torch_state(plain, torch.optim.AdamW(plain.parameters()))})
        assert bits(dict(plain.named_parameters())) == (
            "dict",
            saved[1][: len(dict(plain.named_parameters()))],
        )


def failed_begin(rank: int, url: str) -> None:
    """A begin that fails on rank 0 fails on all, with the same class of error."""
    try:
        Checkpointer.from_distributed(url, resume="must")
    except ckptstore.NoCheckpointError:
        return
    raise AssertionError("resume='must' of a new run was not refused")


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "rendezvous"), size), rank=rank, world_size=size
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size)}  # every rank makes every group
    meshes = {n: DeviceMesh.from_group(group, "cpu") for n, group in groups.items() if rank < n}

    def world(count: int) -> tuple[Any, DeviceMesh]:
        if count == size:
            return None, meshes.setdefault(size, DeviceMesh("cpu", list(range(size))))
        return groups[count], meshes[count]

    reshard(rank, world, str(folder / "reshard"))
    two_axes(rank, world, str(folder / "two"))
    fsdp(rank, world, str(folder / "fsdp"), folder)
    failed_begin(rank, str(folder / "failed"))
    dist.barrier()
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main()
