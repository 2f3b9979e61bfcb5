"""What the committer and one loading rank do with V4-Pro on 1,024 ranks: real parts, a real index, no tensor data."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench import moe
from bench.rows import Row, median_s
from ckptstore.chunktable import ChunkTable, make_table, merge_tables
from ckptstore.commit import Received, check_named, check_received
from ckptstore.cut import check_coverage
from ckptstore.index import open_index, write_index
from ckptstore.manifest import (
    AttemptId,
    Index,
    Member,
    ObjectRef,
    Part,
    PartRef,
    SegmentRef,
    part_key,
    segment_key,
)
from ckptstore.outline import outline
from ckptstore.plan.load import plan_load
from ckptstore.plan.save import plan_rank
from ckptstore.store.local import LocalStore
from ckptstore.tablefile import encode_part
from ckptstore.tensor import Box, Shard, TensorSpec, itemsize

SEGMENT_NBYTES = 2 << 30
HEADER_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The parts of one save on a local store."""

    store: LocalStore
    attempt: AttemptId
    members: tuple[Member, ...]


def save(folder: Path, model: moe.Model, parallel: moe.Parallel) -> Saved:
    """Write what every rank would after its segments: a part over the chunks of its plan."""
    store, attempt = LocalStore(root=str(folder)), AttemptId(fence=1, step=10)
    held = moe.all_shards(model, parallel)
    outlines = [outline(shards, rank=rank, size=parallel.ranks) for rank, shards in enumerate(held)]
    rng = np.random.default_rng(0)
    members = []
    for rank, shards in enumerate(held):
        member = Member(role="trainer", rank=rank)
        members.append(member)
        chunks = plan_rank(outlines, rank, shards)
        specs = [shards[chunk.shard].spec for chunk in chunks]
        sizes = [chunk.box.numel * itemsize(spec.dtype) for chunk, spec in zip(chunks, specs, strict=True)]
        keys, starts, segments = _place(attempt, member, sizes)
        part = Part(
            run="bench",
            write="0" * 16,
            id=attempt,
            member=member,
            layout="0" * 32,
            policy_version=None,
            planned=len(chunks),
            segments=segments,
            witnesses={},
            state=_state([shard.spec.name.partition("/")[2] for shard in shards]),
            nbytes_written=sum(sizes),
            nbytes_reused=0,
            refused=None,
            table=make_table(
                specs=specs,
                boxes=[chunk.box for chunk in chunks],
                segments=keys,
                starts=starts,
                nbytes=sizes,
                digests=[rng.bytes(16) for _ in chunks],
            ),
            replicas=(),
        )
        path = folder / part_key(attempt, member)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_part(part))
    return Saved(store=store, attempt=attempt, members=tuple(members))


def _state(names: Sequence[str]) -> dict[str, Any]:
    """As a member's state is stored: its experts declared, and values besides its tensors."""
    tensors = {"d": [[name, {"T": name}] for name in names]}
    return {
        "d": [
            ["model", {"x": [[["layers.*.ffn.experts.{expert}", 384]], tensors]}],
            ["lr", 1e-4],
            ["step", 10],
        ]
    }


def _place(
    attempt: AttemptId, member: Member, sizes: Sequence[int]
) -> tuple[list[str], list[int], tuple[SegmentRef, ...]]:
    keys, starts, ends = [], [], dict[str, int]()
    number, at = 0, HEADER_NBYTES
    for nbytes in sizes:
        if at + nbytes > SEGMENT_NBYTES and at > HEADER_NBYTES:
            number, at = number + 1, HEADER_NBYTES
        key = segment_key(attempt, member, f"{member.rank:016x}", number)
        keys.append(key)
        starts.append(at)
        at += nbytes
        ends[key] = at
    return keys, starts, tuple(SegmentRef(key=key, nbytes=end, header="0" * 32) for key, end in ends.items())


def commit(saved: Saved) -> tuple[ObjectRef, int, dict[str, float]]:
    """As the committer does between the last part and the journal entry; the index, its rows, seconds by step."""
    took: dict[str, float] = {}
    clock = perf_counter()

    def done(step: str) -> None:
        nonlocal clock
        took[step], clock = perf_counter() - clock, perf_counter()

    received, pool = [], dict[str, str]()
    for member in saved.members:
        key = part_key(saved.attempt, member)
        received.append(Received.of(saved.store.read(key), key, pool))
    done("parts")
    check_received(saved.attempt, "trainer", received)
    done("agree")
    table = merge_tables([each.part.table for each in received])
    done("merge")
    check_coverage(table)
    done("coverage")
    check_named(saved.attempt, "trainer", received, table)
    done("names")
    index = Index(
        run="bench",
        id=saved.attempt,
        parts=tuple(PartRef(member=each.part.member, object=each.ref) for each in received),
        segments=tuple(segment for each in received for segment in each.part.segments),
        table=table,
    )
    ref = write_index(saved.store, index)
    done("index")
    return ref, len(table), took


