"""One of four processes of test_reshard.py: `python -m tests.save.reshard_rank RANK SIZE FOLDER`.

Each scenario trains on some ranks, saves, restores on others, and compares two ways: everything restored is
bit for bit what was saved, and training goes on as in a run that never changed its ranks (the order of
sums differs, so within a tolerance). The ranks form smaller worlds by subgroups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore import Checkpointer, ExpertParallel
from tests.save.runs import bits

EXPERTS = 8


def batch(step: int) -> Tensor:
    return torch.rand(8, 5, generator=torch.Generator().manual_seed(step))


def save(url: str, group: Any, step: int, state: dict[str, Any]) -> None:
    with Checkpointer.from_distributed(url, group) as ckpt:
        assert ckpt.save(step, state).result(60).step == step


def restore(url: str, group: Any, step: int, state: dict[str, Any]) -> None:
    with Checkpointer.from_distributed(url, group) as ckpt:
        assert ckpt.restore(state) == step


def close(one: Sequence[Tensor], two: Sequence[Tensor]) -> None:
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


# -- FSDP2, and FSDP2 over TP


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights, moments and counts, whole."""
    found = [whole(p.detach()) for p in model.parameters()]
    return found + [whole(v) for p in model.parameters() for v in optimizer.state[p].values()]


def straight(steps: int) -> list[Tensor]:
    model = mlp(0)
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    return everything(model, optimizer)


