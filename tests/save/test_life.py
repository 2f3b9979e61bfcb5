"""The life of a save: in flight, written, committed or failed, and what closing does about it."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Checkpointer, IncompleteSaveError, InvalidInputError, Sharded, StoreUnavailableError
from ckptstore.incarnation import Incarnation
from ckptstore.testing import FaultStore
from tests.save.runs import WAIT_S, new_url, save_all


class Gate:
    """Holds the background at a phase until it is opened."""

    def __init__(self, phase: str) -> None:
        self.phase, self.reached, self.open = phase, threading.Event(), threading.Event()

    def __call__(self, phase: str, step: int) -> None:
        if phase == self.phase:
            self.reached.set()
            assert self.open.wait(WAIT_S)


@pytest.fixture
def inc() -> Any:
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc:
        yield inc


def failing(inc: Incarnation) -> tuple[FaultStore, list[str]]:
    """Make every create under the given prefixes fail."""
    prefixes: list[str] = []
    store = FaultStore(
        inc.store,
        choose=lambda call: (
            "unavailable" if call.verb == "create" and any(call.key.startswith(p) for p in prefixes) else None
        ),
    )
    inc.store = store
    return store, prefixes


def test_close_tells_a_failure_also_after_a_wait_was_interrupted(
    inc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def fail(phase: str, step: int) -> None:
        assert gate.wait(WAIT_S)
        raise RuntimeError("broken")

    ckpt = Checkpointer(inc, role="trainer", rank=0, on_phase=fail)
    handle = ckpt.save(1, {"w": torch.ones(2)})

    def interrupted(timeout_s: float) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(handle._done, "result", interrupted)
        handle.result(WAIT_S)
    gate.set()
    with pytest.raises(RuntimeError, match="broken"):
        ckpt.close(WAIT_S)


def test_a_part_is_durable_before_the_checkpoint_is_committed(inc: Any) -> None:
    gate = Gate("part_written")
    with Checkpointer(inc, role="trainer", rank=0, on_phase=gate) as ckpt:
        handle = ckpt.save(1, {"w": torch.ones(2)})
        with pytest.raises(TimeoutError, match="not durable"):
            assert gate.reached.wait(WAIT_S)
            handle.written(0)  # the gate holds it between the part and the telling
        gate.open.set()
        handle.written(WAIT_S)
        assert handle.result(WAIT_S).step == 1 and handle.done()


def test_written_returns_while_other_members_are_missing() -> None:
    with ckptstore.begin(new_url(), {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        save_all(members, 1, [{"w": torch.ones(2)}] * 2)
        handle = members[0].save(2, {"w": torch.ones(2)})
        handle.written(WAIT_S)
        with pytest.raises(TimeoutError, match="still being saved"):
            handle.result(0)
        assert ckptstore.open(inc.url).latest().step == 1  # type: ignore[union-attr]  # it was just saved
        members[1].save(2, {"w": torch.ones(2)}).result(WAIT_S)
        assert handle.result(WAIT_S).step == 2


def test_a_third_save_waits_while_two_are_in_flight(inc: Any) -> None:
    gate = Gate("segments_written")
    ckpt = Checkpointer(inc, role="trainer", rank=0, on_phase=gate)
    first = ckpt.save(1, {"w": torch.ones(2)})
    assert gate.reached.wait(WAIT_S)
    w = torch.zeros(2)
    second = ckpt.save(2, {"w": w})
    w.fill_(9)
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(ckpt.save(3, {"w": torch.full((2,), 3.0)})))
    thread.start()
    assert not first.done() and not second.done() and not third
    gate.open.set()
    thread.join(WAIT_S)
    assert first.done() and second.result(WAIT_S).step == 2 and third[0].result(WAIT_S).step == 3
    run = ckptstore.open(inc.url)
    assert [run.read(step)["w"].tolist() for step in (1, 2, 3)] == [[1, 1], [0, 0], [3, 3]]
    ckpt.close(WAIT_S)


def test_close_waits_for_the_save_in_flight_and_may_be_called_again(inc: Any) -> None:
    gate = Gate("segments_written")
    ckpt = Checkpointer(inc, role="trainer", rank=0, on_phase=gate)
    handle = ckpt.save(1, {"w": torch.ones(2)})
    assert gate.reached.wait(WAIT_S)
    thread = threading.Thread(target=ckpt.close)
    thread.start()
    assert thread.is_alive() and not handle.done()
    gate.open.set()
    thread.join(WAIT_S)
    assert handle.done() and handle.result(0).step == 1
    ckpt.close()
    for act in (lambda: ckpt.save(2, {}), lambda: ckpt.restore({})):
        with pytest.raises(InvalidInputError, match="closed"):
            act()


def test_an_exception_inside_with_does_not_wait_and_what_is_in_flight_may_land(inc: Any) -> None:
    gate = Gate("segments_written")
    with (
        pytest.raises(KeyError, match="mine"),
        Checkpointer(inc, role="trainer", rank=0, on_phase=gate) as ckpt,
    ):
        handle = ckpt.save(1, {"w": torch.ones(2)})
        assert gate.reached.wait(WAIT_S)
        raise KeyError("mine")
    assert not handle.done()
    gate.open.set()
    assert handle.result(WAIT_S).step == 1


@pytest.mark.parametrize("told_by", ["result", "written", "save", "close", "with"])
def test_a_failure_is_told_once(inc: Any, told_by: str) -> None:
    _, prefixes = failing(inc)
    ckpt = Checkpointer(inc, role="trainer", rank=0)
    state = {"w": torch.ones(2)}
    prefixes.append("data/")
    handle = ckpt.save(1, state)
    if told_by == "with":
        with pytest.raises(StoreUnavailableError), ckpt:
            pass
        ckpt.close()
        return
    acts = {
        "result": lambda: handle.result(WAIT_S),
        "written": lambda: handle.written(WAIT_S),
        "save": lambda: (wait([handle._done], WAIT_S), ckpt.save(2, state)),
        "close": lambda: ckpt.close(WAIT_S),
    }
    with pytest.raises(StoreUnavailableError):
        acts[told_by]()
    prefixes.clear()
    if told_by != "close":
        assert ckpt.save(3, state).result(WAIT_S).step == 3
    ckpt.close(WAIT_S)
    with pytest.raises(StoreUnavailableError):
        handle.result(WAIT_S)  # asked again, the handle still knows


def test_a_member_that_fails_is_named_to_the_others() -> None:
    def states(value: float) -> list[dict[str, Any]]:
        return [{"w": Sharded.dim0(torch.full((1,), value), start=rank, size=2)} for rank in range(2)]

    with ckptstore.begin(new_url(), {"trainer": 2}) as inc:
        zero = Checkpointer(inc, role="trainer", rank=0)
        _, prefixes = failing(inc)
        one = Checkpointer(inc, role="trainer", rank=1)
        save_all([zero, one], 1, states(1))
        prefixes.append("data/")
        handles = [member.save(2, state) for member, state in zip((zero, one), states(2), strict=True)]
        with pytest.raises(StoreUnavailableError):
            handles[1].result(WAIT_S)
        with pytest.raises(IncompleteSaveError, match="trainer/1"):
            handles[0].result(WAIT_S)
        prefixes.clear()
        assert save_all([zero, one], 3, states(3)).step == 3


def test_an_unexpected_exception_in_the_background_reaches_the_caller_and_the_others() -> None:
    def hook(phase: str, step: int) -> None:
        if phase == "segments_written" and step == 2:
            raise ValueError("from the hook")

    with ckptstore.begin(new_url(), {"trainer": 2}) as inc:
        members = [
            Checkpointer(inc, role="trainer", rank=0),
            Checkpointer(inc, role="trainer", rank=1, on_phase=hook),
        ]
        save_all(members, 1, [{"w": torch.ones(2)}] * 2)
        handles = [member.save(2, {"w": torch.zeros(2)}) for member in members]
        with pytest.raises(ValueError, match="from the hook"):
            handles[1].result(WAIT_S)
        with pytest.raises(IncompleteSaveError, match="from the hook"):
            handles[0].result(WAIT_S)
        assert save_all(members, 3, [{"w": torch.ones(2)}] * 2).step == 3


def test_steps_never_decrease_and_restore_comes_first(inc: Any) -> None:
    with Checkpointer(inc, role="trainer", rank=0) as ckpt:
        assert ckpt.restore({"w": torch.ones(2)}) is None
        ckpt.save(5, {"w": torch.ones(2)}).result(WAIT_S)
        for step in (4, -1):
            with pytest.raises(InvalidInputError, match="step"):
                ckpt.save(step, {"w": torch.ones(2)})
        assert ckpt.save(5, {"w": torch.ones(2)}).result(WAIT_S).id.number == 1
    with (
        ckptstore.begin(inc.url, {"trainer": 1}) as again,
        Checkpointer(again, role="trainer", rank=0) as ckpt,
    ):
        ckpt.save(6, {"w": torch.ones(2)})
        with pytest.raises(InvalidInputError, match="before the first save"):
            ckpt.restore({"w": torch.ones(2)})


def test_step_zero_is_a_step() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        ckpt.save(0, {"w": torch.ones(2)})
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        assert inc.step == 0 and ckpt.step == 0 and ckpt.restore({"w": torch.zeros(2)}) == 0
