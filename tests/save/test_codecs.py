"""Saves that encode: everything that reads gives back what was saved, and bases live as long as their deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import ckptstore
from ckptstore import Checkpointer, CheckpointInfo, InvalidInputError, Sharded
from ckptstore.chunkbase import ChunkBase, nbytes_of_bases
from ckptstore.chunktable import DELTAS, RAW, ChunkTable
from ckptstore.cli.contents import contents
from ckptstore.codec.base import find_codec
from ckptstore.encoder import DeviceMeter, Encoder, Start
from ckptstore.plan.encode import CodecRules
from ckptstore.store.memory import MemoryStore
from ckptstore.tensor import Box, TensorSpec
from tests.save.runs import WAIT_S, bits, new_url, restore, save_all, store_of

ROWS, COLUMNS = 512, 96


def weights(step: int) -> torch.Tensor:
    """BF16 weights of which each step changes a few, as one of reinforcement learning does."""
    made = torch.Generator().manual_seed(0)
    found = torch.randn(ROWS, COLUMNS, generator=made, dtype=torch.float32).bfloat16()
    for each in range(1, step + 1):
        made.manual_seed(each)
        places = torch.randint(found.numel(), (found.numel() // 100,), generator=made)
        found.view(-1)[places] *= 1.5
    return found


def state(rank: int, ranks: int, step: int) -> dict[str, Any]:
    rows = ROWS // ranks
    own = weights(step)[rank * rows : (rank + 1) * rows].clone()
    return {
        "model": {"w": Sharded.dim0(own, start=rank * rows, size=ROWS), "still": torch.arange(5000.0)},
        "optim": {"w.exp_avg": Sharded.dim0(own.float() * step, start=rank * rows, size=ROWS)},
        "small": torch.tensor([step]),
    }


def run_steps(
    url: str, steps: range, codec: Any, *, ranks: int = 1, device: float | None = None, **options: Any
) -> list[CheckpointInfo]:
    infos = []
    with ckptstore.begin(url, {"trainer": ranks}) as inc:
        members = [
            Checkpointer(inc, role="trainer", rank=rank, codec=codec, **options) for rank in range(ranks)
        ]
        for rank, member in enumerate(members):
            encoder = member._contributor.writer.encoder
            if device is not None and encoder is not None:
                encoder.meter.nbytes_per_s = device
            if steps.start:
                member.restore(state(rank, ranks, 0))
        for step in steps:
            infos.append(save_all(members, step, [state(rank, ranks, step) for rank in range(ranks)]))
        for member in members:
            member.close(WAIT_S)
    return infos


def check_all(url: str, *layouts: int) -> None:
    """Verify in full, read, and restore onto other numbers of ranks."""
    run = ckptstore.open(url)
    assert run.verify(full=True).ok
    for info in run.checkpoints():
        read = run.read(info.step)
        assert bits(read["model"]["w"]) == bits(weights(info.step))
        assert bits(read["optim"]["w.exp_avg"]) == bits(weights(info.step).float() * info.step)
    newest = run.checkpoints()[-1].step
    for ranks in layouts:
        targets = [state(rank, ranks, 0) for rank in range(ranks)]
        restore(url, *targets)
        for rank, target in enumerate(targets):
            wanted = state(rank, ranks, newest)
            assert bits(target["model"]["w"].tensor) == bits(wanted["model"]["w"].tensor)


def table_of(url: str, step: int) -> ChunkTable:
    run = ckptstore.open(url)
    return run.catalog.index(run.catalog.find(step)).table


def codecs_of(url: str, step: int, name: str = "trainer/model.w") -> set[str]:
    table = table_of(url, step)
    rows = np.flatnonzero(table.tensor == table.tensors.find(name))
    return {table.codecs[int(table.codec[row])] for row in rows}


@pytest.mark.parametrize("codec", ["zstd", "byteplane+zstd", "delta", {"bfloat16": "delta", "*": "zstd"}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_whatever_the_codec_all_readers_give_what_was_saved(codec: Any, ranks: int, tmp_path: Path) -> None:
    url = new_url()
    infos = run_steps(url, range(4), codec, ranks=ranks)
    check_all(url, 1, 2, 4)
    if "delta" in str(codec):
        assert codecs_of(url, 3) == {"sparse+zstd"}
        assert infos[3].nbytes_written < infos[0].nbytes_written
    else:
        assert codecs_of(url, 3) == {codec}


def test_tensors_are_sliced_and_compared_lazily() -> None:
    pytest.importorskip("tensorstore")
    url = new_url()
    run_steps(url, range(3), "delta")
    run = ckptstore.open(url)
    found = np.asarray(run.tensor("model.w", step=2)[100:103, 5:9].read().result())
    assert found.astype(np.float32).tolist() == weights(2)[100:103, 5:9].float().tolist()
    compared = ckptstore.diff(url, steps=(1, 2))
    changed = int((weights(1) != weights(2)).sum())
    assert {each.spec.name: each.elements.changed for each in compared.changed}["trainer/model.w"] == changed


def test_bytes_that_are_held_of_another_base_are_not_built_on() -> None:
    """A save that wrote in full and was never committed: its bytes are held, the next delta is on the base before."""
    rng = np.random.default_rng(0)
    old, failed = rng.integers(0, 255, (2, 20_000), np.uint8)
    new = old.copy()
    new[::1000] ^= 1
    store = MemoryStore()
    store.create("data/old", old.tobytes())
    spec = TensorSpec(name="trainer/w", dtype="bfloat16", shape=(10_000,))
    box = Box.whole(spec.shape)
    places = [
        ChunkBase(segment=key, start=0, nbytes=data.size, codec=RAW, digest=xxhash.xxh3_128_digest(data.data))
        for key, data in (("data/failed", failed), ("data/old", old))
    ]
    encoder = Encoder(rules=CodecRules.of("delta"), store=store, bases_nbytes=1 << 20)
    encoder.keep(spec, box, places[0], failed)
    for _ in range(2):  # read back, then held
        form = encoder.encode(spec, box, new, Start(base=places[1], reuses=1))
        assert form is not None and form.base == str(places[1])
        out = old.copy()
        find_codec(form.codec).decode(form.data, out, word_nbytes=2, base=out)
        assert out.tobytes() == new.tobytes()


def test_a_base_is_written_anew_after_rebase_every_checkpoints() -> None:
    url = new_url()
    run_steps(url, range(8), "delta", rebase_every=3)
    full = [step for step in range(8) if codecs_of(url, step) == {RAW}]
    assert full == [0, 3, 6]
    check_all(url, 1)


def test_bases_are_listed_with_witnesses_in_every_checkpoint_that_needs_them() -> None:
    url = new_url()
    run_steps(url, range(4), "delta", ranks=2)
    run = ckptstore.open(url)
    for step in range(1, 4):
        index = run.catalog.index(run.catalog.find(step))
        bases = {ChunkBase.parse(text).segment for text in index.table.base if text}
        assert bases and bases <= {ref.key for ref in index.segments}
        entry = run.catalog.history.fold.commits[index.id]
        assert bases <= set(entry.witnesses)


def test_deltas_never_build_on_deltas() -> None:
    url = new_url()
    run_steps(url, range(6), "delta")
    for step in range(6):
        for text in filter(None, table_of(url, step).base):
            base = ChunkBase.parse(text)
            assert base.codec not in DELTAS and "s00000000-000" in base.segment


def test_a_new_life_reads_its_bases_back() -> None:
    url = new_url()
    run_steps(url, range(3), "delta")
    run_steps(url, range(3, 5), "delta")
    assert codecs_of(url, 3) == codecs_of(url, 4) == {"sparse+zstd"}
    check_all(url, 1, 2)


def test_a_damaged_base_is_not_built_on_again() -> None:
    url = new_url()
    run_steps(url, range(2), "delta")
    store = store_of(url)
    (text, *_) = [t for t in table_of(url, 1).base if t]
    base = ChunkBase.parse(text)
    data = bytearray(store.read(base.segment))
    data[base.start + 1] ^= 1
    store.replace(base.segment, bytes(data))
    report = ckptstore.open(url).verify(step=1)
    assert not report.ok and any(base.segment in each.problem for each in report.damage)


def test_what_is_unchanged_is_reused_in_its_form() -> None:
    url = new_url()
    run_steps(url, range(3), "zstd")
    assert codecs_of(url, 2, "trainer/model.still") == {"zstd"}
    run = ckptstore.open(url)
    index = run.catalog.index(run.catalog.find(2))
    rows = np.flatnonzero(index.table.tensor == index.table.tensors.find("trainer/model.still"))
    assert index.table.reuses[rows].tolist() == [2] * len(rows)
    check_all(url, 1)


@pytest.mark.parametrize(("device", "expected"), [(None, {RAW}), (1e13, {RAW}), (1e5, {"sparse+zstd"})])
def test_auto_follows_the_device(device: float | None, expected: set[str]) -> None:
    url = new_url()
    run_steps(url, range(3), "auto", device=device)
    assert codecs_of(url, 2) == expected
    check_all(url, 1)


def test_without_room_for_bases_auto_stores_in_full() -> None:
    url = new_url()
    run_steps(url, range(3), "auto", device=1e5, memory_budget=192 << 20)
    assert codecs_of(url, 2) == {"byteplane+zstd"}


def test_a_meter_counts_the_time_in_which_something_is_written() -> None:
    now = [0.0]
    meter = DeviceMeter(clock=lambda: now[0])
    with meter.busy(8 << 20):
        now[0] += 1
        with meter.busy(24 << 20):
            now[0] += 1
    now[0] += 100
    with meter.busy(0):
        now[0] += 2
    meter.settle()
    assert meter.nbytes_per_s == (32 << 20) / 4
    with meter.busy(1000):
        now[0] += 50
    meter.settle()
    assert meter.nbytes_per_s == (32 << 20) / 4


def test_show_tells_what_a_restore_reads() -> None:
    url = new_url()
    run_steps(url, range(2), "delta")
    index_table = table_of(url, 1)
    told = contents(ckptstore.open(url), url, step=1, role=None, tensors=False, names=())
    (role,) = told["roles"]
    assert role["nbytes_decoded"] == int(index_table.sizes.sum())
    assert role["nbytes_restore"] == int(index_table.nbytes.sum()) + nbytes_of_bases(index_table)
    assert role["nbytes_restore"] > role["nbytes"]


def test_what_is_no_codec_is_refused_before_anything_is_made() -> None:
    with ckptstore.begin(new_url(), {"trainer": 1}) as inc:
        with pytest.raises(InvalidInputError, match="use raw, auto, zstd"):
            Checkpointer(inc, role="trainer", rank=0, codec="gzip")
        with pytest.raises(InvalidInputError, match="rebase_every=0"):
            Checkpointer(inc, role="trainer", rank=0, codec="delta", rebase_every=0)