def sharded(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(seed)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def tensor_parallel(mesh: DeviceMesh, seed: int) -> nn.Module:
    return parallelize_module(mlp(seed), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def fsdp(rank: int, world: Callable[[int], tuple[Any, DeviceMesh]], url: str) -> None:
    """FSDP2 with AdamW, saved on 2 ranks, gone on with on 3, then on 1, then without FSDP."""
    done: dict[int, Any] = {}
    for number, size in enumerate((2, 3, 1)):
        dist.barrier()
        if rank >= size:
            continue
        group, mesh = world(size)
        model, optimizer = sharded(mesh, number)
        state = {"all": ckptstore.torch_state(model, optimizer)}
        with Checkpointer.from_distributed(url, group) as ckpt:
            if number:
                assert ckpt.restore(state) == 2 * number
                found = bits(everything(model, optimizer))  # a collective
                assert found == done.get(2 * number, found)  # unless this rank was not there
            train(model, optimizer, range(2 * number, 2 * number + 2))
            done[2 * number + 2] = bits(everything(model, optimizer))
            assert ckpt.save(2 * number + 2, state).result(60).step == 2 * number + 2
    if rank == 0:
        close(everything(model, optimizer), straight(6))
        plain = mlp(7)
        optimizer = adamw(plain)
        restore(url, world(1)[0], 6, {"all": ckptstore.torch_state(plain, optimizer)})
        assert bits(everything(plain, optimizer)) == done[6]


def two_ways(rank: int, world: Callable[[int], tuple[Any, DeviceMesh]], url: str) -> None:
    """FSDP2 over TP on 2 x 2, to FSDP2 on 2 and to TP on 2."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"], 0)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = adamw(model)
    assert any(
        isinstance(p.placements[0], _StridedShard) for p in model.parameters() if isinstance(p, DTensor)
    )
    train(model, optimizer, range(2))
    saved = everything(model, optimizer)
    save(url, None, 2, {"all": ckptstore.torch_state(model, optimizer)})
    dist.barrier()
    if rank >= 2:
        return
    group, pair = world(2)
    model, optimizer = sharded(pair, 1)
    restore(url, group, 2, {"all": ckptstore.torch_state(model, optimizer)})
    assert bits(everything(model, optimizer)) == bits(saved)
    train(model, optimizer, range(2, 4))
    close(everything(model, optimizer), straight(4))
    model = tensor_parallel(pair, 2)
    optimizer = adamw(model)
    restore(url, group, 2, {"all": ckptstore.torch_state(model, optimizer)})
    assert bits(everything(model, optimizer)) == bits(saved)
    train(model, optimizer, range(2, 4))
    close(everything(model, optimizer), straight(4))


def torch_dicts(rank: int, world: Callable[[int], tuple[Any, DeviceMesh]], url: str) -> None:
    """The flat and nested dicts that torch makes of FSDP2 models and optimizers are states like any other."""
    flat = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    nested = torch_state_dict.StateDictOptions()

    def dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            "model": torch_state_dict.get_model_state_dict(model),
            "flat": torch_state_dict.get_optimizer_state_dict(model, optimizer, options=flat),
            "nested": torch_state_dict.get_optimizer_state_dict(model, optimizer, options=nested),
        }

    if rank < 2:
        group, mesh = world(2)
        model, optimizer = sharded(mesh, 0)
        train(model, optimizer, range(2))
        save(url, group, 2, dicts(model, optimizer))
    dist.barrier()
    if rank == 0:
        group, mesh = world(1)
        for kind, options in (("flat", flat), ("nested", nested)):
            model, optimizer = sharded(mesh, 1)
            target = dicts(model, optimizer)
            restore(url, group, 2, target)
            torch_state_dict.set_model_state_dict(model, target["model"])
            torch_state_dict.set_optimizer_state_dict(model, optimizer, target[kind], options=options)
            train(model, optimizer, range(2, 4))
            close(everything(model, optimizer), straight(4))


# -- experts


class Summed(torch.autograd.Function):
    """The sum over ranks; each rank's share of the loss is the whole loss, so gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Mixture(nn.Module):
    """A router that all ranks hold, experts that each holds some of: as modules and stacked."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        each = EXPERTS // size
        self.numbers = range(rank * each, rank * each + each)
        self.router = nn.Linear(5, EXPERTS)
        every = [nn.Linear(5, 3) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(every[n] for n in self.numbers)
        self.scale = nn.Parameter(torch.rand(EXPERTS, 3)[self.numbers.start : self.numbers.stop].clone())

    def forward(self, x: Tensor, group: Any) -> Tensor:
        share = self.router(x).softmax(-1)
        parts = [share[:, n, None] * self.experts[k](x) * self.scale[k] for k, n in enumerate(self.numbers)]
        return Summed.apply(torch.stack(parts).sum(0), group)


def train_experts(model: Mixture, optimizer: torch.optim.Optimizer, group: Any, steps: Iterable[int]) -> None:
    for step in steps:
        model(batch(step), group).square().mean().backward()
        for p in model.router.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=group)  # each rank has the share of its experts
        optimizer.step()
        optimizer.zero_grad()


def by_expert(model: Mixture, optimizer: torch.optim.Optimizer, size: int, group: Any) -> list[Tensor]:
    """Router, then all experts in global order: weights, moments and counts."""
    rows = []
    for k in range(len(model.numbers)):
        slots = [(p, p.detach()) for p in model.experts[k].parameters()]
        values = [value for p, own in slots for value in (own, *optimizer.state[p].values())]
        state = optimizer.state[model.scale]
        values += [model.scale.detach()[k], state["exp_avg"][k], state["exp_avg_sq"][k], state["step"]]
        rows.append(torch.cat([value.reshape(-1) for value in values]))
    gathered = [torch.empty_like(torch.stack(rows)) for _ in range(size)]
    dist.all_gather(gathered, torch.stack(rows), group=group)
    router = [v for p in model.router.parameters() for v in (p.detach(), *optimizer.state[p].values())]
    return [torch.cat(gathered), *(value.clone() for value in router)]


def experts(rank: int, world: Callable[[int], tuple[Any, DeviceMesh]], url: str) -> None:
    """EP with AdamW on 4, then on 2, then on 1 rank."""

    def make(size: int, seed: int) -> tuple[Mixture, torch.optim.Optimizer, dict[str, Any]]:
        model = Mixture(rank, size, seed)
        optimizer = adamw(model)
        inner = ckptstore.torch_state(model, optimizer)
        return (
            model,
            optimizer,
            {"all": ExpertParallel(inner, ["experts.{expert}", "scale"], EXPERTS, rank=rank, size=size)},
        )

    saved: list[Tensor] = []
    for number, size in enumerate((4, 2, 1)):
        dist.barrier()
        if rank >= size:
            continue
        group, _ = world(size)
        model, optimizer, state = make(size, 0 if number == 0 else 5 + rank)
        with Checkpointer.from_distributed(url, group) as ckpt:
            if number:
                assert ckpt.restore(state) == 2 * number
                assert bits(by_expert(model, optimizer, size, group)) == bits(saved)
            train_experts(model, optimizer, group, range(2 * number, 2 * number + 2))
            saved = by_expert(model, optimizer, size, group)
            assert ckpt.save(2 * number + 2, state).result(60).step == 2 * number + 2
    if rank == 0:
        group, _ = world(1)
        model, optimizer, _ = make(1, 0)
        train_experts(model, optimizer, group, range(6))
        close(by_expert(model, optimizer, 1, group), saved)


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

    fsdp(rank, world, str(folder / "fsdp"))
    two_ways(rank, world, str(folder / "two"))
    torch_dicts(rank, world, str(folder / "dicts"))
    experts(rank, world, str(folder / "experts"))
    dist.barrier()
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main()
