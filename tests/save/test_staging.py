"""The fast path of a save against plain copies: any sizes, dtypes and strides, over the edges of blocks.

Blocks are of two pages here, so that small states cross many of them.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import ckptstore
from ckptstore import (
    BudgetExceededError,
    Checkpointer,
    InvalidInputError,
    Sharded,
    StoreUnavailableError,
    chunksource,
    contribution,
    image,
    sources,
    staging,
)
from ckptstore.chunksource import TOGETHER_MAX, ChunkPlaces
from ckptstore.contribution import Contributor
from ckptstore.image import make_images
from ckptstore.manifest import AttemptId
from ckptstore.staging import StagingMemory
from ckptstore.store.memory import MemoryStore
from ckptstore.stream import SegmentStream
from ckptstore.tensor import Box, TensorSpec
from tests.save.conftest import BLOCK
from tests.save.runs import WAIT_S, bits, new_url, save_all

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.bool, torch.complex128)


def tensor_of(kind: tuple[int, int, bool], seed: int) -> torch.Tensor:
    """A tensor of `kind`: elements, dtype, whether its elements lie in order."""
    count, dtype, straight = kind
    raw = np.random.default_rng(seed).integers(0, 2, count * 32, np.uint8)
    wide = torch.from_numpy(raw)[: count * 2].to(DTYPES[dtype])
    return wide[:count].clone() if straight else wide[::2]


KINDS = st.tuples(
    st.sampled_from([0, 1, 3, 100, 1023, 1024, 1025, 5000]), st.integers(0, len(DTYPES) - 1), st.booleans()
)


@settings(max_examples=25)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=12),
    changed=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=2, max_size=3),
    segment_nbytes=st.sampled_from([3 * BLOCK, 10 * BLOCK, 1 << 30]),
    new=KINDS,
)
@pytest.mark.usefixtures("small_blocks")
def test_what_was_staged_is_read_back_whatever_changed_since(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[int, int, bool]],
    changed: list[list[bool]],
    segment_nbytes: int,
    new: tuple[int, int, bool],
) -> None:
    """Unchanged tensors leave gaps in the image, of which the segment has none; the last save has another structure."""
    url = tmp_path_factory.mktemp("run")
    state = {f"t{n}": tensor_of(kind, n) for n, kind in enumerate(kinds)}
    saved: list[dict[str, Any]] = []
    make = image.make_images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            contribution,
            "make_images",
            lambda specs, boxes, **more: make(specs, boxes, segment_nbytes=segment_nbytes, **more),
        )
        with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
            for step, mask in enumerate([[True] * 12, *changed, [False] * 12]):
                for n, kind in enumerate(kinds):
                    if mask[n]:
                        state[f"t{n}"].copy_(tensor_of(kind, 100 * step + n))
                if step == len(changed) + 1:
                    state["new"] = tensor_of(new, 7)
                saved.append({name: value.clone() for name, value in state.items()})
                ckpt.save(step, state)
    run = ckptstore.open(url)
    assert run.verify().ok
    for step, expected in enumerate(saved):
        read = run.read(step)
        assert {name: bits(value) for name, value in read.items()} == {
            name: bits(value) for name, value in expected.items()
        }
    nbytes = sum(value.nbytes for value in saved[-1].values())
    assert run.checkpoints()[-1].nbytes == nbytes
    for path in url.rglob("*.safetensors"):
        with safe_open(path, "numpy") as file:  # no hole, no tail
            assert list(file.keys())


@pytest.mark.usefixtures("small_blocks")
def test_ranks_that_do_not_know_their_plan_yet_cut_it_out_of_whole_leaves() -> None:
    url = new_url()
    w, odd = torch.arange(30_000, dtype=torch.float32), torch.arange(3000, dtype=torch.int16).reshape(30, 100)
    with ckptstore.begin(url, {"trainer": 3}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(3)]
        for step in range(2):
            save_all(members, step, [{"w": w + step, "odd": odd.t()} for _ in members])
        for member in members:
            member.close(WAIT_S)
    run = ckptstore.open(url)
    for step in range(2):
        read = run.read(step)
        assert torch.equal(read["w"], w + step) and torch.equal(read["odd"], odd.t())


@pytest.mark.usefixtures("small_blocks")
def test_a_header_is_not_laid_over_what_a_later_segment_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole leaves are staged by element size: `b` begins in the block where `a` ends, and its segment comes first."""
    make = image.make_images
    monkeypatch.setattr(
        contribution,
        "make_images",
        lambda *args, **more: make(*args, **more) if "skip" in more else make(*args, segment_nbytes=BLOCK),
    )
    a, b = torch.arange(BLOCK // 4, dtype=torch.float32), torch.arange(BLOCK).to(torch.uint8)
    states = [
        {
            "b": Sharded.dim0(b + rank, start=rank * BLOCK, size=2 * BLOCK),
            "a": Sharded.dim0(a + rank, start=rank * len(a), size=2 * len(a)),
        }
        for rank in range(2)
    ]
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        save_all(members, 0, states)
        for member in members:
            member.close(WAIT_S)
    read = ckptstore.open(url).read(0)
    assert torch.equal(read["a"], torch.cat([a, a + 1])) and torch.equal(read["b"], torch.cat([b, b + 1]))


# -- memory


class SlowStore(MemoryStore):
    """Blocks are taken only while `open` is set."""

    def __init__(self) -> None:
        super().__init__(name="slow")
        self.open, self.asked = threading.Event(), threading.Event()

    def upload(self, key: str, nbytes_max: int) -> Any:
        upload = super().upload(key, nbytes_max)
        write = upload.write

        def slow(block: int, data: Any) -> None:
            self.asked.set()
            assert self.open.wait(WAIT_S)
            write(block, data)

        upload.write = slow
        return upload


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStore]:
    store = SlowStore()
    monkeypatch.setattr(MemoryStore, "named", classmethod(lambda cls, name: store))
    yield store
    store.open.set()


