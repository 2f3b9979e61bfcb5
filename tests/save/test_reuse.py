"""What did not change is referenced, not written again, and never longer than allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Checkpointer, CheckpointInfo, CorruptError, Frozen, Sharded
from ckptstore.sources import Sources
from ckptstore.staging import Block
from tests.save.runs import WAIT_S, bits, new_url, restore, save_all, store_of

MOVING, STILL, FROZEN = 40, 400, 4000  # bytes


def state(rank: int, ranks: int, step: int) -> dict[str, Any]:
    """`still` is cut over the ranks, `moving` changes at every step, `frozen` is promised not to."""
    rows = 20 // ranks
    still = torch.arange(100.0).reshape(20, 5)[rank * rows : (rank + 1) * rows].clone()
    return {
        "moving": torch.full((10,), float(step)),
        "still": Sharded.dim0(still, start=rank * rows, size=20),
        "frozen": Frozen({"w": torch.full((1000,), 3.0)}),
    }


def run_steps(
    url: str, ranks: int, steps: range, *, rewrite_every: int = 100, restored: bool = False
) -> list[CheckpointInfo]:
    infos = []
    with ckptstore.begin(url, {"trainer": ranks}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(ranks)]
        for rank, member in enumerate(members):
            writer = member._contributor.writer
            member._contributor.writer = replace(writer, rewrite_every=rewrite_every)
            if restored:
                target = state(rank, ranks, -1)
                member.restore(target)
        for step in steps:
            infos.append(save_all(members, step, [state(rank, ranks, step) for rank in range(ranks)]))
        for member in members:
            member.close(WAIT_S)
    return infos


def check_all(url: str, ranks: int) -> None:
    run = ckptstore.open(url)
    assert run.verify().ok
    for info in run.checkpoints():
        read = run.read(info.step)
        assert read["moving"].tolist() == [info.step] * 10
        assert bits(read["still"]) == bits(torch.arange(100.0).reshape(20, 5))
        assert bits(read["frozen"]["w"]) == bits(torch.full((1000,), 3.0))
    targets = [state(rank, ranks, -5) for rank in range(ranks)]
    restore(url, *targets)
    assert all(
        bits(t["still"].tensor) == bits(state(r, ranks, 0)["still"].tensor) for r, t in enumerate(targets)
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_unchanged_chunks_are_referenced_also_across_a_restart(ranks: int) -> None:
    url = new_url()
    infos = run_steps(url, ranks, range(3))
    infos += run_steps(url, ranks, range(3, 5), restored=True)
    assert [info.nbytes_written for info in infos] == [MOVING + STILL + FROZEN] + [MOVING] * 4
    assert [info.nbytes_reused for info in infos] == [0] + [STILL + FROZEN] * 4
    assert {info.nbytes for info in infos} == {MOVING + STILL + FROZEN}
    written = sum(info.nbytes for info in store_of(url).list("data/"))
    assert written - sum(info.nbytes_written for info in infos) < 4096 * 5 * ranks + 1
    check_all(url, ranks)


def test_an_incarnation_that_did_not_restore_writes_everything() -> None:
    url = new_url()
    run_steps(url, 2, range(1))
    (info,) = run_steps(url, 2, range(1, 2))
    assert info.nbytes_written == MOVING + STILL + FROZEN


def test_on_another_number_of_ranks_what_fits_is_reused_and_all_is_right() -> None:
    url = new_url()
    run_steps(url, 2, range(2))
    infos = run_steps(url, 4, range(2, 5), restored=True)
    assert infos[0].nbytes_written >= MOVING + STILL
    assert [info.nbytes_written for info in infos[1:]] == [MOVING, MOVING]
    infos = run_steps(url, 1, range(5, 7), restored=True)
    assert infos[-1].nbytes_written == MOVING
    check_all(url, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_chunk_is_written_anew_after_so_many_references(ranks: int) -> None:
    url = new_url()
    infos = run_steps(url, ranks, range(4), rewrite_every=2)
    infos += run_steps(url, ranks, range(4, 8), rewrite_every=2, restored=True)
    full = MOVING + STILL + FROZEN
    assert [info.nbytes_written for info in infos] == [
        full,
        MOVING,
        MOVING,
        full,
        MOVING,
        MOVING,
        full,
        MOVING,
    ]
    check_all(url, ranks)


def test_what_is_frozen_is_not_even_read_after_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    copy = Sources.copy

    def counting(self: Sources, number: int, data: Any, block: Block, *more: Any) -> None:
        copied.extend(self.specs[leaf].name for leaf in self._blocks[number].leaf)
        copy(self, number, data, block, *more)

    monkeypatch.setattr(Sources, "copy", counting)
    url = new_url()
    run_steps(url, 2, range(4))
    run_steps(url, 2, range(4, 6), restored=True)
    assert copied.count("trainer/frozen.w") == 4  # by two ranks, in each life before its plan is known
    assert copied.count("trainer/still") == 12
    check_all(url, 2)


def test_a_broken_promise_of_frozen_is_not_noticed_and_the_first_content_stays() -> None:
    """As documented: the caller promises. A new incarnation that does not restore checks in full."""
    url = new_url()
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        reference = torch.ones(10)
        for step in range(2):
            ckpt.save(step, {"reference": Frozen(reference), "step": step}).result(WAIT_S)
            reference.fill_(7)
    run = ckptstore.open(url)
    assert run.read(1)["reference"].tolist() == [1] * 10 and run.read(1)["step"] == 1
    assert run.verify().ok
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        ckpt.save(2, {"reference": Frozen(reference), "step": 2}).result(WAIT_S)
    assert ckptstore.open(url).read(2)["reference"].tolist() == [7] * 10


def test_a_changed_tensor_that_goes_back_to_older_content_is_not_mixed_up() -> None:
    url = new_url()
    values = [1.0, 2.0, 1.0, 1.0, 2.0]
    with ckptstore.begin(url, {"trainer": 1}) as inc, Checkpointer(inc, role="trainer", rank=0) as ckpt:
        infos = [
            ckpt.save(n, {"w": torch.full((5,), value)}).result(WAIT_S) for n, value in enumerate(values)
        ]
    assert [info.nbytes_reused for info in infos] == [0, 0, 0, 20, 0]
    run = ckptstore.open(url)
    assert [run.read(n)["w"][0].item() for n in range(5)] == values


def test_nothing_is_reused_from_a_checkpoint_that_was_marked_bad() -> None:
    url = new_url()
    run_steps(url, 1, range(2))
    store = store_of(url)
    (segment,) = [info.key for info in store.list("data/f0001/s00000001")]
    data = bytearray(store.read(segment))
    data[-1] ^= 1
    store.replace(segment, bytes(data))
    with pytest.raises(CorruptError, match="moving"):
        restore(url, state(0, 1, -1))
    infos = run_steps(url, 1, range(1, 3), restored=True)
    assert infos[0].nbytes_reused == STILL + FROZEN  # of step 0, which is good
    run = ckptstore.open(url)
    assert [(info.step, info.status) for info in run.checkpoints()][-2:] == [(1, "ok"), (2, "ok")]
    assert run.verify(2).ok and not run.verify().ok
