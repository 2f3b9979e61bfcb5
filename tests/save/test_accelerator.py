"""Tensors on an accelerator: what is stored is what they were at the call, whenever the device does its copies.

The device is a fake (`devices.py`) that does things as late or as early as it may. That these tests see a save which
forgets to wait is shown by planting each such bug.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import Checkpointer, InvalidInputError, Sharded, staging
from ckptstore.image import make_images
from ckptstore.interop import torch_device
from ckptstore.snapshot import CopyPlan, Snapshot, whole_leaves
from ckptstore.staging import StagingMemory
from ckptstore.state import flatten
from ckptstore.transfer import Transfer
from ckptstore.writer import PartWriter
from tests.save.conftest import BLOCK
from tests.save.devices import Devices, Gate
from tests.save.runs import WAIT_S, bits, new_url, save_all

pytestmark = pytest.mark.usefixtures("small_blocks")
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.bool, torch.complex64)
MAIN = threading.main_thread().name


def tensor_of(count: int, dtype: torch.dtype, straight: bool, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 2, count * 2, np.uint8)
    wide = torch.from_numpy(raw).to(dtype)
    return wide[:count].clone() if straight else wide[::2]


LEAVES = st.tuples(
    st.sampled_from([0, 1, 3, 100, 1023, 1025, 5000]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([None, 0, 0, 1]),
)


@settings(max_examples=40, deadline=None)
@given(
    leaves=st.lists(LEAVES, min_size=1, max_size=12),
    early=st.tuples(st.booleans(), st.booleans()),
    lazy=st.booleans(),
    pins=st.booleans(),
    steps=st.integers(1, 3),
)
def test_what_streams_were_given_before_a_save_is_stored_and_nothing_later(
    leaves: list[tuple[int, torch.dtype, bool, int | None]],
    early: tuple[bool, bool],
    lazy: bool,
    pins: bool,
    steps: int,
) -> None:
    devices = Devices(early_kernels=early[0], early_copies=early[1], count=2)
    devices.pins = pins
    state = {f"t{n}": tensor_of(*leaf[:3], seed=n) for n, leaf in enumerate(leaves)}
    truth = {name: value.clone() for name, value in state.items()}
    for n, leaf in enumerate(leaves):
        if leaf[3] is not None:
            devices.put(state[f"t{n}"], leaf[3])

    def update() -> None:
        for name, value in state.items():
            devices.kernel(value, lambda t: t.copy_(t.logical_not()))
            truth[name] = truth[name].logical_not().to(value.dtype)

    url, saved = new_url(), list[dict[str, torch.Tensor]]()
    with (
        devices.installed(),
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        for step in range(steps):
            update()
            saved.append(dict(truth))
            ckpt.save(step, state, lazy=lazy).wait_staged(WAIT_S)
            update()
    assert not devices.broken
    run = ckptstore.open(url)
    for step, expected in enumerate(saved):
        read = run.read(step)
        assert {name: bits(value) for name, value in read.items()} == {
            name: bits(value) for name, value in expected.items()
        }


# -- each wait is needed: scenarios that say what went wrong, and the bugs that they must see


def weights(devices: Devices, count: int = 6) -> dict[str, torch.Tensor]:
    return {f"w{n}": devices.put(torch.full((BLOCK // 4,), float(n))) for n in range(count)}


def differences(url: str, expected: dict[str, torch.Tensor], step: int = 1) -> list[str]:
    read = ckptstore.open(url).read(step)
    return [name for name, value in expected.items() if not torch.equal(read[name], value)]


def values_still_being_computed() -> list[str]:
    """Kernels run late, copies early."""
    devices, url = Devices(early_kernels=False, early_copies=True), new_url()
    state = weights(devices)
    expected = {name: value + 1 for name, value in state.items()}
    with (
        devices.installed(),
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        for value in state.values():
            devices.kernel(value, lambda t: t.add_(1))
        ckpt.save(1, state)
    return [*devices.broken, *differences(url, expected)]


def values_changed_after_the_call() -> list[str]:
    """Copies run late, kernels at once; the writer waits for nothing before the trainer has gone on."""
    devices, url, gate = Devices(), new_url(), Gate(MAIN, "ckptstore-stage")
    state = weights(devices)
    expected = {name: value.clone() for name, value in state.items()}
    devices.waiting = gate
    with (
        devices.installed(),
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        ckpt.save(1, state)
        for value in state.values():
            devices.kernel(value, lambda t: t.fill_(-1))
        gate.open.set()
    return [*devices.broken, *differences(url, expected)]


def staged_of(
    devices: Devices, state: dict[str, Any], limit_nbytes: int = 64 * BLOCK
) -> tuple[Snapshot, StagingMemory, Any]:
    flat = flatten(state, role="trainer", rank=0)
    plan = whole_leaves(flat.structure)
    images = make_images(flat.structure.specs, flat.structure.boxes)
    memory = StagingMemory(limit_nbytes, pin=devices.pin)
    transfer = Transfer.of(devices, flat.data, tuple(-1 if devices.device_of(d) else 0 for d in flat.data))
    copies = CopyPlan.of(flat.structure, plan, images)
    return Snapshot(copies, memory, timeout_s=WAIT_S, transfer=transfer), memory, flat


def blocks_that_a_writer_takes_early() -> list[str]:
    """The writer comes first: who stages waits for the device only when all is written."""
    devices, gate = Devices(), Gate(MAIN)
    with devices.installed():
        state = weights(devices)
        snapshot, _, flat = staged_of(devices, state)
        devices.waiting = gate
        wrong = []
        with ThreadPoolExecutor(1) as thread:
            snapshot.follow()
            staged = thread.submit(snapshot.stage, flat.data)
            for place, tensor in zip(snapshot.plan.place, flat.data, strict=True):
                stored = b"".join(piece.data.tobytes() for piece in snapshot.pieces(place, tensor.nbytes))
                if stored != tensor.numpy().tobytes():
                    wrong.append(f"{place} is not as it was")
            gate.open.set()
            staged.result(WAIT_S)
        snapshot.discard()
    return [*devices.broken, *wrong]


def blocks_of_a_writer_that_fails() -> list[str]:
    """The writer gives the snapshot up while a device has yet to copy to each block."""
    devices, gate = Devices(), Gate(MAIN)
    with devices.installed():
        snapshot, memory, flat = staged_of(devices, weights(devices))
        devices.waiting = gate
        with ThreadPoolExecutor(1) as thread:
            snapshot.follow()
            staged = thread.submit(snapshot.stage, flat.data)
            assert gate.reached.wait(WAIT_S)  # all is queued
            snapshot.discard()
            gate.open.set()
            staged.result(WAIT_S)
        devices.synchronize()
        return [*devices.broken, *(["memory is not given back"] if memory._counts.nbytes_used else [])]


def a_copy_that_fails_half_way_through_a_block() -> list[str]:
    devices = Devices()
    with devices.installed():
        state = {f"w{n}": devices.put(torch.full((BLOCK // 8,), float(n))) for n in range(6)}
        snapshot, memory, flat = staged_of(devices, state)
        devices.fail_at = 2  # the second of a block
        snapshot.follow()
        with pytest.raises(RuntimeError, match="device is gone"):
            snapshot.stage(flat.data)
        snapshot.discard()
        devices.synchronize()
        return [*devices.broken, *(["memory is not given back"] if memory._counts.nbytes_used else [])]


def a_lazy_save_whose_tensor_is_changed_by_the_trainer() -> list[str]:
    """All is queued and nothing copied when the trainer changes a tensor: the save must fail, not be torn."""
    devices, url, gate = Devices(), new_url(), Gate(MAIN, tells="ckptstore-stage")
    state = weights(devices)
    devices.waiting = gate
    with (
        devices.installed(),
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        handle = ckpt.save(1, state, lazy=True)
        assert gate.reached.wait(WAIT_S)
        devices.kernel(state["w0"], lambda t: t.fill_(-1))
        gate.open.set()
        try:
            handle.result(WAIT_S)
        except InvalidInputError as error:
            return [*devices.broken] if "w0" in str(error) else [str(error)]
    return [*devices.broken, "a torn state was stored"]


def a_save_that_is_interrupted_while_it_waits() -> list[str]:
    """The tensors live until the device has copied them, although nobody else holds them any more."""
    devices, url = Devices(), new_url()
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> None:
        if threading.current_thread() is threading.main_thread() and interrupts:
            raise interrupts.pop()

    devices.waiting = interrupted
    gate = Gate(MAIN)
    with (
        devices.installed(),
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(PartWriter, "write", _late(gate, PartWriter.write))
        try:
            ckpt.save(1, weights(devices))
        except KeyboardInterrupt as error:
            error.with_traceback(None)  # whose frames would hold the tensors
        else:
            devices.broken.append("nothing was interrupted")
        gc.collect()
        gate.open.set()
        ckpt.close(WAIT_S)
    devices.synchronize()
    return devices.broken


def _late(gate: Gate, write: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **more: Any) -> Any:
        gate()
        return write(*args, **more)

    return late


SCENARIOS = (
    values_still_being_computed,
    values_changed_after_the_call,
    blocks_that_a_writer_takes_early,
    blocks_of_a_writer_that_fails,
    a_copy_that_fails_half_way_through_a_block,
    a_lazy_save_whose_tensor_is_changed_by_the_trainer,
    a_save_that_is_interrupted_while_it_waits,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_nothing_goes_wrong_with(scenario: Callable[[], list[str]]) -> None:
    assert not scenario()


def _follows_nobody(transfer: Transfer) -> None:
    transfer._follows = True


def _checks_before_it_waits(snapshot: Snapshot) -> None:
    if snapshot._check is None:
        assert snapshot.transfer is not None
        snapshot.transfer.finish()


def _lets_go(snapshot: Snapshot) -> None:
    try:
        assert snapshot.transfer is not None
        snapshot.transfer.finish()
    except BaseException as error:
        snapshot.fail(error)
        raise
    finally:
        snapshot._copied_from = ()


PLANTED = {
    "the side stream does not follow the trainer's": (
        (Transfer, "follow", _follows_nobody),
        values_still_being_computed,
    ),
    "the caller is not held": ((Snapshot, "_finish", lambda _: None), values_changed_after_the_call),
    "the writer does not wait": ((Snapshot, "_arrive", lambda *_: None), blocks_that_a_writer_takes_early),
    "blocks are reused at once": ((Snapshot, "_arrive", lambda *_: None), blocks_of_a_writer_that_fails),
    "blocks have no mark": ((Snapshot, "_mark", lambda *_: None), blocks_of_a_writer_that_fails),
    "a block that fails has no mark": (
        (Snapshot, "_mark", lambda *_: None),
        a_copy_that_fails_half_way_through_a_block,
    ),
    "changes are looked for before all is copied": (
        (Snapshot, "_finish", _checks_before_it_waits),
        a_lazy_save_whose_tensor_is_changed_by_the_trainer,
    ),
    "tensors are let go": ((Snapshot, "_finish", _lets_go), a_save_that_is_interrupted_while_it_waits),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_save_that_forgets_to_wait_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (where, name, wrong), scenario = PLANTED[bug]
    monkeypatch.setattr(where, name, wrong)
    assert scenario()


# -- few copies, and what memory they go to


def test_small_tensors_of_a_device_are_joined_there_and_copied_as_one() -> None:
    devices, url = Devices(), new_url()
    state: dict[str, Any] = {f"w{n}": devices.put(torch.full((25,), float(n))) for n in range(30)}
    state |= {f"b{n}": devices.put(torch.full((25,), n, dtype=torch.uint8)) for n in range(30)}
    expected = {name: value.clone() for name, value in state.items()}
    with (
        devices.installed(),
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        ckpt.save(1, state)
    nbytes = sum(value.nbytes for value in state.values())
    assert sum(devices.copies) >= 60 and len(devices.copies) <= nbytes // BLOCK + 2
    assert not differences(url, expected)


def test_a_state_in_host_memory_takes_no_pinned_memory_and_follows_no_stream() -> None:
    devices = Devices()
    with (
        devices.installed(),
        ckptstore.begin(new_url(), {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        for step in range(2):
            ckpt.save(step, {"w": torch.ones(5000), "odd": torch.ones(50, 2).t(), "a": np.ones(3)})
    assert not devices.pinned_nbytes and not any(stream.todo for stream in devices.side.values())


@pytest.mark.parametrize("budget", [10 * BLOCK, 40 * BLOCK, None])
@pytest.mark.parametrize("lies", ["all", "half"])
def test_pinned_memory_is_of_the_same_budget_and_taken_once(lies: str, budget: int | None) -> None:
    devices, url = Devices(), new_url()
    state = {f"w{n}": torch.full((BLOCK // 4,), float(n)) for n in range(16)}
    state |= {f"h{n}": torch.full((BLOCK // 2,), n, dtype=torch.bfloat16) for n in range(16)}
    for name, value in state.items():
        if lies == "all" or name.startswith("h"):
            devices.put(value)
    with (
        devices.installed(),
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0, memory_budget=budget) as ckpt,
    ):
        memory = ckpt._contributor.memory
        ckpt.save(0, state).result(WAIT_S)
        taken, pinned = memory.allocations, devices.pinned_nbytes
        for step in range(1, 4):
            for value in state.values():
                devices.kernel(value, lambda t: t.add_(1))
            ckpt.save(step, state).result(WAIT_S)
        assert memory.nbytes_most <= memory.limit_nbytes
        if budget is None:
            # A writer's spare block may have been a pinned one, and its next of the other kind.
            assert memory.allocations <= taken + staging.SPARE_BLOCKS
            assert devices.pinned_nbytes <= pinned + staging.SPARE_BLOCKS * BLOCK
            on_devices = sum(v.nbytes for v in state.values() if devices.device_of(v))
            assert on_devices <= pinned <= on_devices + 2 * BLOCK
        assert 0 < pinned <= memory.limit_nbytes
    assert not devices.broken and not differences(url, state, step=3)


def test_the_first_save_of_several_ranks_pins_whole_leaves_and_keeps_memory_for_the_next() -> None:
    devices, url = Devices(), new_url()
    with devices.installed(), ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        parts = [devices.put(torch.arange(3 * BLOCK) + rank) for rank in range(2)]
        for step in range(3):
            states = [
                {"w": Sharded.dim0(part, start=rank * 3 * BLOCK, size=6 * BLOCK), "host": torch.ones(4)}
                for rank, part in enumerate(parts)
            ]
            save_all(members, step, states)
            for part in parts:
                devices.kernel(part, lambda t: t.add_(1))
        for member in members:
            member.close(WAIT_S)
    assert not devices.broken
    for step in range(3):
        read = ckptstore.open(url).read(step)["w"]
        assert torch.equal(read, torch.cat([torch.arange(3 * BLOCK) + rank + step for rank in range(2)]))


def test_without_pinned_memory_ordinary_memory_serves_and_the_pin_is_asked_for_once() -> None:
    asked = []
    memory = StagingMemory(8 * BLOCK, pin=lambda nbytes: asked.append(nbytes))
    blocks = [memory.take(BLOCK, timeout_s=0, pinned=True) for _ in range(3)]
    memory.reserve([], [BLOCK] * 4)
    assert asked == [BLOCK] and not any(block.pinned for block in blocks)
    assert memory._held == {(BLOCK, False): 4, (BLOCK, True): 0} and memory.allocations == 4


def test_a_torch_without_pinned_memory_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="no pinned memory"):
        assert torch_device.pinned_words(staging._SMALL) is None


def test_blocks_of_the_other_kind_are_used_rather_than_thrown_away() -> None:
    devices = Devices()
    memory = StagingMemory(8 * BLOCK, pin=devices.pin)
    for block in [memory.take(BLOCK, timeout_s=0) for _ in range(4)]:
        memory.drop(block)
    first = memory.take(BLOCK, timeout_s=0, pinned=True)
    assert first.pinned  # there was room
    rest = [memory.take(BLOCK, timeout_s=0, pinned=True) for _ in range(3)]
    assert [block.pinned for block in rest] == [True] * 3 and memory.nbytes == 8 * BLOCK
    for block in (first, *rest):
        memory.drop(block)
    taken = memory.allocations
    held = [memory.take(BLOCK, timeout_s=0) for _ in range(4)]
    assert not any(block.pinned for block in held) and memory.allocations == taken
