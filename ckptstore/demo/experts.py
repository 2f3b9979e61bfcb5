"""Expert parallelism: each rank holds a slice of the stacked experts, and tokens travel to them.

Apart from the model because this is the only place where forward and backward talk to other ranks.
Every rank must make the same calls in the same order, so an expert without rows is computed all
the same: were it skipped, a rank without any row would leave the exchange of the backward pass out
and its peers would wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ckptstore.errors import InvalidInputError


def share(rank: int, size: int, count: int) -> range:
    """Give rank's part of `count` things in order; the first ranks get one more when uneven."""
    if not 0 <= rank < size <= count:
        raise InvalidInputError(
            f"rank {rank} of {size} cannot share {count} items; use at most {count} ranks",
            rank=rank,
            size=size,
            count=count,
        )
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def expert_range(rank: int, size: int, experts: int) -> range:
    """Give the global numbers of the experts that a rank holds: 8 experts on 3 ranks are 3, 3 and 2."""
    return share(rank, size, experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """One rank's place among the ranks that share the experts; `group` None is the default group."""

    rank: int
    size: int
    experts: int
    group: dist.ProcessGroup | None = None

    @property
    def local(self) -> range:
        return expert_range(self.rank, self.size, self.experts)

    def gather(self, counts: Tensor) -> Tensor:
        """Collect every rank's int64 [experts] as [size, experts]. Collective."""
        if self.size == 1:
            return counts.unsqueeze(0)
        everyone = counts.new_empty((self.size, self.experts))
        dist.all_gather(list(everyone), counts, group=self.group)
        return everyone

    def sum_(self, values: Tensor) -> Tensor:
        """Add up `values` over all ranks in place; bitwise equal on all of them. Collective."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values


class Exchange(torch.autograd.Function):
    """Send row blocks to ranks and receive theirs; the backward pass is the same with splits swapped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        arrived = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        returned = gradient.new_empty((sum(ctx.send), *gradient.shape[1:]))
        dist.all_to_all_single(returned, gradient.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return returned, None, None, None


# oneDNN compiles a kernel for each number of rows, and an expert's changes at every call: rows are filled up
# with zeros to a multiple of this, so that the kernels of the first steps serve for all (half the time a step).
ROWS_ALIGN = 64


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send `send[r]` consecutive rows to each rank r and receive `receive[r]` from it. Collective."""
    arrived: Tensor = Exchange.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]  # torch's Function has no types
    return arrived


class ParallelExperts(nn.Module):
    """The routed experts of one layer, with this rank's slice of the stacked weights.

    Stands in for transformers' stacked experts: same parameter names, same call, same result.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, *, limit: float, ranks: ExpertRanks) -> None:
        """Keep copies of rows `ranks.local` of the weights [E, 2·width, hidden] and [E, hidden, width]."""
        super().__init__()
        local = slice(ranks.local.start, ranks.local.stop)
        self.gate_up_proj = nn.Parameter(gate_up[local].detach().clone())
        self.down_proj = nn.Parameter(down[local].detach().clone())
        self.limit = limit
        self.ranks = ranks

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Mix the chosen experts' outputs: hidden [N, H], chosen and weights [N, k] -> [N, H]. Collective."""
        per_token = chosen.shape[1]
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        rows = hidden[order // per_token]  # sorted by expert, hence by rank
        everyone = self.ranks.gather(torch.bincount(flat, minlength=self.ranks.experts))
        results = self._travel(rows, everyone)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        picked = results[back].view(*chosen.shape, hidden.shape[1])
        return (picked * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)

    def _travel(self, rows: Tensor, everyone: Tensor) -> Tensor:
        """Take rows to their experts and the results home, in the order of `rows`."""
        ranks = self.ranks
        local = ranks.local
        arriving = everyone[:, local.start : local.stop]  # [size, local experts]
        totals = arriving.sum(dim=0).tolist()
        if ranks.size == 1:
            return self._run(rows, totals)
        send = [
            int(everyone[ranks.rank, part.start : part.stop].sum())
            for part in (expert_range(rank, ranks.size, ranks.experts) for rank in range(ranks.size))
        ]
        receive = arriving.sum(dim=1).tolist()
        arrived = exchange(rows, send, receive, ranks.group)
        numbers = torch.arange(len(local)).repeat(ranks.size).repeat_interleave(arriving.reshape(-1))
        order = torch.argsort(numbers, stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return exchange(self._run(arrived[order], totals)[back], receive, send, ranks.group)

    def _run(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Run local experts on their consecutive rows; also on none, see the module's docstring."""
        outputs = []
        for expert, own in enumerate(torch.split(rows, counts)):
            part = functional.pad(own, (0, 0, 0, -len(own) % ROWS_ALIGN))
            gate, up = functional.linear(part, self.gate_up_proj[expert]).chunk(2, dim=-1)
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
            output = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            outputs.append(output[: len(own)])
        return torch.cat(outputs)
