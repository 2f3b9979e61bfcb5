"""What is changed right after `save` returns is not in the checkpoint."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Checkpointer, Frozen, Ledger, PerRank, Sharded
from ckptstore.contribution import Contributor
from tests.aliasing import alias_instead_of_copying
from tests.save.runs import WAIT_S, bits, new_url


def make(rank: int, step: int, ranks: int) -> dict[str, Any]:
    ledger = Ledger(1)
    ledger.issue(5)
    return {
        "plain": torch.full((64, 3), float(step)),
        "transposed": torch.full((3, 5), float(step)).t(),
        "mine": Sharded.dim0(torch.full((2, 9), float(100 * rank + step)), start=2 * rank, size=2 * ranks),
        "boxes": [
            Sharded(torch.full((3,), float(step + n)), global_shape=(6 * ranks,), offset=(6 * rank + 3 * n,))
            for n in range(2)
        ],
        "param": nn.Parameter(torch.full((4,), float(step))),
        "array": np.full((4, 4), step),
        "rng": PerRank({"t": torch.full((3,), step), "n": rank, "l": [rank, [step]]}),
        "list": [1, [2, {"x": step}], "a"],
        "bytes": bytearray(b"abc"),
        "dict": {"a": {"b": step}},
        "ledger": ledger,
        "frozen": Frozen({"reference": torch.full((6,), 5.0), "note": ["kept"]}),
    }  # fmt: skip


def spoil(value: Any) -> None:
    """Change everything in place that can be changed."""
    if isinstance(value, torch.Tensor):
        value.detach().copy_(torch.full_like(value.detach(), -1))
    elif isinstance(value, np.ndarray):
        value.fill(-1)
    elif isinstance(value, Sharded):
        spoil(value.tensor)
    elif isinstance(value, PerRank):
        spoil(value.value)
        value.value = None
    elif isinstance(value, Frozen):
        spoil(value.tree)
        value.tree = {}
    elif isinstance(value, Ledger):
        value.consume(value.issue(3), step=1)
    elif isinstance(value, bytearray):
        value[:] = b"spoiled"
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else list(value):
            spoil(item)
        value.clear()


def expected(step: int, ranks: int) -> dict[str, Any]:
    states = [make(rank, step, ranks) for rank in range(ranks)]
    full = {
        **states[0],
        "bytes": b"abc",
        "frozen": states[0]["frozen"].tree,
        "param": states[0]["param"].detach(),
    }
    full["mine"] = torch.cat([state["mine"].tensor for state in states])
    full["boxes"] = torch.cat([shard.tensor for state in states for shard in state["boxes"]])
    full["rng"] = PerRank([state["rng"].value for state in states])
    return full


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written in the background before this is set."""
    event, contribute = threading.Event(), Contributor.contribute

    def late(self: Contributor, *args: Any, **options: Any) -> Any:
        assert event.wait(WAIT_S)
        return contribute(self, *args, **options)

    monkeypatch.setattr(Contributor, "contribute", late)
    return event


def save_and_spoil(url: Any, ranks: int, gate: threading.Event) -> None:
    with ckptstore.begin(url, {"trainer": ranks}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(ranks)]
        for step in range(3):  # the first exchanges layouts in the background, the others know the plan
            gate.clear()
            handles = []
            for rank, member in enumerate(members):
                state = make(rank, step, ranks)
                handles.append(member.save(step, state))
                spoil(state)
            gate.set()
            for handle in handles:
                handle.result(WAIT_S)
        for member in members:
            member.close(WAIT_S)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["memory", "local"])
def test_what_changes_after_save_returns_is_not_saved(
    ranks: int, where: str, tmp_path: Path, gate: threading.Event
) -> None:
    url = new_url() if where == "memory" else tmp_path / "run"
    save_and_spoil(url, ranks, gate)
    run = ckptstore.open(url)
    for step in range(3):
        read = run.read(step)
        for name, value in expected(step, ranks).items():
            assert bits(read[name]) == bits(value), (step, name)


def test_a_snapshot_that_aliases_is_caught(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    alias_instead_of_copying(monkeypatch)
    url = new_url()
    save_and_spoil(url, 2, gate)
    read = ckptstore.open(url).read(0)
    assert bits(read["plain"]) != bits(expected(0, 2)["plain"])


def test_later_saves_do_not_change_earlier_checkpoints_of_the_same_memory() -> None:
    """Staging memory is reused: what was written from it stays."""
    url = new_url()
    rng = random.Random(0)
    sizes = [1, 300_000, 7, 50_000]
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        for step, size in enumerate(sizes):  # the memory grows and is reused
            tensor = torch.full((size,), step, dtype=torch.int16)
            ckpt.save(step, {"w": tensor})
            tensor.fill_(rng.randrange(100))
    run = ckptstore.open(url)
    for step, size in enumerate(sizes):
        assert torch.equal(run.read(step)["w"], torch.full((size,), step, dtype=torch.int16))
