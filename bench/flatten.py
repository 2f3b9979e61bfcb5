"""What flattening a state costs on the caller's thread, held against a copy of 1 GiB by one thread.

What is saved has the same shape at every save but the first. The tensors are small, since flattening asks none
for its bytes; the copies between the measurements throw them out of the caches, as a training step does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from bench.rows import Row
from ckptstore.digester import Digester
from ckptstore.held import FlatShard
from ckptstore.interop.torch_state import torch_state
from ckptstore.state import FlatState, Known, flatten

COUNTS = {1_764: 0.02, 20_000: 0.16}  # tensors: to reach where all are in one dict, × the copy
COPY_NBYTES = 1 << 30
ROUNDS = 7


def rows() -> Iterator[Row]:
    """The copy, then each kind of state at each size; all are measured in turn."""
    source, target = np.ones(COPY_NBYTES, np.uint8), np.ones(COPY_NBYTES, np.uint8)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        copies: list[float] = []
        found: list[Row] = []
        for count, most in COUNTS.items():
            cases = _cases(count)
            taken: dict[str, list[float]] = {name: [] for name in cases}
            for each in cases.values():
                each()
            for _ in range(ROUNDS):
                for name, each in cases.items():
                    copies.append(_seconds(lambda: np.copyto(target, source)))
                    taken[name].append(_seconds(each))
            for name, times in taken.items():
                share = statistics.median(times) / statistics.median(copies)
                found.append(
                    Row(
                        what=f"{count:,} tensors, {name}",
                        value=share,
                        unit="× the copy",
                        at_most=most if name == "in one dict" else None,
                        note=f"{statistics.median(times) * 1e3:.2f} ms",
                    )
                )
        copy_s = statistics.median(copies)
        yield Row(what="one copy of 1 GiB", value=copy_s * 1e3, unit="ms", note=f"{1.0737 / copy_s:.1f} GB/s")
        yield from found
    finally:
        dist.destroy_process_group()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cases(count: int) -> dict[str, Callable[[], object]]:
    one = {f"layers.{n}.weight": torch.ones(4, 4) for n in range(count)}
    random = dict(one)
    digester = Digester(0)
    flat = _again(lambda: one)

    def with_random_state() -> dict[str, Any]:
        random["rng"] = torch.get_rng_state()
        return random

    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(count // 8)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    mesh = init_device_mesh("cpu", (1,))
    few = dict(list(one.items())[: count // 4])  # to distribute a tensor takes 0.3 ms
    distributed = {name: distribute_tensor(each, mesh, [Replicate()]) for name, each in few.items()}
    buckets = {name: FlatShard(each.view(-1), global_shape=(8, 4), start=0) for name, each in one.items()}
    return {
        "in one dict": flat,
        "and a random state made anew": _again(with_random_state),
        "torch_state of a model and AdamW": _again(lambda: {"state": torch_state(model, optimizer)}),
        "a quarter of them as DTensors": _again(lambda: distributed),
        "as FlatShards": _again(lambda: buckets),
        "and the digests of them all": lambda: digester.take(flat(), 2),
        "the first time": lambda: flatten(one, role="trainer", rank=0, known=Known()),
    }


def _again(state: Callable[[], dict[str, Any]]) -> Callable[[], FlatState]:
    known = Known()
    return lambda: flatten(state(), role="trainer", rank=0, known=known)