@pytest.mark.usefixtures("small_blocks")
def test_a_save_larger_than_the_budget_waits_for_the_writer_and_never_exceeds_it(slow: SlowStore) -> None:
    state = {f"w{n}": torch.full((BLOCK // 4,), float(n)) for n in range(40)}
    budget = 10 * BLOCK
    with (
        ckptstore.begin(new_url(), {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0, memory_budget=budget) as ckpt,
        ThreadPoolExecutor(1) as thread,
    ):
        memory = ckpt._contributor.memory
        call = thread.submit(ckpt.save, 0, state)
        assert slow.asked.wait(WAIT_S)
        assert not call.done() and memory.nbytes <= budget
        slow.open.set()
        call.result(WAIT_S).result(WAIT_S)
        taken = memory.allocations
        for step in range(1, 4):
            for value in state.values():
                value.add_(1)
            ckpt.save(step, state)
        ckpt.close(WAIT_S)
        assert memory.nbytes_most <= budget
        assert memory.allocations == taken  # nothing is allocated after the first save
    read = ckptstore.open(inc.url).read(3)
    assert all(torch.equal(read[name], value) for name, value in state.items())


def test_a_second_save_takes_no_new_memory_and_the_first_about_one_snapshot() -> None:
    state = {f"w{n}": torch.ones(1 << 20) for n in range(20)}
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        ckpt.save(0, state).result(WAIT_S)
        memory = ckpt._contributor.memory
        taken, most = memory.allocations, memory.nbytes_most
        for step in range(1, 4):
            for value in state.values():
                value.add_(1)
            ckpt.save(step, state).result(WAIT_S)
        assert memory.allocations == taken and memory.nbytes_most == most
        assert most <= 1.05 * sum(value.nbytes for value in state.values()) + staging.BLOCK_NBYTES


@pytest.mark.usefixtures("small_blocks")
def test_a_first_save_takes_what_a_second_may_need_that_no_writer_keeps_up_with(
    slow: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few names, so that the header fills no block alone: that one would be the writer's own, a spare.
    state = {f"w{n}": torch.full((3 * BLOCK // 4,), float(n)) for n in range(14)}
    take, held = StagingMemory.take, list[int]()

    def patient(self: StagingMemory, nbytes: int, **options: Any) -> Any:
        if not options.get("spare"):  # which the writer takes
            with self._changed:
                assert self._changed.wait_for(lambda: self._counts.nbytes_used <= 6 * BLOCK, WAIT_S)
        held.append(self.nbytes)
        return take(self, nbytes, **options)

    slow.open.set()
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        memory = ckpt._contributor.memory
        with monkeypatch.context() as first:
            first.setattr(StagingMemory, "take", patient)
            ckpt.save(0, state).result(WAIT_S)
        assert max(held) < 16 * BLOCK  # blocks went round
        taken = memory.allocations
        for value in state.values():
            value.add_(1)
        slow.open.clear()
        second = ckpt.save(1, state)  # the writer gives next to nothing back before this returns
        assert memory.allocations == taken and memory._counts.nbytes_used > 30 * BLOCK
        slow.open.set()
        second.result(WAIT_S)


@pytest.mark.usefixtures("small_blocks")
def test_a_writer_gets_no_block_while_others_are_copied_if_copies_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = torch.arange(10 * BLOCK // 4, dtype=torch.float32)
    copy, came, piece = sources.Sources.copy, threading.Event(), list[Future[Any]]()
    with (
        ckptstore.begin(new_url(), {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
        ThreadPoolExecutor(1) as thread,
    ):
        contributor = ckpt._contributor
        ckpt.save(0, {"w": w}).result(
            WAIT_S
        )  # takes the memory: who has to wait for that lets the writer write
        staged, _ = contributor.begin(AttemptId(fence=1, step=1), {"w": w}, None, timeout_s=WAIT_S)
        changed = staged.snapshot._changed
        wait = changed.wait
        monkeypatch.setattr(changed, "wait", lambda *args: came.set() or wait(*args))

        def watched(self: Any, number: int, *args: Any) -> None:
            if number == 7:
                piece.append(thread.submit(staged.snapshot.pieces, 0, 10))
                piece[0].add_done_callback(lambda _: came.set())
                assert came.wait(WAIT_S)  # the piece came, or is waited for
                assert piece[0].done() is not contributor._copies_first
            copy(self, number, *args)

        monkeypatch.setattr(sources.Sources, "copy", watched)
        staged.snapshot.stage([w])
        assert piece[0].result(WAIT_S)[0].data.nbytes == 10
        staged.snapshot.discard()
        assert contributor.memory._counts.nbytes_used == 0


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_copies_come_first_where_they_take_all_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        assert ckpt._contributor._copies_first is (cores <= 2)


def test_a_machine_that_has_no_more_memory_ends_reserving_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = StagingMemory(staging.LIMIT_NBYTES_MIN)
    touched, left = staging._touched, [1]

    def scarce(size: int) -> Any:
        if not left:
            raise OSError(errno.ENOMEM, "no memory")
        left.pop()
        return touched(size)

    monkeypatch.setattr(staging, "_touched", scarce)
    memory.reserve([1 << 16] * 3)
    assert memory.nbytes == 1 << 16
    memory.drop(memory.take(1 << 16, timeout_s=0))


def test_nothing_is_reserved_for_saves_that_will_not_come() -> None:
    memory = StagingMemory(staging.LIMIT_NBYTES_MIN)
    memory.stop_reserving()
    memory.reserve([1 << 16])
    assert memory.nbytes == 0


def test_a_free_block_that_is_too_large_for_the_limit_hides_no_room() -> None:
    memory, whole = StagingMemory(staging.LIMIT_NBYTES_MIN), staging.BLOCK_NBYTES
    ordinary = staging.LIMIT_NBYTES_MIN // whole - staging.SPARE_BLOCKS
    held = [memory.take(whole, timeout_s=0) for _ in range(ordinary - 1)]
    held.append(memory.take(whole // 4, timeout_s=0))
    memory.drop(memory.take(whole, timeout_s=0, spare=True))  # free, and more than snapshots may still have
    held.append(memory.take(whole // 4, timeout_s=0))
    assert [block.nbytes for block in held[-2:]] == [whole // 4] * 2
    with pytest.raises(TimeoutError, match="memory_budget="):
        memory.take(whole, timeout_s=0)
    assert memory.nbytes <= staging.LIMIT_NBYTES_MIN


def test_a_budget_that_is_too_small_is_refused() -> None:
    with (
        ckptstore.begin(new_url(), {"trainer": 1}) as inc,
        pytest.raises(InvalidInputError, match=f"{staging.LIMIT_NBYTES_MIN}"),
    ):
        Checkpointer(inc, role="trainer", rank=0, memory_budget=1 << 20)


@pytest.mark.usefixtures("small_blocks")
def test_ranks_that_must_copy_all_they_hold_say_what_budget_they_need() -> None:
    with ckptstore.begin(new_url(), {"trainer": 2}) as inc:
        ckpt = Checkpointer(inc, role="trainer", rank=0, memory_budget=9 * BLOCK)
        with pytest.raises(BudgetExceededError, match="memory_budget="):
            ckpt.save(0, {"w": Sharded.dim0(torch.ones(20 * BLOCK), start=0, size=40 * BLOCK)})
        ckpt.close(WAIT_S)


@pytest.mark.usefixtures("small_blocks")
def test_a_store_that_fails_in_the_middle_of_a_segment_gives_all_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training goes on, the error surfaces, the checkpoint before stands, the next save works."""
    url, write, failing = new_url(), SegmentStream._write, threading.Event()

    def full(self: SegmentStream, number: int, *args: Any) -> None:
        if failing.is_set() and number == 5:
            monkeypatch.setattr(self._upload, "write", _refuse)
        write(self, number, *args)

    monkeypatch.setattr(SegmentStream, "_write", full)
    state = {f"w{n}": torch.full((BLOCK // 4,), float(n)) for n in range(60)}

    def step() -> None:
        for value in state.values():
            value.add_(1)

    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        memory = ckpt._contributor.memory
        ckpt.save(0, state).result(WAIT_S)
        failing.set()
        step()
        handle = ckpt.save(1, state)
        with pytest.raises(StoreUnavailableError, match="full"):
            handle.result(WAIT_S)
        assert memory._counts.nbytes_used == 0
        failing.clear()
        step()
        assert ckpt.save(2, state).result(WAIT_S).step == 2
        assert memory._counts.nbytes_used == 0
    run = ckptstore.open(url)
    assert [info.step for info in run.checkpoints()] == [0, 2]
    for number, late in ((2, 0), (0, 2)):
        assert all(torch.equal(v, state[name] - late) for name, v in run.read(number).items())


def _refuse(*_: Any) -> None:
    raise StoreUnavailableError("the disk is full")


def test_a_failure_to_copy_is_raised_by_save_and_gives_the_attempt_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy, broken = sources.Sources.copy, threading.Event()

    def failing(self: Any, *args: Any) -> None:
        if broken.is_set():
            raise RuntimeError("the device is gone")
        copy(self, *args)

    monkeypatch.setattr(sources.Sources, "copy", failing)
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        broken.set()
        with pytest.raises(RuntimeError, match="device is gone"):
            ckpt.save(0, {"w": torch.ones(3)})
        broken.clear()
        assert ckpt.save(0, {"w": torch.ones(3)}).result(WAIT_S).id.number == 1
        assert ckpt._contributor.memory._counts.nbytes_used == 0


# -- processes


def test_a_fork_of_the_process_is_told_to_make_its_own(tmp_path: Path) -> None:
    with ckptstore.begin(tmp_path, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        ckpt.save(0, {"w": torch.ones(3)}).result(WAIT_S)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ckpt.save(1, {"w": torch.ones(3)})
            except InvalidInputError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        told = os.read(read, 10_000).decode()
        os.waitpid(pid, 0)
        os.close(read)
        assert "fork" in told and "make a new one" in told
        assert ckpt.save(1, {"w": torch.ones(3)}).result(WAIT_S).step == 1


def _save_from(token: str, step: int) -> None:
    with Checkpointer(token, role="trainer", rank=0) as ckpt:
        ckpt.save(step, {"w": torch.full((3,), float(step))}).result(WAIT_S)


def test_a_spawned_process_saves_with_the_token(tmp_path: Path) -> None:
    with ckptstore.begin(tmp_path, {"trainer": 1}) as inc:
        child = multiprocessing.get_context("spawn").Process(target=_save_from, args=(inc.token, 4))
        child.start()
        child.join(WAIT_S)
        assert child.exitcode == 0
    assert ckptstore.open(tmp_path).read(4)["w"].tolist() == [4.0] * 3


# -- pieces


@given(sizes=st.lists(st.integers(0, 3000), max_size=30), most=st.integers(1, 4000))
def test_images_hold_every_chunk_once_and_end_to_end(sizes: list[int], most: int) -> None:
    specs = [TensorSpec(name=f"r/{n}", dtype="uint8", shape=(n,)) for n in sizes]
    boxes = [Box.whole(spec.shape) for spec in specs]
    images = make_images(specs, boxes, skip={0}, segment_nbytes=most)
    chunks = sorted(chunk for image in images for chunk in image.chunks)
    assert chunks == list(range(1, len(sizes)))
    for each in images:
        at = each.header.nbytes
        for start, size in zip(each.starts, each.sizes, strict=True):
            assert start == at
            at += size
        assert at == each.nbytes
        assert sum(each.sizes) <= most or len(each.chunks) == 1


@given(
    chunks=st.lists(
        st.tuples(st.integers(0, 1200) | st.just(300_000), st.sampled_from([0, 0, 0, 8])), max_size=200
    ),
    segment_nbytes=st.sampled_from([5000, 1 << 30]),
)
def test_chunks_that_are_taken_at_once_are_one_piece_of_one_block(
    chunks: list[tuple[int, int]], segment_nbytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunksource, "BLOCK_NBYTES", BLOCK)
        specs = [
            TensorSpec(name=f"r/{n}", dtype="uint8", shape=(size,)) for n, (size, _) in enumerate(chunks)
        ]
        images = make_images(specs, [Box.whole(spec.shape) for spec in specs], segment_nbytes=segment_nbytes)
        place, at = [-1] * len(chunks), 0
        for image in images:
            for chunk in image.chunks:
                place[chunk] = at + chunks[chunk][1]
                at = place[chunk] + chunks[chunk][0]
        places = ChunkPlaces.of(images, place, at // BLOCK + 1)
    assert [sum(block in each for each in places.blocks) for block in range(at // BLOCK + 1)] == places.uses
    for image in images:
        assert [n for run in places.runs[image] for n in run] == list(range(len(image.chunks)))
        for run in places.runs[image]:
            taken = [image.chunks[n] for n in run]
            starts, sizes = [place[chunk] for chunk in taken], [chunks[chunk][0] for chunk in taken]
            assert len(run) <= chunksource.TOGETHER_MAX
            if len(run) > 1:
                assert starts == [starts[0] + sum(sizes[:n]) for n in range(len(run))]
                assert starts[0] // BLOCK == (starts[0] + sum(sizes) - 1) // BLOCK


def test_neighbours_are_taken_together() -> None:
    specs = [TensorSpec(name=f"r/{n:02}", dtype="uint8", shape=(1000,)) for n in range(2 * TOGETHER_MAX)]
    images = make_images(specs, [Box.whole(spec.shape) for spec in specs])
    places = ChunkPlaces.of(images, images[0].starts, 1)
    assert places.runs[images[0]] == [range(TOGETHER_MAX), range(TOGETHER_MAX, 2 * TOGETHER_MAX)]


def test_an_interrupt_before_the_first_block_does_not_leave_the_writer_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Contributor.stage

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(Contributor, "stage", stage)
        raise KeyboardInterrupt

    monkeypatch.setattr(Contributor, "stage", interrupted)
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(0, {"w": torch.ones(3)})
        assert ckpt.save(1, {"w": torch.ones(3)}).result(WAIT_S).step == 1
