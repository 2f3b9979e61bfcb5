"""A lazy save returns before it has copied, holds the next parameter update, and never stores a torn value."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Checkpointer, InvalidInputError
from ckptstore.interop import torch_hook
from ckptstore.lazy import LazyStaging
from ckptstore.sources import Sources
from tests.save.runs import WAIT_S, new_url


class Gate:
    """Copying waits before each block until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, copy = Gate(), Sources.copy

    def late(self: Sources, *args: Any) -> None:
        gate.reached.set()
        assert gate.open.wait(WAIT_S)
        copy(self, *args)

    monkeypatch.setattr(Sources, "copy", late)
    yield gate
    gate.open.set()
    assert not torch_hook._waits


class Training:
    """Two optimizers, two micro-batches a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.optimizers = [
            torch.optim.AdamW(self.body.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9),
        ]

    def accumulate(self) -> None:
        for _ in range(2):
            self.head(self.body(torch.randn(4, 8))).square().mean().backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "body": ckptstore.torch_state(self.body, self.optimizers[0]).state_dict(),
            "head": ckptstore.torch_state(self.head, self.optimizers[1]).state_dict(),
        }


def flat(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: flat(inner) for key, inner in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("first", [0, 1], ids=["adamw", "sgd"])
def test_any_optimizer_waits_for_the_copy_and_gradients_do_not(gate: Gate, first: int) -> None:
    training = Training()
    training.accumulate()
    gate.open.set()
    training.update()
    gate.open.clear()
    gate.reached.clear()
    url = new_url()
    with (
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
        ThreadPoolExecutor(1) as thread,
    ):
        expected = flat(training.state())
        handle = ckpt.save(1, training.state(), lazy=True)
        assert gate.reached.wait(WAIT_S)
        training.accumulate()  # forward and backward wait for nothing
        step = thread.submit(training.optimizers[first].step)
        with pytest.raises(TimeoutError):
            handle.wait_staged(0.0)
        assert not step.done() and same(flat(training.state()), expected)
        gate.open.set()
        step.result(WAIT_S)
        handle.wait_staged(WAIT_S)
        training.update()
        assert handle.result(WAIT_S).step == 1
        assert not same(flat(training.state()), expected)
    read = ckptstore.open(url).read(1)
    assert same(read, expected)


def test_without_the_hook_a_torn_state_would_be_noticed_and_is_refused(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: optimizers do not wait."""
    monkeypatch.setattr(torch_hook, "_before_step", lambda *_: None)
    monkeypatch.setattr(torch_hook, "hold_steps", lambda wait: None)
    training = Training()
    training.accumulate()
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc:
        ckpt = Checkpointer(inc, role="trainer", rank=0)
        handle = ckpt.save(1, training.state(), lazy=True)
        assert gate.reached.wait(WAIT_S)
        training.update()
        gate.open.set()
        with pytest.raises(InvalidInputError, match=r"head|body"):
            handle.result(WAIT_S)
        ckpt.close(WAIT_S)


def test_what_is_changed_by_hand_is_refused_by_name_and_the_checkpoint_before_stands(gate: Gate) -> None:
    url = new_url()
    state = {"kept": torch.ones(5), "moved": torch.ones(5)}
    with ckptstore.begin(url, {"trainer": 1}) as inc:
        ckpt = Checkpointer(inc, role="trainer", rank=0)
        gate.open.set()
        ckpt.save(1, state).result(WAIT_S)
        gate.open.clear()
        gate.reached.clear()
        handle = ckpt.save(2, state, lazy=True)
        assert gate.reached.wait(WAIT_S)
        state["moved"].add_(1)
        gate.open.set()
        with pytest.raises(InvalidInputError, match=r"trainer/moved changed"):
            handle.result(WAIT_S)
        assert ckpt.save(3, state, lazy=True).result(WAIT_S).step == 3
        ckpt.close(WAIT_S)
    run = ckptstore.open(url)
    assert [info.step for info in run.checkpoints()] == [1, 3]
    assert run.read(3)["moved"].tolist() == [2] * 5


def test_what_does_not_count_its_changes_is_copied_at_the_call(gate: Gate) -> None:
    url, array = new_url(), np.arange(4)
    with torch.inference_mode():
        silent = torch.ones(3)
    with (
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        values = {"array": array, "silent": silent, "steps": [1]}
        handle = ckpt.save(1, values, lazy=True)
        assert gate.reached.wait(WAIT_S)
        array[:] = 9
        with torch.inference_mode():
            silent.fill_(9)
        values["steps"].append(2)
        gate.open.set()
        handle.result(WAIT_S)
    read = ckptstore.open(url).read(1)
    assert read["array"].tolist() == [0, 1, 2, 3] and read["silent"].tolist() == [1] * 3
    assert read["steps"] == [1]


def test_a_second_save_looks_at_other_memory_only_when_the_first_is_copied(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, order, look, wait = new_url(), list[str](), Sources.look, LazyStaging.wait

    def looking(self: Sources, *args: Any) -> None:
        order.append("look")
        look(self, *args)

    def waiting(self: LazyStaging, timeout_s: float | None = None) -> None:
        wait(self, timeout_s)
        order.append("copied")

    monkeypatch.setattr(Sources, "look", looking)
    monkeypatch.setattr(LazyStaging, "wait", waiting)
    with (
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
        ThreadPoolExecutor(1) as thread,
    ):
        first = ckpt.save(1, {"w": torch.ones(4)}, lazy=True)
        assert gate.reached.wait(WAIT_S)
        second = thread.submit(ckpt.save, 2, {"w": torch.zeros(4)})
        assert not first.done() and not second.done()
        gate.open.set()
        assert second.result(WAIT_S).result(WAIT_S).step == 2
    assert order == ["look", "copied", "look"]
    run = ckptstore.open(url)
    assert run.read(1)["w"].tolist() == [1] * 4 and run.read(2)["w"].tolist() == [0] * 4