def load(store: LocalStore, ref: ObjectRef, shards: Sequence[Shard]) -> float:
    """Plan one rank's load from the stored index; bytes read over bytes wanted."""
    table = open_index(store, ref).table({shard.spec.name for shard in shards})
    plan = plan_load(table, shards)
    return plan.nbytes_read / plan.nbytes_wanted


def rows() -> Iterator[Row]:
    """The rows of the table, as each is measured."""
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-bench-"))
    try:
        model = moe.model(moe.PRO)
        saved = save(folder, model, moe.PRO_1024)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tries = [commit(saved) for _ in range(3)]
        ref, count, took = sorted(tries, key=lambda each: sum(each[2].values()))[1]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 2**20
        note = ", ".join(f"{step} {seconds:.2f}" for step, seconds in took.items())
        what = f"committer, V4-Pro {moe.PRO_1024}, {count:,} chunks"
        yield Row(what=what, value=sum(took.values()), unit="s", at_most=2.5, note=note)
        yield Row(what=f"{what}: memory", value=grown, unit="GiB", at_most=1.0)
        nbytes = sum(
            os.path.getsize(path) for path in (folder / ref.key).parent.glob(f"{Path(ref.key).stem}*")
        )
        yield Row(what=f"{what}: index", value=nbytes / 1e6, unit="MB", at_most=20.0)
        for parallel in (moe.PRO_768, moe.PRO_256):
            shards = moe.shards(model, parallel, 100)
            taken = median_s(partial(load, saved.store, ref, shards))
            label = f"one rank's load plan, {moe.PRO_1024} → {parallel}"
            yield Row(
                what=label,
                value=taken,
                unit="s",
                at_most=0.15,
                note=f"{len(shards):,} boxes, read/wanted {load(saved.store, ref, shards):.4f}",
            )
    finally:
        shutil.rmtree(folder)
    yield from _read_over_wanted()
    yield _whole_tensors()


def _read_over_wanted() -> Iterator[Row]:
    """Bytes read over bytes wanted by the ranks of one stage after a change of one degree."""
    base = moe.PRO_256
    changes = [
        ("EP32 → EP64", base, replace(base, ranks=512, ep=64), 1.01),
        ("TP8 → TP4", base, replace(base, tp=4), 1.01),
        ("EP32 → EP16", base, replace(base, ep=16), None),
        ("TP4 → TP8", replace(base, tp=4), base, None),
    ]
    model = moe.model(moe.PRO)
    for what, stored, wanted, at_most in changes:
        read, needed = 0, 0
        table = _stage_table(model, stored)
        first = wanted.per_stage
        for rank in range(first, first + wanted.per_stage, max(wanted.per_stage // 8, 1)):
            plan = plan_load(table, moe.shards(model, wanted, rank))
            read, needed = read + plan.nbytes_read, needed + plan.nbytes_wanted
        yield Row(
            what=f"bytes read over bytes wanted, {what}", value=read / needed, unit="×", at_most=at_most
        )


def _stage_table(model: moe.Model, parallel: moe.Parallel) -> ChunkTable:
    """The chunks that the ranks of the second stage write, in segments as they write them."""
    ranks = range(parallel.per_stage, 2 * parallel.per_stage)
    held = {rank: moe.shards(model, parallel, rank) for rank in ranks}
    none = outline((), rank=0, size=parallel.ranks)
    outlines = [
        outline(held[rank], rank=rank, size=parallel.ranks) if rank in held else none
        for rank in range(parallel.ranks)
    ]
    tables = []
    for rank in ranks:
        chunks = plan_rank(outlines, rank, held[rank])
        specs = [held[rank][chunk.shard].spec for chunk in chunks]
        sizes = [chunk.box.numel * itemsize(spec.dtype) for chunk, spec in zip(chunks, specs, strict=True)]
        keys, starts, _ = _place(AttemptId(fence=1, step=1), Member(role="trainer", rank=rank), sizes)
        tables.append(
            make_table(
                specs=specs,
                boxes=[chunk.box for chunk in chunks],
                segments=keys,
                starts=starts,
                nbytes=sizes,
                digests=[bytes(16)] * len(chunks),
            )
        )
    return merge_tables(tables)


def _whole_tensors(count: int = 20_000) -> Row:
    specs = [TensorSpec(name=f"trainer/w{n:05}", dtype="float32", shape=(128, 128)) for n in range(count)]
    shards = [Shard(spec=spec, box=Box.whole(spec.shape)) for spec in specs]
    nbytes = [spec.nbytes for spec in specs]
    table = make_table(
        specs=specs,
        boxes=[shard.box for shard in shards],
        segments=["segment"] * count,
        starts=[specs[0].nbytes * n for n in range(count)],
        nbytes=nbytes,
        digests=[bytes(16)] * count,
    )
    return Row(
        what=f"load plan of {count:,} whole tensors",
        value=median_s(lambda: plan_load(table, shards)),
        unit="s",
    )
