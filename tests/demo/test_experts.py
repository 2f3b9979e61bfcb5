"""Expert parallelism: equal to one rank, and never a rank that leaves an exchange out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from ckptstore.demo.experts import ExpertRanks, ParallelExperts, expert_range, share
from ckptstore.demo.model import v4_config
from ckptstore.errors import InvalidInputError
from tests.demo.ranks import Ranks
from tests.demo.small import SMALL

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN = 31, 32, 16, 8, 2


def _inputs(all_to_first: bool) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(5)
    gate_up = torch.randn((EXPERTS, 2 * WIDTH, HIDDEN), generator=source) * 0.3
    down = torch.randn((EXPERTS, HIDDEN, WIDTH), generator=source) * 0.3
    hidden = torch.randn((TOKENS, HIDDEN), generator=source)
    weights = torch.rand((TOKENS, CHOSEN), generator=source)
    goal = torch.randn((TOKENS, HIDDEN), generator=source)
    chosen = torch.rand((TOKENS, EXPERTS), generator=source).argsort(dim=-1)[:, :CHOSEN]
    return gate_up, down, hidden, torch.zeros_like(chosen) if all_to_first else chosen, weights, goal


def forward_backward(rank: int, size: int, all_to_first: bool) -> tuple[Any, ...]:
    """Give this rank's output rows, input gradients and expert gradients, as numpy."""
    gate_up, down, hidden, chosen, weights, goal = _inputs(all_to_first)
    experts = ParallelExperts(
        gate_up, down, limit=10.0, ranks=ExpertRanks(rank=rank, size=size, experts=EXPERTS)
    )
    own = share(rank, size, TOKENS)
    part = slice(own.start, own.stop)
    given = hidden[part].clone().requires_grad_()
    output = experts(given, chosen[part], weights[part])
    (output * goal[part]).sum().backward()
    assert (
        given.grad is not None
        and experts.gate_up_proj.grad is not None
        and experts.down_proj.grad is not None
    )
    results = (output.detach(), given.grad, experts.gate_up_proj.grad, experts.down_proj.grad)
    return tuple(result.numpy() for result in results)


def _joined(results: list[tuple[Any, ...]]) -> list[Tensor]:
    return [torch.cat([torch.from_numpy(piece) for piece in pieces]) for pieces in zip(*results, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("all_to_first", [False, True], ids=["spread", "all to expert 0"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_on_several_ranks_are_those_of_one(ranks: Ranks, size: int, all_to_first: bool) -> None:
    """With all tokens at expert 0 the other ranks get no row at all, and must still exchange."""
    several = _joined(ranks.run(size, forward_backward, all_to_first))
    alone = _joined([forward_backward(0, 1, all_to_first)])
    for ours, expected in zip(several, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_one_rank_computes_what_transformers_does() -> None:
    gate_up, down, hidden, chosen, weights, _ = _inputs(all_to_first=False)
    theirs = DeepseekV4Experts(v4_config(SMALL))
    with torch.no_grad():
        theirs.gate_up_proj.copy_(gate_up)
        theirs.down_proj.copy_(down)
        expected = theirs(hidden, chosen, weights)
    ours = ParallelExperts(
        gate_up, down, limit=theirs.limit, ranks=ExpertRanks(rank=0, size=1, experts=EXPERTS)
    )
    torch.testing.assert_close(ours(hidden, chosen, weights), expected, rtol=1e-5, atol=1e-5)


@given(size=st.integers(1, 20), count=st.integers(0, 40))
def test_shares_tile_in_order_and_differ_by_one_at_most(size: int, count: int) -> None:
    if count < size:
        with pytest.raises(InvalidInputError):
            share(0, size, count)
        return
    parts = [share(rank, size, count) for rank in range(size)]
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_eight_experts_on_three_ranks() -> None:
    assert [len(expert_range(rank, 3, 8)) for rank in range(3)] == [3, 3, 2]
