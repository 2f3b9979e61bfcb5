"""The layouts that training stacks use: all ranks of a stage write about equally much, and everything once."""

from __future__ import annotations

import pytest

from bench import moe
from ckptstore.outline import outline
from ckptstore.plan.save import fair_shares, plan_rank
from ckptstore.tensor import itemsize


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel", "stage"),
    [
        (moe.FLASH, moe.FLASH_64, 2),
        (moe.FLASH, moe.FLASH_PP4, 3),
        (moe.PRO, moe.PRO_1024, 7),
        (moe.PRO, moe.PRO_UNEVEN, 3),
    ],
    ids=str,
)
def test_no_rank_writes_more_than_a_hundredth_above_the_mean_of_its_stage(
    name: str, parallel: moe.Parallel, stage: int
) -> None:
    """No set reaches over stages, so a stage is planned as it is within the whole."""
    model, first = moe.model(name), stage * parallel.per_stage
    ranks = range(first, first + parallel.per_stage)
    held = {rank: moe.shards(model, parallel, rank) for rank in ranks}
    none = outline((), rank=0, size=parallel.ranks)
    outlines = [
        outline(held[rank], rank=rank, size=parallel.ranks) if rank in held else none
        for rank in range(parallel.ranks)
    ]
    loads = fair_shares(outlines).loads
    written = [
        sum(
            chunk.box.numel * itemsize(held[rank][chunk.shard].spec.dtype)
            for chunk in plan_rank(outlines, rank, held[rank])
        )
        for rank in ranks
    ]
    assert sum(written) == sum(loads)
    assert max(written) <= 1.01 * sum(written) / len(written)
