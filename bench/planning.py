"""How long one rank plans a save of DeepSeek-V4, and how evenly all ranks write. No tensor data is made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from bench import moe
from bench.rows import Row, median_s
from ckptstore.exchange import Agreed, Plans
from ckptstore.outline import Outline, _expand, find_disputes, layout_digest, outline, unequal_empties
from ckptstore.plan.save import PlannedChunk, _cut, fair_shares, plan_rank
from ckptstore.state import Structure, TensorLeaf
from ckptstore.tensor import Shard

ROLE = "trainer"


def cold(texts: Sequence[str], rank: int, shards: Sequence[Shard]) -> tuple[PlannedChunk, ...]:
    """All that a rank does once it has read the outlines of all, and before it writes its chunks."""
    _expand.cache_clear()
    _cut.cache_clear()
    size = len(texts)
    outline(shards, rank=rank, size=size)
    outlines = [Outline.from_json(json.loads(text), rank=n, size=size) for n, text in enumerate(texts)]
    if find_disputes(outlines) or unequal_empties(outlines):
        raise ValueError("the generated layout contradicts itself")
    layout_digest(ROLE, outlines)
    return plan_rank(outlines, rank, shards)


def texts_of(name: str, parallel: moe.Parallel) -> list[str]:
    """The outline of every rank as it is read from the store."""
    model = moe.model(name)
    return [
        json.dumps(outline(shards, rank=rank, size=parallel.ranks).to_json())
        for rank, shards in enumerate(moe.all_shards(model, parallel))
    ]


def leaves_of(shards: Sequence[Shard]) -> list[TensorLeaf]:
    """As `flatten` gives them, again and again with the same specs and boxes."""
    return [
        TensorLeaf(spec=s.spec, box=s.box, data=None, replicas=s.replicas or None, frozen=False)
        for s in shards
    ]


def lookup_s(shards: Sequence[Shard]) -> float:
    """Seconds to find a plan by the structure of a state that was flattened before."""
    leaves, plans = leaves_of(shards), Plans()
    plans.keep(Structure.of(leaves), Agreed(layout="", chunks=()))
    return median_s(lambda: plans.find(Structure.of(leaves)), times=21)


def copies(shards: Sequence[Shard], count: int) -> list[Shard]:
    """The shards `count` times, under other names."""
    return [
        replace(shard, spec=replace(shard.spec, name=f"{shard.spec.name}.{n}"))
        for n in range(count)
        for shard in shards
    ]


def balance(name: str, parallel: moe.Parallel) -> tuple[float, float]:
    """The largest rank's bytes over the largest stage's mean, and over the mean of all ranks."""
    model = moe.model(name)
    per_stage, stages = parallel.per_stage, len(parallel.stages)
    held = moe.all_shards(model, parallel)
    outlines = [outline(shards, rank=rank, size=parallel.ranks) for rank, shards in enumerate(held)]
    written = [
        sum(chunk.box.numel * _itemsize(shards[chunk.shard]) for chunk in plan_rank(outlines, rank, shards))
        for rank, shards in enumerate(held)
    ]
    loads = fair_shares(outlines).loads
    if sum(written) != sum(loads):
        raise ValueError(f"{sum(written)} bytes are planned where the ranks hold {sum(loads)}")
    means = [sum(loads[n * per_stage : (n + 1) * per_stage]) / per_stage for n in range(stages)]
    return max(written) / max(means), max(written) / (sum(written) / len(written))


def _itemsize(shard: Shard) -> int:
    return shard.nbytes // shard.box.numel


def rows() -> Iterator[Row]:
    """The rows of the table, as each is measured."""
    name, parallel, rank = moe.PRO, moe.PRO_1024, 300
    texts = texts_of(name, parallel)
    shards = moe.shards(moe.model(name), parallel, rank)
    many = copies(shards, -(-20_000 // len(shards)))
    base = median_s(lambda: cold(texts, rank, shards))
    what = f"one rank's save plan, V4-Pro {parallel}"
    yield Row(what=f"{what}, cold", value=base, unit="s", at_most=0.3, note=f"{len(shards):,} shards")
    for some in (shards, many[:20_000]):
        most = 1e-3 if len(some) < 2000 else 3e-3
        yield Row(what=f"{what}, cached, {len(some):,} tensors", value=lookup_s(some), unit="s", at_most=most)
    yield from _growth(base, texts, rank, shards)
    for model, each in moe.LAYOUTS:
        largest, plain = balance(model, each)
        label = f"balance, {model.removeprefix('DeepSeek-')} {each}, stages {'/'.join(map(str, each.stages))}"
        yield Row(
            what=label,
            value=largest,
            unit="× largest stage's mean",
            at_most=1.01,
            note=f"{plain:.3f} × plain mean",
        )


def _growth(base: float, texts: Sequence[str], rank: int, shards: Sequence[Shard]) -> Iterator[Row]:
    for factor in (2, 4):
        more = copies(shards, factor)
        grown = grown_texts(texts, rank, more)
        taken = median_s(partial(cold, grown, rank, more))
        yield Row(what=f"… with {factor} × the tensors", value=taken / base, unit=f"× (linear: {factor})")
    few = moe.Parallel(ranks=256, tp=1, stages=moe.PRO_1024.stages, ep=32)
    least = None
    for factor in (1, 2, 4):
        each = replace(few, ranks=few.ranks * factor)
        some = moe.shards(moe.model(moe.PRO), each, 100)
        taken = median_s(partial(cold, texts_of(moe.PRO, each), 100, some))
        least = least or taken
        if factor > 1:
            what = f"… with {factor} × the ranks ({few.ranks} to {each.ranks}, EP32)"
            yield Row(what=what, value=taken / least, unit=f"× (linear: {factor})")


def grown_texts(texts: Sequence[str], rank: int, shards: Sequence[Shard]) -> list[str]:
    """The outlines as they are when all members of `rank`'s sets hold what its `shards` are now."""
    mine = {str(each[0]): each for each in outline(shards, rank=rank, size=len(texts)).to_json()["sets"]}
    grown = []
    for text in texts:
        value = json.loads(text)
        value["sets"] = [mine.get(str(each[0]), each) for each in value["sets"]]
        grown.append(json.dumps(value))
    return grown
