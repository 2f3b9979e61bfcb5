"""The generated layouts are those of the models: all of the state, each element held, replicas that name each other."""

from __future__ import annotations

import pytest

from bench import moe

SMALL = [(moe.PRO, moe.PRO_256), (moe.FLASH, moe.FLASH_64)]


@pytest.mark.parametrize(("name", "parallel"), SMALL, ids=lambda value: str(value))
def test_the_ranks_of_a_layout_hold_the_whole_state_of_the_model(name: str, parallel: moe.Parallel) -> None:
    """Each replica set's first rank counts for it: the sum is the size that the table of shapes has."""
    model = moe.model(name)
    assert sum(parallel.stages) == model.layers
    total = 0
    first: set[tuple[str, tuple[int, ...]]] = set()
    for rank in range(parallel.ranks):
        ranks: set[tuple[int, ...]] = set()
        for shard in moe.shards(model, parallel, rank):
            assert not shard.replicas or rank in shard.replicas
            ranks.add(shard.replicas)
            if shard.replicas[:1] in ((), (rank,)):
                total += shard.nbytes
                box = (shard.spec.name, shard.box.offset)
                assert box not in first, "one box, one set"
                first.add(box)
        assert len(ranks) <= 3
    counted_otherwise = sum(
        param.shape[0] * (param.shape[1] * 8 if param.dtype == "int64" else 2)
        for param in model.params
        if param.dtype == "int64" or param.name.endswith("gate.bias")
    )
    assert total == model.state_nbytes + counted_otherwise


def test_stages_that_do_not_divide_are_short_at_the_ends() -> None:
    assert moe.even_stages(61, 8) == (7, 8, 8, 8, 8, 8, 7, 7)
    assert moe.even_stages(8, 4) == (2, 2, 2, 2)
